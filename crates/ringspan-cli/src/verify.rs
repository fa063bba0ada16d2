//! `ringspan verify`: computes the same training step on one rank and on a mesh, and compares all results.

use crate::{mesh, output};
use anyhow::{Context, Result, bail, ensure};
use candle_core::Tensor;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::loss::IGNORE;
use ringspan_candle::{DeviceName, Precision, Weights};
use ringspan_models::{Config, Decoder, Lora, ModelSource};
use ringspan_train::data::{Batch, Sequence};
use ringspan_train::{Settings, StepResults, TrainConfig, single_step};
use std::path::PathBuf;

/// Upper limits on relative differences between the mesh and one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Tolerance {
    /// Limit for the loss, the logits and the updated parameters.
    values: f64,
    /// Limit for the gradients.
    gradients: f64,
}

impl Tolerance {
    /// Limits that rounding in this type can reach, and hardly exceed.
    fn of(dtype: Precision) -> Self {
        match dtype {
            // Only the order of sums differs.
            Precision::F32 => Self { values: 1e-5, gradients: 1e-5 },
            // A value is off by up to 2^-9 of itself, and the errors propagate through all layers, forward and then backward.
            // An update of AdamW has the size of the learning rate, whatever the size of the gradient is.
            Precision::Bf16 => Self { values: 1e-2, gradients: 3e-2 },
        }
    }
}

/// Runs the same step (ragged rows of packed documents) on one rank and on the given mesh, as training does it, and compares
/// loss, logits, every parameter's gradient, and every parameter after one step of AdamW.
///
/// Prints the relative L2 difference of each and PASS or FAIL; the exit code is 1 if any is above 1e-5; with --dtype bf16,
/// above 1e-2, or 3e-2 for a gradient, and above twice what one rank in bf16 is away from one in f32.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["model", "tiny"]))]
pub(crate) struct VerifyArgs {
    /// A model: a folder in the layout of Hugging Face, an adapter's folder, a GGUF file
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// A small model with random weights; with --ep or --moe-dp a mixture of experts
    #[arg(long)]
    tiny: bool,
    /// Copies of the model, each with a part of the rows
    #[arg(long, value_name = "N", help_heading = "Mesh")]
    dp_replicate: Option<usize>,
    /// Ranks with a part of the rows each, that share one copy of the model
    #[arg(long, value_name = "N", help_heading = "Mesh")]
    dp_shard: Option<usize>,
    /// Ring size R: ranks between which keys and values move
    #[arg(long, value_name = "R", help_heading = "Mesh")]
    ring: Option<usize>,
    /// Ulysses size U: neighbouring ranks that exchange tokens for heads
    #[arg(long, value_name = "U", help_heading = "Mesh")]
    ulysses: Option<usize>,
    /// Ranks that share the width of every layer, and of the vocabulary
    #[arg(long, value_name = "T", help_heading = "Mesh")]
    tp: Option<usize>,
    /// Ranks that share the experts, each with whole ones of its own
    #[arg(long, value_name = "E", help_heading = "Mesh")]
    ep: Option<usize>,
    /// Copies of the experts
    #[arg(long, value_name = "M", help_heading = "Mesh")]
    moe_dp: Option<usize>,
    /// Sharding of parameters, gradients and optimizer state: full, none [default: full]
    #[arg(long, value_name = "NAME", help_heading = "Mesh")]
    sharding: Option<String>,
    /// Activations to recompute for the backward pass: full, keep-attention, nothing [default: keep-attention]
    #[arg(long, value_name = "NAME", help_heading = "Mesh")]
    recompute: Option<String>,
    /// Train adapters of this rank (inner width) on all linear layers, with each expert its own, instead of the model
    #[arg(long, value_name = "R", help_heading = "LoRA")]
    lora_rank: Option<usize>,
    /// Probability with which elements of the adapters' inputs are dropped [default: 0]
    #[arg(long, value_name = "P", help_heading = "LoRA")]
    lora_dropout: Option<f64>,
    /// Threads of each rank [default: cores / ranks, at least 1]
    #[arg(long, value_name = "N", help_heading = "Mesh")]
    threads: Option<usize>,
    /// Device of the mesh: cpu, cuda (all GPUs; ranks take them in turn), cuda:N (one of them). The one rank it is compared
    /// with computes on the CPU
    #[arg(long, value_name = "NAME", help_heading = "Mesh")]
    device: Option<String>,
    /// Type in which the mesh computes: f32, or bf16, whose rounding is allowed for. The one rank computes in f32
    #[arg(long, value_name = "TYPE", help_heading = "Mesh")]
    dtype: Option<String>,
    /// Keep stored activations in memory of the CPU until the backward pass, not on the GPU; the tiny model has four layers
    /// then, two of which do so
    #[arg(long)]
    offload_activations: bool,
    /// Layout of the tokens over the ranks: contiguous, zigzag, striped:K, per-document-zigzag, balanced, balanced:BLOCK
    #[arg(long, default_value = "zigzag", value_name = "NAME")]
    layout: String,
    /// Strategy of attention: ring, bidirectional-ring, all-gather, halo, pass-q
    #[arg(long, default_value = "ring", value_name = "NAME")]
    strategy: String,
    /// Tokens S of a row
    #[arg(long, default_value_t = 256, value_name = "S", value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    sequence_length: u32,
    /// Seed of the random tokens
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
}

