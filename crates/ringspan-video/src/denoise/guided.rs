//! The velocity under guidance, computed by the ranks of one branch or of two.

use super::DenoiseSettings;
use super::feature_cache::{ChangeEstimate, FeatureCache};
use super::inputs::DenoiseInputs;
use super::pipeline::DenoiseFolder;
use crate::error::Result;
use crate::ranks::RankGroups;
use crate::transformer::{BlockPass, Branch, Conditions, Control, Prompt, ShardedWeights, VideoContext};
use candle_core::{Device, Tensor};
use ringspan_candle::StoredWeights;
use ringspan_candle::model::UnitWeights;
use std::sync::Arc;

/// The transformers of a run on one rank, and the prompts that have been computed once.
pub(super) struct GuidedModel<'a> {
    folder: &'a DenoiseFolder,
    groups: &'a RankGroups,
    inputs: &'a DenoiseInputs,
    guidance: [f64; 2],
    /// The estimated change of the output up to which blocks are skipped, if they are at all.
    cache: Option<(ChangeEstimate, f64)>,
    video: VideoContext,
    control_scale: Vec<f32>,
    /// The stage that computes now, with its weights and the prompts of both branches.
    stage: Option<Stage>,
}

struct Stage {
    index: usize,
    weights: StageWeights,
    prompts: [Option<Prompt>; 2],
    caches: [FeatureCache; 2],
}

/// The weights of a stage: all of them, which the ranks of a process share, or a share.
enum StageWeights {
    All(Arc<StoredWeights>),
    Share(ShardedWeights),
}

impl StageWeights {
    fn units(&self) -> &dyn UnitWeights {
        match self {
            Self::All(weights) => &**weights,
            Self::Share(weights) => weights,
        }
    }
}

/// A step as the transformers take it.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepInput<'a> {
    /// The latents, with what is appended to them.
    pub(super) latents: &'a Tensor,
    /// The time step of the video, and those of its tokens.
    pub(super) time: f32,
    pub(super) times: &'a [f32],
    /// Whether the step is computed in any case.
    pub(super) is_last: bool,
}

/// A guided velocity, and whether it was made without the blocks.
pub(super) struct GuidedVelocity {
    pub(super) velocity: Tensor,
    pub(super) skipped: bool,
}

impl<'a> GuidedModel<'a> {
    pub(super) fn new(
        folder: &'a DenoiseFolder,
        groups: &'a RankGroups,
        inputs: &'a DenoiseInputs,
        settings: &DenoiseSettings,
    ) -> Result<Self> {
        let config = folder.transformer(0).config();
        let (group, alone, grid) = (groups.video().clone(), groups.alone().clone(), inputs.grid(folder)?);
        let blocks = config.vace_layers.as_ref().map_or(0, Vec::len);
        let control_scale = inputs.control_scale.clone().unwrap_or_else(|| vec![1.0; blocks]);
        let video = VideoContext::new(config, group, alone, inputs.batch(), grid)?;
        let video = video.with_head_chunks(groups.head_chunks());
        let (guidance, threshold) = (settings.guidance, settings.cache_threshold);
        let cache = (threshold > 0.0).then(|| (ChangeEstimate::of(config, folder.stages()), threshold));
        Ok(Self { folder, groups, inputs, guidance, cache, video, control_scale, stage: None })
    }

    /// Tokens of a frame, and frames of tokens.
    pub(super) fn frame_tokens(&self) -> [usize; 2] {
        let [frames, rows, columns] = self.video.grid().size;
        [rows * columns, frames]
    }

    /// The guided velocity of a step, the same on all ranks.
    pub(super) fn velocity(&mut self, stage: usize, input: StepInput) -> Result<GuidedVelocity> {
        self.enter(stage)?;
        let guidance = self.guidance[stage];
        let skipped = self.skips(input, guidance != 1.0)?;
        if guidance == 1.0 {
            let [velocity] = self.velocities([0], input, skipped)?;
            return Ok(GuidedVelocity { velocity, skipped });
        }
        let [with_prompt, without] = match self.groups.branch() {
            // Weights that ranks share are gathered once for both branches; otherwise one at a time takes less memory.
            None if self.groups.sharing_weights().is_some() => self.velocities([0, 1], input, skipped)?,
            None => {
                let [with_prompt] = self.velocities([0], input, skipped)?;
                let [without] = self.velocities([1], input, skipped)?;
                [with_prompt, without]
            }
            Some(branch) => {
                let [own] = self.velocities([branch], input, skipped)?;
                let tensor = |values: &[f32]| Tensor::from_slice(values, own.shape(), &Device::Cpu);
                let [a, b] = self.groups.exchanged(own.flatten_all()?.to_vec1()?)?;
                [tensor(a.f32()?)?, tensor(b.f32()?)?]
            }
        };
        Ok(GuidedVelocity { velocity: (&without + ((with_prompt - &without)? * guidance)?)?, skipped })
    }

