//! The plan of a run: its steps, memory and traffic in numbers, computed before the run begins.

mod cpu_memory;
mod descriptions;
mod display;
mod experts;
mod gpu_memory;
mod parameter_counts;
mod rank_sizes;
mod suggestion;
#[cfg(test)]
mod test;

use crate::{
    config::{RouterLossScope, TrainConfig},
    data::Batch,
    error::Result,
    human_readable::bytes_text,
    spec::RunSpec,
};
use rank_sizes::Shape;
use ringspan::{Layout, Schedule};
use ringspan_candle::{DeviceName, Recompute, gpu_memory::GpuMemoryUse};
use ringspan_models::Decoder;
use suggestion::{MemoryKind, Workload};

/// Rings up to this size are drawn step by step; larger drawings hide the rest of the plan.
const DRAWN_RING: usize = 4;

/// The plan of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// The parameters that are trained, in words: the model's, or those of adapters, with their number.
    pub training: String,
    /// The model, in words.
    pub model: String,
    /// Why the model may fail on sequences of this length, in words; empty if nothing speaks against it.
    pub warning: String,
    /// The data, in words.
    pub data: String,
    /// Lines that say which token ends documents, and how documents are packed; empty where the data is no text.
    pub documents: Vec<String>,
    /// Lines about things in the data that deserve a look.
    pub data_warnings: Vec<String>,
    /// The mesh, in words.
    pub mesh: String,
    /// Layout of the tokens and strategy of attention, in words.
    pub attention: String,
    /// How parameters are sharded, in words; empty where they are not.
    pub sharding: String,
    /// The schedule of the batch that the plan is made for, drawn; empty for one rank and for large rings.
    pub schedule: String,
    /// Optimiser and learning rate, in words.
    pub optimizer: String,
    /// Output folder and checkpoints, in words.
    pub saving: String,
    /// Tokens of the first step, over all ranks.
    pub tokens_per_step: u64,
    /// Tokens on each rank in the batch that the plan is made for, the fullest micro-batch.
    pub tokens_per_rank: Vec<usize>,
    /// Predicted bytes of the CPU's memory that the fullest rank takes at the peak of a step, by part.
    pub memory: Vec<(&'static str, u64)>,
    /// The moment of a step at which it takes them, in words.
    pub peak_moment: &'static str,
    /// Like [`memory`](Self::memory), for the GPU's memory; empty where the CPU computes.
    pub gpu_memory: Vec<(&'static str, u64)>,
    /// The moment at which the GPU's memory peaks, in words.
    pub gpu_peak_moment: &'static str,
    /// The GPUs of this process's ranks, where their memory is known.
    pub gpus: Vec<GpuMemoryUse>,
    /// Why it is not known, in words; empty where it is, or where the CPU computes.
    pub gpus_unknown: String,
    /// The activations that are recomputed for the backward pass.
    pub recompute: Recompute,
    /// Whether `recompute` was chosen by the free memory (`--recompute auto`).
    pub recompute_is_auto: bool,
    /// Bytes of activations that a layer stores per token for its backward pass.
    pub kept_per_token: u64,
    /// Why the run does not fit into memory, with the nearest setting that does; none if it fits.
    pub refusal: Option<String>,
    /// Predicted bytes that the busiest rank sends in a step, by purpose.
    pub traffic: Vec<(&'static str, u64)>,
    /// Number of steps in all.
    pub steps: u64,
    /// Number of steps that are done.
    pub first_step: u64,
    /// Number of passes over the text that all steps make; none for a file of tokens.
    pub passes: Option<f64>,
    /// Number of passes over each source of the text.
    pub passes_of_sources: Vec<f64>,
    load: Workload,
}

impl Plan {
    /// The plan of a run, checked against the free memory of the machine and of `gpus`, the GPUs of this process's ranks as far as
    /// their memory is known. Where the configuration does not say which activations are recomputed, as few are as memory allows.
    pub(crate) fn new(config: &TrainConfig, spec: &RunSpec, gpus: &[GpuMemoryUse]) -> Result<Self> {
        if let Some(recompute) = config.recompute {
            return Self::with_recompute(config, spec, recompute, gpus);
        }
        for recompute in [Recompute::Nothing, Recompute::KeepAttention] {
            let plan = Self::with_recompute(config, spec, recompute, gpus)?;
            if plan.has_headroom() {
                return Ok(plan);
            }
        }
        Self::with_recompute(config, spec, Recompute::Full, gpus)
    }

    /// Like [`new`](Self::new), with a fixed choice of the activations that are recomputed.
    pub(crate) fn with_recompute(
        config: &TrainConfig,
        spec: &RunSpec,
        recompute: Recompute,
        gpus: &[GpuMemoryUse],
    ) -> Result<Self> {
        let mut plan = Self::in_words(config, spec, recompute);
        let Some(batch) = &spec.batches.fullest else { return Ok(plan) };
        let Some((layout, schedules)) = plan.count_tokens(config, spec, batch)? else { return Ok(plan) };
        plan.attention = descriptions::attention(config, &spec.decoder);
        if config.ring * config.ulysses > 1 && config.ring <= DRAWN_RING {
            let drawn = schedules.iter().map(|LayerSchedule { schedule, layers }| format!("{layers} x {schedule}"));
            plan.schedule = drawn.collect::<Vec<_>>().join("\n");
        }
        let batches = &spec.batches.first_step;
        plan.tokens_per_step = batches.iter().map(Batch::real_tokens).sum();
        let shape = Shape::new(config, spec, recompute)?;
        plan.load = Workload {
            tokens: plan.tokens_per_rank.iter().copied().max().unwrap_or(0) as u64,
            batch: batches.iter().map(|batch| batch.tokens.len() as u64).sum(),
            rows: batch.rows.div_ceil(config.data_ranks()) as u64,
            ranks: config.local_ranks.unwrap_or(plan.tokens_per_rank.len()) as u64,
            offloads: config.offload_activations,
        };
        plan.predict_memory(config, &shape)?;
        plan.traffic = shape.traffic(&layout, &schedules, (batches.len(), counting_passes(config, spec)))?;
        if !gpus.is_empty() {
            plan.check_gpus(config, &shape, gpus)?;
        }
        Ok(plan)
    }

    /// The parts of the plan that do not depend on a batch.
    fn in_words(config: &TrainConfig, spec: &RunSpec, recompute: Recompute) -> Self {
        let steps = spec.lr.steps;
        Self {
            training: descriptions::training(config, spec),
            model: descriptions::model(config, spec),
            warning: descriptions::context_overflow(config, spec.decoder.config()),
            data: spec.data.clone(),
            documents: spec.notes.clone(),
            data_warnings: spec.warnings.clone(),
            mesh: descriptions::mesh(config, &spec.mesh),
            sharding: descriptions::sharding(config, &spec.mesh),
            optimizer: descriptions::optimizer(config, spec),
            saving: descriptions::saving(config),
            recompute,
            recompute_is_auto: config.recompute.is_none(),
            steps,
            first_step: spec.first_step,
            passes: spec.batches.steps_per_epoch.map(|steps_per_epoch| steps as f64 / steps_per_epoch),
            passes_of_sources: spec.batches.epochs_of_sources.clone(),
            ..Self::default()
        }
    }

    /// Counts the tokens of each rank; returns the layout of the first data-parallel rank's tokens and the schedules of its layers.
    fn count_tokens(
        &mut self,
        config: &TrainConfig,
        spec: &RunSpec,
        batch: &Batch,
    ) -> Result<Option<(Layout, Vec<LayerSchedule>)>> {
        let cp = config.ring * config.ulysses;
        let mut first = None;
        for replica in 0..config.data_ranks() {
            let rows = batch.chunk(replica, config.data_ranks());
            let layout = Layout::new(config.layout, &rows.documents()?, cp)?;
            for rank in 0..cp {
                self.tokens_per_rank.extend(std::iter::repeat_n(layout.tokens(rank), config.tp));
            }
            if replica == 0 {
                let schedules = layer_schedules(config, &spec.decoder, &layout)?;
                first = Some((layout, schedules));
            }
        }
        Ok(first)
    }

    /// Predicts memory, and says why the run does not fit where it does not.
    fn predict_memory(&mut self, config: &TrainConfig, shape: &Shape) -> Result<()> {
        let Workload { tokens, batch, .. } = self.load;
        (self.peak_moment, self.memory) = shape.memory_on(MemoryKind::Cpu, tokens, batch)?;
        if config.device != DeviceName::Cpu {
            (self.gpu_peak_moment, self.gpu_memory) = shape.memory_on(MemoryKind::Gpu, tokens, batch)?;
            self.gpus_unknown = "nobody asked".into();
        }
        self.kept_per_token = shape.kept(config.tp as u64, 1) / config.tp as u64;
        self.refusal = self.refusal(config, shape)?;
        Ok(())
    }

    /// Checks the plan against the free memory of the GPUs of this process's ranks.
    fn check_gpus(&mut self, config: &TrainConfig, shape: &Shape, gpus: &[GpuMemoryUse]) -> Result<()> {
        (self.gpus, self.gpus_unknown) = (gpus.to_vec(), String::new());
        let each = self.gpu_bytes();
        let full = self.gpus.iter().find(|gpu| each * gpu.ranks as u64 > gpu.free);
        if let (Some(gpu), None) = (full, &self.refusal) {
            let load = Workload { ranks: gpu.ranks as u64, ..self.load.clone() };
            self.refusal = Some(format!(
                "this needs about {} of {} ({} of up to {}), but only {} of its {} is free: {}",
                bytes_text(each * load.ranks),
                gpu.name,
                descriptions::ranks(gpu.ranks),
                bytes_text(each),
                bytes_text(gpu.free),
                bytes_text(gpu.total),
                suggestion::nearest(config, shape, &load, MemoryKind::Gpu, gpu.free)?
            ));
        }
        Ok(())
    }

    /// Whether at least a tenth of the free memory would be left, where the system tells it: no prediction is exact.
    pub(crate) fn has_headroom(&self) -> bool {
        let leaves = |needed: u64, free: u64| needed as u128 * 10 <= free as u128 * 9;
        let here = ringspan::memory::available().is_none_or(|free| leaves(self.rank_bytes() * self.load.ranks, free));
        here && self.gpus.iter().all(|gpu| leaves(self.gpu_bytes() * gpu.ranks as u64, gpu.free))
    }

    /// Predicted bytes of the CPU's memory that the fullest rank takes.
    #[must_use]
    pub fn rank_bytes(&self) -> u64 {
        self.memory.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Predicted bytes of its GPU's memory that the fullest rank takes; 0 where the CPU computes.
    #[must_use]
    pub fn gpu_bytes(&self) -> u64 {
        self.gpu_memory.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Why the ranks of this machine do not fit into the free memory, where the system tells it; none if they fit.
    fn refusal(&self, config: &TrainConfig, shape: &Shape) -> Result<Option<String>> {
        let load = &self.load;
        let needed = self.rank_bytes() * load.ranks;
        let Some(free) = ringspan::memory::available().filter(|free| needed > *free) else { return Ok(None) };
        Ok(Some(format!(
            "this needs about {} ({} ranks of up to {}), but only {} of memory is free: {}",
            bytes_text(needed),
            load.ranks,
            bytes_text(self.rank_bytes()),
            bytes_text(free),
            suggestion::nearest(config, shape, load, MemoryKind::Cpu, free)?
        )))
    }
}

/// The schedule of the layers that share a mask, and their number.
struct LayerSchedule {
    schedule: Schedule,
    layers: u64,
}

fn layer_schedules(config: &TrainConfig, decoder: &Decoder, layout: &Layout) -> Result<Vec<LayerSchedule>> {
    let mut all: Vec<LayerSchedule> = Vec::new();
    for mask in (0..decoder.config().num_hidden_layers).map(|layer| decoder.mask(layer)) {
        if let Some(same) = all.iter_mut().find(|other| other.schedule.mask() == mask) {
            same.layers += 1;
            continue;
        }
        let schedule = Schedule::new(config.strategy, layout, layout, mask, (config.ring, config.ulysses))?;
        all.push(LayerSchedule { schedule, layers: 1 });
    }
    Ok(all)
}

/// Number of additional forward passes in a step, which only count the load of experts.
fn counting_passes(config: &TrainConfig, spec: &RunSpec) -> usize {
    match (router_loss(spec), config.router_loss_scope) {
        (Some(_), RouterLossScope::Step) => config.grad_accumulation - 1,
        _ => 0,
    }
}

/// Factor of the router's auxiliary loss; none where the model has no such loss.
fn router_loss(spec: &RunSpec) -> Option<f64> {
    spec.decoder.config().router_aux_loss().filter(|factor| *factor > 0.0 && spec.decoder.experts() > 0)
}
