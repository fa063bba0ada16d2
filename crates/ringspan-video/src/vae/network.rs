//! The layers of decoder and encoder, read from a checkpoint by the names of diffusers.

use super::attention::FrameAttention;
use super::config::{Level, VaeConfig};
use super::convolution::Convolution;
use super::delay::Delay;
use super::layer::Layer;
use super::norm::ChannelNorm;
use super::resample::{Downsample, Upsample};
use super::residual_block::ResidualBlock;
use super::shortcut::{ResidualDown, ResidualUp};
use super::sizes::ConvolutionSizes;
use super::streamed::StreamedConvolution;
use crate::error::{Error, Result};
use crate::tensor_folder::TensorFolder;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

/// Layers in segments. The first segment of the decoder, and the last of the encoder, attend, so they receive whole frames.
pub(crate) struct Network {
    pub(crate) segments: Vec<Vec<Layer>>,
}

/// Which parts of a checkpoint are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Load {
    /// Shapes are checked, and the layers of these segments have their weights.
    Weights(Range<usize>),
    /// Shapes are checked, and layers have sizes alone: a plan can be made of them, and nothing is read.
    Sizes,
}

/// The tensors of a checkpoint.
struct Checkpoint<'a> {
    folder: &'a TensorFolder,
    load: Load,
    /// The number of the segment whose layers are made.
    segment: Cell<usize>,
}

/// Reads the decoder: latents to frames.
///
/// # Errors
/// Tensors that are missing or of another shape.
pub(crate) fn decoder(config: &VaeConfig, folder: &TensorFolder, load: Load) -> Result<Network> {
    let (from, levels) = (Checkpoint::new(folder, load), config.decoder_levels());
    let z = config.z_dim;
    let (first, last) = match (levels.first(), levels.last()) {
        (Some(first), Some(last)) => (first.inputs, last.outputs),
        _ => return Err(Error::Config("dim_mult is empty".into())),
    };
    let mut segments = Vec::new();
    let mut layers = vec![
        Layer::Convolution(from.streamed("post_quant_conv", ConvolutionSizes::pointwise(z, z))?),
        Layer::Convolution(from.streamed("decoder.conv_in", ConvolutionSizes::causal(z, first))?),
    ];
    layers.extend(from.middle("decoder.mid_block", first)?);
    for (index, level) in levels.iter().enumerate() {
        let name = format!("decoder.up_blocks.{index}");
        if config.is_residual {
            segments.push(std::mem::take(&mut layers));
            from.begin_segment();
        }
        let blocks = from.residual_blocks(&format!("{name}.resnets"), level, config.num_res_blocks + 1)?;
        if config.is_residual {
            let up = level
                .resample
                .map(|time| from.upsample(&format!("{name}.upsampler"), level.outputs, level.outputs, time));
            let (up, outputs) = (up.transpose()?, level.outputs);
            layers.push(Layer::ResidualUp(ResidualUp { blocks, up, outputs, delay: Delay::default() }));
            continue;
        }
        layers.extend(blocks.into_iter().map(Layer::Residual));
        if let Some(time) = level.resample {
            segments.push(std::mem::take(&mut layers));
            from.begin_segment();
            let name = format!("{name}.upsamplers.0");
            layers.push(Layer::Up(from.upsample(&name, level.outputs, level.outputs / 2, time)?));
        }
    }
    let head = from.streamed("decoder.conv_out", ConvolutionSizes::causal(last, config.out_channels))?;
    layers.push(Layer::Head(from.norm("decoder.norm_out", last)?, head));
    segments.push(layers);
    Ok(Network { segments })
}

/// Reads the encoder: frames to mean and logarithm of the variance of latents.
///
/// # Errors
/// Tensors that are missing or of another shape.
pub(crate) fn encoder(config: &VaeConfig, folder: &TensorFolder, load: Load) -> Result<Network> {
    let (from, z) = (Checkpoint::new(folder, load), 2 * config.z_dim);
    let conv_in = ConvolutionSizes::causal(config.in_channels, config.base_dim);
    let mut layers = vec![Layer::Convolution(from.streamed("encoder.conv_in", conv_in)?)];
    let (mut number, mut last) = (0, config.base_dim);
    for (index, level) in config.encoder_levels().iter().enumerate() {
        last = level.outputs;
        if config.is_residual {
            let name = format!("encoder.down_blocks.{index}");
            let blocks = from.residual_blocks(&format!("{name}.resnets"), level, config.num_res_blocks)?;
            let down = level.resample.map(|time| from.downsample(&format!("{name}.downsampler"), last, time));
            let (down, outputs) = (down.transpose()?, level.outputs);
            layers.push(Layer::ResidualDown(ResidualDown { blocks, down, outputs, delay: Delay::default() }));
            continue;
        }
        // Blocks and resampling have one list of names.
        for block in 0..config.num_res_blocks {
            let inputs = if block == 0 { level.inputs } else { last };
            layers.push(Layer::Residual(from.residual_block(
                &format!("encoder.down_blocks.{number}"),
                inputs,
                last,
            )?));
            number += 1;
        }
        if let Some(time) = level.resample {
            layers.push(Layer::Down(from.downsample(&format!("encoder.down_blocks.{number}"), last, time)?));
            number += 1;
        }
    }
    from.begin_segment();
    let mut end = from.middle("encoder.mid_block", last)?;
    let head = from.streamed("encoder.conv_out", ConvolutionSizes::causal(last, z))?;
    end.push(Layer::Head(from.norm("encoder.norm_out", last)?, head));
    end.push(Layer::Convolution(from.streamed("quant_conv", ConvolutionSizes::pointwise(z, z))?));
    Ok(Network { segments: vec![layers, end] })
}

