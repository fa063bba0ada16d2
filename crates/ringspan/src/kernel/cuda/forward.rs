//! The forward pass of a call.

use super::super::{Inputs, Partial, Tile};
use super::job::{Job, View};
use super::module::Options;
use super::tables::{Rows, Tables, Terms};
use super::{Cuda, count};
use crate::error::Result;

impl Cuda {
    /// Adds the keys of `tiles` to the softmax state of the queries.
    pub(in crate::kernel) fn forward(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut Partial) -> Result<()> {
        let Inputs { q, k, v, .. } = inputs;
        let options = Options::forward(inputs, self.gpu.0.shared_memory);
        let Some(tables) = Tables::new(self, inputs, tiles, Rows::Queries, options.rows)? else { return Ok(()) };
        let terms = Terms::new(self, inputs.score)?;
        let [q_data, k_data, v_data] = self.upload_each([q, k, v])?;
        let bias = inputs.bias.as_ref().map(|bias| self.upload(bias)).transpose()?;
        let state = [&partial.out, &partial.max, &partial.sum].map(|state| self.upload_all(state));
        let [out, max, sum] = state;
        let (out, max, sum) = (out?, max?, sum?);
        let job = Job {
            q: View::new(q, self.at(&q_data)),
            k: View::new(k, self.at(&k_data)),
            v: View::new(v, self.at(&v_data)),
            bias: match (&inputs.bias, &bias) {
                (Some(view), Some(data)) => View::new(view, self.at(data)),
                _ => View::default(),
            },
            out: self.at(&out),
            max: self.at(&max),
            sum: self.at(&sum),
            ..terms.job(self, inputs)?
        };
        let grid = (count(tables.blocks, "blocks of queries")?, count(q.heads, "heads")?);
        self.launch(&options, "forward", &tables.over(self, job), grid)?;
        self.download(&out, &mut partial.out)?;
        self.download(&max, &mut partial.max)?;
        self.download(&sum, &mut partial.sum)
    }
}
