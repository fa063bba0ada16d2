//! A problem, its answer by the f64 reference, and its answer on a mesh of ranks.

pub mod decode;
pub mod meshes;
mod setup;

pub use setup::{MakeRank, MeshSetup, RankProgram};

use crate::Kernels;
use ringspan::attention::Wire;
use ringspan::kernel::{Buckets, Dropout, RelativeBias, reference};
use ringspan::{Documents, Error, Mask, Score};

/// A case of attention of documents, with a mask and a score; it does not depend on ranks.
pub struct Problem {
    pub name: String,
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub v_dim: usize,
    pub q_documents: Documents,
    pub k_documents: Documents,
    pub mask: Mask,
    /// An independent definition of the visible pairs in a row; `None` uses the mask's own.
    pub visible: Option<fn(usize, usize) -> bool>,
    pub score: Score,
    /// Number of heads of the bias: 0, 1 for a shared bias, or all.
    pub bias_heads: usize,
    /// Whether the ranks' tensors have gaps between rows, filled with other numbers.
    pub strided: bool,
}

/// The tensors of a problem and the gradient of its output, in f32 on the CPU.
pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_out: Vec<f32>,
    /// The bias, `[B, Sq, Hb, Sk]`.
    pub bias: Vec<f32>,
}

/// The results of a problem, and the bytes that each rank sent.
#[derive(Default, Clone, PartialEq, Debug)]
pub struct Answer {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
    pub d_sinks: Vec<f32>,
    pub d_table: Vec<f32>,
    pub d_bias: Vec<f32>,
    pub bytes_forward: Vec<u64>,
    pub bytes_backward: Vec<u64>,
}

impl Problem {
    /// Self-attention of a batch without padding.
    pub fn new(batch: usize, len: usize, heads: usize, kv_heads: usize, dim: usize, mask: Mask) -> Self {
        let documents = Documents::batch(batch, len);
        Self::with_documents(documents, batch, heads, kv_heads, dim, mask)
    }

