//! An autoencoder of WAN's form whose weights are written down, not trained: each latent is a product of 4 x 4 pixels of one color with a
//! wave (a cosine transform), and frames are the sums of these waves.
//!
//! A network of WAN's form ends in a norm and SiLU, which are not linear. So each latent z is there as z and as -z, beside a channel with
//! a large constant C. The norm divides by a length that is nearly C, and `silu(y) - silu(-y) = y`. All other layers add zero.

use candle_core::{Device, Tensor};
use ringspan_video::frames::RgbFrame;
use ringspan_video::ranks::VideoRanks;
use ringspan_video::vae::{VaeFolder, VideoTensor};
use serde_json::json;
use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

/// Pixels of a patch's side.
const PATCH: usize = 4;
/// Waves in each direction that a latent may be of: none, and half a wave.
const WAVES: usize = 2;
/// Numbers of a patch of pixels.
const PIXELS: usize = 3 * PATCH * PATCH;
/// Channels of latents.
pub(crate) const CHANNELS: usize = 3 * WAVES * WAVES;
/// Channels of the network: each latent, its negative, and the constant.
const WIDTH: usize = 2 * CHANNELS + 1;
/// The constant. The norm's length is off by the square of the latents' length over it.
const CONSTANT: f32 = 1000.0;

/// Writes the folder of the autoencoder, with latents of these statistics.
pub(crate) fn write(folder: &Path, mean: &[f32], std: &[f32]) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(folder)?;
    let config = json!({
        "_class_name": "AutoencoderKLWan",
        "base_dim": WIDTH, "z_dim": CHANNELS, "dim_mult": [1], "num_res_blocks": 1, "attn_scales": [],
        "temperal_downsample": [], "latents_mean": mean, "latents_std": std, "is_residual": false,
        "in_channels": PIXELS, "out_channels": PIXELS, "patch_size": PATCH,
        "scale_factor_temporal": 1, "scale_factor_spatial": PATCH,
    });
    std::fs::write(folder.join("config.json"), serde_json::to_string_pretty(&config)?)?;
    let mut weights = Weights::default();
    let waves = waves();
    let patched = |x: &[f32], sign: f32| x.iter().map(|x| sign * x).collect::<Vec<_>>();

    // Pixels to latents, or latents as they are, in the first convolution: z, -z and the constant.
    let spread = |rows: &[Vec<f32>]| {
        let inputs = rows[0].len();
        let signs = [1.0, -1.0].into_iter().flat_map(|sign| rows.iter().map(move |row| patched(row, sign)));
        signs.chain([vec![0.0; inputs]]).collect::<Vec<_>>()
    };
    let constant = [vec![0.0; 2 * CHANNELS], vec![CONSTANT]].concat();
    // Back from the norm: y = z sqrt(WIDTH) / CONSTANT.
    let factor = CONSTANT / (WIDTH as f32).sqrt();
    let identity = |size: usize, scale: f32| -> Vec<Vec<f32>> {
        (0..size).map(|row| (0..size).map(|column| if row == column { scale } else { 0.0 }).collect()).collect()
    };
    let joined = |rows: Vec<Vec<f32>>| -> Vec<Vec<f32>> {
        rows.into_iter().map(|row| [row.clone(), patched(&row, -1.0), vec![0.0]].concat()).collect()
    };
    let zeros = |count| vec![0.0; count];

    weights.convolution("encoder.conv_in", [3, 3], &spread(&waves), &constant)?;
    weights.middle("encoder")?;
    weights.residual("encoder.down_blocks.0")?;
    weights.norm("encoder.norm_out", 3)?;
    // After the means come the logarithms of the variances, -30 each: the variances are nearly 0.
    let means = joined(identity(CHANNELS, factor));
    let all = [means, vec![zeros(WIDTH); CHANNELS]].concat();
    weights.convolution("encoder.conv_out", [3, 3], &all, &[zeros(CHANNELS), vec![-30.0; CHANNELS]].concat())?;
    weights.convolution("quant_conv", [1, 1], &identity(2 * CHANNELS, 1.0), &zeros(2 * CHANNELS))?;

    weights.convolution("post_quant_conv", [1, 1], &identity(CHANNELS, 1.0), &zeros(CHANNELS))?;
    weights.convolution("decoder.conv_in", [3, 3], &spread(&identity(CHANNELS, 1.0)), &constant)?;
    weights.middle("decoder")?;
    weights.residual("decoder.up_blocks.0.resnets.0")?;
    weights.residual("decoder.up_blocks.0.resnets.1")?;
    weights.norm("decoder.norm_out", 3)?;
    let transposed = (0..PIXELS).map(|pixel| waves.iter().map(|wave| factor * wave[pixel]).collect()).collect();
    weights.convolution("decoder.conv_out", [3, 3], &joined(transposed), &zeros(PIXELS))?;
    candle_core::safetensors::save(&weights.0, folder.join("diffusion_pytorch_model.safetensors"))?;
    Ok(())
}

