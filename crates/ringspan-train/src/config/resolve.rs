//! Resolves settings to a configuration: fills in defaults and refuses contradictions.

use super::checks::{below_one, check_model_source, held_out, lora, optimizer, within};
use super::{DataSource, RouterLossScope, Sharding, TrainConfig, TrainingLength, cores};
use crate::{
    data::Packing,
    error::{Error, Result},
    lr_schedule::LrDecay,
    optimizer::OptimizerKind,
    settings::Settings,
};
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::{DeviceName, Precision, Recompute};
use ringspan_models::{RopeScaling, folder::SavedType};
use std::time::Duration;

impl TrainConfig {
    /// Fills in the defaults and refuses contradictions.
    ///
    /// # Errors
    /// As [`Self::from_args`].
    pub fn resolve(settings: Settings) -> Result<Self> {
        let s = &settings;
        let source = DataSource::new(s)?;
        if matches!(source, DataSource::Tokens(_)) {
            refuse_settings_of_text(s)?;
        }
        let held_out = held_out(s)?;
        check_model_source(s)?;
        let lora = lora(s)?;
        let rope_scaling = rope_scaling(s, lora.is_some())?;
        let export_dtype = export_dtype(s, lora.is_some())?;
        let Computation { device, dtype, offload_activations } = Computation::new(s)?;
        let Axes { ring, ulysses, dp_replicate, dp_shard, tp, sharding } = Axes::new(s)?;
        let data_ranks = dp_replicate.saturating_mul(dp_shard);
        let ranks = ring.saturating_mul(ulysses).saturating_mul(tp).saturating_mul(data_ranks);
        // A layout and a strategy are accepted on one rank too, so that one configuration runs on any mesh.
        let strategy = s.strategy.as_deref().unwrap_or("ring").parse()?;
        let layout = s.layout.as_deref().unwrap_or("per-document-zigzag").parse()?;
        let StepSize { sequence_length, batch_size, grad_accumulation, packing } =
            StepSize::new(s, dp_replicate, dp_shard)?;
        let length = training_length(s)?;
        let kind: OptimizerKind = s.optimizer.as_deref().unwrap_or("adamw").parse()?;
        let optimizer = optimizer(kind, s, lora.is_some())?;
        let peak_lr = peak_lr(s, kind, lora.is_some())?;
        let decay: LrDecay = s.schedule.as_deref().unwrap_or("cosine").parse()?;
        let grad_clip = s.grad_clip.unwrap_or(1.0);
        within("grad-clip", grad_clip, 0.0, f64::MAX)?;
        if let Some(factor) = s.router_aux_loss {
            within("router-aux-loss", factor, 0.0, f64::MAX)?;
        }
        if let Some(share) = s.attention_dropout {
            below_one("attention-dropout", share)?;
        }
        check_spike_settings(s)?;
        let deadline = deadline(s)?;
        let every = |n: Option<u64>, default: u64| Some(n.unwrap_or(default)).filter(|&n| n > 0);
        let out = s.out.clone().unwrap_or_else(|| "ringspan-out".into());
        let config = Self {
            model: s.model.clone(),
            model_config: s.model_config.clone(),
            tokenizer: s.tokenizer.clone(),
            source,
            chat_template: s.chat_template.clone(),
            eval_data: s.eval_data.clone(),
            held_out,
            token_cache: s.token_cache.clone().unwrap_or_else(|| out.join("tokens")),
            check_data: s.check_data.unwrap_or(false),
            packing,
            overlong: s.overlong.as_deref().map(str::parse).transpose()?,
            out,
            resume: false,
            rope_scaling,
            lora,
            lora_merge: s.lora_merge.unwrap_or(false),
            export_dtype,
            sequence_length,
            batch_size,
            ring,
            ulysses,
            dp_replicate,
            dp_shard,
            tp,
            ep: s.ep,
            moe_dp: s.moe_dp,
            sharding,
            strategy,
            layout,
            threads: positive("threads", s.threads.unwrap_or((cores() / ranks).max(1)))?,
            device,
            dtype,
            isa: None,
            local_ranks: None,
            peak_allocated: None,
            recompute: recompute(s.recompute.as_deref())?,
            activations: s.activations.as_deref().map_or(Ok(Storage::default()), str::parse)?,
            offload_activations,
            deadline,
            optimizer,
            length,
            peak_lr,
            warmup: s.warmup,
            decay,
            lr_before: None,
            grad_clip: (grad_clip > 0.0).then_some(grad_clip),
            grad_accumulation,
            router_aux_loss: s.router_aux_loss,
            router_loss_scope: s.router_aux_loss_over.as_deref().map_or(Ok(RouterLossScope::default()), str::parse)?,
            attention_dropout: s.attention_dropout,
            seed: s.seed.unwrap_or(0),
            save_every: every(s.save_every, 50),
            keep: positive("keep", s.keep.unwrap_or(2))?,
            eval_every: every(s.eval_every, 0),
            eval_tokens: positive("eval-tokens", s.eval_tokens.unwrap_or(1 << 17))?,
            sample_tokens: s.sample_tokens.unwrap_or(200),
            tensorboard: s.tensorboard.clone(),
            spike_factor: s.spike_factor.filter(|factor| *factor > 0.0),
            spike_steps: s.spike_steps.unwrap_or(10),
            settings,
        };
        if let TrainingLength::Steps(steps) = config.length {
            config.lr(steps)?;
        }
        Ok(config)
    }
}

