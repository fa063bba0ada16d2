//! From a configuration to a trained model folder.

use crate::{
    checkpoint::{Checkpoints, write_file},
    config::TrainConfig,
    error::{Error, Result},
    metrics::{EvaluationMetrics, MetricsFile},
    observer::Observer,
    rank::{Host, Rank},
    sample::{Sample, sample},
    setup::{Setup, model_error, write_settings},
    tokenizer::Tokenizer,
};
use ringspan::comm::threads::{self, Options};
use ringspan_candle::pool;
use ringspan_models::folder;
use std::{
    path::PathBuf,
    sync::{Mutex, atomic::AtomicBool},
};

/// How a training ended.
#[derive(Debug)]
pub struct Outcome {
    /// Steps done in all.
    pub step: u64,
    /// Steps asked for.
    pub steps: u64,
    /// Whether it was stopped before the last step; then there is a checkpoint but no new model.
    pub interrupted: bool,
    /// The run's folder; when not interrupted also the trained model's.
    pub out: PathBuf,
    /// The metrics.
    pub metrics: PathBuf,
    /// The last look at the held-out text, where there is one.
    pub evaluation: Option<EvaluationMetrics>,
    /// What the trained model makes of a held-out text, where there is one.
    pub sample: Option<Sample>,
    /// The model's tokenizer, where it has one.
    pub tokenizer: Option<Tokenizer>,
}

/// Trains. The ranks are threads of this process.
///
/// `stop` may be set at any time (Ctrl-C): all ranks then finish their step, save a checkpoint and return.
///
/// # Errors
/// Settings, data, models and checkpoints that do not fit, found before anything is computed; failures of ranks; a disk
/// that refuses. Checkpoints made before a failure stay good.
pub fn train(config: &TrainConfig, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Outcome> {
    let setup = Setup::new(config)?;
    observer.planned(&setup.plan);
    write_settings(config)?;
    let metrics_path = config.out.join("metrics.jsonl");
    let host = Mutex::new(Host {
        observer,
        metrics: MetricsFile::open(&metrics_path, setup.first_step)?,
        checkpoints: Checkpoints::new(&config.out, config.keep),
    });
    let options = Options { deadline: config.deadline, ..Options::default() };
    let ends = threads::run(config.ranks(), options, |world| {
        pool::run(config.threads, || Rank::new(config, &setup, world)?.train(stop, &host))?
    })?;
    let Some(end) = ends.into_iter().next() else {
        return Err(Error::Settings("a training needs at least one rank".into()));
    };
    let mut shown = None;
    if !end.interrupted {
        folder::save(&config.out, &setup.config_json, &end.weights).map_err(model_error)?;
        if let Some(tokenizer) = &setup.tokenizer {
            write_file(&config.out.join("tokenizer.json"), tokenizer.to_json()?.as_bytes())?;
        }
        shown = sample(config, &setup, &end.weights)?;
    }
    Ok(Outcome {
        step: end.step,
        steps: config.lr.steps,
        interrupted: end.interrupted,
        out: config.out.clone(),
        metrics: metrics_path,
        evaluation: end.evaluation,
        sample: shown,
        tokenizer: setup.tokenizer,
    })
}
