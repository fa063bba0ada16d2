//! A rank's operations on GPU tensors besides attention: copies, messages, sums, softmax states.

use crate::cuda::{Cuda, count};
use crate::kernel_params::MemoryParams;
use crate::options::Options;
use cudarc::driver::{CudaSlice, result};
use ringspan::Result;
use ringspan::kernel::TensorSlice;
use ringspan::kernel::{DType, Data, DeviceArray, DeviceSlice, DeviceSliceMut, RowTarget, StateShape, Statistics};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Number of threads that share a row of a softmax state.
const LANES: usize = 32;

impl Cuda {
    /// Copies elements from the memory of the CPU to the GPU, in their storage type.
    pub(crate) fn upload(&self, data: Data) -> Result<DeviceArray> {
        let bytes: &[u8] = match data {
            Data::F32(data) => bytemuck::cast_slice(data),
            Data::Bf16(data) => bytemuck::cast_slice(data),
            Data::F16(data) => bytemuck::cast_slice(data),
            Data::Q8_0(data) => {
                return Err(self.wrong(format!("{} numbers in blocks, which only kernels on the CPU read", data.len())));
            }
            Data::Device(data) => return Err(self.wrong(format!("{data:?} are no elements of the CPU"))),
        };
        Ok(self.own(self.upload_all(bytes)?, data.dtype(), data.len()))
    }

    /// Copies elements to the CPU; communication goes on until the GPU has done the work that was started before.
    pub(crate) fn download(&self, from: DeviceSlice, to: &mut [u8]) -> Result<()> {
        if from.len() * from.dtype().width() != to.len() {
            return Err(self.wrong(format!("{from:?} for {} bytes", to.len())));
        }
        if to.is_empty() { Ok(()) } else { self.download_bytes(self.read(from)?, to) }
    }

    /// Copies as many bytes as `to` has from this address to the CPU.
    pub(crate) fn download_bytes(&self, at: u64, to: &mut [u8]) -> Result<()> {
        self.wait()?;
        self.gpu.0.downloaded.fetch_add(to.len() as u64, Ordering::Relaxed);
        self.bind()?;
        // SAFETY: both callers give the address of as many bytes, which stay valid until the copy is over.
        unsafe { result::memcpy_dtoh_async(to, at, self.stream.cu_stream()) }
            .and_then(|()| self.stream.synchronize())
            .map_err(self.gpu.failed("copy from the GPU"))
    }

    /// Copies elements of another GPU or rank to an array of this rank.
    pub(crate) fn copied(&self, from: DeviceSlice) -> Result<DeviceArray> {
        let mut to = self.array(from.dtype(), from.len())?;
        let bytes = from.len() * from.dtype().width();
        if bytes > 0 {
            let (source, target) = (self.read_anywhere(from)?, self.write(&mut to.all_mut())?);
            let (source_gpu, context) = (&self.memory(from)?.gpu.0.context, &self.gpu.0.context);
            self.bind()?;
            // SAFETY: both have the same number of bytes, each in the context given for it.
            unsafe {
                result::memcpy_peer_async(
                    context.cu_ctx(),
                    target,
                    source_gpu.cu_ctx(),
                    source,
                    bytes,
                    self.stream.cu_stream(),
                )
            }
            .map_err(self.gpu.failed("copy from another GPU"))?;
        }
        Ok(to)
    }

    /// Makes the GPU current on this thread, which is needed for driver calls that cudarc does not wrap.
    pub(crate) fn bind(&self) -> Result<()> {
        self.gpu.0.context.bind_to_thread().map_err(self.gpu.failed("use from this thread"))
    }

    /// An array of `len` f32 elements with the same `value`.
    pub(crate) fn filled(&self, len: usize, value: f32) -> Result<DeviceArray> {
        let mut array = self.array(DType::F32, len)?;
        self.fill(array.all_mut(), value)?;
        Ok(array)
    }

    fn fill(&self, mut to: DeviceSliceMut, value: f32) -> Result<()> {
        let params =
            MemoryParams { to: self.write(&mut to)?, count: to.len() as i64, value, ..MemoryParams::default() };
        self.launch_memory((DType::F32, DType::F32), "fill", &params, to.len())
    }

    /// Packs slices of tensors one after the other, converted to one type.
    pub(crate) fn pack(&self, to: DType, slices: &[TensorSlice]) -> Result<DeviceArray> {
        let mut packed = self.array(to, slices.iter().map(TensorSlice::len).sum())?;
        let mut all = packed.all_mut();
        let mut at = self.write(&mut all)?;
        for slice in slices {
            let TensorSlice { view, heads, rows } = slice;
            let from = self.tensor(view)? + (heads.start * view.head_stride * view.data.dtype().width()) as u64;
            let list = self.rows(rows)?;
            let params = MemoryParams {
                from,
                to: at,
                width: (heads.len() * view.dim) as i64,
                dim: view.dim as i64,
                row_stride: view.token_stride as i64,
                head_stride: view.head_stride as i64,
                ..list.params(self)
            };
            self.launch_memory((view.data.dtype(), to), "pack", &params, slice.len())?;
            at += (slice.len() * to.width()) as u64;
        }
        Ok(packed)
    }

