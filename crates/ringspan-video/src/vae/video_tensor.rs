//! Videos as callers have them.

use crate::error::{Error, Result};

/// A tensor `[B, C, F, H, W]` in f32, such as frames or latents.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoTensor {
    shape: [usize; 5],
    values: Vec<f32>,
}

impl VideoTensor {
    /// A tensor of this shape.
    ///
    /// # Errors
    /// Another number of values than the shape has, and an empty dim.
    pub fn new(shape: [usize; 5], values: Vec<f32>) -> Result<Self> {
        if shape.contains(&0) {
            return Err(Error::Input(format!("a video of shape {shape:?} [B,C,F,H,W] is empty")));
        }
        let elements = shape.into_iter().try_fold(1usize, usize::checked_mul);
        if elements != Some(values.len()) {
            return Err(Error::Input(format!("{} values for the shape {shape:?} [B,C,F,H,W]", values.len())));
        }
        Ok(Self { shape, values })
    }

    /// The dims `[B, C, F, H, W]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 5] {
        self.shape
    }

    /// The values, row after row.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The values, row after row.
    #[must_use]
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }
}