    pub fn with_documents(
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
            visible: None,
            score: Score::new(1.0 / (dim as f32).sqrt()),
            bias_heads: 0,
            strided: false,
        }
    }

    /// The same problem with other score parameters; the scale stays.
    pub fn with_score(self, what: &str, change: impl FnOnce(&Self, &mut Score)) -> Self {
        let mut score = self.score.clone();
        change(&self, &mut score);
        Self { name: format!("{} {what}", self.name), score, ..self }
    }

    pub fn with_softcap(self) -> Self {
        self.with_score("softcap", |_, score| score.softcap = Some(0.7))
    }

    pub fn with_sinks(self) -> Self {
        self.with_score("sinks", |problem, score| score.sinks = Some(random(problem.heads, 77)))
    }

    pub fn with_alibi(self) -> Self {
        self.with_score("alibi", |problem, score| {
            let slopes = (0..problem.heads).map(|h| 0.3 / (h + 1) as f32).collect();
            score.relative = Some(RelativeBias::Alibi { slopes });
        })
    }

    pub fn with_buckets(self) -> Self {
        self.with_score("buckets", |problem, score| {
            let table = random(problem.heads * 12, 78);
            score.relative =
                Some(RelativeBias::Buckets(Buckets { table, count: 12, max_distance: 40, bidirectional: true }));
        })
    }

    pub fn with_dropout(self) -> Self {
        self.with_score("dropout", |_, score| {
            score.dropout = Some(Dropout { rate: 0.3, seed: 4, first_head: 0, first_query: 0 })
        })
    }

    pub fn with_bias(self, heads: usize) -> Self {
        Self { name: format!("{} bias of {heads} heads", self.name), bias_heads: heads, ..self }
    }

    /// Attention of `queries` over `keys` with another length.
    pub fn cross(
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

    pub fn inputs(&self, seed: u64) -> Inputs {
        let Self { batch, queries, keys, heads, kv_heads, dim, v_dim, .. } = *self;
        Inputs {
            q: random(batch * queries * heads * dim, seed),
            k: random(batch * keys * kv_heads * dim, seed + 1),
            v: random(batch * keys * kv_heads * v_dim, seed + 2),
            d_out: random(batch * queries * heads * v_dim, seed + 3),
            bias: random(batch * queries * self.bias_heads * keys, seed + 4),
        }
    }

    /// Inputs that the given type represents exactly.
    pub fn inputs_of(&self, wire: Wire, seed: u64) -> Inputs {
        let Inputs { q, k, v, d_out, bias } = self.inputs(seed);
        let [q, k, v, d_out] = [q, k, v, d_out].map(|values| {
            let round = |x: f32| match wire {
                Wire::F32 => x,
                Wire::Bf16 => half::bf16::from_f32(x).to_f32(),
                Wire::F16 => half::f16::from_f32(x).to_f32(),
            };
            values.into_iter().map(round).collect()
        });
        Inputs { q, k, v, d_out, bias }
    }

    /// Document, position and length of the document's frame for each element of a flat batch.
    fn places(documents: &Documents) -> Vec<Option<(usize, usize, usize)>> {
        let mut places = vec![None; documents.size()];
        for (index, document) in documents.iter().enumerate() {
            for position in document.spans.iter().flat_map(|span| span.clone()) {
                places[document.offset + position] = Some((index, position, document.seq_len));
            }
        }
        places
    }

    /// The answer of plain f64 loops, rounded to f32: it uses the documents and the mask, but no runs or bands.
    pub fn reference(&self, inputs: &Inputs) -> Answer {
        let shape = reference::Shape {
            batch: self.batch,
            queries: self.queries,
            keys: self.keys,
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            v_dim: self.v_dim,
        };
        let (q, k) = (Self::places(&self.q_documents), Self::places(&self.k_documents));
        let (queries, keys, mask) = (self.queries, self.keys, &self.mask);
        let pair = |b: usize, i: usize, j: usize| q[b * queries + i].zip(k[b * keys + j]);
        let visible = |b, i, j| match self.visible {
            Some(sees) => sees(i, j),
            None => pair(b, i, j).is_some_and(|((q_doc, i, q_seq_len), (k_doc, j, k_seq_len))| {
                q_doc == k_doc && mask.sees(q_doc, i, j, q_seq_len, k_seq_len)
            }),
        };
        let distance = |b, i, j| {
            pair(b, i, j).map_or(0, |((_, i, q_seq_len), (_, j, k_seq_len))| mask.distance(i, j, q_seq_len, k_seq_len))
        };
        // The reference needs a bias for each head.
        let row = |row: &[f32]| row.repeat(if self.bias_heads == 1 { self.heads } else { 1 });
        let bias: Vec<f32> = inputs.bias.chunks_exact((self.bias_heads * keys).max(1)).flat_map(row).collect();
        let problem = reference::Problem {
            shape,
            q: &inputs.q,
            k: &inputs.k,
            v: &inputs.v,
            score: &self.score,
            bias: (self.bias_heads > 0).then_some(&bias),
            visible: &visible,
            distance: &distance,
        };
        let (out, lse) = problem.attention();
        let gradients = problem.backward(&inputs.d_out);
        let round = |values: Vec<f64>| values.into_iter().map(|x| x as f32).collect();
        let mut d_bias = gradients.d_bias;
        if self.bias_heads == 1 {
            let sum =
                |rows: &[f64]| (0..keys).map(|j| rows.iter().skip(j).step_by(keys).sum::<f64>()).collect::<Vec<_>>();
            d_bias = d_bias.chunks_exact((self.heads * keys).max(1)).flat_map(sum).collect();
        }
        // Padding has no log-sum-exp, even with sinks.
        let mut lse: Vec<f32> = round(lse);
        for (at, lse) in lse.iter_mut().enumerate() {
            let (b, i) = (at / (self.heads * queries), at % queries);
            if q[b * queries + i].is_none() {
                *lse = f32::NEG_INFINITY;
            }
        }
        Answer {
            out: round(out),
            lse,
            dq: round(gradients.dq),
            dk: round(gradients.dk),
            dv: round(gradients.dv),
            d_sinks: round(gradients.d_sinks),
            d_table: round(gradients.d_table),
            d_bias: round(d_bias),
            ..Answer::default()
        }
    }

    /// Asserts that a mesh of ranks with a thread each gives the reference's answer: relative L2 up to 1e-5, and the same -inf.
    pub fn check(&self, inputs: &Inputs, wanted: &Answer, on: MeshSetup) {
        self.compare(self.on_mesh(inputs, on), wanted, on);
    }

    /// Like [`check`](Self::check), for these kernels, if this machine has the device.
    pub fn check_by(&self, kernels: &dyn Kernels, inputs: &Inputs, wanted: &Answer, on: MeshSetup) {
        if kernels.one().is_some() {
            self.compare(self.on_mesh_of(kernels, inputs, on), wanted, on);
        }
    }

    fn compare(&self, got: Result<Answer, Error>, wanted: &Answer, on: MeshSetup) {
        let what = format!("{}, {on:?}", self.name);
        let got = got.unwrap_or_else(|error| panic!("{what}: {error}"));
        if let Some((name, error)) = wanted.difference(&got, 1e-5) {
            panic!("{what}: {name} differs by {error:e}");
        }
    }
}

impl Answer {
    /// The first result that differs by more than `bound`, with its difference.
    pub fn difference(&self, got: &Self, bound: f64) -> Option<(&'static str, f64)> {
        let pairs = [
            ("out", &self.out, &got.out),
            ("lse", &self.lse, &got.lse),
            ("dq", &self.dq, &got.dq),
            ("dk", &self.dk, &got.dk),
            ("dv", &self.dv, &got.dv),
            ("d_sinks", &self.d_sinks, &got.d_sinks),
            ("d_table", &self.d_table, &got.d_table),
            ("d_bias", &self.d_bias, &got.d_bias),
        ];
        let errors = pairs.into_iter().map(|(name, wanted, got)| (name, relative_l2(got, wanted)));
        errors.into_iter().find(|(_, error)| *error > bound || error.is_nan())
    }
}

/// |a - b| / |b| over the finite elements; infinite if a non-finite element differs.
pub fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
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
    // A gradient that cancels to zero (with one visible key, dq = 0) is compared with elements of size 0.01.
    difference.sqrt() / norm.sqrt().max(0.01 * (b.len().max(1) as f64).sqrt())
}

/// Reproducible values in [-1, 1), by SplitMix64.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
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
