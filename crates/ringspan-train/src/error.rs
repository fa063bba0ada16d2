//! Errors of training, worded so that a person can fix the cause.

use std::path::{Path, PathBuf};

/// The result of a fallible training call.
pub type Result<T> = std::result::Result<T, Error>;

/// Every way in which preparing, running or saving a training can fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The settings contradict each other or ask for something impossible.
    #[error("{0}")]
    Settings(String),
    /// The data cannot be used.
    #[error("{path}: {problem}", path = .path.display())]
    Data {
        /// The file or folder.
        path: PathBuf,
        /// The problem, in words, with line numbers or shapes.
        problem: String,
    },
    /// The system refused to read or write a file.
    #[error("cannot {action} {path}: {source}", path = .path.display())]
    Io {
        /// The action that failed, such as "read".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The observer of a text's tokenization stopped it (Ctrl-C).
    #[error("interrupted while {path} became tokens: none of them are kept", path = .path.display())]
    Interrupted {
        /// The file or folder.
        path: PathBuf,
    },
    /// A tokenizer is damaged or does not fit the model.
    #[error("tokenizer {path}: {problem}", path = .path.display())]
    Tokenizer {
        /// The file or folder of the tokenizer.
        path: PathBuf,
        /// The problem, in words.
        problem: String,
    },
    /// A chat template is damaged.
    #[error("chat template {path}: {problem}", path = .path.display())]
    Template {
        /// The file or folder of the template.
        path: PathBuf,
        /// The problem, in words.
        problem: String,
    },
    /// A checkpoint cannot be used.
    #[error("checkpoint {path}: {problem}", path = .path.display())]
    Checkpoint {
        /// The checkpoint's folder or file.
        path: PathBuf,
        /// The problem, in words.
        problem: String,
    },
    /// The loss or the gradient norm became infinite or NaN.
    #[error(
        "step {step} computed a loss of {loss} and a gradient norm of {norm} (learning rate {lr:.3e}): nothing of this step was \
         kept, and the run as it was before it is saved; go on with --resume and a lower --lr or --grad-clip, or look at the \
         data of this step"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// The loss of the step.
        loss: f64,
        /// The norm of its gradients.
        norm: f64,
        /// The learning rate of the step.
        lr: f64,
    },
    /// The loss stayed far above its running mean for several steps.
    #[error(
        "the loss was above {factor} times its mean {mean:.4} in {steps} steps in a row, at step {step} it is {loss:.4}; the \
         run as it is now is saved, and older checkpoints stay: look at the data of these steps or lower --lr, and go on with \
         --resume; the mean begins anew then, and --spike-factor 0 is no limit"
    )]
    Spike {
        /// The last of the steps.
        step: u64,
        /// The loss of that step.
        loss: f64,
        /// Number of consecutive steps above the limit.
        steps: u64,
        /// The limit, as a multiple of the mean.
        factor: f64,
        /// The running mean of the losses before these steps.
        mean: f64,
    },
    /// The core library failed: meshes, layouts, communication.
    #[error(transparent)]
    Core(#[from] ringspan::Error),
    /// The model failed: its folder, its configuration, its computation.
    #[error("{0}")]
    Model(String),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl Error {
    /// Wraps the system's answer to `action` on `path`.
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.as_ref().to_path_buf();
        move |source| Error::Io { action, path, source }
    }
}

/// The error of a chat template, or of the file that names special tokens.
pub(crate) fn template_error(error: ringspan_models::Error) -> Error {
    match error {
        ringspan_models::Error::Io { path, source } => Error::Io { action: "read", path, source },
        ringspan_models::Error::Format { path, problem } => Error::Template { path, problem },
        other => Error::Model(other.to_string()),
    }
}

/// Wraps an error of a model: of its folder, its configuration, its computation.
pub(crate) fn model_error(error: impl std::fmt::Display) -> Error {
    Error::Model(error.to_string())
}
