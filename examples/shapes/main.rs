//! A video of a prompt, without downloads: a small video transformer of WAN's form is trained on moving shapes, in a quarter of an hour
//! on two cores, and the folder of its pipeline is what `ringspan video` takes. The videos shown are of prompts that the training lacks.
//!
//!     cargo run --release --example shapes [FOLDER [STEPS [BATCH]]]
//!
//! In a folder that has a pipeline already, the training goes on from its transformer.
//!
//! Only the transformer is trained. The autoencoder is a fixed linear code of 4 x 4 pixels, and the text encoder is random; both
//! have WAN's form, so that every stage of the pipeline runs as with real weights.

mod autoencoder;
mod shapes;
mod text_encoder;
mod train;

use candle_core::{Device, Tensor};
use ringspan_video::denoise::DenoiseSettings;
use ringspan_video::frames;
use ringspan_video::pipeline::{VideoControl, VideoEvent, VideoPipeline, VideoRequest};
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::scheduler::{SchedulerConfig, SchedulerKind};
use ringspan_video::text_encoder::{PROMPT_ROWS, PromptTokenizer, TextEncoder};
use ringspan_video::transformer::{WanConfig, WeightType};
use ringspan_video::vae::VideoTensor;
use serde_json::json;
use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use train::{Examples, Training, train};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The file by which a folder of this example is known; it has the number of steps done.
const STEPS_DONE: &str = "steps-done";
/// The prompts of which videos are made in the end. The training has none of them, but all others.
const SHOWN: [&str; 4] = [
    "a red circle moves right along the middle",
    "a blue square moves left along the top",
    "a green circle moves left along the bottom",
    "a red square moves right along the top",
];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().unwrap_or_else(|| "shapes".into()));
    let steps = arguments.next().map_or(Ok(4000), |steps| steps.parse())?;
    let batch = arguments.next().map_or(Ok(8), |batch| batch.parse())?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut ranks = VideoRanks::start(&VideoMesh { threads, ..VideoMesh::single() })?;
    let done = steps_done(&folder)?;
    // A training that goes on sees other noise.
    let training = Training { steps, batch, seed: 1 + done };
    let losses = write_pipeline(&folder, &mut ranks, training)?;
    std::fs::write(folder.join(STEPS_DONE), (done + steps as u64).to_string())?;
    println!("loss {:.4} in the first quarter of the steps, {:.4} in the last", losses[0], losses[1]);
    let mut two = VideoRanks::start(&VideoMesh { ring: 2, threads: threads.div_ceil(2), ..VideoMesh::single() })?;
    for (index, prompt) in SHOWN.into_iter().enumerate() {
        let video = make(&folder, prompt, 20, index as u64, &mut two)?;
        let path = folder.join(format!("{}.gif", prompt.replace(' ', "_")));
        std::fs::write(&path, frames::gif(frames::to_rgb(&video)?)?)?;
        println!("{}", path.display());
    }
    println!(
        "ringspan video --model {} --prompt '{}' --frames {} --height {side} --width {side} --steps 20 --guidance 3 --seed 5 \
         --ring 2 --out video.gif",
        folder.display(),
        SHOWN[0],
        shapes::FRAMES,
        side = shapes::SIDE
    );
    Ok(())
}

/// The steps that a training in this folder has taken.
fn steps_done(folder: &Path) -> Result<u64> {
    match std::fs::read_to_string(folder.join(STEPS_DONE)) {
        Ok(steps) => Ok(steps.trim().parse()?),
        Err(_) if folder.read_dir().is_ok_and(|mut files| files.next().is_some()) => {
            Err(format!("{} has files of something else: name another folder", folder.display()).into())
        }
        Err(_) => Ok(0),
    }
}

/// Writes all files of a pipeline, and trains its transformer; returns the mean losses of the first and the last steps.
fn write_pipeline(folder: &Path, ranks: &mut VideoRanks, training: Training) -> Result<[f64; 2]> {
    let (vae, transformer) = (folder.join("vae"), folder.join("transformer"));
    text_encoder::write(folder, &shapes::words(), 3)?;
    // The statistics of latents are those of the data, so that latents are as wide as the noise.
    autoencoder::write(&vae, &[0.0; autoencoder::CHANNELS], &[1.0; autoencoder::CHANNELS])?;
    let plain = encoded(&vae, ranks)?;
    let [mean, std] = statistics(&plain)?;
    autoencoder::write(&vae, &mean, &std)?;
    let examples = Examples { videos: encoded(&vae, ranks)?, prompts: prompts(folder, ranks)? };

    std::fs::create_dir_all(&transformer)?;
    let config = json!({
        "_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "num_attention_heads": 4, "attention_head_dim": 24,
        "in_channels": autoencoder::CHANNELS, "out_channels": autoencoder::CHANNELS, "text_dim": text_encoder::WIDTH,
        "freq_dim": 64, "ffn_dim": 256, "num_layers": 3, "rope_max_seq_len": 32,
    });
    std::fs::write(transformer.join("config.json"), serde_json::to_string_pretty(&config)?)?;
    let config = WanConfig::read(&transformer)?;
    let file = transformer.join("diffusion_pytorch_model.safetensors");
    let before = match file.is_file() {
        true => candle_core::safetensors::load(&file, &Device::Cpu)?,
        false => HashMap::new(),
    };
    let trained = ranks.run(|groups| train(groups, &config, &before, &examples, training))?;
    let (weights, losses) = trained.into_iter().next().ok_or("this process has rank 0")?;
    candle_core::safetensors::save(&weights, file)?;

    std::fs::create_dir_all(folder.join("scheduler"))?;
    let scheduler =
        json!({ "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": train::SHIFT });
    std::fs::write(folder.join("scheduler/scheduler_config.json"), serde_json::to_string_pretty(&scheduler)?)?;
    let index = json!({ "_class_name": "WanPipeline" });
    std::fs::write(folder.join("model_index.json"), serde_json::to_string_pretty(&index)?)?;
    Ok(losses)
}

