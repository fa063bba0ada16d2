//! Embeddings of the conditions of the blocks: time steps, a prompt, images.

use super::config::WanConfig;
use super::video_context::Timesteps;
use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use ringspan_candle::activate::activate;
use ringspan_candle::activation::Activation;
use ringspan_candle::cast::cast;
use ringspan_candle::layers::{ForwardPass, LayerNorm, ReplicatedLinear};
use ringspan_candle::model::{Init, Scope};
use ringspan_candle::modulation::TableRows;
use ringspan_candle::shard::ShardSpec;

/// Embeds time steps, text and images (`condition_embedder`). It computes in f32, since each condition acts on all tokens.
#[derive(Debug)]
pub(super) struct ConditionEmbedder {
    time: [ReplicatedLinear; 2],
    time_proj: ReplicatedLinear,
    text: [ReplicatedLinear; 2],
    image: Option<ImageEmbedder>,
    freq_dim: usize,
    width: usize,
}

impl ConditionEmbedder {
    pub(super) fn new(scope: &Scope, config: &WanConfig) -> Self {
        let width = config.width();
        let pair = |name: &str, inputs: usize| {
            let linear = |name, inputs| ReplicatedLinear::new(&scope.at(name), inputs, width, true);
            [linear(format!("{name}.linear_1"), inputs), linear(format!("{name}.linear_2"), width)]
        };
        Self {
            time: pair("time_embedder", config.freq_dim),
            time_proj: ReplicatedLinear::new(&scope.at("time_proj"), width, 6 * width, true),
            text: pair("text_embedder", config.text_dim),
            image: config.image_dim.map(|dim| ImageEmbedder::new(&scope.at("image_embedder"), config, dim)),
            freq_dim: config.freq_dim,
            width,
        }
    }

    /// The conditions of time steps.
    pub(super) fn times(&self, times: &Timesteps, pass: &ForwardPass) -> candle_core::Result<TimeCondition> {
        let embedded = self.embedded_times(times, pass)?;
        let projected = self.projected_times(&embedded, pass)?;
        Ok(TimeCondition { embedded, projected, rows: times.rows.clone() })
    }

    /// The embedding `[M, C]` of time steps.
    pub(super) fn embedded_times(&self, times: &Timesteps, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let [first, second] = &self.time;
        let inner = first.forward(&sinusoids(&times.values, self.freq_dim)?, pass)?;
        second.forward(&activate(&inner, Activation::Silu)?, pass)
    }

    /// The factors `[M, 6, C]` for the blocks from embedded time steps `[M, C]`.
    pub(super) fn projected_times(&self, embedded: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let projected = self.time_proj.forward(&activate(embedded, Activation::Silu)?, pass)?;
        projected.reshape((embedded.dim(0)?, 6, self.width))
    }

    /// The embedding `[B * N, C]` of a text encoder's output `[B, N, text_dim]`.
    pub(super) fn text(&self, text: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let [first, second] = &self.text;
        let inner = first.forward(&cast(&text.flatten(0, 1)?, DType::F32)?, pass)?;
        second.forward(&activate(&inner, Activation::GeluTanh)?, pass)
    }

    /// The embedding `[B * N, C]` of an image encoder's output `[B, N, image_dim]`.
    pub(super) fn image(&self, image: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        match &self.image {
            Some(embedder) => embedder.forward(image, pass),
            None => Err(Error::Input("this model takes no image_embeds: its config.json has no image_dim".into())),
        }
    }
}

/// The sinusoids `[M, width]` of time steps: cosines, then sines.
fn sinusoids(times: &[f32], width: usize) -> candle_core::Result<Tensor> {
    let half = width / 2;
    let angle = |time: f32, pair: usize| f64::from(time) * 1e4f64.powf(-(pair as f64) / half as f64);
    let of_time = |time: f32| {
        let angles = move || (0..half).map(move |pair| angle(time, pair));
        angles().map(f64::cos).chain(angles().map(f64::sin)).map(|x| x as f32)
    };
    let values: Vec<f32> = times.iter().flat_map(|time| of_time(*time)).collect();
    Tensor::from_vec(values, (times.len(), width), &Device::Cpu)
}

