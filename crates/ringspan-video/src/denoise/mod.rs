//! Denoising: from noise, step by step, to the latents of a video, with classifier-free guidance (Ho and Salimans, 2022,
//! arXiv:2207.12598).

mod feature_cache;
mod grid_cost;
mod guided;
mod inputs;
mod memory;
mod pipeline;
mod plan;

pub use grid_cost::{GridAlternative, GridCost};
pub use inputs::DenoiseInputs;
pub use pipeline::DenoiseFolder;
pub use plan::DenoisePlan;

use crate::error::{Error, Result};
use crate::ranks::{RankGroups, VideoMesh, VideoRanks};
use crate::scheduler::{Scheduler, SchedulerConfig};
use candle_core::Tensor;
use guided::{GuidedModel, GuidedVelocity, StepInput};
use inputs::Conditioning;

/// How a video is denoised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseSettings {
    /// Number of steps.
    pub steps: usize,
    /// The scheduler.
    pub scheduler: SchedulerConfig,
    /// The factor G of the difference between the velocities with the prompt and with the negative prompt; 1 computes the first
    /// alone. The second transformer of a pipeline has its own.
    pub guidance: [f64; 2],
    /// The blocks are skipped as long as the estimated change of their output, summed over steps, is below this; 0 computes them in
    /// every step.
    pub cache_threshold: f64,
}

/// A step that has been taken.
#[derive(Debug, Clone, Copy)]
pub struct DenoiseStep<'a> {
    /// Number of steps taken so far, this one included.
    pub number: usize,
    /// The latents with which the step began, and the noise level they have.
    latents: &'a Tensor,
    sigma: f32,
    velocity: &'a Tensor,
    /// Whether the blocks were skipped.
    pub skipped: bool,
    /// Bytes that this rank has sent to others since the run began.
    pub sent: u64,
}

impl DenoiseStep<'_> {
    /// The latents `[B, C, F, H, W]` without noise that the step's velocity points to.
    ///
    /// # Errors
    /// Errors of the tensor library.
    pub fn predicted(&self) -> Result<Tensor> {
        Ok((self.latents - (self.velocity * f64::from(self.sigma))?)?)
    }
}

/// Denoises latents on every rank. `stepped` is called after each step, in the process of rank 0. Returns the latents
/// `[B, C, F, H, W]`, or `None` in a process without rank 0.
///
/// # Errors
/// Inputs and settings that do not fit the model, with the numbers; an error of `stepped`; failures of any rank.
pub fn denoise(
    folder: &DenoiseFolder,
    ranks: &mut VideoRanks,
    inputs: &DenoiseInputs,
    settings: &DenoiseSettings,
    stepped: impl Fn(&DenoiseStep) -> Result<()> + Sync,
) -> Result<Option<Tensor>> {
    let latents = denoise_in_each_process(folder, ranks, inputs, settings, stepped)?;
    Ok(ranks.processes().lead().then_some(latents))
}

/// Like [`denoise`], and returns the latents in every process: all ranks have them.
pub(crate) fn denoise_in_each_process(
    folder: &DenoiseFolder,
    ranks: &mut VideoRanks,
    inputs: &DenoiseInputs,
    settings: &DenoiseSettings,
    stepped: impl Fn(&DenoiseStep) -> Result<()> + Sync,
) -> Result<Tensor> {
    let conditioning = inputs.check(folder)?;
    settings.check(folder, ranks.mesh(), inputs)?;
    let all = ranks.run(|groups| on_rank(folder, groups, inputs, conditioning, settings, &stepped))?;
    all.into_iter().next().ok_or_else(|| Error::Mesh(format!("{}: no rank is in this process", ranks.mesh())))
}

impl DenoiseSettings {
    /// Whether the negative prompt is computed in a stage.
    fn is_guided(&self, stage: usize) -> bool {
        self.guidance[stage] != 1.0
    }

    fn check(&self, folder: &DenoiseFolder, mesh: &VideoMesh, inputs: &DenoiseInputs) -> Result<()> {
        let refuse = |problem: String| Err(Error::Input(problem));
        let guidance = &self.guidance[..folder.stages()];
        if let Some(given) = guidance.iter().find(|guidance| !(guidance.is_finite() && **guidance >= 1.0)) {
            return refuse(format!("guidance {given}: it must be at least 1, which is without guidance"));
        }
        let guided = (0..folder.stages()).find(|stage| self.is_guided(*stage));
        if let Some(stage) = guided.filter(|_| inputs.negative_prompt_embeds.is_none()) {
            let of = if stage == 0 { "" } else { " of transformer_2" };
            return refuse(format!(
                "guidance {}{of} needs `negative_prompt_embeds`, which are missing; guidance 1 does without",
                guidance[stage]
            ));
        }
        self.check_cache(folder)?;
        if mesh.cfg_parallel && !(0..folder.stages()).all(|stage| self.is_guided(stage)) {
            return refuse(format!(
                "the two branches of guidance cannot be computed in parallel: with guidance {guidance:?}, there is one"
            ));
        }
        Ok(())
    }
}

