//! The memory that a plan predicts for the autoencoder, against what the allocator counts.

use candle_core::{Device, Tensor};
use ringspan_testing::CountingAllocator;
use ringspan_video::Result;
use ringspan_video::noise::{noise, uniform};
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::tensor_folder::read_json;
use ringspan_video::vae::{Plan, VaeFolder, VideoTensor};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The fixture `wide` with `WIDER` times its channels, so that the sizes of activations count and not those of small buffers.
const WIDER: usize = 4;

fn write_wider(folder: &Path) {
    let fixture = Path::new("tests/fixtures/vae/wide");
    let mut config: Value = read_json(&fixture.join("config.json")).expect("a configuration");
    config["base_dim"] = json!(4 * WIDER);
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    let file = "diffusion_pytorch_model.safetensors";
    let narrow = candle_core::safetensors::load(fixture.join(file), &Device::Cpu).expect("a fixture");
    let wider = |(seed, (name, tensor)): (usize, (String, Tensor))| {
        let mut shape = tensor.dims().to_vec();
        // Frames have 3 channels, and latents as many, or twice as many with their variance.
        let channels = shape.iter_mut().take(2).filter(|channels| ![1, 3, 6].contains(*channels));
        channels.for_each(|channels| *channels *= WIDER);
        (name, (noise(seed as u64, &shape).expect("numbers") * 0.05).expect("numbers"))
    };
    let weights: HashMap<String, Tensor> = narrow.into_iter().enumerate().map(wider).collect();
    candle_core::safetensors::save(&weights, folder.join(file)).expect("written");
}

fn video(shape: [usize; 5]) -> Result<VideoTensor> {
    let numbers = uniform(1, shape.iter().product());
    VideoTensor::new(shape, numbers.into_iter().map(|x| 2.0 * x as f32 - 1.0).collect())
}

/// Plans with less and less memory, down to the smallest; of those between them, some.
fn plans(plan: impl Fn(Option<u64>) -> Result<Plan>) -> Vec<Plan> {
    const SOME: usize = 3;
    let first = plan(Some(u64::MAX)).ok();
    let all: Vec<Plan> = std::iter::successors(first, |last| plan(Some(last.bytes() - 1)).ok()).collect();
    (0..SOME).map(|index| all[index * (all.len() - 1) / (SOME - 1)].clone()).collect()
}

/// A model with channels enough, and one of WAN 2.2's form, whose last layers make patches of pixels; videos in large blocks and in the
/// smallest, on one rank and on two.
#[test]
fn the_peak_is_what_the_plan_predicts() -> Result<()> {
    let wider = tempfile::tempdir().expect("a folder");
    write_wider(wider.path());
    let residual = Path::new("tests/fixtures/vae/residual");
    let mut wrong = Vec::new();
    for (name, folder, latents) in
        [("wide", wider.path(), [1, 3, 3, 20, 24]), ("residual", residual, [1, 4, 2, 10, 12])]
    {
        let folder = VaeFolder::open(folder)?;
        let (decoder, encoder) = (folder.decoder()?, folder.encoder()?);
        let shape = decoder.frames(latents)?;
        let (latents, frames) = (video(latents)?, video(shape)?);
        let [of_frames, of_latents] = [&frames, &latents].map(|video| 4 * video.values().len() as u64);
        for count in [1, 2] {
            let mesh = VideoMesh { ring: count, ..VideoMesh::single() };
            let mut ranks = VideoRanks::start(&mesh)?;
            let mut check = |task: &str, plan: &Plan, joined: u64, run: &dyn Fn(&mut VideoRanks) -> Result<_>| {
                let passes = plan.weights() + count as u64 * plan.bytes_with_frames();
                // At the end, the ranks' columns are joined.
                let predicted = passes.max(2 * joined);
                let (result, peak): (Result<Option<VideoTensor>>, _) = ALLOCATOR.peak_of(|| run(&mut ranks));
                assert!(result?.is_some());
                // The peaks of ranks coincide in some runs only. Their sum is what they need if they do; that of the caller is the joined
                // video.
                let of_ranks = match count {
                    1 => peak,
                    _ => ALLOCATOR.thread_peaks_of(|| run(&mut ranks)).1 - joined as usize,
                };
                let [low, high] = [of_ranks, peak].map(|bytes| bytes as f64 / predicted as f64);
                let said = format!(
                    "{name}, {task}, {count} ranks, {plan}: {of_ranks} bytes counted, {peak} at once, {predicted} predicted: {low:.3}, {high:.3}"
                );
                println!("{said}");
                if low < 0.8 || high > 1.05 {
                    wrong.push(said);
                }
                Ok::<_, ringspan_video::Error>(())
            };
            for plan in plans(|memory| decoder.plan(latents.shape(), count, memory)) {
                check("decode", &plan, of_frames, &|ranks| decoder.decode(&latents, ranks, &plan))?;
            }
            for plan in plans(|memory| encoder.plan(frames.shape(), count, memory)) {
                check("encode", &plan, of_latents, &|ranks| encoder.encode(&frames, ranks, &plan))?;
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}
