//! Runs a training, from its configuration to a trained model folder.

use crate::{
    companion_files,
    config::TrainConfig,
    dataset::{CachePolicy, TokenizationMonitor},
    error::{Error, Result},
    events::EventFile,
    mesh::start_world,
    metrics::{EvaluationMetrics, MetricsFile},
    model_folder,
    observer::{Observer, SilentObserver},
    peak_memory::{PeakAllocated, PeakGpuMemory},
    plan::Plan,
    rank::{Rank, RankZero},
    run_file,
    sample::{Sample, sample},
    setup::Setup,
    spec::{BatchSpec, RunSpec},
    tokenizer::Tokenizer,
};
use ringspan::comm::Buffer;
use ringspan::comm::agree::Setting;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::{DeviceName, Devices, Recompute, pool};
use std::{
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError, atomic::AtomicBool},
};

/// The outcome of a training run.
#[derive(Debug)]
pub struct Outcome {
    /// Steps done in all.
    pub step: u64,
    /// Steps asked for.
    pub steps: u64,
    /// Whether it was stopped before the last step; then there is a checkpoint, but no new model folder.
    pub interrupted: bool,
    /// The run's folder; where the run was not interrupted, also the trained model's.
    pub out: PathBuf,
    /// The metrics file.
    pub metrics: PathBuf,
    /// The last evaluation on the held-out text, where there is one.
    pub evaluation: Option<EvaluationMetrics>,
    /// A continuation of held-out text by the trained model, where there is one.
    pub sample: Option<Sample>,
    /// The model's tokenizer, where it has one.
    pub tokenizer: Option<Tokenizer>,
    /// The base model of the adapters, if the folder holds adapters only.
    pub base_model: Option<PathBuf>,
    /// Predicted bytes of all ranks of this process.
    pub predicted_memory: u64,
    /// Most bytes that this process had allocated at once since its plan was made, where its allocator counts them.
    pub peak_allocated: Option<u64>,
    /// Most bytes that this process had in memory, where the system tells.
    pub peak_memory: Option<u64>,
    /// Predicted bytes of this process's ranks on their fullest GPU; 0 where the CPU computes.
    pub predicted_gpu_memory: u64,
    /// Most bytes that this process had in use at once on its fullest GPU since training began; none where the CPU computes.
    pub peak_gpu_memory: Option<u64>,
}

