//! Tokenizes documents into a file of tokens, a batch at a time.

use super::{
    Content, Encoder, NOT_LEARNED, SourceDocument, SourceSummary,
    cache::CacheWriter,
    encode::document_path,
    fingerprint,
    listing::Listing,
    progress::Progress,
    source_files::{FileItem, SourceFiles, nothing_to_learn},
};
use crate::{
    error::{Error, Result},
    token_windows::{PositionedToken, Window, WindowJoiner, WindowSplitter},
    tokenizer::Tokenizer,
};
use ringspan_candle::pool;
use std::{collections::VecDeque, path::Path};

/// Bytes of text, and number of documents, that are tokenized together: enough for all threads, with little memory.
const BATCH_BYTES: usize = 512 << 10;
const BATCH_DOCUMENTS: usize = 4096;

/// What is tokenized, and where its tokens are written.
pub(super) struct TokenizeRequest<'a> {
    pub(super) source: &'a Path,
    /// Share of the documents that is held out; 0 for none.
    pub(super) held_out: f64,
    pub(super) encoder: Encoder<'a>,
    pub(super) cache_folder: &'a Path,
    /// The key of the token file.
    pub(super) key: u64,
    /// A hash of every byte of the source.
    pub(super) contents: u64,
}

/// Tokenizes a source and writes its token file.
pub(super) fn tokenize_source(request: &TokenizeRequest<'_>, listing: &Listing, progress: &Progress<'_>) -> Result<()> {
    let source_files = SourceFiles::new(listing, progress)?;
    let mut source_tokenizer = SourceTokenizer::new(request, progress, &source_files)?;
    for file in &source_files.files {
        file.read(progress, &mut |item| match item {
            FileItem::Document(document) => source_tokenizer.add_document(document),
            FileItem::TextPart { text, last } => source_tokenizer.add_text_part(&file.name, &text, last),
        })?;
    }
    source_tokenizer.finish(request.contents)
}

/// A unit of tokenization, independent of all others.
enum TokenizeJob {
    Document { document: SourceDocument, held_out: bool },
    Window { window: Window, held_out: bool },
}

/// The result of a job.
enum Tokenized {
    Document { masked_tokens: Vec<u32>, held_out: bool },
    Window { window: Window, tokens: Vec<PositionedToken>, held_out: bool },
}

struct SourceTokenizer<'a> {
    progress: &'a Progress<'a>,
    encoder: Encoder<'a>,
    source: &'a Path,
    held_out_share: f64,
    writer: CacheWriter,
    summary: SourceSummary,
    /// Jobs that wait to be tokenized, and the bytes of their text.
    jobs: Vec<TokenizeJob>,
    bytes: usize,
    /// The first record, until a second one shows that it is not alone: of a lone text, the end is held out.
    first: Option<SourceDocument>,
    /// Number of bytes for training, where the source is a single text file; the rest of it is held out.
    training_bytes: Option<u64>,
    /// Cuts the current text into windows; `done` counts the bytes of its file that were read.
    splitter: WindowSplitter,
    file_bytes_done: u64,
    /// Joins the windows of the text that is being written; none between texts.
    joiner: Option<WindowJoiner>,
    /// Whether some document has something to learn.
    has_targets: bool,
    /// Number of documents that are written, and of those that are held out.
    documents_written: u64,
    documents_held_out: u64,
    /// The smallest hash of a document's name, and the document's index.
    smallest_hash: Option<(u64, u64)>,
    /// Hashes of the names of documents whose masked tokens are not written yet.
    name_hashes: VecDeque<u64>,
    /// Whether a lone text was cut into a training part and a held-out part.
    split_lone_text: bool,
}

impl<'a> SourceTokenizer<'a> {
    fn new(request: &TokenizeRequest<'a>, progress: &'a Progress<'a>, source_files: &SourceFiles) -> Result<Self> {
        let summary = SourceSummary {
            skipped: source_files.skipped.clone(),
            evaluation_like_files: source_files.evaluation_like_files.clone(),
            ..SourceSummary::default()
        };
        let training_bytes =
            source_files.single_text_bytes().map(|bytes| bytes - (bytes as f64 * request.held_out) as u64);
        Ok(Self {
            progress,
            encoder: request.encoder,
            source: request.source,
            held_out_share: request.held_out,
            writer: CacheWriter::new(request.cache_folder, request.key)?,
            summary,
            jobs: Vec::new(),
            bytes: 0,
            first: None,
            training_bytes,
            splitter: WindowSplitter::new(),
            file_bytes_done: 0,
            joiner: None,
            has_targets: false,
            documents_written: 0,
            documents_held_out: 0,
            smallest_hash: None,
            name_hashes: VecDeque::new(),
            split_lone_text: false,
        })
    }

