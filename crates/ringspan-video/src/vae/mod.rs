//! WAN's autoencoder (`AutoencoderKLWan`): latents to frames and back.
//!
//! Ranks share the columns of a video; at each convolution neighbours exchange one border column, and attention of the middle
//! block goes over all ranks. On a rank a video passes through the network in blocks: bands of rows and, in a band, groups of
//! frames. Convolutions keep what the next block needs of the last one, so nothing is computed twice, and any tiling and any
//! number of ranks give the result of the whole video.
//!
//! Shape letters: B videos, C channels, F frames, H height, W width. Inside the network channels are last.

mod attention;
mod block;
mod config;
mod convolution;
mod delay;
mod layer;
mod memory;
mod network;
mod norm;
mod pixels;
mod plan;
mod resample;
mod residual_block;
mod segment;
mod shortcut;
mod sizes;
mod stored;
mod streamed;
mod strip;
mod tiny_decoder;
mod video_tensor;
mod winograd;

pub use config::VaeConfig;
pub use plan::Plan;
pub use tiny_decoder::TinyDecoderFile;
pub use video_tensor::VideoTensor;

use crate::error::{Error, Result};
use crate::ranks::VideoRanks;
use crate::tensor_folder::TensorFolder;
use block::{Shape, Video};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use stored::StoredNetwork;
use strip::{ColumnSplit, Strip};

/// The folder of an autoencoder, whose tensors are still on disk.
#[derive(Debug)]
pub struct VaeFolder {
    config: VaeConfig,
    tensors: Arc<TensorFolder>,
}

impl VaeFolder {
    /// Opens the folder of an autoencoder, or of a pipeline with a folder `vae`.
    ///
    /// # Errors
    /// Files that are missing or corrupt, and a configuration that is not supported.
    pub fn open(folder: &Path) -> Result<Self> {
        let inner = folder.join("vae");
        let folder = if inner.is_dir() { inner.as_path() } else { folder };
        let config = VaeConfig::read(folder)?;
        Ok(Self { config, tensors: TensorFolder::open(folder, "diffusion_pytorch_model")?.into() })
    }

    /// The sizes of the model.
    #[must_use]
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// The plan of [`Decoder::plan`], for which no weight is read.
    ///
    /// # Errors
    /// As for [`Decoder::plan`], and tensors that are missing or of another shape.
    pub fn plan_decoding(&self, latents: [usize; 5], ranks: usize, memory: Option<u64>) -> Result<Plan> {
        self.decoder()?.plan(latents, ranks, memory)
    }

    /// The plan of [`Encoder::plan`], for which no weight is read.
    ///
    /// # Errors
    /// As for [`Encoder::plan`], and tensors that are missing or of another shape.
    pub fn plan_encoding(&self, frames: [usize; 5], ranks: usize, memory: Option<u64>) -> Result<Plan> {
        self.encoder()?.plan(frames, ranks, memory)
    }

    /// The decoder, whose weights are read when they are needed.
    ///
    /// # Errors
    /// Tensors that are missing or of another shape.
    pub fn decoder(&self) -> Result<Decoder> {
        Ok(Decoder { network: StoredNetwork::new(self.config.clone(), self.tensors.clone(), network::decoder)? })
    }

    /// The encoder, whose weights are read when they are needed.
    ///
    /// # Errors
    /// Tensors that are missing or of another shape.
    pub fn encoder(&self) -> Result<Encoder> {
        Ok(Encoder { network: StoredNetwork::new(self.config.clone(), self.tensors.clone(), network::encoder)? })
    }
}

/// The decoder: latents to frames.
pub struct Decoder {
    network: StoredNetwork,
}

impl Decoder {
    /// The sizes `[B, 3, F, H, W]` of the frames of latents `[B, C, F, H, W]`.
    ///
    /// # Errors
    /// Latents with another number of channels than the model's, or with an empty dim.
    pub fn frames(&self, latents: [usize; 5]) -> Result<[usize; 5]> {
        check_filled("latents", latents)?;
        let [batch, channels, frames, height, width] = latents;
        if channels != self.network.config().z_dim {
            let problem = format!(
                "latents have {channels} channels, but the autoencoder has {} (z_dim)",
                self.network.config().z_dim
            );
            return Err(Error::Input(problem));
        }
        let (time, space) = (self.network.config().time(), self.network.config().space());
        Ok([batch, 3, 1 + (frames - 1) * time, height * space, width * space])
    }

    /// Plans the decoding of latents of this shape within `memory` bytes of activations and buffers on each rank, or with the
    /// blocks that are fastest.
    ///
    /// # Errors
    /// Latents that do not fit the model, and too little memory.
    pub fn plan(&self, latents: [usize; 5], ranks: usize, memory: Option<u64>) -> Result<Plan> {
        self.frames(latents)?;
        check_ranks(ranks)?;
        let [_, channels, frames, height, width] = latents;
        let cols = ColumnSplit { width, ranks }.most();
        let shape = Shape { frames, height, cols, channels };
        plan::choose(self.network.sizes(), 0, shape, 1, memory)
    }

