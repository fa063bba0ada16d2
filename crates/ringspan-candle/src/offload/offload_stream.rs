//! Copies between a GPU and pinned CPU memory, on a stream of their own.
//!
//! All copies of a rank, in both directions, are on one stream, so a buffer may be used again as soon as its last copy is
//! started. Events order that stream and candle's stream, on which GPU memory is allocated and freed.

use crate::gpu::operand;
use crate::pinned::{Pinned, failed};
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaStream, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Shape, Tensor, bail};
use half::bf16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The stream of copies, and the pinned buffers.
pub(super) struct OffloadStream {
    device: CudaDevice,
    copies: Arc<CudaStream>,
    buffers: Mutex<Buffers>,
}

#[derive(Default)]
struct Buffers {
    /// The number of the current pass.
    pass: u64,
    free: Vec<Buffer>,
    /// Bytes of all buffers, in use or free.
    held: usize,
}

struct Buffer {
    memory: Pinned,
    /// The number of the last pass that used the buffer.
    pass: u64,
}

impl Buffers {
    /// Frees the buffers that this pass has not used, after calling `settled`, which must wait for all copies.
    fn drop_unused(&mut self, settled: impl FnOnce()) {
        let (pass, all) = (self.pass, std::mem::take(&mut self.free).into_iter());
        let (used, unused): (Vec<_>, Vec<_>) = all.partition(|buffer| buffer.pass == pass);
        self.free = used;
        if !unused.is_empty() {
            settled();
        }
        self.held -= unused.iter().map(|buffer| buffer.memory.len()).sum::<usize>();
    }
}

/// A tensor that is being copied to the CPU, is there, is being copied back, or is back.
pub(super) struct OffloadTransfer {
    stream: Arc<OffloadStream>,
    shape: Shape,
    dtype: DType,
    /// The buffer on the CPU; `None` once the tensor is being copied back.
    buffer: Option<Buffer>,
    /// The tensor while it is on the GPU, with the event at the end of its last copy.
    there: Option<(Tensor, CudaEvent)>,
}

impl OffloadStream {
    pub(super) fn new(device: &CudaDevice) -> Result<Self> {
        let copies = device.cuda_stream().context().new_stream().map_err(failed("make a stream"))?;
        Ok(Self { device: device.clone(), copies, buffers: Mutex::default() })
    }

    pub(super) fn begin(&self) {
        let mut buffers = self.buffers();
        buffers.drop_unused(|| self.settle());
        buffers.pass += 1;
    }

    pub(super) fn held(&self) -> usize {
        self.buffers().held
    }

    /// Starts to copy a contiguous tensor to the CPU, after all work that was started on its stream.
    pub(super) fn send(self: &Arc<Self>, tensor: &Tensor) -> Result<OffloadTransfer> {
        let (storage, layout) = tensor.storage_and_layout();
        let storage = operand::on_gpu(&storage)?;
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("only contiguous activations can be offloaded, given strides {:?}", layout.stride());
        };
        let mut buffer = self.take((end - start) * storage.dtype().size_in_bytes())?;
        let memory = &mut buffer.memory;
        // If anything fails, the buffer is returned to the free ones, so that it stays counted.
        let mut start_copy = || match storage.dtype() {
            DType::F32 => memory.copy_from(0, &storage.as_cuda_slice::<f32>()?.slice(start..end), &self.copies),
            DType::BF16 => memory.copy_from(0, &storage.as_cuda_slice::<bf16>()?.slice(start..end), &self.copies),
            other => bail!("only F32 and BF16 activations can be offloaded, given {other:?}"),
        };
        let copied = start_copy();
        let end = match copied.and_then(|()| self.end()) {
            Ok(end) => end,
            Err(error) => {
                self.give_back(buffer);
                return Err(error);
            }
        };
        Ok(OffloadTransfer {
            stream: self.clone(),
            shape: layout.shape().clone(),
            dtype: storage.dtype(),
            buffer: Some(buffer),
            there: Some((tensor.clone(), end)),
        })
    }

    /// Starts to copy a buffer to GPU memory that is allocated on candle's stream.
    fn copy_back<T: DeviceRepr + CudaDType>(&self, from: &mut Buffer, count: usize) -> Result<CudaStorage> {
        // SAFETY: the copy writes all of it, or an error is returned and nothing reads it.
        let mut to = unsafe { self.device.alloc::<T>(count) }?;
        self.copies.join(&self.device.cuda_stream()).map_err(failed("order streams"))?;
        from.memory.copy_to(0, &mut to, &self.copies)?;
        Ok(CudaStorage::wrap_cuda_slice(to, self.device.clone()))
    }

    /// A pinned buffer of at least this many bytes.
    fn take(&self, bytes: usize) -> Result<Buffer> {
        let mut buffers = self.buffers();
        let pass = buffers.pass;
        let known = buffers.free.iter().enumerate().filter(|(_, buffer)| buffer.memory.suits(bytes));
        if let Some((index, _)) = known.min_by_key(|(_, buffer)| buffer.memory.len()) {
            return Ok(Buffer { pass, ..buffers.free.swap_remove(index) });
        }
        // Passes may differ in length: buffers that only the pass before needed are freed first.
        buffers.drop_unused(|| self.settle());
        let memory = match Pinned::new(self.device.cuda_stream().context(), bytes) {
            Ok(memory) => memory,
            Err(error) => bail!(
                "cannot allocate {bytes} more bytes of pinned CPU memory for offloaded activations beside the {} in use: {error}",
                buffers.held
            ),
        };
        buffers.held += memory.len();
        Ok(Buffer { memory, pass })
    }

    /// An event at the end of the copies that were started so far.
    fn end(&self) -> Result<CudaEvent> {
        self.copies.record_event(None).map_err(failed("mark the end of a copy"))
    }

    fn give_back(&self, buffer: Buffer) {
        self.buffers().free.push(buffer);
    }

    /// Waits for all copies, which must be done before buffers are freed.
    fn settle(&self) {
        let context = self.copies.context();
        context.record_err(self.copies.synchronize());
    }

    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OffloadStream {
    fn drop(&mut self) {
        self.settle();
    }
}

