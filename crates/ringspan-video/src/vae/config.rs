//! The configuration of WAN's autoencoder, as diffusers writes it to `config.json`.

use crate::error::{Error, Result};
use crate::tensor_folder::read_json;
use serde::Deserialize;
use std::path::Path;

/// `AutoencoderKLWan`: names and defaults are those of diffusers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct VaeConfig {
    /// Channels of the encoder's first level.
    pub base_dim: usize,
    /// Channels of the decoder's last level; those of the encoder if there is no number.
    pub decoder_base_dim: Option<usize>,
    /// Channels of latents.
    pub z_dim: usize,
    /// Channels of each level, in units of `base_dim`.
    pub dim_mult: Vec<usize>,
    /// Residual blocks of a level.
    pub num_res_blocks: usize,
    /// Levels with attention; only none is possible.
    pub attn_scales: Vec<f64>,
    /// Whether the encoder halves time after each level but the last (the name is spelled as in diffusers).
    pub temperal_downsample: Vec<bool>,
    /// Mean of each latent channel.
    pub latents_mean: Vec<f32>,
    /// Standard deviation of each latent channel.
    pub latents_std: Vec<f32>,
    /// Whether resampling has shortcuts, as in WAN 2.2's autoencoder of the 5B model.
    pub is_residual: bool,
    /// Channels of the encoder's input: 3, times the pixels of a patch.
    pub in_channels: usize,
    /// Channels of the decoder's output: 3, times the pixels of a patch.
    pub out_channels: usize,
    /// Pixels of a patch's side; none is 1.
    pub patch_size: Option<usize>,
}

/// The residual blocks of one resolution, and what follows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    /// Channels of the first block's input.
    pub(crate) inputs: usize,
    /// Channels of the blocks' outputs.
    pub(crate) outputs: usize,
    /// Whether the resampling after the blocks changes time as well; `None` if there is none.
    pub(crate) resample: Option<bool>,
}

impl Default for VaeConfig {
    fn default() -> Self {
        Self {
            base_dim: 96,
            decoder_base_dim: None,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            num_res_blocks: 2,
            attn_scales: Vec::new(),
            temperal_downsample: vec![false, true, true],
            latents_mean: vec![
                -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632,
                -0.1922, -0.9497, 0.2503, -0.2921,
            ],
            latents_std: vec![
                2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382,
                1.1253, 2.8251, 1.9160,
            ],
            is_residual: false,
            in_channels: 3,
            out_channels: 3,
            patch_size: None,
        }
    }
}

impl VaeConfig {
    /// Reads `config.json` of an autoencoder's folder.
    ///
    /// # Errors
    /// No such file, another model's, and a configuration that is not supported.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let json: serde_json::Value = read_json(&path)?;
        let format = |problem| Error::Format { path: path.clone(), problem };
        let class = json.get("_class_name").and_then(serde_json::Value::as_str);
        if let Some(class) = class.filter(|class| *class != "AutoencoderKLWan") {
            return Err(format(format!("_class_name is {class}: AutoencoderKLWan is needed")));
        }
        let config: Self = serde_json::from_value(json).map_err(|error| format(error.to_string()))?;
        config.check().map_err(|error| format(error.to_string()))?;
        Ok(config)
    }

    /// Checks that the numbers fit each other.
    ///
    /// # Errors
    /// The first numbers that do not.
    pub fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Config(problem));
        let Self { base_dim, z_dim, dim_mult, num_res_blocks, temperal_downsample, .. } = self;
        if [*base_dim, *z_dim, *num_res_blocks, dim_mult.len()].contains(&0) || dim_mult.contains(&0) {
            return refuse(format!(
                "base_dim {base_dim}, z_dim {z_dim}, num_res_blocks {num_res_blocks}, dim_mult {dim_mult:?}: none may be 0 or empty"
            ));
        }
        if temperal_downsample.len() + 1 != dim_mult.len() {
            return refuse(format!(
                "temperal_downsample has {} entries for {} levels of dim_mult: one for each but the last is needed",
                temperal_downsample.len(),
                dim_mult.len()
            ));
        }
        if !self.attn_scales.is_empty() {
            return refuse(format!(
                "attn_scales {:?}: attention is supported in the middle block only",
                self.attn_scales
            ));
        }
        for (name, values) in [("latents_mean", &self.latents_mean), ("latents_std", &self.latents_std)] {
            if values.len() != *z_dim {
                return refuse(format!("{name} has {} entries for {z_dim} channels (z_dim)", values.len()));
            }
        }
        if let Some(std) = self.latents_std.iter().find(|std| !(std.is_finite() && **std > 0.0)) {
            return refuse(format!("latents_std has {std}: all must be above 0"));
        }
        let pixels = 3 * self.patch() * self.patch();
        if self.patch() == 0 || self.in_channels != pixels || self.out_channels != pixels {
            return refuse(format!(
                "in_channels {}, out_channels {}: patches of {} pixels need {pixels}",
                self.in_channels,
                self.out_channels,
                self.patch()
            ));
        }
        self.check_shortcuts()
    }

    /// The shortcuts of resampling repeat or average whole groups of channels.
    fn check_shortcuts(&self) -> Result<()> {
        if !self.is_residual {
            return Ok(());
        }
        let places = |level: &Level| level.resample.map_or(1, |time| if time { 8 } else { 4 });
        let up =
            |level: &Level| level.resample.is_none() || (level.outputs * places(level)).is_multiple_of(level.inputs);
        let down = |level: &Level| (level.inputs * places(level)).is_multiple_of(level.outputs);
        if self.decoder_levels().iter().all(up) && self.encoder_levels().iter().all(down) {
            return Ok(());
        }
        let problem =
            "channels of neighbouring levels do not divide into whole groups, which the shortcuts repeat or average";
        Err(Error::Config(format!("is_residual with dim_mult {:?}: {problem}", self.dim_mult)))
    }

    /// The levels of the decoder, from the latents' on.
    pub(crate) fn decoder_levels(&self) -> Vec<Level> {
        let base = self.decoder_base_dim.unwrap_or(self.base_dim);
        let dims: Vec<usize> = self.dim_mult.iter().rev().map(|mult| base * mult).collect();
        let level = |(index, outputs): (usize, &usize)| {
            let before = dims[index.saturating_sub(1)];
            // Without shortcuts, doubling the resolution halves the channels.
            let inputs = if index > 0 && !self.is_residual { before / 2 } else { before };
            let resample = self.temperal_downsample.iter().rev().nth(index).copied();
            Level { inputs, outputs: *outputs, resample }
        };
        dims.iter().enumerate().map(level).collect()
    }

    /// The levels of the encoder, from the pixels' on.
    pub(crate) fn encoder_levels(&self) -> Vec<Level> {
        let dims: Vec<usize> = [1].iter().chain(&self.dim_mult).map(|mult| self.base_dim * mult).collect();
        let level = |(index, pair): (usize, &[usize])| {
            let resample = self.temperal_downsample.get(index).copied();
            Level { inputs: pair[0], outputs: pair[1], resample }
        };
        dims.windows(2).enumerate().map(level).collect()
    }

    /// Pixels of a patch's side.
    #[must_use]
    pub fn patch(&self) -> usize {
        self.patch_size.unwrap_or(1)
    }

    /// Pixels of a latent element's side.
    #[must_use]
    pub fn space(&self) -> usize {
        self.patch() << (self.dim_mult.len() - 1)
    }

    /// Frames of each latent frame after the first.
    #[must_use]
    pub fn time(&self) -> usize {
        1 << self.temperal_downsample.iter().filter(|halves| **halves).count()
    }
}