impl VerifyArgs {
    /// Settings of the step on the given mesh.
    fn config(&self) -> Result<TrainConfig> {
        let axes = [self.dp_replicate, self.dp_shard, self.ulysses, self.tp];
        let ring = self.ring.or_else(|| axes.iter().all(Option::is_none).then_some(1));
        self.resolved(Settings {
            dp_replicate: self.dp_replicate,
            dp_shard: self.dp_shard,
            ring,
            ulysses: self.ulysses,
            tp: self.tp,
            ep: self.ep,
            moe_dp: self.moe_dp,
            sharding: self.sharding.clone(),
            threads: self.threads,
            device: self.device.clone(),
            dtype: self.dtype.clone(),
            offload_activations: self.offload_activations.then_some(true),
            layout: Some(self.layout.clone()),
            strategy: Some(self.strategy.clone()),
            ..self.settings()
        })
    }

    /// Settings of the same step on one rank of the CPU that computes in this type.
    fn alone(&self, dtype: Precision) -> Result<TrainConfig> {
        self.resolved(Settings { ring: Some(1), dtype: Some(dtype.to_string()), ..self.settings() })
    }

    /// Adds the adapters to the resolved settings, which alone would refuse adapters of the tiny model.
    fn resolved(&self, settings: Settings) -> Result<TrainConfig> {
        Ok(TrainConfig { lora: self.lora()?, ..TrainConfig::resolve(settings)? })
    }

    fn lora(&self) -> Result<Option<Lora>> {
        let Some(rank) = self.lora_rank else {
            ensure!(self.lora_dropout.is_none(), "--lora-dropout has no effect without --lora-rank");
            return Ok(None);
        };
        let lora = Lora::of_all_layers(rank, 2.0 * rank as f64)?;
        Ok(Some(lora.with_dropout(self.lora_dropout.unwrap_or(0.0))?))
    }

    fn settings(&self) -> Settings {
        Settings {
            model: self.model.clone(),
            tokens: Some("random".into()),
            recompute: self.recompute.clone(),
            // Weights are near 0.02, so an update that is left out, or made twice, is far above the tolerance.
            lr: Some(1e-4),
            warmup: Some(0),
            ..Settings::default()
        }
    }
}

impl std::fmt::Display for Tolerance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { values, gradients } = self;
        match values == gradients {
            true => write!(f, "{values:.0e}"),
            false => write!(f, "{values:.0e}, {gradients:.0e} of a gradient,"),
        }
    }
}

