//! `ringspan denoise`: from noise to the latents of a video.

mod input;
mod progress;
mod sampler;

pub(crate) use progress::Progress;
pub(crate) use sampler::SamplerArgs;

use crate::files::{self, OutputTensor};
use crate::mesh::MeshArgs;
use crate::output;
use crate::video_io::{self, ExchangeArgs};
use anyhow::{Context, Result, ensure};
use input::Input;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_video::denoise::{DenoiseFolder, DenoisePlan, DenoiseStep, denoise};
use ringspan_video::noise::noise;
use ringspan_video::ranks::VideoRanks;
use ringspan_video::transformer::WeightType;
use safetensors::Dtype;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Denoise the latents of a video with a WAN transformer, over a mesh of ranks.
///
/// IN has prompt_embeds [B,N,text_dim], for guidance negative_prompt_embeds, and optionally latents [B,C,F,H,W]; for models
/// that take them image_embeds [B,N,image_dim], condition [B,in-out,F,H,W] or, for a first frame, [B,C,1,H,W], control
/// [B,vace_in_channels,F,H,W] and control_scale [layers]. OUT receives latents f32 [B,C,F,H,W]. The same seed gives the same noise
/// on every mesh.
#[derive(Debug, clap::Args)]
pub(crate) struct DenoiseArgs {
    /// A transformer's folder as diffusers saves it, or a pipeline's, with one transformer or two; or a transformer's GGUF file
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A safetensors file with the embeddings of prompts
    #[arg(long, value_name = "IN")]
    embeds: PathBuf,
    /// The safetensors file for the latents
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    sampler: SamplerArgs,
    /// Frames of the video, if IN has no latents
    #[arg(long, value_name = "F", requires_all = ["height", "width"])]
    frames: Option<usize>,
    /// Height of the video in pixels
    #[arg(long, value_name = "H", requires = "frames")]
    height: Option<usize>,
    /// Width of the video in pixels
    #[arg(long, value_name = "W", requires = "frames")]
    width: Option<usize>,
    /// Seed of the noise [default: 0]
    #[arg(long, value_name = "N", requires = "frames")]
    seed: Option<u64>,
    #[command(flatten)]
    exchange: ExchangeArgs,
    /// Compute the two branches of guidance on ranks of their own, twice as many
    #[arg(long)]
    cfg_parallel: bool,
    /// Type of weights in memory: f32; bf16, in which the model then computes; as-stored, in which matrices stay in their file's type
    /// [default: f32, or as-stored if the weights are a GGUF file]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<WeightType>,
    /// Print the plan only: tokens and heads of each rank, bytes sent, memory, floating-point operations, time
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) fn run(args: &DenoiseArgs, processes: &ProcessGroup) -> Result<()> {
    let mesh = video_io::mesh(&args.mesh, args.cfg_parallel, processes)?;
    let mesh = args.exchange.of(mesh)?;
    files::check_output("--out", &args.out)?;
    let dtype = args.dtype.unwrap_or_else(|| WeightType::default_of(&args.model));
    let folder = DenoiseFolder::open(&args.model, dtype).context("--model")?;
    let [first, second] = args.sampler.loras(&folder, &args.model)?;
    let folder = folder.with_loras(0, first).context("--lora")?.with_loras(1, second).context("--lora-2")?;
    let settings = args.sampler.settings(&folder, &args.model)?;
    let video = args.frames.zip(args.height.zip(args.width)).map(|(frames, (height, width))| [frames, height, width]);
    let mut inputs = Input::read(&args.embeds)?.with_latents(&folder, video)?;
    let plan = DenoisePlan::new(&folder, &mesh, &inputs, &settings)?;
    let time = video_io::time_line(plan.operations(), &mesh)?;
    if args.dry_run {
        return Ok(output::line(format_args!("{plan}\n{time}"))?);
    }
    output::note(format_args!("{plan}\n{time}"));
    video_io::check_free(processes, |free| plan.check_free(free))?;
    if video.is_some() {
        inputs.latents = noise(args.seed.unwrap_or(0), inputs.latents.dims())?;
    }
    // How many operations a step with skipped blocks has is not known before, so then no rate is shown.
    let operations = (settings.cache_threshold == 0.0).then(|| plan.operations());
    let progress = Progress::new(settings.steps, operations);
    let skipped = AtomicUsize::new(0);
    let stepped = |step: &DenoiseStep| {
        progress.stepped(step.number);
        skipped.fetch_add(step.skipped.into(), Ordering::Relaxed);
        Ok(())
    };
    let mut ranks = VideoRanks::start(&mesh)?;
    let Some(latents) = denoise(&folder, &mut ranks, &inputs, &settings, stepped)? else { return Ok(()) };
    args.sampler.say_skipped(skipped.into_inner());
    let values = latents.flatten_all()?.to_vec1::<f32>()?;
    ensure!(values.iter().all(|x| x.is_finite()), "the latents are not finite: {} is not written", args.out.display());
    files::write_tensors(&args.out, &[OutputTensor::new("latents", Dtype::F32, latents.dims().to_vec(), values)])?;
    output::line(format_args!("wrote latents {:?} to {}", latents.dims(), args.out.display()))?;
    Ok(())
}