/// Runs a training whose ranks are threads of this process.
///
/// `stop` may be set at any time (Ctrl-C): all ranks then finish their step, save a checkpoint and return; during tokenization,
/// [`Error::Interrupted`] is returned.
///
/// # Errors
/// Settings, data, models and checkpoints that do not fit, found before anything is computed; failures of ranks; a disk
/// that refuses. Checkpoints made before a failure stay good.
pub fn train(config: &TrainConfig, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Outcome> {
    train_on(&ProcessGroup::single(), config, stop, observer)
}

/// The plan of what [`train`] would do, in numbers. Reads model, data and checkpoint, and computes nothing. Tokens of the data
/// are cached, so that the training need not make them again; where they cannot be cached, the plan says so.
///
/// # Errors
/// Errors of [`train`]; a training that does not fit into memory is no error here, but said in the plan.
pub fn plan(config: &TrainConfig) -> Result<Plan> {
    plan_on(&ProcessGroup::single(), config, &AtomicBool::new(false), &mut SilentObserver)
}

/// Like [`plan`], for ranks that may be processes. All of them must call this. `stop` may be set during tokenization, whose
/// progress `observer` receives.
///
/// # Errors
/// As [`plan`], and [`Error::Interrupted`]. A GPU that cannot be opened is no error: the plan says so.
pub fn plan_on(
    processes: &ProcessGroup,
    config: &TrainConfig,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Plan> {
    let setup = set_up(config, CachePolicy::TemporaryAllowed, stop, observer)?;
    let mut plan = Plan::new(config, &setup.spec, &[])?;
    if config.device != DeviceName::Cpu {
        let opened = Devices::open(config.device, processes.local_rank());
        // A process without a GPU calls it as well: in this collective, processes find out who shares a GPU.
        let gpu_memory = opened.as_ref().unwrap_or(&Devices::CPU).gpu_memory_use(processes, config.ranks())?;
        match opened {
            Ok(_) => plan = Plan::new(config, &setup.spec, &gpu_memory)?,
            Err(error) => plan.gpus_unknown = error.to_string(),
        }
    }
    agree_on_recompute(processes, config, &setup.spec, plan)
}

/// Reads and checks everything, and reports the progress of tokenization to `observer`.
fn set_up(config: &TrainConfig, cache: CachePolicy, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Setup> {
    let mut report = |source: &Path, done, bytes| observer.tokenizing(source, done, bytes);
    Setup::new(config, cache, &TokenizationMonitor::new(&mut report, stop))
}

/// Like [`train`], for ranks that may be processes. All of them must call this; each reads model, data and checkpoint. Only the
/// process of rank 0 reports to its observer, checks `stop` during training, and writes; a text is tokenized by one process of
/// those that share a token cache.
///
/// # Errors
/// As [`train`]; also processes whose settings, model or data differ, with the name of what differs.
pub fn train_on(
    processes: &ProcessGroup,
    config: &TrainConfig,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let mut setup = set_up(config, CachePolicy::Required, stop, observer)?;
    let mut plan = Plan::new(config, &setup.spec, &[])?;
    check_fits(&plan)?;
    if processes.local().is_some() {
        processes.agree(&process_settings(config, &setup)?)?;
    }
    let devices = Devices::open(config.device, processes.local_rank())?.computing_in(config.dtype);
    if devices.are_gpus() {
        let gpu_memory = devices.gpu_memory_use(processes, config.ranks())?;
        plan = Plan::new(config, &setup.spec, &gpu_memory)?;
        check_fits(&plan)?;
    }
    let plan = agree_on_recompute(processes, config, &setup.spec, plan)?;
    // Only the plan reads these batches, and the run lasts long.
    setup.spec.batches = BatchSpec::default();
    let ranks_per_gpu = config.local_ranks.map_or(config.ranks().div_ceil(devices.count()), |_| 1);
    let predicted_gpu_memory = plan.gpu_bytes() * ranks_per_gpu as u64;
    let predicted_memory = plan.rank_bytes() * config.local_ranks.map_or(config.ranks(), |_| 1) as u64;
    // No process checks any more whether the run's folder is free, so it may be written to.
    let metrics_path = config.out.join("metrics.jsonl");
    let mut metrics = None;
    if processes.lead() {
        observer.planned(&plan);
        run_file::write(config, &setup.spec.lr)?;
        let mut file = MetricsFile::open(&metrics_path, setup.spec.first_step)?;
        if let Some(folder) = &config.tensorboard {
            file = file.with_events(EventFile::create(folder, setup.spec.first_step)?);
        }
        metrics = Some(file);
    }
    let rank_zero = Mutex::new(RankZero {
        observer,
        metrics,
        peak_allocated: PeakAllocated::new(config.peak_allocated),
        peak_gpu_memory: PeakGpuMemory::new(&devices),
    });
    let (connected, block_transport) = devices.connect(processes, config.deadline)?;
    if let (Some(block_transport), true) = (block_transport, processes.lead()) {
        rank_zero.lock().unwrap_or_else(PoisonError::into_inner).observer.connected(&block_transport);
    }
    let shared_gathers = setup.shared_gathers(processes);
    let ends = start_world(&connected, config)?.run(|rank| {
        config.isa.map_or(Ok(()), pool::set_isa)?;
        let world = rank.communicator().clone();
        Rank::new(config, &setup, plan.recompute, &devices, shared_gathers.clone(), world)?.train(stop, &rank_zero)
    })?;
    // The lead does the rest alone: the ranks of all other processes have ended.
    drop(connected);
    let Some(end) = ends.into_iter().next() else {
        return Err(Error::Settings("a training needs at least one rank".into()));
    };
    let mut rank_zero = rank_zero.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (peak_allocated, peak_gpu_memory) = (rank_zero.peak_allocated.peak(), rank_zero.peak_gpu_memory.peak()?);
    let mut generated_sample = None;
    if !end.interrupted && processes.lead() {
        companion_files::write(config, setup.tokenizer.as_ref(), &setup.config_json, setup.end_token)?;
        generated_sample = sample(config, &setup, devices.of(0))?;
    }
    Ok(Outcome {
        step: end.step,
        steps: setup.spec.lr.steps,
        interrupted: end.interrupted,
        out: config.out.clone(),
        metrics: metrics_path,
        evaluation: end.evaluation,
        sample: generated_sample,
        tokenizer: setup.tokenizer,
        base_model: model_folder::base_model(config)?.filter(|_| !config.lora_merge),
        predicted_memory,
        peak_allocated,
        peak_memory: ringspan::memory::peak(),
        predicted_gpu_memory,
        peak_gpu_memory,
    })
}

/// With `--recompute auto`, processes may choose differently by their machines' memory; all then take the choice that recomputes
/// most.
fn agree_on_recompute(processes: &ProcessGroup, config: &TrainConfig, spec: &RunSpec, plan: Plan) -> Result<Plan> {
    let (Some(comm), None) = (processes.comm(), config.recompute) else { return Ok(plan) };
    let own = Recompute::ALL.iter().position(|recompute| *recompute == plan.recompute).unwrap_or(0);
    let choices = comm.all_gather(Buffer::U8(vec![own as u8]))?;
    let chosen = choices.iter().filter_map(|buffer| match &**buffer {
        Buffer::U8(chosen) => chosen.first().map(|chosen| usize::from(*chosen)),
        _ => None,
    });
    match chosen.min().unwrap_or(own) {
        chosen if chosen < own => Plan::with_recompute(config, spec, Recompute::ALL[chosen], &plan.gpus),
        _ => Ok(plan),
    }
}

/// Refuses a plan that does not fit into memory, before any work.
fn check_fits(plan: &Plan) -> Result<()> {
    let refused = |refusal| Err(Error::Settings(format!("{refusal}\n{plan}")));
    plan.refusal.as_ref().map_or(Ok(()), refused)
}

/// Everything that all processes must agree on: every setting that was given, and fingerprints of what was read.
fn process_settings(config: &TrainConfig, setup: &Setup) -> Result<Vec<Setting>> {
    let mut settings = vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
    settings.extend(config.settings.entries()?.into_iter().map(|(key, value)| (format!("--{key}"), value)));
    settings.push(("the model".into(), setup.model.to_string()));
    let keys = setup.config_json.as_object().into_iter().flatten();
    settings.extend(keys.map(|(key, value)| (format!("the model's {key}"), value.to_string())));
    settings.push((
        "the model's weights".into(),
        format!("{:016x}", setup.initial_parameters.fingerprint(&setup.spec.shapes)?),
    ));
    settings.push(("the data".into(), setup.data.to_string()));
    settings.push(("the first step".into(), setup.spec.first_step.to_string()));
    Ok(settings)
}
