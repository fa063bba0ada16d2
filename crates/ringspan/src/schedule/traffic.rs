//! Rows and bytes that plans send.

use super::{Block, HeadShare, Pass, Plan, Schedule, Transfer};
use crate::error::Result;

/// Rows that a ring rank sends to others in one pass, by kind of block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Rows of keys and values.
    pub keys: usize,
    /// Rows of gradients of keys and values.
    pub key_gradients: usize,
    /// Rows of queries.
    pub queries: usize,
    /// Rows of saved values: output gradients, softmax statistics and deltas.
    pub saved: usize,
    /// Rows of softmax states.
    pub partials: usize,
    /// Rows of gradients of queries.
    pub query_gradients: usize,
}

/// The tensor sizes that convert rows into bytes: heads and their widths, the wire type, a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorSizes {
    /// Query heads H.
    pub heads: usize,
    /// Key-value heads G.
    pub kv_heads: usize,
    /// Width D of a query and a key.
    pub dim: usize,
    /// Width Dv of a value.
    pub v_dim: usize,
    /// Bytes of an element of the wire type.
    pub wire: usize,
    /// Heads of a bias: H, 1 for a bias shared by all heads, 0 for none. Its rows travel with their queries, and under
    /// Ulysses with the exchange of heads, in f32.
    pub bias_heads: usize,
}

impl TensorSizes {
    /// Bytes of one row of a block; a bias row has a term for each of the `keys` keys of a batch row.
    pub fn row(&self, block: Block, keys: usize) -> u64 {
        let Self { heads, kv_heads, dim, v_dim, wire, bias_heads } = *self;
        let bias = self.bias(heads, keys);
        let bytes = match block {
            Block::Keys(_) => kv_heads * (dim + v_dim) * wire,
            Block::KeyGradients(_) => kv_heads * (dim + v_dim) * 4,
            Block::Queries(_) => heads * dim * if bias_heads > 0 { 4 } else { wire } + bias * 4,
            // A partial result is output, maximum and sum; saved values are output gradient, maximum, sum and delta.
            Block::Partial(_) => heads * (v_dim + 2) * 4,
            Block::Saved(_) => heads * (v_dim + 3) * 4,
            Block::QueryGradients(_) => (heads * dim + bias) * 4,
        };
        bytes as u64
    }

    /// Number of bias terms of a query for `heads` of its heads. A bias shared by all heads is sent whole with any of them.
    fn bias(&self, heads: usize, keys: usize) -> usize {
        keys * if self.bias_heads == 1 { 1 } else { self.bias_heads.min(heads) }
    }
}

impl Traffic {
    pub(super) fn of(plan: &Plan) -> Self {
        let mut traffic = Self::default();
        for Transfer { block, rows, .. } in plan.iter().flat_map(|step| step.send.iter().chain(&step.after)) {
            *match block {
                Block::Keys(_) => &mut traffic.keys,
                Block::KeyGradients(_) => &mut traffic.key_gradients,
                Block::Queries(_) => &mut traffic.queries,
                Block::Saved(_) => &mut traffic.saved,
                Block::Partial(_) => &mut traffic.partials,
                Block::QueryGradients(_) => &mut traffic.query_gradients,
            } += rows.len();
        }
        traffic
    }

    /// Bytes of these rows; a batch row has `keys` keys.
    pub fn bytes(&self, sizes: &TensorSizes, keys: usize) -> u64 {
        let all = [
            (self.keys, Block::Keys(0)),
            (self.key_gradients, Block::KeyGradients(0)),
            (self.queries, Block::Queries(0)),
            (self.saved, Block::Saved(0)),
            (self.partials, Block::Partial(0)),
            (self.query_gradients, Block::QueryGradients(0)),
        ];
        all.into_iter().map(|(rows, block)| rows as u64 * sizes.row(block, keys)).sum()
    }
}

impl Schedule {
    /// Bytes that `rank` of the P ranks sends to others in one pass, for exchanges of heads and for blocks between ring
    /// ranks.
    ///
    /// # Errors
    /// Head counts that do not fit the grid.
    pub fn bytes_sent(&self, pass: Pass, rank: usize, sizes: &TensorSizes) -> Result<u64> {
        let TensorSizes { dim, v_dim, wire, .. } = *sizes;
        let row_len = self.key().documents().row_len();
        // A bias shared by all heads is sent to every member, and again with every part of the heads.
        let bias = |heads: usize| sizes.bias(heads, row_len);
        let (ring_rank, member) = self.grid().coordinates(rank);
        let members = &self.grid().members()[ring_rank];
        let traffic = self.traffic(pass, ring_rank);
        let mut bytes = 0;
        // Without Ulysses there is no exchange to overlap, so all heads are one part.
        let chunks = if self.grid().ulysses > 1 { self.head_chunks() } else { 1 };
        for part in HeadShare::parts(sizes.heads, sizes.kv_heads, self.grid(), chunks)? {
            let (heads, kv_heads) = (part[member].query.len(), part[member].kv.len());
            bytes += traffic.bytes(&TensorSizes { heads, kv_heads, ..*sizes }, row_len);
            for (other, share) in part.iter().enumerate().filter(|(other, _)| *other != member) {
                // This rank sends a member the member's heads of its own tokens, and later returns its own heads of the
                // member's tokens.
                let queries = (self.query().tokens(rank), self.query().tokens(members[other]));
                let keys = (self.key().tokens(rank), self.key().tokens(members[other]));
                let there = queries.0 * share.query.len() * dim + keys.0 * share.kv.len() * (dim + v_dim);
                let bias_there = queries.0 * bias(share.query.len()) * 4;
                bytes += match pass {
                    Pass::Forward => there * wire + bias_there + queries.1 * heads * (v_dim + 2) * 4,
                    // Output gradients, maxima, sums and deltas travel with the inputs; dq, dk and dv come back.
                    Pass::Backward => {
                        let saved = queries.0 * share.query.len() * (v_dim + 3);
                        let back = queries.1 * (heads * dim + bias(heads)) + keys.1 * kv_heads * (dim + v_dim);
                        there * wire + bias_there + (saved + back) * 4
                    }
                } as u64;
            }
        }
        Ok(bytes)
    }
}
