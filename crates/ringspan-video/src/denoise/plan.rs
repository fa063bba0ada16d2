//! The plan of a denoising run, computed from shapes alone: tokens of each rank, heads, bytes sent, memory of weights.

use super::feature_cache::ChangeEstimate;
use super::grid_cost::{GridAlternative, GridCost};
use super::memory::RunSizes;
use super::{DenoiseFolder, DenoiseInputs, DenoiseSettings};
use crate::bytes_text::bytes_text;
use crate::error::{Error, Result};
use crate::ranks::VideoMesh;
use ringspan::mesh::Grid;
use ringspan::schedule::HeadShare;
use ringspan::{Documents, Layout, LayoutKind};
use std::fmt;

/// The plan of a run.
#[derive(Debug, Clone)]
pub struct DenoisePlan {
    mesh: String,
    settings: DenoiseSettings,
    /// How the change of the output is estimated, and in how many steps blocks may be skipped, if they may be at all.
    cache: Option<(ChangeEstimate, usize)>,
    /// Steps that each transformer computes.
    steps: Vec<usize>,
    latents: Vec<usize>,
    tokens: usize,
    /// Tokens of each rank of a branch.
    of_ranks: Vec<usize>,
    /// Heads of each Ulysses rank.
    heads: Vec<usize>,
    /// Other ring and Ulysses sizes of as many ranks, if their attention costs clearly less.
    alternative: Option<GridAlternative>,
    /// Bytes that the busiest rank sends in a step.
    bytes: u64,
    /// Bytes that the busiest rank sends in a step beside attention.
    gathered: u64,
    /// Bytes that rank 0 sends in a step to tell the others whether blocks are skipped.
    decision: u64,
    /// Bytes of each transformer's weights.
    weights: Vec<u64>,
    /// What a process holds and sends of them where ranks shard them.
    sharded: Option<ShardedBytes>,
    /// Bytes that the fullest rank holds beside weights.
    activations: u64,
    /// Floating-point operations of all ranks in each step of a transformer.
    operations: Vec<f64>,
    /// Ranks of this machine.
    local: usize,
    /// Whether each of them is a process of its own.
    has_processes: bool,
}

/// Bytes of the number by which rank 0 tells another rank whether blocks are skipped.
const DECISION_BYTES: u64 = 4;

/// Bytes of weights that ranks shard.
#[derive(Debug, Clone, Copy)]
struct ShardedBytes {
    /// What the rank with most holds of the larger transformer.
    share: u64,
    /// The largest unit, and what the rank receives of the next one meanwhile.
    unit: u64,
    /// What the busiest rank sends in a step, and once more for the prompts where a transformer begins.
    sent: u64,
}

impl ShardedBytes {
    fn new(folder: &DenoiseFolder, mesh: &VideoMesh) -> Self {
        let mut most = Self { share: 0, unit: 0, sent: 0 };
        for stage in 0..folder.stages() {
            let (shares, adapters) = folder.shares(stage, mesh.size());
            most.share = most.share.max(shares.most() + adapters);
            most.unit = most.unit.max(shares.gathered());
            most.sent = most.sent.max(shares.most() * (mesh.size() as u64 - 1));
        }
        most
    }
}

