//! Speed of steps over the paged cache: prefill in chunks, and decoding at several depths, of a model with random weights and the
//! shape of Gemma 3 270M (hidden 640, 18 layers, 4 query heads and 1 key-value head of 256).
//!
//! Run `cargo bench -p ringspan-serve --bench paged`. Arguments change the settings: `dtype=bf16`, `ranks=2`, `threads=1` (a
//! rank), `prompt=4096`, `chunk=1024`, `page=16`, `depths=0,4096,16384`, `streams=1,16`, `tokens=16`, `vocabulary=262144`,
//! `kv=f32|bf16|q8_0`, `share=no`, `logits=no`, `model=FILE.gguf`, `generate=yes`.
//!
//! With `share=no`, each rank computes every linear layer of decoded tokens, as it does while a prompt waits. With `logits=no`, only the
//! layers are timed: here rank 0 computes all logits, which ranks of a server share.
//!
//! The memory of the cache has been written as far as `prompt`; beyond it, its pages are one page of zeros in the processor's caches, so
//! that a depth up to `prompt` is needed to see what memory costs. With `generate=yes`, the same prompt is read,
//! and tokens are generated, by `generate` with its contiguous cache.

use candle_core::DType;
use ringspan::Group;
use ringspan_candle::{Devices, Weight};
use ringspan_models::{Config, Decoder, ModelSource};
use ringspan_serve::engine::step::{Outputs, Step, StepSequence, WindowPages};
use ringspan_serve::paged::{KvDtype, PagedCache, execute};
use ringspan_serve::{Mesh, Model, Options, Result, Sampling, generate};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Settings {
    dtype: DType,
    kv_dtype: Option<KvDtype>,
    ranks: usize,
    threads: usize,
    prompt: usize,
    chunk: usize,
    page: usize,
    depths: Vec<usize>,
    streams: Vec<usize>,
    tokens: usize,
    vocabulary: usize,
    shares_layers: bool,
    logits: bool,
    model: Option<String>,
    generate: bool,
}

impl Settings {
    fn read() -> Self {
        let words: Vec<String> = std::env::args().collect();
        let word = |key: &str| words.iter().find_map(|word| word.strip_prefix(&format!("{key}=")).map(str::to_owned));
        let number = |key: &str, default: usize| word(key).and_then(|x| x.parse().ok()).unwrap_or(default);
        let list = |key: &str, default: &str| -> Vec<usize> {
            let given = word(key).unwrap_or_else(|| default.to_owned());
            given.split(',').filter_map(|x| x.parse().ok()).collect()
        };
        let ranks = number("ranks", 1).max(1);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            dtype: if word("dtype").as_deref() == Some("bf16") { DType::BF16 } else { DType::F32 },
            kv_dtype: word("kv").map(|name| name.parse().expect("a type of keys and values")),
            ranks,
            threads: number("threads", (cores / ranks).max(1)),
            prompt: number("prompt", 4096),
            chunk: number("chunk", 1024).max(2),
            page: number("page", 16).max(1),
            depths: list("depths", "0,4096,16384"),
            streams: list("streams", "1,16"),
            tokens: number("tokens", 16).max(1),
            vocabulary: number("vocabulary", 262_144),
            shares_layers: word("share").as_deref() != Some("no"),
            logits: word("logits").as_deref() != Some("no"),
            model: word("model"),
            generate: word("generate").as_deref() == Some("yes"),
        }
    }

    fn model(&self) -> Result<Model> {
        if let Some(file) = &self.model {
            let ModelSource::Model(base) = ModelSource::at(file.as_ref())? else { panic!("{file} is an adapter") };
            let (config, weights) = base.load_stored()?;
            return Model::new(Decoder::new(config)?, weights);
        }
        let config = serde_json::json!({
            "model_type": "gemma3_text", "vocab_size": self.vocabulary, "hidden_size": 640, "intermediate_size": 2048,
            "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
            "sliding_window": 512, "query_pre_attn_scalar": 256, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": true
        });
        let config: Config = serde_json::from_value(config).expect("a known model");
        let decoder = Decoder::new(config)?;
        let weights =
            decoder.init(1)?.into_iter().map(|(name, weight)| Ok((name, weight.to_dtype(self.dtype)?.into())));
        let weights = weights.collect::<Result<BTreeMap<String, Weight>>>()?;
        Model::new(decoder, weights)
    }
}

