//! Conditioning on images: the frames that are encoded, and the condition that the transformer takes.

use super::{Images, VideoPipeline, VideoRequest};
use crate::error::{Error, Result};
use crate::frames::{self, ResizeFilter, RgbFrame};
use crate::vae::VideoTensor;
use candle_core::{Device, Tensor};

impl VideoPipeline {
    /// Checks that the pipeline takes the images that a request has, and has those that it needs.
    pub(super) fn check_images(&self, request: &VideoRequest) -> Result<()> {
        let refuse = |problem: &str| Err(Error::Input(problem.into()));
        if let Some(encoder) = &self.image_encoder {
            [&request.image, &request.last_image].into_iter().flatten().try_for_each(|image| encoder.check(image))?;
        }
        match (self.images, request.image.is_some(), request.last_image.is_some()) {
            (_, false, true) => refuse("a last image needs a first one"),
            (Images::None, true, _) => {
                refuse("this pipeline makes videos of prompts alone: its transformer takes no channels of an image")
            }
            (Images::Control, true, _) => refuse(
                "a VACE pipeline takes images as frames of its control or as references: a first image has no effect",
            ),
            (Images::Appended { .. }, false, _) => refuse("this pipeline makes videos of an image, and none is given"),
            (Images::Appended { .. }, true, given)
                if self.image_encoder.is_some() && given != self.takes_two_images() =>
            {
                refuse(match given {
                    true => {
                        "a last image has no effect: the transformer has positions for one image (no pos_embed_seq_len)"
                    }
                    false => {
                        "this pipeline makes videos between two images, and no last image is given: its transformer has \
                         positions for two (pos_embed_seq_len)"
                    }
                })
            }
            (Images::FirstFrame, _, true) => {
                refuse("this pipeline takes the first frame alone: a last image has no effect")
            }
            (Images::FirstFrame, true, _)
                if request.preview && (self.tiny_decoder.is_none() || request.size[0] == 1) =>
            {
                refuse("a preview shows the first frame, which is the given image here: it would show nothing new")
            }
            (_, _, true) if request.size[0] < 2 => {
                let frames = request.size[0];
                Err(Error::Input(format!("{frames} frames: a first and a last image need at least 2")))
            }
            _ => Ok(()),
        }
    }

    /// Whether the image encoder's embeddings must be of two images.
    fn takes_two_images(&self) -> bool {
        self.denoiser.transformer(0).config().pos_embed_seq_len.is_some()
    }

    /// The images that the image encoder embeds, if the pipeline has one.
    pub(super) fn embedded_images(&self, request: &VideoRequest) -> Option<Vec<RgbFrame>> {
        self.image_encoder.as_ref()?;
        Some([&request.image, &request.last_image].into_iter().flatten().cloned().collect())
    }

    /// The shape `[1, N, image_dim]` of the embeddings of all images, if there are any.
    pub(super) fn image_embeds_shape(&self, request: &VideoRequest) -> Option<[usize; 3]> {
        let (encoder, images) = (self.image_encoder.as_ref()?, self.embedded_images(request)?);
        Some([1, images.len() * encoder.config().embeddings(), encoder.config().hidden_size])
    }

    /// The shape of the frames that are encoded, if there are any.
    pub(super) fn encoded_shape(&self, request: &VideoRequest) -> Option<[usize; 5]> {
        let [frames, height, width] = request.size;
        match self.images {
            Images::None => None,
            Images::Control => Some([1, 3, frames, height, width]),
            Images::Appended { .. } => request.image.as_ref().map(|_| [1, 3, frames, height, width]),
            Images::FirstFrame => request.image.as_ref().map(|_| [1, 3, 1, height, width]),
        }
    }

    /// The shape of the condition for latents `[B, C, F, H, W]`, if there is one.
    pub(super) fn condition_shape(&self, request: &VideoRequest, latents: [usize; 5]) -> Option<[usize; 5]> {
        let [batch, channels, frames, height, width] = latents;
        request.image.as_ref()?;
        match self.images {
            Images::None | Images::Control => None,
            Images::Appended { mask } => Some([batch, mask + channels, frames, height, width]),
            Images::FirstFrame => Some([batch, channels, 1, height, width]),
        }
    }

    /// The frames that are encoded: the images, and gray (0) where nothing is given.
    pub(super) fn frames_to_encode(&self, request: &VideoRequest) -> Result<Option<VideoTensor>> {
        let (Some(shape), Some(image)) = (self.encoded_shape(request), &request.image) else { return Ok(None) };
        let [_, _, frames, height, width] = shape;
        let area = height * width;
        let mut values = vec![0.0; 3 * frames * area];
        let mut put = |picture: &RgbFrame, frame: usize| -> Result<()> {
            let resized = frames::resized(picture, width, height, ResizeFilter::Lanczos)
                .map_err(|error| Error::Input(error.to_string()))?;
            for (index, level) in resized.pixels.iter().enumerate() {
                values[(index % 3 * frames + frame) * area + index / 3] = f32::from(*level) / 127.5 - 1.0;
            }
            Ok(())
        };
        put(image, 0)?;
        if let Some(last) = &request.last_image {
            put(last, frames - 1)?;
        }
        VideoTensor::new(shape, values).map(Some)
    }

    /// The condition of encoded frames: their latents, and before them, where they are appended, the mask: a channel for each frame of
    /// a latent frame, 1 where the frame is given. The first latent frame stands for one frame, which all its channels repeat.
    pub(super) fn condition(&self, request: &VideoRequest, encoded: &VideoTensor) -> Result<Tensor> {
        let shape @ [batch, _, frames, height, width] = encoded.shape();
        let latents = Tensor::from_slice(encoded.values(), shape.as_slice(), &Device::Cpu)?;
        let Images::Appended { mask } = self.images else { return Ok(latents) };
        let area = height * width;
        let mut values = vec![0.0f32; mask * frames * area];
        for (channel, of_frames) in values.chunks_exact_mut(frames * area).enumerate() {
            of_frames[..area].fill(1.0);
            if request.last_image.is_some() && channel + 1 == mask {
                of_frames[(frames - 1) * area..].fill(1.0);
            }
        }
        let mask = Tensor::from_vec(values, (1, mask, frames, height, width), &Device::Cpu)?;
        Ok(Tensor::cat(&[mask.repeat((batch, 1, 1, 1, 1))?, latents], 1)?)
    }
}
