//! `ringspan video`: from a prompt to the frames of a video.

mod preview;

use crate::denoise::{Progress, SamplerArgs};
use crate::mesh::MeshArgs;
use crate::output;
use crate::video_io::{self, Destination, ExchangeArgs, read_frames};
use anyhow::{Context, Result};
use preview::Preview;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_video::frames::{self, RgbFrame};
use ringspan_video::pipeline::{VideoControl, VideoEvent, VideoPipeline, VideoRequest, VideoStage};
use ringspan_video::ranks::VideoRanks;
use ringspan_video::transformer::WeightType;
use ringspan_video::vae::TinyDecoderFile;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Make a video of a prompt with a WAN pipeline: text encoder, transformers and decoder, over a mesh of ranks
///
/// Each stage's weights are read when it begins and freed when it ends. The same seed gives the same noise, and so the
/// same latents, on every mesh and with `denoise`. The plan is printed first; what cannot be done is refused before
/// weights are read.
#[derive(Debug, clap::Args)]
pub(crate) struct VideoArgs {
    /// A pipeline's folder as diffusers saves it: tokenizer, text_encoder, transformer, vae, scheduler
    #[arg(long, value_name = "PIPELINE")]
    model: PathBuf,
    /// What the video should show
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// What the video should not show [default: nothing]
    #[arg(long, value_name = "TEXT")]
    negative: Option<String>,
    /// The first frame, for pipelines that take one; it is resized to the video's size
    #[arg(long, value_name = "PNG")]
    image: Option<PathBuf>,
    /// The last frame, for pipelines that take one
    #[arg(long, value_name = "PNG", requires = "image")]
    last_image: Option<PathBuf>,
    /// Frames that VACE keeps, changes or follows, as many as the video has: a folder of PNG files, or a safetensors file with `frames`
    /// [1,3,F,H,W] in [-1,1]; they are rounded to 256 levels and resized to the video's size
    #[arg(long, value_name = "IN")]
    control_video: Option<PathBuf>,
    /// As many frames, bright where VACE makes the video anew, and dark where the frames of --control-video are kept [default: all
    /// bright]
    #[arg(long, value_name = "IN", requires = "control_video")]
    control_mask: Option<PathBuf>,
    /// A picture of what VACE's video should show; may be given several times
    #[arg(long, value_name = "PNG")]
    reference_image: Vec<PathBuf>,
    /// Factor of what VACE's control adds [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    control_scale: Option<f32>,
    /// Frames of the video: 1 + 4 k with WAN's decoder
    #[arg(long, value_name = "F")]
    frames: usize,
    /// Height of the video in pixels
    #[arg(long, value_name = "H")]
    height: usize,
    /// Width of the video in pixels
    #[arg(long, value_name = "W")]
    width: usize,
    /// Seed of the noise
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    exchange: ExchangeArgs,
    /// Compute the two branches of guidance on ranks of their own, twice as many
    #[arg(long)]
    cfg_parallel: bool,
    /// A PNG file for the first frame of the video that the transformer predicts after a quarter of the steps
    #[arg(long, value_name = "FILE")]
    preview: Option<PathBuf>,
    /// The safetensors file of a tiny decoder (TAEHV: taew2_1, or taew2_2 for the 5B model), with which the preview is the whole video: a
    /// GIF file
    #[arg(long, value_name = "FILE", requires = "preview")]
    tiny_decoder: Option<PathBuf>,
    /// Memory of activations and buffers on each rank; weights, latents and frames come on top [default: what the
    /// transformer needs, and blocks of the decoder that fit 256 MiB if there are any, else the smallest]
    #[arg(long, value_name = "BYTES", value_parser = crate::serve::bytes)]
    memory: Option<u64>,
    /// Type of the transformer's weights in memory: f32; bf16, in which it then computes; as-stored, in which matrices stay in their
    /// file's type [default: f32, or as-stored if the weights are a GGUF file]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<WeightType>,
    /// Where the frames go: a folder of PNG files (made if it is missing), FILE.gif, or FILE.safetensors with `frames`
    /// [1,3,F,H,W] f32 in [-1,1]
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    /// Print the plan only: tokens and heads of each rank, bytes sent, memory of each stage, floating-point operations, time
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) fn run(args: &VideoArgs, processes: &ProcessGroup) -> Result<()> {
    let mesh = video_io::mesh(&args.mesh, args.cfg_parallel, processes)?;
    let mesh = args.exchange.of(mesh)?;
    let destination = Destination::of(&args.out)?;
    let pictures = args.image.iter().chain(&args.last_image).chain(&args.reference_image);
    let moving = args.tiny_decoder.is_some();
    let preview = args.preview.as_ref().map(|path| Preview::new(path, moving, pictures, &args.out)).transpose()?;
    let dtype = args.dtype.unwrap_or_else(|| WeightType::default_of(&args.model));
    let pipeline = VideoPipeline::open(&args.model, dtype).context("--model")?;
    let [first, second] = args.sampler.loras(pipeline.denoiser(), &args.model)?;
    let pipeline = pipeline.with_loras(0, first).context("--lora")?.with_loras(1, second).context("--lora-2")?;
    let pipeline = match &args.tiny_decoder {
        Some(file) => {
            let opened = TinyDecoderFile::open(file).and_then(|decoder| pipeline.with_tiny_decoder(decoder));
            opened.with_context(|| format!("--tiny-decoder {}", file.display()))?
        }
        None => pipeline,
    };
    let request = args.request(&pipeline)?;
    let plan = pipeline.plan(&request, &mesh)?;
    destination.check(plan.frames())?;
    let time = video_io::time_line(plan.operations(), &mesh)?;
    match args.dry_run {
        true => output::line(format_args!("{plan}\n{time}"))?,
        false => output::note(format_args!("{plan}\n{time}")),
    }
    for (name, cut) in ["--prompt", "--negative"].into_iter().zip(plan.cut()).filter(|(_, cut)| *cut > 0) {
        output::note(format_args!("note: {name}: the last {cut} tokens are cut off, since 512 are kept"));
    }
    if args.dry_run {
        return Ok(());
    }
    video_io::check_free(processes, |free| plan.check_free(free))?;
    let began = Instant::now();
    // The time of steps begins with the stage that takes them.
    let (progress, skipped) = (OnceLock::new(), AtomicUsize::new(0));
    let told = |event: VideoEvent| {
        match event {
            VideoEvent::Began(stage) => {
                output::note(format_args!("{stage} begins after {:.1} s", began.elapsed().as_secs_f64()));
                if stage == VideoStage::Denoise {
                    // As in `denoise`, there is no rate where blocks may be skipped.
                    let operations = (request.settings.cache_threshold == 0.0).then(|| plan.operations());
                    progress.get_or_init(|| Progress::new(request.settings.steps, operations));
                }
            }
            VideoEvent::Stepped(step) => progress.get().into_iter().for_each(|progress| progress.stepped(step)),
            VideoEvent::Skipped(_) => {
                skipped.fetch_add(1, Ordering::Relaxed);
            }
            VideoEvent::Preview(frame) => {
                if let Some(preview) = &preview {
                    let failed = |error| ringspan_video::Error::Caller(output::with_causes(&error));
                    preview.write(&frame).map_err(failed)?;
                    output::note(format_args!("preview: {}", preview.path().display()));
                }
            }
        }
        Ok(())
    };
    let mut ranks = VideoRanks::start(&mesh)?;
    let Some(frames) = pipeline.run(&request, &mut ranks, &plan, told)? else { return Ok(()) };
    args.sampler.say_skipped(skipped.into_inner());
    let [_, _, count, height, width] = frames.shape();
    destination.write(frames)?;
    if let Some(preview) = &preview {
        preview.keep();
    }
    let seconds = began.elapsed().as_secs_f64();
    output::line(format_args!("{count} frames of {width} x {height} in {seconds:.1} s: {}", args.out.display()))?;
    Ok(())
}