    /// Copies a message into `all`, after its first `filled` elements.
    pub(crate) fn append(&self, all: &mut DeviceArray, filled: usize, message: DeviceSlice) -> Result<()> {
        let width = message.dtype().width();
        if all.data().dtype() != message.dtype() || filled + message.len() > all.len() {
            return Err(self.wrong(format!("{message:?} after {filled} of {all:?}")));
        }
        let (from, to) = (self.read(message)?, self.write(&mut all.all_mut())? + (filled * width) as u64);
        if message.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the checks above keep both ranges in bounds.
        unsafe { result::memcpy_dtod_async(to, from, message.len() * width, self.stream.cu_stream()) }
            .map_err(self.gpu.failed("copy on the GPU"))
    }

    /// Adds consecutive rows to the rows of `place`.
    pub(crate) fn add(&self, mut sum: DeviceSliceMut, place: &RowTarget, values: DeviceSlice) -> Result<()> {
        let list = self.rows(place.rows)?;
        let params = MemoryParams {
            from: self.read(values)?,
            to: self.write(&mut sum)? + 4 * place.offset as u64,
            width: place.width as i64,
            row_stride: place.stride as i64,
            ..list.params(self)
        };
        self.launch_memory((DType::F32, DType::F32), "add", &params, place.len())
    }

    /// Transposes a matrix from `[rows, columns]` to `[columns, rows]`.
    pub(crate) fn transpose(&self, values: DeviceSlice, rows: usize, columns: usize) -> Result<DeviceArray> {
        let mut array = self.array(DType::F32, rows * columns)?;
        let params = MemoryParams {
            from: self.read(values)?,
            to: self.write(&mut array.all_mut())?,
            count: rows as i64,
            width: columns as i64,
            ..MemoryParams::default()
        };
        self.launch_memory((DType::F32, DType::F32), "transpose", &params, rows * columns)?;
        Ok(array)
    }

    /// A softmax state `[out | max | sum]` that has seen no keys yet.
    pub(crate) fn state(&self, shape: StateShape) -> Result<DeviceArray> {
        let (rows, mut state) = (shape.rows(), self.filled(shape.len(), 0.0)?);
        let (_, mut statistics) = state.split_at_mut(rows * shape.v_dim);
        let at = self.write(&mut statistics)?;
        let params = MemoryParams { to: at, count: rows as i64, value: f32::NEG_INFINITY, ..MemoryParams::default() };
        self.launch_memory((DType::F32, DType::F32), "fill", &params, rows)?;
        Ok(state)
    }

    /// Merges the state of the same queries over other keys into `state`.
    pub(crate) fn merge(
        &self,
        state: &mut DeviceArray,
        StateShape { tokens, heads, v_dim }: StateShape,
        message: DeviceSlice,
    ) -> Result<()> {
        let params = MemoryParams {
            from: self.read(message)?,
            to: self.write(&mut state.all_mut())?,
            width: v_dim as i64,
            tokens: tokens as i64,
            heads: heads as i64,
            ..MemoryParams::default()
        };
        self.launch_memory((DType::F32, DType::F32), "merge", &params, tokens * heads * LANES)
    }

    /// Finishes a state: divides the output by the sums, and returns output and statistics.
    pub(crate) fn finish(
        &self,
        mut state: DeviceArray,
        StateShape { tokens, heads, v_dim }: StateShape,
        sinks: Option<&[f32]>,
    ) -> Result<(DeviceArray, Statistics<DeviceArray>)> {
        let (rows, sinks) = (tokens * heads, sinks.map(|sinks| self.upload_all(sinks)).transpose()?);
        let params = MemoryParams {
            to: self.write(&mut state.all_mut())?,
            sinks: sinks.as_ref().map_or(0, |sinks| self.at(sinks)),
            width: v_dim as i64,
            tokens: tokens as i64,
            heads: heads as i64,
            ..MemoryParams::default()
        };
        self.launch_memory((DType::F32, DType::F32), "finish", &params, rows * LANES)?;
        let statistic = |number: usize| state.part(rows * (v_dim + number)..rows * (v_dim + number + 1));
        Ok((state.part(0..rows * v_dim), Statistics { max: statistic(0), sum: statistic(1) }))
    }

    /// The rows in a form for kernels; they need a list only if the rows are not contiguous.
    fn rows(&self, ranges: &[Range<usize>]) -> Result<RowList> {
        let count = ranges.iter().map(ExactSizeIterator::len).sum();
        match ranges {
            [] => Ok(RowList { first: 0, count, list: None }),
            [rows] => Ok(RowList { first: rows.start, count, list: None }),
            _ => {
                let mut rows = Vec::with_capacity(count);
                for row in ranges.iter().flat_map(Clone::clone) {
                    rows.push(crate::cuda::count(row, "rows")?);
                }
                Ok(RowList { first: 0, count, list: Some(self.upload_all(&rows)?) })
            }
        }
    }

    /// Starts a kernel of `source/memory.cu` with `threads` threads, if there are any.
    fn launch_memory(
        &self,
        (from, to): (DType, DType),
        name: &'static str,
        params: &MemoryParams,
        threads: usize,
    ) -> Result<()> {
        if threads == 0 {
            return Ok(());
        }
        let options = Options::memory(from, to);
        let blocks = count(threads.div_ceil(options.threads), "blocks of threads")?;
        self.launch(&options, name, params, (blocks, 1))
    }
}

struct RowList {
    first: usize,
    count: usize,
    list: Option<CudaSlice<i32>>,
}

impl RowList {
    fn params(&self, cuda: &Cuda) -> MemoryParams {
        MemoryParams {
            rows: self.list.as_ref().map_or(0, |list| cuda.at(list)),
            first: self.first as i64,
            count: self.count as i64,
            ..MemoryParams::default()
        }
    }
}
