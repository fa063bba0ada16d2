//! The CPU kernels behind one interface: the instructions are chosen when the program runs.

use super::backward::{self, Call, HeadGradients, Saved};
use super::simd::Portable;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::{HeadMap, Partial, Score, Tile, View, forward, spread};
use std::sync::Mutex;

/// A set of vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// What the compiler makes of plain code.
    Portable,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512F.
    Avx512,
}

impl Isa {
    /// Those this processor has, best first.
    pub fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                all.push(Self::Avx512);
            }
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                all.push(Self::Avx2);
            }
        }
        all.push(Self::Portable);
        all
    }
}

/// The attention kernel of one rank: its instructions and its number of threads.
///
/// The same inputs on the same number of threads give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    isa: Isa,
    threads: usize,
}

impl Kernel {
    /// The best instructions of this processor, on `threads` threads (at least one).
    pub fn new(threads: usize) -> Self {
        let isa = Isa::available().first().copied().unwrap_or(Isa::Portable);
        Self { isa, threads: threads.max(1) }
    }

    /// Certain instructions, or `None` if this processor lacks them.
    pub fn with_isa(isa: Isa, threads: usize) -> Option<Self> {
        Isa::available().contains(&isa).then_some(Self { isa, threads: threads.max(1) })
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Accumulates a block of keys into `partial`: q `[Tq, H, D]`, k `[Tk, G, D]`, v `[Tk, G, Dv]`.
    ///
    /// # Panics
    /// If shapes do not fit each other, or a tile leaves them.
    #[allow(clippy::too_many_arguments)] // Three tensors, what is visible, and where it goes.
    pub fn forward(
        &self,
        q: View,
        k: View,
        v: View,
        heads: &HeadMap,
        tiles: &[Tile],
        score: &Score,
        partial: &mut Partial,
    ) {
        check(&q, &k, &v, heads, tiles);
        assert_eq!(partial.out.len(), q.tokens * q.heads * v.dim, "the size of partial.out");
        assert_eq!(partial.max.len(), q.tokens * q.heads, "the size of partial.max");
        assert_eq!(partial.sum.len(), q.tokens * q.heads, "the size of partial.sum");
        let n = self.threads;
        // SAFETY: the processor has the instructions, because only `available` ones make a `Kernel`; shapes were checked.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => forward_avx512(n, q, k, v, heads, tiles, score, partial),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => forward_avx2(n, q, k, v, heads, tiles, score, partial),
                _ => forward::run::<Portable, 4>(n, q, k, v, heads, tiles, score, partial),
            }
        }
    }

    /// Adds the gradients that these tiles give to dq `[Tq, H, D]`, dk `[Tk, G, D]` and dv `[Tk, G, Dv]`.
    ///
    /// `lse` is the natural log-sum-exp over *all* keys, `delta` the sum of out * d_out over Dv; both `[H, Tq]`.
    ///
    /// # Panics
    /// If shapes do not fit each other, or a tile leaves them.
    #[allow(clippy::too_many_arguments)] // The forward pass's, what it left, and three gradients.
    pub fn backward(
        &self,
        q: View,
        k: View,
        v: View,
        heads: &HeadMap,
        tiles: &[Tile],
        score: &Score,
        lse: &[f32],
        delta: &[f32],
        d_out: View,
        dq: &mut [f32],
        dk: &mut [f32],
        dv: &mut [f32],
    ) {
        check(&q, &k, &v, heads, tiles);
        assert_eq!((d_out.tokens, d_out.heads, d_out.dim), (q.tokens, q.heads, v.dim), "the shape of d_out");
        assert_eq!((lse.len(), delta.len()), (q.tokens * q.heads, q.tokens * q.heads), "the sizes of lse and delta");
        assert_eq!(dq.len(), q.tokens * q.heads * q.dim, "the size of dq");
        assert_eq!(dk.len(), k.tokens * k.heads * k.dim, "the size of dk");
        assert_eq!(dv.len(), v.tokens * v.heads * v.dim, "the size of dv");
        let call = self.call(q, k, v, heads, tiles, score, Saved { lse, delta, d_out });
        if k.heads >= self.threads {
            // Whole heads to threads, each with its own outputs.
            for first in (0..k.heads).step_by(self.threads) {
                let count = self.threads.min(k.heads - first);
                for (i, head) in self.workers(count, |i| self.head(&call, first + i, 0, 1)).iter().enumerate() {
                    call.add(first + i, head, dq, dk, dv);
                }
            }
        } else {
            // Fewer heads than threads: every thread takes every n-th block of keys of each head.
            for kv_head in 0..k.heads {
                for head in self.workers(self.threads, |i| self.head(&call, kv_head, i, self.threads)) {
                    call.add(kv_head, &head, dq, dk, dv);
                }
            }
        }
    }

    /// Bytes that a forward call allocates at most, for packed copies.
    pub fn forward_workspace(&self, q: View, _k: View, v: View, _heads: &HeadMap, tiles: &[Tile]) -> u64 {
        let elements = match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => forward::workspace::<Avx512>(self.threads, &q, &v, tiles),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => forward::workspace::<Avx2>(self.threads, &q, &v, tiles),
            _ => forward::workspace::<Portable>(self.threads, &q, &v, tiles),
        };
        4 * elements as u64
    }

    /// Bytes that a backward call allocates at most, for packed copies and gradients of its threads' heads.
    pub fn backward_workspace(&self, q: View, k: View, v: View, heads: &HeadMap, tiles: &[Tile]) -> u64 {
        let saved = Saved { lse: &[], delta: &[], d_out: q };
        let call = self.call(q, k, v, heads, tiles, &Score { scale: 1.0 }, saved);
        let elements = match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => call.workspace::<Avx512>(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => call.workspace::<Avx2>(),
            _ => call.workspace::<Portable>(),
        };
        4 * (self.threads * elements) as u64
    }

    #[allow(clippy::too_many_arguments)] // As for `backward`.
    fn call<'a>(
        &self,
        q: View<'a>,
        k: View<'a>,
        v: View<'a>,
        heads: &'a HeadMap,
        tiles: &'a [Tile],
        score: &Score,
        saved: Saved<'a>,
    ) -> Call<'a> {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Call::new::<Avx512>(q, k, v, heads, tiles, score, saved),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Call::new::<Avx2>(q, k, v, heads, tiles, score, saved),
            _ => Call::new::<Portable>(q, k, v, heads, tiles, score, saved),
        }
    }

    fn head(&self, call: &Call, kv_head: usize, first: usize, step: usize) -> HeadGradients {
        // SAFETY: the processor has the instructions, because only `available` ones make a `Kernel`; `backward` checked
        // the shapes.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => backward_avx512(call, kv_head, first, step),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => backward_avx2(call, kv_head, first, step),
                _ => backward::run::<Portable, 4, 6, 2>(call, kv_head, first, step),
            }
        }
    }

    /// Results of `count` workers, in order.
    fn workers(&self, count: usize, work: impl Fn(usize) -> HeadGradients + Sync) -> Vec<HeadGradients> {
        let results: Vec<Mutex<Option<HeadGradients>>> = (0..count).map(|_| Mutex::new(None)).collect();
        let next = std::sync::atomic::AtomicUsize::new(0);
        spread(count, || {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if let Some(slot) = results.get(i) {
                let result = work(i);
                *slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(result);
            }
        });
        results.into_iter().filter_map(|slot| slot.into_inner().unwrap_or_else(|p| p.into_inner())).collect()
    }
}

