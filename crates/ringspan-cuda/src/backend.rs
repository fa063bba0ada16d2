//! A rank's share of a GPU as a backend of the library.

use crate::cuda::Cuda;
use crate::gpu::Gpu;
use crate::memory::Memory;
use crate::options::TensorCores;
use ringspan::Result;
use ringspan::kernel::{Backend, DType, Data, DeviceArray, DeviceMemory, DeviceSlice, DeviceSliceMut, Inputs, Kernel};
use ringspan::kernel::{Progress, RowTarget, Saved, StateShape, Statistics, Sums, TensorSlice, Tile, View};
use std::any::Any;

impl Gpu {
    /// Makes a kernel on this GPU with its own stream, so that kernels of several ranks may share the GPU.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn kernel(&self) -> Result<Kernel> {
        Ok(Kernel::on(Cuda::new(self)?))
    }

    /// The GPU of a kernel; `None` if it computes elsewhere.
    pub fn of(kernel: &Kernel) -> Option<&Self> {
        let backend: &dyn Any = kernel.backend()?;
        backend.downcast_ref().map(Cuda::gpu)
    }
}

impl Backend for Cuda {
    fn set_progress(&mut self, progress: Progress) {
        self.progress = Some(progress);
    }

    fn progress(&self) -> Option<Progress> {
        self.progress.clone()
    }

    fn multiplies_bf16(&self) -> bool {
        self.gpu.0.tensor_cores != TensorCores::None
    }

    fn holds(&self, memory: &(dyn DeviceMemory + 'static)) -> bool {
        Memory::of(memory).is_some_and(|memory| memory.gpu.is(&self.gpu))
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<DeviceArray> {
        self.array(dtype, len)
    }

    fn zeros(&self, len: usize) -> Result<DeviceArray> {
        self.filled(len, 0.0)
    }

    fn upload(&self, from: Data) -> Result<DeviceArray> {
        self.upload(from)
    }

    fn download(&self, from: DeviceSlice, to: &mut [u8]) -> Result<()> {
        self.download(from, to)
    }

    fn copy(&self, from: DeviceSlice) -> Result<DeviceArray> {
        self.copied(from)
    }

    fn share(&self, array: &DeviceArray) -> Result<()> {
        self.share(array)
    }

    fn pack(&self, dtype: DType, slices: &[TensorSlice]) -> Result<DeviceArray> {
        self.pack(dtype, slices)
    }

    fn append(&self, to: &mut DeviceArray, filled: usize, from: DeviceSlice) -> Result<()> {
        self.append(to, filled, from)
    }

    fn add(&self, sum: DeviceSliceMut, target: &RowTarget, values: DeviceSlice) -> Result<()> {
        self.add(sum, target, values)
    }

    fn transpose(&self, values: DeviceSlice, rows: usize, columns: usize) -> Result<DeviceArray> {
        self.transpose(values, rows, columns)
    }

    fn softmax_state(&self, shape: StateShape) -> Result<DeviceArray> {
        self.state(shape)
    }

    fn merge(&self, state: &mut DeviceArray, shape: StateShape, other: DeviceSlice) -> Result<()> {
        self.merge(state, shape, other)
    }

    fn finish(
        &self,
        state: DeviceArray,
        shape: StateShape,
        sinks: Option<&[f32]>,
    ) -> Result<(DeviceArray, Statistics<DeviceArray>)> {
        self.finish(state, shape, sinks)
    }

    fn forward(&self, inputs: &Inputs, tiles: &[Tile], state: &mut DeviceArray) -> Result<()> {
        self.forward(inputs, tiles, state)
    }

    fn delta(&self, out: &View, d_out: &View) -> Result<DeviceArray> {
        self.delta(out, d_out)
    }

    fn backward(&self, inputs: &Inputs, tiles: &[Tile], saved: &Saved, sums: &mut Sums) -> Result<()> {
        self.backward(inputs, tiles, saved, sums)
    }

    fn wait(&self) -> Result<()> {
        self.wait()
    }

    fn step(&self) -> Result<()> {
        self.step()
    }
}
