//! Errors of model folders and files, and of a model's computation.

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
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file does not have the format that its name promises.
    #[error("{path}: {problem}")]
    Format {
        /// The file.
        path: PathBuf,
        /// A description of what is wrong.
        problem: String,
    },
    /// `config.json` asks for something that is not implemented, or contradicts itself.
    #[error("config.json: {0}")]
    Config(String),
    /// A scaling of the rotary embedding that does not exist, or is impossible for this model.
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
        /// The shape that the model needs.
        expected: Vec<usize>,
        /// The tensor's own shape.
        actual: Vec<usize>,
    },
    /// The requested rows lie outside the tensor.
    #[error("rows {}..{} of tensor {name} {shape:?} are not there", rows.start, rows.end)]
    Rows {
        /// The tensor.
        name: String,
        /// The requested rows.
        rows: std::ops::Range<usize>,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// `config.json` asks for the load-balancing loss of routers, and the caller does not compute it.
    #[error(
        "config.json asks for a loss on the load of experts (output_router_logits, router_aux_loss_coef {coefficient}), \
         but the experts are not balanced; set output_router_logits to false to train without"
    )]
    Unbalanced {
        /// The factor of the loss in `config.json`.
        coefficient: f64,
    },
    /// A model that cannot be sharded over so many ranks.
    #[error(transparent)]
    Shard(#[from] ringspan_candle::ShardError),
    /// A token is outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// A computation failed, on this rank or on another one.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
