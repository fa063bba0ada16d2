//! Settings to a configuration: defaults filled in, contradictions refused, before any work is done.

mod checks;

use crate::{
    data::Packing,
    error::{Error, Result},
    lr_schedule::{Decay, LrSchedule},
    optimizer::{Method, OptimizerKind},
    settings::{Settings, TrainArgs},
};
use checks::{lora, method, refuse_used_folder, within};
use ringspan::comm::ranks::Ranks;
use ringspan::{LayoutKind, Strategy};
use ringspan_candle::kept::Storage;
use ringspan_models::{Lora, Recompute, RopeScaling};
use std::{path::PathBuf, str::FromStr, time::Duration};

/// The settings of a run, kept in its folder so that it can be resumed.
pub(crate) const RUN_FILE: &str = "train.toml";

/// What a resumed run may change: nothing that its checkpoint or its place in the data depends on.
const CHANGEABLE: [&str; 29] = [
    "steps",
    "lr",
    "weight-decay",
    "warmup",
    "schedule",
    "grad-clip",
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
    "recompute",
    "activations",
    "deadline",
    "save-every",
    "keep",
    "eval-every",
    "eval-tokens",
    "sample-tokens",
    "token-cache",
    "tensorboard",
    "spike-factor",
    "spike-steps",
];

/// Where tokens come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Text, packed into sequences.
    Text(PathBuf),
    /// A file of tokens, taken whole each step.
    Tokens(PathBuf),
}

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

