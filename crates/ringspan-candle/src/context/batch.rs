//! Tensors of whole sequences, and the part of them that this rank holds.

use super::Context;
use crate::collective::all_gather_of;
use candle_core::{Device, Result, Tensor, bail};
use ringspan::Layout;

impl Context {
    /// This rank's tokens of a tensor for whole sequences: `[B, S, ..]` to `[B, T, ..]`, differentiable. T may differ
    /// between ranks.
    ///
    /// If batch rows have different numbers of tokens on some rank (padding, packed documents), the result is
    /// `[1, T, ..]`: the tokens of all rows, one row after the other, without padding.
    ///
    /// # Errors
    /// Other sizes than those of the context's sequences.
    pub fn shard(&self, x: &Tensor) -> Result<Tensor> {
        shard(&self.layout, self.group.rank(), x, "queries")
    }

    /// Like [`shard`](Self::shard), for the sequences of keys in cross attention.
    ///
    /// # Errors
    /// As for [`shard`](Self::shard).
    pub fn shard_keys(&self, x: &Tensor) -> Result<Tensor> {
        shard(&self.key_layout, self.group.rank(), x, "keys")
    }

    /// The tensor for whole sequences, `[B, S, ..]`, of which each rank has its tokens, `[B, T, ..]`; padding is zeros. All
    /// ranks must call this, and all get the tensor.
    ///
    /// It is differentiable: the gradient of each rank's tokens is the sum of the gradients of all ranks' results.
    ///
    /// # Errors
    /// Another number of tokens than this rank has, or failures of other ranks.
    pub fn unshard(&self, x: &Tensor) -> Result<Tensor> {
        self.unshard_by(&self.layout, x)
    }

    /// Like [`unshard`](Self::unshard), for the sequences of keys in cross attention.
    ///
    /// # Errors
    /// As for [`unshard`](Self::unshard).
    pub fn unshard_keys(&self, x: &Tensor) -> Result<Tensor> {
        self.unshard_by(&self.key_layout, x)
    }

    /// Like [`unshard`](Self::unshard), for this rank's tokens one row after the other, `[T, ..]`, as layers have them; the
    /// result is `[B * S, ..]`.
    ///
    /// # Errors
    /// As for [`unshard`](Self::unshard).
    pub fn unshard_rows(&self, x: &Tensor) -> Result<Tensor> {
        let (rank, tokens) = (self.group.rank(), self.layout.tokens(self.group.rank()));
        if x.dims().first() != Some(&tokens) {
            bail!("unshard_rows expects [{tokens}, ..] on rank {rank}, given {:?}", x.dims());
        }
        self.gathered_rows(&self.layout, x)
    }

    fn unshard_by(&self, layout: &Layout, x: &Tensor) -> Result<Tensor> {
        let rank = self.group.rank();
        let (rows, tokens) = local_batch(layout, rank);
        let dims = x.dims();
        if dims.len() < 2 || dims[..2] != [rows, tokens] {
            bail!("unshard expects [{rows}, {tokens}, ..] on rank {rank}, given {dims:?}");
        }
        let whole = self.gathered_rows(layout, &x.flatten(0, 1)?)?;
        let row_len = layout.documents().row_len();
        whole.reshape([&[layout.documents().size() / row_len.max(1), row_len], &dims[2..]].concat())
    }

    /// The rows `[B * S, ..]` of all ranks' tokens `[T, ..]`; padding is zeros.
    fn gathered_rows(&self, layout: &Layout, x: &Tensor) -> Result<Tensor> {
        let ranks = layout.ranks();
        let counts: Vec<usize> = (0..ranks).map(|rank| layout.tokens(rank)).collect();
        let all = all_gather_of(self.group.cp(), &x.contiguous()?, counts.clone())?;
        // One row of zeros after the tokens stands for padding.
        let zeros = Tensor::zeros([&[1], &x.dims()[1..]].concat(), x.dtype(), x.device())?;
        let mut source = vec![counts.iter().sum::<usize>() as u32; layout.documents().size()];
        let gathered = (0..ranks).flat_map(|rank| layout.rows(rank));
        gathered.zip(0..).for_each(|(row, index)| source[row] = index);
        Tensor::cat(&[&all, &zeros], 0)?.index_select(&index(source, x.device())?, 0)
    }

    /// The position of each of this rank's tokens in its document, `[B, T]` as U32: the `position_ids` of rotary and
    /// learned position embeddings.
    ///
    /// # Errors
    /// A device without memory for them.
    pub fn position_ids(&self, device: &Device) -> Result<Tensor> {
        position_ids(&self.layout, self.group.rank(), device)
    }

    /// Like [`position_ids`](Self::position_ids), for the sequences of keys in cross attention.
    ///
    /// # Errors
    /// As for [`position_ids`](Self::position_ids).
    pub fn key_position_ids(&self, device: &Device) -> Result<Tensor> {
        position_ids(&self.key_layout, self.group.rank(), device)
    }

    /// Number of tokens of all ranks, without padding: what a mean over all tokens divides by.
    pub fn global_tokens(&self) -> usize {
        self.layout.documents().tokens()
    }

    /// The first two dims `[B, T]` of this rank's queries, and of its keys.
    pub(super) fn local_batches(&self) -> [(usize, usize); 2] {
        [&self.layout, &self.key_layout].map(|layout| local_batch(layout, self.group.rank()))
    }
}

fn shard(layout: &Layout, rank: usize, x: &Tensor, what: &str) -> Result<Tensor> {
    let documents = layout.documents();
    let (size, row_len) = (documents.size(), documents.row_len());
    let dims = x.dims();
    if dims.len() < 2 || dims[0] * dims[1] != size || dims[1] != row_len {
        bail!("the sequences of {what} are [{}, {row_len}, ..], given {dims:?}", size / row_len.max(1));
    }
    let rows = layout.rows(rank).into_iter().map(|row| row as u32).collect();
    let local = x.flatten(0, 1)?.contiguous()?.index_select(&index(rows, x.device())?, 0)?;
    let (rows, tokens) = local_batch(layout, rank);
    local.reshape([&[rows, tokens], &dims[2..]].concat())
}

fn position_ids(layout: &Layout, rank: usize, device: &Device) -> Result<Tensor> {
    let positions: Vec<u32> = layout.positions(rank).into_iter().map(|position| position as u32).collect();
    Tensor::from_vec(positions, local_batch(layout, rank), device)
}

fn index(rows: Vec<u32>, device: &Device) -> Result<Tensor> {
    let count = rows.len();
    Tensor::from_vec(rows, count, device)
}

/// The first two dims of this rank's tensors: `[B, T]` if on every rank all batch rows have the same number of tokens, else
/// `[1, T]` with the tokens of all rows.
fn local_batch(layout: &Layout, rank: usize) -> (usize, usize) {
    let documents = layout.documents();
    let rows = documents.size() / documents.row_len().max(1);
    let is_even = |rank: usize| {
        let mut counts = vec![0; rows];
        for run in layout.runs(rank) {
            counts[documents.get(run.document).row] += run.len;
        }
        // Rows must also lie one after the other, which they do in all layouts of whole rows.
        let order: Vec<usize> = layout.runs(rank).iter().map(|run| documents.get(run.document).row).collect();
        counts.iter().all(|count| *count == counts[0]) && order.is_sorted()
    };
    let tokens = layout.tokens(rank);
    match rows > 1 && (0..layout.ranks()).all(is_even) {
        true => (rows, tokens / rows),
        false => (1, tokens),
    }
}
