//! The loss of flow matching (Lipman et al., 2023, arXiv:2210.02747) and its gradients, unit by unit: memory holds the graph of one
//! block, and the inputs of the others with what the [`CheckpointPolicy`] stores.

use super::block::{ConditionedBlock, PromptInput};
use super::conditioning::TimeCondition;
use super::video_context::{Timesteps, VideoContext};
use super::{Unit, WanTransformer};
use crate::error::{Error, Result};
use candle_core::Tensor;
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::lora::layer_of;
use ringspan_candle::model::{Layer, constant};
use ringspan_candle::{ActivationStore, CheckpointPolicy, StoredWeights};
use ringspan_models::gradients::{Gradients, Graph, backward_of_layer, variable};

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

/// Outputs of the embedding unit that all blocks read, as variables of the blocks' graphs.
struct Conditions {
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

    /// This rank's part of the loss, the mean of `(v - (noise - x0))^2` over all elements of a sample, and of its gradients: all
    /// ranks must call this with the same sample, and the sums of what they get are those of the sample.
    ///
    /// `weights` returns the parameters of a unit, with the matrices of its adapters. Each unit's parameters are taken once for
    /// the forward pass and once more for their gradients. `on_gradients` is called once for each unit with the gradients of its
    /// adapters: head, blocks from the last to the first, embedding.
    ///
    /// # Errors
    /// As for [`check_sample`](Self::check_sample); missing weights, failures of other ranks, errors of `weights` and
    /// `on_gradients`.
    pub fn loss_and_gradients<'a>(
        &self,
        weights: &dyn Fn(Unit) -> Result<StoredWeights>,
        sample: &FlowSample,
        video: &'a VideoContext,
        policy: impl Into<CheckpointPolicy<'a>>,
        on_gradients: &mut dyn FnMut(Unit, Gradients) -> Result<()>,
    ) -> Result<f64> {
        self.check_sample(sample)?;
        let times = video.timesteps(&sample.timesteps)?;
        let store = ActivationStore::new(video.attention(), policy.into(), self.blocks.len());
        let (mut x, conditions) = self.embedded(&constant(weights(Unit::Embedding)?), sample, &times, video)?;

        let mut inputs = Vec::with_capacity(self.blocks.len());
        for index in 0..self.blocks.len() {
            let weights = constant(weights(Unit::Layer(index))?);
            store.forward(index)?;
            inputs.push(store.input(&x)?);
            let block = self.conditioned(index, &conditions, video);
            // Variables would be recorded by candle here, and what it records is of no use.
            x = block.forward(&x, &ForwardPass::storing(&weights, &self.adapters, &store))?.detach();
        }

        let mut graph = Graph::new(weights(Unit::Head)?, is_adapter)?;
        let x = variable(x)?;
        let velocity = graph.record(|weights| {
            self.head.forward(&x, &conditions.times, &self.pass(weights, video)).map_err(of_models)
        })?;
        let (loss, d_velocity) = squared_error(&velocity.output(), sample, video)?;
        graph.differentiate(velocity, d_velocity)?;
        let mut dx = graph.take(&x)?;
        let d_embedded = graph.take(&conditions.times.embedded)?;
        drop(x);
        on_gradients(Unit::Head, graph.finish()?)?;

        let (mut d_text, mut d_projected) = (conditions.text.zeros_like()?, conditions.times.projected.zeros_like()?);
        for (index, input) in inputs.into_iter().enumerate().rev() {
            let mut graph = Graph::new(weights(Unit::Layer(index))?, is_adapter)?;
            store.backward(index)?;
            let x = variable(input.tensor()?)?;
            drop(input);
            let block = self.conditioned(index, &conditions, video);
            dx = backward_of_layer(&block, index, &self.adapters, &store, &mut graph, x, dx)?;
            d_text = (d_text + graph.take(&conditions.text)?)?;
            d_projected = (d_projected + graph.take(&conditions.times.projected)?)?;
            on_gradients(Unit::Layer(index), graph.finish()?)?;
        }

        let graph = Graph::new(weights(Unit::Embedding)?, is_adapter)?;
        let gradients = self.backward_of_conditions(graph, sample, &times, video, [d_text, d_projected, d_embedded])?;
        on_gradients(Unit::Embedding, gradients)?;
        Ok(loss)
    }

    fn conditioned<'a>(
        &'a self,
        index: usize,
        Conditions { times, text }: &'a Conditions,
        video: &'a VideoContext,
    ) -> ConditionedBlock<'a> {
        let prompt = PromptInput::Embedded { text, image: None };
        ConditionedBlock { block: &self.blocks[index], times, prompt, video }
    }

    /// The tokens `[T, C]` of a sample, and its conditions.
    fn embedded(
        &self,
        weights: &StoredWeights,
        sample: &FlowSample,
        times: &Timesteps,
        video: &VideoContext,
    ) -> Result<(Tensor, Conditions)> {
        let pass = self.pass(weights, video);
        let x = self.patch_embedding.forward(&sample.noisy, video, &pass)?;
        let text = variable(self.condition_embedder.text(&sample.prompt_embeds, &pass)?)?;
        let TimeCondition { embedded, projected, rows } = self.condition_embedder.times(times, &pass)?;
        let times = TimeCondition { embedded: variable(embedded)?, projected: variable(projected)?, rows };
        Ok((x, Conditions { times, text }))
    }

    /// The gradients of the adapters of the embedding unit, from those of embedded text `[B * N, C]`, of projected time steps
    /// `[M, 6, C]` and of embedded ones `[M, C]`.
    fn backward_of_conditions(
        &self,
        mut graph: Graph,
        sample: &FlowSample,
        times: &Timesteps,
        video: &VideoContext,
        [d_text, d_projected, d_embedded]: [Tensor; 3],
    ) -> Result<Gradients> {
        let embedder = &self.condition_embedder;
        let text = graph
            .record(|weights| embedder.text(&sample.prompt_embeds, &self.pass(weights, video)).map_err(of_models))?;
        graph.differentiate(text, d_text)?;
        let recorded =
            graph.record(|weights| embedder.embedded_times(times, &self.pass(weights, video)).map_err(of_models))?;
        let embedded = variable(recorded.output())?;
        let projected = graph
            .record(|weights| embedder.projected_times(&embedded, &self.pass(weights, video)).map_err(of_models))?;
        graph.differentiate(projected, d_projected)?;
        let d_embedded = (d_embedded + graph.take(&embedded)?)?;
        graph.differentiate(recorded, d_embedded)?;
        Ok(graph.finish()?)
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

fn is_adapter(name: &str) -> bool {
    layer_of(name).is_some()
}

/// An error of this crate as one of a recorded computation.
fn of_models(error: Error) -> ringspan_models::Error {
    match error {
        Error::Model(error) => error,
        Error::Tensor(error) => error.into(),
        other => candle_core::Error::wrap(other).into(),
    }
}
