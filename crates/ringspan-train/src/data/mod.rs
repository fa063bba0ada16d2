//! Tokenizes text and conversations, packs tokenized documents into sequences, and sequences into batches.

mod balance;
mod batch;
mod best_fit;
mod cache;
mod chat_formats;
mod content;
mod corpus;
mod decompress;
mod document_store;
mod encode;
mod json_records;
mod listing;
mod mixture;
mod overlong;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod progress;
mod sequence;
mod skipped;
mod source_document;
mod source_files;
mod source_reader;
mod template;
mod text_file;
mod token_file;
mod tokenize;

pub use crate::fingerprint::fingerprint;
pub use batch::{Batch, Segment};
pub use content::Content;
pub use corpus::{Corpus, SourceSummary};
pub use document_store::DocumentStore;
pub use encode::{Encoder, NOT_LEARNED};
pub use mixture::{Mixture, SourcePosition};
pub use overlong::{Overlong, PackableSpans};
pub use packing::{Packer, PackerPosition, Packing};
pub use progress::{ProgressCallback, ignore_progress};
pub use sequence::Sequence;
pub use skipped::{Skipped, SkippedFiles};
pub use source_document::{SourceDocument, SourceDocuments};
pub use source_files::read;
pub use source_reader::SourceReader;
pub use template::{Rendered, Template};
pub use token_file::read_tokens;

/// The target of a token that takes no part in the loss: the last one of a segment, one before a token that is not learned, and
/// padding.
pub const IGNORE: u32 = u32::MAX;
