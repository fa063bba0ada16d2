//! Code that the video commands share: the autoencoder's folder, the mesh, and files of frames.

use crate::duration_text::duration_text;
use crate::files::{self, OutputTensor, TensorBytes};
use crate::mesh::{DEADLINE, MeshArgs};
use anyhow::{Context, Result, ensure};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::{peak, pool};
use ringspan_video::frames;
use ringspan_video::ranks::VideoMesh;
use ringspan_video::vae::{VaeFolder, VideoTensor};
use safetensors::Dtype;
use std::path::{Path, PathBuf};

/// The autoencoder, and the memory that it may take.
#[derive(Debug, clap::Args)]
pub(crate) struct VaeArgs {
    /// The folder of an AutoencoderKLWan as diffusers saves it, or of a pipeline with a folder vae
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Memory of activations and buffers on each rank; weights, latents and frames come on top [default: blocks that fit
    /// 256 MiB if there are any, else the smallest]
    #[arg(long, value_name = "BYTES", value_parser = crate::serve::bytes)]
    pub(crate) memory: Option<u64>,
}

impl VaeArgs {
    pub(crate) fn open(&self) -> Result<VaeFolder> {
        VaeFolder::open(&self.model).with_context(|| format!("--model {}", self.model.display()))
    }

    /// Describes the mesh of a run: ranks, threads, and how many columns are cut over them.
    pub(crate) fn summary(&self, ranks: usize, threads: usize, columns: usize) -> String {
        // Each rank has as many columns as the first, as long as there are any.
        let active = columns.div_ceil(columns.div_ceil(ranks).max(1));
        let idle = match ranks - active.min(ranks) {
            0 => String::new(),
            idle => format!(", {idle} ranks idle"),
        };
        format!("{ranks} ranks x {threads} threads, {columns} latent columns cut over them{idle}")
    }
}

/// Refuses what does not fit the free memory of a machine, in all processes: `check` compares it with what this machine needs.
pub(crate) fn check_free(
    processes: &ProcessGroup,
    check: impl FnOnce(u64) -> ringspan_video::Result<()>,
) -> Result<()> {
    let own = ringspan::memory::available().map_or(Ok(()), check);
    // A process that stopped alone would leave the others waiting for it.
    let fits = processes.smallest(u64::from(own.is_ok()))? == 1;
    own?;
    ensure!(fits, "another machine has too little memory, as a process there says");
    Ok(())
}

/// The mesh that was asked for; with `cfg_parallel`, it has twice as many ranks, half of them for each branch of guidance.
pub(crate) fn mesh(args: &MeshArgs, cfg_parallel: bool, processes: &ProcessGroup) -> Result<VideoMesh> {
    let branches = if cfg_parallel { 2 } else { 1 };
    let (_, threads) = args.start_with(processes, &[(branches, "branches of --cfg-parallel")])?;
    let (ring, ulysses) = (args.ring, args.ulysses);
    Ok(VideoMesh {
        ring,
        ulysses,
        cfg_parallel,
        threads,
        deadline: DEADLINE,
        processes: processes.clone(),
        ..VideoMesh::single()
    })
}

/// How the ranks of a transformer exchange heads and weights.
#[derive(Debug, clap::Args)]
pub(crate) struct ExchangeArgs {
    /// Exchange the heads of Ulysses ranks in up to N parts: one travels while another is computed [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    head_chunks: Option<u32>,
    /// Let each process hold only its share of the transformer's weights; those of a block are gathered from all when it computes, as
    /// in FSDP
    #[arg(long)]
    shard_weights: bool,
}

impl ExchangeArgs {
    /// The mesh with this exchange.
    pub(crate) fn of(&self, mesh: VideoMesh) -> Result<VideoMesh> {
        let mesh = VideoMesh { head_chunks: self.head_chunks.map_or(1, |chunks| chunks as usize), ..mesh };
        mesh.check().context("--head-chunks")?;
        let mesh = VideoMesh { shard_weights: self.shard_weights, ..mesh };
        mesh.check().context("--shard-weights")?;
        Ok(mesh)
    }
}

/// A line of a plan: the time of so many floating-point operations of the transformer at the speed of a matrix product, which is measured
/// here on the threads of all ranks, as far as this machine has processors for them. All processes must call this.
pub(crate) fn time_line(operations: f64, mesh: &VideoMesh) -> Result<String> {
    let (of_process, processes) = match mesh.processes.local() {
        Some(_) => (mesh.threads, mesh.size()),
        None => (mesh.threads.saturating_mul(mesh.size()), 1),
    };
    let threads = of_process.min(std::thread::available_parallelism().map_or(1, usize::from));
    let own = pool::run(threads, peak::flops)?;
    // The slowest process determines the time, since all of them have the same work.
    let flops = mesh.processes.smallest(own as u64)? as f64 * processes as f64;
    Ok(format!(
        "time      {} for all steps at the speed of matrix products in f32: {:.0} GFLOP/s on {} threads",
        duration_text((operations / flops.max(1.0)).round() as u64),
        flops / 1e9,
        threads * processes
    ))
}

/// Reads a tensor `[B, C, F, H, W]` of a safetensors file.
pub(crate) fn read(path: &Path, name: &str) -> Result<VideoTensor> {
    let file = TensorBytes::read(path)?;
    let tensors = file.parse()?;
    let tensor = tensors.get::<5>(name, &[Dtype::F32, Dtype::BF16, Dtype::F16], "[B,C,F,H,W]")?;
    let values = tensor.floats();
    let bad = values.iter().filter(|x| !x.is_finite()).count();
    ensure!(bad == 0, "{}: {bad} of {} elements of `{name}` are no finite numbers", path.display(), values.len());
    VideoTensor::new(tensor.shape, values).with_context(|| format!("{}: tensor `{name}`", path.display()))
}

/// Reads frames from a folder of PNG files, a PNG file or a safetensors file.
pub(crate) fn read_frames(path: &Path) -> Result<VideoTensor> {
    if path.is_dir() {
        return Ok(frames::read_pictures(path)?);
    }
    let is = |extension: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension));
    if is("png") {
        return Ok(frames::read_picture(path)?);
    }
    ensure!(is("safetensors"), "{}: neither a folder, nor a .png nor a .safetensors file", path.display());
    read(path, "frames")
}

