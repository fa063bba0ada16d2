//! Text to token documents, token documents to sequences, sequences to batches.

mod batch;
mod files;
mod packing;
mod split;
mod tokens;

pub use batch::{Batch, Piece};
pub use files::{Skipped, Text, Texts, read};
pub use packing::{Packer, Position, Sequence};
pub use split::{Corpus, fingerprint};
pub use tokens::read_tokens;

/// The target of a token that takes no part in the loss: the last of a piece, and padding.
pub const IGNORE: u32 = u32::MAX;
