//! Copies between a GPU and pinned memory of the CPU, on a stream of their own.
//!
//! All copies of a rank are on one stream, in both directions: so a buffer may be used again as soon as its last copy is
//! started. Events order that stream and candle's, which has taken the GPU's memory and takes it back.

use crate::gpu::operand;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::{
    CudaEvent, CudaStream, CudaView, DeviceRepr, DeviceSlice, DriverError, HostSlice, PinnedHostSlice, SyncOnDrop,
};
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Shape, Tensor, bail};
use half::bf16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Pinned memory is taken page by page.
const PAGE: usize = 4096;

/// The stream of copies, and the buffers that they fill.
pub(super) struct Mover {
    device: CudaDevice,
    copies: Arc<CudaStream>,
    buffers: Mutex<Buffers>,
}

#[derive(Default)]
struct Buffers {
    /// Which pass this is.
    pass: u64,
    free: Vec<Buffer>,
    /// Bytes of all buffers, in use or not.
    held: usize,
}

struct Buffer {
    memory: PinnedHostSlice<u8>,
    /// The last pass that used it.
    pass: u64,
}

/// A tensor on its way to the CPU, there, on its way back, or back.
pub(super) struct Moving {
    mover: Arc<Mover>,
    shape: Shape,
    dtype: DType,
    /// Where it is on the CPU; none once it comes back.
    buffer: Option<Buffer>,
    /// The tensor as long as it is on the GPU, and the end of its copy.
    there: Option<(Tensor, CudaEvent)>,
}

impl Mover {
    pub(super) fn new(device: &CudaDevice) -> Result<Self> {
        let copies = device.cuda_stream().context().new_stream().map_err(failed("make a stream"))?;
        Ok(Self { device: device.clone(), copies, buffers: Mutex::default() })
    }

    pub(super) fn begin(&self) {
        let mut buffers = self.buffers();
        let last = buffers.pass;
        buffers.pass += 1;
        let all = std::mem::take(&mut buffers.free).into_iter();
        let (used, unused): (Vec<_>, Vec<Buffer>) = all.partition(|buffer| buffer.pass == last);
        buffers.free = used;
        if !unused.is_empty() {
            self.settle();
        }
        buffers.held -= unused.iter().map(|buffer| buffer.memory.len()).sum::<usize>();
    }

    pub(super) fn held(&self) -> usize {
        self.buffers().held
    }