impl OffloadTransfer {
    /// Frees the GPU memory, as soon as the copy to the CPU has ended.
    pub(super) fn free_gpu_memory(&mut self) -> Result<()> {
        match &self.buffer {
            Some(_) => self.leave(),
            None => Ok(()),
        }
    }

    /// Candle's stream, which frees the memory, waits for the copy first.
    fn leave(&mut self) -> Result<()> {
        let Some((tensor, end)) = self.there.take() else { return Ok(()) };
        let ordered = self.stream.device.cuda_stream().wait(&end).map_err(failed("order streams"));
        drop(tensor);
        ordered
    }

    /// Starts to copy the tensor back, unless it is still on the GPU.
    pub(super) fn fetch(&mut self) -> Result<()> {
        if self.there.is_some() {
            return Ok(());
        }
        let Some(mut buffer) = self.buffer.take() else {
            bail!("an offloaded activation was lost in an earlier failure")
        };
        let count = self.shape.elem_count();
        let copied = match self.dtype {
            DType::BF16 => self.stream.copy_back::<bf16>(&mut buffer, count),
            _ => self.stream.copy_back::<f32>(&mut buffer, count),
        };
        self.stream.give_back(buffer);
        let end = self.stream.end()?;
        self.there = Some((operand::tensor(copied?, &self.shape), end));
        Ok(())
    }

    /// The tensor, ready to be read on candle's stream.
    pub(super) fn tensor(&mut self) -> Result<Tensor> {
        self.fetch()?;
        let Some((tensor, end)) = &self.there else { bail!("an offloaded activation was lost in an earlier failure") };
        if self.buffer.is_none() {
            self.stream.device.cuda_stream().wait(end).map_err(failed("order streams"))?;
        }
        Ok(tensor.clone())
    }
}

impl Drop for OffloadTransfer {
    fn drop(&mut self) {
        // A failure of the device is reported by the next call.
        let _ = self.leave();
        if let Some(buffer) = self.buffer.take() {
            self.stream.give_back(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pinned::test::{is_late, unwatched};
    use candle_core::Device;

    fn stream(device: &Device) -> Arc<OffloadStream> {
        Arc::new(device.as_cuda_device().and_then(OffloadStream::new).expect("a stream"))
    }

    fn numbers(device: &Device, count: usize) -> Tensor {
        let numbers = Tensor::arange(0.0, count as f32, &Device::Cpu).and_then(|x| x.to_device(device));
        numbers.and_then(|x| x * 0.5).expect("numbers")
    }

    #[test]
    fn streams_are_ordered_by_what_is_said_here() -> Result<()> {
        let Some(device) = unwatched() else { return Ok(()) };
        let stream = stream(&device);
        for count in [1, 1000, 5000] {
            // The second tensor takes over the buffer of the first.
            for first in [false, true] {
                // With `first`, copies run before all work that they were not told to wait for.
                let come = || {
                    if first {
                        stream.settle()
                    }
                };
                let mut moving = stream.send(&numbers(&device, count))?;
                come();
                moving.free_gpu_memory()?;
                let other = numbers(&device, count + 1);
                moving.fetch()?;
                come();
                let back = (moving.tensor()? + other.narrow(0, 0, count)?)?;
                drop(moving);
                let wanted: Vec<f32> = (0..count).map(|i| i as f32).collect();
                assert_eq!(back.to_vec1::<f32>()?, wanted);
            }
            // A tensor that was not freed on the GPU is not copied back either.
            let mut moving = stream.send(&numbers(&device, count))?;
            moving.fetch()?;
            assert_eq!(moving.tensor()?.to_vec1::<f32>()?, numbers(&device, count).to_vec1::<f32>()?);
            drop(stream.send(&numbers(&device, count))?);
        }
        Ok(())
    }

    /// On the emulated GPU, work that nothing waits for has not run; on another GPU, nothing can be said.
    #[test]
    fn work_on_the_gpu_waits_for_no_copy() -> Result<()> {
        let Some(device) = unwatched().filter(is_late) else { return Ok(()) };
        let stream = stream(&device);
        let under_way = |moving: &OffloadTransfer| moving.there.as_ref().is_some_and(|(_, end)| !end.is_complete());
        let mut moving = stream.send(&numbers(&device, 3000))?;
        let computed = numbers(&device, 10).to_vec1::<f32>()?;
        assert!(under_way(&moving), "a copy to the CPU held up {} numbers", computed.len());
        moving.free_gpu_memory()?;
        moving.fetch()?;
        let computed = numbers(&device, 10).to_vec1::<f32>()?;
        assert!(under_way(&moving), "a copy from the CPU held up {} numbers", computed.len());
        assert_eq!(moving.tensor()?.to_vec1::<f32>()?.len(), 3000);
        assert!(!under_way(&moving));
        Ok(())
    }
}