/// A training run, complete and free of contradictions.
#[derive(Debug, Clone)]
pub struct TrainConfig {
    /// The settings this was made of, as they are kept beside the checkpoints.
    pub settings: Settings,
    /// Model folder to start from; none for a new model.
    pub model: Option<PathBuf>,
    /// Data.
    pub source: Source,
    /// Template of conversations, instead of the model's.
    pub chat_template: Option<PathBuf>,
    /// Where the tokens of a text are kept.
    pub token_cache: PathBuf,
    /// How documents fill sequences.
    pub packing: Packing,
    /// Output folder.
    pub out: PathBuf,
    /// Whether to go on from the newest checkpoint in `out`.
    pub resume: bool,
    /// How the model's rotary embedding is stretched, if not as its folder says.
    pub rope_scaling: Option<RopeScaling>,
    /// Adapters that are trained instead of the model.
    pub lora: Option<Lora>,
    /// Whether the model is saved, too, with the adapters merged in.
    pub lora_merge: bool,
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
    /// Ranks on this machine where each is a process of its own; none where all are threads of this one.
    pub local_ranks: Option<usize>,
    /// Where the program's allocator counts: most bytes that it gave out at once since this was called last.
    pub allocated: Option<fn() -> u64>,
    /// What is computed again for the backward pass.
    pub recompute: Recompute,
    /// How what is not computed again is stored.
    pub activations: Storage,
    /// How long a rank waits for another.
    pub deadline: Duration,
    /// Optimiser.
    pub method: Method,
    /// Learning rates, and with them the number of steps.
    pub lr: LrSchedule,
    /// Longest gradient.
    pub grad_clip: Option<f64>,
    /// Micro-batches of a step.
    pub grad_accumulation: usize,
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
        let mut settings = given.over(&Settings::read(&kept)?)?;
        settings.out = Some(out);
        Ok(Self { resume: true, ..Self::resolve(settings)? })
    }

    /// Fills in the defaults and refuses what does not fit.
    ///
    /// # Errors
    /// As [`Self::from_args`].
    pub fn resolve(settings: Settings) -> Result<Self> {
        let s = &settings;
        let no_effect =
            |flag: &str, why: &str| Err(Error::Settings(format!("--{flag} has no effect {why}; leave it out")));
        let positive = |flag: &str, value: usize| match value {
            0 => Err(Error::Settings(format!("--{flag} is 0, but must be at least 1"))),
            value => Ok(value),
        };

        let source = match (&s.data, &s.tokens) {
            (Some(_), Some(_)) => {
                return Err(Error::Settings("--data and --tokens exclude each other: text or ready tokens".into()));
            }
            (None, Some(tokens)) => Source::Tokens(tokens.clone()),
            (data, None) => Source::Text(data.clone().unwrap_or_else(|| ".".into())),
        };
        if matches!(source, Source::Tokens(_)) {
            for (flag, given) in [
                ("chat-template", s.chat_template.is_some()),
                ("token-cache", s.token_cache.is_some()),
                ("packing", s.packing.is_some()),
                ("sequence-length", s.sequence_length.is_some()),
                ("batch-size", s.batch_size.is_some()),
                ("eval-every", s.eval_every.is_some()),
                ("eval-tokens", s.eval_tokens.is_some()),
                ("sample-tokens", s.sample_tokens.is_some()),
            ] {
                if given {
                    return no_effect(flag, "with --tokens: each step takes the whole file, and nothing is held out");
                }
            }
        }

        let lora = lora(s)?;
        let rope_scaling = match &s.rope_scaling {
            Some(_) if s.model.is_none() => {
                return no_effect("rope-scaling", "without --model: a new model is made for its sequences");
            }
            Some(text) => Some(
                text.parse()
                    .map_err(|error: ringspan_models::Error| Error::Settings(format!("--rope-scaling: {error}")))?,
            ),
            None => None,
        };
        if rope_scaling.is_some() && lora.is_some() && s.lora_merge != Some(true) {
            return Err(Error::Settings(
                "--rope-scaling beside --lora-rank needs --lora-merge: the folder of an adapter cannot say how its model \
                 is stretched, so whoever reads it would not stretch it"
                    .into(),
            ));
        }
        let axes = [s.ulysses, s.dp_replicate, s.dp_shard, s.tp];
        let another = axes.iter().any(Option::is_some);
        let ring = positive("ring", s.ring.unwrap_or(if another { 1 } else { 2 }))?;
        let ulysses = positive("ulysses", s.ulysses.unwrap_or(1))?;
        let dp_replicate = positive("dp-replicate", s.dp_replicate.unwrap_or(1))?;
        let dp_shard = positive("dp-shard", s.dp_shard.unwrap_or(1))?;
        let tp = positive("tp", s.tp.unwrap_or(1))?;
        for (flag, size) in [("ep", s.ep), ("moe-dp", s.moe_dp)] {
            positive(flag, size.unwrap_or(1))?;
        }
        let data_ranks = dp_replicate.saturating_mul(dp_shard);
        let sharding = s.sharding.as_deref().unwrap_or("full").parse()?;
        if sharding == Sharding::None && dp_shard > 1 {
            return Err(Error::Settings(format!(
                "--sharding none contradicts --dp-shard {dp_shard}: ranks that hold whole copies are --dp-replicate {}",
                data_ranks
            )));
        }
        // A layout, a strategy and a sharding are accepted on one rank too, so that one configuration runs on any mesh.
        let strategy = s.strategy.as_deref().unwrap_or("ring").parse()?;
        let layout = s.layout.as_deref().unwrap_or("per-document-zigzag").parse()?;

        let sequence_length = s.sequence_length.unwrap_or(8192);
        if sequence_length < 2 {
            return Err(Error::Settings(format!(
                "--sequence-length is {sequence_length}, but a token can be predicted only from one before it: at least 2"
            )));
        }
        let batch_size = positive("batch-size", s.batch_size.unwrap_or(data_ranks))?;
        if batch_size < data_ranks {
            return Err(Error::Settings(format!(
                "--batch-size {batch_size} leaves {} of the {data_ranks} parts of a batch (--dp-replicate {dp_replicate} x \
                 --dp-shard {dp_shard}) without a sequence: at least {data_ranks}",
                data_ranks - batch_size
            )));
        }
        let grad_accumulation = positive("grad-accumulation", s.grad_accumulation.unwrap_or(1))?;
        let packing: Packing = s.packing.as_deref().unwrap_or("in-order").parse()?;
        if packing == Packing::Balanced && batch_size.saturating_mul(grad_accumulation) == 1 {
            return no_effect(
                "packing balanced",
                "on one sequence a step: --batch-size 1 x --grad-accumulation 1 leaves nothing to deal",
            );
        }

        let steps = s.steps.unwrap_or(220);
        if steps == 0 {
            return Err(Error::Settings("--steps is 0, but must be at least 1".into()));
        }
        let warmup = s.warmup.unwrap_or((steps / 10).min(100));
        if warmup >= steps {
            return Err(Error::Settings(format!(
                "--warmup {warmup} does not end within --steps {steps}: at most {}",
                steps - 1
            )));
        }
        let kind: OptimizerKind = s.optimizer.as_deref().unwrap_or("adamw").parse()?;
        let method = method(kind, s)?;
        let new = s.model.is_none();
        let peak = s.lr.unwrap_or(match (kind, new) {
            (OptimizerKind::AdamW, true) => 5e-3,
            (OptimizerKind::AdamW, false) if lora.is_some() => 2e-4,
            (OptimizerKind::AdamW, false) => 1e-5,
            (OptimizerKind::Sgd, true) => 0.1,
            (OptimizerKind::Sgd, false) => 1e-3,
        });
        within("lr", peak, 0.0, f64::MAX)?;
        let decay: Decay = s.schedule.as_deref().unwrap_or("cosine").parse()?;
        let grad_clip = s.grad_clip.unwrap_or(1.0);
        within("grad-clip", grad_clip, 0.0, f64::MAX)?;

        match (s.spike_factor, s.spike_steps) {
            (Some(factor), _) if !(factor > 1.0 && factor.is_finite()) => {
                return Err(Error::Settings(format!("--spike-factor is {factor}, but must be above 1 and finite")));
            }
            (None, Some(_)) => return no_effect("spike-steps", "without --spike-factor, which says what a spike is"),
            (_, Some(0)) => return Err(Error::Settings("--spike-steps is 0, but must be at least 1".into())),
            _ => {}
        }

        let deadline = s.deadline.unwrap_or(600.0);
        let deadline = Duration::try_from_secs_f64(deadline).ok().filter(|d| !d.is_zero()).ok_or_else(|| {
            Error::Settings(format!("--deadline is {deadline} seconds, but must be above 0 and finite"))
        })?;
        let ranks = ring.saturating_mul(ulysses).saturating_mul(tp).saturating_mul(data_ranks);
        let every = |n: Option<u64>, default: u64| Some(n.unwrap_or(default)).filter(|&n| n > 0);
        let out = s.out.clone().unwrap_or_else(|| "ringspan-out".into());
        Ok(Self {
            model: s.model.clone(),
            source,
            chat_template: s.chat_template.clone(),
            token_cache: s.token_cache.clone().unwrap_or_else(|| out.join("tokens")),
            packing,
            out,
            resume: false,
            rope_scaling,
            lora,
            lora_merge: s.lora_merge.unwrap_or(false),
            sequence_length,
            batch_size,
            ring,
            ulysses,
            dp_replicate,
            dp_shard,
            tp,
            ep: s.ep,
            moe_dp: s.moe_dp,
            sharding,
            strategy,
            layout,
            threads: positive("threads", s.threads.unwrap_or((cores() / ranks).max(1)))?,
            local_ranks: None,
            allocated: None,
            recompute: s.recompute.as_deref().map_or(Ok(Recompute::default()), str::parse)?,
            activations: s.activations.as_deref().map_or(Ok(Storage::default()), str::parse)?,
            deadline,
            method,
            lr: LrSchedule { peak, warmup, steps, decay },
            grad_clip: (grad_clip > 0.0).then_some(grad_clip),
            grad_accumulation,
            seed: s.seed.unwrap_or(0),
            save_every: every(s.save_every, 50),
            keep: positive("keep", s.keep.unwrap_or(2))?,
            eval_every: every(s.eval_every, 0),
            eval_tokens: positive("eval-tokens", s.eval_tokens.unwrap_or(1 << 17))?,
            sample_tokens: s.sample_tokens.unwrap_or(200),
            tensorboard: s.tensorboard.clone(),
            spike_factor: s.spike_factor,
            spike_steps: s.spike_steps.unwrap_or(10),
            settings,
        })
    }

    /// Takes note of where the ranks run: those of a machine share its memory and, where nothing is set, its cores.
    pub fn place(&mut self, ranks: &Ranks) {
        self.local_ranks = ranks.local();
        if let (Some(local), None) = (self.local_ranks, self.settings.threads) {
            self.threads = (cores() / local).max(1);
        }
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