    /// Starts to copy a contiguous tensor to the CPU, behind all that was started on its stream.
    pub(super) fn send(self: &Arc<Self>, tensor: &Tensor) -> Result<Moving> {
        let (storage, layout) = tensor.storage_and_layout();
        let storage = operand::on_gpu(&storage)?;
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("what layers keep is contiguous, given strides {:?}", layout.stride());
        };
        let mut buffer = self.take((end - start) * storage.dtype().size_in_bytes())?;
        let copied = match storage.dtype() {
            DType::F32 => self.copy_out(&storage.as_cuda_slice::<f32>()?.slice(start..end), &mut buffer),
            DType::BF16 => self.copy_out(&storage.as_cuda_slice::<bf16>()?.slice(start..end), &mut buffer),
            other => bail!("layers keep F32 and BF16 on GPUs, given {other:?}"),
        };
        let end = match copied {
            Ok(end) => end,
            Err(error) => {
                self.give_back(buffer);
                return Err(error);
            }
        };
        Ok(Moving {
            mover: self.clone(),
            shape: layout.shape().clone(),
            dtype: storage.dtype(),
            buffer: Some(buffer),
            there: Some((tensor.clone(), end)),
        })
    }

    fn copy_out<T: DeviceRepr>(&self, from: &CudaView<T>, to: &mut Buffer) -> Result<CudaEvent> {
        let bytes = from.len() * size_of::<T>();
        // SAFETY: numbers are bytes.
        let Some(from) = (unsafe { from.transmute::<u8>(bytes) }) else { bail!("{bytes} bytes of fewer") };
        self.copies.join(from.stream()).map_err(failed("order streams"))?;
        self.copies.memcpy_dtoh(&from, &mut First { of: &mut to.memory, bytes }).map_err(failed("copy to the CPU"))?;
        self.copies.record_event(None).map_err(failed("mark the end of a copy"))
    }

    /// Starts to copy from the CPU to memory that candle's stream has given by now.
    fn copy_back<T: DeviceRepr + CudaDType>(&self, from: &mut Buffer, count: usize) -> Result<CudaStorage> {
        let bytes = count * size_of::<T>();
        // SAFETY: the copy writes all of it, or fails and nobody gets it.
        let mut to = unsafe { self.device.alloc::<T>(count) }?;
        self.copies.join(&self.device.cuda_stream()).map_err(failed("order streams"))?;
        // SAFETY: bytes are those of numbers, which were copied from such.
        let Some(mut all) = (unsafe { to.transmute_mut::<u8>(bytes) }) else { bail!("{bytes} bytes of fewer") };
        let first = First { of: &mut from.memory, bytes };
        self.copies.memcpy_htod(&first, &mut all).map_err(failed("copy to the GPU"))?;
        Ok(CudaStorage::wrap_cuda_slice(to, self.device.clone()))
    }

    /// A buffer of at least so many bytes.
    fn take(&self, bytes: usize) -> Result<Buffer> {
        let mut buffers = self.buffers();
        let pass = buffers.pass;
        let fits = |buffer: &Buffer| (bytes..=bytes + bytes / 4 + PAGE).contains(&buffer.memory.len());
        let known = buffers.free.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        if let Some((index, _)) = known.min_by_key(|(_, buffer)| buffer.memory.len()) {
            return Ok(Buffer { pass, ..buffers.free.swap_remove(index) });
        }
        // Layers of other passes may keep a little more or less.
        let room = bytes.next_multiple_of((bytes.next_power_of_two() / 16).max(PAGE));
        // SAFETY: nothing reads what no copy has written: `Moving` fetches what it has sent.
        let taken = unsafe { self.device.cuda_stream().context().alloc_pinned_with_flags::<u8>(room, 0) };
        let memory = match taken {
            Ok(memory) => memory,
            Err(error) => bail!(
                "activations wait in memory of the CPU: {room} bytes beside the {} that are held cannot be pinned there: {error}",
                buffers.held
            ),
        };
        buffers.held += room;
        Ok(Buffer { memory, pass })
    }

    fn give_back(&self, buffer: Buffer) {
        self.buffers().free.push(buffer);
    }

    /// Waits for all copies: before buffers are given back to the driver.
    fn settle(&self) {
        let context = self.copies.context();
        context.record_err(self.copies.synchronize());
    }

    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.settle();
    }
}

impl Moving {
    /// Gives up the memory of the GPU, as soon as the copy has ended.
    pub(super) fn let_go(&mut self) -> Result<()> {
        match &self.buffer {
            Some(_) => self.leave(),
            None => Ok(()),
        }
    }

    /// Candle's stream, which takes the memory back, does so behind the copy.
    fn leave(&mut self) -> Result<()> {
        let Some((tensor, end)) = self.there.take() else { return Ok(()) };
        let ordered = self.mover.device.cuda_stream().wait(&end).map_err(failed("order streams"));
        drop(tensor);
        ordered
    }

    /// Starts to copy back, unless it is on the GPU still.
    pub(super) fn fetch(&mut self) -> Result<()> {
        if self.there.is_some() {
            return Ok(());
        }
        let Some(mut buffer) = self.buffer.take() else { bail!("what a layer kept was lost with an earlier failure") };
        let count = self.shape.elem_count();
        let copied = match self.dtype {
            DType::BF16 => self.mover.copy_back::<bf16>(&mut buffer, count),
            _ => self.mover.copy_back::<f32>(&mut buffer, count),
        };
        self.mover.give_back(buffer);
        let end = self.mover.copies.record_event(None).map_err(failed("mark the end of a copy"))?;
        self.there = Some((operand::tensor(copied?, &self.shape), end));
        Ok(())
    }

    /// The tensor, for candle's stream.
    pub(super) fn tensor(&mut self) -> Result<Tensor> {
        self.fetch()?;
        let Some((tensor, end)) = &self.there else { bail!("what a layer kept was lost with an earlier failure") };
        if self.buffer.is_none() {
            self.mover.device.cuda_stream().wait(end).map_err(failed("order streams"))?;
        }
        Ok(tensor.clone())
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        // A failure of the device is what the next call says.
        let _ = self.leave();
        if let Some(buffer) = self.buffer.take() {
            self.mover.give_back(buffer);
        }
    }
}

