//! `ringspan train`: from text to a model folder, or from latents to an adapter of a video transformer.

use crate::{allocator, interrupt, mesh, output, video_training};
use anyhow::{Result, bail};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_train::{Error, Observer, Outcome, SilentObserver, TerminalObserver, TrainConfig, plan_on, train_on};
use ringspan_video::training::transformer_folder;
use std::process::ExitCode;

pub(crate) use ringspan_train::TrainArgs;

/// Exit code of a training stopped by Ctrl-C: 128 + SIGINT. Its steps are saved.
const INTERRUPTED: u8 = 130;

/// Trains with these arguments; progress is written to standard error, the result to standard output.
pub(crate) fn run(args: TrainArgs, processes: &ProcessGroup) -> Result<ExitCode> {
    let mut config = TrainConfig::from_args(&args)?;
    processes.check(config.ranks())?;
    config.set_local_ranks(processes);
    if config.model.as_deref().is_some_and(|model| transformer_folder(model).is_some()) {
        let interrupted = video_training::run(&config, args.dry_run, processes)?;
        return Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS });
    }
    config.peak_allocated = Some(allocator::take_peak);
    mesh::limit_threads(config.ranks(), config.threads);
    if processes.local().is_none() {
        allocator::avoid_large_pages(config.ranks());
    }
    let observer: &mut dyn Observer = if processes.lead() { &mut TerminalObserver::new() } else { &mut SilentObserver };
    let done = match args.dry_run {
        true => dry_run(&config, processes, observer),
        false => train(&config, processes, observer),
    };
    match done {
        // With several processes, the interruption stays an error, which reaches all of them.
        Err(error)
            if processes.local().is_none() && matches!(error.downcast_ref(), Some(Error::Interrupted { .. })) =>
        {
            eprintln!("{error}");
            Ok(ExitCode::from(INTERRUPTED))
        }
        done => done,
    }
}

fn train(config: &TrainConfig, processes: &ProcessGroup, observer: &mut dyn Observer) -> Result<ExitCode> {
    let outcome = train_on(processes, config, interrupt::watch(), observer)?;
    if processes.lead() {
        report(&outcome);
    }
    Ok(if outcome.interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// Writes the plan to standard output; if the training does not fit, the reason is the error.
fn dry_run(config: &TrainConfig, processes: &ProcessGroup, observer: &mut dyn Observer) -> Result<ExitCode> {
    let plan = plan_on(processes, config, interrupt::watch(), observer)?;
    if processes.lead() {
        output::line(&plan)?;
    }
    match plan.refusal {
        Some(refusal) => bail!("{refusal}"),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn report(outcome: &Outcome) {
    let out = outcome.out.display();
    if outcome.interrupted {
        println!("stopped after step {} of {}; nothing is lost, go on with:", outcome.step, outcome.steps);
        println!("  ringspan train --resume {out}");
        println!("or take the model as it is:");
        println!("  ringspan export {out}");
        return;
    }
    if let Some(evaluation) = &outcome.evaluation {
        println!("held-out perplexity  {:.3} (loss {:.4})", evaluation.held_out_perplexity, evaluation.held_out_loss);
    }
    if let Some(sample) = &outcome.sample {
        println!("sample               {:?} goes on:", sample.prompt);
        for line in sample.continuation.lines() {
            println!("  | {line}");
        }
    }
    match &outcome.base_model {
        Some(model) => println!("adapter              {out}, next to {}", model.display()),
        None => println!("model                {out}"),
    }
    println!("metrics              {}", outcome.metrics.display());
    let megabytes = |bytes: u64| format!("{:.0} MB", bytes as f64 / 1e6);
    print!("memory               {} predicted for the ranks here", megabytes(outcome.predicted_memory));
    if let Some(allocated) = outcome.peak_allocated {
        print!(", {} allocated at most with data and tokenizer", megabytes(allocated));
    }
    if let Some(resident) = outcome.peak_memory {
        print!(", {} resident with program and freed memory", megabytes(resident));
    }
    println!();
    if let Some(in_use) = outcome.peak_gpu_memory {
        let [predicted, in_use] = [outcome.predicted_gpu_memory, in_use].map(megabytes);
        println!("memory of a GPU      {predicted} predicted for the ranks here, {in_use} in use at most");
    }
    println!("go on with:");
    if outcome.tokenizer.is_some() {
        println!("  ringspan generate --model {out} --prompt 'The '");
    }
    println!("  ringspan train --resume {out} --steps {}", outcome.steps * 2);
}
