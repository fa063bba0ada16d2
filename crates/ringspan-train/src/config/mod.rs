//! The configuration of a run, resolved from its settings before any work is done.

mod checks;
mod resolve;
mod source;

use crate::{
    data::{Overlong, Packing},
    error::{Error, Result},
    lr_schedule::{LrDecay, LrSchedule},
    optimizer::OptimizerConfig,
    settings::{RUN_FILE, Settings, TrainArgs},
};
use checks::refuse_used_folder;
use ringspan::comm::process_group::ProcessGroup;
use ringspan::kernel::Isa;
use ringspan::{LayoutKind, StrategyKind};
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::{DeviceName, Precision, Recompute};
use ringspan_models::{Lora, RopeScaling, folder::SavedType};
pub use source::{DataSource, TextSource};
use std::{path::PathBuf, str::FromStr, time::Duration};

/// The settings that a resumed run may change: its checkpoint and its position in the data do not depend on them.
const CHANGEABLE: [&str; 37] = [
    "steps",
    "epochs",
    "lr",
    "weight-decay",
    "warmup",
    "schedule",
    "grad-clip",
    "lora-dropout",
    "attention-dropout",
    "ring",
    "ulysses",
    "dp-replicate",
    "dp-shard",
    "tp",
    "ep",
    "moe-dp",
    "sharding",
    "strategy",
    "layout",
    "threads",
    "device",
    "dtype",
    "recompute",
    "activations",
    "offload-activations",
    "deadline",
    "save-every",
    "keep",
    "eval-every",
    "eval-tokens",
    "sample-tokens",
    "export-dtype",
    "token-cache",
    "check-data",
    "tensorboard",
    "spike-factor",
    "spike-steps",
];

/// Whether parameters, gradients and optimiser state are sharded over the ranks that share a copy of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharding {
    /// All of them are sharded.
    #[default]
    Full,
    /// Nothing is sharded: each rank keeps all that it computes with.
    None,
}

impl FromStr for Sharding {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> std::result::Result<Self, Self::Err> {
        match given {
            "full" => Ok(Self::Full),
            "none" => Ok(Self::None),
            _ => Err(ringspan::Error::Unknown { what: "sharding", given: given.into(), possible: "full, none" }),
        }
    }
}

/// The tokens over which the router's auxiliary loss counts the load of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RouterLossScope {
    /// All tokens of a step.
    #[default]
    Step,
    /// The tokens of each micro-batch, whose auxiliary losses are averaged.
    MicroBatch,
}

impl FromStr for RouterLossScope {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> std::result::Result<Self, Self::Err> {
        match given {
            "step" => Ok(Self::Step),
            "micro-batch" => Ok(Self::MicroBatch),
            _ => Err(ringspan::Error::Unknown {
                what: "router-aux-loss-over",
                given: given.into(),
                possible: "step, micro-batch",
            }),
        }
    }
}

