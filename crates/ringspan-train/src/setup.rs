//! Everything read and checked before ranks start: model, data, the checkpoint to go on from, the plan.

use crate::{
    checkpoint::{Checkpoint, Checkpoints, Identity, LossStatistics},
    config::{DataSource, RUN_FILE, TextSource, TrainConfig, TrainingLength},
    data::{Batch, Sequence, fingerprint},
    data_loader::DataLoader,
    dataset::{CachePolicy, Dataset, TokenizationMonitor},
    error::{Error, Result},
    initial_model::InitialModel,
    initial_parameters::InitialParameters,
    lr_schedule::LrSchedule,
    mesh::RunMesh,
    observer::grouped,
    plan::Plan,
    settings::Settings,
    tokenizer::Tokenizer,
};
use ringspan_candle::gpu_memory::GpuMemoryUse;
use ringspan_candle::model::stored;
use ringspan_candle::{DeviceName, Recompute, Weights, offload};
use ringspan_models::{Config, Decoder};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// A run that is ready to start. It is the same on every rank.
pub(crate) struct Setup {
    /// `config.json` as it is saved with the model.
    pub(crate) config_json: Value,
    pub(crate) decoder: Decoder,
    pub(crate) mesh: RunMesh,
    pub(crate) shapes: BTreeMap<String, Vec<usize>>,
    /// The source of the parameters before the first step.
    pub(crate) initial_parameters: InitialParameters,
    pub(crate) tokenizer: Option<Tokenizer>,
    pub(crate) data_loader: DataLoader,
    /// Learning rates, and with them the number of steps.
    pub(crate) lr: LrSchedule,
    /// Held-out sequences; empty for a file of tokens.
    pub(crate) held_out: Vec<Sequence>,
    /// Steps done before this run.
    pub(crate) first_step: u64,
    /// Tokens seen before this run.
    pub(crate) tokens_seen: u64,
    /// The watchdog's statistics of the losses before this run.
    pub(crate) losses: LossStatistics,
    pub(crate) model: Identity,
    pub(crate) data: Identity,
    /// Lines for the user: which token ends documents, and how documents are packed.
    pub(crate) notes: Vec<String>,
    /// Lines for the user about things in the data that deserve a look before training.
    pub(crate) warnings: Vec<String>,
    /// The token that ends a document or an answer, where there is one.
    pub(crate) end_token: Option<u32>,
    pub(crate) plan: Plan,
    /// The activations that are recomputed for the backward pass.
    pub(crate) recompute: Recompute,
}

/// Whether the frozen base of adapters stays in its stored (quantized) format. On GPUs it is f32, and so is a base that adapters
/// are merged into.
fn keeps_stored_format(config: &TrainConfig) -> bool {
    config.lora.is_some() && !config.lora_merge && config.device == DeviceName::Cpu
}

impl Setup {
    /// Reads and checks everything; writes nothing but the token cache.
    pub(crate) fn new(
        config: &TrainConfig,
        cache_policy: CachePolicy,
        monitor: &TokenizationMonitor<'_>,
    ) -> Result<Self> {
        let (mut initial_model, weights) = InitialModel::new(config)?;
        let (decoder, initial_parameters) = initial_model.build(weights, config, local_rank_count(config))?;
        // An unsuitable mesh is refused before anything is read that takes long.
        let mut mesh = RunMesh::new(config, &decoder)?;
        if keeps_stored_format(config) {
            mesh.placement = mesh.placement.with_stored(&decoder, initial_parameters.stored_formats(&decoder))?;
        }
        check_offload(config, &decoder)?;
        let tokenizer = initial_model.tokenizer(config)?;
        let InitialModel { config: model_config, json: config_json, .. } = initial_model;
        let threads = config.threads * local_rank_count(config);
        let data = Dataset::open(config, tokenizer.as_ref(), model_config.vocab_size, threads, cache_policy, monitor)?;
        let data_loader = data.data_loader.clone();
        let lr = config.lr(steps(config, &data_loader))?;
        let mut setup = Self::without_plan(config_json, decoder, mesh, initial_parameters, tokenizer, data, lr);
        if config.resume {
            let saved = Checkpoints::new(&config.out, config.keep).newest(&setup.model, &setup.data)?;
            check_same_configuration(config, &saved, &setup.config_json)?;
            if saved.progress.step >= lr.steps {
                return Err(Error::Settings(format!(
                    "the run in {out} has done {} of {} steps: to go on, give more with --steps or --epochs; `ringspan export {out}` writes \
                     its model once more",
                    saved.progress.step,
                    lr.steps,
                    out = config.out.display()
                )));
            }
            setup.data_loader = data_loader.resume_at(&saved.progress.source_positions());
            setup.first_step = saved.progress.step;
            setup.tokens_seen = saved.progress.tokens;
            setup.losses = saved.progress.losses;
            setup.initial_parameters = setup.initial_parameters.with_checkpoint(saved, &setup.decoder)?;
        }
        setup.make_plan(config, Vec::new())?;
        Ok(setup)
    }

