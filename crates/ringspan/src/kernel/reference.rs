//! The reference: attention and its gradients by plain loops in f64, with visibility as a predicate.
//!
//! It uses no bands, tiles, layouts or ranks, so an error in those cannot hide in it. Source: Dao et al., 2022
//! (arXiv:2205.14135), section 2.1 and appendix B.2, without any blocking.

use super::{RelativeBias, Score};

/// Sizes of a problem: q `[B, Sq, H, D]`, k `[B, Sk, G, D]`, v `[B, Sk, G, Dv]`, all contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Number of batch rows B.
    pub batch: usize,
    /// Number of queries in a row, Sq.
    pub queries: usize,
    /// Number of keys in a row, Sk.
    pub keys: usize,
    /// Number of query heads H, a multiple of G.
    pub heads: usize,
    /// Number of key-value heads G.
    pub kv_heads: usize,
    /// Width D of a query and a key.
    pub dim: usize,
    /// Width Dv of a value.
    pub v_dim: usize,
}

impl Shape {
    /// All query rows as `(row, b, i, h, g)`; `row` is the index in `[B, Sq, H]`, `g` the key-value head.
    fn rows(self) -> impl Iterator<Item = (usize, usize, usize, usize, usize)> {
        let group = (self.heads / self.kv_heads.max(1)).max(1);
        (0..self.batch * self.queries * self.heads).map(move |row| {
            let (token, h) = (row / self.heads, row % self.heads);
            (row, token / self.queries, token % self.queries, h, h / group)
        })
    }

    /// Index of key `j` of row `b`, head `g`, in `[B, Sk, G]`.
    fn key(self, b: usize, j: usize, g: usize) -> usize {
        (b * self.keys + j) * self.kv_heads + g
    }
}

/// The inputs of attention, whole and on one device.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    /// Sizes of the tensors.
    pub shape: Shape,
    /// Queries, `[B, Sq, H, D]`.
    pub q: &'a [f32],
    /// Keys, `[B, Sk, G, D]`.
    pub k: &'a [f32],
    /// Values, `[B, Sk, G, Dv]`.
    pub v: &'a [f32],
    /// Scale and other parameters that turn products into weights.
    pub score: &'a Score,
    /// Bias, `[B, Sq, H, Sk]`.
    pub bias: Option<&'a [f32]>,
    /// `visible(b, i, j)`: whether query `i` of row `b` sees key `j` of that row.
    pub visible: &'a dyn Fn(usize, usize, usize) -> bool,
    /// `distance(b, i, j)`: the distance from key `j` of row `b` to query `i` of that row.
    pub distance: &'a dyn Fn(usize, usize, usize) -> i64,
}

/// Gradients of a [`Problem`], each in the shape of its input.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Gradient of the queries, `[B, Sq, H, D]`.
    pub dq: Vec<f64>,
    /// Gradient of the keys, `[B, Sk, G, D]`.
    pub dk: Vec<f64>,
    /// Gradient of the values, `[B, Sk, G, Dv]`.
    pub dv: Vec<f64>,
    /// Gradient of the sinks, `[H]`.
    pub d_sinks: Vec<f64>,
    /// Gradient of the table of relative buckets, `[H, count]`.
    pub d_table: Vec<f64>,
    /// Gradient of the bias, `[B, Sq, H, Sk]`.
    pub d_bias: Vec<f64>,
}

/// A visible key of a query, with its weight.
struct Weight {
    key: usize,
    /// Weight in the softmax, before dropout.
    p: f64,
    /// Factor of dropout: 0, or the scale of kept weights.
    kept: f64,
    /// Derivative of the score with respect to the scaled product.
    slope: f64,
}

