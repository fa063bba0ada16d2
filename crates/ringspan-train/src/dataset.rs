//! The training data of a run: read, tokenized, and ready to be dealt as batches.

use crate::{
    checkpoint::Identity,
    config::{Source, TextSource, TrainConfig},
    data::{
        Corpus, Encoder, Fit, GIVEN, Mixture, Overlong, Packer, Position, Reading, Sequence, Store, Template,
        fingerprint, read_tokens,
    },
    error::{Error, Result},
    feed::Feed,
    observer::{Observer, grouped},
    setup::model_error,
    tokenizer::Tokenizer,
};
use ringspan_candle::pool;
use ringspan_models::Origin;
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// The data of a run: training batches, evaluation sequences and a description.
pub(crate) struct Dataset {
    pub(crate) feed: Feed,
    /// The sequences of the held-out (evaluation) split.
    pub(crate) held_out: Vec<Sequence>,
    pub(crate) identity: Identity,
    /// Lines for the user: which token ends documents, and how documents are packed.
    pub(crate) notes: Vec<String>,
    /// Lines for the user about things that deserve a look.
    pub(crate) warnings: Vec<String>,
    /// The token that ends a document or an answer, where there is one.
    pub(crate) end: Option<u32>,
}

/// Whether a run may go on when the token cache cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tokens {
    /// The run may not: [`Dataset::open`] fails.
    MustBeKept,
    /// The run may: tokens are written to a temporary folder that is removed at the end. A plan (`--dry-run`) needs nothing more.
    MayBeLost,
}

/// Reports the progress of tokenization to an observer, and lets `stop` interrupt it.
pub(crate) struct Watcher<'a> {
    observer: Mutex<&'a mut dyn Observer>,
    stop: &'a AtomicBool,
}

impl<'a> Watcher<'a> {
    /// `stop` may be set at any time.
    pub(crate) fn new(observer: &'a mut dyn Observer, stop: &'a AtomicBool) -> Self {
        Self { observer: Mutex::new(observer), stop }
    }

    fn see(&self, source: &Path, done: u64, bytes: u64) -> ControlFlow<()> {
        if self.stop.load(Ordering::SeqCst) {
            return ControlFlow::Break(());
        }
        self.observer.lock().unwrap_or_else(PoisonError::into_inner).reading(source, done, bytes);
        ControlFlow::Continue(())
    }
}

impl Dataset {
    /// Reads the data of a run for a model of `vocabulary` tokens, on `threads` threads. It writes tokens to the token cache, and
    /// nothing else.
    ///
    /// # Errors
    /// Files that cannot be read, documents that cannot be written as tokens, tokens that the model does not have, and
    /// [`Error::Interrupted`].
    pub(crate) fn open(
        config: &TrainConfig,
        tokenizer: Option<&Tokenizer>,
        vocabulary: usize,
        threads: usize,
        tokens: Tokens,
        watcher: &Watcher<'_>,
    ) -> Result<Self> {
        match (&config.source, tokenizer) {
            (Source::Tokens(path), _) => Self::batch(path, vocabulary),
            (Source::Text(sources), Some(tokenizer)) => {
                let folder = TokenFolder::new(&config.token_cache, tokens)?;
                pool::run(threads, || Self::text(config, sources, tokenizer, vocabulary, &folder, watcher))?
            }
            (Source::Text(sources), None) => Err(Error::Data {
                path: sources.first().map(|source| source.path.clone()).unwrap_or_default(),
                problem: "text needs a tokenizer, and there is none".into(),
            }),
        }
    }

    fn batch(path: &Path, vocabulary: usize) -> Result<Self> {
        let batch = read_tokens(path, vocabulary)?;
        let identity = Identity {
            summary: format!(
                "{} sequences of {} tokens in {}: {}",
                batch.rows,
                batch.length,
                path.display(),
                read_and_learned(batch.real_tokens(), batch.valid_targets())
            ),
            fingerprint: fingerprint(batch.tokens.iter().map(|&t| u64::from(t)).chain([batch.length as u64])),
        };
        Ok(Self::fed(Feed::Tokens(batch), identity))
    }

