//! Everything read and checked before ranks start: model, data, mesh, the checkpoint to go on from.

use crate::{
    checkpoint::{Checkpoints, Identity, LossStatistics},
    config::{TrainConfig, TrainingLength},
    data::{Batch, Sequence},
    data_loader::DataLoader,
    dataset::{CachePolicy, Dataset, TokenizationMonitor},
    error::{Error, Result},
    initial_model::InitialModel,
    initial_parameters::InitialParameters,
    lr_schedule::LrSchedule,
    mesh::RunMesh,
    model_identity::{check_same_configuration, identity},
    shards::SharedGathers,
    spec::{BatchSpec, RunSpec},
    tokenizer::Tokenizer,
};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::model::stored;
use ringspan_candle::{DeviceName, Weights, offload};
use ringspan_models::{Decoder, adapter};
use serde_json::Value;
use std::sync::Arc;

/// A run that is ready to start. It is the same on every rank.
pub(crate) struct Setup {
    /// The specification of the run, from which its plan is made.
    pub(crate) spec: RunSpec,
    /// `config.json` as it is saved with the model.
    pub(crate) config_json: Value,
    /// The source of the parameters before the first step.
    pub(crate) initial_parameters: InitialParameters,
    pub(crate) tokenizer: Option<Tokenizer>,
    pub(crate) data_loader: DataLoader,
    /// Held-out sequences; empty for a file of tokens.
    pub(crate) held_out: Vec<Sequence>,
    /// Tokens seen before this run.
    pub(crate) tokens_seen: u64,
    /// The watchdog's statistics of the losses before this run.
    pub(crate) losses: LossStatistics,
    pub(crate) model: Identity,
    pub(crate) data: Identity,
    /// The token that ends a document or an answer, where there is one.
    pub(crate) end_token: Option<u32>,
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
        let mut setup =
            Self::at_first_step(config, (config_json, decoder, mesh), initial_parameters, tokenizer, data, lr);
        if config.resume {
            let saved = Checkpoints::new(&config.out, config.keep).newest(&setup.model, &setup.data)?;
            check_same_configuration(config, &saved, &setup.config_json)?;
            if saved.progress.step >= setup.spec.lr.steps {
                return Err(Error::Settings(format!(
                    "the run in {out} has done {} of {} steps: to go on, give more with --steps or --epochs; `ringspan export {out}` writes \
                     its model once more",
                    saved.progress.step,
                    setup.spec.lr.steps,
                    out = config.out.display()
                )));
            }
            setup.data_loader = data_loader.resume_at(&saved.progress.source_positions());
            setup.spec.first_step = saved.progress.step;
            setup.tokens_seen = saved.progress.tokens;
            setup.losses = saved.progress.losses;
            setup.initial_parameters = setup.initial_parameters.with_checkpoint(saved, &setup.spec.decoder)?;
        }
        setup.spec.batches = BatchSpec::new(&setup.data_loader, setup.spec.lr.steps, config.grad_accumulation);
        Ok(setup)
    }

    /// The setup of a loaded model and one batch, of which no plan is made.
    pub(crate) fn for_batch(config: &TrainConfig, decoder: Decoder, weights: Weights, batch: Batch) -> Result<Self> {
        let mesh = RunMesh::new(config, &decoder)?;
        check_offload(config, &decoder)?;
        let initial_parameters =
            InitialParameters::from_weights(stored(weights), local_rank_count(config), config.seed);
        let identity = Identity { summary: "a batch".into(), fingerprint: 0 };
        let data = Dataset::from_loader(DataLoader::Tokens(batch), identity);
        let lr = config.lr(steps(config, &data.data_loader))?;
        Ok(Self::at_first_step(config, (Value::Null, decoder, mesh), initial_parameters, None, data, lr))
    }

    /// The setup of a run that begins, without its batches.
    fn at_first_step(
        config: &TrainConfig,
        (config_json, decoder, mesh): (Value, Decoder, RunMesh),
        initial_parameters: InitialParameters,
        tokenizer: Option<Tokenizer>,
        data: Dataset,
        lr: LrSchedule,
    ) -> Self {
        let shapes = decoder.shapes();
        let model = identity(decoder.config(), &shapes);
        let Dataset { data_loader, held_out, identity: data, notes, warnings, end_token } = data;
        let spec = RunSpec {
            decoder,
            mesh,
            shapes,
            lr,
            first_step: 0,
            batches: BatchSpec::default(),
            model: model.summary.clone(),
            data: data.summary.clone(),
            starts_from_adapter: config.model.as_deref().is_some_and(adapter::is_adapter_folder),
            tokenizer: tokenizer.as_ref().map(|tokenizer| (tokenizer.path().to_owned(), tokenizer.vocabulary_size())),
            notes,
            warnings,
        };
        Self {
            spec,
            config_json,
            initial_parameters,
            tokenizer,
            held_out,
            tokens_seen: 0,
            losses: LossStatistics::default(),
            model,
            data,
            end_token,
            data_loader,
        }
    }

    /// The gathered parameters that the ranks of this process share; none where each has its own copy, in another process or on
    /// a GPU.
    pub(crate) fn shared_gathers(&self, processes: &ProcessGroup) -> Option<Arc<SharedGathers>> {
        (self.spec.mesh.shares_memory && processes.local().is_none()).then(Arc::default)
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
