//! Tokenizes text and conversations, packs tokenized documents into sequences, and sequences into batches.

mod balance;
mod batch;
mod best_fit;
mod cache;
mod content;
mod corpus;
mod encode;
mod files;
mod fingerprint;
mod forms;
mod listing;
mod making;
mod mixture;
mod open;
mod overlong;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod progress;
mod records;
mod skipped;
mod store;
mod template;
mod text;
mod tokens;

pub use batch::{Batch, Piece};
pub use content::Content;
pub use corpus::{About, Corpus, Reading};
pub use encode::{Encoder, GIVEN};
pub use files::{Text, Texts, read};
pub use fingerprint::fingerprint;
pub use mixture::{Dealt, Mixture};
pub use overlong::{Fit, Overlong};
pub use packing::{Packer, Packing, Position, Sequence};
pub use progress::{Watch, unwatched};
pub use skipped::{NotRead, Skipped};
pub use store::Store;
pub(crate) use template::special_tokens;
pub use template::{Rendered, Template};
pub use tokens::read_tokens;

/// The target of a token that takes no part in the loss: the last one of a piece, one before a given token, and padding.
pub const IGNORE: u32 = u32::MAX;
