//! A source of text with its tokens.

use crate::{
    config::TrainConfig,
    data::{Corpus, DocumentStore, NOT_LEARNED, Overlong, PackableSpans, Packer, Sequence},
    tokenizer::Tokenizer,
};
use std::path::PathBuf;

/// A source with its tokens.
pub(super) struct TokenizedSource {
    pub(super) path: PathBuf,
    pub(super) weight: Option<f64>,
    pub(super) corpus: Corpus,
    /// How documents are cut and packed for training.
    pub(super) spans: PackableSpans,
    /// Faults of the cached tokens, in words for the user.
    pub(super) cache_remarks: Vec<String>,
}

impl TokenizedSource {
    /// The sequences of one evaluation: `share` of the `config.eval_tokens` tokens that an evaluation reads at most.
    pub(super) fn evaluation_sequences(
        &self,
        documents: &DocumentStore,
        config: &TrainConfig,
        share: f64,
    ) -> Vec<Sequence> {
        let spans = packable_spans(config, documents, self.corpus.summary.must_stay_whole());
        let max_tokens = (config.eval_tokens as f64 * share).ceil() as usize;
        Packer::pack_once(documents, &spans, config.sequence_length, max_tokens)
    }

    /// Number of training tokens that are read, and number of those that are learned (that are targets of the loss).
    pub(super) fn token_counts(&self) -> (u64, u64) {
        let (lost, unlearned) = self.spans.lost_token_counts();
        (self.corpus.train.tokens() as u64 - lost, self.corpus.learned_tokens[0] - unlearned)
    }

    pub(super) fn only_chats(&self) -> bool {
        self.corpus.summary.chats == self.corpus.summary.documents()
    }

    /// The token that ends what is learned, and a line about it for the printed plan.
    pub(super) fn end_token(&self, tokenizer: &Tokenizer) -> (Option<u32>, String) {
        if self.only_chats() {
            // The last learned special token of the first document is the one that the template writes after an answer; every
            // document has an answer.
            let masked_tokens = if self.corpus.train.is_empty() { &[] } else { self.corpus.train.document(0) };
            let mut learned = masked_tokens.iter().rev().copied().filter(|token| token & NOT_LEARNED == 0);
            return match learned.find_map(|token| tokenizer.special_token(token).map(|name| (token, name))) {
                Some((id, name)) => (Some(id), format!("answers end with {name} (token {id}), as the template says")),
                None => (tokenizer.end_of_text(), "answers end as the template says, with no special token".into()),
            };
        }
        match tokenizer.end_token() {
            Some(end) => (Some(end.id), format!("texts end with {end}")),
            None => (None, "nothing marks the end of a text: the tokenizer has no token for it".into()),
        }
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let warning = |name: &String| {
            format!("{name} is learned like all others: name a file to be judged by with --eval-data, and move it away")
        };
        self.corpus.summary.evaluation_like_files.iter().map(warning).collect()
    }

    /// Lines about documents that were left out, and about what was wrong with the cached tokens.
    pub(super) fn remarks(&self) -> Vec<String> {
        self.corpus.summary.skipped.describe().into_iter().chain(self.cache_remarks.iter().cloned()).collect()
    }
}

/// How the documents of a source are cut and packed.
pub(super) fn packable_spans(config: &TrainConfig, documents: &DocumentStore, must_stay_whole: bool) -> PackableSpans {
    let default = if must_stay_whole { Overlong::Truncate } else { Overlong::Split };
    PackableSpans::new(documents, config.sequence_length, must_stay_whole, config.overlong.unwrap_or(default))
}
