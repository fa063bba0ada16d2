//! The training data of a run: read, tokenized, and ready to be dealt as batches.

use crate::{
    checkpoint::Identity,
    config::{DataSource, TextSource, TrainConfig},
    data::{
        Corpus, DocumentStore, Encoder, Mixture, NOT_LEARNED, Overlong, PackableSpans, Packer, PackerPosition,
        Sequence, SourceReader, Template, fingerprint, read_tokens,
    },
    data_loader::DataLoader,
    error::{Error, Result},
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
    pub(crate) data_loader: DataLoader,
    /// The sequences of the held-out (evaluation) split.
    pub(crate) held_out: Vec<Sequence>,
    pub(crate) identity: Identity,
    /// Lines for the user: which token ends documents, and how documents are packed.
    pub(crate) notes: Vec<String>,
    /// Lines for the user about things that deserve a look.
    pub(crate) warnings: Vec<String>,
    /// The token that ends a document or an answer, where there is one.
    pub(crate) end_token: Option<u32>,
}

/// Whether a run may go on when the token cache cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CachePolicy {
    /// The run may not: [`Dataset::open`] fails.
    Required,
    /// The run may: tokens are written to a temporary folder that is removed at the end. A plan (`--dry-run`) needs nothing more.
    TemporaryAllowed,
}

/// Reports the progress of tokenization to an observer, and lets `stop` interrupt it.
pub(crate) struct TokenizationMonitor<'a> {
    observer: Mutex<&'a mut dyn Observer>,
    stop: &'a AtomicBool,
}

impl<'a> TokenizationMonitor<'a> {
    /// `stop` may be set at any time.
    pub(crate) fn new(observer: &'a mut dyn Observer, stop: &'a AtomicBool) -> Self {
        Self { observer: Mutex::new(observer), stop }
    }

    fn report(&self, source: &Path, done: u64, bytes: u64) -> ControlFlow<()> {
        if self.stop.load(Ordering::SeqCst) {
            return ControlFlow::Break(());
        }
        self.observer.lock().unwrap_or_else(PoisonError::into_inner).tokenizing(source, done, bytes);
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
        cache_policy: CachePolicy,
        monitor: &TokenizationMonitor<'_>,
    ) -> Result<Self> {
        match (&config.source, tokenizer) {
            (DataSource::Tokens(path), _) => Self::from_token_file(path, vocabulary),
            (DataSource::Text(sources), Some(tokenizer)) => {
                let folder = CacheFolder::new(&config.token_cache, cache_policy)?;
                pool::run(threads, || Self::from_text(config, sources, tokenizer, vocabulary, &folder, monitor))?
            }
            (DataSource::Text(sources), None) => Err(Error::Data {
                path: sources.first().map(|source| source.path.clone()).unwrap_or_default(),
                problem: "text needs a tokenizer, and there is none".into(),
            }),
        }
    }

    fn from_token_file(path: &Path, vocabulary: usize) -> Result<Self> {
        let batch = read_tokens(path, vocabulary)?;
        let identity = Identity {
            summary: format!(
                "{} sequences of {} tokens in {}: {}",
                batch.rows,
                batch.length,
                path.display(),
                token_counts_text(batch.real_tokens(), batch.valid_targets())
            ),
            fingerprint: fingerprint(batch.tokens.iter().map(|&t| u64::from(t)).chain([batch.length as u64])),
        };
        Ok(Self::from_loader(DataLoader::Tokens(batch), identity))
    }

    /// A dataset of `data_loader` with no held-out sequences.
    pub(crate) fn from_loader(data_loader: DataLoader, identity: Identity) -> Self {
        let (held_out, notes, warnings) = Default::default();
        Self { data_loader, held_out, identity, notes, warnings, end_token: None }
    }