    /// Takes a record.
    fn add_document(&mut self, document: SourceDocument) -> Result<()> {
        if document.content.is_chat_without_targets() {
            self.summary.skipped.without_targets += 1;
            return Ok(());
        }
        self.has_targets |= !document.content.has_no_targets();
        match (self.first.take(), self.summary.documents()) {
            (None, 0) => {
                self.count_document(&document.content);
                self.first = Some(document);
                Ok(())
            }
            (first, _) => {
                self.count_document(&document.content);
                first.into_iter().chain([document]).try_for_each(|document| self.queue_document(document))
            }
        }
    }

    fn count_document(&mut self, content: &Content) {
        *match content {
            Content::Text(_) => &mut self.summary.texts,
            Content::Completion { .. } => &mut self.summary.completions,
            Content::Chat { .. } => &mut self.summary.chats,
        } += 1;
    }

    /// Queues a record of a source that has several.
    fn queue_document(&mut self, document: SourceDocument) -> Result<()> {
        let hash = name_hash(&document.name);
        let held_out = split_position(hash) < self.held_out_share;
        self.name_hashes.push_back(hash);
        match document.content {
            Content::Text(text) => self.queue_text(&text, held_out),
            _ => self.queue(TokenizeJob::Document { document, held_out }),
        }
    }

    /// Queues a text that is in memory as a whole.
    fn queue_text(&mut self, text: &str, held_out: bool) -> Result<()> {
        self.queue_windows(text, held_out)?;
        self.queue_last_window(held_out)
    }

    /// Takes a part of a text file.
    fn add_text_part(&mut self, name: &str, text: &str, last: bool) -> Result<()> {
        if let Some(first) = self.first.take() {
            self.queue_document(first)?;
        }
        if self.file_bytes_done == 0 {
            self.summary.texts += 1;
            self.name_hashes.push_back(name_hash(name));
        }
        self.has_targets |= !text.trim().is_empty();
        let from = self.file_bytes_done;
        self.file_bytes_done = if last { 0 } else { from + text.len() as u64 };
        let Some(training_bytes) = self.training_bytes else {
            let held_out = split_position(name_hash(name)) < self.held_out_share;
            self.queue_windows(text, held_out)?;
            return if last { self.queue_last_window(held_out) } else { Ok(()) };
        };
        // The cut may fall inside a character, which then is held out as a whole.
        let head = text.floor_char_boundary(training_bytes.saturating_sub(from) as usize);
        let tail = &text[head..];
        self.queue_windows(&text[..head], false)?;
        if !tail.is_empty() {
            if !self.split_lone_text {
                self.queue_last_window(false)?;
                self.name_hashes.push_back(name_hash(name));
                self.split_lone_text = true;
            }
            self.queue_windows(tail, true)?;
        }
        if last { self.queue_last_window(self.split_lone_text) } else { Ok(()) }
    }

    fn queue_windows(&mut self, text: &str, held_out: bool) -> Result<()> {
        let windows = self.splitter.push(text);
        windows.into_iter().try_for_each(|window| self.queue(TokenizeJob::Window { window, held_out }))
    }

    fn queue_last_window(&mut self, held_out: bool) -> Result<()> {
        let window = std::mem::replace(&mut self.splitter, WindowSplitter::new()).finish();
        self.queue(TokenizeJob::Window { window, held_out })
    }

    fn queue(&mut self, job: TokenizeJob) -> Result<()> {
        self.bytes += match &job {
            TokenizeJob::Document { document, .. } => document.content.size(),
            TokenizeJob::Window { window, .. } => window.text.len(),
        };
        self.jobs.push(job);
        if self.bytes >= BATCH_BYTES || self.jobs.len() >= BATCH_DOCUMENTS { self.flush() } else { Ok(()) }
    }

