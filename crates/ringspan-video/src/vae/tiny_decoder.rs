//! TAEHV ("tiny autoencoder for Hunyuan video"), whose files `taew2_1` and `taew2_2` decode the latents of WAN 2.1 and 2.2: with fewer
//! details, in a small part of the time that WAN's own decoder takes.
//!
//! Frames pass through the network one after another. A memory block computes with a frame and with its own input of the frame before, so
//! only those inputs are kept; a layer that lengthens time makes two frames of one, and each passes through the rest.

use super::convolution::Convolution;
use super::sizes::{ConvolutionSizes, Padded};
use super::video_tensor::VideoTensor;
use crate::error::{Error, Result};
use crate::tensor_folder::TensorFolder;
use candle_core::{DType, Device, Tensor};
use ringspan_candle::pool;
use std::collections::BTreeMap;
use std::path::Path;

/// Frames that each scale makes of one. Each scale also doubles height and width.
const TIMES: [usize; 3] = [1, 2, 2];
/// Frames for each frame of latents.
const TIME: usize = 4;
/// Layers from a scale to the next: three memory blocks, the resizing, the layer that lengthens time, a convolution.
const SCALE_LAYERS: usize = 6;
/// The first layer of the first scale.
const FIRST_SCALE: usize = 3;
/// The convolution that makes pixels.
const LAST: usize = FIRST_SCALE + TIMES.len() * SCALE_LAYERS + 1;

/// The file of a tiny decoder, whose tensors are still on disk.
#[derive(Debug)]
pub struct TinyDecoderFile {
    tensors: TensorFolder,
    /// Channels of the latents.
    channels: usize,
    /// Channels of the three scales and of the last layers.
    widths: [usize; 4],
    /// Pixels, in each direction, of a position of the last layer.
    patch: usize,
}

