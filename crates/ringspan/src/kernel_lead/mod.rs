//! Attention of banded tiles on one device: the plain reference, and the blocked CPU kernels.
//!
//! Shape letters: Tq queries and Tk keys on this rank, H query heads, G key-value heads, D and Dv head widths.



mod backward;
mod cpu;
mod forward;
mod heads;
mod pack;
pub mod reference;
mod simd;

pub use cpu::{Isa, Kernel};
pub use heads::HeadMap;

use crate::mask::Band;
use std::ops::Range;

/// A tensor `[tokens, heads, dim]` read in place; rows may lie anywhere, the last dimension is contiguous.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Tokens.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Elements a head.
    pub dim: usize,
    /// Elements from one token to the next.
    pub token_stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
}

impl<'a> View<'a> {
    /// A contiguous `[tokens, heads, dim]` tensor; `None` if `data` has another size.
    pub fn new(data: &'a [f32], tokens: usize, heads: usize, dim: usize) -> Option<Self> {
        (data.len() == tokens * heads * dim).then_some(Self {
            data,
            tokens,
            heads,
            dim,
            token_stride: heads * dim,
            head_stride: dim,
        })
    }

    /// The elements of one token and head.
    pub fn row(&self, token: usize, head: usize) -> &'a [f32] {
        let at = token * self.token_stride + head * self.head_stride;
        &self.data[at..at + self.dim]
    }
}

/// Queries `q` against keys `k` (rows of this rank's queries and of the key block), visible where `band` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Query rows.
    pub q: Range<usize>,
    /// Key rows.
    pub k: Range<usize>,
    /// Visibility, in indices local to `q` and `k`.
    pub band: Band,
}

/// What changes a score besides the mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Factor on `q . k`; usually 1/sqrt(D).
    pub scale: f32,
}

/// The state of an online softmax over the key blocks seen so far (Milakov and Gimelshein, 2018), all in f32.
#[derive(Debug, Clone)]
pub struct Partial {
    /// Weighted values so far, not yet divided by `sum`: `[Tq, H, Dv]`.
    pub out: Vec<f32>,
    /// Greatest `log2(e) * scale * q.k` so far, or -inf: `[H, Tq]`.
    pub max: Vec<f32>,
    /// Sum of `2^(score - max)` so far: `[H, Tq]`.
    pub sum: Vec<f32>,
}

impl Partial {
    /// Nothing seen yet.
    pub fn new(tokens: usize, heads: usize, v_dim: usize) -> Self {
        Self {
            out: vec![0.0; tokens * heads * v_dim],
            max: vec![f32::NEG_INFINITY; heads * tokens],
            sum: vec![0.0; heads * tokens],
        }
    }

    /// Output `[Tq, H, Dv]` and natural log-sum-exp `[H, Tq]`: 0 and -inf where a query saw nothing.
    pub fn finish(mut self, tokens: usize, heads: usize, v_dim: usize) -> (Vec<f32>, Vec<f32>) {
        for (at, sum) in self.sum.iter().enumerate() {
            let (head, token) = (at / tokens, at % tokens);
            let factor = if *sum == 0.0 { 0.0 } else { 1.0 / sum };
            self.out[(token * heads + head) * v_dim..][..v_dim].iter_mut().for_each(|x| *x *= factor);
            // log2(0) is -inf, and so is the maximum then.
            self.max[at] = (self.max[at] + sum.log2()) * std::f32::consts::LN_2;
        }
        (self.out, self.max)
    }
}

/// Sum over Dv of `out * d_out`, both `[Tq, H, Dv]`, as `[H, Tq]`: what the softmax's backward subtracts from dP.
pub fn delta(out: &[f32], d_out: View) -> Vec<f32> {
    let mut delta = Vec::with_capacity(d_out.heads * d_out.tokens);
    for head in 0..d_out.heads {
        for token in 0..d_out.tokens {
            let out = &out[(token * d_out.heads + head) * d_out.dim..];
            delta.push(d_out.row(token, head).iter().zip(out).map(|(a, b)| a * b).sum());
        }
    }
    delta
}

/// Runs `work` on `threads` threads, this one among them.
fn spread(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(&work);
        }
        work();
    });
}