impl VideoArgs {
    fn request(&self, pipeline: &VideoPipeline) -> Result<VideoRequest> {
        let picture = |flag: &str, path: &Option<PathBuf>| -> Result<Option<RgbFrame>> {
            path.as_deref().map(|path| read_picture(path).with_context(|| flag.to_owned())).transpose()
        };
        Ok(VideoRequest {
            prompt: self.prompt.clone(),
            negative: self.negative.clone(),
            image: picture("--image", &self.image)?,
            last_image: picture("--last-image", &self.last_image)?,
            control: VideoControl {
                frames: pictures("--control-video", &self.control_video)?,
                mask: pictures("--control-mask", &self.control_mask)?,
                references: self
                    .reference_image
                    .iter()
                    .map(|path| read_picture(path).context("--reference-image"))
                    .collect::<Result<_>>()?,
                scale: self.control_scale,
            },
            size: [self.frames, self.height, self.width],
            seed: self.seed,
            settings: self.sampler.settings(pipeline.denoiser(), &self.model)?,
            memory: self.memory,
            preview: self.preview.is_some(),
        })
    }
}

/// The frames of a flag; none without it.
fn pictures(flag: &str, path: &Option<PathBuf>) -> Result<Vec<RgbFrame>> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let frames = read_frames(path).with_context(|| flag.to_owned())?;
    Ok(frames::to_rgb(&frames).with_context(|| flag.to_owned())?.collect())
}

fn read_picture(path: &Path) -> Result<RgbFrame> {
    let picture = frames::read_picture(path)?;
    frames::to_rgb(&picture)?.next().with_context(|| format!("{}: there is no picture", path.display()))
}