    /// The setup of a loaded model and one batch, without a plan.
    pub(crate) fn for_batch(config: &TrainConfig, decoder: Decoder, weights: Weights, batch: Batch) -> Result<Self> {
        let Some(recompute) = config.recompute else {
            let possible = Recompute::ALL.map(|recompute| recompute.to_string()).join(", ");
            return Err(Error::Settings(format!(
                "--recompute auto needs a plan of a training: possible here are {possible}"
            )));
        };
        let mesh = RunMesh::new(config, &decoder)?;
        check_offload(config, &decoder)?;
        let initial_parameters =
            InitialParameters::from_weights(stored(weights), local_rank_count(config), config.seed);
        let identity = Identity { summary: "a batch".into(), fingerprint: 0 };
        let data = Dataset::from_loader(DataLoader::Tokens(batch), identity);
        let lr = config.lr(steps(config, &data.data_loader))?;
        Ok(Self { recompute, ..Self::without_plan(Value::Null, decoder, mesh, initial_parameters, None, data, lr) })
    }

    /// Makes the plan, and checks it against the free memory of the GPUs of this process's ranks, as far as that is known. Where
    /// the configuration does not say which activations are recomputed, the plan recomputes as few as memory allows.
    pub(crate) fn make_plan(&mut self, config: &TrainConfig, gpus: Vec<GpuMemoryUse>) -> Result<()> {
        let auto = || Recompute::ALL.into_iter().rev().collect();
        for recompute in config.recompute.map_or_else(auto, |chosen| vec![chosen]) {
            self.make_plan_with(recompute, config, gpus.clone())?;
            if self.plan.has_headroom() {
                break;
            }
        }
        Ok(())
    }

    /// Like [`make_plan`](Self::make_plan), with a fixed choice of the activations that are recomputed.
    pub(crate) fn make_plan_with(
        &mut self,
        recompute: Recompute,
        config: &TrainConfig,
        gpus: Vec<GpuMemoryUse>,
    ) -> Result<()> {
        self.recompute = recompute;
        let mut plan = Plan::new(config, self, self.decoder.config())?;
        if !gpus.is_empty() {
            plan.check_gpus(config, self, gpus)?;
        }
        self.plan = plan;
        Ok(())
    }

    /// A setup without a plan, at the first step.
    fn without_plan(
        config_json: Value,
        decoder: Decoder,
        mesh: RunMesh,
        initial_parameters: InitialParameters,
        tokenizer: Option<Tokenizer>,
        data: Dataset,
        lr: LrSchedule,
    ) -> Self {
        let shapes = decoder.shapes();
        let model = identity(decoder.config(), &shapes);
        let Dataset { data_loader, held_out, identity: data, notes, warnings, end_token } = data;
        Self {
            plan: Plan::default(),
            recompute: Recompute::default(),
            config_json,
            decoder,
            mesh,
            initial_parameters,
            tokenizer,
            held_out,
            first_step: 0,
            tokens_seen: 0,
            losses: LossStatistics::default(),
            lr,
            model,
            data,
            notes,
            warnings,
            end_token,
            data_loader,
            shapes,
        }
    }

    /// The batch whose shape the plan is made for: the fullest of a whole pass where batches differ, else the fullest of the
    /// first step.
    pub(crate) fn fullest_batch(&self, accumulation: usize) -> Option<Batch> {
        let first = self.data_loader.clone().next_step(accumulation).into_iter().max_by_key(Batch::real_tokens);
        self.data_loader.fullest_batch().or(first)
    }
}

/// Refuses `--offload-activations` for a model with so few layers that all activations would stay on the GPU.
fn check_offload(config: &TrainConfig, decoder: &Decoder) -> Result<()> {
    let layers = decoder.config().num_hidden_layers;
    if !config.offload_activations || layers > offload::RESIDENT_LAYERS {
        return Ok(());
    }
    Err(Error::Settings(format!(
        "--offload-activations has no effect: the model has {layers} layers, and what {} of them keep is on the GPU at any time; \
         leave it out",
        offload::RESIDENT_LAYERS
    )))
}

/// Number of steps of the run, those before it was resumed included.
fn steps(config: &TrainConfig, data_loader: &DataLoader) -> u64 {
    match config.length {
        TrainingLength::Steps(steps) => steps,
        // The last step of a pass, where the pass does not fill it, takes the rest from the next pass.
        TrainingLength::Epochs(epochs) => {
            (epochs * data_loader.steps_per_epoch(config.grad_accumulation)).ceil().max(1.0) as u64
        }
    }
}

/// Number of ranks in this process.
fn local_rank_count(config: &TrainConfig) -> usize {
    if config.local_ranks.is_some() { 1 } else { config.ranks() }
}

