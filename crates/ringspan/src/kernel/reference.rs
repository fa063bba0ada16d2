//! The oracle: attention and its gradients by plain loops in f64, with visibility as a predicate.
//!
//! Nothing here knows bands, tiles, layouts or ranks, so an error in those cannot hide in it. Source: Dao et al., 2022
//! (arXiv:2205.14135), section 2.1 and appendix B.2, without any blocking.

/// Sizes of a problem: q `[B, Sq, H, D]`, k `[B, Sk, G, D]`, v `[B, Sk, G, Dv]`, all contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows B.
    pub batch: usize,
    /// Queries of a row Sq.
    pub queries: usize,
    /// Keys of a row Sk.
    pub keys: usize,
    /// Query heads H, a multiple of G.
    pub heads: usize,
    /// Key-value heads G.
    pub kv_heads: usize,
    /// Width of a query and a key D.
    pub dim: usize,
    /// Width of a value Dv.
    pub v_dim: usize,
}

impl Shape {
    /// The query rows as `(row, b, i, h, g)`, row being the index in `[B, Sq, H]`.
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

/// Output `[B, Sq, H, Dv]` and natural log-sum-exp `[B, H, Sq]`; a query that sees nothing has 0 and -inf.
///
/// `visible(b, i, j)` tells whether query `i` of row `b` sees key `j` of it.
pub fn attention(
    shape: Shape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    scale: f64,
    visible: &dyn Fn(usize, usize, usize) -> bool,
) -> (Vec<f64>, Vec<f64>) {
    let mut out = vec![0.0; shape.batch * shape.queries * shape.heads * shape.v_dim];
    let mut lse = vec![f64::NEG_INFINITY; shape.batch * shape.heads * shape.queries];
    for (row, b, i, h, g) in shape.rows() {
        let (weights, total) = softmax(shape, q, k, scale, visible, (row, b, i, g));
        lse[(b * shape.heads + h) * shape.queries + i] = total;
        let out = &mut out[row * shape.v_dim..][..shape.v_dim];
        for (j, p) in weights {
            let values = &v[shape.key(b, j, g) * shape.v_dim..][..shape.v_dim];
            for (sum, value) in out.iter_mut().zip(values) {
                *sum += p * f64::from(*value);
            }
        }
    }
    (out, lse)
}

/// Gradients `(dq, dk, dv)` for the gradient `d_out` `[B, Sq, H, Dv]` of the output, in the shapes of q, k and v.
#[allow(clippy::too_many_arguments)] // The arguments of the forward pass and one gradient.
pub fn backward(
    shape: Shape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    scale: f64,
    visible: &dyn Fn(usize, usize, usize) -> bool,
    d_out: &[f32],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (dim, v_dim) = (shape.dim, shape.v_dim);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for (row, b, i, _, g) in shape.rows() {
        let (weights, _) = softmax(shape, q, k, scale, visible, (row, b, i, g));
        let d_out = &d_out[row * v_dim..][..v_dim];
        let dp: Vec<f64> =
            weights.iter().map(|&(j, _)| dot(d_out, &v[shape.key(b, j, g) * v_dim..][..v_dim])).collect();
        let mean: f64 = weights.iter().zip(&dp).map(|(&(_, p), dp)| p * dp).sum();
        for (&(j, p), dp) in weights.iter().zip(&dp) {
            let key = shape.key(b, j, g);
            let ds = p * (dp - mean) * scale;
            for c in 0..v_dim {
                dv[key * v_dim + c] += p * f64::from(d_out[c]);
            }
            for c in 0..dim {
                dq[row * dim + c] += ds * f64::from(k[key * dim + c]);
                dk[key * dim + c] += ds * f64::from(q[row * dim + c]);
            }
        }
    }
    (dq, dk, dv)
}

/// The visible keys of one query with their probabilities, and the log-sum-exp of their scores.
fn softmax(
    shape: Shape,
    q: &[f32],
    k: &[f32],
    scale: f64,
    visible: &dyn Fn(usize, usize, usize) -> bool,
    (row, b, i, g): (usize, usize, usize, usize),
) -> (Vec<(usize, f64)>, f64) {
    let q = &q[row * shape.dim..][..shape.dim];
    let score = |j| scale * dot(q, &k[shape.key(b, j, g) * shape.dim..][..shape.dim]);
    let mut weights: Vec<(usize, f64)> = (0..shape.keys).filter(|&j| visible(b, i, j)).map(|j| (j, score(j))).collect();
    let max = weights.iter().map(|w| w.1).fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return (Vec::new(), max);
    }
    weights.iter_mut().for_each(|w| w.1 = (w.1 - max).exp());
    let sum: f64 = weights.iter().map(|w| w.1).sum();
    weights.iter_mut().for_each(|w| w.1 /= sum);
    (weights, max + sum.ln())
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 1, queries: 2, keys: 3, heads: 2, kv_heads: 1, dim: 2, v_dim: 1 };

    #[test]
    fn equal_scores_average_the_visible_values() {
        let (out, lse) = attention(SHAPE, &[0.0; 8], &[1.0; 6], &[3.0, 6.0, 12.0], 0.5, &|_, i, j| j <= i);
        assert_eq!(out, [3.0, 3.0, 4.5, 4.5]);
        assert_eq!(lse[..1], [0.0]);
        assert!((lse[1] - 2f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn a_query_that_sees_nothing_has_zero_output_and_gradients() {
        let q: Vec<f32> = (0..8).map(|x| x as f32).collect();
        let (k, v, d) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 4.0], [1.0; 4]);
        let see = |_, i, _| i == 1;
        let (out, lse) = attention(SHAPE, &q, &k, &v, 0.5, &see);
        assert_eq!((out[0], lse[0]), (0.0, f64::NEG_INFINITY));
        let (dq, dk, _) = backward(SHAPE, &q, &k, &v, 0.5, &see, &d);
        assert_eq!(dq[..4], [0.0; 4]);
        assert!(dk.iter().any(|x| *x != 0.0));
    }

    #[test]
    fn gradients_are_the_slopes_of_the_output() {
        let values = |n: usize, seed: f32| (0..n).map(|x| ((x as f32 + seed) * 1.7).sin()).collect::<Vec<f32>>();
        let (q, k, v, d) = (values(8, 0.1), values(6, 0.4), values(3, 0.9), values(4, 0.5));
        let see = |_, i, j| j <= i + 1;
        let loss = |q: &[f32], k: &[f32], v: &[f32]| -> f64 {
            let out = attention(SHAPE, q, k, v, 0.7, &see).0;
            out.iter().zip(&d).map(|(o, d)| o * f64::from(*d)).sum()
        };
        let (dq, dk, dv) = backward(SHAPE, &q, &k, &v, 0.7, &see, &d);
        let step = 1.0 / 1024.0; // A power of two, so that the step itself is exact.
        for (which, gradient) in [(0, &dq), (1, &dk), (2, &dv)] {
            for (c, gradient) in gradient.iter().enumerate() {
                let moved = |by: f32| {
                    let mut inputs = [q.clone(), k.clone(), v.clone()];
                    inputs[which][c] += by;
                    (loss(&inputs[0], &inputs[1], &inputs[2]), f64::from(inputs[which][c]))
                };
                let ((up, x1), (down, x0)) = (moved(step), moved(-step));
                assert!(((up - down) / (x1 - x0) - gradient).abs() < 1e-5, "input {which} element {c}");
            }
        }
    }
}
