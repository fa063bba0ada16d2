//! The tensors of a run's input file.

use crate::files::{TensorBytes, Tensors};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use ringspan_video::denoise::{DenoiseFolder, DenoiseInputs};
use safetensors::Dtype;
use std::path::Path;

/// The tensors of the file, of which the latents may be missing.
pub(super) struct Input {
    prompt_embeds: Tensor,
    negative_prompt_embeds: Option<Tensor>,
    latents: Option<Tensor>,
    image_embeds: Option<Tensor>,
    condition: Option<Tensor>,
    control: Option<Tensor>,
    control_scale: Option<Vec<f32>>,
}

const KNOWN: [&str; 7] =
    ["prompt_embeds", "negative_prompt_embeds", "latents", "image_embeds", "condition", "control", "control_scale"];

impl Input {
    pub(super) fn read(file: &Path) -> Result<Self> {
        let bytes = TensorBytes::read(file)?;
        let tensors = bytes.parse()?;
        if let Some(unknown) = tensors.names().into_iter().find(|name| !KNOWN.contains(&name.as_str())) {
            bail!("{}: tensor `{unknown}` has no effect; possible are {}", file.display(), KNOWN.join(", "));
        }
        const EMBEDS: &str = "[B, N, C]";
        const VIDEO: &str = "[B, C, F, H, W]";
        let scale = optional::<1>(&tensors, "control_scale", "[layers]")?;
        Ok(Self {
            prompt_embeds: float::<3>(&tensors, "prompt_embeds", EMBEDS)?,
            negative_prompt_embeds: optional::<3>(&tensors, "negative_prompt_embeds", EMBEDS)?,
            latents: optional::<5>(&tensors, "latents", VIDEO)?,
            image_embeds: optional::<3>(&tensors, "image_embeds", EMBEDS)?,
            condition: optional::<5>(&tensors, "condition", VIDEO)?,
            control: optional::<5>(&tensors, "control", VIDEO)?,
            control_scale: scale.map(|scale| scale.to_vec1()).transpose()?,
        })
    }

    /// The inputs with the file's latents. For a video of these frames, height and width, the latents have the shape of the noise,
    /// which is to be drawn once a plan has been made of it; they are one zero, broadcast, and take no memory.
    pub(super) fn with_latents(self, folder: &DenoiseFolder, video: Option<[usize; 3]>) -> Result<DenoiseInputs> {
        let latents = match (self.latents, video) {
            (Some(latents), None) => latents,
            (None, Some(video)) => {
                let [frames, height, width] = folder.latents_of(video)?;
                let channels = folder.transformer(0).config().out_channels();
                let shape = [self.prompt_embeds.dim(0)?, channels, frames, height, width];
                Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(&shape)?
            }
            (Some(latents), Some(_)) => bail!(
                "--frames, --height and --width have no effect: the file of --embeds has latents {:?}",
                latents.dims()
            ),
            (None, None) => {
                bail!("give --frames, --height and --width, or latents [B, C, F, H, W] in the file of --embeds")
            }
        };
        Ok(DenoiseInputs {
            prompt_embeds: self.prompt_embeds,
            negative_prompt_embeds: self.negative_prompt_embeds,
            latents,
            image_embeds: self.image_embeds,
            condition: self.condition,
            control: self.control,
            control_scale: self.control_scale,
        })
    }
}

fn float<const N: usize>(tensors: &Tensors, name: &str, shape: &str) -> Result<Tensor> {
    let found = tensors.get::<N>(name, &[Dtype::F32, Dtype::BF16, Dtype::F16], shape)?;
    let values = found.floats();
    let at = values.iter().position(|x| !x.is_finite());
    ensure!(at.is_none(), "{}: `{name}` has a number that is not finite", tensors.path().display());
    Tensor::from_vec(values, found.shape.as_slice(), &Device::Cpu).with_context(|| format!("`{name}`"))
}

fn optional<const N: usize>(tensors: &Tensors, name: &str, shape: &str) -> Result<Option<Tensor>> {
    if tensors.has(name) { float::<N>(tensors, name, shape).map(Some) } else { Ok(None) }
}
