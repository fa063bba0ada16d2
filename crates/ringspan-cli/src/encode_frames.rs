//! `ringspan encode-frames`: latents from the frames of a video, by WAN's autoencoder.

use crate::files::{self, OutputTensor};
use crate::mesh::MeshArgs;
use crate::output;
use crate::video_io::{self, VaeArgs};
use anyhow::{Context, Result};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_video::ranks::VideoRanks;
use safetensors::Dtype;
use std::path::PathBuf;
use std::time::Instant;

/// Encode frames to latents with WAN's autoencoder, over a mesh of ranks that share the columns
///
/// OUT receives `latents` [B,C,F,H,W] f32: the mode of the posterior, normalised as the transformer takes it.
/// Only the number of ranks, R x U, counts here; ranks beyond the number of latent columns are idle.
#[derive(Debug, clap::Args)]
pub(crate) struct EncodeFramesArgs {
    #[command(flatten)]
    vae: VaeArgs,
    /// The frames: a folder of PNG files, taken in the order of their names (2.png before 10.png); one PNG file; or a safetensors
    /// file with `frames` [B,3,F,H,W] in [-1,1]
    #[arg(long, value_name = "IN")]
    frames: PathBuf,
    /// The safetensors file for the latents
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) fn run(args: &EncodeFramesArgs, processes: &ProcessGroup) -> Result<()> {
    files::check_output("--out", &args.out)?;
    let mesh = video_io::mesh(&args.mesh, false, processes)?;
    let frames = video_io::read_frames(&args.frames).context("--frames")?;
    let folder = args.vae.open()?;
    let encoder = folder.encoder()?;
    let plan = encoder.plan(frames.shape(), mesh.size(), args.vae.memory)?;
    output::note(format_args!(
        "{}: {plan}",
        args.vae.summary(mesh.size(), mesh.threads, encoder.latents(frames.shape())?[4])
    ));
    let began = Instant::now();
    let Some(latents) = encoder.encode(&frames, &mut VideoRanks::start(&mesh)?, &plan)? else { return Ok(()) };
    let seconds = began.elapsed().as_secs_f64();
    let shape = latents.shape();
    let out = OutputTensor::new("latents", Dtype::F32, shape.to_vec(), latents.into_values());
    files::write_tensors(&args.out, &[out])?;
    output::line(format_args!("latents {shape:?} in {seconds:.2} s: {}", args.out.display()))?;
    Ok(())
}