/// The refusal of a setting that would change nothing.
fn no_effect<T>(flag: &str, why: &str) -> Result<T> {
    Err(Error::Settings(format!("--{flag} has no effect {why}; leave it out")))
}

fn positive(flag: &str, value: usize) -> Result<usize> {
    match value {
        0 => Err(Error::Settings(format!("--{flag} is 0, but must be at least 1"))),
        value => Ok(value),
    }
}

/// Refuses the settings that are for text, where a file of tokens is given.
fn refuse_settings_of_text(s: &Settings) -> Result<()> {
    let settings = [
        ("chat-template", s.chat_template.is_some()),
        ("token-cache", s.token_cache.is_some()),
        ("check-data", s.check_data.is_some()),
        ("eval-data", s.eval_data.is_some()),
        ("held-out", s.held_out.is_some()),
        ("packing", s.packing.is_some()),
        ("overlong", s.overlong.is_some()),
        ("sequence-length", s.sequence_length.is_some()),
        ("batch-size", s.batch_size.is_some()),
        ("epochs", s.epochs.is_some()),
        ("eval-every", s.eval_every.is_some()),
        ("eval-tokens", s.eval_tokens.is_some()),
        ("sample-tokens", s.sample_tokens.is_some()),
    ];
    match settings.iter().find(|(_, given)| *given) {
        Some((flag, _)) => no_effect(flag, "with --tokens: each step takes the whole file, and nothing is held out"),
        None => Ok(()),
    }
}

fn rope_scaling(s: &Settings, has_adapters: bool) -> Result<Option<RopeScaling>> {
    let Some(text) = &s.rope_scaling else { return Ok(None) };
    if s.model.is_none() {
        return no_effect(
            "rope-scaling",
            "without --model: a new model is made for its sequences, as its config.json says",
        );
    }
    let scaling =
        text.parse().map_err(|error: ringspan_models::Error| Error::Settings(format!("--rope-scaling: {error}")))?;
    if has_adapters && s.lora_merge != Some(true) {
        return Err(Error::Settings(
            "--rope-scaling with an adapter needs --lora-merge: the folder of an adapter cannot say how its model is \
             scaled, so a program that reads it would not scale it"
                .into(),
        ));
    }
    Ok(Some(scaling))
}

fn export_dtype(s: &Settings, has_adapters: bool) -> Result<Option<SavedType>> {
    let Some(word) = &s.export_dtype else { return Ok(None) };
    if has_adapters && s.lora_merge != Some(true) {
        return no_effect("export-dtype", "on adapters, which are saved in f32, without --lora-merge");
    }
    let parsed = word.parse();
    parsed.map(Some).map_err(|error: ringspan_models::Error| Error::Settings(format!("--export-dtype: {error}")))
}

/// The device that computes, the type in which it does, and where activations wait.
struct Computation {
    device: DeviceName,
    dtype: Precision,
    offload_activations: bool,
}

impl Computation {
    fn new(s: &Settings) -> Result<Self> {
        let device = s.device.as_deref().map_or(Ok(DeviceName::default()), str::parse)?;
        let dtype: Precision = s.dtype.as_deref().map_or(Ok(Precision::default()), str::parse)?;
        if dtype == Precision::Bf16 && s.activations.is_some() {
            return no_effect(
                "activations",
                "with --dtype bf16: what waits for the backward pass is as it was computed",
            );
        }
        let offload_activations = s.offload_activations.unwrap_or(false);
        if offload_activations && device == DeviceName::Cpu {
            return no_effect("offload-activations", "with --device cpu: there, activations are on the CPU");
        }
        Ok(Self { device, dtype, offload_activations })
    }
}

/// The sizes of the mesh's axes, and how parameters are sharded over it.
struct Axes {
    ring: usize,
    ulysses: usize,
    dp_replicate: usize,
    dp_shard: usize,
    tp: usize,
    sharding: Sharding,
}

impl Axes {
    fn new(s: &Settings) -> Result<Self> {
        let has_other_axes = [s.ulysses, s.dp_replicate, s.dp_shard, s.tp].iter().any(Option::is_some);
        let ring = positive("ring", s.ring.unwrap_or(if has_other_axes { 1 } else { 2 }))?;
        let ulysses = positive("ulysses", s.ulysses.unwrap_or(1))?;
        let dp_replicate = positive("dp-replicate", s.dp_replicate.unwrap_or(1))?;
        let dp_shard = positive("dp-shard", s.dp_shard.unwrap_or(1))?;
        let tp = positive("tp", s.tp.unwrap_or(1))?;
        for (flag, size) in [("ep", s.ep), ("moe-dp", s.moe_dp)] {
            positive(flag, size.unwrap_or(1))?;
        }
        // Sharding is accepted on one rank too, so that one configuration runs on any mesh.
        let sharding = s.sharding.as_deref().unwrap_or("full").parse()?;
        if sharding == Sharding::None && dp_shard > 1 {
            return Err(Error::Settings(format!(
                "--sharding none contradicts --dp-shard {dp_shard}: ranks that hold whole copies are --dp-replicate {}",
                dp_replicate.saturating_mul(dp_shard)
            )));
        }
        Ok(Self { ring, ulysses, dp_replicate, dp_shard, tp, sharding })
    }
}

