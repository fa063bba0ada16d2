//! The configuration of a run, made of its settings before any work is done.

mod checks;
mod resolve;
mod source;

use crate::{
    data::{Overlong, Packing},
    error::{Error, Result},
    lr_schedule::{Decay, LrSchedule},
    optimizer::Method,
    settings::{Settings, TrainArgs},
};
use checks::refuse_used_folder;
use ringspan::comm::ranks::Ranks;
use ringspan::{LayoutKind, Strategy};
use ringspan_candle::kept::Storage;
use ringspan_candle::{DeviceName, Precision, Recompute};
use ringspan_models::{Lora, RopeScaling, folder::SavedType};
pub use source::{Source, TextSource};
use std::{path::PathBuf, str::FromStr, time::Duration};

/// The settings of a run, kept in its folder so that it can be resumed.
pub(crate) const RUN_FILE: &str = "train.toml";

/// What a resumed run may change: nothing that its checkpoint or its place in the data depends on.
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

/// What of parameters, gradients and optimiser state is cut across the ranks that share a copy of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharding {
    /// All of it.
    #[default]
    Full,
    /// Nothing: each rank holds a copy.
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

/// Over which tokens the load of experts is counted for the loss that keeps it even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RouterLossOver {
    /// Those of a whole step.
    #[default]
    Step,
    /// Those of each micro-batch, whose losses are averaged.
    MicroBatch,
}

impl FromStr for RouterLossOver {
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

/// A training run, complete and free of contradictions.
#[derive(Debug, Clone)]
pub struct TrainConfig {
    /// The settings this was made of, as they are kept beside the checkpoints.
    pub settings: Settings,
    /// Model to start from; none for a new model.
    pub model: Option<PathBuf>,
    /// What a new model is; none for the small one that is built in.
    pub model_config: Option<PathBuf>,
    /// A new model's tokenizer, if not the one beside its configuration.
    pub tokenizer: Option<PathBuf>,
    /// Data.
    pub source: Source,
    /// Template of conversations, instead of the model's.
    pub chat_template: Option<PathBuf>,
    /// Texts that the model is judged by; none where documents of the data are held out.
    pub eval_data: Option<PathBuf>,
    /// Share of the documents that is held out where there are no such texts.
    pub held_out: f64,
    /// Where the tokens of a text are kept.
    pub token_cache: PathBuf,
    /// Whether every byte of the text is compared with those that kept tokens were made of.
    pub check_data: bool,
    /// How documents fill sequences.
    pub packing: Packing,
    /// What becomes of documents longer than a sequence; none for what is usual for their kind.
    pub overlong: Option<Overlong>,
    /// Output folder.
    pub out: PathBuf,
    /// Whether to go on from the newest checkpoint in `out`.
    pub resume: bool,
    /// How the model's rotary embedding is stretched, if not as its folder says.
    pub rope_scaling: Option<RopeScaling>,
    /// Adapters that are trained instead of the model: new ones, or those whose folder is `model`. If there are none, an adapter
    /// in `model` is merged into its model.
    pub lora: Option<Lora>,
    /// Whether the model is saved, too, with the adapters merged in.
    pub lora_merge: bool,
    /// Type in which the trained model is saved; none for that of the model it began with.
    pub export_dtype: Option<SavedType>,
    /// Tokens S of a sequence (of text; a token file brings its own).
    pub sequence_length: usize,
    /// Sequences B of a micro-batch, over all ranks (of text).
    pub batch_size: usize,
    /// Ring size R.
    pub ring: usize,
    /// Ulysses size U.
    pub ulysses: usize,
    /// Copies of the model.
    pub dp_replicate: usize,
    /// Parts of a copy's sequences.
    pub dp_shard: usize,
    /// Ranks that share the width of layers.
    pub tp: usize,
    /// Ranks that share the experts, each with whole ones of its own; none where nothing is said.
    pub ep: Option<usize>,
    /// Copies of the experts; none where nothing is said.
    pub moe_dp: Option<usize>,
    /// Whether the ranks of a copy share its parameters.
    pub sharding: Sharding,
    /// How keys and values travel.
    pub strategy: Strategy,
    /// Who holds which tokens.
    pub layout: LayoutKind,
    /// Threads of a rank.
    pub threads: usize,
    /// What computes the model.
    pub device: DeviceName,
    /// In which type it is computed.
    pub dtype: Precision,
    /// Ranks on this machine where each is a process of its own; none where all are threads of this one.
    pub local_ranks: Option<usize>,
    /// Where the program's allocator counts: most bytes that it gave out at once since this was called last.
    pub allocated: Option<fn() -> u64>,
    /// The activations that are recomputed for the backward pass; none for as few as the memory that is free allows.
    pub recompute: Option<Recompute>,
    /// How what is not computed again is stored.
    pub activations: Storage,
    /// Whether it waits in the memory of the CPU, not on the GPU.
    pub offload_activations: bool,
    /// How long a rank waits for another.
    pub deadline: Duration,
    /// Optimiser.
    pub method: Method,
    /// How long the run is.
    pub length: Length,
    /// The highest learning rate.
    pub peak_lr: f64,
    /// Steps over which it rises, if not a tenth of all, at most 100.
    pub warmup: Option<u64>,
    /// What follows the rise.
    pub decay: Decay,
    /// Those of the run that is resumed, as far as is known.
    pub lr_before: Option<LrSchedule>,
    /// Longest gradient.
    pub grad_clip: Option<f64>,
    /// Micro-batches of a step.
    pub grad_accumulation: usize,
    /// Factor of the loss that keeps experts even, if not as the model's configuration says.
    pub router_aux_loss: Option<f64>,
    /// Over which tokens their load is counted.
    pub router_loss_over: RouterLossOver,
    /// Share of attention's weights that is dropped, if not as the model's configuration says.
    pub attention_dropout: Option<f64>,
    /// Seed of all random draws.
    pub seed: u64,
    /// Steps between checkpoints; none for one at the end.
    pub save_every: Option<u64>,
    /// Checkpoints to keep.
    pub keep: usize,
    /// Steps between looks at the held-out text; none for one at the end.
    pub eval_every: Option<u64>,
    /// Most held-out tokens of a look.
    pub eval_tokens: usize,
    /// Most tokens of the sample at the end.
    pub sample_tokens: usize,
    /// Folder for event files.
    pub tensorboard: Option<PathBuf>,
    /// Above this many times its running mean a loss is a spike.
    pub spike_factor: Option<f64>,
    /// Spikes in a row that stop a run.
    pub spike_steps: u64,
}

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Length {
    /// So many steps.
    Steps(u64),
    /// So many passes over the text: the steps are known when it is.
    Epochs(f64),
}

impl TrainConfig {
    /// The run that the arguments of `ringspan train` ask for.
    ///
    /// # Errors
    /// [`Error::Settings`] or [`Error::Core`] for an unknown key or word, a contradiction, a setting without effect, a
    /// number out of range; [`Error::Io`] for a file that cannot be read.
    pub fn from_args(args: &TrainArgs) -> Result<Self> {
        let given = match &args.config {
            Some(path) => args.settings.over(&Settings::read(path)?)?,
            None => args.settings.clone(),
        };
        let Some(out) = given.resume.clone() else {
            let config = Self::resolve(given)?;
            refuse_used_folder(&config.out)?;
            return Ok(config);
        };
        for key in given.given()? {
            if !CHANGEABLE.contains(&key.as_str()) {
                return Err(Error::Settings(format!(
                    "--{key} cannot change when a run is resumed; what can: {}",
                    CHANGEABLE.join(", ")
                )));
            }
        }
        let kept = out.join(RUN_FILE);
        if !kept.exists() {
            return Err(Error::Settings(format!(
                "--resume {}: there is no run in this folder ({} is missing)",
                out.display(),
                kept.display()
            )));
        }
        let before = Settings { out: Some(out.clone()), ..Settings::read(&kept)? };
        let mut settings = Settings { out: Some(out), ..given.over(&before)? };
        // The warm-up of a longer run than is asked for now.
        if let (None, Some(warmup), Some(steps)) = (given.warmup, settings.warmup, settings.steps) {
            settings.warmup = Some(warmup.min(steps.saturating_sub(1)));
        }
        // What cannot be resolved now was written by another version: nothing is said of it then.
        let lr_before = Self::resolve(before).ok().and_then(|before| match before.length {
            Length::Steps(steps) => before.lr(steps).ok(),
            Length::Epochs(_) => None,
        });
        Ok(Self { resume: true, lr_before, ..Self::resolve(settings)? })
    }

