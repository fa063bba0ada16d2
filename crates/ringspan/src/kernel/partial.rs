//! The running state of a softmax over key blocks that arrive one after another.

use super::View;

/// The state of an online softmax over the key blocks seen so far (Milakov and Gimelshein, 2018, arXiv:1805.02867),
/// all in f32.
#[derive(Debug, Clone, PartialEq)]
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

    /// Output `[Tq, H, Dv]` and natural log-sum-exp `[H, Tq]`; a query that saw nothing has 0 and -inf.
    pub fn finish(mut self, tokens: usize, heads: usize, v_dim: usize) -> (Vec<f32>, Vec<f32>) {
        let mut lse = self.max;
        if v_dim > 0 {
            for (row, out) in self.out.chunks_exact_mut(v_dim).enumerate() {
                let (token, head) = (row / heads, row % heads);
                let sum = self.sum[head * tokens + token];
                if sum > 0.0 {
                    let factor = 1.0 / sum;
                    out.iter_mut().for_each(|x| *x *= factor);
                }
            }
        }
        for (lse, sum) in lse.iter_mut().zip(&self.sum) {
            *lse = (f64::from(*lse) * std::f64::consts::LN_2 + f64::from(*sum).ln()) as f32;
        }
        (self.out, lse)
    }
}

/// Row sums of `out * d_out`, `[H, Tq]`, from out `[Tq, H, Dv]` contiguous: what the backward pass subtracts.
///
/// # Panics
/// If `out` has fewer elements than `d_out`.
pub fn delta(out: &[f32], d_out: View) -> Vec<f32> {
    let View { tokens, heads, dim, .. } = d_out;
    let mut delta = vec![0.0; heads * tokens];
    for token in 0..tokens {
        for head in 0..heads {
            let out = &out[(token * heads + head) * dim..][..dim];
            // Eight sums side by side: a vector's worth, in an order that does not depend on the machine.
            let mut sums = [0.0f32; 8];
            let (a, b) = (out.chunks_exact(8), d_out.row(token, head).chunks_exact(8));
            let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
            for (a, b) in a.zip(b) {
                for lane in 0..8 {
                    sums[lane] += a[lane] * b[lane];
                }
            }
            delta[head * tokens + token] = sums.iter().sum::<f32>() + rest;
        }
    }
    delta
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finishing_divides_and_leaves_empty_rows_at_zero() {
        let mut partial = Partial::new(2, 2, 3);
        // Token 1, head 0: two keys of weight 1 at score log2(e) * ln(4) = 2.
        (partial.max[1], partial.sum[1]) = (2.0, 2.0);
        partial.out[6..9].copy_from_slice(&[2.0, 4.0, 6.0]);
        let (out, lse) = partial.finish(2, 2, 3);
        assert_eq!(out, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0]);
        assert!((lse[1] - 8f32.ln()).abs() < 1e-6);
        assert_eq!([lse[0], lse[2], lse[3]], [f32::NEG_INFINITY; 3]);
    }

    #[test]
    fn delta_is_by_head_then_token() {
        let out: Vec<f32> = (0..2 * 2 * 11).map(|x| x as f32).collect();
        let ones = vec![1.0; out.len()];
        let d_out = View::new(&ones, 2, 2, 11).expect("its size");
        let sum = |row: usize| (row * 11..row * 11 + 11).sum::<usize>() as f32;
        assert_eq!(delta(&out, d_out), [sum(0), sum(2), sum(1), sum(3)]);
    }
}