/// The waves `[CHANNELS][PIXELS]`, which are orthonormal. In a patch, pixels are ordered by color, column and row.
fn waves() -> Vec<Vec<f32>> {
    let wave = |number: usize, at: usize| {
        let angle = std::f64::consts::PI * (at as f64 + 0.5) * number as f64 / PATCH as f64;
        angle.cos() * (if number == 0 { 1.0 } else { 2.0f64 } / PATCH as f64).sqrt()
    };
    let of_channel = |channel: usize| {
        let (color, x, y) = (channel / (WAVES * WAVES), channel / WAVES % WAVES, channel % WAVES);
        let pixel = |pixel: usize| {
            let (of_color, column, row) = (pixel / (PATCH * PATCH), pixel / PATCH % PATCH, pixel % PATCH);
            if of_color == color { (wave(x, column) * wave(y, row)) as f32 } else { 0.0 }
        };
        (0..PIXELS).map(pixel).collect()
    };
    (0..CHANNELS).map(of_channel).collect()
}

/// Tensors by their names in checkpoints.
#[derive(Default)]
struct Weights(HashMap<String, Tensor>);

impl Weights {
    fn add(&mut self, name: String, values: Vec<f32>, shape: &[usize]) -> candle_core::Result<()> {
        self.0.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        Ok(())
    }

    /// A convolution with `rows` `[outputs][inputs]` at the current position, and zeros around it; `[time, side]` is its kernel.
    fn convolution(
        &mut self,
        name: &str,
        [time, side]: [usize; 2],
        rows: &[Vec<f32>],
        bias: &[f32],
    ) -> candle_core::Result<()> {
        let (outputs, inputs, volume) = (rows.len(), rows[0].len(), time * side * side);
        // A causal kernel's current frame is its last one.
        let now = (time - 1) * side * side + side * side / 2;
        let mut values = vec![0.0; outputs * inputs * volume];
        for (index, value) in rows.iter().flatten().enumerate() {
            values[index * volume + now] = *value;
        }
        self.add(format!("{name}.weight"), values, &[outputs, inputs, time, side, side])?;
        self.add(format!("{name}.bias"), bias.to_vec(), &[outputs])
    }

    fn norm(&mut self, name: &str, dims: usize) -> candle_core::Result<()> {
        let shape = [vec![WIDTH], vec![1; dims]].concat();
        self.add(format!("{name}.gamma"), vec![1.0; WIDTH], &shape)
    }

    /// A residual block that adds zero.
    fn residual(&mut self, name: &str) -> candle_core::Result<()> {
        let zeros = vec![vec![0.0; WIDTH]; WIDTH];
        for number in ["1", "2"] {
            self.norm(&format!("{name}.norm{number}"), 3)?;
            self.convolution(&format!("{name}.conv{number}"), [3, 3], &zeros, &[0.0; WIDTH])?;
        }
        Ok(())
    }

    /// The middle block, of which every part adds zero.
    fn middle(&mut self, of: &str) -> candle_core::Result<()> {
        let name = format!("{of}.mid_block");
        self.residual(&format!("{name}.resnets.0"))?;
        self.residual(&format!("{name}.resnets.1"))?;
        let attention = format!("{name}.attentions.0");
        self.norm(&format!("{attention}.norm"), 2)?;
        for (part, outputs) in [("to_qkv", 3 * WIDTH), ("proj", WIDTH)] {
            self.add(format!("{attention}.{part}.weight"), vec![0.0; outputs * WIDTH], &[outputs, WIDTH, 1, 1])?;
            self.add(format!("{attention}.{part}.bias"), vec![0.0; outputs], &[outputs])?;
        }
        Ok(())
    }
}

/// The latents `[1, C, F, H, W]` of a video's pictures.
pub(crate) fn encoded(
    folder: &Path,
    pictures: &[RgbFrame],
    ranks: &mut VideoRanks,
) -> Result<VideoTensor, Box<dyn Error>> {
    let (height, width, frames) = (pictures[0].height, pictures[0].width, pictures.len());
    let area = height * width;
    let mut values = vec![0.0; 3 * frames * area];
    for (frame, picture) in pictures.iter().enumerate() {
        for (index, level) in picture.pixels.iter().enumerate() {
            values[(index % 3 * frames + frame) * area + index / 3] = f32::from(*level) / 127.5 - 1.0;
        }
    }
    let video = VideoTensor::new([1, 3, frames, height, width], values)?;
    let encoder = VaeFolder::open(folder)?.encoder()?;
    let plan = encoder.plan(video.shape(), ranks.size(), None)?;
    encoder.encode(&video, ranks, &plan)?.ok_or_else(|| "this process has rank 0".into())
}
