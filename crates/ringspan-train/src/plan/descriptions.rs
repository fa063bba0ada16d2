//! Describes in words what a run is about to do.

use super::{counting_passes, router_loss};
use crate::{
    config::{RouterLossScope, Sharding, TrainConfig},
    human_readable::grouped,
    lr_schedule::LrSchedule,
    mesh::RunMesh,
    optimizer::OptimizerConfig,
    spec::RunSpec,
};
use ringspan_candle::{DeviceName, ParallelRank, Precision};
use ringspan_models::{Config, ContextOverflow, Decoder};
use std::path::PathBuf;

/// The parameters that are trained.
pub(super) fn training(config: &TrainConfig, spec: &RunSpec) -> String {
    let count = |trained: bool| -> String {
        let counted = spec.shapes.iter().filter(|(name, _)| !trained || spec.decoder.trains(name));
        grouped(counted.map(|(_, shape)| shape.iter().product::<usize>() as u64).sum())
    };
    let all = count(false);
    let from_adapter = spec.starts_from_adapter;
    match (spec.decoder.lora(), from_adapter) {
        (None, true) => format!("full fine-tuning of {all} parameters, with an adapter merged into them"),
        (None, false) if config.model.is_some() => format!("full fine-tuning of {all} parameters"),
        (None, false) => format!("a new model, all of its {all} parameters"),
        (Some(lora), from_adapter) => {
            let kind = if from_adapter { "a LoRA adapter, continued," } else { "a new LoRA adapter" };
            let ranks = spec.decoder.adapters().map(|(_, size)| size.rank);
            let (least, most) = ranks.fold((usize::MAX, 0), |(least, most), rank| (least.min(rank), most.max(rank)));
            let ranks = if least < most { format!("ranks {least} to {most}") } else { format!("rank {most}") };
            let dropout = if lora.dropout > 0.0 { format!(", dropout {}", lora.dropout) } else { String::new() };
            let held = stored_formats(spec);
            format!(
                "{kind} of {ranks}, {} of {all} parameters (alpha {}{dropout}, beside {}); the others stay as they are{held}",
                count(true),
                lora.alpha,
                lora.targets()
            )
        }
    }
}

/// The formats in which the frozen matrices under adapters are held, in words; empty where all are f32.
fn stored_formats(spec: &RunSpec) -> String {
    let placement = &spec.mesh.placement;
    let mut formats: Vec<String> = placement.stored().values().map(ToString::to_string).collect();
    formats.sort();
    formats.dedup();
    let stored = match formats.is_empty() {
        true => String::new(),
        false => format!(", held as they are stored ({})", formats.join(", ")),
    };
    match placement.decoded() {
        0 => stored,
        count => format!("{stored}; {count} matrices are f32, since ranks share them at places inside their blocks"),
    }
}

/// How the load of experts is balanced, in words; none where it is not.
fn router_loss_words(config: &TrainConfig, spec: &RunSpec) -> Option<String> {
    let factor = router_loss(spec)?;
    Some(match (config.router_loss_scope, config.grad_accumulation) {
        (_, 1) => format!("; experts kept even, by {factor} of the loss of their load"),
        (RouterLossScope::Step, n) => format!(
            "; experts kept even, by {factor} of the loss of their load over a step, for which {} of {n} micro-batches pass forward \
             twice",
            counting_passes(config, spec)
        ),
        (RouterLossScope::MicroBatch, _) => {
            format!("; experts kept even, by {factor} of the mean loss of their load in a micro-batch")
        }
    })
}

/// The model, where it comes from, and the tokenizer of a new one.
pub(super) fn model(config: &TrainConfig, spec: &RunSpec) -> String {
    let summary = &spec.model;
    match (&config.model, &config.model_config) {
        (Some(path), _) => format!("{summary}, from {}", path.display()),
        (None, None) => format!("{summary}, new (seed {})", config.seed),
        (None, Some(path)) => {
            let words = |(path, size): &(PathBuf, usize)| {
                format!("; tokenizer {} of {} tokens", path.display(), grouped(*size as u64))
            };
            let tokens = spec.tokenizer.as_ref().map(words).unwrap_or_default();
            format!("{summary}, new (seed {}) as in {}{tokens}", config.seed, path.display())
        }
    }
}

