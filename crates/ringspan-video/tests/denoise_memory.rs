//! The memory that a plan predicts for denoising, against what the allocator counts.

mod support;

use candle_core::{DType, Device, Tensor};
use ringspan_testing::CountingAllocator;
use ringspan_video::Result;
use ringspan_video::denoise::{DenoiseFolder, DenoiseInputs, DenoisePlan, DenoiseSettings, denoise};
use ringspan_video::noise::noise;
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::scheduler::{SchedulerConfig, SchedulerKind};
use ringspan_video::transformer::WeightType;
use serde_json::json;
use std::sync::{Mutex, PoisonError};
use support::random_transformer;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The peaks of all ranks, added, are at least this share of what is predicted.
const LEAST: f64 = 0.9;
/// What ranks hold at once is at most this share of what is predicted.
const MOST: f64 = 1.1;

/// The allocator counts for the whole program, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Many tokens for the width, where the stream counts, and few, where the inner width of feed-forward layers does; both types of
/// computation; one rank, and rings and Ulysses ranks; and blocks that are skipped in the second of three steps. Ranks are threads, whose
/// peaks coincide in some runs only, so what they hold at once is at most what is predicted, and their peaks, added, are at least that. The
/// added peaks have no upper bound: a buffer that a rank has given away counts for it, so they grow with the time a neighbor lags behind.
#[test]
fn the_peak_is_what_the_plan_predicts() -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let config = |ffn: usize| {
        json!({
            "_class_name": "WanTransformer3DModel", "num_attention_heads": 4, "attention_head_dim": 48, "in_channels": 4,
            "out_channels": 4, "text_dim": 32, "freq_dim": 64, "ffn_dim": ffn, "num_layers": 2,
        })
    };
    let mut wrong = Vec::new();
    for (weights, ffn, side, cache_threshold, meshes) in [
        (WeightType::F32, 768, 64, 0.0, &[(1, 1), (2, 1), (1, 2)][..]),
        (WeightType::F32, 96, 64, 0.0, &[(1, 1), (2, 1), (1, 2), (2, 2)][..]),
        (WeightType::F32, 768, 32, 0.0, &[(1, 1), (3, 1)][..]),
        (WeightType::Bf16, 768, 64, 0.0, &[(1, 1), (2, 1)][..]),
        (WeightType::Bf16, 96, 64, 0.0, &[(1, 1)][..]),
        (WeightType::F32, 96, 64, 1e6, &[(1, 1)][..]),
        (WeightType::Bf16, 96, 64, 1e6, &[(1, 1)][..]),
    ] {
        let path = random_transformer(&config(ffn));
        let folder = DenoiseFolder::open(path.path(), weights)?;
        let inputs = DenoiseInputs {
            prompt_embeds: noise(1, &[1, 512, 32])?,
            negative_prompt_embeds: Some(Tensor::zeros((1, 512, 32), DType::F32, &Device::Cpu)?),
            latents: noise(2, &[1, 4, 3, side, side])?,
            image_embeds: None,
            condition: None,
            control: None,
            control_scale: None,
        };
        let scheduler = SchedulerConfig::new(SchedulerKind::UniPc);
        let settings = DenoiseSettings { steps: 3, scheduler, guidance: [5.0; 2], cache_threshold };
        // Weights are a part of the plan that the files know, so they are in memory before.
        let loaded = folder.weights(0)?;
        for (ring, ulysses) in meshes.iter().copied() {
            let mesh = VideoMesh { ring, ulysses, ..VideoMesh::single() };
            let plan = DenoisePlan::new(&folder, &mesh, &inputs, &settings)?;
            let predicted = plan.machine_bytes() - plan.most_weights();
            let run = || denoise(&folder, &mut VideoRanks::start(&mesh)?, &inputs, &settings, |_| Ok(()));
            let ((latents, peaks), at_once) = ALLOCATOR.peak_of(|| ALLOCATOR.thread_peaks_of(run));
            assert!(latents?.is_some());
            let [at_once, peaks] = [at_once, peaks].map(|bytes| bytes as f64 / predicted as f64);
            let said = format!(
                "{weights}, {ffn}, {side}, threshold {cache_threshold}, {mesh}: {predicted} bytes predicted, {at_once:.3} of it at once, \
                 {peaks:.3} in the peaks of ranks"
            );
            println!("{said}");
            if peaks < LEAST || at_once > MOST {
                wrong.push(said);
            }
        }
        drop(loaded);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Four tokens and prompts of 512 embeddings: a step holds far less for its tokens than the keys of one prompt in one block take, so steps
/// that computed these again would be seen.
#[test]
fn only_the_first_step_computes_keys_and_values_of_the_prompts() -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = random_transformer(&json!({
        "_class_name": "WanTransformer3DModel", "num_attention_heads": 4, "attention_head_dim": 48, "in_channels": 4,
        "out_channels": 4, "text_dim": 32, "freq_dim": 64, "ffn_dim": 192, "num_layers": 2,
    }));
    let folder = DenoiseFolder::open(path.path(), WeightType::F32)?;
    let inputs = DenoiseInputs {
        prompt_embeds: noise(1, &[1, 512, 32])?,
        negative_prompt_embeds: Some(noise(3, &[1, 512, 32])?),
        latents: noise(2, &[1, 4, 1, 4, 4])?,
        image_embeds: None,
        condition: None,
        control: None,
        control_scale: None,
    };
    let scheduler = SchedulerConfig::new(SchedulerKind::UniPc);
    let settings = DenoiseSettings { steps: 4, scheduler, guidance: [5.0; 2], cache_threshold: 0.0 };
    let loaded = folder.weights(0)?;
    let mut ranks = VideoRanks::start(&VideoMesh::single())?;
    ALLOCATOR.reset_peak();
    let (before, of_steps) = (Mutex::new(ALLOCATOR.allocated()), Mutex::new(Vec::new()));
    denoise(&folder, &mut ranks, &inputs, &settings, |_| {
        let mut before = before.lock().unwrap_or_else(PoisonError::into_inner);
        of_steps.lock().unwrap_or_else(PoisonError::into_inner).push(ALLOCATOR.peak() - *before);
        ALLOCATOR.reset_peak();
        *before = ALLOCATOR.allocated();
        Ok(())
    })?;
    drop(loaded);
    let of_steps = of_steps.into_inner().unwrap_or_else(PoisonError::into_inner);
    let keys = 512 * 4 * 48 * 4;
    // Keys and values in two blocks of both prompts.
    assert!(of_steps[0] > 8 * keys, "{of_steps:?}: the first step");
    assert!(of_steps[1..].iter().all(|bytes| *bytes < keys), "{of_steps:?}: later steps");
    Ok(())
}