fn check(q: &View, k: &View, v: &View, heads: &HeadMap, tiles: &[Tile]) {
    assert_eq!((heads.heads(), heads.kv_heads()), (q.heads, k.heads), "heads of the map, and of q and k");
    assert_eq!((k.tokens, k.heads, k.dim), (v.tokens, v.heads, q.dim), "shapes of k and v");
    for tile in tiles {
        assert!(tile.q.end <= q.tokens && tile.k.end <= k.tokens, "tile {tile:?} of {} x {}", q.tokens, k.tokens);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments)] // As for `Kernel::forward`.
unsafe fn forward_avx512(n: usize, q: View, k: View, v: View, h: &HeadMap, t: &[Tile], s: &Score, p: &mut Partial) {
    // SAFETY: the caller's.
    unsafe { forward::run::<Avx512, 8>(n, q, k, v, h, t, s, p) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[allow(clippy::too_many_arguments)] // As for `Kernel::forward`.
unsafe fn forward_avx2(n: usize, q: View, k: View, v: View, h: &HeadMap, t: &[Tile], s: &Score, p: &mut Partial) {
    // SAFETY: the caller's.
    unsafe { forward::run::<Avx2, 4>(n, q, k, v, h, t, s, p) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn backward_avx512(call: &Call, kv_head: usize, first: usize, step: usize) -> HeadGradients {
    // SAFETY: the caller's.
    unsafe { backward::run::<Avx512, 8, 6, 4>(call, kv_head, first, step) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn backward_avx2(call: &Call, kv_head: usize, first: usize, step: usize) -> HeadGradients {
    // SAFETY: the caller's.
    unsafe { backward::run::<Avx2, 4, 6, 2>(call, kv_head, first, step) }
}