    /// A dataset of `feed` with no held-out sequences.
    pub(crate) fn fed(feed: Feed, identity: Identity) -> Self {
        let (held_out, notes, warnings) = Default::default();
        Self { feed, held_out, identity, notes, warnings, end: None }
    }

    fn text(
        config: &TrainConfig,
        sources: &[TextSource],
        tokenizer: &Tokenizer,
        vocabulary: usize,
        folder: &TokenFolder,
        watcher: &Watcher<'_>,
    ) -> Result<Self> {
        let reader = Reader::new(config, tokenizer, vocabulary, folder, watcher)?;
        let learned = sources.iter().map(|source| reader.learned(source)).collect::<Result<Vec<_>>>()?;
        let judges = config.eval_data.as_ref().map(|path| reader.judges(path)).transpose()?;
        reader.template_has_effect(learned.iter().chain(&judges), sources)?;
        let weights = shares(&learned);
        let mut warnings: Vec<String> = folder.warning.iter().cloned().collect();
        warnings.extend(learned.iter().flat_map(SourceOfText::warnings));
        let end = learned.iter().find_map(|source| source.end(tokenizer).0.filter(|_| source.only_chats()));
        let held_out = match &judges {
            Some(judges) => judges.look(&judges.corpus.train, config, 1.0),
            None => {
                let each = learned.iter().zip(&weights);
                each.flat_map(|(source, share)| source.look(&source.corpus.held_out, config, *share)).collect()
            }
        };
        let (summary, notes) = described(config, &learned, judges.as_ref(), &weights, tokenizer);
        let packer = |source: &SourceOfText| {
            let packer =
                Packer::new(source.corpus.train.clone(), config.sequence_length, config.seed, Position::default());
            packer.fitted(source.fit.clone())
        };
        let packers = learned.iter().map(packer).zip(weights.iter().copied()).collect();
        Ok(Self {
            held_out,
            identity: Identity { summary, fingerprint: identity(&learned, judges.as_ref(), &weights) },
            notes,
            warnings,
            end: end.or(tokenizer.end_of_text()),
            feed: Feed::Text {
                mixture: Mixture::new(packers, config.packing),
                length: config.sequence_length,
                batch_size: config.batch_size,
            },
        })
    }
}

/// Reads and tokenizes the sources of a run.
struct Reader<'a, 'w> {
    config: &'a TrainConfig,
    tokenizer: &'a Tokenizer,
    vocabulary: usize,
    folder: &'a Path,
    template: Option<Template>,
    /// Why the model's template cannot be used, where it has one.
    no_template: Option<String>,
    watcher: &'a Watcher<'w>,
}

/// A source with its tokens.
struct SourceOfText {
    path: PathBuf,
    weight: Option<f64>,
    corpus: Corpus,
    /// How documents are cut and packed for training.
    fit: Fit,
    /// What was wrong with the cached tokens, in words for the user.
    said: Vec<String>,
}

/// The chat template that the model's own file holds, where it is a GGUF file.
fn template_of_file(config: &TrainConfig) -> Result<Option<Template>> {
    let Some(path) = &config.model else { return Ok(None) };
    let template = Origin::at(path).and_then(|origin| origin.chat_template()).map_err(model_error)?;
    template.map(|template| Template::of_file(template, path)).transpose()
}