/// The latents of the videos of all prompts but those shown, with the numbers of the prompts.
fn encoded(vae: &Path, ranks: &mut VideoRanks) -> Result<Vec<(usize, Tensor)>> {
    let trained = (0..shapes::PROMPTS).filter(|prompt| !SHOWN.contains(&shapes::prompt(*prompt).as_str()));
    let encode = |prompt| {
        let latents = autoencoder::encoded(vae, &shapes::video(prompt), ranks)?;
        Ok((prompt, Tensor::from_slice(latents.values(), latents.shape().as_slice(), &Device::Cpu)?))
    };
    trained.map(encode).collect()
}

/// Mean and deviation of each channel.
fn statistics(videos: &[(usize, Tensor)]) -> Result<[Vec<f32>; 2]> {
    let all = videos.iter().map(|(_, latents)| latents.clone()).collect::<Vec<_>>();
    let by_channel = Tensor::cat(&all, 0)?.transpose(0, 1)?.contiguous()?.flatten_from(1)?;
    let mean = by_channel.mean_keepdim(1)?;
    let variance = by_channel.broadcast_sub(&mean)?.sqr()?.mean(1)?;
    Ok([mean.flatten_all()?.to_vec1()?, (variance + 1e-6)?.sqrt()?.to_vec1()?])
}

/// The embeddings of all prompts, and of the empty one.
fn prompts(folder: &Path, ranks: &mut VideoRanks) -> Result<Vec<Tensor>> {
    let (tokenizer, encoder) = (PromptTokenizer::open(folder)?, TextEncoder::open(folder)?);
    let all = (0..shapes::PROMPTS).map(shapes::prompt).chain([String::new()]);
    all.map(|prompt| {
        let tokens = tokenizer.encode(&prompt, PROMPT_ROWS)?.ids;
        let mut states = encoder.encode(&tokens, ranks)?.ok_or("this process has rank 0")?;
        states.resize(PROMPT_ROWS * text_encoder::WIDTH, 0.0);
        Ok(Tensor::from_vec(states, (1, PROMPT_ROWS, text_encoder::WIDTH), &Device::Cpu)?)
    })
    .collect()
}

/// A video of a prompt, as `ringspan video` makes it.
fn make(folder: &Path, prompt: &str, steps: usize, seed: u64, ranks: &mut VideoRanks) -> Result<VideoTensor> {
    let pipeline = VideoPipeline::open(folder, WeightType::F32)?;
    let scheduler = pipeline.denoiser().scheduler().unwrap_or_else(|| SchedulerConfig::new(SchedulerKind::Euler));
    let request = VideoRequest {
        prompt: prompt.into(),
        negative: None,
        image: None,
        last_image: None,
        control: VideoControl::default(),
        size: [shapes::FRAMES, shapes::SIDE, shapes::SIDE],
        seed,
        settings: DenoiseSettings { steps, scheduler, guidance: [3.0; 2], cache_threshold: 0.0 },
        memory: None,
        preview: false,
    };
    let plan = pipeline.plan(&request, ranks.mesh())?;
    let video = pipeline.run(&request, ranks, &plan, |_: VideoEvent| Ok(()))?;
    video.ok_or_else(|| "this process has rank 0".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringspan_video::vae::VaeFolder;

    /// The example's smallest form: every stage runs, the code of pixels is nearly exact for what it can say, and the loss falls.
    #[test]
    fn a_few_steps_make_a_pipeline_and_a_video_of_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks = VideoRanks::start(&VideoMesh::single()).expect("a rank");
        let losses =
            write_pipeline(folder.path(), &mut ranks, Training { steps: 24, batch: 2, seed: 1 }).expect("trained");
        assert!(losses[1] < 0.97 * losses[0], "{losses:?}");
        let pictures = shapes::video(0);
        let vae = folder.path().join("vae");
        let latents = autoencoder::encoded(&vae, &pictures, &mut ranks).expect("latents");
        let decoder = VaeFolder::open(&vae).and_then(|folder| folder.decoder()).expect("a decoder");
        let plan = decoder.plan(latents.shape(), 1, None).expect("a plan");
        let decoded = decoder.decode(&latents, &mut ranks, &plan).expect("decoded").expect("rank 0");
        let again: Vec<_> = frames::to_rgb(&decoded).expect("pictures").collect();
        let apart = |(a, b): (&u8, &u8)| f64::from(a.abs_diff(*b));
        let mean = pictures.iter().zip(&again).flat_map(|(a, b)| a.pixels.iter().zip(&b.pixels)).map(apart);
        let mean = mean.sum::<f64>() / (pictures.len() * pictures[0].pixels.len()) as f64;
        assert!(mean < 4.0, "pictures are {mean} of 256 levels away from themselves");
        let one = make(folder.path(), SHOWN[0], 2, 0, &mut ranks).expect("a video");
        let mut ranks = VideoRanks::start(&VideoMesh { ring: 2, ..VideoMesh::single() }).expect("two ranks");
        let two = make(folder.path(), SHOWN[0], 2, 0, &mut ranks).expect("a video");
        assert_eq!(one.shape(), [1, 3, shapes::FRAMES, shapes::SIDE, shapes::SIDE]);
        let most = one.values().iter().zip(two.values()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-3, "two ranks make another video: {most}");
    }
}
