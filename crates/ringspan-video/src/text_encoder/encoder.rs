//! The layers of the encoder, one after the other.

use super::config::TextEncoderConfig;
use super::weight_files::WeightFiles;
use crate::encoder_rank::{self, EncoderRank};
use crate::error::{Error, Result};
use crate::ranks::VideoRanks;
use crate::tensor_folder::read_json;
use candle_core::Tensor;
use ringspan::kernel::{Buckets, RelativeBias};
use ringspan::{Documents, Score};
use ringspan_candle::norm::rms_norm;
use ringspan_candle::swiglu::geglu;
use std::path::Path;

/// A text encoder whose weights are on disk.
#[derive(Debug)]
pub struct TextEncoder {
    config: TextEncoderConfig,
    tensors: WeightFiles,
}

impl TextEncoder {
    /// Opens the folder of an encoder, or of a pipeline with a folder `text_encoder`. Its weights are safetensors, or one GGUF file.
    ///
    /// # Errors
    /// Files that are missing or corrupt, and a configuration that is not supported.
    pub fn open(folder: &Path) -> Result<Self> {
        let inner = folder.join("text_encoder");
        let folder = if inner.is_dir() { inner.as_path() } else { folder };
        let path = folder.join("config.json");
        let config: TextEncoderConfig = read_json(&path)?;
        config.check().map_err(|error| Error::Format { path, problem: error.to_string() })?;
        let encoder = Self { config, tensors: WeightFiles::open(folder)? };
        encoder.parameters().into_iter().try_for_each(|(name, shape)| encoder.check(&name, &shape))?;
        Ok(encoder)
    }

