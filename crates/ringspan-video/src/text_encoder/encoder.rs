//! The layers of the encoder, one after the other.

use super::config::TextEncoderConfig;
use crate::error::{Error, Result};
use crate::tensor_folder::{TensorFolder, read_json};
use candle_core::{Device, Tensor};
use ringspan::attention::{self, Inputs};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::comm::{Buffer, threads};
use ringspan::kernel::{Buckets, Relative, View};
use ringspan::{Documents, Group, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind, World, world};
use ringspan_candle::Weight;
use ringspan_candle::norm::rms_norm;
use ringspan_candle::swiglu::geglu;
use std::path::Path;
use std::time::Duration;

/// The ranks that compute: ring x Ulysses, which share the tokens.
#[derive(Debug, Clone)]
pub struct TextMesh {
    /// Threads of this process, or processes.
    pub processes: ProcessGroup,
    /// Ring size.
    pub ring: usize,
    /// Ulysses size.
    pub ulysses: usize,
    /// Threads of each rank.
    pub threads: usize,
    /// Longest wait for another rank.
    pub deadline: Duration,
}

/// A text encoder whose weights are on disk.
#[derive(Debug)]
pub struct TextEncoder {
    config: TextEncoderConfig,
    tensors: TensorFolder,
}

impl TextEncoder {
    /// Opens the folder of an encoder, or of a pipeline with a folder `text_encoder`.
    ///
    /// # Errors
    /// Files that are missing or corrupt, and a configuration that is not supported.
    pub fn open(folder: &Path) -> Result<Self> {
        let inner = folder.join("text_encoder");
        let folder = if inner.is_dir() { inner.as_path() } else { folder };
        let path = folder.join("config.json");
        let config: TextEncoderConfig = read_json(&path)?;
        config.check().map_err(|error| Error::Format { path, problem: error.to_string() })?;
        Ok(Self { config, tensors: TensorFolder::open(folder, "model")? })
    }

    /// The sizes of the model.
    #[must_use]
    pub fn config(&self) -> &TextEncoderConfig {
        &self.config
    }