/// The identity of a model, by which its checkpoints are recognised.
pub(crate) fn identity(model: &Config, shapes: &BTreeMap<String, Vec<usize>>) -> Identity {
    let parameters: usize = shapes.values().map(|shape| shape.iter().product::<usize>()).sum();
    let shape_numbers = |(name, shape): (&String, &Vec<usize>)| -> Vec<u64> {
        name.bytes().map(u64::from).chain(shape.iter().map(|&d| d as u64)).collect()
    };
    Identity {
        summary: format!(
            "{}: {} layers, hidden {}, {} heads over {}, vocabulary {}, {} parameters",
            model.model_type,
            model.num_hidden_layers,
            model.hidden_size,
            model.num_attention_heads,
            model.num_key_value_heads(),
            model.vocab_size,
            grouped(parameters as u64)
        ),
        fingerprint: fingerprint(shapes.iter().flat_map(shape_numbers)),
    }
}

/// Refuses a configuration that computes something else than the checkpoint's: where names and shapes are the same, its weights
/// would be taken for those of another model. Keys that do not affect computation may change.
pub(crate) fn check_same_configuration(config: &TrainConfig, saved: &Checkpoint, now: &Value) -> Result<()> {
    let refuse = |problem: String| Err(Error::Checkpoint { path: saved.path.clone(), problem });
    let before = &saved.progress.config;
    if before.is_null() {
        return Ok(());
    }
    let parse = |json: &Value| serde_json::from_value::<Config>(json.clone());
    let old = match parse(before) {
        Ok(old) => old,
        Err(error) => return refuse(format!("damaged: the model's configuration: {error}")),
    };
    // The saved configuration was written and read as text, in which a number may lose its last bit; this one goes the same way.
    let now: Value = serde_json::from_str(&now.to_string()).map_err(model_error)?;
    let new = parse(&now).map_err(model_error)?;
    if old == new {
        return Ok(());
    }
    let keys = |json: &Value| json.as_object().into_iter().flat_map(|keys| keys.keys().cloned()).collect::<Vec<_>>();
    let all: BTreeSet<String> = keys(before).into_iter().chain(keys(&now)).collect();
    let affects_computation = |key: &&String| {
        let mut reverted = now.clone();
        reverted[*key] = before.get(*key).cloned().unwrap_or_default();
        before.get(*key) != now.get(*key) && parse(&reverted).ok().as_ref() != Some(&new)
    };
    let value_text = |json: &Value, key: &str| json.get(key).map_or("absent".into(), Value::to_string);
    let changes: Vec<String> = all
        .iter()
        .filter(affects_computation)
        .map(|key| format!("{key} was {}, now {}", value_text(before, key), value_text(&now, key)))
        .collect();
    let file = config.model_config.as_ref().or(config.model.as_ref()).map(|path| path.display().to_string());
    refuse(format!(
        "it belongs to another model: the configuration in {} has changed since it was saved ({}); change it back to go on",
        file.unwrap_or_default(),
        changes.join("; ")
    ))
}

pub(crate) fn model_error(error: impl std::fmt::Display) -> Error {
    Error::Model(error.to_string())
}

/// Writes the settings into the run's folder, with paths that mean the same from any current folder.
pub(crate) fn write_settings(config: &TrainConfig, lr: &LrSchedule) -> Result<()> {
    std::fs::create_dir_all(&config.out).map_err(Error::io("create", &config.out))?;
    let mut settings = config.settings.clone();
    let absolute = |path: &Path| path.canonicalize().map_err(Error::io("read", path));
    settings.out = None;
    // These defaults follow from other settings, which a resumed run may change: it keeps the values it began with.
    (settings.steps, settings.epochs, settings.warmup) = (Some(lr.steps), None, Some(lr.warmup));
    if let DataSource::Text(_) = config.source {
        settings.batch_size = Some(config.batch_size);
    }
    let Settings { model, model_config, tokenizer, chat_template, eval_data, token_cache, tensorboard, .. } =
        &mut settings;
    for path in [model, chat_template, eval_data].into_iter().flatten() {
        *path = absolute(path)?;
    }
    // Symbolic links stay: other files are looked up next to the link, not next to its target. Some of these folders may not
    // exist yet.
    // yet.
    for path in [model_config, tokenizer, token_cache, tensorboard].into_iter().flatten() {
        *path = std::path::absolute(&*path).map_err(Error::io("read", &*path))?;
    }
    match &config.source {
        DataSource::Text(sources) => {
            let with_weight = |source: &TextSource| Ok(source.with_path(absolute(&source.path)?));
            settings.data = Some(sources.iter().map(with_weight).collect::<Result<_>>()?);
        }
        DataSource::Tokens(path) => settings.tokens = Some(absolute(path)?),
    }
    crate::checkpoint::write_file(&config.out.join(RUN_FILE), settings.to_toml()?.as_bytes())
}
