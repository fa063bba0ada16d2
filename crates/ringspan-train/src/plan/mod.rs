//! The plan of a run: what it is about to do, in numbers, before it does it.

mod cpu_memory;
mod experts;
mod gpu_memory;
mod parameter_counts;
mod rank_sizes;
mod suggestion;

use crate::{
    config::{RouterLossScope, Sharding, TrainConfig},
    data::Batch,
    data_loader::DataLoader,
    error::Result,
    lr_schedule::LrSchedule,
    observer::grouped,
    optimizer::OptimizerConfig,
    setup::Setup,
    tokenizer::Tokenizer,
};
use rank_sizes::Shape;
use ringspan::{Layout, Schedule};
use ringspan_candle::{DeviceName, ParallelRank, Precision, Recompute, gpu_memory::GpuMemoryUse};
use ringspan_models::{Config, ContextOverflow, Decoder, adapter};
use std::fmt;
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
    /// Predicted bytes of the CPU's memory that the fullest rank takes at its fullest moment, by part.
    pub memory: Vec<(&'static str, u64)>,
    /// The fullest moment, in words.
    pub fullest: &'static str,
    /// Like [`memory`](Self::memory), for the GPU's memory; empty where the CPU computes.
    pub gpu_memory: Vec<(&'static str, u64)>,
    /// The fullest moment of the GPU's memory, in words.
    pub gpu_fullest: &'static str,
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
    pub(crate) fn new(config: &TrainConfig, setup: &Setup, model: &Config) -> Result<Self> {
        let mut plan = Self {
            training: training_words(config, setup),
            model: model_words(config, setup),
            data: setup.data.summary.clone(),
            documents: setup.notes.clone(),
            data_warnings: setup.warnings.clone(),
            recompute: setup.recompute,
            recompute_is_auto: config.recompute.is_none(),
            steps: setup.lr.steps,
            first_step: setup.first_step,
            passes: match setup.data_loader {
                DataLoader::Text { .. } => {
                    Some(setup.lr.steps as f64 / setup.data_loader.steps_per_epoch(config.grad_accumulation))
                }
                DataLoader::Tokens(_) => None,
            },
            passes_of_sources: setup.data_loader.epochs(setup.lr.steps, config.grad_accumulation),
            saving: match config.save_every {
                Some(n) => format!("{}, a checkpoint every {n} steps", config.out.display()),
                None => format!("{}, one checkpoint at the end", config.out.display()),
            },
            ..Self::default()
        };
        let TrainConfig { dp_replicate, dp_shard, ring, ulysses, tp, .. } = *config;
        let axes =
            format!("dp_replicate {dp_replicate} x dp_shard {dp_shard} x ring {ring} x ulysses {ulysses} x tp {tp}");
        let threads = if config.threads == 1 { "1 thread".into() } else { format!("{} threads", config.threads) };
        let place = match config.local_ranks {
            None => "ranks in this process".into(),
            Some(local) => format!("processes, {local} of them on this machine"),
        };
        let device = match config.device {
            DeviceName::Cpu if config.dtype == Precision::F32 => String::new(),
            DeviceName::Cpu => format!(", in {}", config.dtype),
            device => format!(", on {device} in {}", config.dtype),
        };
        plan.mesh = format!("{axes} = {} {place}, {threads} each{device}", config.ranks());
        let ParallelRank { ep: (_, ep), moe_tp: (_, moe_tp), .. } = setup.mesh.parallel_rank(0);
        if ep * moe_tp > 1 {
            let copies = config.ranks() / (ep * moe_tp);
            plan.mesh += &format!("; experts by moe_dp {copies} x ep {ep} x moe_tp {moe_tp}");
        }
        plan.optimizer = optimizer_words(config, &setup.lr);
        plan.optimizer += &router_loss_words(config, setup).unwrap_or_default();
        plan.optimizer += &schedule_change(config.lr_before.as_ref(), &setup.lr, setup.first_step).unwrap_or_default();
        plan.warning = model.beyond(config.sequence_length).map(|b| beyond_words(config, b)).unwrap_or_default();

        let Some(batch) = setup.fullest_batch(config.grad_accumulation) else { return Ok(plan) };
        let batches = setup.data_loader.clone().next_step(config.grad_accumulation);
        plan.tokens_per_step = batches.iter().map(Batch::real_tokens).sum();
        let cp = config.ring * config.ulysses;
        let mut first: Option<(Layout, Vec<LayerSchedule>)> = None;
        for replica in 0..config.data_ranks() {
            let part = batch.chunk(replica, config.data_ranks());
            let layout = Layout::new(config.layout, &part.documents()?, cp)?;
            let of_rank = |rank| layout.tokens(rank);
            plan.tokens_per_rank.extend((0..cp).flat_map(|rank| std::iter::repeat_n(of_rank(rank), config.tp)));
            if replica == 0 {
                let schedules = layer_schedules(config, &setup.decoder, &layout)?;
                first = Some((layout, schedules));
            }
        }
        let Some((layout, schedules)) = first else { return Ok(plan) };
        plan.attention = match (config.ring, cp) {
            (_, 1) => "whole sequences on each rank".into(),
            (1, _) => format!("layout {}, heads exchanged (ulysses)", layout_words(config)),
            _ => format!("layout {}, keys and values by {}", layout_words(config), config.strategy),
        };
        let dropout = setup.decoder.config().attention_dropout();
        if dropout > 0.0 {
            plan.attention += &format!("; dropout {dropout} of its weights in training");
        }
        if cp > 1 && config.ring <= DRAWN_RING {
            let drawn = schedules.iter().map(|LayerSchedule { schedule, layers }| format!("{layers} x {schedule}"));
            plan.schedule = drawn.collect::<Vec<_>>().join("\n");
        }
        plan.sharding = match (config.sharding, setup.mesh.placement.ranks()) {
            (Sharding::None, _) | (_, 1) => String::new(),
            (_, n) => format!("parameters, gradients and optimiser state cut over {n} ranks, gathered layer by layer"),
        };
        let shape = Shape::new(config, setup, model)?;
        let load = Workload {
            tokens: plan.tokens_per_rank.iter().copied().max().unwrap_or(0) as u64,
            batch: batches.iter().map(|batch| batch.tokens.len() as u64).sum(),
            rows: batch.rows.div_ceil(config.data_ranks()) as u64,
            ranks: config.local_ranks.unwrap_or(plan.tokens_per_rank.len()) as u64,
            offloads: config.offload_activations,
        };
        (plan.fullest, plan.memory) = shape.memory_on(MemoryKind::Cpu, load.tokens, load.batch)?;
        if config.device != DeviceName::Cpu {
            (plan.gpu_fullest, plan.gpu_memory) = shape.memory_on(MemoryKind::Gpu, load.tokens, load.batch)?;
            plan.gpus_unknown = "nobody asked".into();
        }
        plan.kept_per_token = shape.kept(config.tp as u64, 1) / config.tp as u64;
        plan.traffic = shape.traffic(&layout, &schedules, (batches.len(), counting_passes(config, setup)))?;
        plan.refusal = plan.refusal(config, &shape, &load)?;
        plan.load = load;
        Ok(plan)
    }

    /// Checks the plan against the free memory of the GPUs of this process's ranks.
    pub(crate) fn check_gpus(&mut self, config: &TrainConfig, setup: &Setup, gpus: Vec<GpuMemoryUse>) -> Result<()> {
        (self.gpus, self.gpus_unknown) = (gpus, String::new());
        let each = self.gpu_bytes();
        let full = self.gpus.iter().find(|gpu| each * gpu.ranks as u64 > gpu.free);
        if let (Some(gpu), None) = (full, &self.refusal) {
            let shape = Shape::new(config, setup, setup.decoder.config())?;
            let load = Workload { ranks: gpu.ranks as u64, ..self.load.clone() };
            self.refusal = Some(format!(
                "this needs about {} of {} ({} of up to {}), but only {} of its {} is free: {}",
                bytes(each * load.ranks),
                gpu.name,
                ranks(gpu.ranks),
                bytes(each),
                bytes(gpu.free),
                bytes(gpu.total),
                suggestion::nearest(config, &shape, &load, MemoryKind::Gpu, gpu.free)?
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
    fn refusal(&self, config: &TrainConfig, shape: &Shape, load: &Workload) -> Result<Option<String>> {
        let needed = self.rank_bytes() * load.ranks;
        let Some(free) = ringspan::memory::available().filter(|free| needed > *free) else { return Ok(None) };
        Ok(Some(format!(
            "this needs about {} ({} ranks of up to {}), but only {} of memory is free: {}",
            bytes(needed),
            load.ranks,
            bytes(self.rank_bytes()),
            bytes(free),
            suggestion::nearest(config, shape, load, MemoryKind::Cpu, free)?
        )))
    }
}

fn ranks(count: usize) -> String {
    if count == 1 { "1 rank".into() } else { format!("{count} ranks") }
}

fn training_words(config: &TrainConfig, setup: &Setup) -> String {
    let count = |trained: bool| -> String {
        let counted = setup.shapes.iter().filter(|(name, _)| !trained || setup.decoder.trains(name));
        grouped(counted.map(|(_, shape)| shape.iter().product::<usize>() as u64).sum())
    };
    let all = count(false);
    let of_folder = config.model.as_deref().filter(|path| adapter::is_here(path));
    match (setup.decoder.lora(), of_folder) {
        (None, Some(_)) => format!("full fine-tuning of {all} parameters, with an adapter merged into them"),
        (None, None) if config.model.is_some() => format!("full fine-tuning of {all} parameters"),
        (None, None) => format!("a new model, all of its {all} parameters"),
        (Some(lora), of_folder) => {
            let kind = if of_folder.is_some() { "a LoRA adapter that goes on," } else { "a new LoRA adapter" };
            let ranks = setup.decoder.adapters().map(|(_, size)| size.rank);
            let (least, most) = ranks.fold((usize::MAX, 0), |(least, most), rank| (least.min(rank), most.max(rank)));
            let ranks = if least < most { format!("ranks {least} to {most}") } else { format!("rank {most}") };
            let dropout = if lora.dropout > 0.0 { format!(", dropout {}", lora.dropout) } else { String::new() };
            let held = held_words(setup);
            format!(
                "{kind} of {ranks}, {} of {all} parameters (alpha {}{dropout}, beside {}); the others stay as they are{held}",
                count(true),
                lora.alpha,
                lora.targets()
            )
        }
    }
}

/// The formats in which frozen matrices are held beside adapters, in words; empty where all are f32.
fn held_words(setup: &Setup) -> String {
    let sharing = &setup.mesh.placement;
    let mut formats: Vec<String> = sharing.stored().values().map(ToString::to_string).collect();
    formats.sort();
    formats.dedup();
    let stored = match formats.is_empty() {
        true => String::new(),
        false => format!(", held as they are stored ({})", formats.join(", ")),
    };
    match sharing.decoded() {
        0 => stored,
        count => format!("{stored}; {count} matrices are f32, since ranks share them at places inside their blocks"),
    }
}

/// Number of additional forward passes in a step, which only count the load of experts.
fn counting_passes(config: &TrainConfig, setup: &Setup) -> usize {
    match (router_loss(setup), config.router_loss_scope) {
        (Some(_), RouterLossScope::Step) => config.grad_accumulation - 1,
        _ => 0,
    }
}

/// Factor of the router's auxiliary loss; none where the model has no such loss.
fn router_loss(setup: &Setup) -> Option<f64> {
    setup.decoder.config().router_aux_loss().filter(|factor| *factor > 0.0 && setup.decoder.experts() > 0)
}

/// How the load of experts is balanced, in words; none where it is not.
fn router_loss_words(config: &TrainConfig, setup: &Setup) -> Option<String> {
    let factor = router_loss(setup)?;
    Some(match (config.router_loss_scope, config.grad_accumulation) {
        (_, 1) => format!("; experts kept even, by {factor} of the loss of their load"),
        (RouterLossScope::Step, n) => format!(
            "; experts kept even, by {factor} of the loss of their load over a step, for which {} of {n} micro-batches pass forward \
             twice",
            counting_passes(config, setup)
        ),
        (RouterLossScope::MicroBatch, _) => {
            format!("; experts kept even, by {factor} of the mean loss of their load in a micro-batch")
        }
    })
}

fn model_words(config: &TrainConfig, setup: &Setup) -> String {
    let summary = &setup.model.summary;
    match (&config.model, &config.model_config) {
        (Some(path), _) => format!("{summary}, from {}", path.display()),
        (None, None) => format!("{summary}, new (seed {})", config.seed),
        (None, Some(path)) => {
            let words = |t: &Tokenizer| {
                format!("; tokenizer {} of {} tokens", t.path().display(), grouped(t.vocabulary_size() as u64))
            };
            let tokens = setup.tokenizer.as_ref().map(words).unwrap_or_default();
            format!("{summary}, new (seed {}) as in {}{tokens}", config.seed, path.display())
        }
    }
}

fn beyond_words(config: &TrainConfig, beyond: ContextOverflow) -> String {
    let told = ContextOverflow { by: None, ..beyond };
    match &config.model_config {
        // A checkpoint belongs to its model's configuration, so no other one is proposed.
        _ if config.resume => told.to_string(),
        // A new model has learned nothing that would have to be stretched.
        Some(path) => {
            format!("{told}; a new model can be made for more: raise max_position_embeddings in {}", path.display())
        }
        None => beyond.to_string(),
    }
}

fn layout_words(config: &TrainConfig) -> String {
    config.layout.to_string()
}

fn optimizer_words(config: &TrainConfig, lr: &LrSchedule) -> String {
    let method = match config.optimizer {
        OptimizerConfig::AdamW { beta1, beta2, weight_decay, .. } => {
            format!("adamw (betas {beta1}, {beta2}; weight decay {weight_decay})")
        }
        OptimizerConfig::Sgd { momentum, weight_decay } => {
            format!("sgd (momentum {momentum}; weight decay {weight_decay})")
        }
    };
    let clip = config.grad_clip.map_or_else(|| "no clipping".into(), |c| format!("gradients clipped to norm {c}"));
    format!("{method}, lr {} {} after {} steps of warm-up, {clip}", lr.peak, lr.decay, lr.warmup)
}

/// How the learning rates of a resumed run differ from those that it began with, in words; none if they do not.
fn schedule_change(before: Option<&LrSchedule>, now: &LrSchedule, step: u64) -> Option<String> {
    let before = before?;
    let [was, is] = [before.at(step), now.at(step)];
    (before != now).then(|| {
        format!(
            "; as it was begun, for {} steps, step {} would have had lr {was:.3e}, and has {is:.3e} now",
            before.steps,
            step + 1
        )
    })
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

/// A number of bytes in words: 1536 as "1.5 KiB".
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Parts below half a percent explain nothing, and are left out.
        let parts = |list: &[(&str, u64)]| {
            let least = list.iter().map(|(_, n)| n).sum::<u64>() / 200;
            let shown: Vec<String> =
                list.iter().filter(|(_, n)| *n > least).map(|(name, n)| format!("{name} {}", bytes(*n))).collect();
            shown.join(", ")
        };
        let total = |list: &[(&str, u64)]| bytes(list.iter().map(|(_, n)| n).sum());
        writeln!(f, "training   {}", self.training)?;
        writeln!(f, "model      {}", self.model)?;
        if !self.warning.is_empty() {
            writeln!(f, "warning    {}", self.warning)?;
        }
        writeln!(f, "data       {}", self.data)?;
        for line in &self.documents {
            writeln!(f, "           {line}")?;
        }
        for warning in &self.data_warnings {
            writeln!(f, "warning    {warning}")?;
        }
        writeln!(f, "mesh       {}", self.mesh)?;
        writeln!(f, "attention  {}", self.attention)?;
        for line in self.schedule.lines() {
            writeln!(f, "           {line}")?;
        }
        if !self.sharding.is_empty() {
            writeln!(f, "sharding   {}", self.sharding)?;
        }
        let most = self.tokens_per_rank.iter().max().unwrap_or(&0);
        let least = self.tokens_per_rank.iter().min().unwrap_or(&0);
        let each = if most == least { format!("{most} on each rank") } else { format!("{least} to {most} on a rank") };
        writeln!(f, "tokens     {} a step, {each} at a time", grouped(self.tokens_per_step))?;
        let (most, kept) = (total(&self.memory), grouped(self.kept_per_token));
        let of_cpu = if self.gpu_memory.is_empty() { "" } else { " of the CPU's" };
        let there = match (self.gpu_memory.is_empty(), self.load.offloads) {
            (true, _) => "",
            (false, false) => ", on the GPU",
            (false, true) => ", on the CPU; those of two layers on the GPU",
        };
        writeln!(f, "memory     about {most} a rank{of_cpu}, most {}: {}", self.fullest, parts(&self.memory))?;
        if !self.gpu_memory.is_empty() {
            let (most, moment) = (total(&self.gpu_memory), self.gpu_fullest);
            writeln!(f, "           about {most} a rank of a GPU's, most {moment}: {}", parts(&self.gpu_memory))?;
        }
        writeln!(f, "           {kept} bytes a token and layer wait for the backward pass{there}")?;
        if self.recompute_is_auto {
            let room = if self.has_headroom() { "the least for which there is room" } else { "for want of room" };
            writeln!(f, "           --recompute auto is {}, {room}", self.recompute)?;
        }
        for GpuMemoryUse { name, free, total, ranks: count } in &self.gpus {
            let (free, total) = (bytes(*free), bytes(*total));
            writeln!(f, "           {free} of {total} is free on {name}, for {}", ranks(*count))?;
        }
        if !self.gpus_unknown.is_empty() {
            writeln!(f, "           how much a GPU has is not known here: {}", self.gpus_unknown)?;
        }
        if self.tokens_per_rank.len() > 1 {
            writeln!(f, "sent       about {} a step by a rank: {}", total(&self.traffic), parts(&self.traffic))?;
        }
        writeln!(f, "optimiser  {}", self.optimizer)?;
        let passes = match self.passes {
            Some(passes) if passes < 0.005 => ", less than 0.01 passes over the data".into(),
            Some(passes) => format!(", {passes:.2} passes over the data"),
            None => String::new(),
        };
        let each: Vec<String> = self.passes_of_sources.iter().map(|passes| format!("{passes:.2}")).collect();
        let each = if each.len() > 1 { format!(" ({} over its sources)", each.join(", ")) } else { String::new() };
        match self.first_step {
            0 => writeln!(f, "steps      {}{passes}{each}", self.steps)?,
            done => writeln!(f, "steps      {} to {}{passes}{each}, resumed", done + 1, self.steps)?,
        }
        write!(f, "output     {}", self.saving)
    }
}
