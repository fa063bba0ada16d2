//! Describes the data of a run for the user.

use super::source::TokenizedSource;
use crate::{config::TrainConfig, human_readable::grouped, tokenizer::Tokenizer};

/// Describes the data for the user: a summary line, and notes below it.
pub(super) fn describe(
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

pub(super) fn token_counts_text(read: u64, learned: u64) -> String {
    format!("{} tokens read, {} tokens learned", grouped(read), grouped(learned))
}