impl TinyDecoderFile {
    /// Opens a safetensors file with the tensors of TAEHV; those of its encoder are not needed.
    ///
    /// # Errors
    /// A file that is missing, corrupt or not of safetensors, and tensors that are missing, of another shape, or of no layer.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |problem: String| Err(Error::Format { path: path.to_owned(), problem });
        if path.extension().is_some_and(|extension| extension == "pth") {
            return refuse("is a pickle of PyTorch; the same weights are published as .safetensors".into());
        }
        let (tensors, _) = TensorFolder::open_file(path)?;
        let of = |layer: usize| {
            let name = format!("decoder.{layer}.weight");
            match *tensors.shape(&name)? {
                [outputs, inputs, 3, 3] if outputs.min(inputs) > 0 => Ok([outputs, inputs]),
                ref shape => Err(Error::Format {
                    path: path.to_owned(),
                    problem: format!("{name} has shape {shape:?}; TAEHV's are [outputs, inputs, 3, 3], none of them 0"),
                }),
            }
        };
        let [first, channels] = of(1)?;
        let mut widths = [first; 4];
        for (scale, width) in widths.iter_mut().skip(1).enumerate() {
            *width = of(FIRST_SCALE + scale * SCALE_LAYERS + SCALE_LAYERS - 1)?[0];
        }
        let colors = of(LAST)?[0];
        let Some(patch) = (1..=4).find(|patch| 3 * patch * patch == colors) else {
            return refuse(format!(
                "decoder.{LAST}.weight makes {colors} channels, which are not 3 colors of square patches"
            ));
        };
        let file = Self { tensors, channels, widths, patch };
        file.check(path)?;
        Ok(file)
    }

    /// Checks names and shapes of all tensors of the decoder.
    fn check(&self, path: &Path) -> Result<()> {
        let mut wanted = BTreeMap::new();
        for (name, sizes, bias) in self.convolutions() {
            let side = sizes.side;
            wanted.insert(format!("{name}.weight"), vec![sizes.outputs, sizes.inputs, side, side]);
            if bias {
                wanted.insert(format!("{name}.bias"), vec![sizes.outputs]);
            }
        }
        let refuse = |problem: String| Err(Error::Format { path: path.to_owned(), problem });
        for (name, wanted) in &wanted {
            let shape = self.tensors.shape(name)?;
            // In some files the first layer that lengthens time makes two frames; TAEHV takes the last of them.
            let more = name.ends_with(".conv.weight") && shape.len() == 4 && shape[1..] == wanted[1..];
            let fits = shape == wanted || more && shape[0] > wanted[0] && shape[0].is_multiple_of(wanted[0]);
            if !fits {
                return refuse(format!(
                    "{name} has shape {shape:?}; with the other layers of this decoder it is {wanted:?}"
                ));
            }
        }
        match self.tensors.shapes().find(|(name, _)| name.starts_with("decoder.") && !wanted.contains_key(*name)) {
            Some((name, shape)) => refuse(format!("{name} {shape:?} belongs to no layer of TAEHV's decoder")),
            None => Ok(()),
        }
    }

    /// The convolutions: the name, the sizes, and whether there is a bias.
    fn convolutions(&self) -> Vec<(String, ConvolutionSizes, bool)> {
        let [first, .., last] = self.widths;
        let mut all = vec![("decoder.1".to_owned(), ConvolutionSizes::spatial(self.channels, first), true)];
        for (scale, time) in TIMES.into_iter().enumerate() {
            let (layer, width, next) = (FIRST_SCALE + scale * SCALE_LAYERS, self.widths[scale], self.widths[scale + 1]);
            for block in layer..layer + 3 {
                for (index, inputs) in [(0, 2 * width), (2, width), (4, width)] {
                    let name = format!("decoder.{block}.conv.{index}");
                    all.push((name, ConvolutionSizes::spatial(inputs, width), true));
                }
            }
            let longer = ConvolutionSizes::pointwise(width, time * width);
            all.push((format!("decoder.{}.conv", layer + 4), longer, false));
            all.push((format!("decoder.{}", layer + 5), ConvolutionSizes::spatial(width, next), false));
        }
        all.push((format!("decoder.{LAST}"), ConvolutionSizes::spatial(last, 3 * self.patch * self.patch), true));
        all
    }

    /// The sizes `[B, 3, F, H, W]` of the frames of latents `[B, C, F, H, W]`.
    ///
    /// # Errors
    /// Latents with another number of channels, and an empty dim.
    pub fn frames(&self, latents: [usize; 5]) -> Result<[usize; 5]> {
        let [batch, channels, frames, height, width] = latents;
        if channels != self.channels {
            let problem = format!("latents have {channels} channels, but the tiny decoder takes {}", self.channels);
            return Err(Error::Input(problem));
        }
        if latents.contains(&0) {
            return Err(Error::Input(format!("latents of shape {latents:?} [B,C,F,H,W] are empty")));
        }
        let [_, _, space] = self.sizes();
        Ok([batch, 3, TIME * (frames - 1) + 1, height * space, width * space])
    }

    /// The channels of latents, frames for each of them, and pixels, in each direction, of a position.
    #[must_use]
    pub fn sizes(&self) -> [usize; 3] {
        [self.channels, TIME, (1 << TIMES.len()) * self.patch]
    }

    /// Bytes of the weights.
    #[must_use]
    pub fn weights(&self) -> u64 {
        4 * self.convolutions().iter().map(|(_, sizes, _)| sizes.parameters() as u64).sum::<u64>()
    }

    /// The most bytes that decoding latents `[B, C, F, H, W]` takes in addition to the weights and to the frames.
    #[must_use]
    pub fn bytes(&self, latents: [usize; 5]) -> u64 {
        let [height, width] = [latents[3] as u64, latents[4] as u64];
        let positions = |scale: usize| (height * width) << (2 * scale);
        let padded = |scale: usize| ((height << scale) + 2) * ((width << scale) + 2);
        // A convolution has its input twice, the second time with padding, and buffers beside its output.
        let convolution = |scale, inputs: u64, outputs: u64| {
            let sizes = ConvolutionSizes::spatial(inputs as usize, outputs as usize);
            let [rows, cols] = [latents[3] << scale, latents[4] << scale];
            let buffers = sizes.buffers([1, rows, cols], cols + 2) as u64;
            inputs * (positions(scale) + padded(scale)) + outputs * positions(scale) + buffers
        };
        let widths = self.widths.map(|width| width as u64);
        let last = TIMES.len();
        let colors = 3 * (self.patch * self.patch) as u64;
        let ends = [
            convolution(0, self.channels as u64, widths[0]),
            convolution(last, widths[last - 1], widths[last]),
            convolution(last, widths[last], colors),
        ];
        let blocks = (0..last)
            .map(|scale| widths[scale] * positions(scale) + convolution(scale, 2 * widths[scale], widths[scale]));
        let largest = blocks.chain(ends).max().unwrap_or(0);
        // Memory blocks keep their inputs, and frames that are made of one wait for each other.
        let kept = (0..last).map(|scale| (3 + TIMES[scale] as u64) * widths[scale] * positions(scale)).sum::<u64>();
        4 * (largest + kept)
    }

    /// Reads the weights and decodes latents `[B, C, F, H, W]` as the transformer gives them, on so many threads, to frames
    /// `[B, 3, 4 F - 3, H, W]` in [-1, 1].
    ///
    /// # Errors
    /// As for [`frames`](Self::frames), failures of the file system, and a machine that cannot start the threads.
    pub fn decode(&self, latents: &VideoTensor, threads: usize) -> Result<VideoTensor> {
        self.decoder()?.decode(latents, self.frames(latents.shape())?, threads)
    }

    fn decoder(&self) -> Result<TinyDecoder> {
        let mut read = BTreeMap::new();
        for (name, sizes, has_bias) in self.convolutions() {
            let weight = self.tensors.read(&format!("{name}.weight"))?;
            // If the layer makes more frames than are taken, the last ones are.
            let weight = weight.narrow(0, weight.dim(0)? - sizes.outputs, sizes.outputs)?;
            let bias = match has_bias {
                true => self.tensors.read(&format!("{name}.bias"))?,
                false => Tensor::zeros(sizes.outputs, DType::F32, &Device::Cpu)?,
            };
            read.insert(name, Convolution::new(sizes, &weight, &bias)?);
        }
        let mut take = |name: String| {
            let missing = || Error::Config(format!("{name} is none of the convolutions of the tiny decoder"));
            read.remove(&name).ok_or_else(missing)
        };
        let mut layers = vec![Layer::Clamp, Layer::Convolution(take("decoder.1".into())?), Layer::Relu];
        for (scale, time) in TIMES.into_iter().enumerate() {
            let layer = FIRST_SCALE + scale * SCALE_LAYERS;
            for block in layer..layer + 3 {
                let mut of_block = |index: usize| take(format!("decoder.{block}.conv.{index}"));
                layers.push(Layer::Memory([of_block(0)?, of_block(2)?, of_block(4)?]));
            }
            layers.push(Layer::Grow(take(format!("decoder.{}.conv", layer + 4))?, time));
            layers.push(Layer::Convolution(take(format!("decoder.{}", layer + 5))?));
        }
        layers.extend([Layer::Relu, Layer::Convolution(take(format!("decoder.{LAST}"))?)]);
        Ok(TinyDecoder { layers, patch: self.patch })
    }
}

