//! The memory that a training predicts, against what the allocator counts.

use candle_core::{DType, Tensor};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_testing::CountingAllocator;
use ringspan_train::{Settings, TrainArgs, TrainConfig};
use ringspan_video::Result;
use ringspan_video::noise::noise;
use ringspan_video::training::VideoTraining;
use ringspan_video::transformer::{WanConfig, WanTransformer};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

fn write_model(folder: &Path, [heads, dim, ffn, layers]: [usize; 4], dtype: DType) {
    let config = json!({
        "_class_name": "WanTransformer3DModel", "num_attention_heads": heads, "attention_head_dim": dim, "in_channels": 4,
        "out_channels": 4, "text_dim": 32, "freq_dim": 64, "ffn_dim": ffn, "num_layers": layers,
    });
    std::fs::create_dir_all(folder).expect("a folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    let transformer = WanTransformer::new(WanConfig::read(folder).expect("a configuration"));
    let random = |(index, (name, shape)): (usize, (String, Vec<usize>))| {
        let numbers = (noise(index as u64, &shape).expect("numbers") * 0.05).expect("numbers");
        (name, numbers.to_dtype(dtype).expect("numbers"))
    };
    let weights: HashMap<String, Tensor> = transformer.shapes().into_iter().enumerate().map(random).collect();
    candle_core::safetensors::save(&weights, folder.join("diffusion_pytorch_model.safetensors")).expect("written");
}

/// Few tokens and many, short prompts and long ones, all that blocks may store, and rings and Ulysses ranks.
#[test]
fn the_peak_is_what_the_plan_predicts() -> Result<()> {
    let mut wrong = Vec::new();
    for (model_sizes, side, prompt, mesh, threads, recompute, activations, accumulation) in [
        ([4, 48, 768, 4], 48, 16, (1, 1), 1, "keep-attention", "f32", 1),
        ([4, 48, 768, 4], 48, 16, (1, 1), 1, "nothing", "bf16", 1),
        ([4, 48, 1536, 2], 48, 16, (1, 1), 1, "full", "f32", 1),
        ([4, 48, 768, 2], 32, 512, (1, 1), 1, "full", "f32", 40),
        ([3, 128, 1536, 3], 48, 512, (1, 1), 2, "nothing", "f32", 1),
        ([3, 128, 1536, 3], 48, 512, (1, 1), 2, "keep-attention", "bf16", 1),
        ([4, 48, 192, 4], 64, 16, (2, 2), 1, "keep-attention", "f32", 1),
        ([4, 48, 192, 4], 64, 16, (3, 1), 1, "full", "f32", 1),
        ([4, 48, 192, 4], 64, 16, (2, 1), 1, "full", "f32", 1),
        ([4, 48, 768, 2], 64, 16, (1, 4), 1, "nothing", "f32", 1),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        write_model(&model, model_sizes, if model_sizes[0] == 3 { DType::BF16 } else { DType::F32 });
        let data = folder.path().join("data.safetensors");
        let sample = [("latents", noise(1, &[1, 4, 3, side, side])?), ("prompt_embeds", noise(2, &[1, prompt, 32])?)];
        candle_core::safetensors::save(&HashMap::from(sample), &data)?;
        let settings = Settings {
            model: Some(model),
            data: Some(vec![data]),
            out: Some(folder.path().join("out")),
            lora_rank: Some(8),
            ring: Some(mesh.0),
            ulysses: Some(mesh.1),
            threads: Some(threads),
            steps: Some(2),
            grad_accumulation: Some(accumulation),
            recompute: Some(recompute.into()),
            activations: Some(activations.into()),
            ..Settings::default()
        };
        let config = TrainConfig::from_args(&TrainArgs { settings, ..TrainArgs::default() })?;
        let training = VideoTraining::open(&config, &ProcessGroup::single())?;
        let memory = training.memory();
        // The peaks of ranks coincide in some runs only, so they are counted rank by rank, and added.
        let run = || training.run(&AtomicBool::new(false), &|_| ());
        let (outcome, counted) = if mesh == (1, 1) { ALLOCATOR.peak_of(run) } else { ALLOCATOR.thread_peaks_of(run) };
        outcome?;
        let ratio = counted as f64 / memory.machine_bytes() as f64;
        let said = format!(
            "{model_sizes:?}, {side}, prompt {prompt}, {mesh:?}, {recompute}, {activations}: {counted} bytes counted, {} predicted: {ratio:.3}",
            memory.machine_bytes()
        );
        println!("{said}");
        let refused = memory.check_free(memory.machine_bytes() - 1).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|refused| refused.contains("--recompute full") == (recompute != "full")));
        assert!(memory.check_free(memory.machine_bytes()).is_ok());
        if !(0.9..=1.1).contains(&ratio) {
            wrong.push(said);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}
