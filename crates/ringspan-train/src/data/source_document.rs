//! The documents of a source before they are tokenized: a name and a content each.

use super::{Content, Skipped};
use crate::error::Result;

/// One document of a source.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceDocument {
    /// Path below the folder, or `file:line`: stable from run to run.
    pub name: String,
    /// The document's content, not empty.
    pub content: Content,
}

/// The documents of a source, in a fixed order.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceDocuments {
    /// The documents, sorted by path or in the order of the lines.
    pub documents: Vec<SourceDocument>,
    /// Files and documents that were left out.
    pub skipped: Skipped,
    /// Files whose names say that they are for evaluation, not for training.
    pub evaluation_like_files: Vec<String>,
}

/// A function that takes the documents of a source, one after the other.
pub(super) type DocumentSink<'a> = &'a mut dyn FnMut(SourceDocument) -> Result<()>;
