//! Scoring: the probabilities that a model gives to the tokens of a text.

use crate::error::Result;
use crate::mesh::Mesh;
use crate::model::Model;
use ringspan::attention::Group;
use ringspan::comm::Buffer;
use ringspan::{Documents, Layout, LayoutKind, StrategyKind};
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{Context, loss};
use std::sync::Arc;

/// The tokens to score.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Token ids `[B * S]`; those in padding are ignored.
    pub tokens: &'a [u32],
    /// The documents in the batch, within which tokens see each other.
    pub documents: &'a Documents,
}

/// The scores of a batch.
#[derive(Debug, Clone)]
pub struct Scores {
    /// Log-probability of the document's next token, given the tokens up to this one: `[B * S]`; 0 where no token follows.
    pub log_probs: Vec<f32>,
    /// Number of predicted tokens: those that follow another token of their document.
    pub predicted: usize,
    /// Logits `[B * S, V]`, 0 in padding; only if requested.
    pub logits: Option<Vec<f32>>,
}

/// Scores a batch whose tokens are distributed over the ranks by `layout`; returns `None` in a process without rank 0.
///
/// # Errors
/// Tokens outside the vocabulary, a batch whose size differs from that of its documents, failures of any rank.
pub fn score(
    model: &Model,
    mesh: &Mesh,
    batch: Batch<'_>,
    layout: LayoutKind,
    strategy: StrategyKind,
    logits: bool,
) -> Result<Option<Scores>> {
    let layout = Arc::new(Layout::new(layout, batch.documents, mesh.ring.saturating_mul(mesh.ulysses))?);
    let mut targets = vec![loss::IGNORE; batch.documents.size()];
    let mut predicted = 0;
    for rank in 0..layout.ranks() {
        // Sharding also checks that the number of tokens is that of the documents.
        model.check_tokens(&layout.shard(rank, batch.tokens, 1)?)?;
    }
    // The next token is looked up in the whole batch, before it is sharded: at the border of a shard it lies on another rank.
    for document in batch.documents.iter() {
        let positions: Vec<usize> = document.spans.iter().cloned().flatten().collect();
        for pair in positions.windows(2) {
            targets[document.offset + pair[0]] = batch.tokens[document.offset + pair[1]];
            predicted += 1;
        }
    }
    let parts = mesh.run(|group| score_on_rank(&group, model, batch.tokens, &targets, &layout, strategy, logits))?;
    let (local, local_logits): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let local = mesh.processes.gather(local.into_iter().map(Buffer::F32).collect())?;
    let local_logits = match logits {
        true => mesh.processes.gather(local_logits.into_iter().flatten().map(Buffer::F32).collect())?,
        false => None,
    };
    let Some(local) = local else { return Ok(None) };
    let whole = |parts: &[Arc<Buffer>], width: usize| -> Result<Vec<f32>> {
        let mut all = vec![0.0; batch.documents.size() * width];
        for (rank, part) in parts.iter().enumerate() {
            layout.unshard(rank, part.f32()?, width, &mut all)?;
        }
        Ok(all)
    };
    let logits = local_logits.map(|parts| whole(&parts, model.vocabulary())).transpose()?;
    Ok(Some(Scores { log_probs: whole(&local, 1)?, predicted, logits }))
}

/// Log-probabilities `[T]` and, if requested, logits `[T, V]` of this rank's tokens.
fn score_on_rank(
    group: &Arc<Group>,
    model: &Model,
    tokens: &[u32],
    targets: &[u32],
    layout: &Arc<Layout>,
    strategy: StrategyKind,
    logits: bool,
) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
    let rank = group.rank();
    let (tokens, targets) = (layout.shard(rank, tokens, 1)?, layout.shard(rank, targets, 1)?);
    let context = Context::new(group.clone(), layout.clone(), strategy)?;
    let hidden = model.hidden(rank, &tokens, &context)?;
    let hidden = model.decoder().norm(model.weights(rank), &hidden)?;
    let (head, weights) = (model.decoder().model().head(), model.weights(rank));
    let log_probs = head.log_probs(&hidden, &targets, weights, &NO_TENSOR_PARALLEL)?;
    let logits = if logits { Some(head.logits(&hidden, weights)?.flatten_all()?.to_vec1()?) } else { None };
    Ok((log_probs, logits))
}