/// A tiny decoder with its weights.
struct TinyDecoder {
    layers: Vec<Layer>,
    patch: usize,
}

enum Layer {
    /// Bounds numbers to (-3, 3), smoothly: 3 tanh(x / 3).
    Clamp,
    Convolution(Convolution),
    Relu,
    /// Three convolutions, of a frame together with the block's input of the frame before; the frame is added to the result.
    Memory([Convolution; 3]),
    /// A convolution that makes so many frames of one, each then of twice the height and width.
    Grow(Convolution, usize),
}

/// A frame inside the network: `[rows, cols, channels]`.
struct Frame {
    rows: usize,
    cols: usize,
    channels: usize,
    data: Vec<f32>,
}

/// The frames of a video as they leave the network.
struct Frames<'a> {
    /// `[3, F, H, W]`.
    values: &'a mut [f32],
    count: usize,
    /// Frames of the network that come before the first of the video.
    before: usize,
    next: usize,
}

impl TinyDecoder {
    /// Decodes latents to frames of the shape that [`TinyDecoderFile::frames`] gives.
    fn decode(&self, latents: &VideoTensor, shape: [usize; 5], threads: usize) -> Result<VideoTensor> {
        let mut values = vec![0.0; shape.iter().product()];
        pool::run(threads, || {
            for (video, values) in values.chunks_exact_mut(shape[1..].iter().product()).enumerate() {
                self.video(latents, video, &mut Frames { values, count: shape[2], before: TIME - 1, next: 0 });
            }
        })?;
        VideoTensor::new(shape, values)
    }

    fn video(&self, latents: &VideoTensor, video: usize, out: &mut Frames) {
        let [_, channels, frames, rows, cols] = latents.shape();
        let area = rows * cols;
        let mut before: Vec<Option<Frame>> = self.layers.iter().map(|_| None).collect();
        for frame in 0..frames {
            let mut data = vec![0.0; area * channels];
            for (channel, plane) in latents
                .values()
                .chunks_exact(area)
                .skip(video * channels * frames + frame)
                .step_by(frames)
                .take(channels)
                .enumerate()
            {
                for (position, value) in plane.iter().enumerate() {
                    data[position * channels + channel] = *value;
                }
            }
            self.pass(0, Frame { rows, cols, channels, data }, &mut before, out);
        }
    }