impl DenoiseSettings {
    /// Steps of each transformer.
    fn steps_of(&self, folder: &DenoiseFolder) -> Result<Vec<usize>> {
        let mut steps = vec![0; folder.stages()];
        for time in Scheduler::new(&self.scheduler, self.steps)?.timesteps() {
            steps[folder.stage_of(*time, &self.scheduler)] += 1;
        }
        Ok(steps)
    }

    /// Steps in which blocks may be skipped: all but the first of each transformer and the last of the run.
    fn skippable(&self, folder: &DenoiseFolder) -> Result<usize> {
        let steps = self.steps_of(folder)?;
        let last = steps.iter().rposition(|steps| *steps > 0);
        let of = |(stage, steps): (usize, &usize)| steps.saturating_sub(if Some(stage) == last { 2 } else { 1 });
        Ok(steps.iter().enumerate().map(of).sum())
    }

    fn check_cache(&self, folder: &DenoiseFolder) -> Result<()> {
        let threshold = self.cache_threshold;
        if !(threshold.is_finite() && threshold >= 0.0) {
            return Err(Error::Input(format!(
                "cache threshold {threshold}: it must be at least 0, which computes all blocks in every step"
            )));
        }
        if self.skippable(folder)? == 0 && threshold > 0.0 {
            return Err(Error::Input(format!(
                "cache threshold {threshold} has no effect: of {:?} steps of the transformers, the first of each and the last of all \
                 are computed in any case",
                self.steps_of(folder)?
            )));
        }
        Ok(())
    }
}

fn on_rank(
    folder: &DenoiseFolder,
    groups: &RankGroups,
    inputs: &DenoiseInputs,
    conditioning: Conditioning,
    settings: &DenoiseSettings,
    stepped: &(impl Fn(&DenoiseStep) -> Result<()> + Sync),
) -> Result<Tensor> {
    let mut model = GuidedModel::new(folder, groups, inputs, settings)?;
    let mut scheduler = Scheduler::new(&settings.scheduler, settings.steps)?;
    let mut latents = inputs.latents.clone();
    for (step, time) in scheduler.timesteps().to_vec().into_iter().enumerate() {
        let (input, times) = conditioned(&latents, inputs, conditioning, time, model.frame_tokens())?;
        let is_last = step + 1 == settings.steps;
        let of_step = StepInput { latents: &input, time, times: &times, is_last };
        let GuidedVelocity { velocity, skipped } =
            model.velocity(folder.stage_of(time, &settings.scheduler), of_step)?;
        let next = scheduler.step(&latents, &velocity)?;
        if groups.rank() == 0 {
            let sigma = scheduler.sigmas()[step];
            let sent = groups.sent();
            stepped(&DenoiseStep { number: step + 1, latents: &latents, sigma, velocity: &velocity, skipped, sent })?;
        }
        latents = next;
    }
    match (conditioning, &inputs.condition) {
        (Conditioning::FirstFrame, Some(first)) => with_first_frame(&latents, first),
        _ => Ok(latents),
    }
}

/// The model's input and time steps: one for all tokens, or for a given first frame one for each token. `frame` is the number of
/// tokens of a frame, and that of frames.
fn conditioned(
    latents: &Tensor,
    inputs: &DenoiseInputs,
    conditioning: Conditioning,
    time: f32,
    [frame, frames]: [usize; 2],
) -> Result<(Tensor, Vec<f32>)> {
    match (conditioning, &inputs.condition) {
        (Conditioning::Appended, Some(condition)) => Ok((Tensor::cat(&[latents, condition], 1)?, vec![time])),
        (Conditioning::FirstFrame, Some(first)) => {
            let of_video = (0..frame * frames).map(|token| if token < frame { 0.0 } else { time });
            let times = of_video.collect::<Vec<_>>().repeat(inputs.batch());
            Ok((with_first_frame(latents, first)?, times))
        }
        _ => Ok((latents.clone(), vec![time])),
    }
}

/// Latents `[B, C, F, H, W]` with another first frame `[B, C, 1, H, W]`.
fn with_first_frame(latents: &Tensor, first: &Tensor) -> Result<Tensor> {
    match latents.dim(2)? {
        0 | 1 => Ok(first.clone()),
        frames => Ok(Tensor::cat(&[first, &latents.narrow(2, 1, frames - 1)?], 2)?),
    }
}
