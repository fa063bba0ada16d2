//! The trait that devices with their own memory implement: their operations, and how the library refers to memory that
//! the CPU cannot read.

use super::device_array::{DeviceArray, DeviceMemory, DeviceSlice, DeviceSliceMut};
use super::{DType, Data, Inputs, Progress, RowTarget, Saved, StateShape, Statistics, Sums, TensorSlice, Tile, View};
use crate::error::Result;
use std::any::Any;
use std::fmt::Debug;

/// A device with its own memory that computes attention for one rank, such as a GPU; [`Kernel::on`](super::Kernel::on) makes
/// a kernel of it. `examples/own_backend` implements one.
///
/// Calls may start work and return before it is done, as long as later calls of the same backend see its results;
/// [`download`](Self::download) and [`wait`](Self::wait) wait. [`Kernel`](super::Kernel) checks shapes and tiles before it
/// calls these methods, never calls them with nothing to compute, and copies tensors between the CPU and the device, so a
/// backend is given data in its own memory ([`Data::Device`]) only, except in [`upload`](Self::upload).
///
/// All methods return failures of the device as [`Error::Device`](crate::Error::Device).
pub trait Backend: Any + Debug + Send + Sync {
    /// Sets a function that the backend calls repeatedly, on the caller's thread, while it waits for the device: it advances
    /// communication.
    fn set_progress(&mut self, progress: Progress);

    /// The function given to [`set_progress`](Self::set_progress).
    fn progress(&self) -> Option<Progress>;

    /// Whether q, k and v stored in bf16 are multiplied in bf16, with weights rounded to bf16.
    fn multiplies_bf16(&self) -> bool;

    /// Whether the memory is on this device, so that this backend can read it.
    fn holds(&self, memory: &(dyn DeviceMemory + 'static)) -> bool;

    /// Allocates an array with uninitialised elements, which the caller writes before it reads them.
    fn allocate(&self, dtype: DType, len: usize) -> Result<DeviceArray>;

    /// Makes an array of zeros in f32.
    fn zeros(&self, len: usize) -> Result<DeviceArray>;

    /// Copies elements from the memory of the CPU.
    fn upload(&self, from: Data) -> Result<DeviceArray>;

    /// Copies elements to the memory of the CPU, into as many bytes, after the work that was started before.
    fn download(&self, from: DeviceSlice, to: &mut [u8]) -> Result<()>;

    /// Copies elements of this or another device of the same kind to a new array.
    fn copy(&self, from: DeviceSlice) -> Result<DeviceArray>;

    /// Lets other ranks of this process read the elements written so far; after this they are not written to any more.
    fn share(&self, array: &DeviceArray) -> Result<()>;

    /// Packs the slices one after the other, each as `[rows, heads, dim]`, converted to `dtype`.
    fn pack(&self, dtype: DType, slices: &[TensorSlice]) -> Result<DeviceArray>;

    /// Copies elements into `to`, after its first `filled` elements.
    fn append(&self, to: &mut DeviceArray, filled: usize, from: DeviceSlice) -> Result<()>;

    /// Adds consecutive f32 rows to rows of a sum.
    fn add(&self, sum: DeviceSliceMut, target: &RowTarget, values: DeviceSlice) -> Result<()>;

    /// Transposes an f32 matrix from `[rows, columns]` to `[columns, rows]`.
    fn transpose(&self, values: DeviceSlice, rows: usize, columns: usize) -> Result<DeviceArray>;

    /// Makes a softmax state that has seen no keys: in f32, out `[Tq, H, Dv]` of zeros, then the maximum `[H, Tq]` of -inf,
    /// then the sum `[H, Tq]` of zeros.
    fn softmax_state(&self, shape: StateShape) -> Result<DeviceArray>;

    /// Merges the softmax state of the same queries over other keys into `state`.
    fn merge(&self, state: &mut DeviceArray, shape: StateShape, other: DeviceSlice) -> Result<()>;

    /// Divides out by the sums of the weights, to which each head's sink is added, if there are any (`[H]`); returns out
    /// and statistics, as [`OnlineSoftmax::finish`](super::OnlineSoftmax::finish) does.
    fn finish(
        &self,
        state: DeviceArray,
        shape: StateShape,
        sinks: Option<&[f32]>,
    ) -> Result<(DeviceArray, Statistics<DeviceArray>)>;

    /// Adds the keys of `tiles` to the softmax state of the queries.
    fn forward(&self, inputs: &Inputs, tiles: &[Tile], state: &mut DeviceArray) -> Result<()>;

    /// Computes the row sums of `out * d_out` in f32, `[H, Tq]`, for out and d_out `[Tq, H, Dv]`.
    fn delta(&self, out: &View, d_out: &View) -> Result<DeviceArray>;

    /// Adds the gradients of `tiles` to `sums`, which are on this device.
    fn backward(&self, inputs: &Inputs, tiles: &[Tile], saved: &Saved, sums: &mut Sums) -> Result<()>;

    /// Waits until all started work is done, while communication goes on.
    fn wait(&self) -> Result<()>;

    /// Marks the end of a step of a plan. A backend whose device is some steps behind waits for it, so that only the memory of
    /// the current steps is in use.
    fn step(&self) -> Result<()>;
}
