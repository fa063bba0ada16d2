//! WAN's video transformer (Wan Team, 2025, arXiv:2503.20314): it predicts the velocity of noisy latents under a prompt.
//!
//! Each rank holds some tokens of the video, and all weights or [a share](ShardedWeights) of them. Only attention of the video to itself
//! needs the tokens of other ranks; everything else is computed for each token by itself, also attention to the prompt, which every rank
//! holds whole.
//!
//! Shape letters: B videos, S tokens of a video, T tokens of all videos on this rank, C width, H heads, D head width, N embeddings
//! of a prompt.

mod attention;
mod block;
mod branches;
mod conditioning;
mod config;
mod gguf_weights;
mod gradients;
mod grid;
mod head;
mod patch_embedding;
mod sharded_weights;
mod vace;
mod video_context;
mod weight_files;
mod weight_message;
mod weight_shares;
mod weights;

pub use attention::BlockPrompt;
pub use branches::{BlockPass, Branch, Conditions};
pub use config::WanConfig;
pub(crate) use gradients::TIMESTEPS;
pub use gradients::{FlowBatch, FlowConditions, FlowSample};
pub use grid::TokenGrid;
pub use sharded_weights::ShardedWeights;
pub use video_context::{Timesteps, VideoContext};
pub(crate) use weight_shares::WeightShares;
pub use weights::{WanFolder, WeightType};

use crate::error::{Error, Result};
use block::WanBlock;
use candle_core::Tensor;
use conditioning::ConditionEmbedder;
use head::OutputHead;
use patch_embedding::PatchEmbedding;
use ringspan_candle::cast::cast;
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::lora::layer_of;
use ringspan_candle::model::{ModelBuilder, ModelParameters, Parameter, Unit, UnitSequence, UnitWeights};
use ringspan_candle::modulation::TableRows;
use ringspan_candle::{Adapters, StoredWeights};
use std::collections::BTreeMap;
use vace::ControlBlock;

/// The transformer's structure, without its weights: a stack of units, of which the first embeds patches and conditions.
#[derive(Debug)]
pub struct WanTransformer {
    config: WanConfig,
    patch_embedding: PatchEmbedding,
    condition_embedder: ConditionEmbedder,
    blocks: Vec<WanBlock>,
    /// VACE's patch embedding of the control.
    control_embedding: Option<PatchEmbedding>,
    /// VACE's control blocks by the block to which they add.
    control_blocks: BTreeMap<usize, ControlBlock>,
    head: OutputHead,
    /// The parameters of each unit, the adapters' matrices included.
    parameters: ModelParameters,
    adapters: Adapters,
}

/// A prompt as the blocks take it: the keys and values of text, and of images where the model takes them, of every block. They are
/// the same for all steps of a run.
#[derive(Debug, Clone)]
pub struct Prompt {
    blocks: Vec<BlockPrompt>,
    control_blocks: Vec<BlockPrompt>,
}

/// VACE's control of a video.
#[derive(Debug, Clone, Copy)]
pub struct Control<'a> {
    /// `[B, vace_in_channels, F, H, W]`.
    pub control: &'a Tensor,
    /// For each control block the factor of what it adds.
    pub scale: &'a [f32],
}

impl WanTransformer {
    /// The transformer of a configuration.
    #[must_use]
    pub fn new(config: WanConfig) -> Self {
        let builder = ModelBuilder::new();
        let embedding = |name: &str| builder.unit(Unit::Embedding, name);
        let block =
            |(index, name): (usize, String)| WanBlock::new(&builder.unit(Unit::Layer(index), name), &config, index);
        let control_layers = config.vace_layers.clone().unwrap_or_default();
        let control_block = |(number, layer): (usize, &usize)| {
            let index = config.num_layers + number;
            let scope = builder.unit(Unit::Layer(index), format!("vace_blocks.{number}"));
            (*layer, ControlBlock::new(&scope, &config, index, number))
        };
        Self {
            patch_embedding: PatchEmbedding::new(&embedding("patch_embedding"), &config, config.in_channels),
            condition_embedder: ConditionEmbedder::new(&embedding("condition_embedder"), &config),
            blocks: (0..config.num_layers).map(|index| (index, format!("blocks.{index}"))).map(block).collect(),
            control_embedding: config
                .vace_in_channels
                .map(|channels| PatchEmbedding::new(&embedding("vace_patch_embedding"), &config, channels)),
            control_blocks: control_layers.iter().enumerate().map(control_block).collect(),
            head: OutputHead::new(&builder.unit(Unit::Head, ""), &config),
            parameters: builder.finish(),
            adapters: Adapters::none(),
            config,
        }
    }

