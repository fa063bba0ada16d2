//! Counts the pass keys that a trained model finds.

use crate::attention_reach::{AttentionReach, RANKS};
use crate::document::Document;
use anyhow::{Context, Result};
use ringspan::{LayoutKind, StrategyKind};
use ringspan_models::{Decoder, folder};
use ringspan_serve::{Batch, Mesh, Model, score};
use std::path::Path;

/// Number of documents whose key is the model's most likely answer, digit by digit.
///
/// Each digit is judged after the true digits before it. All of them are the most likely ones exactly if greedy generation
/// writes the key, so this counts what generation would get right, at the cost of one pass.
pub(crate) fn exact_matches(folder: &Path, documents: &[Document], reach: AttentionReach) -> Result<usize> {
    let (config, weights) = folder::load(folder)?;
    let model = Model::new(Decoder::new(config)?, weights)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mesh = Mesh { ring: RANKS, threads: (cores / RANKS).max(1), ..Mesh::single() };
    let mut right = 0;
    for document in documents {
        let tokens: Vec<u32> =
            [&document.prompt, &document.key].iter().flat_map(|text| text.bytes()).map(u32::from).collect();
        let layout = reach.layout(tokens.len())?;
        let batch = Batch { tokens: &tokens, documents: layout.documents() };
        let scores = score(&model, &mesh, batch, LayoutKind::Contiguous, StrategyKind::Ring, true)?;
        let logits = scores.and_then(|scores| scores.logits).context("ranks as threads give logits")?;
        let row = |token: usize| &logits[token * model.vocabulary()..][..model.vocabulary()];
        right += usize::from(document.answer().all(|at| most_likely(row(at - 1)) == tokens[at]));
    }
    Ok(right)
}

fn most_likely(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap_or(0) as u32
}
