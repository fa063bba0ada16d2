//! The data of a run, read, made into tokens and ready to be fed.

use crate::{
    checkpoint::Identity,
    config::{Source, TrainConfig},
    data::{
        Content, Corpus, Encoder, Fit, GIVEN, HeldOut, Overlong, Packer, Position, Sequence, Template, Texts, cache,
        cache::Found, fingerprint, read, read_tokens,
    },
    error::{Error, Result},
    feed::Feed,
    observer::grouped,
    tokenizer::Tokenizer,
};
use ringspan_candle::pool;
use std::path::Path;

/// Data as it is fed, and what it is.
pub(crate) struct Dataset {
    pub(crate) feed: Feed,
    /// Sequences that the model is judged by.
    pub(crate) held_out: Vec<Sequence>,
    pub(crate) identity: Identity,
    /// How documents end and are packed, in words, a line each.
    pub(crate) notes: Vec<String>,
    /// What a person should look at, in words.
    pub(crate) warnings: Vec<String>,
    /// The token that ends what is learned, where there is one.
    pub(crate) end: Option<u32>,
    /// Tokens that are in no file yet.
    pub(crate) unsaved: Option<Unsaved>,
}

/// Tokens to be kept, under their key.
pub(crate) struct Unsaved {
    key: u64,
    corpus: Corpus,
}

impl Unsaved {
    /// Writes them into `folder`; the same tokens, in that file.
    pub(crate) fn save(self, folder: &Path) -> Result<Corpus> {
        cache::save(folder, self.key, &self.corpus)?;
        Ok(match cache::open(folder, self.key)? {
            Found::Tokens(mapped) if mapped.fingerprint == self.corpus.fingerprint => mapped,
            // Somebody else has been there meanwhile.
            _ => self.corpus,
        })
    }
}

impl Dataset {
    /// Reads the data of a run for a model of `vocabulary` tokens, on `threads` threads; writes nothing.
    ///
    /// # Errors
    /// Files that cannot be read, documents that cannot be written as tokens, and tokens that the model does not have.
    pub(crate) fn open(
        config: &TrainConfig,
        tokenizer: Option<&Tokenizer>,
        vocabulary: usize,
        threads: usize,
    ) -> Result<Self> {
        match (&config.source, tokenizer) {
            (Source::Tokens(path), _) => Self::batch(path, vocabulary),
            (Source::Text(path), Some(tokenizer)) => {
                pool::run(threads, || Self::text(config, path, tokenizer, vocabulary))?
            }
            (Source::Text(path), None) => {
                Err(Error::Data { path: path.clone(), problem: "text needs a tokenizer, and there is none".into() })
            }
        }
    }

    fn batch(path: &Path, vocabulary: usize) -> Result<Self> {
        let batch = read_tokens(path, vocabulary)?;
        let identity = Identity {
            summary: format!("{} sequences of {} tokens in {}", batch.rows, batch.length, path.display()),
            fingerprint: fingerprint(batch.tokens.iter().map(|&t| u64::from(t)).chain([batch.length as u64])),
        };
        Ok(Self::fed(Feed::Tokens(batch), identity))
    }

    /// What is fed, with nothing held out.
    pub(crate) fn fed(feed: Feed, identity: Identity) -> Self {
        let (held_out, notes, warnings) = Default::default();
        Self { feed, held_out, identity, notes, warnings, end: None, unsaved: None }
    }

