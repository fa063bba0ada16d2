//! VACE's control (Jiang et al., 2025, arXiv:2503.07598): frames to keep, to change or to follow, a mask of what is made anew, and
//! pictures of what the video should show.

use super::{Images, VideoPipeline, VideoRequest};
use crate::error::{Error, Result};
use crate::frames::{self, ResizeFilter, RgbFrame, from_rgb};
use crate::vae::VideoTensor;
use candle_core::{Device, Tensor};

/// What a pipeline of VACE takes beside a prompt; without any of it, the whole video is made anew.
#[derive(Debug, Clone, Default)]
pub struct VideoControl {
    /// A picture for each frame of the video, of any size; gray if there are none.
    pub frames: Vec<RgbFrame>,
    /// A picture for each frame, of any size: bright (red above half) where the video is made anew, dark where the frame is kept. If
    /// there are none, all is made anew, and the frames are followed.
    pub mask: Vec<RgbFrame>,
    /// Pictures of what the video should show, of any size.
    pub references: Vec<RgbFrame>,
    /// The factor of what each control block adds; 1 if absent.
    pub scale: Option<f32>,
}

impl VideoControl {
    fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.mask.is_empty() && self.references.is_empty() && self.scale.is_none()
    }
}

impl VideoPipeline {
    /// Checks that the pipeline takes the control of a request, that it has as many frames as the video, and that references have pixels
    /// left when they are as small as the video.
    pub(super) fn check_control(&self, request: &VideoRequest) -> Result<()> {
        let control = &request.control;
        if self.images != Images::Control {
            return match control.is_empty() {
                true => Ok(()),
                false => Err(Error::Input("a control has no effect: the transformer has no vace_layers".into())),
            };
        }
        if !control.mask.is_empty() && control.frames.is_empty() {
            return Err(Error::Input("a mask needs the frames that it keeps, and no control frames are given".into()));
        }
        let count = request.size[0];
        for (what, given) in [("control frames", control.frames.len()), ("frames of the mask", control.mask.len())] {
            if given != 0 && given != count {
                return Err(Error::Input(format!("there are {given} {what}, and the video has {count} frames")));
            }
        }
        for reference in &control.references {
            ReferenceSize::of(reference, request.size, self.vae.config().space())?;
        }
        match control.scale.filter(|scale| !scale.is_finite()) {
            Some(scale) => Err(Error::Input(format!("a control scale of {scale} is no finite number"))),
            None => Ok(()),
        }
    }

    /// Channels of the control: latents of what is kept and of what is made anew, and the mask of each pixel of a latent.
    pub(super) fn control_channels(&self) -> usize {
        2 * self.vae.config().z_dim + self.vae.config().space().pow(2)
    }

    /// The factors of the control blocks.
    pub(super) fn control_scale(&self, request: &VideoRequest) -> Option<Vec<f32>> {
        let blocks = self.denoiser.transformer(0).config().vace_layers.as_ref()?.len();
        Some(vec![request.control.scale?; blocks])
    }

    /// The control `[1, channels, references + F, H, W]`, with a latent frame for each reference before those of the video; `encode` gives
    /// the latents `[1, z, F, H, W]` of frames.
    ///
    /// # Errors
    /// Errors that `encode` returns.
    pub(super) fn control(
        &self,
        request: &VideoRequest,
        mut encode: impl FnMut(&VideoTensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let frames = colors(&request.control.frames, request.size)?;
        let mask = mask(&request.control.mask, request.size)?;
        let masked = |anew: bool| {
            let area = mask.len();
            let kept = |(index, x): (usize, &f32)| if (mask[index % area] > 0.5) == anew { *x } else { 0.0 };
            let values = frames.values().iter().enumerate().map(kept).collect();
            VideoTensor::new(frames.shape(), values)
        };
        let (kept, anew) = (encode(&masked(false)?)?, encode(&masked(true)?)?);
        let mut latents = Tensor::cat(&[kept, anew], 1)?;
        let mut mask = self.mask_of_latents(&mask, request.size)?;
        for reference in &request.control.references {
            let latent = encode(&reference_frame(reference, request.size, self.vae.config().space())?)?;
            latents = Tensor::cat(&[Tensor::cat(&[&latent, &latent.zeros_like()?], 1)?, latents], 2)?;
            mask = Tensor::cat(&[mask.narrow(2, 0, 1)?.zeros_like()?, mask], 2)?;
        }
        Ok(Tensor::cat(&[latents, mask], 1)?)
    }

    /// The mask `[1, s s, F, H, W]` in the resolution of latents: each of the s x s pixels that a latent stands for has a channel. Latent
    /// frame i of F has the mask of frame (i + 1/2) count / F, rounded down, as diffusers interpolates.
    fn mask_of_latents(&self, mask: &[f32], [count, height, width]: [usize; 3]) -> Result<Tensor> {
        let (space, time) = (self.vae.config().space(), self.vae.config().time());
        let (latent_frames, rows, columns) = (count.div_ceil(time), height / space, width / space);
        let mut values = Vec::with_capacity(space * space * latent_frames * rows * columns);
        for (y, x) in (0..space).flat_map(|y| (0..space).map(move |x| (y, x))) {
            for frame in 0..latent_frames {
                let nearest = ((2 * frame + 1) * count / (2 * latent_frames)).min(count - 1);
                for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                    values.push(mask[(nearest * height + row * space + y) * width + column * space + x]);
                }
            }
        }
        Ok(Tensor::from_vec(values, (1, space * space, latent_frames, rows, columns), &Device::Cpu)?)
    }
}