/// Embeds what an image encoder returns.
#[derive(Debug)]
struct ImageEmbedder {
    norm1: LayerNorm,
    ff: [ReplicatedLinear; 2],
    norm2: LayerNorm,
    /// The name and the number of learned positions.
    positions: Option<(String, usize)>,
}

/// Epsilon of the norms of image embeddings, which no configuration changes.
const IMAGE_EPS: f64 = 1e-5;

impl ImageEmbedder {
    fn new(scope: &Scope, config: &WanConfig, dim: usize) -> Self {
        let width = config.width();
        let positions =
            |count| (scope.parameter("pos_embed", &[1, count, dim], ShardSpec::Replicated, Init::Normal), count);
        Self {
            norm1: LayerNorm::new(&scope.at("norm1"), dim, IMAGE_EPS),
            ff: [
                ReplicatedLinear::new(&scope.at("ff.net.0.proj"), dim, dim, true),
                ReplicatedLinear::new(&scope.at("ff.net.2"), dim, width, true),
            ],
            norm2: LayerNorm::new(&scope.at("norm2"), width, IMAGE_EPS),
            positions: config.pos_embed_seq_len.map(positions),
        }
    }

    fn forward(&self, image: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let mut x = cast(image, DType::F32)?;
        if let Some((positions, count)) = &self.positions {
            let (batch, embeddings, dim) = x.dims3()?;
            x = x.reshape((batch * embeddings / count, *count, dim))?.broadcast_add(pass.tensor(positions)?)?;
        }
        let [first, second] = &self.ff;
        let inner = first.forward(&self.norm1.forward(&x.flatten(0, 1)?, pass)?, pass)?;
        Ok(self.norm2.forward(&second.forward(&inner.gelu_erf()?, pass)?, pass)?)
    }
}

/// The conditions of M different time steps, and which token has which.
#[derive(Debug, Clone)]
pub(super) struct TimeCondition {
    /// `[M, C]`, for the output.
    pub(super) embedded: Tensor,
    /// `[M, 6, C]`, for the blocks.
    pub(super) projected: Tensor,
    pub(super) rows: TableRows,
}

impl TimeCondition {
    /// For each token the row of the tables below.
    pub(super) fn rows(&self) -> &TableRows {
        &self.rows
    }

    /// The six factors of a block, `[M, C]` each, from its `scale_shift_table` `[1, 6, C]`.
    pub(super) fn of_block(&self, table: &Tensor) -> candle_core::Result<[Tensor; 6]> {
        let sum = self.projected.broadcast_add(&cast(table, DType::F32)?)?;
        factors(&sum)
    }

    /// The two factors of the output, `[M, C]` each, from its `scale_shift_table` `[1, 2, C]`.
    pub(super) fn of_output(&self, table: &Tensor) -> candle_core::Result<[Tensor; 2]> {
        factors(&self.embedded.unsqueeze(1)?.broadcast_add(&cast(table, DType::F32)?)?)
    }
}

/// The N matrices `[M, C]` of a tensor `[M, N, C]`.
fn factors<const N: usize>(all: &Tensor) -> candle_core::Result<[Tensor; N]> {
    let mut found = Vec::with_capacity(N);
    for index in 0..N {
        found.push(all.narrow(1, index, 1)?.squeeze(1)?);
    }
    <[Tensor; N]>::try_from(found).map_err(|_| candle_core::Error::Msg(format!("{N} factors of {:?}", all.shape())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinusoids_are_cosines_before_sines() -> Result<()> {
        let found = sinusoids(&[999.0, 0.0], 256)?.to_vec2::<f32>()?;
        let wanted =
            [(0, 0.999_649_9), (1, 0.963_782_5), (2, -0.398_991_76), (128, -0.026_460_75), (129, -0.266_689_6)];
        for (at, wanted) in wanted {
            assert!((found[0][at] - wanted).abs() < 1e-6, "{at}: {}", found[0][at]);
        }
        assert_eq!((found[1][127], found[1][128]), (1.0, 0.0));
        Ok(())
    }
}
