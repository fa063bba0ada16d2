//! `ringspan train` of a video transformer: from latents and prompts to an adapter.

use crate::denoise::Progress;
use crate::{interrupt, mesh, output, video_io};
use anyhow::Result;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_train::TrainConfig;
use ringspan_video::training::{TrainingOutcome, VideoTraining};

/// Trains adapters, or prints what would be done; returns whether the training was stopped before its end.
pub(crate) fn run(config: &TrainConfig, dry_run: bool, processes: &ProcessGroup) -> Result<bool> {
    processes.agree(&config.settings.entries()?)?;
    mesh::limit_threads(config.ranks(), config.threads);
    let training = VideoTraining::open(config, processes)?;
    if dry_run {
        output::line(&training)?;
        return Ok(false);
    }
    output::note(&training);
    video_io::check_free(processes, |free| training.memory().check_free(free))?;
    let progress = Progress::after(training.first_step() as usize, training.steps() as usize);
    let outcome = training.run(interrupt::watch(), &|metrics| {
        progress.stepped_with(metrics.step as usize, &format!("loss {:.4}, ", metrics.loss));
    })?;
    if processes.lead() {
        report(config, &outcome)?;
    }
    Ok(outcome.interrupted)
}

fn report(config: &TrainConfig, TrainingOutcome { step, adapter, .. }: &TrainingOutcome) -> Result<()> {
    let out = config.out.display();
    match adapter {
        Some(file) => {
            output::line(format_args!("adapter              {}", file.display()))?;
            output::line(format_args!("metrics              {out}/metrics.jsonl"))?;
            output::line("go on with:")?;
            let second = config.model.as_deref().is_some_and(|model| model.ends_with("transformer_2"));
            let flag = if second { "--lora-2" } else { "--lora" };
            output::line(format_args!("  ringspan video {flag} {out} ..."))?;
        }
        None => {
            output::line(format_args!("stopped after step {step}; nothing is lost, go on with:"))?;
            output::line(format_args!("  ringspan train --resume {out}"))?;
        }
    }
    Ok(())
}
