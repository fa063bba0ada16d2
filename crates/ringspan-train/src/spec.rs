//! The specification of a run: the model's shapes, its mesh, its batches and steps. A plan is made of it alone, so it
//! can be made for a mesh of any size, without the model's weights and the data.

use crate::{data::Batch, data_loader::DataLoader, lr_schedule::LrSchedule, mesh::RunMesh};
use ringspan_models::Decoder;
use std::{collections::BTreeMap, path::PathBuf};

/// The specification of a run, which is the same on every rank.
pub(crate) struct RunSpec {
    pub(crate) decoder: Decoder,
    pub(crate) mesh: RunMesh,
    /// The shape of each parameter.
    pub(crate) shapes: BTreeMap<String, Vec<usize>>,
    /// Learning rates, and with them the number of steps.
    pub(crate) lr: LrSchedule,
    /// Steps done before this run.
    pub(crate) first_step: u64,
    pub(crate) batches: BatchSpec,
    /// The model and the data, in words.
    pub(crate) model: String,
    pub(crate) data: String,
    /// Whether the model's folder holds an adapter.
    pub(crate) starts_from_adapter: bool,
    /// The file and the vocabulary size of the tokenizer, where there is one.
    pub(crate) tokenizer: Option<(PathBuf, usize)>,
    /// Lines for the user: which token ends documents, and how documents are packed.
    pub(crate) notes: Vec<String>,
    /// Lines for the user about things in the data that deserve a look before training.
    pub(crate) warnings: Vec<String>,
}

/// The batches of a run, as far as memory and traffic depend on them.
#[derive(Debug, Clone, Default)]
pub(crate) struct BatchSpec {
    /// The micro-batches of the first step of this run.
    pub(crate) first_step: Vec<Batch>,
    /// A micro-batch with as many tokens as any can have; none where there is no data.
    pub(crate) fullest: Option<Batch>,
    /// Number of steps in one pass over the text; none for a file of tokens.
    pub(crate) steps_per_epoch: Option<f64>,
    /// Number of passes over each source of the text in all steps.
    pub(crate) epochs_of_sources: Vec<f64>,
}

impl BatchSpec {
    /// The batches of `steps` steps of `accumulation` micro-batches each.
    pub(crate) fn new(data_loader: &DataLoader, steps: u64, accumulation: usize) -> Self {
        let first_step = data_loader.clone().next_step(accumulation);
        let fullest =
            data_loader.fullest_batch().or_else(|| first_step.iter().max_by_key(|b| b.real_tokens()).cloned());
        let is_text = matches!(data_loader, DataLoader::Text { .. });
        Self {
            fullest,
            first_step,
            steps_per_epoch: is_text.then(|| data_loader.steps_per_epoch(accumulation)),
            epochs_of_sources: data_loader.epochs(steps, accumulation),
        }
    }
}
