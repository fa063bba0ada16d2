//! Text and conversations to token documents, token documents to sequences, sequences to batches.

mod balance;
mod batch;
mod best_fit;
pub mod cache;
mod content;
mod encode;
mod files;
mod overlong;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod split;
mod store;
mod template;
mod tokens;

pub use batch::{Batch, Piece};
pub use content::Content;
pub use encode::{Encoder, GIVEN};
pub use files::{Skipped, Text, Texts, read};
pub use overlong::{Fit, Overlong};
pub use packing::{Packer, Packing, Position, Sequence};
pub use split::{Corpus, HeldOut, fingerprint};
pub use store::Store;
pub(crate) use template::special_tokens;
pub use template::{Rendered, Template};
pub use tokens::read_tokens;

/// The target of a token that takes no part in the loss: the last of a piece, and padding.
pub const IGNORE: u32 = u32::MAX;