    fn from_text(
        config: &TrainConfig,
        sources: &[TextSource],
        tokenizer: &Tokenizer,
        vocabulary: usize,
        folder: &CacheFolder,
        monitor: &TokenizationMonitor<'_>,
    ) -> Result<Self> {
        let reader = DatasetReader::new(config, tokenizer, vocabulary, folder, monitor)?;
        let learned = sources.iter().map(|source| reader.training_source(source)).collect::<Result<Vec<_>>>()?;
        let evaluation = config.eval_data.as_ref().map(|path| reader.evaluation_source(path)).transpose()?;
        reader.check_template_is_used(learned.iter().chain(&evaluation), sources)?;
        let weights = shares(&learned);
        let mut warnings: Vec<String> = folder.warning.iter().cloned().collect();
        warnings.extend(learned.iter().flat_map(TokenizedSource::warnings));
        let end = learned.iter().find_map(|source| source.end_token(tokenizer).0.filter(|_| source.only_chats()));
        let held_out = match &evaluation {
            Some(evaluation) => evaluation.evaluation_sequences(&evaluation.corpus.train, config, 1.0),
            None => {
                let each = learned.iter().zip(&weights);
                each.flat_map(|(source, share)| source.evaluation_sequences(&source.corpus.held_out, config, *share))
                    .collect()
            }
        };
        let (summary, notes) = describe(config, &learned, evaluation.as_ref(), &weights, tokenizer);
        let packer = |source: &TokenizedSource| {
            let packer = Packer::new(
                source.corpus.train.clone(),
                config.sequence_length,
                config.seed,
                PackerPosition::default(),
            );
            packer.with_spans(source.spans.clone())
        };
        let packers = learned.iter().map(packer).zip(weights.iter().copied()).collect();
        Ok(Self {
            held_out,
            identity: Identity { summary, fingerprint: data_fingerprint(&learned, evaluation.as_ref(), &weights) },
            notes,
            warnings,
            end_token: end.or(tokenizer.end_of_text()),
            data_loader: DataLoader::Text {
                mixture: Mixture::new(packers, config.packing),
                length: config.sequence_length,
                batch_size: config.batch_size,
            },
        })
    }
}

/// Reads and tokenizes the sources of a run.
struct DatasetReader<'a, 'w> {
    config: &'a TrainConfig,
    tokenizer: &'a Tokenizer,
    vocabulary: usize,
    folder: &'a Path,
    template: Option<Template>,
    /// Why the model's template cannot be used, where it has one.
    template_error: Option<String>,
    monitor: &'a TokenizationMonitor<'w>,
}

/// A source with its tokens.
struct TokenizedSource {
    path: PathBuf,
    weight: Option<f64>,
    corpus: Corpus,
    /// How documents are cut and packed for training.
    spans: PackableSpans,
    /// What was wrong with the cached tokens, in words for the user.
    cache_remarks: Vec<String>,
}

/// The chat template that the model's own file holds, where it is a GGUF file.
fn gguf_chat_template(config: &TrainConfig) -> Result<Option<Template>> {
    let Some(path) = &config.model else { return Ok(None) };
    let template = Origin::at(path).and_then(|origin| origin.chat_template()).map_err(model_error)?;
    template.map(|template| Template::from_gguf(template, path)).transpose()
}

impl<'a, 'w> DatasetReader<'a, 'w> {
    fn new(
        config: &'a TrainConfig,
        tokenizer: &'a Tokenizer,
        vocabulary: usize,
        folder: &'a CacheFolder,
        monitor: &'a TokenizationMonitor<'w>,
    ) -> Result<Self> {
        let (template, template_error) = match (&config.chat_template, tokenizer.folder()) {
            (Some(file), folder) => (Some(Template::read(file, folder)?), None),
            // A template that is damaged or unsupported is an error only once a conversation is met, so its error is kept for
            // then.
            (None, Some(folder)) => match Template::from_model_folder(folder) {
                Ok(template) => (template, None),
                Err(error) => (None, Some(error.to_string())),
            },
            (None, None) => match gguf_chat_template(config) {
                Ok(template) => (template, None),
                Err(error) => (None, Some(error.to_string())),
            },
        };
        Ok(Self { config, tokenizer, vocabulary, folder: &folder.path, template, template_error, monitor })
    }