/// The sequences of an optimiser step.
struct StepSize {
    sequence_length: usize,
    /// Sequences of a micro-batch.
    batch_size: usize,
    /// Micro-batches of a step.
    grad_accumulation: usize,
    packing: Packing,
}

impl StepSize {
    fn new(s: &Settings, dp_replicate: usize, dp_shard: usize) -> Result<Self> {
        let data_ranks = dp_replicate.saturating_mul(dp_shard);
        let sequence_length = s.sequence_length.unwrap_or(8192);
        if sequence_length < 2 {
            return Err(Error::Settings(format!(
                "--sequence-length is {sequence_length}, but a token can be predicted only from one before it: at least 2"
            )));
        }
        let batch_size = positive("batch-size", s.batch_size.unwrap_or(data_ranks))?;
        if batch_size < data_ranks {
            return Err(Error::Settings(format!(
                "--batch-size {batch_size} leaves {} of the {data_ranks} parts of a batch (--dp-replicate {dp_replicate} x \
                 --dp-shard {dp_shard}) without a sequence: at least {data_ranks}",
                data_ranks - batch_size
            )));
        }
        let grad_accumulation = positive("grad-accumulation", s.grad_accumulation.unwrap_or(1))?;
        let packing: Packing = s.packing.as_deref().unwrap_or("in-order").parse()?;
        if packing == Packing::Balanced && batch_size.saturating_mul(grad_accumulation) == 1 {
            return no_effect(
                "packing balanced",
                "on one sequence a step: --batch-size 1 x --grad-accumulation 1 leaves nothing to distribute",
            );
        }
        Ok(Self { sequence_length, batch_size, grad_accumulation, packing })
    }
}

fn training_length(s: &Settings) -> Result<TrainingLength> {
    match (s.steps, s.epochs) {
        (Some(_), Some(_)) => {
            Err(Error::Settings("--steps and --epochs exclude each other: both say how long a run is".into()))
        }
        (_, Some(epochs)) if !(epochs > 0.0 && epochs.is_finite()) => {
            Err(Error::Settings(format!("--epochs is {epochs}, but must be above 0 and finite")))
        }
        (_, Some(epochs)) => Ok(TrainingLength::Epochs(epochs)),
        (Some(0), _) => Err(Error::Settings("--steps is 0, but must be at least 1".into())),
        (steps, None) => Ok(TrainingLength::Steps(steps.unwrap_or(220))),
    }
}

fn peak_lr(s: &Settings, kind: OptimizerKind, has_adapters: bool) -> Result<f64> {
    let is_new = s.model.is_none();
    let peak_lr = s.lr.unwrap_or(match (kind, is_new) {
        // A rate that is fast for the built-in model of width 128 is too fast for most others.
        (OptimizerKind::AdamW, true) if s.model_config.is_some() => 3e-4,
        (OptimizerKind::AdamW, true) => 5e-3,
        (OptimizerKind::AdamW, false) if has_adapters => 2e-4,
        (OptimizerKind::AdamW, false) => 1e-5,
        (OptimizerKind::Sgd, true) => 0.1,
        (OptimizerKind::Sgd, false) => 1e-3,
    });
    within("lr", peak_lr, 0.0, f64::MAX)?;
    Ok(peak_lr)
}

fn check_spike_settings(s: &Settings) -> Result<()> {
    match (s.spike_factor, s.spike_steps) {
        (Some(factor), _) if factor != 0.0 && !(factor > 1.0 && factor.is_finite()) => Err(Error::Settings(format!(
            "--spike-factor is {factor}, but must be above 1 and finite, or 0 for no limit"
        ))),
        // A run resumed without `spike-factor` keeps its `spike-steps`, which are then without effect.
        (None, Some(_)) => no_effect("spike-steps", "without --spike-factor, which says what a spike is"),
        (_, Some(0)) => Err(Error::Settings("--spike-steps is 0, but must be at least 1".into())),
        _ => Ok(()),
    }
}

fn deadline(s: &Settings) -> Result<Duration> {
    let seconds = s.deadline.unwrap_or(600.0);
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|deadline| !deadline.is_zero())
        .ok_or_else(|| Error::Settings(format!("--deadline is {seconds} seconds, but must be above 0 and finite")))
}

/// Which activations are recomputed; none for `auto`.
fn recompute(given: Option<&str>) -> Result<Option<Recompute>> {
    match given {
        None => Ok(Some(Recompute::default())),
        Some("auto") => Ok(None),
        Some(given) => given.parse().map(Some).map_err(|_| {
            let possible = "auto, full, keep-attention, nothing";
            ringspan::Error::Unknown { what: "recompute", given: given.into(), possible }.into()
        }),
    }
}
