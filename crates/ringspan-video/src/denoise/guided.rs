//! The velocity under guidance, computed by the ranks of one branch or of two.

use super::inputs::DenoiseInputs;
use super::mesh::RankGroups;
use super::pipeline::DenoiseFolder;
use crate::error::Result;
use crate::transformer::{Control, Prompt, VideoContext};
use candle_core::{Device, Tensor};
use ringspan_candle::StoredWeights;
use std::sync::Arc;

/// The transformers of a run on one rank, and the prompts that have been computed once.
pub(super) struct GuidedModel<'a> {
    folder: &'a DenoiseFolder,
    groups: &'a RankGroups,
    inputs: &'a DenoiseInputs,
    guidance: [f64; 2],
    video: VideoContext,
    control_scale: Vec<f32>,
    /// The stage that computes now, with its weights and the prompts of both branches.
    stage: Option<Stage>,
}

struct Stage {
    index: usize,
    weights: Arc<StoredWeights>,
    prompts: [Option<Prompt>; 2],
}

impl<'a> GuidedModel<'a> {
    pub(super) fn new(
        folder: &'a DenoiseFolder,
        groups: &'a RankGroups,
        inputs: &'a DenoiseInputs,
        guidance: [f64; 2],
    ) -> Result<Self> {
        let config = folder.transformer(0).config();
        let (group, alone, grid) = (groups.video().clone(), groups.alone().clone(), inputs.grid(folder)?);
        let blocks = config.vace_layers.as_ref().map_or(0, Vec::len);
        let control_scale = inputs.control_scale.clone().unwrap_or_else(|| vec![1.0; blocks]);
        let video = VideoContext::new(config, group, alone, inputs.batch(), grid)?;
        Ok(Self { folder, groups, inputs, guidance, video, control_scale, stage: None })
    }

    /// Tokens of a frame, and frames of tokens.
    pub(super) fn frame_tokens(&self) -> [usize; 2] {
        let [frames, rows, columns] = self.video.grid().size;
        [rows * columns, frames]
    }

    /// The guided velocity of a model input at time steps, the same on all ranks.
    pub(super) fn velocity(&mut self, stage: usize, input: &Tensor, times: &[f32]) -> Result<Tensor> {
        self.enter(stage)?;
        let guidance = self.guidance[stage];
        if guidance == 1.0 {
            return self.of_branch(0, input, times);
        }
        let [with_prompt, without] = match self.groups.branch() {
            None => [self.of_branch(0, input, times)?, self.of_branch(1, input, times)?],
            Some(branch) => {
                let own = self.of_branch(branch, input, times)?;
                let tensor = |values: &[f32]| Tensor::from_slice(values, own.shape(), &Device::Cpu);
                let [a, b] = self.groups.exchanged(own.flatten_all()?.to_vec1()?)?;
                [tensor(a.f32()?)?, tensor(b.f32()?)?]
            }
        };
        Ok((&without + ((with_prompt - &without)? * guidance)?)?)
    }

    /// Loads the weights of a stage, and frees those of the stage before.
    fn enter(&mut self, index: usize) -> Result<()> {
        if self.stage.as_ref().is_none_or(|stage| stage.index != index) {
            self.stage = None;
            let weights = self.folder.weights(index)?;
            self.stage = Some(Stage { index, weights, prompts: [None, None] });
        }
        Ok(())
    }

    /// The velocity with the prompt (branch 0) or the negative prompt (branch 1).
    fn of_branch(&mut self, branch: usize, input: &Tensor, times: &[f32]) -> Result<Tensor> {
        let (inputs, video) = (self.inputs, &self.video);
        let Some(Stage { index, weights, prompts }) = &mut self.stage else {
            return Err(crate::Error::Input("no transformer has been entered".into()));
        };
        let transformer = self.folder.transformer(*index);
        let text = match (branch, &inputs.negative_prompt_embeds) {
            (1, Some(negative)) => negative,
            _ => &inputs.prompt_embeds,
        };
        let prompt = match &mut prompts[branch] {
            Some(prompt) => prompt,
            slot => slot.insert(transformer.prompt(weights, text, inputs.image_embeds.as_ref(), video)?),
        };
        let control = inputs.control.as_ref().map(|control| Control { control, scale: &self.control_scale });
        transformer.velocity(weights, input, &video.timesteps(times)?, prompt, control, video)
    }
}