impl Problem<'_> {
    /// Output `[B, Sq, H, Dv]` and natural log-sum-exp `[B, H, Sq]`. A query that sees nothing has output 0, and
    /// log-sum-exp -inf or its sink.
    pub fn attention(&self) -> (Vec<f64>, Vec<f64>) {
        let shape = self.shape;
        let mut out = vec![0.0; shape.batch * shape.queries * shape.heads * shape.v_dim];
        let mut lse = vec![f64::NEG_INFINITY; shape.batch * shape.heads * shape.queries];
        for (row, b, i, h, g) in shape.rows() {
            let (weights, total) = self.softmax(row, b, i, h, g);
            lse[(b * shape.heads + h) * shape.queries + i] = total;
            let out = &mut out[row * shape.v_dim..][..shape.v_dim];
            for weight in weights {
                let values = &self.v[shape.key(b, weight.key, g) * shape.v_dim..][..shape.v_dim];
                for (sum, value) in out.iter_mut().zip(values) {
                    *sum += weight.p * weight.kept * f64::from(*value);
                }
            }
        }
        (out, lse)
    }

    /// Gradients for the gradient `d_out` `[B, Sq, H, Dv]` of the output.
    pub fn backward(&self, d_out: &[f32]) -> Gradients {
        let (shape, scale) = (self.shape, f64::from(self.score.scale));
        let (dim, v_dim) = (shape.dim, shape.v_dim);
        let mut sums = Gradients {
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dv: vec![0.0; self.v.len()],
            d_sinks: vec![0.0; self.score.sinks.as_ref().map_or(0, Vec::len)],
            d_table: vec![0.0; self.score.table_len()],
            d_bias: vec![0.0; self.bias.map_or(0, <[f32]>::len)],
        };
        for (row, b, i, h, g) in shape.rows() {
            let (weights, lse) = self.softmax(row, b, i, h, g);
            let d_out = &d_out[row * v_dim..][..v_dim];
            let dp = |w: &Weight| w.kept * dot(d_out, &self.v[shape.key(b, w.key, g) * v_dim..][..v_dim]);
            let mean: f64 = weights.iter().map(|w| w.p * dp(w)).sum();
            if let Some(sinks) = &self.score.sinks {
                sums.d_sinks[h] -= (f64::from(sinks[h]) - lse).exp() * mean;
            }
            for weight in &weights {
                let (j, key) = (weight.key, shape.key(b, weight.key, g));
                let ds = weight.p * (dp(weight) - mean);
                if !sums.d_bias.is_empty() {
                    sums.d_bias[row * shape.keys + j] += ds;
                }
                if let Some(RelativeBias::Buckets(buckets)) = &self.score.relative {
                    sums.d_table[h * buckets.count + buckets.of((self.distance)(b, i, j))] += ds;
                }
                for (c, d_out) in d_out.iter().enumerate() {
                    sums.dv[key * v_dim + c] += weight.p * weight.kept * f64::from(*d_out);
                }
                let ds = ds * weight.slope * scale;
                for c in 0..dim {
                    sums.dq[row * dim + c] += ds * f64::from(self.k[key * dim + c]);
                    sums.dk[key * dim + c] += ds * f64::from(self.q[row * dim + c]);
                }
            }
        }
        sums
    }

    /// The weights of one query's visible keys, and the log-sum-exp of its scores and its sink.
    fn softmax(&self, row: usize, b: usize, i: usize, h: usize, g: usize) -> (Vec<Weight>, f64) {
        let (shape, score) = (self.shape, self.score);
        let q = &self.q[row * shape.dim..][..shape.dim];
        let weight = |j: usize| {
            let mut s = f64::from(score.scale) * dot(q, &self.k[shape.key(b, j, g) * shape.dim..][..shape.dim]);
            let mut slope = 1.0;
            if let Some(cap) = score.softcap.map(f64::from) {
                let t = (s / cap).tanh();
                (s, slope) = (cap * t, 1.0 - t * t);
            }
            s += f64::from(score.relative(h, (self.distance)(b, i, j)));
            s += self.bias.map_or(0.0, |bias| f64::from(bias[row * shape.keys + j]));
            let kept = score.dropout.map_or(1.0, |dropout| {
                let keeps = dropout.keeps(h, b * shape.queries + i, j);
                if keeps { 1.0 / (1.0 - f64::from(dropout.rate)) } else { 0.0 }
            });
            Weight { key: j, p: s, kept, slope }
        };
        let mut weights: Vec<Weight> = (0..shape.keys).filter(|&j| (self.visible)(b, i, j)).map(weight).collect();
        let sink = score.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
        let max = weights.iter().map(|w| w.p).fold(sink, f64::max);
        // The maximum ignores NaN, but NaN must still reach the output.
        if max == f64::NEG_INFINITY && !weights.iter().any(|w| w.p.is_nan()) {
            return (Vec::new(), max);
        }
        weights.iter_mut().for_each(|w| w.p = (w.p - max).exp());
        let sum = weights.iter().map(|w| w.p).sum::<f64>() + (sink - max).exp();
        weights.iter_mut().for_each(|w| w.p /= sum);
        (weights, max + sum.ln())
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::super::{Buckets, Dropout};
    use super::*;

    const SHAPE: Shape = Shape { batch: 1, queries: 2, keys: 3, heads: 2, kv_heads: 1, dim: 2, v_dim: 1 };

    fn problem<'a>(
        [q, k, v]: [&'a [f32]; 3],
        score: &'a Score,
        visible: &'a dyn Fn(usize, usize, usize) -> bool,
    ) -> Problem<'a> {
        Problem { shape: SHAPE, q, k, v, score, bias: None, visible, distance: &|_, i, j| i as i64 - j as i64 }
    }

    #[test]
    fn equal_scores_average_the_visible_values() {
        let (score, see) = (Score::new(0.5), |_, i, j| j <= i);
        let (out, lse) = problem([&[0.0; 8], &[1.0; 6], &[3.0, 6.0, 12.0]], &score, &see).attention();
        assert_eq!(out, [3.0, 3.0, 4.5, 4.5]);
        assert_eq!(lse[..1], [0.0]);
        assert!((lse[1] - 2f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn a_query_that_sees_nothing_has_zero_output_and_gradients() {
        let q: Vec<f32> = (0..8).map(|x| x as f32).collect();
        let (score, see) = (Score::new(0.5), |_, i, _| i == 1);
        let problem = problem([&q, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[1.0, 2.0, 4.0]], &score, &see);
        let (out, lse) = problem.attention();
        assert_eq!((out[0], lse[0]), (0.0, f64::NEG_INFINITY));
        let gradients = problem.backward(&[1.0; 4]);
        assert_eq!(gradients.dq[..4], [0.0; 4]);
        assert!(gradients.dk.iter().any(|x| *x != 0.0));
    }

    #[test]
    fn gradients_are_the_slopes_of_the_output() {
        let values = |n: usize, seed: f32| (0..n).map(|x| ((x as f32 + seed) * 1.7).sin()).collect::<Vec<f32>>();
        let (q, k, v, d) = (values(8, 0.1), values(6, 0.4), values(3, 0.9), values(4, 0.5));
        let (sinks, table, bias) = (values(2, 0.2), values(8, 0.7), values(12, 0.3));
        // One input at a time is changed, and the score is rebuilt from its inputs.
        let inputs = [q, k, v, sinks, table, bias];
        let see = |_: usize, i: usize, j: usize| j <= i + 1;
        let with = |inputs: &[Vec<f32>; 6], work: &dyn Fn(Problem)| {
            let [q, k, v, sinks, table, bias] = inputs;
            let buckets = Buckets { table: table.clone(), count: 4, max_distance: 5, bidirectional: true };
            let score = Score {
                softcap: Some(0.8),
                relative: Some(RelativeBias::Buckets(buckets)),
                sinks: Some(sinks.clone()),
                dropout: Some(Dropout { rate: 0.3, seed: 3, first_head: 0, first_query: 0 }),
                ..Score::new(0.7)
            };
            work(Problem { bias: Some(bias), ..problem([q, k, v], &score, &see) });
        };
        let loss = |inputs: &[Vec<f32>; 6]| -> f64 {
            let sum = std::cell::Cell::new(0.0);
            with(inputs, &|problem| {
                sum.set(problem.attention().0.iter().zip(&d).map(|(o, d)| o * f64::from(*d)).sum());
            });
            sum.get()
        };
        let gradients = std::cell::RefCell::new(None);
        with(&inputs, &|problem| *gradients.borrow_mut() = Some(problem.backward(&d)));
        let Gradients { dq, dk, dv, d_sinks, d_table, d_bias } = gradients.into_inner().expect("computed");
        let step = 1.0 / 1024.0; // The step is a power of two, so it is exact.
        for (which, gradient) in [dq, dk, dv, d_sinks, d_table, d_bias].iter().enumerate() {
            assert_eq!(gradient.len(), inputs[which].len());
            for (c, gradient) in gradient.iter().enumerate() {
                let moved = |by: f32| {
                    let mut inputs = inputs.clone();
                    inputs[which][c] += by;
                    (loss(&inputs), f64::from(inputs[which][c]))
                };
                let ((up, x1), (down, x0)) = (moved(step), moved(-step));
                let slope = (up - down) / (x1 - x0);
                assert!((slope - gradient).abs() < 1e-5, "input {which} element {c}: {slope} and {gradient}");
            }
        }
    }
}
