//! The plan of one rank for a step: the tokens that it computes, and how they attend.

use super::decode_batch::DecodeBatch;
use super::layer_kind::{LayerKind, PerKind};
use super::page_map::PageMap;
use super::prefill_batch::PrefillBatch;
use crate::error::{Error, Result};
use crate::step::{Outputs, Step, StepSequence};
use ringspan_candle::AdapterSelection;

/// The rows that a rank computes in a step: its share of the chunks' tokens, then the new tokens of all decoding sequences.
pub(super) struct StepPlan {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<usize>,
    /// The adapter that each row asks for.
    pub(super) adapters: AdapterSelection,
    /// Number of rows that are tokens of chunks.
    pub(super) chunk_rows: usize,
    /// Whether context-parallel ranks, which all have the rows of this step, share linear layers.
    pub(super) shares_layers: bool,
    /// Attention in layers of each kind; `None` for a kind that this rank's part of the model has not.
    attention: PerKind<Option<AttentionPlan>>,
    /// For each hidden state that rank 0 needs, in the order of sequences and tokens, a rank that has it and its row there.
    pub(super) outputs: Vec<(usize, usize)>,
}

/// How tokens attend in layers of one kind.
pub(super) struct AttentionPlan {
    pub(super) prefill_batch: Option<PrefillBatch>,
    pub(super) decode_batch: Option<DecodeBatch>,
}

impl AttentionPlan {
    fn new(map: &PageMap, chunked: &[&StepSequence], decoded: &[&StepSequence], kind: LayerKind) -> Result<Self> {
        let prefill_batch = if chunked.is_empty() { None } else { Some(PrefillBatch::new(map, chunked, kind)?) };
        Ok(Self { prefill_batch, decode_batch: (!decoded.is_empty()).then(|| DecodeBatch::new(map, decoded, kind)) })
    }
}

impl StepPlan {
    /// The plan of a rank whose layers are of these kinds. The step must have passed
    /// [`PagedCache::check`](super::cache::PagedCache::check).
    pub(super) fn new(map: &PageMap, step: &Step, kinds: PerKind<bool>) -> Result<Self> {
        let (chunked, decoded): (Vec<_>, Vec<_>) =
            step.sequences.iter().partition(|sequence| sequence.is_distributed());
        let of_kind = |has: bool, kind| match has {
            true => AttentionPlan::new(map, &chunked, &decoded, kind).map(Some),
            false => Ok(None),
        };
        let attention =
            PerKind { full: of_kind(kinds.full, LayerKind::Full)?, window: of_kind(kinds.window, LayerKind::Window)? };
        // Which tokens a rank computes does not depend on the kind of a layer.
        let prefills =
            [&attention.full, &attention.window].into_iter().flatten().find_map(|kind| kind.prefill_batch.as_ref());
        let (mut tokens, mut positions, mut adapters) = (Vec::new(), Vec::new(), Vec::new());
        for run in prefills.iter().flat_map(|prefills| prefills.layout().runs(map.rank)) {
            let StepSequence { start, tokens: new, adapter, .. } = chunked[run.document];
            adapters.resize(adapters.len() + run.len, *adapter);
            tokens.extend(run.positions().map(|position| new[position - start]));
            positions.extend(run.positions());
        }
        let chunk_rows = tokens.len();
        for sequence in &decoded {
            adapters.resize(adapters.len() + sequence.tokens.len(), sequence.adapter);
            tokens.extend(&sequence.tokens);
            positions.extend(sequence.start..sequence.start + sequence.tokens.len());
        }
        let outputs = outputs(step, prefills, map.ranks);
        let shares_layers = step.shares_layers && chunked.is_empty();
        let adapters = AdapterSelection::new(adapters);
        Ok(Self { tokens, positions, adapters, chunk_rows, shares_layers, attention, outputs })
    }

    /// How the tokens attend in layers of a kind.
    pub(super) fn attention(&self, kind: LayerKind) -> Result<&AttentionPlan> {
        let missing = || Error::Step(format!("no layer of this rank was of the kind {kind:?}"));
        self.attention.of(kind).as_ref().ok_or_else(missing)
    }
}

/// For each hidden state that rank 0 needs, a rank that has it and its row there.
fn outputs(step: &Step, prefills: Option<&PrefillBatch>, ranks: usize) -> Vec<(usize, usize)> {
    // For each chunk, the rank and row of each of its new tokens.
    let chunked = || step.sequences.iter().filter(|sequence| sequence.is_distributed());
    let mut places: Vec<Vec<(usize, usize)>> = chunked().map(|sequence| vec![(0, 0); sequence.tokens.len()]).collect();
    let starts: Vec<usize> = chunked().map(|sequence| sequence.start).collect();
    let mut first_decode = 0;
    for (rank, layout) in (0..ranks).filter_map(|rank| Some((rank, prefills?.layout()))) {
        let mut row = 0;
        for run in layout.runs(rank) {
            for position in run.positions() {
                places[run.document][position - starts[run.document]] = (rank, row);
                row += 1;
            }
        }
        if rank == 0 {
            first_decode = row;
        }
    }
    let (mut places, mut decodes, mut outputs) = (places.into_iter(), first_decode.., Vec::new());
    for sequence in &step.sequences {
        let of_sequence = match sequence.is_distributed() {
            true => places.next().unwrap_or_default(),
            false => decodes.by_ref().take(sequence.tokens.len()).map(|row| (0, row)).collect(),
        };
        match sequence.outputs {
            Outputs::None => {}
            Outputs::Last => outputs.extend(of_sequence.last()),
            Outputs::All => outputs.extend(of_sequence),
        }
    }
    outputs
}