pub(crate) fn run(args: &VerifyArgs, processes: &ProcessGroup) -> Result<()> {
    let mut config = args.config()?;
    processes.check(config.ranks())?;
    config.set_local_ranks(processes);
    mesh::limit_threads(config.ranks(), config.threads);
    let (decoder, weights) = match &args.model {
        Some(path) => {
            let (config, weights) = ModelSource::at(path)?.load()?;
            (Decoder::new(config)?, weights)
        }
        None => tiny(args.ep.is_some() || args.moe_dp.is_some(), if args.offload_activations { 4 } else { 2 })?,
    };
    let (decoder, weights) = adapted(decoder, weights, config.lora.clone())?;
    let rows = config.data_ranks() + 1;
    let batch = random(rows, args.sequence_length as usize, decoder.config().vocab_size, args.seed)?;
    let TrainConfig { dp_replicate, dp_shard, ring, ulysses, tp, .. } = config;
    let mut mesh =
        format!("dp_replicate {dp_replicate} x dp_shard {dp_shard} x ring {ring} x ulysses {ulysses} x tp {tp}");
    for (name, size) in [("ep", config.ep), ("moe_dp", config.moe_dp)] {
        mesh += &size.map_or_else(String::new, |size| format!(", {name} {size}"));
    }
    if let Some(lora) = &config.lora {
        mesh += &format!(", adapters of rank {}", lora.rank);
    }
    if config.device != DeviceName::Cpu {
        mesh += &format!(" on {} in {} (the one rank is on the CPU, in f32)", config.device, config.dtype);
    } else if config.dtype != Precision::F32 {
        mesh += &format!(" in {} (the one rank computes in f32)", config.dtype);
    }
    output::line(format_args!(
        "{rows} rows of {} tokens in {} documents, {} of them tokens to predict: 1 rank against {mesh}, {}, {}",
        args.sequence_length,
        batch.segments.len(),
        batch.valid_targets(),
        config.strategy,
        config.layout
    ))?;
    // The mesh runs first: where ranks are processes, only one of them has anything to do afterwards.
    let Some(actual) = single_step(processes, &config, (&decoder, &weights), &batch)? else { return Ok(()) };
    actual.block_transport.iter().for_each(output::note);
    let alone = |dtype: Precision| {
        let config = args.alone(dtype)?;
        single_step(&ProcessGroup::single(), &config, (&decoder, &weights), &batch)?.context("a rank of its own")
    };
    let (expected, tolerance) = (alone(Precision::F32)?, Tolerance::of(config.dtype));
    // How far rounding leads depends on the model, so the mesh may differ by as much as one rank that rounds to bf16 does.
    let rounded = if config.dtype == Precision::Bf16 { Some(alone(Precision::Bf16)?) } else { None };
    let by_rounding = match &rounded {
        Some(rounded) => compared(&expected, rounded, tolerance)?,
        None => Vec::new(),
    };
    let mut all = compared(&expected, &actual, tolerance)?;
    for ((_, _, passes), (_, difference, _)) in all.iter_mut().zip(by_rounding) {
        *passes = passes.max(2.0 * difference);
    }
    report(&all, tolerance, rounded.is_some())
}

/// The name of a quantity, its relative difference, and the upper limit for it.
type Compared = (String, f64, f64);

/// Compares all quantities of two trials.
fn compared(expected: &StepResults, actual: &StepResults, tolerance: Tolerance) -> Result<Vec<Compared>> {
    let Tolerance { values, gradients } = tolerance;
    let mut all = vec![("loss".to_owned(), (expected.loss - actual.loss).abs() / expected.loss.abs(), values)];
    all.push(("logits".to_owned(), difference(&expected.logits, &actual.logits), values));
    let kinds = [
        ("d ", &expected.gradients, &actual.gradients, gradients),
        ("updated ", &expected.updated, &actual.updated, values),
    ];
    for (kind, expected, actual, passes) in kinds {
        for (name, values) in expected {
            let other = actual.get(name).with_context(|| format!("the mesh gave no {kind}{name}"))?;
            all.push((format!("{kind}{name}"), difference(values, other), passes));
        }
    }
    Ok(all)
}

fn report(all: &[Compared], tolerance: Tolerance, is_rounded: bool) -> Result<()> {
    let tolerance = match is_rounded {
        true => format!("{tolerance} or twice what one rank in bf16 differs by,"),
        false => tolerance.to_string(),
    };
    let width = all.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    let mut failed = 0;
    for (name, difference, passes) in all {
        // NaN fails, since it is not below the limit.
        let good = difference <= passes;
        failed += usize::from(!good);
        output::line(format_args!("{name:width$}  {difference:9.2e}{}", if good { "" } else { "  FAIL" }))?;
    }
    let worst = all
        .iter()
        .map(|(_, difference, _)| *difference)
        .fold(0.0, |worst: f64, x| if x > worst || x.is_nan() { x } else { worst });
    if failed > 0 {
        output::line("FAIL")?;
        bail!("{failed} of {} differ by more than {tolerance} (relative L2), at worst by {worst:.2e}", all.len());
    }
    output::line(format_args!(
        "PASS: {} quantities, at worst {worst:.2e} apart (relative L2; {tolerance} passes)",
        all.len()
    ))?;
    Ok(())
}