/// The kind of output that a path asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    Tensors(PathBuf),
    Gif(PathBuf),
    Folder(PathBuf),
}

impl Destination {
    /// Refuses a path that cannot be written, before the work rather than after it.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
        let possible = "possible are a folder (of PNG files), .gif and .safetensors";
        match extension.as_deref() {
            Some("safetensors") => files::check_output("--out", path).map(|()| Self::Tensors(path.to_owned())),
            Some("gif") => files::check_output("--out", path).map(|()| Self::Gif(path.to_owned())),
            Some(other @ ("mp4" | "webm" | "mkv" | "mov" | "avi")) => anyhow::bail!(
                "--out {}: .{other} is not written, because no encoder for it is built in; {possible}; `ffmpeg -i \
                 FOLDER/frame_%04d.png` makes one of the folder",
                path.display()
            ),
            Some("png") => anyhow::bail!("--out {}: frames are many pictures; {possible}", path.display()),
            _ => files::check_output_folder("--out", path).map(|()| Self::Folder(path.to_owned())),
        }
    }

    /// Refuses frames `[B, 3, F, H, W]` that this kind of output cannot hold.
    pub(crate) fn check(&self, shape: [usize; 5]) -> Result<()> {
        let [batch, _, frames, height, width] = shape;
        let one = matches!(self, Self::Tensors(_)) || batch == 1;
        ensure!(one, "--out: the latents are of {batch} videos, which only a .safetensors file holds");
        let fits = !matches!(self, Self::Gif(_)) || height.max(width) <= usize::from(u16::MAX);
        ensure!(fits, "--out: {frames} frames of {width} x {height} pixels; a side of a GIF has at most 65535");
        Ok(())
    }

    /// Writes frames `[B, 3, F, H, W]`.
    pub(crate) fn write(self, frames: VideoTensor) -> Result<()> {
        match self {
            Self::Tensors(path) => {
                let shape = frames.shape().to_vec();
                files::write_tensors(&path, &[OutputTensor::new("frames", Dtype::F32, shape, frames.into_values())])
            }
            Self::Gif(path) => files::write(&path, &frames::gif(frames::to_rgb(&frames)?)?),
            Self::Folder(path) => {
                files::write_folder(&path, |folder| Ok(frames::write_folder(folder, frames::to_rgb(&frames)?)?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_output_says_its_kind() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let of = |name: &str| Destination::of(&at(name));
        assert_eq!(of("a.GIF").expect("a GIF"), Destination::Gif(at("a.GIF")));
        assert_eq!(of("a.safetensors").expect("a file"), Destination::Tensors(at("a.safetensors")));
        assert_eq!(of("frames").expect("a folder"), Destination::Folder(at("frames")));
        for (name, words) in [("a.mp4", "no encoder"), ("a.png", "many pictures"), ("no/frames", "there is no folder")]
        {
            let message = format!("{:#}", of(name).expect_err("must be refused"));
            assert!(message.contains(words), "{message}");
        }
        std::fs::create_dir(at("full")).expect("a folder");
        std::fs::write(at("full/notes.txt"), "mine").expect("a file");
        let message = format!("{:#}", of("full").expect_err("must be refused"));
        assert!(message.contains("is not empty"), "{message}");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers_of_this_machine() {
        let (single, full) = (ProcessGroup::single(), ringspan_video::Error::Input("9 GiB of 8".into()));
        let message = check_free(&single, |_| Err(full)).expect_err("must be refused").to_string();
        assert!(message.contains("9 GiB of 8"), "{message}");
        check_free(&single, |free| if free > 0 { Ok(()) } else { Err(ringspan_video::Error::Input("full".into())) })
            .expect("there is free memory");
    }

    #[test]
    fn several_videos_need_a_file_of_tensors() {
        let shape = [2, 3, 5, 8, 8];
        assert!(Destination::Tensors("a".into()).check(shape).is_ok());
        let message = Destination::Folder("a".into()).check(shape).expect_err("two videos").to_string();
        assert!(message.contains("2 videos"), "{message}");
    }
}
