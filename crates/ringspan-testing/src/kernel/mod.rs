//! Kernels against the f64 reference, in every shape, storage type and score, and with non-finite elements.

pub mod blocks;
pub mod faults;
pub mod moves;
pub mod storage;
pub mod terms;

use crate::Kernels;
use half::{bf16, f16};
use ringspan::Band;
use ringspan::kernel::reference::{self, Shape};
use ringspan::kernel::{
    Buckets, Data, Dropout, HeadMap, Inputs, Kernel, OnlineSoftmax, RelativeBias, Saved, Score, Sums, Tile,
};
use ringspan::kernel::{TilePosition, View};
use std::ops::Range;

/// A test case: one row of queries, and keys in blocks with tiles for each block.
///
/// Query i and key j are the tokens `first.0 + i * step` and `first.1 + j * step` of the row.
pub struct Problem {
    pub queries: usize,
    pub keys: usize,
    pub kv_of: Vec<usize>,
    pub kv_heads: usize,
    pub dim: usize,
    pub v_dim: usize,
    /// Key rows of each block, and its tiles in rows of the block; their positions are filled in later.
    pub blocks: Vec<(Range<usize>, Vec<Tile>)>,
    pub score: Score,
    /// Number of heads of the bias: H, 1, or 0 for none.
    pub bias_heads: usize,
    pub first: (usize, usize),
    pub step: usize,
    /// Storage type of q, k, v and the bias.
    pub storage: Storage,
    /// Whether these only travelled in their type, so that products are not in bf16.
    pub computes_in_f32: bool,
    /// Storage type of the gradient of the output.
    pub d_out_storage: Storage,
}

/// A storage type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Storage {
    F32,
    Bf16,
    F16,
}

/// Elements in their storage type.
pub enum StoredElements<'a> {
    F32(&'a [f32]),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Storage {
    /// The values in this type.
    pub fn store(self, values: &[f32]) -> StoredElements<'_> {
        match self {
            Storage::F32 => StoredElements::F32(values),
            Storage::Bf16 => StoredElements::Bf16(values.iter().map(|x| bf16::from_f32(*x)).collect()),
            Storage::F16 => StoredElements::F16(values.iter().map(|x| f16::from_f32(*x)).collect()),
        }
    }
}

impl StoredElements<'_> {
    /// The elements.
    pub fn data(&self) -> Data<'_> {
        match self {
            StoredElements::F32(values) => Data::F32(values),
            StoredElements::Bf16(values) => Data::Bf16(values),
            StoredElements::F16(values) => Data::F16(values),
        }
    }
}

/// The results of a problem, rounded to f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    /// Output and log-sum-exp of [`Kernel::decode`] for a single query; empty for several.
    pub decoded: Vec<f32>,
    pub decoded_lse: Vec<f32>,
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
    pub d_table: Vec<f32>,
    pub d_bias: Vec<f32>,
}

/// The tensors of a problem, exact in their storage types.
#[derive(Clone)]
pub struct Values {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_out: Vec<f32>,
    /// Bias, `[Tq, bias heads, tokens of keys]`.
    pub bias: Vec<f32>,
}

/// Every query sees every key.
pub const FULL: Band = Band { lo: i64::MIN, hi: i64::MAX };
/// Query i sees the keys up to i.
pub const CAUSAL: Band = Band { lo: 0, hi: i64::MAX };

/// A tile at the start of its row.
pub fn tile(q: Range<usize>, k: Range<usize>, band: Band) -> Tile {
    Tile { q, k, band, position: TilePosition::START }
}

impl Problem {
    /// A case with one block and one tile, and head groups of equal size.
    pub fn new(
        queries: usize,
        keys: usize,
        (heads, kv_heads): (usize, usize),
        (dim, v_dim): (usize, usize),
        band: Band,
    ) -> Self {
        Self {
            queries,
            keys,
            kv_of: (0..heads).map(|h| h * kv_heads / heads).collect(),
            kv_heads,
            dim,
            v_dim,
            blocks: vec![(0..keys, vec![tile(0..queries, 0..keys, band)])],
            score: Score::new(1.5 / (dim as f32).sqrt()),
            bias_heads: 0,
            first: (0, 0),
            step: 1,
            storage: Storage::F32,
            computes_in_f32: false,
            d_out_storage: Storage::F32,
        }
    }