/// Frames `[1, 3, F, H, W]` in [-1, 1] of pictures that are resized; gray (0) if there are none.
fn colors(pictures: &[RgbFrame], [count, height, width]: [usize; 3]) -> Result<VideoTensor> {
    if pictures.is_empty() {
        return VideoTensor::new([1, 3, count, height, width], vec![0.0; 3 * count * height * width]);
    }
    let resized: Result<Vec<_>> = pictures.iter().map(|picture| resized(picture, width, height)).collect();
    let (shape, values) = from_rgb(&resized?);
    VideoTensor::new(shape, values)
}

/// The mask `[F, H, W]` from 0 (kept) to 1 (made anew); all 1 without pictures.
fn mask(pictures: &[RgbFrame], [count, height, width]: [usize; 3]) -> Result<Vec<f32>> {
    if pictures.is_empty() {
        return Ok(vec![1.0; count * height * width]);
    }
    let mut values = Vec::with_capacity(count * height * width);
    for picture in pictures {
        values.extend(resized(picture, width, height)?.pixels.iter().step_by(3).map(|level| f32::from(*level) / 255.0));
    }
    Ok(values)
}

fn resized(picture: &RgbFrame, width: usize, height: usize) -> Result<RgbFrame> {
    frames::resized(picture, width, height, ResizeFilter::Lanczos).map_err(|error| Error::Input(error.to_string()))
}

/// The sizes of a reference, as diffusers resizes it.
struct ReferenceSize {
    /// Height and width that `space`, the pixels of a latent, divides.
    whole: [usize; 2],
    /// Height and width with the same ratio, as large as fits into the video.
    fitted: [usize; 2],
}

impl ReferenceSize {
    fn of(picture: &RgbFrame, [_, height, width]: [usize; 3], space: usize) -> Result<Self> {
        let whole = [picture.height, picture.width].map(|side| side - side % space);
        let scale = (height as f64 / whole[0] as f64).min(width as f64 / whole[1] as f64);
        let fitted = whole.map(|side| (side as f64 * scale) as usize);
        if whole.contains(&0) || fitted.contains(&0) {
            return Err(Error::Input(format!(
                "a reference of {} x {} pixels has none left in {width} x {height}; each side needs at least {space}",
                picture.width, picture.height
            )));
        }
        Ok(Self { whole, fitted })
    }
}

/// A reference as one frame `[1, 3, 1, H, W]`: interpolated linearly between the centers of pixels, in the middle of white.
fn reference_frame(picture: &RgbFrame, size @ [_, height, width]: [usize; 3], space: usize) -> Result<VideoTensor> {
    let ReferenceSize { whole: [high, wide], fitted: [rows, columns] } = ReferenceSize::of(picture, size, space)?;
    let picture = resized(picture, wide, high)?;
    let (top, left) = ((height - rows) / 2, (width - columns) / 2);
    let (of_rows, of_columns) = (neighbours(high, rows), neighbours(wide, columns));
    let mut values = vec![1.0f32; 3 * height * width];
    for (color, plane) in values.chunks_exact_mut(height * width).enumerate() {
        let level =
            |row: usize, column: usize| f32::from(picture.pixels[(row * wide + column) * 3 + color]) / 127.5 - 1.0;
        for (row, (above, below, down)) in of_rows.iter().enumerate() {
            for (column, (before, after, right)) in of_columns.iter().enumerate() {
                let upper = level(*above, *before) * (1.0 - right) + level(*above, *after) * right;
                let lower = level(*below, *before) * (1.0 - right) + level(*below, *after) * right;
                plane[(top + row) * width + left + column] = upper * (1.0 - down) + lower * down;
            }
        }
    }
    VideoTensor::new([1, 3, 1, height, width], values)
}

/// For each of `to` pixels the two of `from` pixels between whose centers its own lies, and how far it is from the first one.
fn neighbours(from: usize, to: usize) -> Vec<(usize, usize, f32)> {
    let at = |index: usize| {
        let place = ((index as f32 + 0.5) * (from as f32 / to as f32) - 0.5).max(0.0);
        let first = (place as usize).min(from - 1);
        (first, (first + 1).min(from - 1), place - first as f32)
    };
    (0..to).map(at).collect()
}
