//! Peak memory of a prompt chunk without the cache, counted by the allocator: it does not depend on the length before the chunk.

use ringspan_candle::Weight;
use ringspan_models::{Config, Decoder};
use ringspan_serve::engine::step::{Outputs, Step, StepSequence, WindowPages};
use ringspan_serve::paged::{PagedCache, execute};
use ringspan_serve::{Groups, Mesh, Model};
use ringspan_testing::CountingAllocator;
use std::collections::BTreeMap;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const PAGE: usize = 16;
const CHUNK: usize = 128;

/// A Gemma with a layer that sees a window and one that sees everything.
fn model() -> Model {
    let config: Config = serde_json::from_value(serde_json::json!({
        "model_type": "gemma3_text", "vocab_size": 97, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 512, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": true
    }))
    .expect("a known model");
    let decoder = Decoder::new(config).expect("sizes that fit");
    let weights: BTreeMap<String, Weight> =
        decoder.init(1).expect("weights").into_iter().map(|(name, weight)| (name, weight.into())).collect();
    Model::new(decoder, weights).expect("a whole model")
}

/// Peak bytes of all ranks, without the cache and the model, while they compute a chunk after `context` tokens.
fn peak_without_cache(model: &Model, ranks: usize, context: usize) -> usize {
    let before = ALLOCATOR.allocated();
    let mesh = Mesh { ring: ranks, ..Mesh::single() };
    let end = context + CHUNK;
    let pages: Vec<u32> = (0..end.div_ceil(PAGE)).map(|index| (index / ranks) as u32).collect();
    let tokens = (0..CHUNK as u32).map(|token| token % 97).collect();
    let window = WindowPages { first: 0, pages: pages.clone() };
    let sequence =
        StepSequence { start: context, tokens, pages, window, outputs: Outputs::Last, adapter: None, replica: 0 };
    let step = Step { sequences: vec![sequence], ..Step::default() };
    let cached = mesh
        .run(|group| {
            let groups = Groups::from(group.clone());
            let mut cache = PagedCache::new(model, end.div_ceil(PAGE).div_ceil(ranks), PAGE)?;
            group.cp().barrier()?;
            ALLOCATOR.reset_peak();
            group.cp().barrier()?;
            // The second chunk finds buffers that the first has left behind.
            for _ in 0..2 {
                execute(&groups, model, &mut cache, &step)?;
            }
            Ok(cache.bytes())
        })
        .expect("two steps");
    ALLOCATOR.peak() - before - cached.iter().sum::<usize>()
}

/// This is the only test of its program: a process has one allocator, and tests would run at the same time.
#[test]
fn a_chunk_takes_as_much_memory_after_a_long_text_as_after_a_short_one() {
    let model = model();
    for ranks in [1, 3] {
        // With 4,096 tokens on each rank, the kernel packs as many keys at a time as it ever does.
        let contexts = [4096, 32_768].map(|tokens| tokens * ranks);
        let [short, long] = contexts.map(|context| peak_without_cache(&model, ranks, context));
        println!("{ranks} ranks, after {contexts:?} tokens: {short} and {long} bytes without the cache");
        // Lists of pages, rows, runs and tiles grow, by less than a hundredth of the 16,384 bytes of a token in the cache.
        let listed = 160 * (contexts[1] - contexts[0]);
        assert!(long < short + short / 50 + listed, "{ranks} ranks: {short} and {long} bytes");
    }
}
