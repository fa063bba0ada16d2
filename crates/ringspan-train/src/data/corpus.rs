//! The tokens of a source: its training split and its held-out split.

use super::{DocumentStore, Skipped};
use serde::{Deserialize, Serialize};

/// A description of a source's content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSummary {
    /// Number of texts, which are learned whole.
    pub texts: u64,
    /// Number of completions of prompts.
    pub completions: u64,
    /// Number of conversations.
    pub chats: u64,
    /// Files and documents that were left out.
    pub skipped: Skipped,
    /// Files whose names say that they are for evaluation, not for training.
    #[serde(rename = "suspects")]
    pub evaluation_like_files: Vec<String>,
}

impl SourceSummary {
    /// Number of documents in all.
    #[must_use]
    pub fn documents(&self) -> u64 {
        self.texts + self.completions + self.chats
    }

    /// Whether documents must stay whole: text may be cut anywhere, but an answer without its question teaches nothing.
    #[must_use]
    pub fn must_stay_whole(&self) -> bool {
        self.completions + self.chats > 0
    }
}

/// Tokenized documents, split into training and held-out ones. They lie in a memory-mapped file.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The training split; no document is empty.
    pub train: DocumentStore,
    /// The held-out (evaluation) split, never seen in training.
    pub held_out: DocumentStore,
    /// Number of learned tokens in each split: targets of the loss, which follow another token in their document.
    pub learned_tokens: [u64; 2],
    /// The largest token id.
    pub largest_token: Option<u32>,
    /// A hash of all masked tokens of both splits, in order: two corpora with one fingerprint train alike.
    pub fingerprint: u64,
    /// A hash of every byte of the files that the tokens were made of.
    pub contents_hash: u64,
    /// A description of the source's content.
    pub summary: SourceSummary,
}
