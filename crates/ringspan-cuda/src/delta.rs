//! Starts the kernel that computes delta, which the backward pass subtracts from the gradients of weights.

use crate::cuda::{Cuda, count};
use crate::kernel_params::AttentionParams;
use crate::options::Options;
use ringspan::Result;
use ringspan::kernel::{DeviceArray, View};

impl Cuda {
    /// Computes the row sums of `out * d_out`, `[H, Tq]`.
    pub(crate) fn delta(&self, out: &View, d_out: &View) -> Result<DeviceArray> {
        let rows = d_out.tokens * d_out.heads;
        let mut sums = self.filled(rows, 0.0)?;
        if rows == 0 {
            return Ok(sums);
        }
        let options = Options::delta(out, d_out);
        let params = AttentionParams {
            q: self.view(out)?,
            d_out: self.view(d_out)?,
            out: self.write(&mut sums.all_mut())?,
            queries: count(d_out.tokens, "queries")?,
            heads: count(d_out.heads, "heads")?,
            ..AttentionParams::default()
        };
        let blocks = count(rows.div_ceil(options.threads), "blocks of rows")?;
        self.launch(&options, "delta", &params, (blocks, 1))?;
        Ok(sums)
    }
}
