//! The loss of flow matching (Lipman et al., 2023, arXiv:2210.02747) and its gradients.

use super::block::{ConditionedBlock, PromptInput};
use super::conditioning::TimeCondition;
use super::video_context::{Timesteps, VideoContext};
use super::{Unit, WanTransformer};
use crate::error::{Error, Result, of_candle};
use candle_core::Tensor;
use ringspan_candle::gradients::{EmbeddingOutputGradients, Gradients, Graph, LossGradients, TrainableModel, variable};
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::lora::layer_of;
use ringspan_candle::model::{Layer, ModelParameters, UnitWeights};
use ringspan_candle::{Adapters, Attend, Model, StoredWeights};

/// Videos under noise, and what the transformer should predict for them.
#[derive(Debug, Clone)]
pub struct FlowSample {
    /// `(1 - t / 1000) x0 + t / 1000 noise`, `[B, C, F, H, W]`.
    noisy: Tensor,
    /// `noise - x0`, `[B, C, F, H, W]`.
    velocity: Tensor,
    /// The time step t of each of the B videos.
    timesteps: Vec<f32>,
    /// `[B, N, text_dim]`.
    prompt_embeds: Tensor,
}

/// Time steps of the training of flow models: at this one, a video is noise.
pub(crate) const TIMESTEPS: f64 = 1000.0;

impl FlowSample {
    /// The sample of latents x0 and noise, both `[B, C, F, H, W]`, at a time step in 0..=1000 for each video, under prompts
    /// `[B, N, text_dim]`. All are f32.
    ///
    /// # Errors
    /// Shapes that do not fit each other, and time steps outside of the range.
    pub fn new(latents: &Tensor, noise: &Tensor, timesteps: &[f32], prompt_embeds: &Tensor) -> Result<Self> {
        let refuse = |problem: String| Err(Error::Input(problem));
        let (batch, ..) = match latents.dims5() {
            Ok(sizes) => sizes,
            Err(_) => return refuse(format!("`latents` are {:?}, expected [B, C, F, H, W]", latents.shape())),
        };
        if noise.shape() != latents.shape() {
            return refuse(format!("`noise` is {:?}, and `latents` are {:?}", noise.shape(), latents.shape()));
        }
        if timesteps.len() != batch {
            return refuse(format!("{} `timesteps`, and `latents` of {batch} videos", timesteps.len()));
        }
        if let Some(time) = timesteps.iter().find(|time| !(0.0..=TIMESTEPS as f32).contains(*time)) {
            return refuse(format!("a time step {time} in `timesteps`: they are from 0 to {TIMESTEPS}"));
        }
        let shares: Vec<f32> = timesteps.iter().map(|time| (f64::from(*time) / TIMESTEPS) as f32).collect();
        let shares = Tensor::from_vec(shares, (batch, 1, 1, 1, 1), latents.device())?;
        let velocity = (noise - latents)?;
        Ok(Self {
            noisy: (latents + velocity.broadcast_mul(&shares)?)?,
            velocity,
            timesteps: timesteps.to_vec(),
            prompt_embeds: prompt_embeds.clone(),
        })
    }

    /// `[B, C, F, H, W]`: the sizes of the videos.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.noisy.dims()
    }
}

/// A sample as the ranks of a group compute its loss.
pub struct FlowBatch<'a> {
    sample: &'a FlowSample,
    times: Timesteps,
    video: &'a VideoContext,
}

impl<'a> FlowBatch<'a> {
    /// The sample, which is the same on all ranks, with this rank's tokens of it. Its loss is computed with the attention of the same
    /// `video` ([`VideoContext::attention`]).
    ///
    /// # Errors
    /// As for [`check_sample`](WanTransformer::check_sample), and time steps that do not fit the tokens.
    pub fn new(transformer: &WanTransformer, sample: &'a FlowSample, video: &'a VideoContext) -> Result<Self> {
        transformer.check_sample(sample)?;
        Ok(Self { sample, times: video.timesteps(&sample.timesteps)?, video })
    }
}

/// Outputs of the embedding unit that all blocks read, as variables of the blocks' graphs.
#[derive(Debug)]
pub struct FlowConditions {
    times: TimeCondition,
    /// `[B * N, C]`.
    text: Tensor,
}

impl WanTransformer {
    /// Checks that the loss of a sample can be computed with this transformer.
    ///
    /// # Errors
    /// A transformer that takes images, a condition or a control, and a sample of other sizes.
    pub fn check_sample(&self, sample: &FlowSample) -> Result<()> {
        let (config, dims) = (self.config(), sample.noisy.dims());
        let more = [
            ("image_embeds", config.image_dim.is_some()),
            ("a condition beside latents", config.in_channels != config.out_channels()),
            ("a control", config.vace_in_channels.is_some()),
        ];
        if let Some((what, _)) = more.iter().find(|(_, takes)| *takes) {
            return Err(Error::Input(format!(
                "this transformer takes {what}; those that take text alone can be trained"
            )));
        }
        if dims.get(1) != Some(&config.in_channels) {
            return Err(Error::Input(format!("`latents` are {dims:?}, expected [B, {}, F, H, W]", config.in_channels)));
        }
        self.check_prompt("`prompt_embeds`", &sample.prompt_embeds, None, dims.first().copied().unwrap_or(0))
    }
}

