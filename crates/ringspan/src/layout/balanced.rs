//! Dealing by counted work: blocks of queries to the rank that has least to do.

use super::joined;
use crate::documents::{Documents, Run};
use crate::error::Result;
use crate::mask::Mask;

/// Blocks of a rank, roughly: enough for the last ones to even out what the first left.
const BLOCKS_PER_RANK: usize = 16;

/// A run of queries that stays together.
struct Block {
    run: Run,
    /// Visible pairs.
    cost: u64,
}

/// Deals blocks of `queries` (of `block` tokens, at least one; chosen by size if `None`) to `ranks` ranks, so that each sees about
/// the same number of pairs and holds about the same number of tokens.
///
/// The longest-processing-time rule (Graham, 1969) under a limit on tokens, then exchanges of blocks of equal length
/// between the ranks with most and least.
pub(super) fn deal(
    queries: &Documents,
    keys: &Documents,
    mask: &Mask,
    block: Option<usize>,
    ranks: usize,
) -> Result<Vec<Vec<Run>>> {
    let size = block.unwrap_or_else(|| queries.tokens().div_ceil(ranks.saturating_mul(BLOCKS_PER_RANK)).max(1));
    let mut blocks = blocks(queries, keys, mask, size)?;
    blocks.sort_by_key(|block| (std::cmp::Reverse(block.cost), block.run.document, block.run.start));
    let limit = queries.tokens().div_ceil(ranks).next_multiple_of(size);
    let mut shares: Vec<Share> = (0..ranks).map(|_| Share::default()).collect();
    for block in blocks {
        let fits = |share: &&mut Share| share.tokens + block.run.len <= limit;
        let least = shares.iter_mut().filter(fits).min_by_key(|share| (share.cost, share.tokens));
        // Blocks cut short at the ends of documents can fill the limits unevenly.
        let share = match least {
            Some(share) => Some(share),
            None => shares.iter_mut().min_by_key(|share| share.tokens),
        };
        if let Some(share) = share {
            share.tokens += block.run.len;
            share.cost += block.cost;
            share.blocks.push(block);
        }
    }
    exchange(&mut shares);
    let runs = |share: Share| {
        let mut runs: Vec<Run> = share.blocks.into_iter().map(|block| block.run).collect();
        runs.sort_by_key(|run| (run.document, run.start));
        joined(runs.into_iter())
    };
    Ok(shares.into_iter().map(runs).collect())
}

/// What a rank has so far.
#[derive(Default)]
struct Share {
    blocks: Vec<Block>,
    tokens: usize,
    cost: u64,
}

/// Swaps blocks of equal length between the ranks with most and least work for as long as that evens them out.
fn exchange(shares: &mut [Share]) {
    let all: usize = shares.iter().map(|share| share.blocks.len()).sum();
    for _ in 0..4 * all {
        let by_cost = |&rank: &usize| shares[rank].cost;
        let (Some(most), Some(least)) = ((0..shares.len()).max_by_key(by_cost), (0..shares.len()).min_by_key(by_cost))
        else {
            return;
        };
        let gap = shares[most].cost - shares[least].cost;
        let gain = |a: &Block, b: &Block| {
            let moved =
                a.cost.checked_sub(b.cost).filter(|&moved| moved > 0 && moved < gap && a.run.len == b.run.len)?;
            Some(moved.min(gap - moved))
        };
        let pairs = shares[most].blocks.iter().enumerate().flat_map(|(i, a)| {
            shares[least].blocks.iter().enumerate().filter_map(move |(j, b)| Some((gain(a, b)?, i, j)))
        });
        let Some((_, i, j)) = pairs.max_by_key(|pair| pair.0) else { return };
        let moved = shares[most].blocks[i].cost - shares[least].blocks[j].cost;
        let (a, b) = (shares[most].blocks.swap_remove(i), shares[least].blocks.swap_remove(j));
        shares[most].blocks.push(b);
        shares[least].blocks.push(a);
        shares[most].cost -= moved;
        shares[least].cost += moved;
    }
}

/// The documents cut into blocks, with the pairs that each of them sees.
fn blocks(queries: &Documents, keys: &Documents, mask: &Mask, size: usize) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    for (index, document) in queries.iter().enumerate() {
        let key_document = keys.get(index);
        for span in &document.spans {
            for start in span.clone().step_by(size) {
                let run = Run { document: index, start, len: size.min(span.end - start), step: 1 };
                let mut cost = 0;
                for span in &key_document.spans {
                    let keys = Run { document: index, start: span.start, len: span.len(), step: 1 };
                    let pieces = mask.pieces(&run, &keys, document.extent, key_document.extent)?;
                    cost += pieces.iter().map(|piece| piece.band.pairs(piece.q.len(), piece.k.len())).sum::<u64>();
                }
                blocks.push(Block { run, cost });
            }
        }
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::super::{Layout, LayoutKind};
    use super::*;
    use crate::mask::BlockPairs;

    /// Visible pairs of the rank with most, over the mean.
    fn imbalance(layout: &Layout, keys: &Documents, mask: &Mask) -> f64 {
        let cost = |rank| -> u64 {
            let mut cost = 0;
            for q in layout.runs(rank) {
                let (frame_q, document) = (layout.documents().get(q.document).extent, keys.get(q.document));
                for span in &document.spans {
                    let k = Run { document: q.document, start: span.start, len: span.len(), step: 1 };
                    let pieces = mask.pieces(q, &k, frame_q, document.extent).expect("steps of 1");
                    cost += pieces.iter().map(|p| p.band.pairs(p.q.len(), p.k.len())).sum::<u64>();
                }
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
        let documents =
            [Documents::batch(1, 2000), Documents::packed(&[900, 30, 400, 1, 669]), Documents::batch(3, 700)];
        for documents in &documents {
            for mask in &masks {
                for ranks in [1, 2, 3, 4, 8] {
                    let (layout, _) =
                        Layout::pair(LayoutKind::Balanced(None), documents, documents, mask, ranks).expect("deals");
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