    fn training_source(&self, source: &TextSource) -> Result<TokenizedSource> {
        let not_learned = [Some(self.config.out.clone()), self.config.eval_data.clone()];
        let exclude: Vec<PathBuf> = not_learned.into_iter().flatten().collect();
        let read = self.read(&source.path, &exclude, self.config.held_out)?;
        if read.spans.is_empty() {
            let length = self.config.sequence_length;
            let problem = format!(
                "every document is longer than {length} tokens, and nothing is left of them: {}; raise --sequence-length, or \
                 give --overlong split",
                read.spans
            );
            return Err(Error::Data { path: source.path.clone(), problem });
        }
        Ok(TokenizedSource { weight: source.weight, ..read })
    }

    fn evaluation_source(&self, path: &Path) -> Result<TokenizedSource> {
        self.read(path, std::slice::from_ref(&self.config.out), 0.0)
    }

    fn read(&self, path: &Path, exclude: &[PathBuf], held_out: f64) -> Result<TokenizedSource> {
        let encoder = Encoder::new(self.tokenizer, self.template.as_ref());
        let encoder = match &self.template_error {
            Some(why) => encoder.without_template(why),
            None => encoder,
        };
        let reader = SourceReader {
            source: path,
            exclude,
            held_out,
            encoder,
            cache_folder: self.folder,
            check_contents: self.config.check_data,
            deadline: self.config.deadline,
            on_progress: &|done, bytes| self.monitor.report(path, done, bytes),
        };
        let (corpus, cache_remarks) = reader.load_or_tokenize()?;
        self.check_vocabulary(&corpus)?;
        let spans = packable_spans(self.config, &corpus.train, corpus.summary.must_stay_whole());
        Ok(TokenizedSource { path: path.into(), weight: None, corpus, spans, cache_remarks })
    }

    /// Refuses a token for which the model's embedding has no row. Some tokenizers know more tokens than their model, for inputs
    /// such as images; that is harmless until one occurs in the data.
    fn check_vocabulary(&self, corpus: &Corpus) -> Result<()> {
        let Some(largest) = corpus.largest_token.filter(|&token| token as usize >= self.vocabulary) else {
            return Ok(());
        };
        let name = self.tokenizer.spelling(largest).unwrap_or_default();
        let problem = format!(
            "has {} tokens, and its token {largest} ({name}) is in the data, but the model's vocabulary is {}",
            self.tokenizer.vocabulary_size(),
            self.vocabulary
        );
        Err(Error::Tokenizer { path: self.tokenizer.path().into(), problem })
    }