impl<'a, 'w> Reader<'a, 'w> {
    fn new(
        config: &'a TrainConfig,
        tokenizer: &'a Tokenizer,
        vocabulary: usize,
        folder: &'a TokenFolder,
        watcher: &'a Watcher<'w>,
    ) -> Result<Self> {
        let (template, no_template) = match (&config.chat_template, tokenizer.folder()) {
            (Some(file), folder) => (Some(Template::read(file, folder)?), None),
            // A template that is damaged or unsupported is an error only once a conversation is met, so its error is kept for
            // then.
            (None, Some(folder)) => match Template::of_model(folder) {
                Ok(template) => (template, None),
                Err(error) => (None, Some(error.to_string())),
            },
            (None, None) => match template_of_file(config) {
                Ok(template) => (template, None),
                Err(error) => (None, Some(error.to_string())),
            },
        };
        Ok(Self { config, tokenizer, vocabulary, folder: &folder.path, template, no_template, watcher })
    }

    fn learned(&self, source: &TextSource) -> Result<SourceOfText> {
        let not_learned = [Some(self.config.out.clone()), self.config.eval_data.clone()];
        let exclude: Vec<PathBuf> = not_learned.into_iter().flatten().collect();
        let read = self.read(&source.path, &exclude, self.config.held_out)?;
        if read.fit.is_empty() {
            let length = self.config.sequence_length;
            let problem = format!(
                "every document is longer than {length} tokens, and nothing is left of them: {}; raise --sequence-length, or \
                 give --overlong split",
                read.fit
            );
            return Err(Error::Data { path: source.path.clone(), problem });
        }
        Ok(SourceOfText { weight: source.weight, ..read })
    }

    fn judges(&self, path: &Path) -> Result<SourceOfText> {
        self.read(path, std::slice::from_ref(&self.config.out), 0.0)
    }

    fn read(&self, path: &Path, exclude: &[PathBuf], held_out: f64) -> Result<SourceOfText> {
        let encoder = Encoder::new(self.tokenizer, self.template.as_ref());
        let encoder = match &self.no_template {
            Some(why) => encoder.without_template(why),
            None => encoder,
        };
        let reading = Reading {
            source: path,
            exclude,
            held_out,
            encoder,
            folder: self.folder,
            check: self.config.check_data,
            deadline: self.config.deadline,
            watch: &|done, bytes| self.watcher.see(path, done, bytes),
        };
        let (corpus, said) = reading.corpus()?;
        self.known(&corpus)?;
        let fit = fit(self.config, &corpus.train, corpus.about.stays_whole());
        Ok(SourceOfText { path: path.into(), weight: None, corpus, fit, said })
    }

    /// Refuses a token for which the model's embedding has no row. Some tokenizers know more tokens than their model, for inputs
    /// such as images; that is harmless until one occurs in the data.
    fn known(&self, corpus: &Corpus) -> Result<()> {
        let Some(largest) = corpus.largest.filter(|&token| token as usize >= self.vocabulary) else { return Ok(()) };
        let name = self.tokenizer.spelling(largest).unwrap_or_default();
        let problem = format!(
            "has {} tokens, and its token {largest} ({name}) is in the data, but the model's vocabulary is {}",
            self.tokenizer.vocabulary(),
            self.vocabulary
        );
        Err(Error::Tokenizer { path: self.tokenizer.path().into(), problem })
    }

    /// Refuses a `--chat-template` when the data holds no conversations to apply it to.
    fn template_has_effect<'b>(
        &self,
        mut all: impl Iterator<Item = &'b SourceOfText>,
        sources: &[TextSource],
    ) -> Result<()> {
        let Some(file) = &self.config.chat_template else { return Ok(()) };
        if all.any(|source| source.corpus.about.chats > 0) {
            return Ok(());
        }
        let paths: Vec<String> = sources.iter().map(|source| source.path.display().to_string()).collect();
        let (paths, verb) = (paths.join(", "), if sources.len() == 1 { "holds" } else { "hold" });
        Err(Error::Settings(format!(
            "--chat-template {} has no effect: {paths} {verb} no conversations; leave it out",
            file.display()
        )))
    }
}

