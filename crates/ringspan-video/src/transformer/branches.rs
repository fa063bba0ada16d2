//! A pass of one or both branches of classifier-free guidance, which share the latents, the time and the weights.
//!
//! Each block computes all branches before the next block does, so weights that [ranks share](super::ShardedWeights) are gathered once for
//! both.

use super::block::{ConditionedBlock, PromptInput};
use super::conditioning::TimeCondition;
use super::vace::ControlStream;
use super::{Control, Prompt, Timesteps, VideoContext, WanTransformer};
use crate::error::{Error, Result};
use candle_core::Tensor;
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::model::{Layer, UnitSequence, UnitWeights};
use ringspan_candle::residual::residual;

/// What conditions a pass in all branches.
#[derive(Debug, Clone, Copy)]
pub struct Conditions<'a> {
    /// Time steps of the tokens.
    pub times: &'a Timesteps,
    /// VACE's control, in models that take one.
    pub control: Option<Control<'a>>,
}

/// A branch of guidance in a pass.
#[derive(Debug)]
pub struct Branch<'a> {
    /// The prompt, or the negative one.
    pub prompt: &'a Prompt,
    /// What its blocks do.
    pub blocks: BlockPass<'a>,
}

/// What the blocks do in a pass.
#[derive(Debug)]
pub enum BlockPass<'a> {
    /// They compute.
    Compute,
    /// They compute, and what they have added to this rank's tokens, `[T, C]`, is put here.
    Record(&'a mut Option<Tensor>),
    /// They are skipped, and this is added instead.
    Skip(&'a Tensor),
}

impl BlockPass<'_> {
    fn computes(&self) -> bool {
        !matches!(self, Self::Skip(_))
    }
}

/// The residual stream of a branch, `[T, C]`, and that of its control blocks.
struct BranchStream<'a> {
    prompt: &'a Prompt,
    x: Tensor,
    control: Option<ControlStream<'a>>,
}

impl WanTransformer {
    /// Like [`forward`](Self::forward), for each of some branches; their blocks may be skipped.
    ///
    /// # Errors
    /// As for [`velocity`](Self::velocity).
    pub fn forward_branches(
        &self,
        weights: &dyn UnitWeights,
        latents: &Tensor,
        conditions: Conditions,
        branches: Vec<Branch>,
        video: &VideoContext,
    ) -> Result<Vec<Tensor>> {
        let computes = branches.iter().any(|branch| branch.blocks.computes());
        let mut units = UnitSequence::new(weights, &self.parameters, self.units_of_pass(!computes));
        let (times, embedded, control) = {
            let embedding = units.take()?;
            let pass = self.pass(&embedding, video);
            let times = self.condition_embedder.times(conditions.times, &pass)?;
            let embedded = self.patch_embedding.forward(latents, video, &pass)?;
            let control = if computes { self.control(conditions.control, &embedded, video, &pass)? } else { None };
            (times, embedded, control)
        };
        let computing = branches.iter().filter(|branch| branch.blocks.computes());
        let mut streams: Vec<BranchStream> = computing
            .map(|branch| BranchStream { prompt: branch.prompt, x: embedded.clone(), control: control.clone() })
            .collect();
        // Blocks that compute without a record need the embedded patches no longer.
        let needs_embedded = branches.iter().any(|branch| !matches!(branch.blocks, BlockPass::Compute));
        let embedded = needs_embedded.then_some(embedded);
        drop(control);
        self.through_blocks(&mut streams, &mut units, &times, video)?;
        let weights = units.take()?;
        let mut streams = streams.into_iter();
        let patches = branches.into_iter().map(|branch| {
            let x = match (branch.blocks, &embedded) {
                (BlockPass::Skip(added), Some(embedded)) => residual(embedded, added)?,
                (blocks, embedded) => {
                    let stream = streams.next().ok_or_else(|| Error::Input("a branch has not been computed".into()))?;
                    if let (BlockPass::Record(added), Some(embedded)) = (blocks, embedded) {
                        *added = Some((&stream.x - embedded)?);
                    }
                    stream.x
                }
            };
            Ok(self.head.forward(&x, &times, &self.pass(&weights, video))?)
        });
        patches.collect()
    }

    /// Takes the streams through all blocks, each of which computes all of them before the next one.
    fn through_blocks(
        &self,
        streams: &mut [BranchStream],
        units: &mut UnitSequence,
        times: &TimeCondition,
        video: &VideoContext,
    ) -> Result<()> {
        if streams.is_empty() {
            return Ok(());
        }
        for (index, block) in self.blocks.iter().enumerate() {
            let control = self.control_blocks.get(&index);
            // What is added to each stream, if there is a control. It is that of the input, so it is computed before the block changes x.
            let mut added = Vec::new();
            if let Some(control) = control {
                let weights = units.take()?;
                for stream in streams.iter_mut() {
                    let Some(controlled) = &mut stream.control else { continue };
                    let prompt = PromptInput::KeysAndValues(&stream.prompt.control_blocks[control.number()]);
                    let conditioned = ConditionedBlock { block: control.block(), times, prompt, video };
                    added.push(control.forward(controlled, &conditioned, &self.pass(&weights, video))?);
                }
            }
            let weights = units.take()?;
            let mut added = added.into_iter();
            for stream in streams.iter_mut() {
                let prompt = PromptInput::KeysAndValues(&stream.prompt.blocks[index]);
                let conditioned = ConditionedBlock { block, times, prompt, video };
                stream.x = conditioned.forward(&stream.x, &self.pass(&weights, video))?;
                if let Some(added) = added.next() {
                    stream.x = residual(&stream.x, &added)?;
                }
            }
        }
        Ok(())
    }

    /// The stream of the control blocks, if the model has some.
    fn control<'a>(
        &self,
        control: Option<Control<'a>>,
        x: &Tensor,
        video: &VideoContext,
        pass: &ForwardPass,
    ) -> Result<Option<ControlStream<'a>>> {
        match (control, &self.control_embedding) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(Error::Input("a control has no effect: config.json has no vace_layers".into())),
            (None, Some(_)) => Err(Error::Input(format!(
                "this model needs a control [B, {}, F, H, W]",
                self.config.vace_in_channels.unwrap_or_default()
            ))),
            (Some(Control { scale, .. }), Some(_)) if scale.len() != self.control_blocks.len() => {
                let (given, blocks) = (scale.len(), self.control_blocks.len());
                Err(Error::Input(format!("control_scale has {given} factors, and the model {blocks} control blocks")))
            }
            (Some(Control { control, scale }), Some(embedding)) => {
                let embedded = embedding.forward(control, video, pass)?;
                Ok(Some(ControlStream::new(embedded, x.clone(), scale)))
            }
        }
    }
}
