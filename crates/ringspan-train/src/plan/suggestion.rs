//! Proposes the nearest setting with which a run fits into memory.

use super::{cpu_memory::MemoryMoment, rank_sizes::Shape};
use crate::{
    config::{DataSource, Sharding, TrainConfig},
    error::Result,
    human_readable::{bytes_text, grouped},
};
use ringspan_candle::{Precision, Recompute, offload};

/// Proposed sequence lengths are multiples of this.
const STEP: u64 = 256;

/// Tokens of the fullest rank and of the whole batch, and the number of ranks that share a memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Workload {
    pub(super) tokens: u64,
    pub(super) batch: u64,
    /// Number of rows of a micro-batch per data-parallel rank.
    pub(super) rows: u64,
    pub(super) ranks: u64,
    /// Whether activations are offloaded from the GPU to the CPU.
    pub(super) offloads: bool,
}

/// The memory that is predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryKind {
    /// The memory of the CPU, which ranks that compute on GPUs need as well.
    Cpu,
    /// The memory of a GPU.
    Gpu,
}

impl Shape {
    /// Predicted memory on `side` of a rank with `tokens` tokens, where all ranks have `batch` tokens: the fullest moment, and
    /// its parts.
    pub(super) fn memory_on(&self, side: MemoryKind, tokens: u64, batch: u64) -> Result<MemoryMoment> {
        match (side, self.computes_in) {
            (MemoryKind::Gpu, _) => self.gpu_memory(tokens),
            (MemoryKind::Cpu, Some(_)) => Ok(self.cpu_memory_of_gpu_rank(tokens, batch)),
            (MemoryKind::Cpu, None) => self.memory(tokens, batch),
        }
    }
}