    /// Number of query heads.
    pub fn heads(&self) -> usize {
        self.kv_of.len()
    }

    /// Whether query `i` sees key `j`.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        self.blocks.iter().any(|(rows, tiles)| {
            rows.contains(&j)
                && tiles.iter().any(|Tile { q, k, band, .. }| {
                    let j = j - rows.start;
                    q.contains(&i) && k.contains(&j) && band.sees(i - q.start, j - k.start)
                })
        })
    }

    /// Number of tokens in the row that the queries, and the keys, are a part of.
    fn tokens(&self) -> (usize, usize) {
        (self.first.0 + self.queries * self.step, self.first.1 + self.keys * self.step)
    }

    /// Reproducible values, rounded to the storage types.
    pub fn values(&self) -> Values {
        let mut values = Values {
            q: random(self.queries * self.heads() * self.dim, 1),
            k: random(self.keys * self.kv_heads * self.dim, 2),
            v: random(self.keys * self.kv_heads * self.v_dim, 3),
            d_out: random(self.queries * self.heads() * self.v_dim, 4),
            bias: random(self.queries * self.bias_heads * self.tokens().1, 5),
        };
        for tensor in [&mut values.q, &mut values.k, &mut values.v, &mut values.bias] {
            let stored = self.storage.store(tensor).data().to_f32().into_owned();
            *tensor = stored;
        }
        values.d_out = self.d_out_storage.store(&values.d_out).data().to_f32().into_owned();
        values
    }

    fn tiles(&self, rows: &Range<usize>, tiles: &[Tile]) -> Vec<Tile> {
        let position = |tile: &Tile| {
            let query = self.first.0 + tile.q.start * self.step;
            let key = self.first.1 + (rows.start + tile.k.start) * self.step;
            TilePosition { query, key, distance: query as i64 - key as i64, step: self.step }
        };
        tiles.iter().map(|tile| Tile { position: position(tile), ..tile.clone() }).collect()
    }

    /// The answer of the reference, which only supports whole rows and groups of equal size: missing tokens are zeros that
    /// no query sees, and keys and values are repeated for every query head.
    pub fn wanted(&self, values: &Values) -> Answer {
        let (heads, (queries, keys), step) = (self.heads(), self.tokens(), self.step);
        let spread = |x: &[f32], width: usize, first: usize, tokens: usize| {
            let mut to = vec![0.0; tokens * width];
            for (i, row) in x.chunks_exact(width.max(1)).enumerate() {
                to[(first + i * step) * width..][..width].copy_from_slice(row);
            }
            to
        };
        let expand = |x: &[f32], dim: usize| -> Vec<f32> {
            let row = |at: usize| (at / heads) * self.kv_heads + self.kv_of[at % heads];
            let repeated: Vec<f32> = (0..self.keys * heads).flat_map(|at| x[row(at) * dim..][..dim].to_vec()).collect();
            spread(&repeated, heads * dim, self.first.1, keys)
        };
        let gather = |x: &[f64], width: usize, first: usize, rows: usize| -> Vec<f64> {
            (0..rows).flat_map(|i| x[(first + i * step) * width..][..width].to_vec()).collect()
        };
        let fold = |x: &[f64], dim: usize| -> Vec<f32> {
            let mut sums = vec![0.0; self.keys * self.kv_heads * dim];
            for (at, x) in gather(x, heads * dim, self.first.1, self.keys).chunks_exact(dim).enumerate() {
                let row = (at / heads) * self.kv_heads + self.kv_of[at % heads];
                sums[row * dim..][..dim].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            }
            round(sums)
        };
        let token = |at: usize, first: usize| at.checked_sub(first).filter(|at| at % step == 0).map(|at| at / step);
        let visible = |_: usize, i: usize, j: usize| match (token(i, self.first.0), token(j, self.first.1)) {
            (Some(i), Some(j)) => self.sees(i, j),
            _ => false,
        };
        let bias: Option<Vec<f32>> = (self.bias_heads > 0).then(|| {
            let row = |at: usize| (at / heads) * self.bias_heads + at % heads % self.bias_heads;
            let repeated: Vec<f32> =
                (0..self.queries * heads).flat_map(|at| values.bias[row(at) * keys..][..keys].to_vec()).collect();
            spread(&repeated, heads * keys, self.first.0, queries)
        });
        let (q, d_out) = (
            spread(&values.q, heads * self.dim, self.first.0, queries),
            spread(&values.d_out, heads * self.v_dim, self.first.0, queries),
        );
        let problem = reference::Problem {
            shape: Shape { batch: 1, queries, keys, heads, kv_heads: heads, dim: self.dim, v_dim: self.v_dim },
            q: &q,
            k: &expand(&values.k, self.dim),
            v: &expand(&values.v, self.v_dim),
            score: &self.score,
            bias: bias.as_deref(),
            visible: &visible,
            distance: &|_, i, j| i as i64 - j as i64,
        };
        let (out, lse) = problem.attention();
        let gradients = problem.backward(&d_out);
        let d_bias =
            gather(&gradients.d_bias, if self.bias_heads > 0 { heads * keys } else { 0 }, self.first.0, self.queries);
        let mut folded = vec![0.0; values.bias.len()];
        for (at, x) in d_bias.chunks_exact(keys.max(1)).enumerate() {
            let row = (at / heads) * self.bias_heads + at % heads % self.bias_heads;
            folded[row * keys..][..keys].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
        let lse: Vec<f64> =
            lse.chunks_exact(queries.max(1)).flat_map(|x| gather(x, 1, self.first.0, self.queries)).collect();
        let (out, lse) = (round(gather(&out, heads * self.v_dim, self.first.0, self.queries)), round(lse));
        let single = self.queries == 1;
        Answer {
            decoded: if single { out.clone() } else { Vec::new() },
            decoded_lse: if single { lse.clone() } else { Vec::new() },
            out,
            lse,
            dq: round(gather(&gradients.dq, heads * self.dim, self.first.0, self.queries)),
            dk: fold(&gradients.dk, self.dim),
            dv: fold(&gradients.dv, self.v_dim),
            d_table: round(gradients.d_table),
            d_bias: round(folded),
        }
    }

    /// The answer of a kernel.
    pub fn computed(&self, kernel: &Kernel, values: &Values) -> Answer {
        let heads = self.heads();
        let map = HeadMap::new(self.kv_of.clone(), self.kv_heads).expect("heads in order");
        let [q, k, v, bias] = [&values.q, &values.k, &values.v, &values.bias].map(|x| self.storage.store(x));
        let q = View::stored(q.data(), self.queries, heads, self.dim).expect("its size");
        let d_out = self.d_out_storage.store(&values.d_out);
        let d_out = View::stored(d_out.data(), self.queries, heads, self.v_dim).expect("its size");
        let bias = View::stored(bias.data(), self.queries, self.bias_heads, self.tokens().1).filter(|b| b.heads > 0);
        let (k_width, v_width) = (self.kv_heads * self.dim, self.kv_heads * self.v_dim);
        let inputs = |rows: &Range<usize>| {
            let k = k.data().slice(rows.start * k_width..rows.end * k_width);
            let v = v.data().slice(rows.start * v_width..rows.end * v_width);
            let k = View::stored(k, rows.len(), self.kv_heads, self.dim).expect("its size");
            let v = View::stored(v, rows.len(), self.kv_heads, self.v_dim).expect("its size");
            let [q, k, v] = [q, k, v].map(|view| View { computes_in_f32: self.computes_in_f32, ..view });
            Inputs { q, k, v, heads: &map, score: &self.score, bias }
        };
        let attend = |by: fn(&Kernel, &Inputs, &[Tile], &mut OnlineSoftmax) -> ringspan::Result<()>| {
            let mut partial = OnlineSoftmax::new(self.queries, heads, self.v_dim);
            for (rows, tiles) in &self.blocks {
                by(kernel, &inputs(rows), &self.tiles(rows, tiles), &mut partial).expect("no failure");
            }
            partial.finish(self.queries, heads, self.v_dim, self.score.sinks.as_deref())
        };
        let (out, statistics) = attend(Kernel::forward);
        let (decoded, decoded_lse) = match self.queries {
            1 => (attend(Kernel::decode).0, attend(Kernel::decode).1.lse()),
            _ => Default::default(),
        };
        let out_view = View::new(&out, self.queries, heads, self.v_dim).expect("its size");
        let delta = kernel.delta(out_view, d_out).expect("no failure");
        let (mut dq, mut dk) = (vec![0.0; values.q.len()], vec![0.0; values.k.len()]);
        let mut dv = vec![0.0; values.v.len()];
        let (mut d_table, mut d_bias) = (vec![0.0; self.score.table_len()], vec![0.0; values.bias.len()]);
        for (rows, tiles) in &self.blocks {
            let mut sums = Sums {
                dq: (&mut dq).into(),
                dk: (&mut dk[rows.start * k_width..rows.end * k_width]).into(),
                dv: (&mut dv[rows.start * v_width..rows.end * v_width]).into(),
                d_table: (&mut d_table).into(),
                d_bias: (&mut d_bias).into(),
            };
            let saved = Saved { statistics: statistics.data(), delta: Data::F32(&delta), d_out };
            kernel.backward(&inputs(rows), &self.tiles(rows, tiles), &saved, &mut sums).expect("no failure");
        }
        Answer { out, lse: statistics.lse(), decoded, decoded_lse, dq, dk, dv, d_table, d_bias }
    }

    /// Whether the kernel rounds weights to bf16 for products.
    pub fn rounds(&self, kernel: &Kernel) -> bool {
        let in_bf16 = self.storage == Storage::Bf16 && !self.computes_in_f32;
        in_bf16 && self.score.scale > 0.0 && kernel.multiplies_bf16()
    }

    /// The kernels to compare with the reference.
    fn kernels(&self, kernels: &dyn Kernels, threads: &[usize]) -> Vec<Kernel> {
        let others = if self.storage == Storage::Bf16 { kernels.others_for_bf16() } else { Vec::new() };
        kernels.all(threads).into_iter().chain(others).collect()
    }

    /// Compares each kernel with the reference; on the CPU with one to three threads.
    fn check(&self, kernels: &dyn Kernels, what: &str) {
        let kernels = self.kernels(kernels, &[1, 2, 3]);
        if kernels.is_empty() {
            return;
        }
        let values = self.values();
        let wanted = self.wanted(&values);
        for kernel in kernels {
            let got = self.computed(&kernel, &values);
            let bound = if self.rounds(&kernel) { 8e-3 } else { 5e-6 };
            wanted.compare(&got, bound, &format!("{what}, {kernel:?}"));
            // The second call uses old buffers and has other timing, but must give the same bits.
            assert_eq!(self.computed(&kernel, &values), got, "{what}, {kernel:?}, again");
        }
    }
}

