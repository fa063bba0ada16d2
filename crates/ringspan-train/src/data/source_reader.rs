//! Reads a source of text: its tokens come from the token cache, or are made and cached.

use super::{
    Corpus, Encoder,
    cache::{self, CacheFile},
    fingerprint,
    listing::Listing,
    progress::{Progress, ProgressCallback},
    tokenize::{TokenizeRequest, tokenize_source},
};
use crate::error::{Error, Result};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

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
        let request = TokenizeRequest {
            source: self.source,
            held_out: self.held_out,
            encoder: self.encoder,
            cache_folder: self.cache_folder,
            key,
            contents,
        };
        tokenize_source(&request, &listing, &progress)?;
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
