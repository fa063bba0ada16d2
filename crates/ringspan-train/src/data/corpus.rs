//! The tokens of a source: what is learned of it, and what is held out.

use super::{
    Encoder, Skipped, Store,
    cache::{self, Found},
    fingerprint,
    listing::Listing,
    making,
    progress::{Progress, Watch},
};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// What a source held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Texts that are learned whole.
    pub texts: u64,
    /// Completions of prompts.
    pub completions: u64,
    /// Conversations.
    pub chats: u64,
    /// What was left out.
    pub skipped: Skipped,
    /// Files whose names say that they are to judge by, not to learn from.
    pub suspects: Vec<String>,
}

impl About {
    /// Documents in all.
    #[must_use]
    pub fn documents(&self) -> u64 {
        self.texts + self.completions + self.chats
    }

    /// Whether documents must stay whole: text may be cut anywhere, an answer without its question teaches nothing.
    #[must_use]
    pub fn stays_whole(&self) -> bool {
        self.completions + self.chats > 0
    }
}

/// Token documents, split. They lie in a mapped file.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// What the model learns from; no document is empty.
    pub train: Store,
    /// What it is judged by; never seen in training.
    pub held_out: Store,
    /// Tokens of each of them that are learned: those that are not given, and that another one stands before.
    pub learned: [u64; 2],
    /// The largest token.
    pub largest: Option<u32>,
    /// A hash of all words of both parts, in order: two corpora with one fingerprint train alike.
    pub fingerprint: u64,
    /// A hash of every byte of the files they were made of.
    pub contents: u64,
    /// What the source held.
    pub about: About,
}

/// A source of text, and how it becomes tokens.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// A folder or a file, as [`read`](super::read) takes it.
    pub source: &'a Path,
    /// What is left out of a folder.
    pub exclude: &'a [PathBuf],
    /// So much of the documents is held out, at least one; 0 for none.
    pub held_out: f64,
    /// Makes words of documents.
    pub encoder: Encoder<'a>,
    /// The folder in which tokens are kept.
    pub folder: &'a Path,
    /// Whether every byte of the source is compared with those the tokens were made of, and not sizes, times and a sample.
    pub check: bool,
    /// How long another process that makes the same tokens may write nothing.
    pub deadline: Duration,
    /// Who is told how far the text has become tokens.
    pub watch: Watch<'a>,
}

impl Reading<'_> {
    /// The tokens of the source: those that are kept, or new ones, made on the threads of the pool that this is called in and
    /// kept; with what was wrong with kept ones, in words. Neither text nor tokens are in memory as a whole.
    ///
    /// Which documents are held out follows from a hash of their names, so a new document moves no other. At least one is
    /// held out and one is kept; of a lone text the end is held out.
    ///
    /// # Errors
    /// What [`read`](super::read) and [`Encoder::encode`] refuse, a document with nothing to learn, a source with nothing to
    /// train on; a folder that cannot be written to; another process that makes the same tokens and goes on no more;
    /// [`Error::Interrupted`] where [`watch`](Self::watch) ends it.
    pub fn corpus(&self) -> Result<(Corpus, Vec<String>)> {
        let listing = Listing::new(self.source, self.exclude)?;
        let key = fingerprint([self.encoder.fingerprint()?, self.held_out.to_bits(), listing.identity()?]);
        let progress = Progress::new(self.watch, self.source, listing.bytes());
        let contents = if self.check { Some(listing.contents(&progress)?) } else { None };
        std::fs::create_dir_all(self.folder).map_err(Error::io("create", self.folder))?;
        if let Cached::Good(corpus) = self.cached(key, contents)? {
            return Ok((*corpus, Vec::new()));
        }
        let _turn = cache::in_turn(self.folder, key, self.deadline, &progress)?;
        // Somebody else may have made them meanwhile.
        let said = match self.cached(key, contents)? {
            Cached::Good(corpus) => return Ok((*corpus, Vec::new())),
            Cached::Nothing => Vec::new(),
            Cached::Bad(why) => vec![format!("{} is made again: {why}", cache::path(self.folder, key).display())],
        };
        let contents = contents.map_or_else(|| listing.contents(&progress), Ok)?;
        making::make(self, &listing, &progress, key, contents)?;
        match cache::open(self.folder, key, false)? {
            Found::Tokens(corpus) if !corpus.train.is_empty() => Ok((*corpus, said)),
            Found::Tokens(_) => Err(Error::Data { path: self.source.into(), problem: "no token to train on".into() }),
            Found::Nothing => Err(self.lost(key, "it is gone")),
            Found::Damaged(why) => Err(self.lost(key, &why)),
        }
    }

    fn lost(&self, key: u64, why: &str) -> Error {
        let problem = format!("was written just now, and cannot be used: {why}");
        Error::Data { path: cache::path(self.folder, key), problem }
    }

    fn cached(&self, key: u64, contents: Option<u64>) -> Result<Cached> {
        Ok(match cache::open(self.folder, key, self.check)? {
            Found::Nothing => Cached::Nothing,
            Found::Damaged(why) => Cached::Bad(why),
            Found::Tokens(corpus) if contents.is_some_and(|contents| contents != corpus.contents) => {
                let source = self.source.display();
                Cached::Bad(format!("it was made of another content of {source}, of the same size and time"))
            }
            Found::Tokens(corpus) => Cached::Good(corpus),
        })
    }
}

/// What the folder of tokens has of a source.
enum Cached {
    Good(Box<Corpus>),
    Nothing,
    Bad(String),
}

#[cfg(test)]
mod test;