impl Answer {
    fn tensors(&self) -> [(&'static str, &[f32]); 9] {
        [
            ("out", &self.out),
            ("lse", &self.lse),
            ("decoded", &self.decoded),
            ("decoded lse", &self.decoded_lse),
            ("dq", &self.dq),
            ("dk", &self.dk),
            ("dv", &self.dv),
            ("d_table", &self.d_table),
            ("d_bias", &self.d_bias),
        ]
    }

    /// Panics unless each tensor of `got` is near this one: `bound` is a relative L2 error.
    pub fn compare(&self, got: &Answer, bound: f64, what: &str) {
        for ((name, wanted), (_, got)) in self.tensors().into_iter().zip(got.tensors()) {
            let (mut difference, mut norm) = (0.0, 0.0);
            assert_eq!(wanted.len(), got.len(), "{what}: {name}");
            for (wanted, got) in wanted.iter().zip(got) {
                if wanted.is_infinite()
                    || *wanted == 0.0 && matches!(name, "out" | "lse" | "decoded" | "decoded lse" | "dv")
                {
                    assert_eq!(wanted, got, "{what}: {name}");
                    continue;
                }
                difference += f64::from(wanted - got).powi(2);
                norm += f64::from(*wanted).powi(2);
            }
            // Gradients that cancel to zero (with one visible key, dS = P (dP - delta) = 0) are compared absolutely.
            let error = difference.sqrt() / norm.sqrt().max(0.1 * (wanted.len() as f64).sqrt()).max(1e-9);
            assert!(error <= bound, "{what}: {name} differs by {error:e}");
        }
    }
}

fn round(values: Vec<f64>) -> Vec<f32> {
    values.into_iter().map(|x| x as f32).collect()
}

/// Reproducible values in [-1, 1), by SplitMix64.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..n).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}
