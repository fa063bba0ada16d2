//! The balanced layout: counts the visible pairs of each block of queries, and gives it to the rank with the least work.

use super::joined;
use crate::documents::{Document, Documents, Run, Strand};
use crate::mask::Mask;
use std::collections::BTreeMap;

/// Approximate number of blocks per rank: enough for the last ones to even out the first ones.
const BLOCKS_PER_RANK: usize = 16;

/// Consecutive queries of a document that stay on one rank; only the document's gaps may lie between them.
struct Block {
    runs: Vec<Run>,
    tokens: usize,
    /// Number of visible pairs.
    cost: u64,
}

/// Distributes blocks of `queries` over `ranks` ranks, so that each rank sees about the same number of pairs and holds
/// about the same number of tokens. Blocks have `block` tokens, at least one; `None` chooses a size by the number of
/// tokens.
///
/// First the longest-processing-time rule (Graham, 1969) under a limit on tokens, then swaps of blocks of equal length
/// between the ranks with the most and the least work.
pub(super) fn distribute(
    queries: &Documents,
    keys: &Documents,
    mask: &Mask,
    block: Option<usize>,
    ranks: usize,
) -> Vec<Vec<Run>> {
    let size = block.unwrap_or_else(|| queries.tokens().div_ceil(ranks.saturating_mul(BLOCKS_PER_RANK)).max(1));
    let mut blocks = blocks(queries, keys, mask, size);
    // The sort is stable: blocks of equal cost stay in the order of their tokens.
    blocks.sort_by_key(|block| std::cmp::Reverse(block.cost));
    let limit = queries.tokens().div_ceil(ranks).next_multiple_of(size);
    let mut shares: Vec<RankLoad> = (0..ranks).map(|_| RankLoad::default()).collect();
    for block in blocks {
        let fits = |share: &&mut RankLoad| share.tokens + block.tokens <= limit;
        let least = shares.iter_mut().filter(fits).min_by_key(|share| (share.cost, share.tokens));
        // Short blocks at the ends of documents can fill the limits unevenly, so that no rank has room left.
        let share = match least {
            Some(share) => Some(share),
            None => shares.iter_mut().min_by_key(|share| share.tokens),
        };
        if let Some(share) = share {
            share.tokens += block.tokens;
            share.put(block);
        }
    }
    exchange(&mut shares);
    let runs = |share: RankLoad| {
        let mut runs: Vec<Run> = share.blocks.into_values().flatten().flat_map(|block| block.runs).collect();
        runs.sort_by_key(|run| (run.document, run.start));
        joined(runs.into_iter())
    };
    shares.into_iter().map(runs).collect()
}

/// The blocks that a rank has been given so far.
#[derive(Default)]
struct RankLoad {
    /// The blocks, by number of tokens and cost.
    blocks: BTreeMap<(usize, u64), Vec<Block>>,
    tokens: usize,
    cost: u64,
}

impl RankLoad {
    fn put(&mut self, block: Block) {
        self.cost += block.cost;
        self.blocks.entry((block.tokens, block.cost)).or_default().push(block);
    }

    /// Removes and returns one of the blocks with this number of tokens and this cost.
    fn take(&mut self, key: (usize, u64)) -> Option<Block> {
        let same = self.blocks.get_mut(&key)?;
        let block = same.pop();
        if same.is_empty() {
            self.blocks.remove(&key);
        }
        self.cost -= block.as_ref().map_or(0, |block| block.cost);
        block
    }
}

/// Swaps blocks of equal length between the ranks with the most and the least work as long as this evens them out.
fn exchange(shares: &mut [RankLoad]) {
    let all: usize = shares.iter().flat_map(|share| share.blocks.values()).map(Vec::len).sum();
    for _ in 0..4 * all {
        let by_cost = |&rank: &usize| shares[rank].cost;
        let (Some(most), Some(least)) = ((0..shares.len()).max_by_key(by_cost), (0..shares.len()).min_by_key(by_cost))
        else {
            return;
        };
        let gap = shares[most].cost - shares[least].cost;
        let Some((given, taken)) = best_swap(&shares[most], &shares[least], gap) else { return };
        let (a, b) = (shares[most].take(given), shares[least].take(taken));
        a.into_iter().for_each(|block| shares[least].put(block));
        b.into_iter().for_each(|block| shares[most].put(block));
    }
}

/// The swap of two blocks, by tokens and cost, that best evens out two shares whose costs differ by `gap`; `None` if none
/// helps.
fn best_swap(most: &RankLoad, least: &RankLoad, gap: u64) -> Option<((usize, u64), (usize, u64))> {
    let swaps = most.blocks.keys().flat_map(|&(tokens, cost)| {
        // Moving half of the gap is best, so the best swaps are with the blocks around that cost.
        let wanted = (tokens, cost.saturating_sub(gap / 2));
        let below = least.blocks.range((tokens, 0)..wanted).next_back();
        let above = least.blocks.range(wanted..(tokens, cost.max(wanted.1))).next();
        below.into_iter().chain(above).map(move |(&other, _)| ((tokens, cost), other))
    });
    let gain = |&(given, taken): &((usize, u64), (usize, u64))| {
        let moved = given.1 - taken.1;
        moved.min(gap.saturating_sub(moved))
    };
    swaps.filter(|swap| gain(swap) > 0).max_by_key(gain)
}

