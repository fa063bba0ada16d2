//! `ringspan decode-latents`: frames from the latents of a video, by WAN's autoencoder.

use crate::mesh::MeshArgs;
use crate::output;
use crate::video_io::{self, Destination, VaeArgs};
use anyhow::Result;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_video::ranks::VideoRanks;
use std::path::PathBuf;
use std::time::Instant;

/// Decode latents to frames with WAN's autoencoder, over a mesh of ranks that share the columns
///
/// Any mesh and any tiling give the same frames to 1e-5; nothing is blended. Only the number of ranks, R x U, counts here; ranks
/// beyond the number of latent columns are idle.
#[derive(Debug, clap::Args)]
pub(crate) struct DecodeLatentsArgs {
    #[command(flatten)]
    vae: VaeArgs,
    /// A safetensors file with `latents` [B,C,F,H,W], normalised as the transformer gives them
    #[arg(long, value_name = "IN")]
    latents: PathBuf,
    /// Where the frames go: a folder of PNG files (made if it is missing), FILE.gif, or FILE.safetensors with `frames`
    /// [B,3,F,H,W] f32 in [-1,1]
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) fn run(args: &DecodeLatentsArgs, processes: &ProcessGroup) -> Result<()> {
    let destination = Destination::of(&args.out)?;
    let mesh = video_io::mesh(&args.mesh, false, processes)?;
    let latents = video_io::read(&args.latents, "latents")?;
    let folder = args.vae.open()?;
    let decoder = folder.decoder()?;
    destination.check(decoder.frames(latents.shape())?)?;
    let plan = decoder.plan(latents.shape(), mesh.size(), args.vae.memory)?;
    output::note(format_args!("{}: {plan}", args.vae.summary(mesh.size(), mesh.threads, latents.shape()[4])));
    let began = Instant::now();
    let Some(frames) = decoder.decode(&latents, &mut VideoRanks::start(&mesh)?, &plan)? else { return Ok(()) };
    let seconds = began.elapsed().as_secs_f64();
    let [batch, _, count, height, width] = frames.shape();
    destination.write(frames)?;
    let frames = batch * count;
    output::line(format_args!("{frames} frames of {width} x {height} in {seconds:.2} s: {}", args.out.display()))?;
    Ok(())
}