    /// The transformer with adapters of these sizes in place of any others; their matrices are among the weights of each pass.
    #[must_use]
    pub(crate) fn with_adapters(self, adapters: Adapters) -> Self {
        Self { parameters: self.parameters.with_adapters(&adapters), adapters, ..self }
    }

    /// The transformer's sizes.
    pub fn config(&self) -> &WanConfig {
        &self.config
    }

    /// The shapes of the matrices A and B of all adapters, by name.
    #[must_use]
    pub fn adapter_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let matrices = self.parameters.iter().filter(|parameter| layer_of(&parameter.name).is_some());
        matrices.map(|parameter| (parameter.name.clone(), parameter.shape.clone())).collect()
    }

    /// The grid of tokens of latents `[B, C, F, H, W]`.
    ///
    /// # Errors
    /// Another number of dims, sizes that patches do not divide, more tokens on an axis than the model has positions.
    pub fn grid_of(&self, latents: &[usize]) -> Result<TokenGrid> {
        let &[_, _, frames, height, width] = latents else {
            return Err(Error::Input(format!("latents are {latents:?}, expected [B, C, F, H, W]")));
        };
        let grid = TokenGrid::new([frames, height, width], self.config.patch_size)?;
        grid.check_positions(self.config.rope_max_seq_len)?;
        Ok(grid)
    }

    /// The parameters of a unit that files of a transformer have: all but the matrices of adapters.
    pub(crate) fn parameters_of_files(&self, unit: Unit) -> impl Iterator<Item = &Parameter> {
        self.parameters.of_unit(unit).iter().filter(|parameter| layer_of(&parameter.name).is_none())
    }

    /// The units: the embedding, the blocks, the control blocks, the head.
    pub(crate) fn units(&self) -> impl Iterator<Item = Unit> {
        let layers = self.config.num_layers + self.control_blocks.len();
        [Unit::Embedding].into_iter().chain((0..layers).map(Unit::Layer)).chain([Unit::Head])
    }

    /// The units in the order in which a pass takes them, with or without blocks: a control block comes before the block to which it adds.
    fn units_of_pass(&self, skips_blocks: bool) -> Vec<Unit> {
        let mut units = vec![Unit::Embedding];
        for index in (0..self.blocks.len()).filter(|_| !skips_blocks) {
            let control = self.control_blocks.get(&index);
            units.extend(control.map(|control| Unit::Layer(self.config.num_layers + control.number())));
            units.push(Unit::Layer(index));
        }
        units.push(Unit::Head);
        units
    }

    /// The parameters that files have with their shapes, by their names in checkpoints.
    #[must_use]
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let parameters = self.units().flat_map(|unit| self.parameters_of_files(unit));
        parameters.map(|parameter| (parameter.name.clone(), parameter.shape.clone())).collect()
    }

    /// A prompt from the outputs of a text encoder, `[B, N, text_dim]`, and in models that take images of an image encoder,
    /// `[B, N, image_dim]`.
    ///
    /// # Errors
    /// Missing weights, other shapes, images where the model takes none, and none where it takes some.
    pub fn prompt(
        &self,
        weights: &dyn UnitWeights,
        text: &Tensor,
        image: Option<&Tensor>,
        video: &VideoContext,
    ) -> Result<Prompt> {
        let mut prompts = self.prompts(weights, &[text], image, video)?;
        prompts.pop().ok_or_else(|| Error::Input("no prompt".into()))
    }

    /// Like [`prompt`](Self::prompt), for several texts with the same images; each unit is taken once.
    ///
    /// # Errors
    /// As for [`prompt`](Self::prompt).
    pub fn prompts(
        &self,
        weights: &dyn UnitWeights,
        texts: &[&Tensor],
        image: Option<&Tensor>,
        video: &VideoContext,
    ) -> Result<Vec<Prompt>> {
        texts.iter().try_for_each(|text| self.check_prompt("the prompt's embeddings", text, image, video.batch()))?;
        let mut units =
            UnitSequence::new(weights, &self.parameters, self.units().filter(|unit| *unit != Unit::Head).collect());
        let (texts, image) = {
            let embedding = units.take()?;
            let pass = self.pass(&embedding, video);
            let dtype = self.patch_embedding.dtype(&pass)?;
            let embedded = |text: &&Tensor| Ok(cast(&self.condition_embedder.text(text, &pass)?, dtype)?);
            let texts = texts.iter().map(embedded).collect::<Result<Vec<_>>>()?;
            let image = image.map(|image| self.condition_embedder.image(image, &pass)).transpose()?;
            (texts, image.map(|image| cast(&image, dtype)).transpose()?)
        };
        let mut prompts = vec![Prompt { blocks: Vec::new(), control_blocks: Vec::new() }; texts.len()];
        for block in &self.blocks {
            let weights = units.take()?;
            for (prompt, text) in prompts.iter_mut().zip(&texts) {
                prompt.blocks.push(block.prompt(text, image.as_ref(), &self.pass(&weights, video))?);
            }
        }
        for control in self.control_blocks.values() {
            let weights = units.take()?;
            for (prompt, text) in prompts.iter_mut().zip(&texts) {
                let block = control.block().prompt(text, image.as_ref(), &self.pass(&weights, video))?;
                prompt.control_blocks.push(block);
            }
        }
        Ok(prompts)
    }

    /// Checks the shapes of a prompt for `batch` videos, by which [`prompt`](Self::prompt) refuses it; errors call the text `name`.
    pub(crate) fn check_prompt(&self, name: &str, text: &Tensor, image: Option<&Tensor>, batch: usize) -> Result<()> {
        let WanConfig { text_dim, image_dim, pos_embed_seq_len, .. } = &self.config;
        let refuse = |problem: String| Err(Error::Input(problem));
        match text.dims() {
            [b, n, dim] if (*b, dim) == (batch, text_dim) && *n > 0 => {}
            dims => return refuse(format!("{name} are {dims:?}, expected [{batch}, N, {text_dim}]")),
        }
        match (image.map(Tensor::dims), image_dim) {
            (None, None) => Ok(()),
            (Some(_), None) => refuse("image_embeds have no effect: config.json has no image_dim".into()),
            (None, Some(dim)) => refuse(format!("this model needs image_embeds [{batch}, N, {dim}]")),
            // The embeddings of the first and of the last image may be rows of their own.
            (Some([b, n, of_image]), Some(dim))
                if of_image == dim
                    && b * n > 0
                    && pos_embed_seq_len.map_or(*b == batch, |both| b * n == batch * both) =>
            {
                Ok(())
            }
            (Some(dims), Some(dim)) => {
                let n = pos_embed_seq_len.map_or("N".into(), |both| both.to_string());
                refuse(format!("image_embeds are {dims:?}, expected [{batch}, {n}, {dim}]"))
            }
        }
    }

    /// The velocity `[B, out_channels, F, H, W]` of latents `[B, in_channels, F, H, W]`, both f32, with whatever is appended to
    /// their channels. All ranks must call this with the same latents, and all get the velocity.
    ///
    /// # Errors
    /// Missing weights, other shapes, a control where the model takes none, and none where it takes one; failures of other ranks.
    pub fn velocity(
        &self,
        weights: &dyn UnitWeights,
        latents: &Tensor,
        times: &Timesteps,
        prompt: &Prompt,
        control: Option<Control>,
        video: &VideoContext,
    ) -> Result<Tensor> {
        let patches = self.forward(weights, latents, times, prompt, control, video)?;
        video.grid().unpatched(&video.gathered(&patches)?)
    }

    /// Like [`velocity`](Self::velocity), for this rank's tokens alone: their patches `[T, patch * out_channels]` in f32, by frame,
    /// row, column and channel.
    ///
    /// # Errors
    /// As for [`velocity`](Self::velocity).
    pub fn forward(
        &self,
        weights: &dyn UnitWeights,
        latents: &Tensor,
        times: &Timesteps,
        prompt: &Prompt,
        control: Option<Control>,
        video: &VideoContext,
    ) -> Result<Tensor> {
        let branch = Branch { prompt, blocks: BlockPass::Compute };
        let mut patches =
            self.forward_branches(weights, latents, Conditions { times, control }, vec![branch], video)?;
        patches.pop().ok_or_else(|| Error::Input("a pass of no branch".into()))
    }

    /// The embedding of a time step, C numbers. The unit with which it is computed is put back, since a pass takes it first.
    pub(crate) fn embedded_time(&self, weights: &dyn UnitWeights, time: f32, video: &VideoContext) -> Result<Vec<f32>> {
        let times = Timesteps { values: vec![time], rows: TableRows::one() };
        let embedding = weights.unit(Unit::Embedding, self.parameters.of_unit(Unit::Embedding))?;
        let embedded = self.condition_embedder.embedded_times(&times, &self.pass(&embedding, video))?;
        weights.put_back(Unit::Embedding, embedding);
        Ok(embedded.flatten_all()?.to_vec1()?)
    }

    fn pass<'a>(&'a self, weights: &'a StoredWeights, video: &'a VideoContext) -> ForwardPass<'a> {
        ForwardPass::new(weights, video.attention(), &self.adapters)
    }
}
