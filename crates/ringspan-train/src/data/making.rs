//! Tokenizes documents into a file of tokens, a batch at a time.

use super::{
    About, Content, Encoder, GIVEN, Text,
    cache::Writer,
    corpus::Reading,
    encode::named_place,
    files::{Item, Survey, nothing},
    fingerprint,
    listing::Listing,
    progress::Progress,
};
use crate::{
    error::{Error, Result},
    tokenizer::Tokenizer,
    windows::{Cutter, Joiner, Token, Window},
};
use ringspan_candle::pool;
use std::{collections::VecDeque, path::Path};

/// Bytes of text, and number of documents, that are tokenized together: enough for all threads, with little memory.
const BATCH: usize = 512 << 10;
const DOCUMENTS: usize = 4096;

/// Tokenizes a source and writes its token file.
pub(super) fn make(
    reading: &Reading<'_>,
    listing: &Listing,
    progress: &Progress<'_>,
    key: u64,
    contents: u64,
) -> Result<()> {
    let survey = Survey::new(listing, progress)?;
    let mut maker = Maker::new(reading, progress, key, &survey)?;
    for file in &survey.files {
        file.read(progress, &mut |item| match item {
            Item::Document(document) => maker.document(document),
            Item::Part { text, last } => maker.part(&file.name, &text, last),
        })?;
    }
    maker.finish(contents)
}

/// A unit of tokenization, independent of all others.
enum Job {
    Document { text: Text, held_out: bool },
    Window { window: Window, held_out: bool },
}

/// The result of a job.
enum Made {
    Document { words: Vec<u32>, held_out: bool },
    Window { window: Window, tokens: Vec<Token>, held_out: bool },
}

struct Maker<'a> {
    progress: &'a Progress<'a>,
    encoder: Encoder<'a>,
    source: &'a Path,
    share: f64,
    writer: Writer,
    about: About,
    /// Jobs that wait to be tokenized, and the bytes of their text.
    jobs: Vec<Job>,
    bytes: usize,
    /// The first record, until a second one shows that it is not alone: of a lone text, the end is held out.
    first: Option<Text>,
    /// Number of bytes for training, where the source is a single text file; the rest of it is held out.
    cut: Option<u64>,
    /// Cuts the current text into windows; `done` counts the bytes of its file that were read.
    cutter: Cutter,
    done: u64,
    /// Joins the windows of the text that is being written; none between texts.
    joiner: Option<Joiner>,
    /// Whether some document has something to learn.
    says: bool,
    /// Number of documents that are written, and of those that are held out.
    written: u64,
    held_out: u64,
    /// The smallest hash of a document's name, and the document's index.
    least: Option<(u64, u64)>,
    /// Hashes of the names of documents whose words are not written yet.
    hashes: VecDeque<u64>,
    /// Whether a lone text was cut into a training part and a held-out part.
    halved: bool,
}

impl<'a> Maker<'a> {
    fn new(reading: &Reading<'a>, progress: &'a Progress<'a>, key: u64, survey: &Survey) -> Result<Self> {
        let about = About { skipped: survey.skipped.clone(), suspects: survey.suspects.clone(), ..About::default() };
        let cut = survey.lone_text().map(|bytes| bytes - (bytes as f64 * reading.held_out) as u64);
        Ok(Self {
            progress,
            encoder: reading.encoder,
            source: reading.source,
            share: reading.held_out,
            writer: Writer::new(reading.folder, key)?,
            about,
            jobs: Vec::new(),
            bytes: 0,
            first: None,
            cut,
            cutter: Cutter::new(),
            done: 0,
            joiner: None,
            says: false,
            written: 0,
            held_out: 0,
            least: None,
            hashes: VecDeque::new(),
            halved: false,
        })
    }

    /// Takes a record.
    fn document(&mut self, document: Text) -> Result<()> {
        if document.content.is_unlearned() {
            self.about.skipped.silent += 1;
            return Ok(());
        }
        self.says |= !document.content.is_blank();
        match (self.first.take(), self.about.documents()) {
            (None, 0) => {
                self.count(&document.content);
                self.first = Some(document);
                Ok(())
            }
            (first, _) => {
                self.count(&document.content);
                first.into_iter().chain([document]).try_for_each(|document| self.add(document))
            }
        }
    }

    fn count(&mut self, content: &Content) {
        *match content {
            Content::Text(_) => &mut self.about.texts,
            Content::Completion { .. } => &mut self.about.completions,
            Content::Chat { .. } => &mut self.about.chats,
        } += 1;
    }

    /// Queues a record of a source that has several.
    fn add(&mut self, document: Text) -> Result<()> {
        let hash = hash(&document.name);
        let held_out = place(hash) < self.share;
        self.hashes.push_back(hash);
        match document.content {
            Content::Text(text) => self.whole(&text, held_out),
            _ => self.push(Job::Document { text: document, held_out }),
        }
    }

    /// Queues a text that is in memory as a whole.
    fn whole(&mut self, text: &str, held_out: bool) -> Result<()> {
        self.text(text, held_out)?;
        self.end(held_out)
    }

