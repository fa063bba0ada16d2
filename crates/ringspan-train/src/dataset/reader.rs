//! Reads and tokenizes the sources of a run.

use super::{
    TokenizationMonitor,
    cache_folder::CacheFolder,
    source::{TokenizedSource, packable_spans},
};
use crate::{
    config::{TextSource, TrainConfig},
    data::{Corpus, Encoder, SourceReader, Template},
    error::{Error, Result, model_error},
    tokenizer::Tokenizer,
};
use ringspan_models::ModelSource;
use std::path::{Path, PathBuf};

/// Reads and tokenizes the sources of a run.
pub(super) struct DatasetReader<'a, 'w> {
    config: &'a TrainConfig,
    tokenizer: &'a Tokenizer,
    vocabulary: usize,
    folder: &'a Path,
    template: Option<Template>,
    /// Why the model's template cannot be used, where it has one.
    template_error: Option<String>,
    monitor: &'a TokenizationMonitor<'w>,
}

/// The chat template that the model's own file holds, where it is a GGUF file.
fn gguf_chat_template(config: &TrainConfig) -> Result<Option<Template>> {
    let Some(path) = &config.model else { return Ok(None) };
    let template = ModelSource::at(path).and_then(|source| source.chat_template()).map_err(model_error)?;
    template.map(|template| Template::from_gguf(template, path)).transpose()
}

impl<'a, 'w> DatasetReader<'a, 'w> {
    pub(super) fn new(
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

    pub(super) fn training_source(&self, source: &TextSource) -> Result<TokenizedSource> {
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

    pub(super) fn evaluation_source(&self, path: &Path) -> Result<TokenizedSource> {
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
    pub(super) fn check_template_is_used<'b>(
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