    /// Decodes `latents`, normalised as the transformer gives them, to frames in [-1, 1], on all ranks. Returns `None` in a process
    /// without rank 0.
    ///
    /// # Errors
    /// Latents that do not fit the model, or failures of any rank or of the file system.
    pub fn decode(&self, latents: &VideoTensor, ranks: &mut VideoRanks, plan: &Plan) -> Result<Option<VideoTensor>> {
        let shape = self.frames(latents.shape())?;
        let split = ColumnSplit { width: latents.shape()[4], ranks: ranks.size() };
        let parts = ranks.gather(|rank| {
            let strip = &Strip::new(rank.communicator(), split.width, rank.kernel())?;
            let mut out = Vec::new();
            for index in 0..shape[0] {
                let video = pixels::from_latents(latents, index, strip.columns(), self.network.config());
                let video = plan.run(&self.network, strip, video)?;
                out.extend(pixels::to_frames(video, self.network.config().patch()));
            }
            Ok(out)
        })?;
        let Some(parts) = parts else { return Ok(None) };
        VideoTensor::new(shape, pixels::join(&parts, shape, split, self.network.config().space())?).map(Some)
    }
}

/// The encoder: frames to latents.
pub struct Encoder {
    network: StoredNetwork,
}

impl Encoder {
    /// The sizes `[B, C, F, H, W]` of the latents of frames `[B, 3, F, H, W]`.
    ///
    /// # Errors
    /// Other channels than 3, an empty dim, a number of frames that no latents stand for, and a height or width that the model
    /// does not divide.
    pub fn latents(&self, video: [usize; 5]) -> Result<[usize; 5]> {
        check_filled("frames", video)?;
        let [batch, channels, frames, height, width] = video;
        let (time, space) = (self.network.config().time(), self.network.config().space());
        if channels != 3 {
            return Err(Error::Input(format!("frames have {channels} channels: 3 are needed, red, green and blue")));
        }
        if (frames - 1) % time != 0 {
            return Err(Error::Frames { frames, each: time });
        }
        for (side, size) in [("height", height), ("width", width)] {
            if size % space != 0 {
                let patch = self.network.config().patch();
                return Err(Error::Size { side, size, each: space, patch, scale: space / patch });
            }
        }
        Ok([batch, self.network.config().z_dim, 1 + (frames - 1) / time, height / space, width / space])
    }

    /// Plans the encoding of frames of this shape, as [`Decoder::plan`] plans decoding.
    ///
    /// # Errors
    /// Frames that do not fit the model, and too little memory.
    pub fn plan(&self, frames: [usize; 5], ranks: usize, memory: Option<u64>) -> Result<Plan> {
        let [.., latent_width] = self.latents(frames)?;
        check_ranks(ranks)?;
        let (patch, [.., count, height, _]) = (self.network.config().patch(), frames);
        let cols = ColumnSplit { width: latent_width, ranks }.most() * self.network.config().space() / patch;
        let shape = Shape { frames: count, height: height / patch, cols, channels: self.network.config().in_channels };
        let network = self.network.sizes();
        plan::choose(network, network.segments.len() - 1, shape, self.network.config().time(), memory)
    }

    /// Encodes frames in [-1, 1] to latents, normalised as the transformer takes them: the mode of the posterior. Returns `None`
    /// in a process without rank 0.
    ///
    /// # Errors
    /// Frames that do not fit the model, or failures of any rank or of the file system.
    pub fn encode(&self, frames: &VideoTensor, ranks: &mut VideoRanks, plan: &Plan) -> Result<Option<VideoTensor>> {
        let shape = self.latents(frames.shape())?;
        let split = ColumnSplit { width: shape[4], ranks: ranks.size() };
        let parts = ranks.gather(|rank| {
            let strip = &Strip::new(rank.communicator(), split.width, rank.kernel())?;
            let mut out = Vec::new();
            for index in 0..shape[0] {
                let video = pixels::from_frames(frames, index, strip.columns(), self.network.config());
                let video = plan.run(&self.network, strip, video)?;
                out.extend(pixels::to_latents(&video, self.network.config()));
            }
            Ok(out)
        })?;
        let Some(parts) = parts else { return Ok(None) };
        VideoTensor::new(shape, pixels::join(&parts, shape, split, 1)?).map(Some)
    }
}

fn check_filled(name: &str, shape: [usize; 5]) -> Result<()> {
    match shape.contains(&0) {
        true => Err(Error::Input(format!("{name} of shape {shape:?} [B,C,F,H,W] are empty"))),
        false => Ok(()),
    }
}

fn check_ranks(ranks: usize) -> Result<()> {
    if ranks == 0 { Err(Error::Mesh("0 ranks: at least 1 is needed".into())) } else { Ok(()) }
}

/// One video of `batch` in the given columns, as the network's input of `shape`: `place` says where an element of a channel goes, by the
/// number of its pixel among `[frames, height, columns]`.
fn columns_of(
    batch: &VideoTensor,
    index: usize,
    columns: Range<usize>,
    shape: Shape,
    place: impl Fn(usize, usize) -> usize,
    value: impl Fn(usize, f32) -> f32,
) -> Video {
    let [_, channels, frames, height, width] = batch.shape();
    let mut video = Video::zeros(shape);
    for channel in 0..channels {
        for row in 0..frames * height {
            let from = ((index * channels + channel) * frames * height + row) * width;
            let values = &batch.values()[from + columns.start..from + columns.end];
            for (col, x) in values.iter().enumerate() {
                video.data[place(row * columns.len() + col, channel)] = value(channel, *x);
            }
        }
    }
    video
}
