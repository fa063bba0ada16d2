//! Starts the forward pass of a call.

use crate::cuda::{Cuda, count};
use crate::kernel_params::AttentionParams;
use crate::options::Options;
use crate::tables::{BlockSide, ScoreTerms, Tables};
use ringspan::Result;
use ringspan::kernel::{DeviceArray, Inputs, Tile};

impl Cuda {
    /// Adds the keys of `tiles` to the softmax state `[out | max | sum]` of the queries.
    pub(crate) fn forward(&self, inputs: &Inputs, tiles: &[Tile], state: &mut DeviceArray) -> Result<()> {
        let Inputs { q, k, v, .. } = inputs;
        let [q_view, k_view, v_view] = [self.view(q)?, self.view(k)?, self.view(v)?];
        let tensor = self.tensor_cores(&[(q, &q_view), (k, &k_view), (v, &v_view)]);
        let options = Options::forward(inputs, tensor, self.gpu.0.shared_memory);
        let Some(tables) = Tables::new(self, inputs, tiles, BlockSide::Queries, options.rows)? else { return Ok(()) };
        let terms = ScoreTerms::new(self, inputs.score)?;
        let rows = q.tokens * q.heads;
        let out = self.write(&mut state.all_mut())?;
        let max = out + 4 * (rows * v.dim) as u64;
        let params = AttentionParams {
            q: q_view,
            k: k_view,
            v: v_view,
            bias: self.view_of(inputs.bias.as_ref())?,
            out,
            max,
            sum: max + 4 * rows as u64,
            ..terms.params(self, inputs)?
        };
        let grid = (count(tables.blocks, "blocks of queries")?, count(q.heads, "heads")?);
        self.launch(&options, "forward", &tables.over(self, params), grid)
    }
}
