//! The settings of a training: keys of a configuration file, which are also the flags of `ringspan train`.
#![allow(rustdoc::broken_intra_doc_links)] // Shapes like [B,S] in the texts of --help are no links.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The file with a run's settings, kept in its folder so that the run can be resumed.
pub(crate) const RUN_FILE: &str = "train.toml";

/// The arguments of `ringspan train`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TrainArgs {
    /// A TOML file with any of the settings below; flags override it
    #[arg(value_name = "CONFIG.toml")]
    pub config: Option<PathBuf>,
    /// Print the plan, memory and bytes sent included, cache the tokens of the text, and stop; the exit code is 1 if it does not
    /// fit into memory
    #[arg(long)]
    pub dry_run: bool,
    /// The settings given as flags.
    #[command(flatten)]
    pub settings: Settings,
}

/// All settings. One that is not given has a default, which the plan prints before training begins.
#[derive(Debug, Clone, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Model to start from: a folder with config.json, safetensors and tokenizer.json, or a GGUF file; or the folder of an
    /// adapter, such as PEFT's, whose training goes on; or the folder of a WAN video transformer, of which --lora-rank trains
    /// adapters [default: a new small byte-level Qwen3]
    #[arg(long, value_name = "PATH", help_heading = "Model and data")]
    pub model: Option<PathBuf>,
    /// Train a new model of this shape instead: a config.json like Hugging Face's, or a folder that has one; weights are drawn by
    /// --seed, with standard deviation initializer_range
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub model_config: Option<PathBuf>,
    /// Tokenizer of a new model: a tokenizer.json, or a folder that has one [default: the one next to --model-config, or else
    /// bytes]
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub tokenizer: Option<PathBuf>,
    /// Text: a folder of text, a text file, or a .jsonl, .json or .parquet file with `text`, `messages`, `conversations`,
    /// `prompt` and `completion`, or `instruction` and `output`, or a folder of such files with no other text next to them; all
    /// but Parquet also as .gz or .zst. Given more than once, sources are mixed by their sizes, or as PATH=WEIGHT by weights:
    /// each sequence is of one source. For a video transformer: a safetensors file with `latents` [B,C,F,H,W] and `prompt_embeds`
    /// [B,N,D], or a folder of such [default: the current folder]
    #[arg(long, value_name = "PATH[=WEIGHT]", help_heading = "Model and data")]
    #[serde(default, skip_serializing_if = "Option::is_none", with = "one_or_several")]
    pub data: Option<Vec<PathBuf>>,
    /// Tokens instead of text: a safetensors file with `tokens` [B,S] and optionally `lengths` [B]; every step takes it whole
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub tokens: Option<PathBuf>,
    /// Jinja file of a chat template, which makes text of `messages` [default: the one next to the tokenizer]
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub chat_template: Option<PathBuf>,
    /// Texts for evaluation, in any form that --data takes: none of them is learned, and nothing is held out of --data [default:
    /// none]
    #[arg(long, value_name = "PATH", help_heading = "Model and data")]
    pub eval_data: Option<PathBuf>,
    /// Share of the documents, or of the end of a lone text, that is held out for evaluation; 0 for none [default: 0.05]
    #[arg(long, value_name = "SHARE", help_heading = "Model and data")]
    pub held_out: Option<f64>,
    /// Folder where the tokens of a text are cached, so that it is tokenised once, by a dry run too [default: tokens, in the
    /// output folder]
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub token_cache: Option<PathBuf>,
    /// Read all of the text at the start and compare it with the text that cached tokens were made of, instead of trusting the
    /// sizes and times of its files and a sample of each; and check all checksums of the cached tokens
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "Model and data")]
    pub check_data: Option<bool>,
    /// How documents fill the sequences of a step: in-order, or balanced, which assigns the same documents so that attention
    /// costs each sequence about the same [default: in-order]
    #[arg(long, value_name = "NAME", help_heading = "Model and data")]
    pub packing: Option<String>,
    /// How to treat a document that is longer than a sequence: split (it goes on in another one), truncate (its end is left out),
    /// drop (it is left out) [default: split for text; truncate for conversations and completions, which are never cut otherwise]
    #[arg(long, value_name = "NAME", help_heading = "Model and data")]
    pub overlong: Option<String>,
    /// Folder for the trained model, metrics and checkpoints [default: ringspan-out]
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub out: Option<PathBuf>,
    /// Go on with the run in this folder, from its newest checkpoint
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    #[serde(skip)]
    pub resume: Option<PathBuf>,
    /// Tokens per sequence [default: 8192]
    #[arg(long, value_name = "S", help_heading = "Model and data")]
    pub sequence_length: Option<usize>,
    /// Sequences per micro-batch, over all ranks [default: 1, or dp-replicate x dp-shard]
    #[arg(long, value_name = "B", help_heading = "Model and data")]
    pub batch_size: Option<usize>,

    /// Scale the rotary embedding of the given model for longer sequences: linear:F, dynamic:F, yarn:F, llama3:F, as
    /// yarn:4; or give it another base, as theta:8e6 [default: as config.json says]
    #[arg(long, value_name = "KIND:FACTOR", help_heading = "Model and data")]
    pub rope_scaling: Option<String>,

    /// Train LoRA adapters of this rank (inner width) and freeze the model [default: train the model]
    #[arg(long, value_name = "R", help_heading = "LoRA")]
    pub lora_rank: Option<usize>,
    /// Scale the output of adapters by alpha / rank [default: 2 x lora-rank]
    #[arg(long, value_name = "ALPHA", help_heading = "LoRA")]
    pub lora_alpha: Option<f64>,
    /// Layers with adapters, separated by commas; each expert has its own [default: q_proj,k_proj,v_proj,o_proj,
    /// gate_proj,up_proj,down_proj; also possible: gate, the router of experts; or all-linear, all of these that the model has; of a
    /// video transformer: to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2]
    #[arg(long, value_name = "NAMES", help_heading = "LoRA")]
    pub lora_targets: Option<String>,
    /// Dropout: share of an adapter's input that is dropped in training, the same on every mesh [default: 0]
    #[arg(long, value_name = "P", help_heading = "LoRA")]
    pub lora_dropout: Option<f64>,
    /// Train all of the model of the adapter that --model names, with the adapter merged into it, instead of the adapter
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "LoRA")]
    pub merge_adapter: Option<bool>,
    /// Also save the model with the adapters merged in
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "LoRA")]
    pub lora_merge: Option<bool>,

    /// Ranks in a ring, each with a part of the sequence [default: 2, or 1 when another axis is given]
    #[arg(long, value_name = "R", help_heading = "Mesh")]
    pub ring: Option<usize>,
    /// Ranks that exchange tokens for heads (all-to-all), at each position of the ring [default: 1]
    #[arg(long, value_name = "U", help_heading = "Mesh")]
    pub ulysses: Option<usize>,
    /// Copies of the model, each with a part of the sequences of a batch [default: 1]
    #[arg(long, value_name = "N", help_heading = "Mesh")]
    pub dp_replicate: Option<usize>,
    /// Ranks that share one copy of the model, each with a part of the sequences of a batch [default: 1]
    #[arg(long, value_name = "N", help_heading = "Mesh")]
    pub dp_shard: Option<usize>,
    /// Tensor parallel ranks, which share the width of every layer, and the vocabulary [default: 1]
    #[arg(long, value_name = "T", help_heading = "Mesh")]
    pub tp: Option<usize>,
    /// Expert parallel ranks, which share the experts of a sparse model, each with whole ones of its own [default: 1]
    #[arg(long, value_name = "E", help_heading = "Mesh")]
    pub ep: Option<usize>,
    /// Copies of the experts; ranks / (ep x moe-dp) share the width of each [default: ranks / (ep x tp)]
    #[arg(long, value_name = "M", help_heading = "Mesh")]
    pub moe_dp: Option<usize>,
    /// Whether parameters, gradients and optimiser state are sharded over the dp-shard x ring x ulysses x tp ranks that share a
    /// copy: full (all of them), none (each rank keeps all that it computes with) [default: full]
    #[arg(long, help_heading = "Mesh")]
    pub sharding: Option<String>,
    /// How queries meet keys: ring, bidirectional-ring, all-gather, halo, pass-q [default: ring]
    #[arg(long, help_heading = "Mesh")]
    pub strategy: Option<String>,
    /// How tokens are distributed over ranks: contiguous, zigzag, striped:K, per-document-zigzag, balanced, balanced:BLOCK [default:
    /// per-document-zigzag]
    #[arg(long, help_heading = "Mesh")]
    pub layout: Option<String>,
    /// Threads per rank [default: cores / ranks]
    #[arg(long, value_name = "N", help_heading = "Mesh")]
    pub threads: Option<usize>,
    /// Device that computes the model: cpu, cuda (all GPUs; ranks take them in turn), cuda:N (one of them). The optimiser, and
    /// what it updates, stay on the CPU [default: cpu]
    #[arg(long, value_name = "NAME", help_heading = "Mesh")]
    pub device: Option<String>,
    /// Type in which the model computes: f32 or bf16. With bf16, the weights that a step computes with, activations, products
    /// (with sums in f32) and gradients of a pass are bf16; norms, rotations, gates, softmax, routers and the loss compute in
    /// f32. Parameters, sums of gradients and the optimiser stay f32, on the CPU [default: f32]
    #[arg(long, value_name = "TYPE", help_heading = "Mesh")]
    pub dtype: Option<String>,
    /// Activations to recompute in the backward pass, to save memory: full, keep-attention, nothing, or auto, as few as the
    /// memory that is free when the run begins allows [default: keep-attention]
    #[arg(long, help_heading = "Mesh")]
    pub recompute: Option<String>,
    /// Type in which activations are stored for the backward pass: f32, or bf16, which takes half the memory and makes gradients
    /// approximate [default: that of --dtype]
    #[arg(long, value_name = "TYPE", help_heading = "Mesh")]
    pub activations: Option<String>,
    /// Keep activations that wait for the backward pass in pinned memory of the CPU, not on the GPU: copies go on while layers
    /// are computed, and no bit changes
    #[arg(long, num_args = 0..=1, default_missing_value = "true", help_heading = "Mesh")]
    pub offload_activations: Option<bool>,
    /// Seconds a rank waits for another before it gives up [default: 600]
    #[arg(long, value_name = "SECONDS", help_heading = "Mesh")]
    pub deadline: Option<f64>,

    /// Number of steps [default: 220]
    #[arg(long, value_name = "N", help_heading = "Optimisation")]
    pub steps: Option<u64>,
    /// Passes over the text, instead of --steps: as many steps as they take, the last one rounded up
    #[arg(long, value_name = "N", help_heading = "Optimisation")]
    pub epochs: Option<f64>,
    /// adamw, sgd [default: adamw]
    #[arg(long, help_heading = "Optimisation")]
    pub optimizer: Option<String>,
    /// Highest learning rate [default: adamw 5e-3 for the small new model, 3e-4 for one of --model-config, 1e-5
    /// for a given one, 2e-4 for adapters; sgd 0.1 for new ones and 1e-3]
    #[arg(long, help_heading = "Optimisation")]
    pub lr: Option<f64>,
    /// Weight decay of matrices [default: adamw 0.1, but 0 for adapters; sgd 0]
    #[arg(long, help_heading = "Optimisation")]
    pub weight_decay: Option<f64>,
    /// AdamW: decay rate of the running mean of gradients [default: 0.9]
    #[arg(long, help_heading = "Optimisation")]
    pub beta1: Option<f64>,
    /// AdamW: decay rate of the running mean of squared gradients [default: 0.95]
    #[arg(long, help_heading = "Optimisation")]
    pub beta2: Option<f64>,
    /// AdamW: added to the denominator, the root of the mean square [default: 1e-8]
    #[arg(long, help_heading = "Optimisation")]
    pub eps: Option<f64>,
    /// SGD: share of the momentum buffer that is kept in each step [default: 0]
    #[arg(long, help_heading = "Optimisation")]
    pub momentum: Option<f64>,
    /// Steps over which the learning rate rises [default: a tenth of the steps, at most 100]
    #[arg(long, value_name = "N", help_heading = "Optimisation")]
    pub warmup: Option<u64>,
    /// The learning rate after the warm-up: cosine, constant [default: cosine]
    #[arg(long, help_heading = "Optimisation")]
    pub schedule: Option<String>,
    /// Largest norm of the gradient (L2, over all parameters), to which larger ones are scaled down; 0 for no limit [default: 1]
    #[arg(long, value_name = "NORM", help_heading = "Optimisation")]
    pub grad_clip: Option<f64>,
    /// Micro-batches per step [default: 1]
    #[arg(long, value_name = "N", help_heading = "Optimisation")]
    pub grad_accumulation: Option<usize>,
    /// Factor of the router's auxiliary loss, which balances the load of a sparse model's experts; 0 for none [default: as
    /// config.json says: router_aux_loss_coef where output_router_logits is true]
    #[arg(long, value_name = "F", help_heading = "Optimisation")]
    pub router_aux_loss: Option<f64>,
    /// Tokens over which the auxiliary loss counts the load of experts: step, all tokens of a step on all ranks, so that any
    /// --grad-accumulation learns the same, for which all micro-batches but one pass forward once more; or micro-batch, the
    /// tokens of each, as Hugging Face does [default: step]
    #[arg(long, value_name = "NAME", help_heading = "Optimisation")]
    pub router_aux_loss_over: Option<String>,
    /// Dropout: share of attention's weights that is dropped in training, the same on every mesh; 0 for none [default: as
    /// config.json says: attention_dropout]
    #[arg(long, value_name = "P", help_heading = "Optimisation")]
    pub attention_dropout: Option<f64>,
    /// Seed of new weights and of the order of the documents [default: 0]
    #[arg(long, help_heading = "Optimisation")]
    pub seed: Option<u64>,

    /// Steps between checkpoints; 0 for one at the end only [default: 50]
    #[arg(long, value_name = "N", help_heading = "Saving and looking")]
    pub save_every: Option<u64>,
    /// Checkpoints to keep [default: 2]
    #[arg(long, value_name = "N", help_heading = "Saving and looking")]
    pub keep: Option<usize>,
    /// Steps between evaluations on the held-out text; 0 for one at the end only [default: 0]
    #[arg(long, value_name = "N", help_heading = "Saving and looking")]
    pub eval_every: Option<u64>,
    /// Most held-out tokens that an evaluation reads [default: 131072]
    #[arg(long, value_name = "N", help_heading = "Saving and looking")]
    pub eval_tokens: Option<usize>,
    /// Type in which the trained model is saved: f32, bf16 [default: that of --model, f32 for a new one]
    #[arg(long, value_name = "TYPE", help_heading = "Saving and looking")]
    pub export_dtype: Option<String>,
    /// Folder for event files that TensorBoard reads [default: none are written]
    #[arg(long, value_name = "DIR", help_heading = "Saving and looking")]
    pub tensorboard: Option<PathBuf>,
    /// Stop, with a checkpoint, when the loss stays above K times its running mean, which begins anew after a stop; 0 for
    /// never [default: 0]
    #[arg(long, value_name = "K", help_heading = "Saving and looking")]
    pub spike_factor: Option<f64>,
    /// Steps in a row above the limit of --spike-factor before a run is stopped [default: 10]
    #[arg(long, value_name = "N", help_heading = "Saving and looking")]
    pub spike_steps: Option<u64>,
    /// Tokens of the sample shown at the end; 0 for none [default: 200, fewer for large models]
    #[arg(long, value_name = "N", help_heading = "Saving and looking")]
    pub sample_tokens: Option<usize>,
}

