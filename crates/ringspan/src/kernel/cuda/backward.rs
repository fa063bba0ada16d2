//! The backward pass of a call.

use super::super::{Inputs, Saved, Sums, Tile};
use super::job::{Job, View};
use super::module::Options;
use super::tables::{Rows, Tables, Terms};
use super::{Cuda, count};
use crate::error::Result;

impl Cuda {
    /// Adds the gradients of `tiles` to `sums`.
    pub(in crate::kernel) fn backward(
        &self,
        inputs: &Inputs,
        tiles: &[Tile],
        saved: &Saved,
        sums: &mut Sums,
    ) -> Result<()> {
        let Inputs { q, k, v, .. } = inputs;
        let options = Options::backward(inputs, &saved.d_out, self.gpu.0.shared_memory);
        let Some(queries) = Tables::new(self, inputs, tiles, Rows::Queries, options.rows)? else { return Ok(()) };
        let Some(keys) = Tables::new(self, inputs, tiles, Rows::Keys, options.rows)? else { return Ok(()) };
        let terms = Terms::new(self, inputs.score)?;
        let [q_data, k_data, v_data, d_out] = self.upload_each([q, k, v, &saved.d_out])?;
        let bias = inputs.bias.as_ref().map(|bias| self.upload(bias)).transpose()?;
        let (lse, delta) = (self.upload_all(saved.lse)?, self.upload_all(saved.delta)?);
        let (dq, dk, dv) = (self.upload_all(sums.dq)?, self.upload_all(sums.dk)?, self.upload_all(sums.dv)?);
        let d_bias = self.upload_all(sums.d_bias)?;
        let d_table = self.zeros::<f64>(queries.blocks * sums.d_table.len())?;
        let d_table_sum = self.zeros::<f64>(sums.d_table.len())?;
        let job = Job {
            q: View::new(q, self.at(&q_data)),
            k: View::new(k, self.at(&k_data)),
            v: View::new(v, self.at(&v_data)),
            bias: match (&inputs.bias, &bias) {
                (Some(view), Some(data)) => View::new(view, self.at(data)),
                _ => View::default(),
            },
            d_out: View::new(&saved.d_out, self.at(&d_out)),
            lse: self.at(&lse),
            delta: self.at(&delta),
            dq: self.at(&dq),
            dk: self.at(&dk),
            dv: self.at(&dv),
            d_bias: self.at(&d_bias),
            d_table: self.at(&d_table),
            d_table_sum: self.at(&d_table_sum),
            blocks: count(queries.blocks, "blocks of queries")?,
            ..terms.job(self, inputs)?
        };
        // Heads that share a bias add to the same rows of its gradient: one after the other.
        let heads = if inputs.bias.is_some_and(|bias| bias.heads < q.heads) { 1 } else { q.heads };
        let grid = (count(queries.blocks, "blocks of queries")?, count(heads, "heads")?);
        self.launch(&options, "backward_queries", &queries.over(self, job), grid)?;
        let grid = (count(keys.blocks, "blocks of keys")?, count(k.heads, "key-value heads")?);
        self.launch(&options, "backward_keys", &keys.over(self, job), grid)?;
        if !sums.d_table.is_empty() {
            let blocks = count(sums.d_table.len().div_ceil(options.threads), "buckets")?;
            self.launch(&options, "sum_buckets", &job, (blocks, 1))?;
            let mut d_table = vec![0.0; sums.d_table.len()];
            self.download(&d_table_sum, &mut d_table)?;
            sums.d_table.iter_mut().zip(d_table).for_each(|(sum, x)| *sum += x as f32);
        }
        self.download(&dq, sums.dq)?;
        self.download(&dk, sums.dk)?;
        self.download(&dv, sums.dv)?;
        self.download(&d_bias, sums.d_bias)
    }
}
