//! A problem, its answer by the f64 reference, and its answer by a mesh of ranks.
#![allow(dead_code)] // Each test binary uses its part.

use ringspan::attention::{self, Group};
use ringspan::comm::threads;
use ringspan::kernel::{Kernel, View, reference};
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Schedule, Score, Strategy};

pub(crate) struct Problem {
    pub(crate) name: String,
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    pub(crate) v_dim: usize,
    pub(crate) q_documents: Documents,
    pub(crate) k_documents: Documents,
    pub(crate) mask: Mask,
}

pub(crate) struct Inputs {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) d_out: Vec<f32>,
}

#[derive(Default, Clone, PartialEq, Debug)]
pub(crate) struct Answer {
    pub(crate) out: Vec<f32>,
    pub(crate) lse: Vec<f32>,
    pub(crate) dq: Vec<f32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
    pub(crate) bytes_forward: Vec<u64>,
    pub(crate) bytes_backward: Vec<u64>,
}

impl Problem {
    /// Self-attention of a batch without padding.
    pub(crate) fn new(batch: usize, len: usize, heads: usize, kv_heads: usize, dim: usize, mask: Mask) -> Self {
        let documents = Documents::batch(batch, len);
        Self::with_documents(documents, batch, heads, kv_heads, dim, mask)
    }

    pub(crate) fn with_documents(
        documents: Documents,
        batch: usize,
        heads: usize,
        kv_heads: usize,
        dim: usize,
        mask: Mask,
    ) -> Self {
        let len = documents.size() / batch;
        Self {
            name: format!("B={batch} S={len} H={heads} G={kv_heads} D={dim} {mask}"),
            batch,
            queries: len,
            keys: len,
            heads,
            kv_heads,
            dim,
            v_dim: dim,
            q_documents: documents.clone(),
            k_documents: documents,
            mask,
        }
    }

