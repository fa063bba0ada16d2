//! Steps, scheduler and guidance of a run.

use crate::output;
use anyhow::{Context, Result, ensure};
use ringspan_video::denoise::{DenoiseFolder, DenoiseSettings};
use ringspan_video::lora::LoraSource;
use ringspan_video::scheduler::{SchedulerConfig, SchedulerKind};
use std::path::Path;

/// The flags that say how a video is denoised.
#[derive(Debug, clap::Args)]
pub(crate) struct SamplerArgs {
    /// Number of steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Scheduler: unipc, euler [default: the pipeline's]
    #[arg(long, value_name = "NAME")]
    scheduler: Option<SchedulerKind>,
    /// Shift of noise levels [default: the pipeline's if it has that scheduler, else 3]
    #[arg(long, value_name = "S")]
    shift: Option<f64>,
    /// Guidance scale: factor of the difference between the velocities with and without the prompt; 1 is without
    /// guidance
    #[arg(long, default_value_t = 5.0, value_name = "G")]
    guidance: f64,
    /// Guidance scale of a pipeline's second transformer [default: that of the first]
    #[arg(long, value_name = "G")]
    guidance_2: Option<f64>,
    /// Skip the transformer's blocks as long as the time steps have changed the output by less than about T since they were computed
    /// (TeaCache); 0 skips none. 0.05 to 0.1 suit WAN 2.1 T2V 1.3B, 0.1 to 0.2 T2V 14B; other models need other values
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    cache_threshold: f64,
    /// Adapters of the transformer: a safetensors file, or a folder with one, with diffusers' names, PEFT's, or those of the
    /// original model; what they add counts SCALE times [default: 1]. May be given more than once
    #[arg(long, value_name = "PATH[=SCALE]")]
    lora: Vec<LoraSource>,
    /// Adapters of a pipeline's second transformer, which --lora does not change
    #[arg(long, value_name = "PATH[=SCALE]")]
    lora_2: Vec<LoraSource>,
}

impl SamplerArgs {
    /// The adapters of each transformer of the folder at `model`.
    pub(crate) fn loras(&self, folder: &DenoiseFolder, model: &Path) -> Result<[&[LoraSource]; 2]> {
        ensure!(
            self.lora_2.is_empty() || folder.stages() > 1,
            "--lora-2 has no effect: {} has one transformer",
            model.display()
        );
        Ok([&self.lora, &self.lora_2])
    }

    /// The settings, with the scheduler of the folder, which is at `model`, where none is given.
    pub(crate) fn settings(&self, folder: &DenoiseFolder, model: &Path) -> Result<DenoiseSettings> {
        ensure!(
            self.guidance_2.is_none() || folder.stages() > 1,
            "--guidance-2 has no effect: {} has one transformer",
            model.display()
        );
        let of_pipeline = folder.scheduler();
        let kind = self.scheduler.or(of_pipeline.map(|scheduler| scheduler.kind));
        let kind = kind.context("--scheduler is needed: the folder has no scheduler/scheduler_config.json")?;
        let mut scheduler =
            of_pipeline.filter(|scheduler| scheduler.kind == kind).unwrap_or_else(|| SchedulerConfig::new(kind));
        scheduler.shift = self.shift.unwrap_or(scheduler.shift);
        let guidance = [self.guidance, self.guidance_2.unwrap_or(self.guidance)];
        let (steps, cache_threshold) = (self.steps as usize, self.cache_threshold);
        Ok(DenoiseSettings { steps, scheduler, guidance, cache_threshold })
    }

    /// Says in how many steps the blocks were skipped, if they could be.
    pub(crate) fn say_skipped(&self, skipped: usize) {
        if self.cache_threshold > 0.0 {
            let (steps, threshold) = (self.steps, self.cache_threshold);
            output::note(format_args!(
                "cache: blocks were skipped in {skipped} of {steps} steps (threshold {threshold})"
            ));
        }
    }
}