/// The configuration of a training run, complete and free of contradictions.
#[derive(Debug, Clone)]
pub struct TrainConfig {
    /// The settings that this configuration was resolved from, as the run's folder keeps them.
    pub settings: Settings,
    /// Model to start from; none for a new model.
    pub model: Option<PathBuf>,
    /// Configuration file of a new model; none for the small built-in one.
    pub model_config: Option<PathBuf>,
    /// A new model's tokenizer; none for the one next to its configuration.
    pub tokenizer: Option<PathBuf>,
    /// The training data.
    pub source: DataSource,
    /// Chat template that replaces the model's own.
    pub chat_template: Option<PathBuf>,
    /// Texts for evaluation; none where documents of the training data are held out.
    pub eval_data: Option<PathBuf>,
    /// Share of the documents that is held out where `eval_data` is none.
    pub held_out: f64,
    /// Folder of the token cache.
    pub token_cache: PathBuf,
    /// Whether every byte of the text is compared with the text that cached tokens were made of.
    pub check_data: bool,
    /// How documents are packed into sequences.
    pub packing: Packing,
    /// How documents longer than a sequence are treated; none for the default of their kind.
    pub overlong: Option<Overlong>,
    /// Output folder.
    pub out: PathBuf,
    /// Whether to go on from the newest checkpoint in `out`.
    pub resume: bool,
    /// Scaling of the model's rotary embedding; none for what its configuration says.
    pub rope_scaling: Option<RopeScaling>,
    /// Adapters that are trained instead of the model: new ones, or the one whose folder is `model`. If this is none, an adapter
    /// in `model` is merged into its base model.
    pub lora: Option<Lora>,
    /// Whether the model with the adapters merged in is saved, too.
    pub lora_merge: bool,
    /// Type in which the trained model is saved; none for the type of the model it began with.
    pub export_dtype: Option<SavedType>,
    /// Tokens S per sequence of text; a token file has its own.
    pub sequence_length: usize,
    /// Sequences B of text per micro-batch, over all ranks.
    pub batch_size: usize,
    /// Ring size R.
    pub ring: usize,
    /// Ulysses size U.
    pub ulysses: usize,
    /// Number of copies of the model, each with other sequences.
    pub dp_replicate: usize,
    /// Number of ranks (each a ring x Ulysses x tp group) that share one copy of the model and have different sequences.
    pub dp_shard: usize,
    /// Number of tensor parallel ranks, which share the width of layers.
    pub tp: usize,
    /// Number of expert parallel ranks, each with whole experts of its own; none where the settings do not say.
    pub ep: Option<usize>,
    /// Number of copies of the experts; none where the settings do not say.
    pub moe_dp: Option<usize>,
    /// Whether the ranks of a copy shard its parameters.
    pub sharding: Sharding,
    /// The strategy by which keys or queries travel between ranks.
    pub strategy: StrategyKind,
    /// How tokens are distributed over ranks.
    pub layout: LayoutKind,
    /// Number of threads of a rank.
    pub threads: usize,
    /// The instruction set of attention and of products on the CPU, which benchmarks choose; none for the fastest.
    pub isa: Option<Isa>,
    /// The device that computes the model.
    pub device: DeviceName,
    /// The type in which the model computes.
    pub dtype: Precision,
    /// Number of ranks on this machine where each is a process of its own; none where all are threads of this one.
    pub local_ranks: Option<usize>,
    /// Returns the most bytes that the program's allocator gave out at once since its last call; none where it does not count.
    pub peak_allocated: Option<fn() -> u64>,
    /// The activations that are recomputed for the backward pass; none for as few as the free memory allows.
    pub recompute: Option<Recompute>,
    /// The type in which the other activations are stored.
    pub activations: Storage,
    /// Whether stored activations are offloaded to CPU memory.
    pub offload_activations: bool,
    /// How long a rank waits for another.
    pub deadline: Duration,
    /// The optimiser, with its constants.
    pub optimizer: OptimizerConfig,
    /// Number of steps or epochs.
    pub length: TrainingLength,
    /// The highest learning rate.
    pub peak_lr: f64,
    /// Steps over which the learning rate rises; none for a tenth of all, at most 100.
    pub warmup: Option<u64>,
    /// How the learning rate develops after its rise.
    pub decay: LrDecay,
    /// The learning rates of the run that is resumed, as far as they are known.
    pub lr_before: Option<LrSchedule>,
    /// Largest L2 norm of the gradient; larger gradients are scaled down to it.
    pub grad_clip: Option<f64>,
    /// Number of micro-batches per step.
    pub grad_accumulation: usize,
    /// Factor of the router's auxiliary loss, which balances the load of experts; none for what the model's configuration says.
    pub router_aux_loss: Option<f64>,
    /// The tokens over which that loss counts the load of experts.
    pub router_loss_scope: RouterLossScope,
    /// Dropout of attention's weights; none for what the model's configuration says.
    pub attention_dropout: Option<f64>,
    /// Seed of all random draws.
    pub seed: u64,
    /// Steps between checkpoints; none for one at the end.
    pub save_every: Option<u64>,
    /// Number of checkpoints to keep.
    pub keep: usize,
    /// Steps between evaluations on the held-out text; none for one at the end.
    pub eval_every: Option<u64>,
    /// Most held-out tokens that an evaluation reads.
    pub eval_tokens: usize,
    /// Most tokens of the sample at the end.
    pub sample_tokens: usize,
    /// Folder for TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// A loss above this many times its running mean is a spike; none for no limit.
    pub spike_factor: Option<f64>,
    /// Number of consecutive spikes that stop a run.
    pub spike_steps: u64,
}

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrainingLength {
    /// A number of steps.
    Steps(u64),
    /// A number of passes over the text; the number of steps follows once the text is read.
    Epochs(f64),
}