    fn text(config: &TrainConfig, path: &Path, tokenizer: &Tokenizer, vocabulary: usize) -> Result<Self> {
        let not_learned = [Some(config.out.clone()), config.eval_data.clone()];
        let texts = read(path, &not_learned.into_iter().flatten().collect::<Vec<_>>())?;
        let judged = config.eval_data.as_ref().map(|path| read(path, std::slice::from_ref(&config.out)));
        let judged = judged.transpose()?;
        let template = template(config, path, tokenizer, [Some(&texts), judged.as_ref()])?;
        let encoder = Encoder::new(tokenizer, template.as_ref());
        let held_out = match (&judged, &config.eval_data) {
            (Some(texts), Some(path)) => HeldOut::Texts(texts, path),
            _ => HeldOut::Share(config.held_out),
        };
        let key = Corpus::key(&texts, &held_out, &encoder)?;
        let all = [Some(&texts), judged.as_ref()];
        let skipped = all.into_iter().flatten().filter_map(|texts| texts.skipped.words());
        let mut said: Vec<String> = skipped.map(|words| format!("skipped {words}")).collect();
        let made = || Corpus::new(&texts, &held_out, &encoder, path);
        let (corpus, kept) = match cache::open(&config.token_cache, key)? {
            Found::Tokens(corpus) => (corpus, true),
            Found::Nothing => (made()?, false),
            Found::Damaged(why) => {
                said.push(format!("{} is made again: {why}", cache::path(&config.token_cache, key).display()));
                (made()?, false)
            }
        };
        known(&corpus, tokenizer, vocabulary)?;
        let said = if said.is_empty() { String::new() } else { format!(" ({})", said.join("; ")) };
        let from = config.eval_data.as_ref().map_or(String::new(), |path| format!(" in {}", path.display()));
        let summary = format!(
            "{} documents of {}: {} tokens to train on, {} held out{from}{said}",
            texts.documents.len(),
            path.display(),
            grouped(corpus.train_tokens() as u64),
            grouped(corpus.held_out_tokens() as u64)
        );

        let length = config.sequence_length;
        let fit = |texts: &Texts, documents| {
            let whole = texts.documents.iter().any(|document| !matches!(document.content, Content::Text(_)));
            let default = if whole { Overlong::Truncate } else { Overlong::Split };
            Fit::new(documents, length, whole, config.overlong.unwrap_or(default))
        };
        let train = fit(&texts, &corpus.train);
        if train.is_empty() {
            let problem = format!(
                "every document is longer than {length} tokens, and nothing is left of them: {train}; raise \
                 --sequence-length, or give --overlong split"
            );
            return Err(Error::Data { path: path.into(), problem });
        }
        let judges = fit(judged.as_ref().unwrap_or(&texts), &corpus.held_out);
        let held_out = Packer::once(&corpus.held_out, &judges, length, config.eval_tokens);
        // What fits in another way is in other sequences.
        let ways = [&train, &judges].map(Fit::identity);
        let fingerprint = match ways {
            [None, None] => corpus.fingerprint,
            ways => fingerprint(ways.into_iter().flatten().flatten().chain([corpus.fingerprint])),
        };
        let (end, ending) = ends(&texts, &corpus, tokenizer);
        let warnings = texts.suspects.iter().map(|name| {
            format!("{name} is learned like all others: name a file to be judged by with --eval-data, and move it away")
        });
        let packer = Packer::new(corpus.train.clone(), length, config.seed, Position::default());
        Ok(Self {
            held_out,
            identity: Identity { summary, fingerprint },
            notes: vec![ending, train.to_string()],
            warnings: warnings.collect(),
            end,
            unsaved: (!kept).then_some(Unsaved { key, corpus }),
            feed: Feed::Text {
                packer: packer.fitted(train).with(config.packing),
                length,
                batch_size: config.batch_size,
            },
        })
    }
}

/// The template that conversations are written with, where there are any.
fn template(
    config: &TrainConfig,
    path: &Path,
    tokenizer: &Tokenizer,
    texts: [Option<&Texts>; 2],
) -> Result<Option<Template>> {
    let mut documents = texts.into_iter().flatten().flat_map(|texts| &texts.documents);
    let chat = documents.any(|document| matches!(document.content, Content::Chat { .. }));
    match (&config.chat_template, tokenizer.folder()) {
        (Some(file), _) if !chat => Err(Error::Settings(format!(
            "--chat-template {} has no effect: {} holds no `messages`; leave it out",
            file.display(),
            path.display()
        ))),
        (Some(file), folder) => Template::read(file, folder).map(Some),
        (None, Some(folder)) if chat => Template::of_model(folder),
        _ => Ok(None),
    }
}

/// Refuses a token for which the model has no row. Some tokenizers have more tokens than their model, for what it cannot
/// read, as images; that harms only where one occurs.
fn known(corpus: &Corpus, tokenizer: &Tokenizer, vocabulary: usize) -> Result<()> {
    let documents = corpus.train.documents().chain(corpus.held_out.documents());
    let Some(largest) = documents.flatten().map(|word| word & !GIVEN).max() else { return Ok(()) };
    if (largest as usize) < vocabulary {
        return Ok(());
    }
    let name = tokenizer.spelling(largest).unwrap_or_default();
    let problem = format!(
        "has {} tokens, and its token {largest} ({name}) is in the data, but the model's vocabulary is {vocabulary}",
        tokenizer.vocabulary()
    );
    Err(Error::Tokenizer { path: tokenizer.path().into(), problem })
}

/// The token that ends what is learned, and what the plan says of it.
fn ends(texts: &Texts, corpus: &Corpus, tokenizer: &Tokenizer) -> (Option<u32>, String) {
    let chat = |content: &Content| matches!(content, Content::Chat { .. });
    if texts.documents.iter().all(|document| chat(&document.content)) {
        // What the template writes behind the last answer, of which all documents have one.
        let words = corpus.train.documents().next().unwrap_or_default();
        let learned = words.iter().rev().copied().filter(|word| word & GIVEN == 0);
        let end = learned.into_iter().find_map(|word| tokenizer.special(word).map(|name| (word, name)));
        return match end {
            Some((id, name)) => (Some(id), format!("answers end with {name} (token {id}), as the template says")),
            None => (tokenizer.end_of_text(), "answers end as the template says, with no special token".into()),
        };
    }
    match tokenizer.end() {
        Some(end) => (Some(end.id), format!("texts end with {end}")),
        None => (None, "nothing marks the end of a text: the tokenizer has no token for it".into()),
    }
}