fn fit(config: &TrainConfig, documents: &Store, whole: bool) -> Fit {
    let default = if whole { Overlong::Truncate } else { Overlong::Split };
    Fit::new(documents, config.sequence_length, whole, config.overlong.unwrap_or(default))
}

impl SourceOfText {
    /// The sequences of one evaluation: `share` of the `config.eval_tokens` tokens that an evaluation reads at most.
    fn look(&self, documents: &Store, config: &TrainConfig, share: f64) -> Vec<Sequence> {
        let fit = fit(config, documents, self.corpus.about.stays_whole());
        let most = (config.eval_tokens as f64 * share).ceil() as usize;
        Packer::once(documents, &fit, config.sequence_length, most)
    }

    /// Number of training tokens that are read, and number of those that are learned (that are targets of the loss).
    fn tokens(&self) -> (u64, u64) {
        let (unseen, unlearned) = self.fit.lost();
        (self.corpus.train.tokens() as u64 - unseen, self.corpus.learned[0] - unlearned)
    }

    fn only_chats(&self) -> bool {
        self.corpus.about.chats == self.corpus.about.documents()
    }

    /// The token that ends what is learned, and a line about it for the printed plan.
    fn end(&self, tokenizer: &Tokenizer) -> (Option<u32>, String) {
        if self.only_chats() {
            // The last learned special token of the first document is the one that the template writes after an answer; every
            // document has an answer.
            let words = if self.corpus.train.is_empty() { &[] } else { self.corpus.train.document(0) };
            let mut learned = words.iter().rev().copied().filter(|word| word & GIVEN == 0);
            return match learned.find_map(|word| tokenizer.special(word).map(|name| (word, name))) {
                Some((id, name)) => (Some(id), format!("answers end with {name} (token {id}), as the template says")),
                None => (tokenizer.end_of_text(), "answers end as the template says, with no special token".into()),
            };
        }
        match tokenizer.end() {
            Some(end) => (Some(end.id), format!("texts end with {end}")),
            None => (None, "nothing marks the end of a text: the tokenizer has no token for it".into()),
        }
    }

    fn warnings(&self) -> Vec<String> {
        let suspect = |name: &String| {
            format!("{name} is learned like all others: name a file to be judged by with --eval-data, and move it away")
        };
        self.corpus.about.suspects.iter().map(suspect).collect()
    }

    /// Lines about documents that were left out, and about what was wrong with the cached tokens.
    fn remarks(&self) -> Vec<String> {
        self.corpus.about.skipped.words().into_iter().chain(self.said.iter().cloned()).collect()
    }
}

/// Each source's share of the sequences: its weight, or its number of tokens where no source has a weight, over the sum.
fn shares(learned: &[SourceOfText]) -> Vec<f64> {
    let weight = |source: &SourceOfText| source.weight.unwrap_or(source.tokens().0 as f64);
    let sum: f64 = learned.iter().map(weight).sum();
    learned.iter().map(|source| weight(source) / sum).collect()
}

