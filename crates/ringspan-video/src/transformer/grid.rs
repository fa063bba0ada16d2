//! The grid of tokens of a video: patches of its latents, frame by frame, row by row.

use crate::error::{Error, Result};
use candle_core::{Device, Tensor};

/// The grid of a video's tokens. Token t is at frame `t / (height * width)`, row `t / width % height` and column `t % width`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenGrid {
    /// Frames, rows and columns of tokens.
    pub size: [usize; 3],
    /// Frames, rows and columns of latents in a token.
    pub patch: [usize; 3],
}

impl TokenGrid {
    /// The grid of latents `[B, C, F, H, W]` with these frames, rows and columns.
    ///
    /// # Errors
    /// Sizes that patches do not divide, or without elements, or with more of them than can be counted.
    pub fn new(latents: [usize; 3], patch: [usize; 3]) -> Result<Self> {
        for (axis, (size, patch)) in ["frames", "rows", "columns"].into_iter().zip(latents.into_iter().zip(patch)) {
            if size == 0 || size % patch != 0 {
                let problem =
                    format!("latents of {size} {axis}: a token has {patch}, so they must be a multiple of that");
                return Err(Error::Input(problem));
            }
        }
        if latents.iter().try_fold(1usize, |count, size| count.checked_mul(*size)).is_none() {
            return Err(Error::Input(format!("latents of {latents:?} frames, rows and columns are too many elements")));
        }
        Ok(Self { size: std::array::from_fn(|axis| latents[axis] / patch[axis]), patch })
    }

    /// Checks that no axis has more tokens than a model has positions (`rope_max_seq_len`).
    ///
    /// # Errors
    /// An axis with more, with the numbers.
    pub fn check_positions(&self, positions: usize) -> Result<()> {
        if self.size.iter().all(|size| *size <= positions) {
            return Ok(());
        }
        let problem = format!(
            "a grid of {:?} tokens, and the model has {positions} positions on an axis (rope_max_seq_len)",
            self.size
        );
        Err(Error::Input(problem))
    }