impl DenoisePlan {
    /// The plan of a run. Nothing is computed and no weight is read.
    ///
    /// # Errors
    /// As for [`denoise`](super::denoise), before it begins.
    pub fn new(
        folder: &DenoiseFolder,
        mesh: &VideoMesh,
        inputs: &DenoiseInputs,
        settings: &DenoiseSettings,
    ) -> Result<Self> {
        inputs.check(folder)?;
        settings.check(folder, mesh, inputs)?;
        let (config, grid, batch) = (folder.transformer(0).config(), inputs.grid(folder)?, inputs.batch());
        let of_mesh = Grid::new(mesh.ring, mesh.ulysses);
        let heads = config.num_attention_heads;
        let shares = HeadShare::all(heads, heads, of_mesh)?;
        let documents = Documents::batch(batch, grid.tokens());
        let layout = Layout::new(LayoutKind::Contiguous, &documents, mesh.branch_size())?;
        let steps = settings.steps_of(folder)?;
        let blocks = config.num_layers + config.vace_layers.as_ref().map_or(0, Vec::len);
        let is_guided = (0..folder.stages()).any(|stage| settings.is_guided(stage));
        let branches = if is_guided && !mesh.cfg_parallel { 2 } else { 1 };
        let weights = folder.weight_type();
        let cost = GridCost::new(config, weights, batch, grid.tokens(), of_mesh)?;
        let all = GridCost::all(config, weights, batch, grid.tokens(), mesh.branch_size())?;
        let of_ranks: Vec<usize> = (0..layout.ranks()).map(|rank| layout.tokens(rank)).collect();
        let heads: Vec<usize> = shares.iter().map(|share| share.query.len()).collect();
        let most = |numbers: &[usize]| numbers.iter().copied().max().unwrap_or(0) as u64;
        let images = inputs.image_embeds.as_ref().map_or(0, |image| image.elem_count() / config.image_dim.unwrap_or(1));
        let sizes = RunSizes {
            grid: of_mesh,
            threads: mesh.threads as u64,
            processes: mesh.processes.local().is_some(),
            tokens: most(&of_ranks),
            heads: most(&heads),
            all_tokens: (batch * grid.tokens()) as u64,
            batch: batch as u64,
            embeds: (inputs.prompt_embeds.dim(1)? + images / batch) as u64,
            branches: branches as u64,
            interleaved: if mesh.shard_weights { branches as u64 } else { 1 },
            caches: settings.cache_threshold > 0.0,
        };
        let guided = |stage: usize| if settings.is_guided(stage) { 2.0 } else { 1.0 };
        let operations = |stage: usize| guided(stage) * sizes.operations(folder.transformer(stage).config());
        Ok(Self {
            mesh: mesh.to_string(),
            settings: *settings,
            cache: match settings.cache_threshold > 0.0 {
                true => Some((ChangeEstimate::of(config, folder.stages()), settings.skippable(folder)?)),
                false => None,
            },
            steps,
            latents: inputs.latents.dims().to_vec(),
            tokens: grid.tokens(),
            of_ranks,
            heads,
            alternative: cost.alternative(&all),
            bytes: cost.bytes * (blocks * branches) as u64,
            gathered: sizes.gathered(config, mesh.cfg_parallel),
            decision: if settings.cache_threshold > 0.0 { DECISION_BYTES * (mesh.size() as u64 - 1) } else { 0 },
            weights: (0..folder.stages()).map(|stage| folder.bytes(stage)).collect(),
            sharded: mesh.shard_weights.then(|| ShardedBytes::new(folder, mesh)),
            activations: sizes.activations(config, weights),
            operations: (0..folder.stages()).map(operations).collect(),
            local: mesh.processes.local().unwrap_or(mesh.size()),
            has_processes: mesh.processes.local().is_some(),
        })
    }