impl<'a> Checkpoint<'a> {
    fn new(folder: &'a TensorFolder, load: Load) -> Self {
        Self { folder, load, segment: Cell::new(0) }
    }

    /// Must be called before the layers of the next segment are made.
    fn begin_segment(&self) {
        self.segment.set(self.segment.get() + 1);
    }

    /// Whether the next layers have their weights.
    fn has_weights(&self) -> bool {
        matches!(&self.load, Load::Weights(segments) if segments.contains(&self.segment.get()))
    }

    /// Checks that a tensor has this shape; of one with dims of size 1 these may be left out.
    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        let found = self.folder.shape(name)?;
        let plain = |dims: &[usize]| dims.iter().copied().filter(|dim| *dim != 1).collect::<Vec<_>>();
        if plain(found) != plain(shape) {
            let problem = format!("tensor {name} has shape {found:?}, but config.json asks for {shape:?}");
            return Err(Error::Format { path: self.folder.path().to_owned(), problem });
        }
        Ok(())
    }

    fn convolution(&self, name: &str, sizes: ConvolutionSizes) -> Result<Arc<Convolution>> {
        let ConvolutionSizes { inputs, outputs, time, side, .. } = sizes;
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        self.check(&weight, &[outputs, inputs, time, side, side])?;
        self.check(&bias, &[outputs])?;
        Ok(Arc::new(match self.has_weights() {
            true => Convolution::new(sizes, &self.folder.read(&weight)?, &self.folder.read(&bias)?)?,
            false => Convolution::without_weights(sizes),
        }))
    }

    fn streamed(&self, name: &str, sizes: ConvolutionSizes) -> Result<StreamedConvolution> {
        Ok(StreamedConvolution::new(self.convolution(name, sizes)?))
    }

    fn norm(&self, name: &str, channels: usize) -> Result<Arc<ChannelNorm>> {
        let name = format!("{name}.gamma");
        self.check(&name, &[channels])?;
        Ok(Arc::new(match self.has_weights() {
            true => ChannelNorm::new(&self.folder.read(&name)?)?,
            false => ChannelNorm::without_gains(),
        }))
    }

    fn residual_block(&self, name: &str, inputs: usize, outputs: usize) -> Result<ResidualBlock> {
        let shortcut = (inputs != outputs)
            .then(|| self.convolution(&format!("{name}.conv_shortcut"), ConvolutionSizes::pointwise(inputs, outputs)));
        Ok(ResidualBlock {
            norm1: self.norm(&format!("{name}.norm1"), inputs)?,
            conv1: self.streamed(&format!("{name}.conv1"), ConvolutionSizes::causal(inputs, outputs))?,
            norm2: self.norm(&format!("{name}.norm2"), outputs)?,
            conv2: self.streamed(&format!("{name}.conv2"), ConvolutionSizes::causal(outputs, outputs))?,
            shortcut: shortcut.transpose()?,
            delay: Delay::default(),
        })
    }

    fn residual_blocks(&self, name: &str, level: &Level, count: usize) -> Result<Vec<ResidualBlock>> {
        let inputs = |index| if index == 0 { level.inputs } else { level.outputs };
        let block = |index| self.residual_block(&format!("{name}.{index}"), inputs(index), level.outputs);
        (0..count).map(block).collect()
    }

    fn middle(&self, name: &str, channels: usize) -> Result<Vec<Layer>> {
        let attention = format!("{name}.attentions.0");
        Ok(vec![
            Layer::Residual(self.residual_block(&format!("{name}.resnets.0"), channels, channels)?),
            Layer::Attention(FrameAttention {
                norm: self.norm(&format!("{attention}.norm"), channels)?,
                qkv: self
                    .convolution(&format!("{attention}.to_qkv"), ConvolutionSizes::pointwise(channels, 3 * channels))?,
                proj: self
                    .convolution(&format!("{attention}.proj"), ConvolutionSizes::pointwise(channels, channels))?,
            }),
            Layer::Residual(self.residual_block(&format!("{name}.resnets.1"), channels, channels)?),
        ])
    }

    fn upsample(&self, name: &str, inputs: usize, outputs: usize, time: bool) -> Result<Upsample> {
        let sizes = ConvolutionSizes::temporal(inputs, 2 * inputs);
        let time = time.then(|| self.streamed(&format!("{name}.time_conv"), sizes)).transpose()?;
        let space = self.streamed(&format!("{name}.resample.1"), ConvolutionSizes::spatial(inputs, outputs))?;
        Ok(Upsample { time, space })
    }

    fn downsample(&self, name: &str, channels: usize, time: bool) -> Result<Downsample> {
        let space = ConvolutionSizes { stride: 2, ..ConvolutionSizes::spatial(channels, channels) };
        let space = self.streamed(&format!("{name}.resample.1"), space)?;
        let sizes = ConvolutionSizes { time_stride: 2, ..ConvolutionSizes::temporal(channels, channels) };
        let time = time.then(|| self.streamed(&format!("{name}.time_conv"), sizes)).transpose()?;
        Ok(Downsample { space, time })
    }
}
