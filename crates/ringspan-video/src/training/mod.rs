//! Training of a transformer's adapters by flow matching, over a mesh of ranks that share the tokens of each video.
//!
//! Optimiser, learning rates, checkpoints and metrics are those of [`ringspan_train`].

mod adapter_trainer;
mod data;
mod memory;
mod rank;
mod settings;

pub use adapter_trainer::{AdapterTrainer, StepSettings};
pub use data::FlowData;
pub use memory::TrainingMemory;
pub use rank::FlowMetrics;

use crate::bytes_text::bytes_text;
use crate::error::{Error, Result};
use crate::lora;
use crate::ranks::{VideoMesh, VideoRanks};
use crate::transformer::{WanFolder, WeightType};
use memory::{LocalRanks, StepSizes};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::mesh::Grid;
use ringspan::{Documents, Layout, LayoutKind};
use ringspan_candle::StoredWeights;
use ringspan_models::Lora;
use ringspan_train::checkpoint::{Checkpoint, Checkpoints, Identity};
use ringspan_train::{LrSchedule, MetricsFile, Optimizer, TrainConfig};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// A training that can begin: its data, its settings and the model's headers have been read and checked.
pub struct VideoTraining<'a> {
    config: &'a TrainConfig,
    folder: WanFolder,
    data: FlowData,
    lora: Lora,
    lr: LrSchedule,
    mesh: VideoMesh,
    model: Identity,
    data_identity: Identity,
    resumed: Option<Checkpoint>,
    memory: TrainingMemory,
}

/// The outcome of a training.
#[derive(Debug)]
pub struct TrainingOutcome {
    /// Steps done in all.
    pub step: u64,
    /// Whether it was stopped before the last step; then there is a checkpoint, but no adapter.
    pub interrupted: bool,
    /// The file of the adapter.
    pub adapter: Option<PathBuf>,
}

/// The folder of a video transformer that a path names: its own, or that of a pipeline. `None` for other models.
#[must_use]
pub fn transformer_folder(path: &Path) -> Option<PathBuf> {
    let is_transformer = |folder: &Path| {
        let config = std::fs::read_to_string(folder.join("config.json")).ok()?;
        let config: serde_json::Value = serde_json::from_str(&config).ok()?;
        let class = config.get("_class_name")?.as_str()?.to_owned();
        class.starts_with("Wan").then(|| folder.to_owned())
    };
    is_transformer(path).or_else(|| is_transformer(&path.join("transformer")))
}

impl<'a> VideoTraining<'a> {
    /// Reads and checks everything but the weights.
    ///
    /// # Errors
    /// Settings without effect on a video transformer, by name; a model or data that do not fit; a checkpoint of another run.
    pub fn open(config: &'a TrainConfig, processes: &ProcessGroup) -> Result<Self> {
        let lora = settings::checked(config)?;
        let adapter = config.out.join(lora::DIFFUSERS);
        if !config.resume && adapter.exists() {
            let problem = "it is the adapter of another training: choose another --out, or remove it";
            return Err(Error::Format { path: adapter, problem: problem.into() });
        }
        let path = config.model.as_deref().unwrap_or(Path::new("."));
        if path.join("transformer_2").is_dir() {
            let problem = "it has two transformers: name one of them, transformer or transformer_2, with --model";
            return Err(Error::Format { path: path.to_owned(), problem: problem.into() });
        }
        let folder = transformer_folder(path).unwrap_or_else(|| path.to_owned());
        let folder = WanFolder::open(&folder)?.with_new_adapters(&lora)?;
        let data = FlowData::open(settings::data(config)?)?;
        data.check(folder.transformer())?;
        let (ring, ulysses) = (config.ring, config.ulysses);
        let mesh = VideoMesh {
            ring,
            ulysses,
            threads: config.threads,
            deadline: config.deadline,
            processes: processes.clone(),
            shard_weights: processes.local().is_some() && ring.saturating_mul(ulysses) > 1,
            ..VideoMesh::single()
        };
        let names: Vec<String> =
            folder.transformer().adapter_shapes().iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
        let summary = format!("adapters of rank {}, alpha {}, {} matrices", lora.rank, lora.alpha, names.len());
        let model = Identity::of_text(summary, &format!("{} {}", lora.alpha, names.join(", ")));
        let data_identity = data.identity()?;
        let resumed = match config.resume {
            true => Some(Checkpoints::new(&config.out, config.keep).newest(&model, &data_identity)?),
            false => None,
        };
        let first_step = resumed.as_ref().map_or(0, |checkpoint: &Checkpoint| checkpoint.progress.step);
        processes.agree(&[
            ("the adapters".into(), model.to_string()),
            ("the data".into(), data_identity.to_string()),
            ("the first step".into(), first_step.to_string()),
        ])?;
        let lr = config.lr(settings::steps(config)?)?;
        let memory = predicted_memory(config, &folder, &data, &mesh)?;
        Ok(Self { config, folder, data, lora, lr, mesh, model, data_identity, resumed, memory })
    }