impl Model for WanTransformer {
    type Batch<'a> = FlowBatch<'a>;
    type Conditions = FlowConditions;

    fn all_parameters(&self) -> &ModelParameters {
        &self.parameters
    }

    fn adapter_sizes(&self) -> &Adapters {
        &self.adapters
    }

    fn layer_count(&self) -> usize {
        self.blocks.len()
    }

    fn embedded(&self, batch: &FlowBatch, pass: &ForwardPass) -> candle_core::Result<(Tensor, FlowConditions)> {
        let FlowBatch { sample, times, video } = batch;
        let x = self.patch_embedding.forward(&sample.noisy, video, pass).map_err(of_candle)?;
        let text = variable(self.condition_embedder.text(&sample.prompt_embeds, pass)?)?;
        let TimeCondition { embedded, projected, rows } = self.condition_embedder.times(times, pass)?;
        let times = TimeCondition { embedded: variable(embedded)?, projected: variable(projected)?, rows };
        Ok((x, FlowConditions { times, text }))
    }

    fn conditioned_layer<'a>(
        &'a self,
        index: usize,
        batch: &'a FlowBatch,
        FlowConditions { times, text }: &'a FlowConditions,
    ) -> Box<dyn Layer + 'a> {
        let prompt = PromptInput::Embedded { text, image: None };
        Box::new(ConditionedBlock { block: &self.blocks[index], times, prompt, video: batch.video })
    }
}

/// The loss is the mean of `(v - (noise - x0))^2` over all elements of a sample, of which each rank has a part: the sums of what all
/// ranks get are the loss and the gradients of the sample. Adapters are trained.
impl TrainableModel for WanTransformer {
    fn trains(&self, name: &str) -> bool {
        layer_of(name).is_some()
    }

    fn embedding_gradients_need_weights(&self) -> bool {
        true
    }

    fn condition_variables<'a>(&self, FlowConditions { times, text }: &'a FlowConditions) -> Vec<&'a Tensor> {
        vec![text, &times.projected, &times.embedded]
    }

    fn loss(
        &self,
        FlowBatch { sample, video, .. }: &FlowBatch,
        FlowConditions { times, .. }: &FlowConditions,
        x: Tensor,
        weights: StoredWeights,
        attend: &dyn Attend,
    ) -> candle_core::Result<LossGradients> {
        let mut graph = Graph::new(weights, |name| self.trains(name))?;
        let x = variable(x)?;
        let velocity =
            graph.record(|weights| self.head.forward(&x, times, &ForwardPass::new(weights, attend, &self.adapters)))?;
        let (loss, d_velocity) = squared_error(&velocity.output(), sample, video).map_err(of_candle)?;
        graph.differentiate(velocity, d_velocity)?;
        let d_x = graph.take(&x)?;
        let d_conditions = vec![None, None, graph.take_known(&times.embedded)];
        Ok(LossGradients { loss, d_x, d_conditions, gradients: graph.finish()? })
    }

    fn embedding_gradients(
        &self,
        FlowBatch { sample, times, .. }: &FlowBatch,
        weights: &dyn UnitWeights,
        EmbeddingOutputGradients { d_conditions, .. }: EmbeddingOutputGradients,
        attend: &dyn Attend,
    ) -> candle_core::Result<Gradients> {
        let Ok([d_text, d_projected, d_embedded]) = <[Tensor; 3]>::try_from(d_conditions) else {
            candle_core::bail!("text, projected and embedded time steps have a gradient each");
        };
        let weights = weights.unit(Unit::Embedding, self.parameters.of_unit(Unit::Embedding))?;
        let (embedder, adapters) = (&self.condition_embedder, &self.adapters);
        let mut graph = Graph::new(weights, |name| self.trains(name))?;
        let text = graph
            .record(|weights| embedder.text(&sample.prompt_embeds, &ForwardPass::new(weights, attend, adapters)))?;
        graph.differentiate(text, d_text)?;
        let recorded =
            graph.record(|weights| embedder.embedded_times(times, &ForwardPass::new(weights, attend, adapters)))?;
        let embedded = variable(recorded.output())?;
        let projected = graph
            .record(|weights| embedder.projected_times(&embedded, &ForwardPass::new(weights, attend, adapters)))?;
        graph.differentiate(projected, d_projected)?;
        let d_embedded = (d_embedded + graph.take(&embedded)?)?;
        graph.differentiate(recorded, d_embedded)?;
        graph.finish()
    }
}

/// This rank's part of the loss, for its patches `[T, patch * C]` of the velocity, and the gradient of these.
fn squared_error(velocity: &Tensor, sample: &FlowSample, video: &VideoContext) -> Result<(f64, Tensor)> {
    let channels = sample.velocity.dim(1)?;
    let (tokens, features) = velocity.dims2()?;
    let wanted = video.grid().patches(&sample.velocity, video.rows())?;
    // The output has the channels of a patch's element side by side, and the input the elements of a channel.
    let wanted = wanted.reshape((tokens, channels, features / channels))?.transpose(1, 2)?.contiguous()?;
    let apart = (velocity - wanted.reshape((tokens, features))?)?;
    let elements = sample.velocity.elem_count() as f64;
    let squares = apart.flatten_all()?.to_vec1::<f32>()?.into_iter().map(|x| f64::from(x) * f64::from(x));
    Ok((squares.sum::<f64>() / elements, (apart * (2.0 / elements))?))
}