    /// Number S of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.size.iter().product()
    }

    /// Frames, rows and columns of the latents.
    #[must_use]
    pub fn latents(&self) -> [usize; 3] {
        std::array::from_fn(|axis| self.size[axis] * self.patch[axis])
    }

    /// Frame, row and column of a token.
    #[must_use]
    pub fn at(&self, token: usize) -> [usize; 3] {
        let [_, height, width] = self.size;
        [token / (height * width), token / width % height, token % width]
    }

    /// The patches of some tokens of latents `[B, C, F, H, W]`, `[rows.len(), C * patch]`: of each row of `[B * S]` its elements by
    /// channel, frame, row and column, as the patch embedding takes them.
    ///
    /// # Errors
    /// Latents of other sizes.
    pub fn patches(&self, latents: &Tensor, rows: &[usize]) -> Result<Tensor> {
        let (batch, channels, values) = self.checked(latents)?;
        let [_, height, width] = self.latents();
        let (plane, patch): (usize, usize) = (self.latents().iter().product(), self.patch.iter().product());
        let mut out = Vec::with_capacity(rows.len() * channels * patch);
        for row in rows {
            let (sample, token) = (row / self.tokens(), row % self.tokens());
            debug_assert!(sample < batch, "row {row} of a batch of {batch}");
            let [frame, top, left] = std::array::from_fn(|axis| self.at(token)[axis] * self.patch[axis]);
            for channel in 0..channels {
                for (frame, line) in
                    (0..self.patch[0]).flat_map(|f| (0..self.patch[1]).map(move |line| (frame + f, line)))
                {
                    let start = ((sample * channels + channel) * plane) + (frame * height + top + line) * width + left;
                    out.extend_from_slice(&values[start..start + self.patch[2]]);
                }
            }
        }
        Ok(Tensor::from_vec(out, (rows.len(), channels * patch), &Device::Cpu)?)
    }

    /// Puts the patches of all tokens, `[B, S, patch * C]` by frame, row, column and channel, together to latents
    /// `[B, C, F, H, W]`: the order of the output projection is not that of the patch embedding.
    ///
    /// # Errors
    /// Another number of tokens, other types than f32.
    pub fn unpatched(&self, patches: &Tensor) -> Result<Tensor> {
        let (batch, tokens, features) = patches.dims3()?;
        let (patch, [frames, height, width]) = (self.patch.iter().product::<usize>(), self.latents());
        if tokens != self.tokens() || features % patch != 0 {
            let problem =
                format!("patches {:?} of {} tokens with {patch} elements a channel", patches.shape(), self.tokens());
            return Err(Error::Input(problem));
        }
        let (channels, plane) = (features / patch, frames * height * width);
        let values = patches.flatten_all()?.to_vec1::<f32>()?;
        let mut out = vec![0.0; batch * channels * plane];
        for (row, values) in values.chunks_exact(features).enumerate() {
            let (sample, token) = (row / tokens, row % tokens);
            let [frame, top, left] = std::array::from_fn(|axis| self.at(token)[axis] * self.patch[axis]);
            for (index, values) in values.chunks_exact(channels).enumerate() {
                let [f, line, column] = [
                    index / (self.patch[1] * self.patch[2]),
                    index / self.patch[2] % self.patch[1],
                    index % self.patch[2],
                ];
                let at = ((frame + f) * height + top + line) * width + left + column;
                for (channel, value) in values.iter().enumerate() {
                    out[(sample * channels + channel) * plane + at] = *value;
                }
            }
        }
        Ok(Tensor::from_vec(out, (batch, channels, frames, height, width), &Device::Cpu)?)
    }

    fn checked(&self, latents: &Tensor) -> Result<(usize, usize, Vec<f32>)> {
        let (batch, channels, frames, height, width) = latents.dims5()?;
        if [frames, height, width] != self.latents() {
            let [f, h, w] = self.latents();
            let problem = format!("latents {:?} on a grid of [B, C, {f}, {h}, {w}]", latents.shape());
            return Err(Error::Input(problem));
        }
        Ok((batch, channels, latents.flatten_all()?.to_vec1::<f32>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A patch embedding that keeps the first channels, and an output in its own order, give the latents back.
    #[test]
    fn patches_of_all_tokens_are_the_latents() -> Result<()> {
        let grid = TokenGrid::new([4, 6, 4], [2, 3, 2])?;
        assert_eq!((grid.tokens(), grid.at(5)), (8, [1, 0, 1]));
        let latents = Tensor::arange(0f32, 2. * 3. * 96., &Device::Cpu)?.reshape((2, 3, 4, 6, 4))?;
        let patches = grid.patches(&latents, &(0..16).collect::<Vec<_>>())?;
        let back = patches.reshape((2, 8, 3, 12))?.transpose(2, 3)?.contiguous()?.reshape((2, 8, 36))?;
        assert_eq!(grid.unpatched(&back)?.flatten_all()?.to_vec1::<f32>()?, latents.flatten_all()?.to_vec1::<f32>()?);
        let one = grid.patches(&latents, &[9])?.to_vec2::<f32>()?;
        assert_eq!(one[0][..4], [290.0, 291.0, 294.0, 295.0], "channel 0 of the second row, token 1: from column 2 on");
        Ok(())
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_with_the_numbers() {
        let refused = TokenGrid::new([3, 7, 8], [1, 2, 2]).expect_err("7 rows").to_string();
        assert!(refused.contains("7 rows") && refused.contains("has 2"), "{refused}");
        assert!(TokenGrid::new([0, 2, 2], [1, 2, 2]).is_err());
        assert!(TokenGrid::new([1, 1 << 40, 1 << 40], [1, 2, 2]).is_err());
    }
}