    /// Tokenizes all waiting jobs and writes their tokens.
    fn flush(&mut self) -> Result<()> {
        self.bytes = 0;
        self.progress.report()?;
        let (encoder, source) = (self.encoder, self.source);
        let results = pool::map(std::mem::take(&mut self.jobs), |job| match job {
            TokenizeJob::Document { document, held_out } => encode_with_targets(&encoder, source, &document)
                .map(|masked_tokens| Tokenized::Document { masked_tokens, held_out }),
            TokenizeJob::Window { window, held_out } => {
                let tokens = encoder.tokenizer().encode_window(&window)?;
                Ok(Tokenized::Window { window, tokens, held_out })
            }
        });
        results.into_iter().try_for_each(|result| match result? {
            Tokenized::Window { window, tokens, held_out } => self.join_window(&window, tokens, held_out),
            Tokenized::Document { masked_tokens, held_out } => {
                self.writer.extend(&masked_tokens)?;
                self.count_written(held_out)
            }
        })
    }

    fn join_window(&mut self, window: &Window, tokens: Vec<PositionedToken>, held_out: bool) -> Result<()> {
        let tokenizer: &Tokenizer = self.encoder.tokenizer();
        let mut masked_tokens = Vec::new();
        let joiner = self.joiner.get_or_insert_with(|| {
            masked_tokens = self.encoder.masked_prefix();
            WindowJoiner::default()
        });
        joiner.push(window, tokens, |text| tokenizer.encode_part(text), &mut masked_tokens)?;
        if window.last {
            masked_tokens.extend(tokenizer.suffix_tokens());
            self.joiner = None;
        }
        self.writer.extend(&masked_tokens)?;
        if window.last { self.count_written(held_out) } else { Ok(()) }
    }

    /// Notes that a document is written.
    fn count_written(&mut self, held_out: bool) -> Result<()> {
        let hash = self.name_hashes.pop_front().unwrap_or_default();
        if let Some(index) = self.writer.end(held_out)? {
            (self.documents_written, self.documents_held_out) =
                (self.documents_written + 1, self.documents_held_out + u64::from(held_out));
            self.smallest_hash =
                self.smallest_hash.filter(|(smallest_hash, _)| *smallest_hash <= hash).or(Some((hash, index)));
        }
        Ok(())
    }

    fn finish(mut self, contents: u64) -> Result<()> {
        match self.first.take() {
            Some(SourceDocument { name, content: Content::Text(text) }) => {
                let cut = text.floor_char_boundary(text.len() - (text.len() as f64 * self.held_out_share) as usize);
                self.name_hashes.extend([name_hash(&name); 2]);
                self.split_lone_text = true;
                self.queue_text(&text[..cut], false)?;
                if cut < text.len() {
                    self.queue_text(&text[cut..], true)?;
                }
            }
            Some(document) => {
                self.name_hashes.push_back(name_hash(&document.name));
                self.queue(TokenizeJob::Document { document, held_out: false })?;
            }
            None => {}
        }
        self.flush()?;
        if !self.has_targets {
            return Err(nothing_to_learn(self.source, &self.summary.skipped));
        }
        // Where all documents fell on one side of the split, which happens when they are few, the one with the smallest hash
        // changes sides.
        let all_in_one_split = self.documents_held_out == 0 || self.documents_held_out == self.documents_written;
        let needs_both_splits = self.held_out_share > 0.0 && self.documents_written > 1 && !self.split_lone_text;
        let moved_document =
            self.smallest_hash.filter(|_| needs_both_splits && all_in_one_split).map(|(_, index)| index);
        self.writer.finish(moved_document, contents, &self.summary)
    }
}

/// The masked tokens of a conversation or completion; an error if nothing in it is learned.
fn encode_with_targets(
    encoder: &Encoder<'_>,
    source: &Path,
    SourceDocument { name, content }: &SourceDocument,
) -> Result<Vec<u32>> {
    let masked_tokens = encoder.encode(content, source, name)?;
    // The first token is never a target.
    match masked_tokens.iter().skip(1).all(|token| token & NOT_LEARNED != 0) {
        true => Err(Error::Data {
            path: document_path(source, name),
            problem: "no token of it is learned; its template yields no assistant's words".into(),
        }),
        false => Ok(masked_tokens),
    }
}

fn name_hash(name: &str) -> u64 {
    fingerprint(name.bytes().map(u64::from))
}

/// A hash as a number from 0 to below 1: its remainder by 20 chooses the twentieth, and the quotient the place inside it.
fn split_position(hash: u64) -> f64 {
    let fine = (hash / 20 % (1 << 32)) as f64 / (1u64 << 32) as f64;
    ((hash % 20) as f64 + fine) / 20.0
}
