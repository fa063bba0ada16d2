//! The training data of a run: read, tokenized, and ready to be batched.

mod cache_folder;
mod description;
mod monitor;
mod reader;
mod source;

use crate::{
    checkpoint::Identity,
    config::{DataSource, TextSource, TrainConfig},
    data::{Mixture, Packer, PackerPosition, Sequence, read_tokens},
    data_loader::DataLoader,
    error::{Error, Result},
    fingerprint::fingerprint,
    tokenizer::Tokenizer,
};
use cache_folder::CacheFolder;
use description::{describe, token_counts_text};
pub(crate) use monitor::TokenizationMonitor;
use reader::DatasetReader;
use ringspan_candle::pool;
use source::TokenizedSource;
use std::path::Path;

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

/// Each source's share of the sequences: its weight, or its number of tokens where no source has a weight, over the sum.
fn shares(learned: &[TokenizedSource]) -> Vec<f64> {
    let weight = |source: &TokenizedSource| source.weight.unwrap_or(source.token_counts().0 as f64);
    let sum: f64 = learned.iter().map(weight).sum();
    learned.iter().map(|source| weight(source) / sum).collect()
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
