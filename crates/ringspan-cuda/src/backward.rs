//! Starts the backward pass of a call.

use crate::cuda::{Cuda, count};
use crate::kernel_params::AttentionParams;
use crate::options::Options;
use crate::tables::{BlockSide, ScoreTerms, Tables};
use ringspan::Result;
use ringspan::kernel::{FloatsMut, Inputs, Saved, Sums, Tile};

impl Cuda {
    /// Adds the gradients of `tiles` to `sums`.
    pub(crate) fn backward(&self, inputs: &Inputs, tiles: &[Tile], saved: &Saved, sums: &mut Sums) -> Result<()> {
        let Inputs { q, k, v, .. } = inputs;
        let d_out = &saved.d_out;
        let [q_view, k_view, v_view, d_out_view] = [self.view(q)?, self.view(k)?, self.view(v)?, self.view(d_out)?];
        let tensor = self.tensor_cores(&[(q, &q_view), (k, &k_view), (v, &v_view), (d_out, &d_out_view)]);
        let options = Options::backward(inputs, d_out, tensor, self.gpu.0.shared_memory);
        let Some(queries) = Tables::new(self, inputs, tiles, BlockSide::Queries, options.rows)? else { return Ok(()) };
        let Some(keys) = Tables::new(self, inputs, tiles, BlockSide::Keys, options.rows)? else { return Ok(()) };
        let terms = ScoreTerms::new(self, inputs.score)?;
        let d_table = self.zeros::<f64>(queries.blocks * sums.d_table.len())?;
        let params = AttentionParams {
            q: q_view,
            k: k_view,
            v: v_view,
            bias: self.view_of(inputs.bias.as_ref())?,
            d_out: d_out_view,
            max: self.read_any(saved.statistics.max)?,
            sum: self.read_any(saved.statistics.sum)?,
            delta: self.read_any(saved.delta)?,
            dq: self.sum(&mut sums.dq)?,
            dk: self.sum(&mut sums.dk)?,
            dv: self.sum(&mut sums.dv)?,
            d_bias: self.sum(&mut sums.d_bias)?,
            d_table: self.at(&d_table),
            d_table_sum: self.sum(&mut sums.d_table)?,
            blocks: count(queries.blocks, "blocks of queries")?,
            ..terms.params(self, inputs)?
        };
        // Heads that share a bias add to the same rows of its gradient, so they are computed one after the other.
        let heads = if inputs.bias.is_some_and(|bias| bias.heads < q.heads) { 1 } else { q.heads };
        let grid = (count(queries.blocks, "blocks of queries")?, count(heads, "heads")?);
        self.launch(&options, "backward_queries", &queries.over(self, params), grid)?;
        let grid = (count(keys.blocks, "blocks of keys")?, count(k.heads, "key-value heads")?);
        self.launch(&options, "backward_keys", &keys.over(self, params), grid)?;
        if !sums.d_table.is_empty() {
            let blocks = count(sums.d_table.len().div_ceil(options.threads), "buckets")?;
            self.launch(&options, "sum_buckets", &params, (blocks, 1))?;
        }
        Ok(())
    }

    /// The address of a gradient sum; 0 if it is empty because it is not wanted.
    fn sum(&self, sum: &mut FloatsMut) -> Result<u64> {
        match sum {
            _ if sum.is_empty() => Ok(0),
            FloatsMut::Device(sum) => self.write(sum),
            FloatsMut::Host(sum) => Err(self.wrong(format!("{} sums are in the memory of the CPU", sum.len()))),
        }
    }
}