    /// Trains to the last step, or until `stop` is set in the process of rank 0, which alone writes and calls `stepped`.
    ///
    /// # Errors
    /// Failures of ranks, a disk that refuses, a loss that is not finite.
    pub fn run(&self, stop: &AtomicBool, stepped: &(dyn Fn(&FlowMetrics) + Sync)) -> Result<TrainingOutcome> {
        let metrics = match self.mesh.processes.lead() {
            true => {
                ringspan_train::write_run_file(self.config, &self.lr)?;
                Some(MetricsFile::open(&self.config.out.join("metrics.jsonl"), self.first_step())?)
            }
            false => None,
        };
        let metrics = Mutex::new(metrics);
        let of_process = match self.mesh.shard_weights {
            true => StoredWeights::new(),
            false => self.folder.load(WeightType::AsStored)?,
        };
        let ends = VideoRanks::start(&self.mesh)?.run(|groups| match groups.sharing_weights() {
            Some(ranks) => {
                let share = self.folder.load_share(WeightType::AsStored, ranks.clone())?;
                self.on_rank(&share, groups, stop, &metrics, stepped)
            }
            None => self.on_rank(&of_process, groups, stop, &metrics, stepped),
        })?;
        let Some((step, interrupted, matrices)) = ends.into_iter().next() else {
            return Err(Error::Mesh("a training needs at least one rank".into()));
        };
        let adapter = match self.mesh.processes.lead() && !interrupted {
            true => Some(lora::save(&self.config.out, &self.lora, &matrices)?),
            false => None,
        };
        Ok(TrainingOutcome { step, interrupted, adapter })
    }

    /// The predicted memory, for the sample that needs most.
    #[must_use]
    pub fn memory(&self) -> &TrainingMemory {
        &self.memory
    }

    /// The number of steps in all.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.lr.steps
    }

    /// The number of steps that were done before, where a run goes on.
    #[must_use]
    pub fn first_step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |checkpoint| checkpoint.progress.step)
    }
}

impl fmt::Display for VideoTraining<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes = self.folder.transformer().adapter_shapes();
        let parameters: usize = shapes.values().map(|shape| shape.iter().product::<usize>()).sum();
        let Lora { rank, alpha, .. } = self.lora;
        writeln!(f, "mesh      {}", self.mesh)?;
        writeln!(f, "adapters  rank {rank}, alpha {alpha}: {} layers, {parameters} parameters", shapes.len() / 2)?;
        writeln!(f, "data      {}", self.data)?;
        let shared = match self.mesh.shard_weights {
            true => "a process: its share, and while it computes the largest block with what it receives of the next",
            false => "once for the ranks of a process",
        };
        writeln!(f, "weights   {}, frozen, {shared}", bytes_text(self.memory.weights))?;
        writeln!(f, "memory    about {}", self.memory)?;
        write!(f, "steps     {} to {}, learning rate {:e} at most", self.first_step(), self.lr.steps, self.lr.peak)
    }
}

/// The memory of a training with the sample that needs most.
fn predicted_memory(
    config: &TrainConfig,
    folder: &WanFolder,
    data: &FlowData,
    mesh: &VideoMesh,
) -> Result<TrainingMemory> {
    let transformer = folder.transformer();
    let adapters = transformer.adapter_shapes().values().map(|shape| shape.iter().product::<usize>()).sum();
    let weights = match mesh.shard_weights {
        true => {
            let shares = folder.shares(WeightType::AsStored, mesh.size());
            shares.most() + shares.gathered()
        }
        false => folder.bytes(WeightType::AsStored) - 4 * adapters as u64,
    };
    // Beside the matrices and the optimiser's state there are their gradients, the message in which ranks sum them, and what comes back.
    let adapters = 16 * adapters as u64 + Optimizer::state_bytes(&config.optimizer, adapters) as u64;
    let local = match mesh.processes.local() {
        Some(local) => LocalRanks { ranks: local, processes: local },
        None => LocalRanks { ranks: mesh.size(), processes: 1 },
    };
    let of_sample = |[latents, prompt]: [Vec<usize>; 2]| -> Result<TrainingMemory> {
        let (batch, grid) = (latents.first().copied().unwrap_or(0), transformer.grid_of(&latents)?);
        let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(batch, grid.tokens()), mesh.size())?;
        let sizes = StepSizes {
            grid: Grid::new(mesh.ring, mesh.ulysses),
            threads: mesh.threads,
            tokens: (0..mesh.size()).map(|rank| layout.tokens(rank)).max().unwrap_or(0) as u64,
            latents: latents.iter().product::<usize>() as u64,
            embeds: prompt.iter().take(2).product::<usize>() as u64,
            prompt: prompt.iter().product::<usize>() as u64,
            samples: config.grad_accumulation as u64,
            recompute: rank::recompute(config),
            storage: config.activations,
        };
        TrainingMemory::new(weights, adapters, &sizes, transformer.config(), local)
    };
    let all = data.shapes()?.into_iter().map(of_sample).collect::<Result<Vec<_>>>()?;
    let most = all.into_iter().max_by_key(TrainingMemory::of_rank);
    most.ok_or_else(|| Error::Input("there is no sample to train with".into()))
}