    /// The learning rates of a run of so many steps.
    ///
    /// # Errors
    /// A warm-up that does not end within them.
    pub fn lr(&self, steps: u64) -> Result<LrSchedule> {
        let warmup = match (self.warmup, self.length) {
            // That of a longer run than is asked for now.
            (Some(warmup), Length::Epochs(_)) if self.resume => warmup.min(steps.saturating_sub(1)),
            (warmup, _) => warmup.unwrap_or((steps / 10).min(100)),
        };
        if warmup >= steps {
            let length = match self.length {
                Length::Steps(_) => String::new(),
                Length::Epochs(epochs) => format!(" (--epochs {epochs})"),
            };
            return Err(Error::Settings(format!(
                "--warmup {warmup} does not end within --steps {steps}{length}: at most {}",
                steps.saturating_sub(1)
            )));
        }
        Ok(LrSchedule { peak: self.peak_lr, warmup, steps, decay: self.decay })
    }

    /// Takes note of where the ranks run: those of a machine share its memory and, where nothing is set, its cores.
    pub fn place(&mut self, ranks: &Ranks) {
        self.local_ranks = ranks.local();
        if let (Some(local), None) = (self.local_ranks, self.settings.threads) {
            self.threads = (cores() / local).max(1);
        }
    }

    /// Whether sources of text are mixed by weights, not by their sizes.
    pub(crate) fn weighted(&self) -> bool {
        matches!(&self.source, Source::Text(all) if all.iter().any(|source| source.weight.is_some()))
    }

    /// Ranks in all.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.data_ranks() * self.ring * self.ulysses * self.tp
    }

    /// Parts of a batch: groups of ranks that share its sequences.
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