    /// Attention of `queries` over `keys` of other lengths.
    pub(crate) fn cross(
        batch: usize,
        queries: usize,
        keys: usize,
        heads: usize,
        kv_heads: usize,
        dim: usize,
        mask: Mask,
    ) -> Self {
        Self {
            name: format!("B={batch} Sq={queries} Sk={keys} H={heads} G={kv_heads} D={dim} {mask}"),
            queries,
            keys,
            q_documents: Documents::batch(batch, queries),
            k_documents: Documents::batch(batch, keys),
            ..Self::new(batch, 0, heads, kv_heads, dim, mask)
        }
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    pub(crate) fn inputs(&self, seed: u64) -> Inputs {
        let Self { batch, queries, keys, heads, kv_heads, dim, v_dim, .. } = *self;
        Inputs {
            q: random(batch * queries * heads * dim, seed),
            k: random(batch * keys * kv_heads * dim, seed + 1),
            v: random(batch * keys * kv_heads * v_dim, seed + 2),
            d_out: random(batch * queries * heads * v_dim, seed + 3),
        }
    }

    /// Whether query i of row b sees key j: by the documents and the mask, without runs or bands.
    fn visibility(&self) -> impl Fn(usize, usize, usize) -> bool {
        let place = |documents: &Documents| {
            let mut place = vec![None; documents.size()];
            for (index, document) in documents.iter().enumerate() {
                for position in document.spans.iter().flat_map(|span| span.clone()) {
                    place[document.offset + position] = Some((index, position, document.extent));
                }
            }
            place
        };
        let (q, k) = (place(&self.q_documents), place(&self.k_documents));
        let (queries, keys, mask) = (self.queries, self.keys, self.mask);
        move |b, i, j| match (q[b * queries + i], k[b * keys + j]) {
            (Some((q_doc, i, q_extent)), Some((k_doc, j, k_extent))) => {
                q_doc == k_doc && mask.sees(i, j, q_extent, k_extent)
            }
            _ => false,
        }
    }

    /// The answer by plain f64 loops, rounded to f32.
    pub(crate) fn reference(&self, inputs: &Inputs) -> Answer {
        let shape = reference::Shape {
            batch: self.batch,
            queries: self.queries,
            keys: self.keys,
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            v_dim: self.v_dim,
        };
        let (visible, scale) = (self.visibility(), f64::from(self.scale()));
        let Inputs { q, k, v, d_out } = inputs;
        let (out, lse) = reference::attention(shape, q, k, v, scale, &visible);
        let (dq, dk, dv) = reference::backward(shape, q, k, v, scale, &visible, d_out);
        let round = |values: Vec<f64>| values.into_iter().map(|x| x as f32).collect();
        Answer { out: round(out), lse: round(lse), dq: round(dq), dk: round(dk), dv: round(dv), ..Answer::default() }
    }

    /// The answer by `ring x ulysses` ranks.
    pub(crate) fn on_mesh(
        &self,
        inputs: &Inputs,
        kind: LayoutKind,
        strategy: Strategy,
        ring: usize,
        ulysses: usize,
    ) -> Result<Answer, Error> {
        let ranks = ring * ulysses;
        let query = Layout::new(kind, &self.q_documents, ranks)?;
        let key = Layout::new(kind, &self.k_documents, ranks)?;
        let schedule = Schedule::new(strategy, &query, &key, &self.mask, ring, ulysses)?;
        let Self { heads, kv_heads, dim, v_dim, .. } = *self;
        let score = Score { scale: self.scale() };
        let locals = threads::run(ranks, threads::Options::default(), |comm| {
            let rank = comm.rank();
            let group = Group::new(comm.clone(), ring, ulysses, Kernel::new(1))?;
            let q = query.shard(rank, &inputs.q, heads * dim)?;
            let k = key.shard(rank, &inputs.k, kv_heads * dim)?;
            let v = key.shard(rank, &inputs.v, kv_heads * v_dim)?;
            let d_out = query.shard(rank, &inputs.d_out, heads * v_dim)?;
            let view = |data, layout: &Layout, heads, dim| {
                View::new(data, layout.tokens(rank), heads, dim).expect("a shard has its layout's size")
            };
            let (q, k) = (view(&q, &query, heads, dim), view(&k, &key, kv_heads, dim));
            let (v, d_out) = (view(&v, &key, kv_heads, v_dim), view(&d_out, &query, heads, v_dim));
            let before = comm.bytes_sent();
            let forward = attention::forward(&group, &schedule, q, k, v, &score)?;
            let between = comm.bytes_sent();
            let gradients = attention::backward(&group, &schedule, q, k, v, &score, &forward, d_out)?;
            Ok::<_, Error>((forward, gradients, between - before, comm.bytes_sent() - between))
        })?;
        let (queries, keys) = (self.batch * self.queries, self.batch * self.keys);
        let mut answer = Answer {
            out: vec![0.0; queries * heads * v_dim],
            lse: vec![f32::NEG_INFINITY; queries * heads],
            dq: vec![0.0; queries * heads * dim],
            dk: vec![0.0; keys * kv_heads * dim],
            dv: vec![0.0; keys * kv_heads * v_dim],
            ..Answer::default()
        };
        for (rank, (forward, gradients, bytes_forward, bytes_backward)) in locals.into_iter().enumerate() {
            query.unshard(rank, &forward.out, heads * v_dim, &mut answer.out)?;
            query.unshard(rank, &gradients.dq, heads * dim, &mut answer.dq)?;
            key.unshard(rank, &gradients.dk, kv_heads * dim, &mut answer.dk)?;
            key.unshard(rank, &gradients.dv, kv_heads * v_dim, &mut answer.dv)?;
            // lse is [H, T] on a rank and [B, H, S] in the answer.
            let tokens = query.tokens(rank);
            for (token, row) in query.rows(rank).into_iter().enumerate() {
                let (b, s) = (row / self.queries, row % self.queries);
                for head in 0..heads {
                    answer.lse[(b * heads + head) * self.queries + s] = forward.lse[head * tokens + token];
                }
            }
            answer.bytes_forward.push(bytes_forward);
            answer.bytes_backward.push(bytes_backward);
        }
        Ok(answer)
    }

    /// Asserts that a mesh gives the reference's answer: relative L2 up to 1e-5, and -inf and 0 where it has them.
    pub(crate) fn check(
        &self,
        inputs: &Inputs,
        wanted: &Answer,
        kind: LayoutKind,
        strategy: Strategy,
        mesh: (usize, usize),
    ) {
        let what = format!("{}, {kind}, {strategy}, ring {} x ulysses {}", self.name, mesh.0, mesh.1);
        let got = match self.on_mesh(inputs, kind, strategy, mesh.0, mesh.1) {
            Ok(got) => got,
            Err(error) => panic!("{what}: {error}"),
        };
        for (name, got, wanted) in [
            ("out", &got.out, &wanted.out),
            ("lse", &got.lse, &wanted.lse),
            ("dq", &got.dq, &wanted.dq),
            ("dk", &got.dk, &wanted.dk),
            ("dv", &got.dv, &wanted.dv),
        ] {
            let error = relative_l2(got, wanted);
            assert!(error <= 1e-5, "{what}: {name} differs by {error:e}");
        }
    }
}

/// |a - b| / |b| over the finite elements; infinite if one has a non-finite element where the other has another.
pub(crate) fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0f64, 0.0f64);
    for (&a, &b) in a.iter().zip(b) {
        if !a.is_finite() || !b.is_finite() {
            if a != b {
                return f64::INFINITY;
            }
            continue;
        }
        difference += (f64::from(a) - f64::from(b)).powi(2);
        norm += f64::from(b).powi(2);
    }
    // A gradient that cancels to zero (one visible key: dq = 0) is compared with elements of size 0.01.
    difference.sqrt() / norm.sqrt().max(0.01 * (b.len().max(1) as f64).sqrt())
}

/// Reproducible values in [-1, 1), by SplitMix64.
pub(crate) fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..n).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}