/// A Qwen3 of few layers, with query and key norms, grouped heads and an untied head; or one with experts and a load-balancing
/// loss.
fn tiny(sparse: bool, layers: usize) -> Result<(Decoder, Weights)> {
    let mut config = serde_json::json!({
        "model_type": "qwen3", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 1 << 20, "tie_word_embeddings": false, "hidden_act": "silu"
    });
    if sparse {
        let experts = serde_json::json!({
            "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": true,
            "router_aux_loss_coef": 0.01
        });
        config.as_object_mut().into_iter().zip(experts.as_object().cloned()).for_each(|(all, more)| all.extend(more));
    }
    let decoder = Decoder::new(serde_json::from_value::<Config>(config)?)?;
    let weights = decoder.init(1)?;
    Ok((decoder, weights))
}

/// Attaches the adapters, if any, to the model. Both of their matrices are random: with B at 0, A would have no gradient.
fn adapted(decoder: Decoder, weights: Weights, lora: Option<Lora>) -> Result<(Decoder, Weights)> {
    let Some(lora) = lora else { return Ok((decoder, weights)) };
    let decoder = decoder.with_lora(lora)?;
    let mut weights = decoder.adapted(weights, 1)?;
    let mut random = ChaCha8Rng::seed_from_u64(2);
    for (_, weight) in weights.iter_mut().filter(|(name, _)| name.ends_with(".lora_B.weight")) {
        let values = (0..weight.elem_count()).map(|_| (random.next_u32() as f32 / u32::MAX as f32 - 0.5) * 0.1);
        *weight = Tensor::from_iter(values, weight.device())?.reshape(weight.dims())?;
    }
    Ok((decoder, weights))
}

/// Random rows of packed documents, every second of which ends early.
fn random(rows: usize, len: usize, vocabulary: usize, seed: u64) -> Result<Batch> {
    ensure!(vocabulary > 0, "the model knows no token");
    let half = len / 2 + 1;
    let third = (len - half) / 2;
    let kinds = [vec![half, third, len - half - third], vec![len / 3 + 1, (len - len / 3 - 1) * 2 / 3]];
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut sequence = |row: usize| {
        let segments: Vec<usize> = kinds[row % 2].iter().copied().filter(|len| *len > 0).collect();
        let tokens: Vec<u32> =
            (0..segments.iter().sum()).map(|_| (random.next_u64() % vocabulary as u64) as u32).collect();
        let mut targets: Vec<u32> = tokens[1..].iter().copied().chain([IGNORE]).collect();
        let mut end = 0;
        for piece in &segments {
            end += piece;
            targets[end - 1] = IGNORE;
        }
        Sequence { tokens, targets, segment_lengths: segments }
    };
    Ok(Batch::new(&(0..rows).map(&mut sequence).collect::<Vec<_>>(), len))
}

/// The relative difference ‖a - b‖ / ‖a‖, or ‖b‖ where a is 0.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let size = norm(&mut a.iter().map(|a| f64::from(*a)));
    if size > 0.0 { apart / size } else { apart }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_is_relative_and_nan_never_passes() {
        assert_eq!(difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(difference(&[3.0, 4.0], &[0.0, 0.0]), 1.0);
        assert_eq!(difference(&[0.0], &[2.0]), 2.0);
        let unknown = difference(&[1.0], &[f32::NAN]);
        assert!(unknown.is_nan() || unknown > Tolerance::of(Precision::Bf16).gradients, "{unknown}");
        assert_eq!(difference(&[1.0], &[]), f64::INFINITY);
    }

    #[test]
    fn the_batch_is_ragged_and_packed_for_every_length() {
        for len in 2..70 {
            let batch = random(3, len, 11, 3).expect("fits");
            assert!(batch.real_tokens() <= 3 * len as u64 && batch.real_tokens() > 2 * len as u64);
            assert!(batch.documents().is_ok() && batch.valid_targets() > 0, "length {len}");
        }
    }
}
