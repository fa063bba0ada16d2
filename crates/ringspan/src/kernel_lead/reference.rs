//! The oracle: attention by its definition, in f64, without runs, bands, blocks or tricks.

/// Sizes of a problem: q `[batch, queries, heads, dim]`, k `[batch, keys, kv_heads, dim]`, v `[.., v_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Batch rows B.
    pub batch: usize,
    /// Queries a row.
    pub queries: usize,
    /// Keys a row.
    pub keys: usize,
    /// Query heads H.
    pub heads: usize,
    /// Key-value heads G; H must be a multiple.
    pub kv_heads: usize,
    /// Width D of queries and keys.
    pub dim: usize,
    /// Width Dv of values.
    pub v_dim: usize,
}

/// Whether query i of row b sees key j: `visible(b, i, j)`.
pub type Visible<'a> = &'a dyn Fn(usize, usize, usize) -> bool;

impl Shape {
    fn q(self, b: usize, i: usize, h: usize) -> usize {
        (b * self.queries + i) * self.heads + h
    }

    fn k(self, b: usize, j: usize, h: usize) -> usize {
        (b * self.keys + j) * self.kv_heads + h / (self.heads / self.kv_heads)
    }

    /// Every row, query and head.
    fn rows(self) -> impl Iterator<Item = (usize, usize, usize)> {
        let row = move |b| (0..self.queries).flat_map(move |i| (0..self.heads).map(move |h| (b, i, h)));
        (0..self.batch).flat_map(row)
    }
}

/// Output `[B, Sq, H, Dv]` and natural log-sum-exp `[B, H, Sq]`. A query that sees nothing gets 0 and -inf.
pub fn attention(shape: Shape, q: &[f32], k: &[f32], v: &[f32], scale: f64, visible: Visible) -> (Vec<f64>, Vec<f64>) {
    let mut out = vec![0.0; shape.batch * shape.queries * shape.heads * shape.v_dim];
    let mut lse = vec![0.0; shape.batch * shape.heads * shape.queries];
    for (b, i, h) in shape.rows() {
        let (weights, log_sum) = softmax(shape, q, k, scale, visible, (b, i, h));
        lse[(b * shape.heads + h) * shape.queries + i] = log_sum;
        let out = &mut out[shape.q(b, i, h) * shape.v_dim..][..shape.v_dim];
        for (j, weight) in weights {
            for (out, x) in out.iter_mut().zip(row(v, shape.k(b, j, h), shape.v_dim)) {
                *out += weight * x;
            }
        }
    }
    (out, lse)
}

/// Gradients of q, k and v for the gradient `d_out` of the output.
pub fn backward(
    shape: Shape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    scale: f64,
    visible: Visible,
    d_out: &[f32],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let Shape { dim, v_dim, .. } = shape;
    for (b, i, h) in shape.rows() {
        let (weights, _) = softmax(shape, q, k, scale, visible, (b, i, h));
        let at = shape.q(b, i, h);
        let d_weight = |j| dot(row(d_out, at, v_dim), row(v, shape.k(b, j, h), v_dim));
        let mean: f64 = weights.iter().map(|&(j, weight)| weight * d_weight(j)).sum();
        for &(j, weight) in &weights {
            let key = shape.k(b, j, h);
            let d_score = weight * (d_weight(j) - mean) * scale;
            add(&mut dv[key * v_dim..], row(d_out, at, v_dim), weight);
            add(&mut dk[key * dim..], row(q, at, dim), d_score);
            add(&mut dq[at * dim..], row(k, key, dim), d_score);
        }
    }
    (dq, dk, dv)
}

/// The visible keys of a query with their weights, and the log of the sum of exponentials.
fn softmax(
    shape: Shape,
    q: &[f32],
    k: &[f32],
    scale: f64,
    visible: Visible,
    (b, i, h): (usize, usize, usize),
) -> (Vec<(usize, f64)>, f64) {
    let query = shape.q(b, i, h);
    let score = |j| scale * dot(row(q, query, shape.dim), row(k, shape.k(b, j, h), shape.dim));
    let mut scores: Vec<(usize, f64)> =
        (0..shape.keys).filter(|&j| visible(b, i, j)).map(|j| (j, score(j))).collect();
    let max = scores.iter().fold(f64::NEG_INFINITY, |max, &(_, s)| max.max(s));
    if scores.is_empty() {
        return (scores, max);
    }
    let sum: f64 = scores.iter().map(|&(_, s)| (s - max).exp()).sum();
    scores.iter_mut().for_each(|(_, s)| *s = (*s - max).exp() / sum);
    (scores, max + sum.ln())
}

fn row(data: &[f32], index: usize, width: usize) -> impl Iterator<Item = f64> {
    data[index * width..][..width].iter().map(|&x| f64::from(x))
}

fn dot(a: impl Iterator<Item = f64>, b: impl Iterator<Item = f64>) -> f64 {
    a.zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], x: impl Iterator<Item = f64>, factor: f64) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}