/// Cuts the documents into blocks, and counts the pairs that each block sees.
fn blocks(queries: &Documents, keys: &Documents, mask: &Mask, size: usize) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (index, document) in queries.iter().enumerate() {
        let key_document = keys.get(index);
        let spans = |document: &Document| document.spans.clone().into_iter();
        let run = move |start: usize, len: usize| Run { document: index, start, len, step: 1 };
        let Some(strand) = Strand::of_sorted(spans(key_document).map(|span| run(span.start, span.len()))) else {
            blocks.extend(cut(document, size, run).map(|(runs, tokens)| Block { runs, tokens, cost: 0 }));
            continue;
        };
        let seq_lens = (document.seq_len, key_document.seq_len);
        for (runs, tokens) in cut(document, size, run) {
            let mut cost = 0;
            for run in &runs {
                mask.search(run, strand.runs(), seq_lens, |seen| {
                    cost += seen.pairs(|runs| strand.rows(runs).len());
                });
            }
            blocks.push(Block { runs, tokens, cost });
        }
    }
    blocks
}

/// Cuts a document into blocks of `size` tokens, the last of which may be shorter; yields the runs and tokens of each.
fn cut(document: &Document, size: usize, run: impl Fn(usize, usize) -> Run) -> impl Iterator<Item = (Vec<Run>, usize)> {
    let mut spans = document.spans.iter().cloned();
    let mut rest = 0..0;
    std::iter::from_fn(move || {
        let (mut runs, mut tokens) = (Vec::new(), 0);
        while tokens < size {
            if rest.is_empty() {
                let Some(span) = spans.next() else { break };
                rest = span;
            }
            let taken = rest.len().min(size - tokens);
            runs.push(run(rest.start, taken));
            rest.start += taken;
            tokens += taken;
        }
        (tokens > 0).then_some((runs, tokens))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Layout, LayoutKind};
    use super::*;
    use crate::mask::BlockPairs;
    use std::ops::Range;

    /// The most visible pairs of any rank, divided by the mean.
    fn imbalance(layout: &Layout, keys: &Documents, mask: &Mask) -> f64 {
        let cost = |rank| -> u64 {
            let mut cost = 0;
            for q in layout.runs(rank) {
                let (q_seq_len, document) = (layout.documents().get(q.document).seq_len, keys.get(q.document));
                let run = |span: &Range<usize>| Run { start: span.start, len: span.len(), step: 1, ..*q };
                let keys: Vec<Run> = document.spans.iter().map(run).collect();
                let tokens = |runs: &Range<usize>| keys[runs.clone()].iter().map(|run| run.len).sum();
                mask.search(q, &keys, (q_seq_len, document.seq_len), |seen| cost += seen.pairs(tokens));
            }
            cost
        };
        let costs: Vec<u64> = (0..layout.ranks()).map(cost).collect();
        let (sum, most) = (costs.iter().sum::<u64>(), costs.iter().max().copied().unwrap_or(0));
        most as f64 * costs.len() as f64 / sum as f64
    }

    #[test]
    fn any_mask_is_balanced_within_five_percent() {
        let sparse = BlockPairs::new(
            32,
            32,
            (0..64).flat_map(|a| (0..64).map(move |b| (a, b))).filter(|(a, b)| (a * 7 + b * b) % 5 < 2 - a / 40),
        );
        let masks = [
            Mask::full(),
            Mask::causal(),
            Mask::causal().window(Some(300), None),
            Mask::causal().chunked(700).expect("not 0"),
            Mask::causal().prefix_lm([500]),
            Mask::causal().block_sparse(sparse.expect("not 0")),
        ];
        let pieces: Vec<i32> = (0..2000).map(|token: i32| (token * 31 + token * token % 19) % 7 % 3).collect();
        let documents = [
            Documents::batch(1, 2000),
            Documents::packed(&[900, 30, 400, 1, 669]),
            Documents::batch(3, 700),
            Documents::from_ids(&pieces, 2000).expect("a row"),
        ];
        for documents in &documents {
            for mask in &masks {
                for ranks in [1, 2, 3, 4, 8] {
                    let (layout, _) =
                        Layout::pair(LayoutKind::Balanced(None), documents, documents, mask, ranks).expect("a layout");
                    let imbalance = imbalance(&layout, documents, mask);
                    assert!(imbalance <= 1.05, "{mask} on {ranks} ranks: {imbalance}");
                    let tokens: Vec<usize> = (0..ranks).map(|rank| layout.tokens(rank)).collect();
                    let most = tokens.iter().max().copied().unwrap_or(0);
                    assert!(most * ranks <= documents.tokens() * 9 / 8, "{mask} on {ranks} ranks: tokens {tokens:?}");
                }
            }
        }
    }
}