    /// Whether the branches that this rank computes do without the blocks. Rank 0 decides, so that all ranks agree even if their
    /// processors round differently.
    fn skips(&mut self, input: StepInput, is_guided: bool) -> Result<bool> {
        let (Some((estimate, threshold)), Some(stage)) = (self.cache, &mut self.stage) else { return Ok(false) };
        let transformer = self.folder.transformer(stage.index);
        let embedding = transformer.embedded_time(stage.weights.units(), input.time, &self.video)?;
        let branches = match self.groups.branch() {
            Some(branch) => branch..branch + 1,
            None => 0..if is_guided { 2 } else { 1 },
        };
        let mut skips = !input.is_last;
        for cache in &mut stage.caches[branches] {
            skips &= cache.skips(embedding.clone(), estimate, threshold);
        }
        self.groups.decided(skips)
    }

    /// Loads the weights of a stage, and frees those of the stage before.
    fn enter(&mut self, index: usize) -> Result<()> {
        if self.stage.as_ref().is_none_or(|stage| stage.index != index) {
            self.stage = None;
            let weights = match self.groups.sharing_weights() {
                Some(ranks) => StageWeights::Share(self.folder.weight_share(index, ranks)?),
                None => StageWeights::All(self.folder.weights(index)?),
            };
            self.stage = Some(Stage { index, weights, prompts: [None, None], caches: Default::default() });
        }
        Ok(())
    }

    /// The velocities of branches, block by block, in ascending order: with the prompt (branch 0) and with the negative prompt (branch 1).
    fn velocities<const N: usize>(
        &mut self,
        branches: [usize; N],
        input: StepInput,
        skips: bool,
    ) -> Result<[Tensor; N]> {
        let (inputs, video) = (self.inputs, &self.video);
        let Some(Stage { index, weights, prompts, caches }) = &mut self.stage else {
            return Err(crate::Error::Input("no transformer has been entered".into()));
        };
        let transformer = self.folder.transformer(*index);
        if branches.iter().any(|branch| prompts[*branch].is_none()) {
            let texts = branches.map(|branch| match (branch, &inputs.negative_prompt_embeds) {
                (1, Some(negative)) => negative,
                _ => &inputs.prompt_embeds,
            });
            let computed = transformer.prompts(weights.units(), &texts, inputs.image_embeds.as_ref(), video)?;
            branches.into_iter().zip(computed).for_each(|(branch, prompt)| prompts[branch] = Some(prompt));
        }
        let control = inputs.control.as_ref().map(|control| Control { control, scale: &self.control_scale });
        let conditions = Conditions { times: &video.timesteps(input.times)?, control };
        let computed = prompts.iter().zip(caches).enumerate().filter(|(branch, _)| branches.contains(branch));
        let of_pass = computed.filter_map(|(_, (prompt, cache))| {
            let blocks = match (&mut cache.added, skips) {
                (Some(added), true) => BlockPass::Skip(added),
                (added, _) if self.cache.is_some() => BlockPass::Record(added),
                _ => BlockPass::Compute,
            };
            Some(Branch { prompt: prompt.as_ref()?, blocks })
        });
        let of_pass = of_pass.collect();
        let patches = transformer.forward_branches(weights.units(), input.latents, conditions, of_pass, video)?;
        let velocities = patches.iter().map(|patches| video.grid().unpatched(&video.gathered(patches)?));
        let velocities = velocities.collect::<Result<Vec<_>>>()?;
        velocities.try_into().map_err(|_| crate::Error::Input("a branch of guidance has no velocity".into()))
    }
}
