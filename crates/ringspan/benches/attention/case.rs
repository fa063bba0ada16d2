//! The cases of the benchmark: inputs of the attention kernels.

use super::arguments::{chosen, given};
use half::{bf16, f16};
use ringspan::kernel::{
    Buckets, Data, Dropout, FloatsMut, HeadMap, Inputs, Kernel, OnlineSoftmax, RelativeBias, Saved, Score, Statistics,
    Sums, Tile, TilePosition, View,
};
use ringspan::mask::Band;

/// Tokens S, query heads H, key-value heads G, and head width D.
type Shape = (usize, usize, usize, usize);

const SHAPES: [(&str, Shape); 8] = [
    ("a", (4096, 16, 16, 64)),
    ("b", (8192, 16, 4, 128)),
    ("c", (16384, 8, 2, 128)),
    ("d", (1024, 16, 16, 64)),
    ("e", (1024, 16, 4, 128)),
    ("f", (4096, 16, 4, 128)),
    ("g", (256, 16, 16, 64)),
    ("h", (512, 16, 16, 64)),
];

/// Self-attention of S tokens, H query heads, G key-value heads of width D.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) s: usize,
    pub(crate) h: usize,
    pub(crate) g: usize,
    pub(crate) d: usize,
    causal: bool,
    kind: &'static str,
    /// q, k and v.
    values: [Vec<f32>; 3],
    bf16: [Vec<bf16>; 3],
    f16: [Vec<f16>; 3],
    d_out: Vec<f32>,
}

impl Case {
    fn new(name: &str, (s, h, g, d): Shape, causal: bool, kind: &'static str) -> Self {
        let mask = if causal { "causal" } else { "full" };
        let name = format!("{name} S={s} H={h} G={g} D={d} {mask} {kind}");
        let values = [(h, 1), (g, 2), (g, 3)].map(|(heads, seed)| random(s * heads * d, seed));
        let bf16 = values.each_ref().map(|x| x.iter().map(|x| bf16::from_f32(*x)).collect());
        let f16 = values.each_ref().map(|x| x.iter().map(|x| f16::from_f32(*x)).collect());
        Self { name, s, h, g, d, causal, kind, values, bf16, f16, d_out: random(s * h * d, 4) }
    }

    /// Number of operations in the forward pass.
    pub(crate) fn operations(&self) -> f64 {
        let full = 4.0 * (self.s * self.s) as f64 * (self.h * self.d) as f64;
        if self.causal { full / 2.0 } else { full }
    }

    fn tiles(&self) -> [Tile; 1] {
        let lo = if self.causal { 0 } else { i64::MIN };
        [Tile { q: 0..self.s, k: 0..self.s, band: Band { lo, hi: i64::MAX }, position: TilePosition::START }]
    }

    /// Calls `work` with the inputs of the kernels.
    fn with(&self, work: impl FnOnce(&Inputs)) {
        let view = |at: usize, heads| {
            let data = match self.kind {
                "bf16" => Data::Bf16(&self.bf16[at]),
                "f16" => Data::F16(&self.f16[at]),
                _ => Data::F32(&self.values[at]),
            };
            View::stored(data, self.s, heads, self.d).expect("made of this size")
        };
        let heads = &HeadMap::grouped(self.h, self.g).expect("G divides H");
        let score = &score(self.h, self.d);
        work(&Inputs { q: view(0, self.h), k: view(1, self.g), v: view(2, self.g), heads, score, bias: None });
    }

    fn d_out(&self) -> View<'_> {
        View::new(&self.d_out, self.s, self.h, self.d).expect("made of this size")
    }

    pub(crate) fn forward(&self, kernel: &Kernel, partial: &mut OnlineSoftmax) {
        partial.max.fill(f32::NEG_INFINITY);
        partial.sum.fill(0.0);
        self.with(|inputs| kernel.forward(inputs, &self.tiles(), partial).expect("a CPU does not fail"));
    }

    /// Softmax statistics and delta, which the backward pass needs.
    pub(crate) fn saved(&self, kernel: &Kernel) -> (Statistics, Vec<f32>) {
        let mut partial = OnlineSoftmax::new(self.s, self.h, self.d);
        self.forward(kernel, &mut partial);
        let (out, statistics) = partial.finish(self.s, self.h, self.d, None);
        (
            statistics,
            kernel
                .delta(View::new(&out, self.s, self.h, self.d).expect("its size"), self.d_out())
                .expect("a CPU does not fail"),
        )
    }

    pub(crate) fn backward(
        &self,
        kernel: &Kernel,
        (statistics, delta): &(Statistics, Vec<f32>),
        sums: &mut [Vec<f32>; 3],
    ) {
        let [dq, dk, dv] = sums;
        let mut d_table = vec![0.0; score(self.h, self.d).table_len()];
        let (dq, dk, dv, d_table) = (dq.into(), dk.into(), dv.into(), (&mut d_table).into());
        let mut sums = Sums { dq, dk, dv, d_table, d_bias: FloatsMut::Host(&mut []) };
        let saved = Saved { statistics: statistics.data(), delta: Data::F32(delta), d_out: self.d_out() };
        self.with(|inputs| kernel.backward(inputs, &self.tiles(), &saved, &mut sums).expect("a CPU does not fail"));
    }

    pub(crate) fn sums(&self) -> [Vec<f32>; 3] {
        // The sums are not zero, so that their pages exist before they are timed.
        self.values.each_ref().map(|x| vec![1.0; x.len()])
    }
}

/// Scaled products, with the terms that `score=` adds.
fn score(heads: usize, dim: usize) -> Score {
    let plain = Score::new(1.0 / (dim as f32).sqrt());
    match given("score").as_deref() {
        Some("softcap") => Score { softcap: Some(20.0), ..plain },
        Some("alibi") => Score { relative: Some(RelativeBias::Alibi { slopes: vec![0.01; heads] }), ..plain },
        Some("dropout") => {
            Score { dropout: Some(Dropout { rate: 0.1, seed: 1, first_head: 0, first_query: 0 }), ..plain }
        }
        Some("buckets") => {
            let (count, max_distance) = (32, 128);
            let table = random(heads * count, 6);
            let buckets = Buckets { table, count, max_distance, bidirectional: false };
            Score { relative: Some(RelativeBias::Buckets(buckets)), ..plain }
        }
        _ => plain,
    }
}

/// The cases that the arguments choose.
pub(crate) fn cases() -> impl Iterator<Item = Case> {
    SHAPES.into_iter().filter(|(name, _)| chosen("case", name)).flat_map(|(name, shape)| {
        let masks = ["full", "causal"].into_iter().filter(|mask| chosen("mask", mask));
        masks.flat_map(move |mask| {
            let kinds = ["f32", "bf16", "f16"].into_iter().filter(|kind| chosen("type", kind));
            kinds.map(move |kind| Case::new(name, shape, mask == "causal", kind))
        })
    })
}

pub(crate) fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}