/// The first bytes of pinned memory.
struct First<'a> {
    of: &'a mut PinnedHostSlice<u8>,
    bytes: usize,
}

impl HostSlice<u8> for First<'_> {
    fn len(&self) -> usize {
        self.bytes
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        // SAFETY: the caller's promise.
        let (all, order) = unsafe { self.of.stream_synced_slice(stream) };
        (&all[..self.bytes], order)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [u8], SyncOnDrop<'a>) {
        // SAFETY: the caller's promise.
        let (all, order) = unsafe { self.of.stream_synced_mut_slice(stream) };
        (&mut all[..self.bytes], order)
    }
}

fn failed(operation: &'static str) -> impl Fn(DriverError) -> candle_core::Error {
    move |error| candle_core::Error::Msg(format!("activation offload: {operation}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use ringspan::kernel::Gpu;

    /// A GPU whose memory cudarc does not watch: streams are ordered as they are told here, or not at all.
    fn unwatched() -> Option<(Device, Arc<Mover>)> {
        if Gpu::count() == Ok(0) {
            println!("skipped: no GPU on this machine");
            return None;
        }
        let device = Device::new_cuda_with_stream(0).expect("a GPU that works");
        let gpu = device.as_cuda_device().expect("a GPU");
        // SAFETY: that is what is tested; all else here is on one stream.
        unsafe { gpu.cuda_stream().context().disable_event_tracking() };
        let mover = Arc::new(Mover::new(gpu).expect("a stream"));
        Some((device, mover))
    }

    fn numbers(device: &Device, count: usize) -> Tensor {
        let numbers = Tensor::arange(0.0, count as f32, &Device::Cpu).and_then(|x| x.to_device(device));
        numbers.and_then(|x| x * 0.5).expect("numbers")
    }

    #[test]
    fn streams_are_ordered_by_what_is_said_here() -> Result<()> {
        let Some((device, mover)) = unwatched() else { return Ok(()) };
        for count in [1, 1000, 5000] {
            // The second buffer is the first one, which another tensor has left.
            for first in [false, true] {
                // Copies may come before all that they were not told to wait for.
                let come = || {
                    if first {
                        mover.settle()
                    }
                };
                let mut moving = mover.send(&numbers(&device, count))?;
                come();
                moving.let_go()?;
                let other = numbers(&device, count + 1);
                moving.fetch()?;
                come();
                let back = (moving.tensor()? + other.narrow(0, 0, count)?)?;
                drop(moving);
                let wanted: Vec<f32> = (0..count).map(|i| i as f32).collect();
                assert_eq!(back.to_vec1::<f32>()?, wanted);
            }
            // One that is not let go is not fetched either.
            let mut moving = mover.send(&numbers(&device, count))?;
            moving.fetch()?;
            assert_eq!(moving.tensor()?.to_vec1::<f32>()?, numbers(&device, count).to_vec1::<f32>()?);
            drop(mover.send(&numbers(&device, count))?);
        }
        Ok(())
    }

    /// What nobody waits for has not happened on the GPU made of a CPU; of another, nothing can be said.
    #[test]
    fn work_on_the_gpu_waits_for_no_copy() -> Result<()> {
        let Some((device, mover)) = unwatched() else { return Ok(()) };
        if mover.device.cuda_stream().context().name().map_err(failed("ask for a name"))? != "a CPU" {
            println!("skipped: a GPU that copies when it likes");
            return Ok(());
        }
        let under_way = |moving: &Moving| moving.there.as_ref().is_some_and(|(_, end)| !end.is_complete());
        let mut moving = mover.send(&numbers(&device, 3000))?;
        let computed = numbers(&device, 10).to_vec1::<f32>()?;
        assert!(under_way(&moving), "a copy to the CPU held up {} numbers", computed.len());
        moving.let_go()?;
        moving.fetch()?;
        let computed = numbers(&device, 10).to_vec1::<f32>()?;
        assert!(under_way(&moving), "a copy from the CPU held up {} numbers", computed.len());
        assert_eq!(moving.tensor()?.to_vec1::<f32>()?.len(), 3000);
        assert!(!under_way(&moving));
        Ok(())
    }
}