impl Settings {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Settings`] with line and column, and for an unknown key the possible ones.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        toml::from_str(&text).map_err(|e| Error::Settings(format!("{}: {e}", path.display())))
    }

    /// These settings as the text of a configuration file.
    ///
    /// # Errors
    /// A number that TOML cannot hold.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::Settings(format!("the settings cannot be written down: {e}")))
    }

    /// These settings over those of `base`: where both have a key, the value of `self` wins.
    ///
    /// # Errors
    /// A number that TOML cannot hold.
    pub fn overriding(&self, base: &Self) -> Result<Self> {
        let mut table = base.table()?;
        // A run's length is given either by `steps` or by `epochs`.
        for (given, other) in [(self.steps.is_some(), "epochs"), (self.epochs.is_some(), "steps")] {
            if given {
                table.remove(other);
            }
        }
        table.extend(self.table()?);
        let mut merged: Self = table.try_into().map_err(|e| Error::Settings(e.to_string()))?;
        merged.resume = self.resume.clone().or_else(|| base.resume.clone());
        Ok(merged)
    }

    /// The keys that are set, spelled as in a configuration file.
    ///
    /// # Errors
    /// A number that TOML cannot hold.
    pub fn keys(&self) -> Result<Vec<String>> {
        Ok(self.table()?.into_iter().map(|(key, _)| key).collect())
    }

    /// The keys that are set, with their values written as in a configuration file.
    ///
    /// # Errors
    /// A number that TOML cannot hold.
    pub fn entries(&self) -> Result<Vec<(String, String)>> {
        Ok(self.table()?.into_iter().map(|(key, value)| (key, value.to_string())).collect())
    }

    fn table(&self) -> Result<toml::Table> {
        toml::Table::try_from(self).map_err(|e| Error::Settings(format!("the settings cannot be written down: {e}")))
    }
}

/// Paths as one string, or as a list of several.
mod one_or_several {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::path::PathBuf;

    #[derive(Serialize, Deserialize)]
    #[serde(untagged, expecting = "a path, or a list of paths")]
    enum Paths {
        One(PathBuf),
        Several(Vec<PathBuf>),
    }

    pub(super) fn serialize<S: Serializer>(paths: &Option<Vec<PathBuf>>, to: S) -> Result<S::Ok, S::Error> {
        let paths = paths.clone().map(|paths| match <[PathBuf; 1]>::try_from(paths) {
            Ok([one]) => Paths::One(one),
            Err(several) => Paths::Several(several),
        });
        paths.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<PathBuf>>, D::Error> {
        Ok(Some(match Paths::deserialize(from)? {
            Paths::One(path) => vec![path],
            Paths::Several(paths) => paths,
        }))
    }
}