    /// Refuses a `--chat-template` when the data holds no conversations to apply it to.
    fn check_template_is_used<'b>(
        &self,
        mut all: impl Iterator<Item = &'b TokenizedSource>,
        sources: &[TextSource],
    ) -> Result<()> {
        let Some(file) = &self.config.chat_template else { return Ok(()) };
        if all.any(|source| source.corpus.summary.chats > 0) {
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

fn packable_spans(config: &TrainConfig, documents: &DocumentStore, must_stay_whole: bool) -> PackableSpans {
    let default = if must_stay_whole { Overlong::Truncate } else { Overlong::Split };
    PackableSpans::new(documents, config.sequence_length, must_stay_whole, config.overlong.unwrap_or(default))
}

impl TokenizedSource {
    /// The sequences of one evaluation: `share` of the `config.eval_tokens` tokens that an evaluation reads at most.
    fn evaluation_sequences(&self, documents: &DocumentStore, config: &TrainConfig, share: f64) -> Vec<Sequence> {
        let spans = packable_spans(config, documents, self.corpus.summary.must_stay_whole());
        let max_tokens = (config.eval_tokens as f64 * share).ceil() as usize;
        Packer::pack_once(documents, &spans, config.sequence_length, max_tokens)
    }

    /// Number of training tokens that are read, and number of those that are learned (that are targets of the loss).
    fn token_counts(&self) -> (u64, u64) {
        let (lost, unlearned) = self.spans.lost_token_counts();
        (self.corpus.train.tokens() as u64 - lost, self.corpus.learned_tokens[0] - unlearned)
    }

    fn only_chats(&self) -> bool {
        self.corpus.summary.chats == self.corpus.summary.documents()
    }

    /// The token that ends what is learned, and a line about it for the printed plan.
    fn end_token(&self, tokenizer: &Tokenizer) -> (Option<u32>, String) {
        if self.only_chats() {
            // The last learned special token of the first document is the one that the template writes after an answer; every
            // document has an answer.
            let words = if self.corpus.train.is_empty() { &[] } else { self.corpus.train.document(0) };
            let mut learned = words.iter().rev().copied().filter(|word| word & NOT_LEARNED == 0);
            return match learned.find_map(|word| tokenizer.special_token(word).map(|name| (word, name))) {
                Some((id, name)) => (Some(id), format!("answers end with {name} (token {id}), as the template says")),
                None => (tokenizer.end_of_text(), "answers end as the template says, with no special token".into()),
            };
        }
        match tokenizer.end_token() {
            Some(end) => (Some(end.id), format!("texts end with {end}")),
            None => (None, "nothing marks the end of a text: the tokenizer has no token for it".into()),
        }
    }

    fn warnings(&self) -> Vec<String> {
        let warning = |name: &String| {
            format!("{name} is learned like all others: name a file to be judged by with --eval-data, and move it away")
        };
        self.corpus.summary.evaluation_like_files.iter().map(warning).collect()
    }

    /// Lines about documents that were left out, and about what was wrong with the cached tokens.
    fn remarks(&self) -> Vec<String> {
        self.corpus.summary.skipped.describe().into_iter().chain(self.cache_remarks.iter().cloned()).collect()
    }
}

/// Each source's share of the sequences: its weight, or its number of tokens where no source has a weight, over the sum.
fn shares(learned: &[TokenizedSource]) -> Vec<f64> {
    let weight = |source: &TokenizedSource| source.weight.unwrap_or(source.token_counts().0 as f64);
    let sum: f64 = learned.iter().map(weight).sum();
    learned.iter().map(|source| weight(source) / sum).collect()
}

/// Describes the data for the user: a summary line, and notes below it.
fn describe(
    config: &TrainConfig,
    learned: &[TokenizedSource],
    evaluation: Option<&TokenizedSource>,
    shares: &[f64],
    tokenizer: &Tokenizer,
) -> (String, Vec<String>) {
    let held_out = match evaluation {
        Some(evaluation) => {
            format!("{} held out in {}", grouped(evaluation.corpus.train.tokens() as u64), evaluation.path.display())
        }
        None => {
            let tokens = learned.iter().map(|source| source.corpus.held_out.tokens() as u64).sum();
            format!("{} held out", grouped(tokens))
        }
    };
    let evaluation_remarks = evaluation.map(TokenizedSource::remarks).unwrap_or_default();
    let remarks = |all: Vec<String>| if all.is_empty() { String::new() } else { format!(" ({})", all.join("; ")) };
    let documents = |source: &TokenizedSource| {
        format!("{} documents of {}", grouped(source.corpus.summary.documents()), source.path.display())
    };
    if let [source] = learned {
        let (read, learned) = source.token_counts();
        let remarks_text = remarks([source.remarks(), evaluation_remarks].concat());
        let summary = format!("{}: {}, {held_out}{remarks_text}", documents(source), token_counts_text(read, learned));
        return (summary, vec![source.end_token(tokenizer).1, source.spans.to_string()]);
    }
    let (read, learned_tokens) =
        learned.iter().map(TokenizedSource::token_counts).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    let by = if config.mixes_by_weight() { "weight" } else { "size" };
    let summary = format!(
        "{} sources, mixed by {by}: {}, {held_out}{}",
        learned.len(),
        token_counts_text(read, learned_tokens),
        remarks(evaluation_remarks)
    );
    let mut notes = Vec::new();
    for (source, share) in learned.iter().zip(shares) {
        let (read, learned) = source.token_counts();
        notes.push(format!(
            "{:.1} % of the sequences: {}: {}{}",
            share * 100.0,
            documents(source),
            token_counts_text(read, learned),
            remarks(source.remarks())
        ));
        notes.push(format!("  {}; {}", source.end_token(tokenizer).1, source.spans));
    }
    (summary, notes)
}

fn token_counts_text(read: u64, learned: u64) -> String {
    format!("{} tokens read, {} tokens learned", grouped(read), grouped(learned))
}

/// A fingerprint of everything that decides which tokens a step is fed.
fn data_fingerprint(learned: &[TokenizedSource], evaluation: Option<&TokenizedSource>, shares: &[f64]) -> u64 {
    let source_identity = |source: &TokenizedSource| {
        // The same corpus, cut in another way, makes other sequences.
        let packing_identity = source.spans.identity().into_iter().flatten();
        packing_identity.chain([source.corpus.fingerprint]).collect::<Vec<u64>>()
    };
    let evaluation_identity = evaluation.map(source_identity).unwrap_or_default();
    match (learned, &evaluation_identity[..]) {
        ([source], []) => match source.spans.identity() {
            None => source.corpus.fingerprint,
            // No separate entry for the held-out split: it is cut in the same way.
            Some(packing_identity) => fingerprint(packing_identity.into_iter().chain(source_identity(source))),
        },
        (sources, _) => {
            let each = sources
                .iter()
                .zip(shares)
                .flat_map(|(source, share)| source_identity(source).into_iter().chain([share.to_bits()]));
            fingerprint(each.chain(evaluation_identity))
        }
    }
}

/// The folder of the token cache, or a temporary one that is removed when this is dropped.
struct CacheFolder {
    path: PathBuf,
    /// Why the token cache cannot be used, in words; set where `path` is a temporary folder.
    warning: Option<String>,
    /// Folders that were created on the way to the token cache, the innermost first.
    created: Vec<PathBuf>,
}

impl Drop for CacheFolder {
    fn drop(&mut self) {
        if self.warning.is_some() {
            // A failure is ignored: the files are in the system's temporary folder.
            let _ = std::fs::remove_dir_all(&self.path);
        }
        // Only empty folders can be removed so: a refused run leaves none behind, and a folder with cached tokens stays.
        self.created.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    }
}

impl CacheFolder {
    fn new(path: &Path, cache_policy: CachePolicy) -> Result<Self> {
        let created: Vec<PathBuf> = path.ancestors().take_while(|at| !at.exists()).map(Path::to_path_buf).collect();
        let probe = path.join(format!(".{}.probe", std::process::id()));
        let written = std::fs::create_dir_all(path).map_err(Error::io("create", path));
        let written = written.and_then(|()| std::fs::write(&probe, "").map_err(Error::io("write", &probe)));
        let _ = std::fs::remove_file(&probe);
        match (written, cache_policy) {
            (Ok(()), _) => Ok(Self { path: path.into(), warning: None, created }),
            (Err(error), CachePolicy::Required) => Err(error),
            (Err(error), CachePolicy::TemporaryAllowed) => {
                let path = std::env::temp_dir().join(format!("ringspan-tokens-{}", std::process::id()));
                Ok(Self { path, warning: Some(format!("the tokens are not kept: {error}")), created })
            }
        }
    }
}
