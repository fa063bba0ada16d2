//! The projections of hidden states to queries, keys and values.

use super::ForwardPass;
use super::projection::Projection;
use crate::parameters::Scope;
use crate::shard::{HeadCounts, ShardSpec, Split, Stack};
use crate::tape;
use candle_core::{Result, Tensor};

/// `q_proj`, `k_proj` and `v_proj`, or all three in one matrix; with tensor parallelism, each rank has whole heads.
#[derive(Debug, Clone)]
pub struct QkvLinear {
    projections: Projections,
    heads: HeadCounts,
    head_dim: usize,
}

#[derive(Debug, Clone)]
enum Projections {
    Separate(Box<[Projection; 3]>),
    Stacked(Projection),
}

impl QkvLinear {
    /// Adds the three weights `[heads * head_dim, hidden]` and, if asked for, their biases, in `scope`.
    #[must_use]
    pub fn new(scope: &Scope, hidden: usize, heads: HeadCounts, head_dim: usize, bias: bool) -> Self {
        let projection = |name: &str, count: usize, split: Split| {
            Projection::new(&scope.at(name), [count * head_dim, hidden], bias, ShardSpec::Rows(split))
        };
        let key_value = |name: &str| projection(name, heads.key_values, Split::KeyValueHeads(heads, head_dim));
        let q = projection("q_proj", heads.queries, Split::QueryHeads(heads, head_dim));
        let projections = Projections::Separate(Box::new([q, key_value("k_proj"), key_value("v_proj")]));
        Self { projections, heads, head_dim }
    }

    /// Adds one weight `[(H + 2 G) * head_dim, hidden]` and, if asked for, its bias, in `scope`: the rows of queries, then
    /// those of keys, then those of values.
    #[must_use]
    pub fn stacked(scope: &Scope, hidden: usize, heads: HeadCounts, head_dim: usize, bias: bool) -> Self {
        let key_values = (heads.key_values * head_dim, Split::KeyValueHeads(heads, head_dim));
        let queries = (heads.queries * head_dim, Split::QueryHeads(heads, head_dim));
        let stack = Stack::new([queries, key_values, key_values]);
        let projection = Projection::new(scope, [stack.rows(), hidden], bias, ShardSpec::Stacked(stack));
        Self { projections: Projections::Stacked(projection), heads, head_dim }
    }

    /// Returns queries `[T, H, D]`, keys and values `[T, G, D]` of x `[rows, C]`, for this rank's heads.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<[Tensor; 3]> {
        let x = pass.gather(x)?;
        let heads = |flat: Tensor| {
            let (tokens, width) = flat.dims2()?;
            tape::reshape(&flat, (tokens, width / self.head_dim, self.head_dim))
        };
        match &self.projections {
            Projections::Separate(projections) => {
                let [q, k, v] = Projection::forward_all(projections.each_ref(), &x, pass)?;
                Ok([heads(q)?, heads(k)?, heads(v)?])
            }
            Projections::Stacked(projection) => {
                let rank = pass.attend().tensor_parallel().rank_and_size();
                let of_rank = self.heads.of_rank(rank).map_err(candle_core::Error::wrap)?;
                let (q, kv) = (of_rank.queries.len(), of_rank.key_values.len());
                let all = heads(projection.forward(&x, pass)?)?;
                Ok([all.narrow(1, 0, q)?, all.narrow(1, q, kv)?, all.narrow(1, q + kv, kv)?])
            }
        }
    }
}