    /// The names and shapes of all parameters.
    fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let TextEncoderConfig { d_model, d_ff, num_heads, vocab_size, relative_attention_num_buckets, .. } =
            self.config;
        let heads = num_heads * self.config.d_kv;
        let of_layer = |layer: usize| {
            let of = move |part: &str, shape: &[usize]| {
                (format!("encoder.block.{layer}.layer.{part}.weight"), shape.to_vec())
            };
            [
                of("0.layer_norm", &[d_model]),
                of("0.SelfAttention.q", &[heads, d_model]),
                of("0.SelfAttention.k", &[heads, d_model]),
                of("0.SelfAttention.v", &[heads, d_model]),
                of("0.SelfAttention.o", &[d_model, heads]),
                of("0.SelfAttention.relative_attention_bias", &[relative_attention_num_buckets, num_heads]),
                of("1.layer_norm", &[d_model]),
                of("1.DenseReluDense.wi_0", &[d_ff, d_model]),
                of("1.DenseReluDense.wi_1", &[d_ff, d_model]),
                of("1.DenseReluDense.wo", &[d_model, d_ff]),
            ]
        };
        let ends = [
            (self.embedding().to_owned(), vec![vocab_size, d_model]),
            ("encoder.final_layer_norm.weight".to_owned(), vec![d_model]),
        ];
        (0..self.config.num_layers).flat_map(of_layer).chain(ends).collect()
    }

    /// The name of the embedding's table, which has one of two.
    fn embedding(&self) -> &'static str {
        let shared = "shared.weight";
        if self.tensors.shape(shared).is_some() { shared } else { "encoder.embed_tokens.weight" }
    }

    /// Bytes that a rank takes for a prompt of so many tokens over so many ranks: the largest matrix, which it reads when it is reached,
    /// and activations of its tokens.
    ///
    /// # Errors
    /// None: the encoder was checked when it was opened.
    pub fn bytes(&self, tokens: usize, ranks: usize) -> Result<u64> {
        let TextEncoderConfig { d_model, d_ff, d_kv, num_heads, .. } = self.config;
        let table = self.embedding();
        let mut matrix = 0;
        for (name, _) in self.parameters().iter().filter(|(name, _)| name != table) {
            matrix = matrix.max(self.tensors.stored_bytes(name)?);
        }
        // The residual stream and its norm; queries, keys, values, outputs and a block of other ranks, or gate, up and their
        // product.
        let of_token = 2 * d_model + (6 * num_heads * d_kv).max(3 * d_ff);
        Ok(matrix + 4 * (tokens.div_ceil(ranks.max(1)) * of_token) as u64)
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
    pub fn encode(&self, tokens: &[u32], ranks: &mut VideoRanks) -> Result<Option<Vec<f32>>> {
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.config.vocab_size) {
            let size = self.config.vocab_size;
            return Err(Error::Input(format!("token {token} is not in the encoder's vocabulary of {size} tokens")));
        }
        let documents = Documents::batch(1, tokens.len());
        encoder_rank::encode(ranks, &documents, self.config.d_model, |rank| {
            let own: Vec<u32> = rank.rows.iter().map(|row| tokens[*row]).collect();
            self.hidden(&own, rank)
        })
    }

    /// The last hidden states of this rank's tokens.
    fn hidden(&self, tokens: &[u32], rank: &EncoderRank) -> Result<Vec<f32>> {
        let mut x = self.embed(tokens)?;
        for layer in 0..self.config.num_layers {
            x = (&x + self.attend(layer, &x, rank)?)?;
            x = (&x + self.feed_forward(layer, &x)?)?;
        }
        Ok(self.norm("encoder.final_layer_norm.weight", &x)?.flatten_all()?.to_vec1()?)
    }

    /// The embeddings `[T, d_model]`; only their rows are read.
    fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        self.tensors.read_rows(self.embedding(), tokens)
    }

    fn attend(&self, layer: usize, x: &Tensor, rank: &EncoderRank) -> Result<Tensor> {
        let config = &self.config;
        let name = |part: &str| format!("encoder.block.{layer}.layer.0.{part}.weight");
        let n = self.norm(&name("layer_norm"), x)?;
        let project = |part: &str| -> Result<Tensor> {
            Ok(self.tensors.read_stored(&name(&format!("SelfAttention.{part}")))?.linear(&n, None)?)
        };
        let (q, k, v) = (project("q")?, project("k")?, project("v")?);
        let count = config.relative_attention_num_buckets;
        let table = name("SelfAttention.relative_attention_bias");
        let table = self.tensors.read(&table)?.t()?.flatten_all()?.to_vec1()?;
        let max_distance = config.relative_attention_max_distance;
        let buckets = Buckets { table, count, max_distance, bidirectional: true };
        // T5 does not scale products: its initial weights have the factor instead.
        let score = Score { relative: Some(RelativeBias::Buckets(buckets)), ..Score::new(1.0) };
        let out = rank.attend([&q, &k, &v], config.num_heads, &score)?;
        Ok(self.tensors.read_stored(&name("SelfAttention.o"))?.linear(&out, None)?)
    }

    fn feed_forward(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let name = |part: &str| format!("encoder.block.{layer}.layer.1.{part}.weight");
        let matrix = |part: &str| self.tensors.read_stored(&name(&format!("DenseReluDense.{part}")));
        let n = self.norm(&name("layer_norm"), x)?;
        let gate = matrix("wi_0")?.linear(&n, None)?;
        let up = matrix("wi_1")?.linear(&n, None)?;
        Ok(matrix("wo")?.linear(&geglu(&gate, &up)?, None)?)
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(x, &self.tensors.read(name)?, self.config.layer_norm_epsilon)?)
    }

    fn check(&self, name: &str, expected: &[usize]) -> Result<()> {
        let problem = match self.tensors.shape(name) {
            Some(shape) if shape == expected => return Ok(()),
            Some(shape) => format!("tensor {name} has shape {shape:?}, but config.json asks for {expected:?}"),
            None => format!("tensor {name} {expected:?} is missing, which config.json asks for"),
        };
        Err(Error::Format { path: self.tensors.path().to_owned(), problem })
    }
}
