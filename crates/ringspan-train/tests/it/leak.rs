//! Packed documents never see each other, wherever ranks cut the sequence.

use crate::common::tiny_config;
use ringspan::{
    Group, Kernel, Layout, StrategyKind,
    comm::threads::{self, Options},
};
use ringspan_candle::context::Context;
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_models::{Config, Decoder};
use ringspan_train::data::{Batch, DocumentStore, IGNORE, PackableSpans, Packer};
use std::sync::Arc;

const LENGTHS: [usize; 4] = [13, 29, 1, 21];

fn batch(change: Option<usize>) -> Batch {
    let mut documents: Vec<Vec<u32>> =
        LENGTHS.iter().enumerate().map(|(d, &n)| (0..n).map(|i| (7 * i + 31 * d) as u32 % 250).collect()).collect();
    if let Some(index) = change {
        documents[1][index] = 255;
    }
    let store = DocumentStore::new(&documents);
    Batch::new(&Packer::pack_once(&store, &PackableSpans::for_text(&store), 64, usize::MAX), 64)
}

/// Log-probabilities of all targets of the batch, in the batch's order.
fn log_probs(batch: &Batch, layout: &str, ring: usize, ulysses: usize) -> Vec<f32> {
    let decoder = Decoder::new(serde_json::from_value::<Config>(tiny_config()).unwrap()).unwrap();
    let weights = ringspan_candle::model::stored(decoder.init(5).unwrap());
    let ranks = ring * ulysses;
    let layout = Arc::new(Layout::new(layout.parse().unwrap(), &batch.documents().unwrap(), ranks).unwrap());
    let parts = threads::run(ranks, Options::default(), |world| {
        let rank = world.rank();
        let group = Arc::new(Group::new(world, (ring, ulysses), Kernel::new(1))?);
        let context = Context::new(group, layout.clone(), StrategyKind::Ring)?;
        let tokens = layout.shard(rank, &batch.tokens, 1)?;
        let targets = layout.shard(rank, &batch.targets, 1)?;
        let hidden = ringspan_train::hidden_states(&decoder, &weights, &tokens, &context).unwrap();
        let hidden = decoder.norm(&weights, &hidden).unwrap();
        Ok::<_, ringspan_train::Error>(decoder.model().head().log_probs(
            &hidden,
            &targets,
            &weights,
            &NO_TENSOR_PARALLEL,
        )?)
    })
    .unwrap();
    let mut global = vec![0.0; batch.tokens.len()];
    for (rank, part) in parts.iter().enumerate() {
        layout.unshard(rank, part, 1, &mut global).unwrap();
    }
    global
}

#[test]
fn a_changed_token_moves_only_its_own_documents_later_predictions() {
    let changed = 9;
    let (before, after) = (batch(None), batch(Some(changed)));
    let start = LENGTHS[0];
    for (ring, ulysses) in [(1, 1), (2, 1), (3, 1), (2, 2), (1, 4)] {
        for layout in ["contiguous", "zigzag", "striped:1", "per-document-zigzag"] {
            let a = log_probs(&before, layout, ring, ulysses);
            let b = log_probs(&after, layout, ring, ulysses);
            for i in 0..before.tokens.len() {
                let in_document = (start..start + LENGTHS[1]).contains(&i);
                // The token before the changed one has another target; the tokens from it on have another past.
                let moves = in_document && i + 1 >= start + changed && before.targets[i] != IGNORE;
                assert_eq!(
                    a[i].to_bits() != b[i].to_bits(),
                    moves,
                    "{layout}, ring {ring}, ulysses {ulysses}, token {i}"
                );
            }
        }
    }
}