/// Describes the data for the user: a summary line, and notes below it.
fn described(
    config: &TrainConfig,
    learned: &[SourceOfText],
    judges: Option<&SourceOfText>,
    shares: &[f64],
    tokenizer: &Tokenizer,
) -> (String, Vec<String>) {
    let held_out = match judges {
        Some(judges) => {
            format!("{} held out in {}", grouped(judges.corpus.train.tokens() as u64), judges.path.display())
        }
        None => {
            let tokens = learned.iter().map(|source| source.corpus.held_out.tokens() as u64).sum();
            format!("{} held out", grouped(tokens))
        }
    };
    let of_judges = judges.map(SourceOfText::remarks).unwrap_or_default();
    let remarks = |all: Vec<String>| if all.is_empty() { String::new() } else { format!(" ({})", all.join("; ")) };
    let documents = |source: &SourceOfText| {
        format!("{} documents of {}", grouped(source.corpus.about.documents()), source.path.display())
    };
    if let [source] = learned {
        let (read, learned) = source.tokens();
        let said = remarks([source.remarks(), of_judges].concat());
        let summary = format!("{}: {}, {held_out}{said}", documents(source), read_and_learned(read, learned));
        return (summary, vec![source.end(tokenizer).1, source.fit.to_string()]);
    }
    let (read, of_them) = learned.iter().map(SourceOfText::tokens).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    let by = if config.weighted() { "weight" } else { "size" };
    let summary = format!(
        "{} sources, mixed by {by}: {}, {held_out}{}",
        learned.len(),
        read_and_learned(read, of_them),
        remarks(of_judges)
    );
    let mut notes = Vec::new();
    for (source, share) in learned.iter().zip(shares) {
        let (read, learned) = source.tokens();
        notes.push(format!(
            "{:.1} % of the sequences: {}: {}{}",
            share * 100.0,
            documents(source),
            read_and_learned(read, learned),
            remarks(source.remarks())
        ));
        notes.push(format!("  {}; {}", source.end(tokenizer).1, source.fit));
    }
    (summary, notes)
}

fn read_and_learned(read: u64, learned: u64) -> String {
    format!("{} tokens read, {} tokens learned", grouped(read), grouped(learned))
}

/// A fingerprint of everything that decides which tokens a step is fed.
fn identity(learned: &[SourceOfText], judges: Option<&SourceOfText>, shares: &[f64]) -> u64 {
    let of_source = |source: &SourceOfText| {
        // The same corpus, cut in another way, makes other sequences.
        let way = source.fit.identity().into_iter().flatten();
        way.chain([source.corpus.fingerprint]).collect::<Vec<u64>>()
    };
    let of_judges = judges.map(of_source).unwrap_or_default();
    match (learned, &of_judges[..]) {
        ([source], []) => match source.fit.identity() {
            None => source.corpus.fingerprint,
            // No separate entry for the held-out split: it is cut in the same way.
            Some(way) => fingerprint(way.into_iter().chain(of_source(source))),
        },
        (sources, _) => {
            let each = sources
                .iter()
                .zip(shares)
                .flat_map(|(source, share)| of_source(source).into_iter().chain([share.to_bits()]));
            fingerprint(each.chain(of_judges))
        }
    }
}

/// The folder of the token cache, or a temporary one that is removed when this is dropped.
struct TokenFolder {
    path: PathBuf,
    /// Why the token cache cannot be used, in words; set where `path` is a temporary folder.
    warning: Option<String>,
    /// Folders that were created on the way to the token cache, the innermost first.
    made: Vec<PathBuf>,
}

impl Drop for TokenFolder {
    fn drop(&mut self) {
        if self.warning.is_some() {
            // A failure is ignored: the files are in the system's temporary folder.
            let _ = std::fs::remove_dir_all(&self.path);
        }
        // Only empty folders can be removed so: a refused run leaves none behind, and a folder with cached tokens stays.
        self.made.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    }
}

impl TokenFolder {
    fn new(path: &Path, tokens: Tokens) -> Result<Self> {
        let made: Vec<PathBuf> = path.ancestors().take_while(|at| !at.exists()).map(Path::to_path_buf).collect();
        let probe = path.join(format!(".{}.probe", std::process::id()));
        let written = std::fs::create_dir_all(path).map_err(Error::io("create", path));
        let written = written.and_then(|()| std::fs::write(&probe, "").map_err(Error::io("write", &probe)));
        let _ = std::fs::remove_file(&probe);
        match (written, tokens) {
            (Ok(()), _) => Ok(Self { path: path.into(), warning: None, made }),
            (Err(error), Tokens::MustBeKept) => Err(error),
            (Err(error), Tokens::MayBeLost) => {
                let path = std::env::temp_dir().join(format!("ringspan-tokens-{}", std::process::id()));
                Ok(Self { path, warning: Some(format!("the tokens are not kept: {error}")), made })
            }
        }
    }
}
