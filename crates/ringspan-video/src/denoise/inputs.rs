//! The inputs of a denoising run: embeddings of prompts, noise, and conditions such as a first frame.

use super::pipeline::DenoiseFolder;
use crate::error::{Error, Result};
use crate::transformer::TokenGrid;
use candle_core::Tensor;

/// The tensors of a run, all f32, by their names in files. B videos, N embeddings, F latent frames, H rows, W columns.
#[derive(Debug, Clone)]
pub struct DenoiseInputs {
    /// `[B, N, text_dim]`.
    pub prompt_embeds: Tensor,
    /// `[B, N, text_dim]`; needed for guidance.
    pub negative_prompt_embeds: Option<Tensor>,
    /// The noise `[B, C, F, H, W]` with which the run begins.
    pub latents: Tensor,
    /// `[B, N, image_dim]`, for models that take an image encoder's embeddings.
    pub image_embeds: Option<Tensor>,
    /// The condition: a tensor `[B, in - out, F, H, W]` that is appended to the channels of latents, or the first
    /// latent frame `[B, C, 1, H, W]`.
    pub condition: Option<Tensor>,
    /// VACE's control `[B, vace_in_channels, F, H, W]`.
    pub control: Option<Tensor>,
    /// The factors of VACE's control blocks; 1 if absent.
    pub control_scale: Option<Vec<f32>>,
}

/// How the transformer takes a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Conditioning {
    None,
    /// It is appended to the channels of latents.
    Appended,
    /// It is the first frame, which has time step 0 and is put back at the end.
    FirstFrame,
}

impl DenoiseInputs {
    /// Number B of videos.
    pub(super) fn batch(&self) -> usize {
        self.latents.dims().first().copied().unwrap_or(0)
    }

    /// The grid of tokens.
    pub(super) fn grid(&self, folder: &DenoiseFolder) -> Result<TokenGrid> {
        let (_, _, frames, height, width) = self.latents.dims5()?;
        TokenGrid::new([frames, height, width], folder.transformer(0).config().patch_size)
    }

    /// Checks that the tensors fit the model and each other; returns how the transformer takes the condition.
    pub(super) fn check(&self, folder: &DenoiseFolder) -> Result<Conditioning> {
        let config = folder.transformer(0).config();
        let (inputs, channels) = (config.in_channels, config.out_channels());
        let refuse = |problem: String| Err(Error::Input(problem));
        let (batch, of_latents, frames, height, width) = match self.latents.dims5() {
            Ok(sizes) => sizes,
            Err(_) => return refuse(format!("latents are {:?}, expected [B, C, F, H, W]", self.latents.shape())),
        };
        if of_latents != channels || batch == 0 {
            return refuse(format!(
                "latents are {:?}, expected [B, {channels}, F, H, W]: the model predicts {channels} channels",
                self.latents.shape()
            ));
        }
        self.grid(folder)?.check_positions(config.rope_max_seq_len)?;
        let negative = self.negative_prompt_embeds.iter().map(|text| ("negative_prompt_embeds", text));
        for (name, text) in [("prompt_embeds", &self.prompt_embeds)].into_iter().chain(negative) {
            for stage in 0..folder.stages() {
                folder.transformer(stage).check_prompt(name, text, self.image_embeds.as_ref(), batch)?;
            }
        }
        let wanted = |name: &str, given: &Tensor, channels: usize, frames: usize| {
            let wanted = [batch, channels, frames, height, width];
            match given.dims() == wanted {
                true => Ok(()),
                false => Err(Error::Input(format!("`{name}` is {:?}, expected {wanted:?}", given.shape()))),
            }
        };
        let blocks = config.vace_layers.as_ref().map_or(0, Vec::len);
        if let Some(scale) = self.control_scale.as_ref().filter(|scale| blocks > 0 && scale.len() != blocks) {
            return refuse(format!(
                "`control_scale` has {} factors, and the model {blocks} control blocks",
                scale.len()
            ));
        }
        match (&self.control, config.vace_in_channels) {
            (Some(control), Some(channels)) => wanted("control", control, channels, frames)?,
            (None, Some(channels)) => {
                return refuse(format!(
                    "this model needs `control` [{batch}, {channels}, {frames}, {height}, {width}]"
                ));
            }
            (Some(_), None) => return refuse("`control` has no effect: the model has no vace_layers".into()),
            (None, None) if self.control_scale.is_some() => {
                return refuse("`control_scale` has no effect: the model has no vace_layers".into());
            }
            (None, None) => {}
        }
        match &self.condition {
            Some(condition) if inputs > channels => {
                wanted("condition", condition, inputs - channels, frames)?;
                Ok(Conditioning::Appended)
            }
            Some(condition) => {
                wanted("condition", condition, channels, 1)?;
                Ok(Conditioning::FirstFrame)
            }
            None if inputs == channels => Ok(Conditioning::None),
            None => refuse(format!(
                "this model needs `condition` [{batch}, {}, {frames}, {height}, {width}]: it takes {inputs} channels, and latents \
                 have {channels}",
                inputs - channels
            )),
        }
    }
}