/// Computes a step, and the logits of its outputs on rank 0 as a server needs them.
fn step(
    settings: &Settings,
    group: &Arc<Group>,
    model: &Model,
    cache: &mut PagedCache,
    sequences: Vec<StepSequence>,
) -> Result<Duration> {
    let began = Instant::now();
    let step = Step { sequences, shares_layers: settings.shares_layers, ..Step::default() };
    let hidden = execute(&group.clone().into(), model, cache, &step)?;
    if let Some(hidden) = hidden.filter(|_| settings.logits) {
        let normed = model.decoder().norm(model.weights(group.rank()), &hidden)?;
        let logits = model.decoder().model().head().logits(&normed, model.weights(group.rank()))?;
        std::hint::black_box(logits.dims());
    }
    group.cp().barrier()?;
    Ok(began.elapsed())
}

/// The pages of a sequence with a number of its own; pages are spread over the cache, as after a while of use.
fn pages(settings: &Settings, sequence: usize, sequences: usize, tokens: usize) -> Vec<u32> {
    let number = |index: usize| (index / settings.ranks * sequences + sequence) as u32;
    (0..tokens.div_ceil(settings.page)).map(number).collect()
}

fn rank(settings: &Settings, model: &Model, group: &Arc<Group>) -> Result<Vec<String>> {
    let most = |list: &[usize]| list.iter().copied().max().unwrap_or(0);
    let deepest = most(&settings.depths).max(settings.prompt) + settings.tokens;
    let on_rank = (deepest.div_ceil(settings.page)).div_ceil(settings.ranks);
    let room = on_rank * most(&settings.streams).max(1);
    let mut cache = PagedCache::with_dtype(model, room, settings.page, settings.kv_dtype)?;
    let (mut lines, mut time) = (Vec::new(), Duration::ZERO);
    for start in (0..settings.prompt).step_by(settings.chunk) {
        let end = settings.prompt.min(start + settings.chunk);
        let tokens = (start..end).map(|token| (token % settings.vocabulary) as u32).collect();
        let outputs = if end == settings.prompt { Outputs::Last } else { Outputs::None };
        let pages = pages(settings, 0, 1, end);
        let window = WindowPages { first: 0, pages: pages.clone() };
        let sequence = StepSequence { start, tokens, pages, window, outputs, adapter: None, replica: 0 };
        time += step(settings, group, model, &mut cache, vec![sequence])?;
    }
    let speed = settings.prompt as f64 / time.as_secs_f64();
    lines.push(format!("prefill of {} tokens: {speed:8.1} tokens/s", settings.prompt));
    for depth in &settings.depths {
        for streams in &settings.streams {
            let (mut shortest, mut time) = (Duration::MAX, Duration::ZERO);
            for position in *depth..depth + settings.tokens {
                let sequence = |number: usize| StepSequence {
                    start: position,
                    tokens: vec![number as u32 + 5],
                    pages: pages(settings, number, *streams, position + 1),
                    window: WindowPages { first: 0, pages: pages(settings, number, *streams, position + 1) },
                    outputs: Outputs::Last,
                    adapter: None,
                    replica: 0,
                };
                let step = step(settings, group, model, &mut cache, (0..*streams).map(sequence).collect())?;
                (shortest, time) = (shortest.min(step), time + step);
            }
            let speed = |time: Duration| *streams as f64 / time.as_secs_f64();
            lines.push(format!(
                "decode of {streams:3} streams at depth {depth:6}: {:8.1} tokens/s (best step {:8.1})",
                speed(time / settings.tokens as u32),
                speed(shortest)
            ));
        }
    }
    Ok(lines)
}

fn main() -> Result<()> {
    let settings = Settings::read();
    let model = settings.model()?;
    let mesh = Mesh { ring: settings.ranks, threads: settings.threads, devices: Devices::CPU, ..Mesh::single() };
    let Settings { ranks, threads, dtype, chunk, page, .. } = settings;
    println!("{ranks} ranks of {threads} threads, {dtype:?}, chunks of {chunk}, pages of {page}");
    for line in mesh.run(|group| rank(&settings, &model, &group))?.remove(0) {
        println!("{line}");
    }
    if settings.generate {
        let prompt: Vec<u32> = (0..settings.prompt).map(|token| (token % settings.vocabulary) as u32).collect();
        let options = Options { sampling: Sampling::greedy(), max_tokens: settings.tokens, stop_tokens: Vec::new() };
        let one = &generate(&model, &mesh, &prompt, &options, |_| Ok(ControlFlow::Continue(())))?[0];
        let speed = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
        println!(
            "generate: prefill of {} tokens {:8.1} tokens/s, decode {:8.1} tokens/s",
            settings.prompt,
            speed(settings.prompt, one.prefill),
            speed(settings.tokens - 1, one.decode)
        );
    }
    Ok(())
}