    /// Bytes that the busiest rank sends in a step: in attention, for the velocity, to decide whether blocks are skipped, and of weights
    /// where ranks shard them.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.bytes + self.gathered + self.decision + self.sharded.map_or(0, |sharded| sharded.sent)
    }

    /// Bytes of the largest transformer's weights in the memory of a process: all of them, or where ranks shard them the largest share and
    /// the largest unit, which is gathered to compute with it, with what is received of the next one.
    #[must_use]
    pub fn most_weights(&self) -> u64 {
        let all = self.weights.iter().copied().max().unwrap_or(0);
        self.sharded.map_or(all, |ShardedBytes { share, unit, .. }| share + unit)
    }

    /// Bytes that the fullest rank holds beside weights.
    #[must_use]
    pub fn activations(&self) -> u64 {
        self.activations
    }

    /// Bytes on this machine: weights once for each process, and the activations of its ranks.
    #[must_use]
    pub fn machine_bytes(&self) -> u64 {
        self.most_weights() * self.local_processes() as u64 + self.activations * self.local as u64
    }

    /// Processes of this machine, each of which has the weights.
    pub(crate) fn local_processes(&self) -> usize {
        if self.has_processes { self.local } else { 1 }
    }

    /// Floating-point operations of all steps, over all ranks, if no blocks are skipped.
    #[must_use]
    pub fn operations(&self) -> f64 {
        self.steps.iter().zip(&self.operations).map(|(steps, operations)| *steps as f64 * operations).sum()
    }

    /// Refuses a run that does not fit into `free` bytes of this machine's memory.
    ///
    /// # Errors
    /// The numbers of a run that does not.
    pub fn check_free(&self, free: u64) -> Result<()> {
        let needed = self.machine_bytes();
        if needed <= free {
            return Ok(());
        }
        Err(Error::Input(format!(
            "this needs about {} of memory (weights {}, {} ranks here of up to {}), and {} are free; weights in bf16 take half of \
             those in f32, with ranks on more machines each machine has fewer tokens, and with --shard-weights fewer weights",
            bytes_text(needed),
            bytes_text(self.most_weights()),
            self.local,
            bytes_text(self.activations),
            bytes_text(free)
        )))
    }

    /// Refuses a run whose activations on a rank exceed a limit, if there is one.
    ///
    /// # Errors
    /// The numbers of a run that does.
    pub fn check_memory(&self, limit: Option<u64>) -> Result<()> {
        match limit.filter(|limit| self.activations > *limit) {
            Some(limit) => Err(Error::Input(format!(
                "{limit} bytes of memory a rank are too few: denoising needs {} for {} tokens; more ranks have fewer tokens each",
                self.activations,
                self.of_ranks.iter().max().copied().unwrap_or(0)
            ))),
            None => Ok(()),
        }
    }

    /// Bytes that attention of the busiest rank sends in a step whose blocks are computed.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Display for DenoisePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |numbers: &[usize]| {
            let (least, most) =
                (numbers.iter().min().copied().unwrap_or(0), numbers.iter().max().copied().unwrap_or(0));
            if least == most { most.to_string() } else { format!("{least} to {most}") }
        };
        let scheduler = self.settings.scheduler;
        writeln!(f, "mesh      {}", self.mesh)?;
        writeln!(f, "latents   {:?}: {} tokens a video, {} a rank", self.latents, self.tokens, list(&self.of_ranks))?;
        writeln!(f, "heads     {} a Ulysses rank", list(&self.heads))?;
        if let Some(alternative) = &self.alternative {
            writeln!(f, "          {alternative}")?;
        }
        writeln!(f, "schedule  {} steps of {}, shift {}", self.settings.steps, scheduler.kind, scheduler.shift)?;
        for (stage, (steps, bytes)) in self.steps.iter().zip(&self.weights).enumerate() {
            let guidance = self.settings.guidance[stage];
            writeln!(f, "weights   {bytes} bytes, {steps} steps with guidance {guidance}")?;
        }
        if let Some((estimate, steps)) = self.cache {
            let of = estimate.model.map_or("the relative change of the time step's embedding".into(), |model| {
                format!("the change that is known of {model}")
            });
            let threshold = self.settings.cache_threshold;
            writeln!(f, "cache     blocks are skipped in up to {steps} steps, while {of} is below {threshold}")?;
        }
        if let Some(ShardedBytes { share, unit, sent }) = self.sharded {
            let (share, unit, sent) = (bytes_text(share), bytes_text(unit), bytes_text(sent));
            writeln!(
                f,
                "sharded   a rank holds {share} of the weights, and {unit} while it computes; it sends {sent} a step"
            )?;
        }
        write!(
            f,
            "sent      up to {} bytes a rank and step in attention, {} for the velocity",
            self.bytes, self.gathered
        )?;
        match self.decision {
            0 => writeln!(f)?,
            bytes => writeln!(f, ", {bytes} to decide whether blocks are skipped")?,
        }
        writeln!(
            f,
            "memory    activations up to {} a rank, weights {}",
            bytes_text(self.activations),
            bytes_text(self.most_weights())
        )?;
        let most = if self.cache.is_some() { "at most " } else { "" };
        write!(f, "work      {most}{:.3e} floating-point operations in all steps", self.operations())
    }
}
