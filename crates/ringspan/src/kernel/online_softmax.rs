//! The running state of a softmax over a sequence of key blocks.

use super::Statistics;

/// The state of an online softmax over the key blocks seen so far (Milakov and Gimelshein, 2018, arXiv:1805.02867), in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct OnlineSoftmax {
    /// Sum of weighted values so far, not yet divided by `sum`: `[Tq, H, Dv]`.
    pub out: Vec<f32>,
    /// Largest score so far, or -inf: `[H, Tq]`.
    pub max: Vec<f32>,
    /// Sum of `exp(score - max)` so far: `[H, Tq]`.
    pub sum: Vec<f32>,
}

impl OnlineSoftmax {
    /// A state that has seen no keys yet.
    pub fn new(tokens: usize, heads: usize, v_dim: usize) -> Self {
        Self {
            out: vec![0.0; tokens * heads * v_dim],
            max: vec![f32::NEG_INFINITY; heads * tokens],
            sum: vec![0.0; heads * tokens],
        }
    }

    /// Like [`new`](Self::new), but with capacity for the message of [`into_message`](Self::into_message).
    pub(crate) fn to_send(tokens: usize, heads: usize, v_dim: usize) -> Self {
        let mut out = vec![0.0; tokens * heads * (v_dim + 2)];
        out.truncate(tokens * heads * v_dim);
        Self { out, ..Self::new(tokens, heads, 0) }
    }

    /// The state as a message: output, maximum, sum.
    pub fn into_message(self) -> Vec<f32> {
        let mut message = self.out;
        message.extend(self.max);
        message.extend(self.sum);
        message
    }

    /// Merges the state of the same queries over other keys, as a message of [`into_message`](Self::into_message).
    ///
    /// # Panics
    /// If the message has another size.
    pub fn merge(&mut self, tokens: usize, heads: usize, v_dim: usize, message: &[f32]) {
        let rows = tokens * heads;
        assert_eq!(message.len(), rows * (v_dim + 2), "the size of a softmax state");
        let (out, statistics) = message.split_at(rows * v_dim);
        let (max, sum) = statistics.split_at(rows);
        for head in 0..heads {
            for token in 0..tokens {
                let at = head * tokens + token;
                let greatest = self.max[at].max(max[at]);
                // Subtracting a finite number avoids the NaN of -inf - (-inf).
                let finite = greatest.max(f32::MIN);
                let (old, new) = ((self.max[at] - finite).exp(), (max[at] - finite).exp());
                self.max[at] = greatest;
                self.sum[at] = self.sum[at] * old + sum[at] * new;
                let row = (token * heads + head) * v_dim..(token * heads + head + 1) * v_dim;
                for (sum, x) in self.out[row.clone()].iter_mut().zip(&out[row]) {
                    *sum = *sum * old + x * new;
                }
            }
        }
    }

    /// Output `[Tq, H, Dv]` and softmax statistics for the backward pass; the output of a query that sees nothing is 0.
    ///
    /// `sinks` `[H]` are an extra logit of each head; with sinks, the log-sum-exp of a query that sees nothing is its sink.
    pub fn finish(
        mut self,
        tokens: usize,
        heads: usize,
        v_dim: usize,
        sinks: Option<&[f32]>,
    ) -> (Vec<f32>, Statistics) {
        for (head, sink) in sinks.into_iter().flatten().enumerate() {
            self.add_sink(head * tokens..(head + 1) * tokens, heads, v_dim, *sink);
        }
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
        (self.out, Statistics { max: self.max, sum: self.sum })
    }

    /// Adds a score without a value to all queries of one head.
    fn add_sink(&mut self, rows: std::ops::Range<usize>, heads: usize, v_dim: usize, score: f32) {
        let head = rows.start / rows.len().max(1);
        for (token, at) in rows.enumerate() {
            let max = self.max[at].max(score);
            // Subtracting a finite number avoids the NaN of -inf - (-inf).
            let finite = max.max(f32::MIN);
            let old = (self.max[at] - finite).exp();
            self.sum[at] = self.sum[at] * old + (score - finite).exp();
            self.max[at] = max;
            self.out[(token * heads + head) * v_dim..][..v_dim].iter_mut().for_each(|x| *x *= old);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finishing_divides_and_leaves_empty_rows_at_zero() {
        let mut partial = OnlineSoftmax::new(2, 2, 3);
        // Token 1 of head 0 has seen two keys of weight 1 at score ln(4).
        (partial.max[1], partial.sum[1]) = (4f32.ln(), 2.0);
        partial.out[6..9].copy_from_slice(&[2.0, 4.0, 6.0]);
        let (out, statistics) = partial.finish(2, 2, 3, None);
        assert_eq!(out, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0]);
        let lse = statistics.lse();
        assert!((lse[1] - 8f32.ln()).abs() < 1e-6);
        assert_eq!([lse[0], lse[2], lse[3]], [f32::NEG_INFINITY; 3]);
    }

    #[test]
    fn merged_states_are_the_state_of_all_keys() {
        // The first query saw one key on each side, the second query one key on one side only.
        let state = |max: [f32; 2], out: [f32; 2]| {
            let seen = max.map(|max| f32::from(u8::from(max > f32::NEG_INFINITY)));
            OnlineSoftmax { out: out.to_vec(), max: max.to_vec(), sum: seen.to_vec() }
        };
        let mut partial = state([1.0, f32::NEG_INFINITY], [3.0, 0.0]);
        partial.merge(2, 1, 1, &state([1.0 + 2f32.ln(), 5.0], [6.0, 7.0]).into_message());
        assert_eq!(partial.max, [1.0 + 2f32.ln(), 5.0]);
        for (got, wanted) in partial.sum.iter().chain(&partial.out).zip([1.5, 1.0, 7.5, 7.0]) {
            assert!((got - wanted).abs() < 1e-6, "{got} for {wanted}");
        }
        let before = partial.clone();
        partial.merge(2, 1, 1, &OnlineSoftmax::new(2, 1, 1).into_message());
        assert_eq!(partial, before);
    }

    #[test]
    fn a_sink_takes_its_share_of_the_weight() {
        let mut partial = OnlineSoftmax::new(2, 2, 1);
        // Token 0 of head 1 has seen one key of value 8 at score ln(3); the sink at 0 takes a quarter of the weight.
        (partial.max[2], partial.sum[2], partial.out[1]) = (3f32.ln(), 1.0, 8.0);
        let (out, statistics) = partial.finish(2, 2, 1, Some(&[1.0, 0.0]));
        let lse = statistics.lse();
        for (got, wanted) in out.iter().zip([0.0, 6.0, 0.0, 0.0]).chain(lse.iter().zip([1.0, 1.0, 4f32.ln(), 0.0])) {
            assert!((got - wanted).abs() < 1e-6, "{got} for {wanted}");
        }
    }
}
