//! Rotations on a GPU, in a program that was built without GPUs.

use super::RotaryTable;
use candle_core::{CudaStorage, Layout, Result, Shape, bail};

pub(super) fn rotated(_: &CudaStorage, _: &Layout, _: &RotaryTable, _back: bool) -> Result<(CudaStorage, Shape)> {
    bail!("this program was built without GPUs")
}