impl TrainConfig {
    /// The run that the arguments of `ringspan train` ask for.
    ///
    /// # Errors
    /// [`Error::Settings`] or [`Error::Core`] for an unknown key or word, a contradiction, a setting without effect, a
    /// number out of range; [`Error::Io`] for a file that cannot be read.
    pub fn from_args(args: &TrainArgs) -> Result<Self> {
        let requested = match &args.config {
            Some(path) => args.settings.overriding(&Settings::read(path)?)?,
            None => args.settings.clone(),
        };
        let Some(out) = requested.resume.clone() else {
            let config = Self::resolve(requested)?;
            refuse_used_folder(&config.out)?;
            return Ok(config);
        };
        for key in requested.keys()? {
            if !CHANGEABLE.contains(&key.as_str()) {
                return Err(Error::Settings(format!(
                    "--{key} cannot change when a run is resumed; what can: {}",
                    CHANGEABLE.join(", ")
                )));
            }
        }
        let run_file = out.join(RUN_FILE);
        if !run_file.exists() {
            return Err(Error::Settings(format!(
                "--resume {}: there is no run in this folder ({} is missing)",
                out.display(),
                run_file.display()
            )));
        }
        let saved = Settings { out: Some(out.clone()), ..Settings::read(&run_file)? };
        let mut settings = Settings { out: Some(out), ..requested.overriding(&saved)? };
        // The saved warm-up may belong to a longer run than is asked for.
        if let (None, Some(warmup), Some(steps)) = (requested.warmup, settings.warmup, settings.steps) {
            settings.warmup = Some(warmup.min(steps.saturating_sub(1)));
        }
        // Settings that cannot be resolved were written by another version; their learning rates stay unknown.
        let lr_before = Self::resolve(saved).ok().and_then(|saved| match saved.length {
            TrainingLength::Steps(steps) => saved.lr(steps).ok(),
            TrainingLength::Epochs(_) => None,
        });
        Ok(Self { resume: true, lr_before, ..Self::resolve(settings)? })
    }

    /// The learning rates of a run of `steps` steps.
    ///
    /// # Errors
    /// A warm-up that does not end within `steps`.
    pub fn lr(&self, steps: u64) -> Result<LrSchedule> {
        let warmup = match (self.warmup, self.length) {
            // The saved warm-up may belong to a longer run than is asked for.
            (Some(warmup), TrainingLength::Epochs(_)) if self.resume => warmup.min(steps.saturating_sub(1)),
            (warmup, _) => warmup.unwrap_or((steps / 10).min(100)),
        };
        if warmup >= steps {
            let length = match self.length {
                TrainingLength::Steps(_) => String::new(),
                TrainingLength::Epochs(epochs) => format!(" (--epochs {epochs})"),
            };
            return Err(Error::Settings(format!(
                "--warmup {warmup} does not end within --steps {steps}{length}: at most {}",
                steps.saturating_sub(1)
            )));
        }
        Ok(LrSchedule { peak: self.peak_lr, warmup, steps, decay: self.decay })
    }

    /// Records where the ranks run: those of a machine share its memory and, where `threads` is not set, its cores.
    pub fn set_local_ranks(&mut self, processes: &ProcessGroup) {
        self.local_ranks = processes.local();
        if let (Some(local), None) = (self.local_ranks, self.settings.threads) {
            self.threads = (cores() / local).max(1);
        }
    }

    /// Whether sources of text are mixed by weights, not by their sizes.
    pub(crate) fn mixes_by_weight(&self) -> bool {
        matches!(&self.source, DataSource::Text(all) if all.iter().any(|source| source.weight.is_some()))
    }

    /// Number of ranks in all.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.data_ranks() * self.ring * self.ulysses * self.tp
    }

    /// Number of parts into which a batch's rows are split: groups of ranks that work on the same sequences.
    #[must_use]
    pub fn data_ranks(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod test;