    /// Takes a part of a text file.
    fn part(&mut self, name: &str, text: &str, last: bool) -> Result<()> {
        if let Some(first) = self.first.take() {
            self.add(first)?;
        }
        if self.done == 0 {
            self.about.texts += 1;
            self.hashes.push_back(hash(name));
        }
        self.says |= !text.trim().is_empty();
        let from = self.done;
        self.done = if last { 0 } else { from + text.len() as u64 };
        let Some(cut) = self.cut else {
            let held_out = place(hash(name)) < self.share;
            self.text(text, held_out)?;
            return if last { self.end(held_out) } else { Ok(()) };
        };
        // The cut may fall inside a character, which then is held out as a whole.
        let head = text.floor_char_boundary(cut.saturating_sub(from) as usize);
        let tail = &text[head..];
        self.text(&text[..head], false)?;
        if !tail.is_empty() {
            if !self.halved {
                self.end(false)?;
                self.hashes.push_back(hash(name));
                self.halved = true;
            }
            self.text(tail, true)?;
        }
        if last { self.end(self.halved) } else { Ok(()) }
    }

    fn text(&mut self, text: &str, held_out: bool) -> Result<()> {
        let windows = self.cutter.push(text);
        windows.into_iter().try_for_each(|window| self.push(Job::Window { window, held_out }))
    }

    fn end(&mut self, held_out: bool) -> Result<()> {
        let window = std::mem::replace(&mut self.cutter, Cutter::new()).finish();
        self.push(Job::Window { window, held_out })
    }

    fn push(&mut self, job: Job) -> Result<()> {
        self.bytes += match &job {
            Job::Document { text, .. } => text.content.size(),
            Job::Window { window, .. } => window.text.len(),
        };
        self.jobs.push(job);
        if self.bytes >= BATCH || self.jobs.len() >= DOCUMENTS { self.flush() } else { Ok(()) }
    }

    /// Tokenizes all waiting jobs and writes their tokens.
    fn flush(&mut self) -> Result<()> {
        self.bytes = 0;
        self.progress.tell()?;
        let (encoder, source) = (self.encoder, self.source);
        let made = pool::map(std::mem::take(&mut self.jobs), |job| match job {
            Job::Document { text, held_out } => {
                words(&encoder, source, &text).map(|words| Made::Document { words, held_out })
            }
            Job::Window { window, held_out } => {
                let tokens = encoder.tokenizer().tokens_of_window(&window)?;
                Ok(Made::Window { window, tokens, held_out })
            }
        });
        made.into_iter().try_for_each(|made| match made? {
            Made::Window { window, tokens, held_out } => self.join(&window, tokens, held_out),
            Made::Document { words, held_out } => {
                self.writer.extend(&words)?;
                self.count_written(held_out)
            }
        })
    }

    fn join(&mut self, window: &Window, tokens: Vec<Token>, held_out: bool) -> Result<()> {
        let tokenizer: &Tokenizer = self.encoder.tokenizer();
        let mut words = Vec::new();
        let joiner = self.joiner.get_or_insert_with(|| {
            words = self.encoder.before();
            Joiner::default()
        });
        joiner.push(window, tokens, |text| tokenizer.tokens_of(text), &mut words)?;
        if window.last {
            words.extend(tokenizer.behind());
            self.joiner = None;
        }
        self.writer.extend(&words)?;
        if window.last { self.count_written(held_out) } else { Ok(()) }
    }

    /// Notes that a document is written.
    fn count_written(&mut self, held_out: bool) -> Result<()> {
        let hash = self.hashes.pop_front().unwrap_or_default();
        if let Some(index) = self.writer.end(held_out)? {
            (self.written, self.held_out) = (self.written + 1, self.held_out + u64::from(held_out));
            self.least = self.least.filter(|(least, _)| *least <= hash).or(Some((hash, index)));
        }
        Ok(())
    }

    fn finish(mut self, contents: u64) -> Result<()> {
        match self.first.take() {
            Some(Text { name, content: Content::Text(text) }) => {
                let cut = text.floor_char_boundary(text.len() - (text.len() as f64 * self.share) as usize);
                self.hashes.extend([hash(&name); 2]);
                self.halved = true;
                self.whole(&text[..cut], false)?;
                if cut < text.len() {
                    self.whole(&text[cut..], true)?;
                }
            }
            Some(document) => {
                self.hashes.push_back(hash(&document.name));
                self.push(Job::Document { text: document, held_out: false })?;
            }
            None => {}
        }
        self.flush()?;
        if !self.says {
            return Err(nothing(self.source, &self.about.skipped));
        }
        // Where all documents fell on one side of the split, which happens when they are few, the one with the smallest hash
        // changes sides.
        let one_side = self.held_out == 0 || self.held_out == self.written;
        let splits = self.share > 0.0 && self.written > 1 && !self.halved;
        let other = self.least.filter(|_| splits && one_side).map(|(_, index)| index);
        self.writer.finish(other, contents, &self.about)
    }
}

/// The words of a conversation or completion; an error if nothing in it is learned.
fn words(encoder: &Encoder<'_>, source: &Path, Text { name, content }: &Text) -> Result<Vec<u32>> {
    let words = encoder.encode(content, source, name)?;
    // The first token is never a target.
    match words.iter().skip(1).all(|word| word & GIVEN != 0) {
        true => Err(Error::Data {
            path: named_place(source, name),
            problem: "no token of it is learned; its template yields no assistant's words".into(),
        }),
        false => Ok(words),
    }
}

fn hash(name: &str) -> u64 {
    fingerprint(name.bytes().map(u64::from))
}

/// A hash as a number from 0 to below 1: its remainder by 20 chooses the twentieth, and the quotient the place inside it.
fn place(hash: u64) -> f64 {
    let fine = (hash / 20 % (1 << 32)) as f64 / (1u64 << 32) as f64;
    ((hash % 20) as f64 + fine) / 20.0
}