/// A setting near that of `config` with which the ranks that share a memory need no more than `free` bytes, in words.
pub(super) fn nearest(
    config: &TrainConfig,
    shape: &Shape,
    load: &Workload,
    side: MemoryKind,
    free: u64,
) -> Result<String> {
    let needs = |shape: &Shape, tokens: u64, batch: u64| -> Result<u64> {
        let (_, parts) = shape.memory_on(side, tokens, batch)?;
        Ok(load.ranks * parts.iter().map(|(_, bytes)| bytes).sum::<u64>())
    };
    let least = shape.with_full_recompute();
    let found =
        |settings: &str, needed: u64| Ok(format!("the nearest that fits is {settings} ({})", bytes_text(needed)));
    let mut given = String::new();
    if side == MemoryKind::Gpu && !shape.offloads && shape.layers > offload::RESIDENT_LAYERS as u64 {
        let needed = needs(&shape.offloaded(), load.tokens, load.batch)?;
        if needed <= free {
            let away = load.ranks * shape.away(load.tokens) * (shape.layers - offload::RESIDENT_LAYERS as u64);
            return found(
                &format!("--offload-activations, with {} more of the CPU's memory", bytes_text(away)),
                needed,
            );
        }
    }
    // Where a GPU computes and keeps the activations, the CPU's memory does not depend on `recompute`.
    if shape.recompute != Recompute::Full && (side == MemoryKind::Gpu || shape.offloads || shape.computes_in.is_none())
    {
        given = "--recompute full ".into();
        let needed = needs(&least, load.tokens, load.batch)?;
        if needed <= free {
            return found(given.trim_end(), needed);
        }
    }
    // Otherwise, fewer tokens per sequence are tried, or, for a file of tokens, fewer sequences at a time.
    let whole = config.sequence_length as u64;
    let part = |of: u64, parts: u64, total: u64| (of as u128 * parts as u128 / total.max(1) as u128) as u64;
    let at = |length: u64| needs(&least, part(load.tokens, length, whole), part(load.batch, length, whole));
    let smallest = STEP.min(whole);
    let without_tokens = needs(&least, 1, 1)?;
    let mut others = match side {
        MemoryKind::Cpu => vec!["take fewer ranks", "share the model with more machines"],
        MemoryKind::Gpu => vec!["share layers among more GPUs (--tp)"],
    };
    if side == MemoryKind::Cpu && shape.offloads {
        others.insert(0, "leave out --offload-activations");
    }
    if side == MemoryKind::Gpu && load.ranks > 1 {
        others.push("give fewer ranks to a GPU");
    }
    if side == MemoryKind::Gpu && config.dtype == Precision::F32 {
        others.push("compute in half of it (--dtype bf16)");
    }
    if side == MemoryKind::Cpu && config.sharding == Sharding::None && config.ranks() > config.dp_replicate {
        others.insert(0, "leave out --sharding none");
    }
    if config.lora.is_none() {
        others.push("train adapters (--lora-rank)");
    }
    let by_parameters = format!(
        "no shorter sequence would, since each of the {} ranks here needs {} whatever its tokens are: {}",
        load.ranks,
        bytes_text(without_tokens / load.ranks.max(1)),
        others.join(", or ")
    );
    if without_tokens > free {
        return Ok(by_parameters);
    }
    if let DataSource::Tokens(_) = config.source {
        for parts in 2..=load.rows {
            let rows = load.rows.div_ceil(parts);
            let needed = needs(&least, part(load.tokens, rows, load.rows), load.batch)?;
            if needed <= free {
                return found(
                    &format!("{given}--grad-accumulation {}", config.grad_accumulation as u64 * parts),
                    needed,
                );
            }
        }
        return Ok(format!("shorter rows would, or {}", others.join(", or ")));
    }
    if at(smallest)? > free {
        return Ok(by_parameters);
    }
    // Finds the longest length in multiples of STEP by bisection, as the memory grows with the length.
    let (mut fits, mut fails) = (smallest / STEP, whole.div_ceil(STEP));
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        match at(middle * STEP)? <= free {
            true => fits = middle,
            false => fails = middle,
        }
    }
    let length = (fits * STEP).max(smallest);
    found(&format!("{given}--sequence-length {}", grouped(length).replace(',', "")), at(length)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{data::Batch, settings::Settings, setup::Setup};
    use ringspan_models::{Config, Decoder};

    fn setting(settings: Settings, share: f64) -> String {
        let config = serde_json::json!({
            "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4, "hidden_act": "silu",
        });
        let model: Config = serde_json::from_value(config).expect("a config");
        let decoder = Decoder::new(model).expect("supported");
        let weights = decoder.init(1).expect("fits");
        let config = TrainConfig::resolve(settings).expect("possible");
        let batch = Batch { rows: 0, length: 0, tokens: vec![], targets: vec![], segments: vec![] };
        let setup = Setup::for_batch(&config, decoder, weights, batch).expect("possible");
        let shape = Shape::new(&config, &setup.spec, config.recompute.unwrap_or_default()).expect("possible");
        let load = Workload { tokens: 1 << 15, batch: 1 << 16, rows: 4, ranks: 2, offloads: false };
        let (_, parts) = shape.memory(load.tokens, load.batch).expect("possible");
        let needed = load.ranks * parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
        nearest(&config, &shape, &load, MemoryKind::Cpu, (needed as f64 * share) as u64).expect("possible")
    }

    #[test]
    fn the_nearest_setting_costs_time_before_it_costs_length() {
        let text = |recompute: &str| Settings {
            sequence_length: Some(1 << 16),
            ring: Some(2),
            recompute: Some(recompute.into()),
            ..Settings::default()
        };
        let found = setting(text("nothing"), 0.7);
        assert!(found.contains("--recompute full") && !found.contains("--sequence-length"), "{found}");
        let found = setting(text("nothing"), 0.1);
        assert!(found.contains("--recompute full --sequence-length "), "{found}");
        let length: u64 = found
            .split("--sequence-length ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next()?.parse().ok())
            .expect("a length");
        assert!(length.is_multiple_of(STEP) && length < 1 << 15, "{found}");
        let found = setting(text("full"), 0.5);
        assert!(found.contains("is --sequence-length 3"), "{found}");
        let found = setting(text("full"), 0.001);
        assert!(found.contains("--lora-rank"), "{found}");
        let tokens = Settings { tokens: Some("tokens".into()), ring: Some(2), ..Settings::default() };
        assert!(setting(tokens.clone(), 0.6).contains("--grad-accumulation 2"));
        assert!(setting(tokens, 0.1).contains("shorter rows"));
    }
}