    /// The last hidden states `[tokens, d_model]` of a prompt, on all ranks. Returns `None` in a process without rank 0.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, tensors that are missing or do not fit, failures of any rank.
    pub fn encode(&self, tokens: &[u32], mesh: &TextMesh) -> Result<Option<Vec<f32>>> {
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.config.vocab_size) {
            let size = self.config.vocab_size;
            return Err(Error::Input(format!("token {token} is not in the encoder's vocabulary of {size} tokens")));
        }
        let ranks = mesh.ring.saturating_mul(mesh.ulysses);
        let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, tokens.len()), ranks)?;
        let grid = (mesh.ring, mesh.ulysses);
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), grid)?;
        let threads = threads::Options { deadline: mesh.deadline, ..Default::default() };
        let options = world::Options { threads_per_rank: mesh.threads, ranks: threads };
        let own = World::start(&mesh.processes, ranks, options)?.run(|rank| -> Result<Vec<f32>> {
            let local = layout.shard(rank.index(), tokens, 1)?;
            let group = Group::new(rank.communicator().clone(), grid, rank.kernel())?;
            self.hidden(&local, &group, &schedule)
        })?;
        let parts = mesh.processes.gather(own.into_iter().map(Buffer::F32).collect())?;
        let Some(parts) = parts else { return Ok(None) };
        let mut hidden = Vec::with_capacity(tokens.len() * self.config.d_model);
        for part in &parts {
            hidden.extend_from_slice(part.f32()?);
        }
        Ok(Some(hidden))
    }

    /// The last hidden states of this rank's tokens.
    fn hidden(&self, tokens: &[u32], group: &Group, schedule: &Schedule) -> Result<Vec<f32>> {
        let mut x = self.embed(tokens)?;
        for layer in 0..self.config.num_layers {
            x = (&x + self.attend(layer, &x, group, schedule)?)?;
            x = (&x + self.feed_forward(layer, &x)?)?;
        }
        Ok(self.norm("encoder.final_layer_norm.weight", &x)?.flatten_all()?.to_vec1()?)
    }

    /// The embeddings `[T, d_model]`; only their rows are read.
    fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        let Self { config, tensors } = self;
        let has = |name: &str| tensors.shapes().any(|(found, _)| found == name);
        let name = if has("shared.weight") { "shared.weight" } else { "encoder.embed_tokens.weight" };
        self.check(name, &[config.vocab_size, config.d_model])?;
        tensors.read_rows(name, tokens)
    }

    fn attend(&self, layer: usize, x: &Tensor, group: &Group, schedule: &Schedule) -> Result<Tensor> {
        let config = &self.config;
        let (heads, dim) = (config.num_heads, config.d_kv);
        let name = |part: &str| format!("encoder.block.{layer}.layer.0.{part}.weight");
        let n = self.norm(&name("layer_norm"), x)?;
        let project = |part: &str| -> Result<Vec<f32>> {
            let weight = self.matrix(&name(&format!("SelfAttention.{part}")), heads * dim, config.d_model)?;
            Ok(weight.linear(&n, None)?.flatten_all()?.to_vec1()?)
        };
        let (q, k, v) = (project("q")?, project("k")?, project("v")?);
        let tokens = x.dim(0)?;
        let view = |values| {
            View::new(values, tokens, heads, dim)
                .ok_or_else(|| Error::Input(format!("{tokens} tokens of {heads} heads")))
        };
        let count = config.relative_attention_num_buckets;
        let table = name("SelfAttention.relative_attention_bias");
        self.check(&table, &[count, heads])?;
        let table = self.tensors.read(&table)?.t()?.flatten_all()?.to_vec1()?;
        let max_distance = config.relative_attention_max_distance;
        let buckets = Buckets { table, count, max_distance, bidirectional: true };
        // T5 does not scale products: its initial weights have the factor instead.
        let score = Score { relative: Some(Relative::Buckets(buckets)), ..Score::new(1.0) };
        let out = attention::forward(group, schedule, &Inputs::new(view(&q)?, view(&k)?, view(&v)?, &score))?.out;
        let out = Tensor::from_vec(out, (tokens, heads * dim), &Device::Cpu)?;
        Ok(self.matrix(&name("SelfAttention.o"), config.d_model, heads * dim)?.linear(&out, None)?)
    }

    fn feed_forward(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let (width, inner) = (self.config.d_model, self.config.d_ff);
        let name = |part: &str| format!("encoder.block.{layer}.layer.1.{part}.weight");
        let n = self.norm(&name("layer_norm"), x)?;
        let gate = self.matrix(&name("DenseReluDense.wi_0"), inner, width)?.linear(&n, None)?;
        let up = self.matrix(&name("DenseReluDense.wi_1"), inner, width)?.linear(&n, None)?;
        Ok(self.matrix(&name("DenseReluDense.wo"), width, inner)?.linear(&geglu(&gate, &up)?, None)?)
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        self.check(name, &[self.config.d_model])?;
        Ok(rms_norm(x, &self.tensors.read(name)?, self.config.layer_norm_epsilon)?)
    }

    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Weight> {
        self.check(name, &[rows, columns])?;
        self.tensors.read_stored(name)
    }

    fn check(&self, name: &str, expected: &[usize]) -> Result<()> {
        let shape = self.tensors.shapes().find(|(found, _)| *found == name).map(|(_, shape)| shape);
        let problem = match shape {
            Some(shape) if shape == expected => return Ok(()),
            Some(shape) => format!("tensor {name} has shape {shape:?}, but config.json asks for {expected:?}"),
            None => format!("tensor {name} {expected:?} is missing, which config.json asks for"),
        };
        Err(Error::Format { path: self.tensors.path().to_owned(), problem })
    }
}
