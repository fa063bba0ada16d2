//! The sizes of a running softmax state.

/// The sizes of a softmax state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateShape {
    /// Number of queries, Tq.
    pub tokens: usize,
    /// Number of query heads, H.
    pub heads: usize,
    /// Width of values, Dv.
    pub v_dim: usize,
}

impl StateShape {
    /// Number of elements of a state: output, maximum and sum.
    pub fn len(self) -> usize {
        self.rows() * (self.v_dim + 2)
    }

    /// Whether there are no queries or heads.
    pub fn is_empty(self) -> bool {
        self.rows() == 0
    }

    /// Number of rows: each head of each query.
    pub fn rows(self) -> usize {
        self.tokens * self.heads
    }
}