/// Why the model may fail on sequences as long as the run's, in words; empty if nothing speaks against it.
pub(super) fn context_overflow(config: &TrainConfig, model: &Config) -> String {
    let Some(overflow) = model.context_overflow(config.sequence_length) else { return String::new() };
    let without_remedy = ContextOverflow { by: None, ..overflow };
    match &config.model_config {
        // A checkpoint belongs to its model's configuration, so no other one is proposed.
        _ if config.resume => without_remedy.to_string(),
        // A new model has learned nothing that would have to be extended.
        Some(path) => format!(
            "{without_remedy}; a new model can be made for more: raise max_position_embeddings in {}",
            path.display()
        ),
        None => overflow.to_string(),
    }
}

/// The mesh, where its ranks run, and how experts are shared.
pub(super) fn mesh(config: &TrainConfig, mesh: &RunMesh) -> String {
    let TrainConfig { dp_replicate, dp_shard, ring, ulysses, tp, .. } = *config;
    let axes = format!("dp_replicate {dp_replicate} x dp_shard {dp_shard} x ring {ring} x ulysses {ulysses} x tp {tp}");
    let threads = if config.threads == 1 { "1 thread".into() } else { format!("{} threads", config.threads) };
    let processes = match config.local_ranks {
        None => "ranks in this process".into(),
        Some(local) => format!("processes, {local} of them on this machine"),
    };
    let device = match config.device {
        DeviceName::Cpu if config.dtype == Precision::F32 => String::new(),
        DeviceName::Cpu => format!(", in {}", config.dtype),
        device => format!(", on {device} in {}", config.dtype),
    };
    let ParallelRank { ep: (_, ep), moe_tp: (_, moe_tp), .. } = mesh.parallel_rank(0);
    let experts = match ep * moe_tp {
        1 => String::new(),
        ranks => format!("; experts by moe_dp {} x ep {ep} x moe_tp {moe_tp}", config.ranks() / ranks),
    };
    format!("{axes} = {} {processes}, {threads} each{device}{experts}", config.ranks())
}

/// How parameters are sharded; empty where they are not.
pub(super) fn sharding(config: &TrainConfig, mesh: &RunMesh) -> String {
    let ranks = mesh.placement.ranks();
    if config.sharding == Sharding::None || ranks == 1 {
        return String::new();
    }
    let once = if mesh.shares_memory { ", once for the ranks that need the same" } else { "" };
    format!("parameters, gradients and optimiser state cut over {ranks} ranks, gathered layer by layer{once}")
}

/// Layout of the tokens, and how queries meet keys.
pub(super) fn attention(config: &TrainConfig, decoder: &Decoder) -> String {
    let over_ranks = match (config.ring, config.ring * config.ulysses) {
        (_, 1) => "whole sequences on each rank".into(),
        (1, _) => format!("layout {}, heads exchanged (ulysses)", config.layout),
        _ => format!("layout {}, keys and values by {}", config.layout, config.strategy),
    };
    match decoder.config().attention_dropout() {
        dropout if dropout > 0.0 => format!("{over_ranks}; dropout {dropout} of its weights in training"),
        _ => over_ranks,
    }
}

/// Output folder and checkpoints.
pub(super) fn saving(config: &TrainConfig) -> String {
    match config.save_every {
        Some(n) => format!("{}, a checkpoint every {n} steps", config.out.display()),
        None => format!("{}, one checkpoint at the end", config.out.display()),
    }
}

/// Optimiser, learning rate, and the loss that balances experts.
pub(super) fn optimizer(config: &TrainConfig, spec: &RunSpec) -> String {
    let mut text = optimizer_settings(config, &spec.lr);
    text += &router_loss_words(config, spec).unwrap_or_default();
    text += &schedule_change(config.lr_before.as_ref(), &spec.lr, spec.first_step).unwrap_or_default();
    text
}

fn optimizer_settings(config: &TrainConfig, lr: &LrSchedule) -> String {
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

/// A number of ranks.
pub(super) fn ranks(count: usize) -> String {
    if count == 1 { "1 rank".into() } else { format!("{count} ranks") }
}
