//! Errors of video models: their folders, their inputs, the mesh they run on.

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
    /// A file or folder does not hold what it should.
    #[error("{path}: {problem}")]
    Format {
        /// The file or folder.
        path: PathBuf,
        /// A description of what is wrong.
        problem: String,
    },
    /// A configuration asks for something that is not implemented, or contradicts itself.
    #[error("{0}")]
    Config(String),
    /// A number of frames that no latents stand for.
    #[error(
        "{frames} frames: the decoder makes 1 + {each} k frames from 1 + k latent frames, so {lower} and {upper} are the nearest",
        lower = (.frames.max(&1) - 1) / .each * .each + 1, upper = (.frames.max(&1) - 1) / .each * .each + 1 + .each
    )]
    Frames {
        /// The number that was asked for.
        frames: usize,
        /// Frames for each latent frame after the first.
        each: usize,
    },
    /// A height or width that patches do not divide.
    #[error(
        "{side} {size}: a token stands for {each} x {each} pixels (patches of {patch} in latents of {scale}), so it must be a multiple \
         of {each}"
    )]
    Size {
        /// `height` or `width`.
        side: &'static str,
        /// The size that was asked for.
        size: usize,
        /// Pixels of a token's side.
        each: usize,
        /// Latent elements of a patch's side.
        patch: usize,
        /// Pixels of a latent element's side.
        scale: usize,
    },
    /// Inputs that do not fit the model or each other.
    #[error("{0}")]
    Input(String),
    /// A mesh that the model cannot run on.
    #[error("{0}")]
    Mesh(String),
    /// A callback of the caller, such as one that writes a preview, has failed.
    #[error("{0}")]
    Caller(String),
    /// An error of model files, such as a missing tensor.
    #[error(transparent)]
    Model(#[from] ringspan_models::Error),
    /// An error of the trainer: its settings, a checkpoint, a loss that is not finite.
    #[error(transparent)]
    Train(#[from] ringspan_train::Error),
    /// An error of attention or communication.
    #[error(transparent)]
    Ringspan(#[from] ringspan::error::Error),
    /// An error of a tensor operation.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// An error of this crate as one of a tensor operation.
pub(crate) fn of_candle(error: Error) -> candle_core::Error {
    match error {
        Error::Tensor(error) => error,
        other => candle_core::Error::wrap(other),
    }
}
