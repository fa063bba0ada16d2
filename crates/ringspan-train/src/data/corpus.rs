//! The tokens of a source: its training split and its held-out split.

use super::{
    DocumentStore, Encoder, Skipped,
    cache::{self, CacheFile},
    fingerprint,
    listing::Listing,
    progress::{Progress, ProgressCallback},
    tokenize,
};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

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
    /// Number of learned tokens in each split: tokens that are not given, and that follow another one in their document.
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

/// How a source of text is read and tokenized.
#[derive(Clone, Copy)]
pub struct SourceReader<'a> {
    /// A folder or a file, as [`read`](super::read) takes it.
    pub source: &'a Path,
    /// Files and folders that are left out of `source`.
    pub exclude: &'a [PathBuf],
    /// Share of the documents that is held out, at least one document; 0 for none.
    pub held_out: f64,
    /// Turns documents into masked tokens (token ids with the loss mask in their highest bit).
    pub encoder: Encoder<'a>,
    /// The folder of the token cache.
    pub cache_folder: &'a Path,
    /// Whether every byte of the source is compared with the text that cached tokens were made of, instead of sizes, times and a
    /// sample.
    pub check_contents: bool,
    /// How long another process that makes the same tokens may write nothing before that is an error.
    pub deadline: Duration,
    /// Receives the progress of tokenization.
    pub on_progress: ProgressCallback<'a>,
}

impl SourceReader<'_> {
    /// The tokens of the source: the cached ones, or new ones, which are made on the threads of the calling pool and cached. Also
    /// returns what was wrong with cached tokens, in words. Neither text nor tokens are in memory as a whole.
    ///
    /// Whether a document is held out follows from a hash of its name, so a new document moves no other. At least one document is
    /// held out and at least one is for training; of a lone text, the end is held out.
    ///
    /// # Errors
    /// Errors of [`read`](super::read) and [`Encoder::encode`]; a document with nothing to learn, or a source with nothing to
    /// train on; a folder that cannot be written to; another process that was making the same tokens and stopped;
    /// [`Error::Interrupted`] where [`on_progress`](Self::on_progress) ends it.
    pub fn load_or_tokenize(&self) -> Result<(Corpus, Vec<String>)> {
        let listing = Listing::new(self.source, self.exclude)?;
        let key = fingerprint([self.encoder.fingerprint()?, self.held_out.to_bits(), listing.identity()?]);
        let progress = Progress::new(self.on_progress, self.source, listing.bytes());
        let contents = if self.check_contents { Some(listing.contents_hash(&progress)?) } else { None };
        std::fs::create_dir_all(self.cache_folder).map_err(Error::io("create", self.cache_folder))?;
        if let CacheState::Valid(corpus) = self.cache_state(key, contents)? {
            return Ok((*corpus, Vec::new()));
        }
        let _lock = cache::lock_token_file(self.cache_folder, key, self.deadline, &progress)?;
        // Another process may have made them while this one waited for its turn.
        let remarks = match self.cache_state(key, contents)? {
            CacheState::Valid(corpus) => return Ok((*corpus, Vec::new())),
            CacheState::Missing => Vec::new(),
            CacheState::Invalid(why) => {
                vec![format!("{} is made again: {why}", cache::path(self.cache_folder, key).display())]
            }
        };
        let contents = contents.map_or_else(|| listing.contents_hash(&progress), Ok)?;
        tokenize::tokenize_source(self, &listing, &progress, key, contents)?;
        match cache::open(self.cache_folder, key, false)? {
            CacheFile::Tokens(corpus) if !corpus.train.is_empty() => Ok((*corpus, remarks)),
            CacheFile::Tokens(_) => {
                Err(Error::Data { path: self.source.into(), problem: "no token to train on".into() })
            }
            CacheFile::Missing => Err(self.unusable(key, "it is gone")),
            CacheFile::Damaged(why) => Err(self.unusable(key, &why)),
        }
    }

    fn unusable(&self, key: u64, why: &str) -> Error {
        let problem = format!("was written just now, and cannot be used: {why}");
        Error::Data { path: cache::path(self.cache_folder, key), problem }
    }

    fn cache_state(&self, key: u64, contents: Option<u64>) -> Result<CacheState> {
        Ok(match cache::open(self.cache_folder, key, self.check_contents)? {
            CacheFile::Missing => CacheState::Missing,
            CacheFile::Damaged(why) => CacheState::Invalid(why),
            CacheFile::Tokens(corpus) if contents.is_some_and(|contents| contents != corpus.contents_hash) => {
                let source = self.source.display();
                CacheState::Invalid(format!("it was made of another content of {source}, of the same size and time"))
            }
            CacheFile::Tokens(corpus) => CacheState::Valid(corpus),
        })
    }
}

/// The state of a source's tokens in the cache.
enum CacheState {
    Valid(Box<Corpus>),
    Missing,
    Invalid(String),
}

#[cfg(test)]
mod test;