    /// Passes a frame through the layers from `first` on; `before` has the inputs of memory blocks of the frame before.
    fn pass(&self, first: usize, mut frame: Frame, before: &mut [Option<Frame>], out: &mut Frames) {
        for (index, layer) in self.layers.iter().enumerate().skip(first) {
            frame = match layer {
                Layer::Clamp => frame.each(|x| (x / 3.0).tanh() * 3.0),
                Layer::Relu => frame.each(|x| x.max(0.0)),
                Layer::Convolution(convolution) => frame.convolved(convolution, None),
                Layer::Memory([first, second, third]) => {
                    let inner = frame.beside(before[index].as_ref()).convolved(first, None).each(|x| x.max(0.0));
                    let inner = inner.convolved(second, None).each(|x| x.max(0.0));
                    let out = inner.convolved(third, Some(&frame.data)).each(|x| x.max(0.0));
                    before[index] = Some(frame);
                    out
                }
                Layer::Grow(convolution, frames) => {
                    let grown = frame.pointwise(convolution);
                    drop(frame);
                    for number in 0..*frames {
                        self.pass(index + 1, grown.doubled(number, *frames), before, out);
                    }
                    return;
                }
            };
        }
        out.take(&frame, self.patch);
    }
}

impl Frame {
    fn each(mut self, function: impl Fn(f32) -> f32 + Sync) -> Self {
        let parts = self.data.chunks_mut(pool::part(self.rows, self.cols * self.channels) * self.cols * self.channels);
        pool::map(parts.collect(), |part: &mut [f32]| part.iter_mut().for_each(|x| *x = function(*x)));
        self
    }

    /// The channels of this frame followed by those of the frame before, or by zeros.
    fn beside(&self, before: Option<&Self>) -> Self {
        let mut data = vec![0.0; 2 * self.data.len()];
        for (index, both) in data.chunks_exact_mut(2 * self.channels).enumerate() {
            let range = index * self.channels..(index + 1) * self.channels;
            both[..self.channels].copy_from_slice(&self.data[range.clone()]);
            if let Some(before) = before {
                both[self.channels..].copy_from_slice(&before.data[range]);
            }
        }
        Self { channels: 2 * self.channels, data, ..*self }
    }

    /// The output of a convolution of 3 x 3, with zeros around the frame; `add` is added to it.
    fn convolved(&self, convolution: &Convolution, add: Option<&[f32]>) -> Self {
        let (rows, cols, line) = (self.rows + 2, self.cols + 2, self.cols * self.channels);
        let mut padded = vec![0.0; rows * cols * self.channels];
        for (row, from) in self.data.chunks_exact(line).enumerate() {
            padded[((row + 1) * cols + 1) * self.channels..][..line].copy_from_slice(from);
        }
        let padded = Padded { data: &padded, rows, cols };
        let data = convolution.apply(&padded, [1, self.rows, self.cols], add);
        Self { channels: convolution.sizes().outputs, data, ..*self }
    }

    fn pointwise(&self, convolution: &Convolution) -> Self {
        Self { channels: convolution.sizes().outputs, data: convolution.pointwise(&self.data), ..*self }
    }

    /// The channels of one of so many frames, with each position twice in both directions.
    fn doubled(&self, number: usize, frames: usize) -> Self {
        let channels = self.channels / frames;
        let mut out = Self { rows: 2 * self.rows, cols: 2 * self.cols, channels, data: Vec::new() };
        out.data.reserve_exact(out.rows * out.cols * channels);
        for row in self.data.chunks_exact(self.cols * self.channels) {
            for _ in 0..2 {
                for position in row.chunks_exact(self.channels) {
                    let position = &position[number * channels..][..channels];
                    out.data.extend_from_slice(position);
                    out.data.extend_from_slice(position);
                }
            }
        }
        out
    }
}

impl Frames<'_> {
    /// Takes the next frame of the network, of which each position is a patch of `patch` x `patch` pixels in [0, 1].
    fn take(&mut self, frame: &Frame, patch: usize) {
        let index = self.next;
        self.next += 1;
        let Some(index) = index.checked_sub(self.before) else { return };
        let (height, width) = (frame.rows * patch, frame.cols * patch);
        for (color, values) in self.values.chunks_exact_mut(self.count * height * width).enumerate() {
            let plane = &mut values[index * height * width..][..height * width];
            for (pixel, value) in plane.iter_mut().enumerate() {
                let (row, col) = (pixel / width, pixel % width);
                let position = row / patch * frame.cols + col / patch;
                let channel = (color * patch + row % patch) * patch + col % patch;
                *value = frame.data[position * frame.channels + channel].clamp(0.0, 1.0) * 2.0 - 1.0;
            }
        }
    }
}
