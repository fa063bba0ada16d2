//! What can be wrong with a model folder, or happen while a model computes.

use std::path::PathBuf;

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Every way a call of this crate can fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{path}: {problem}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// `config.json` asks for something that is not there, or contradicts itself.
    #[error("config.json: {0}")]
    Config(String),
    /// A way to stretch the rotary embedding that is none, or not for this model.
    #[error("rope scaling {0}")]
    RopeScaling(String),
    /// An adapter that is impossible, or impossible for this model.
    #[error("LoRA adapter: {0}")]
    Lora(String),
    /// The model has a parameter that the weights lack.
    #[error("the model needs tensor {name} {shape:?}, which the weights do not have")]
    Missing {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The weights have a tensor that the model does not know.
    #[error("the weights have tensor {name} {shape:?}, which this model does not use")]
    Unknown {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor has another shape than the model needs.
    #[error("tensor {name} has shape {actual:?}, but the model needs {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// What the model needs.
        expected: Vec<usize>,
        /// What it is.
        actual: Vec<usize>,
    },
    /// Rows of a tensor that it does not have.
    #[error("rows {}..{} of tensor {name} {shape:?} are not there", rows.start, rows.end)]
    Rows {
        /// The tensor.
        name: String,
        /// What was asked for.
        rows: std::ops::Range<usize>,
        /// What there is.
        shape: Vec<usize>,
    },
    /// The model is to be trained with a loss that nobody computes.
    #[error(
        "config.json asks for a loss on the load of experts (output_router_logits, router_aux_loss_coef {coefficient}), \
         but the experts are not balanced; set output_router_logits to false to train without"
    )]
    Unbalanced {
        /// The loss's factor.
        coefficient: f64,
    },
    /// More ranks than the model can be sharded over.
    #[error(transparent)]
    Shard(#[from] ringspan_candle::ShardError),
    /// A token is outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Tokens the model knows.
        vocabulary: usize,
    },
    /// A computation failed, here or on another rank.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
