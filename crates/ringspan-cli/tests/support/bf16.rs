//! Checks of commands that compute in bf16, on any device: their results are those of f32 on the CPU, up to rounding.

use super::model::{bench, succeed};
use super::{read, relative_l2};
use ringspan_candle::{Devices, Precision};
use ringspan_models::{Decoder, folder};
use ringspan_serve::{BLOCK, Mesh, Model, Options, Sampling, generate};
use std::ops::ControlFlow;

/// Relative error after two layers: about a dozen roundings of each number, by up to 2^-9 each, most of them by less, and in
/// any direction.
pub const ROUNDED: f64 = 8e-3;

/// The relative difference (L2).
pub fn off(got: &[f32], wanted: &[f32]) -> f64 {
    relative_l2(got, &wanted.iter().map(|x| f64::from(*x)).collect::<Vec<_>>())
}

/// Configurations of a dense model, and of one whose second layer is a mixture of experts.
pub fn models() -> [serde_json::Value; 2] {
    [
        serde_json::json!({}),
        serde_json::json!({
            "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "norm_topk_prob": true, "mlp_only_layers": [0]
        }),
    ]
}

/// Compares scores in bf16 with those in f32 on the CPU; `flags` choose the device. Scores are not closer than the rounding of
/// bf16 allows, either.
pub fn scores_are_those_of_f32_up_to_rounding(flags: &str) {
    for more in models() {
        let bench = bench(&more);
        let text = &std::fs::read_to_string(bench.path("text.txt")).expect("text")[..90];
        std::fs::write(bench.path("short.txt"), text).expect("file");
        let score = "--model model --text short.txt --out out.safetensors --logits";
        succeed(&bench, "score", score);
        let wanted = read(&bench.path("out.safetensors"));
        for mesh in ["", "--ring 2", "--ulysses 2"] {
            succeed(&bench, "score", &format!("{score} --dtype bf16 {flags} {mesh}"));
            let got = read(&bench.path("out.safetensors"));
            for name in ["logprobs", "logits"] {
                let off = off(&got[name].values(), &wanted[name].values());
                println!("{mesh}: {name} in bf16 differs by {off:e}");
                assert!(off <= ROUNDED, "{mesh}: {name} differs by {off:e}");
            }
            let off = off(&got["logits"].values(), &wanted["logits"].values());
            assert!(off > 5e-4, "{mesh}: logits differ by {off:e} only: nothing was computed in bf16");
        }
    }
}

/// Every token that is drawn in bf16 on these devices is, in f32 on the CPU, as likely as the most likely one, up to rounding; and
/// the cache takes half the bytes.
pub fn a_text_is_one_that_f32_may_draw_and_its_cache_takes_half(devices: &Devices) {
    for more in models() {
        let bench = bench(&more);
        let (config, weights) = folder::load(&bench.path("model")).expect("what was saved");
        // Weights are larger than new ones, so that the layers have an influence on the tokens.
        let weights: ringspan_candle::Weights =
            weights.into_iter().map(|(name, tensor)| (name, (tensor * 3.0).expect("numbers"))).collect();
        let model = || Model::new(Decoder::new(config.clone()).expect("known"), weights.clone()).expect("a model");
        let prompt: Vec<u32> = (0..BLOCK as u32 - 3).map(|i| i * 7 % 257).collect();
        let options = Options { sampling: Sampling::greedy(), max_tokens: 8, stop_tokens: Vec::new() };
        let run = |precision, ring| {
            let devices = devices.clone().computing_in(precision);
            let model = model().on(&devices).expect("a model there");
            assert!(model.weights(0).values().all(|weight| weight.computed_in() == precision.dtype()));
            let mesh = Mesh { ring, devices, ..Mesh::single() };
            let all = generate(&model, &mesh, &prompt, &options, |_| Ok(ControlFlow::Continue(()))).expect("text");
            let bytes: usize = all.iter().map(|rank| rank.cached_bytes).sum();
            (all[0].tokens.clone(), bytes)
        };
        for ring in [1, 2] {
            let ((_, wide), (tokens, narrow)) = (run(Precision::F32, ring), run(Precision::Bf16, ring));
            assert_eq!((wide, tokens.len()), (2 * narrow, 8), "{ring} ranks: bytes of the cache");
            let all = [&prompt[..], &tokens].concat();
            let documents = ringspan::Documents::batch(1, all.len());
            let batch = ringspan_serve::Batch { tokens: &all, documents: &documents };
            let (layout, strategy) = (ringspan::LayoutKind::Contiguous, ringspan::StrategyKind::Ring);
            let scores = ringspan_serve::score(&model(), &Mesh::single(), batch, layout, strategy, true);
            let logits = scores.expect("scores").and_then(|scores| scores.logits).expect("logits");
            for (row, token) in logits.chunks_exact(257).skip(prompt.len() - 1).zip(&tokens) {
                let most = row.iter().copied().fold(f32::MIN, f32::max);
                let size = (row.iter().map(|x| x * x).sum::<f32>() / 257.0).sqrt();
                let below = (most - row[*token as usize]) / size;
                // Both logits may be off by the bound for all logits, and the greatest ones are off by more than most.
                assert!(below <= 6.0 * ROUNDED as f32, "{ring} ranks: token {token} is {below} below the greatest");
            }
        }
    }
}
