//! Memory of a GPU: which rank owns it, and when others may read it.
//!
//! A rank writes on its own stream. When it sends an array, an event marks the point that its stream must have reached, and
//! the streams of readers wait for it (`cross_stream.rs`). Memory that no other rank has read is freed on its own stream, other
//! memory on a stream that waits for all readers, so that no rank's work waits for them. (cudarc can order streams too, but
//! remembers only one reader of a buffer, and a block of keys has several.)

use crate::cross_stream::{CrossStreamAccess, wait_for};
use crate::cuda::Cuda;
use crate::gpu::Gpu;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use ringspan::kernel::{DType, Data, DeviceArray, DeviceMemory, DeviceSlice, DeviceSliceMut};
use ringspan::{Error, Result};
use std::any::Any;
use std::sync::Arc;

/// Memory that was allocated by the driver, or is borrowed.
pub(crate) struct Memory {
    pub(crate) gpu: Gpu,
    pub(crate) at: u64,
    /// The allocation; `None` if the memory is borrowed.
    taken: Option<CudaSlice<u8>>,
    /// The stream on which it is written, and the streams that read it.
    pub(crate) sharing: CrossStreamAccess,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The owner may write to it or free it, after all readers.
        let Some(taken) = self.taken.take() else { return self.sharing.give_back() };
        let (context, readers) = (&self.gpu.0.context, self.sharing.take_readers());
        context.record_err(context.bind_to_thread());
        if readers.is_empty() {
            return drop(taken);
        }
        let aside = &self.gpu.0.aside;
        readers.iter().chain([self.sharing.stream()]).for_each(|stream| wait_for(context, aside, stream));
        let bytes = taken.len();
        // SAFETY: the pointer that one slice gives up is taken by the other, which frees it on its stream.
        drop(unsafe { aside.upgrade_device_ptr::<u8>(taken.leak(), bytes) });
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gpu.fmt(f)
    }
}

impl DeviceMemory for Memory {
    fn download(&self, start: usize, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        let cuda = Cuda::new(&self.gpu)?;
        let at = self.read(&cuda.stream)? + start as u64;
        cuda.download_bytes(at, to)
    }
}

impl Memory {
    /// The memory of an array, if it is of a GPU.
    pub(crate) fn of<'a>(memory: &'a (dyn DeviceMemory + 'static)) -> Option<&'a Self> {
        (memory as &dyn Any).downcast_ref()
    }

    /// The address of the memory, for reads on `stream`, which is made to wait until it is written.
    fn read(&self, stream: &Arc<CudaStream>) -> Result<u64> {
        self.sharing.order(stream).map_err(self.gpu.failed("wait for another rank's stream"))?;
        Ok(self.at)
    }
}

/// An element type that kernels read: f32, bf16 or f16.
pub trait GpuElement: sealed::Sealed {}

mod sealed {
    use ringspan::kernel::Data;

    pub trait Sealed: Sized {
        /// Such elements as `Data` of the CPU.
        fn data(elements: &[Self]) -> Data<'_>;
    }
}

macro_rules! element {
    ($element:ty, $data:ident) => {
        impl GpuElement for $element {}

        impl sealed::Sealed for $element {
            fn data(elements: &[Self]) -> Data<'_> {
                Data::$data(elements)
            }
        }
    };
}

element!(f32, F32);
element!(half::bf16, Bf16);
element!(half::f16, F16);

/// Numbers of another library on a GPU, borrowed for a call.
///
/// This rank's reads wait for work that was started before on the slice's stream, and work that is started there after
/// the borrow waits for this rank. These waits are on the GPU, not on the CPU.
#[derive(Debug)]
pub struct BorrowedSlice<'a> {
    array: DeviceArray,
    _lender: std::marker::PhantomData<&'a ()>,
}

impl BorrowedSlice<'_> {
    /// Borrows the elements, for views.
    pub fn data(&self) -> DeviceSlice<'_> {
        self.array.data()
    }
}

impl Gpu {
    /// Borrows a slice that another library (cudarc, candle) holds on this GPU. Nothing is copied, and the CPU does not
    /// wait: work that was started before on the slice's stream precedes the reads of kernels, and work that is started
    /// there after the borrow follows them.
    ///
    /// # Errors
    /// A slice on another GPU; failures of the driver.
    pub fn borrow<'a, T: GpuElement>(&self, slice: &'a CudaSlice<T>) -> Result<BorrowedSlice<'a>> {
        if slice.context().cu_ctx() != self.0.context.cu_ctx() {
            return Err(Error::Device {
                device: format!("{self:?}"),
                operation: "borrow",
                message: format!("{} elements that lie on GPU {}", slice.len(), slice.ordinal()),
            });
        }
        let stream = slice.stream().clone();
        let (at, read) = slice.device_ptr(&stream);
        drop(read);
        let sharing = CrossStreamAccess::new(stream.clone());
        sharing.share().map_err(self.failed("mark what is lent"))?;
        let memory = Arc::new(Memory { gpu: self.clone(), at, taken: None, sharing });
        let array = DeviceArray::new(memory, T::data(&[]).dtype(), slice.len());
        Ok(BorrowedSlice { array, _lender: std::marker::PhantomData })
    }
}

impl Cuda {
    /// An array with uninitialised elements.
    pub(crate) fn array(&self, dtype: DType, len: usize) -> Result<DeviceArray> {
        let bytes = (len * dtype.width()).max(1);
        // SAFETY: every caller writes the array before it is read.
        let taken = unsafe { self.stream.alloc::<u8>(bytes) }.map_err(self.gpu.failed("take memory"))?;
        Ok(self.own(taken, dtype, len))
    }

    /// Makes an array of memory that was allocated on this rank's stream.
    pub(crate) fn own(&self, taken: CudaSlice<u8>, dtype: DType, len: usize) -> DeviceArray {
        let (gpu, sharing, at) = (self.gpu.clone(), CrossStreamAccess::new(self.stream.clone()), self.at(&taken));
        DeviceArray::new(Arc::new(Memory { gpu, at, taken: Some(taken), sharing }), dtype, len)
    }

    /// The memory of elements; an error unless it is of a GPU.
    pub(crate) fn memory<'a>(&self, data: DeviceSlice<'a>) -> Result<&'a Memory> {
        Memory::of(data.memory()).ok_or_else(|| self.wrong(format!("{data:?} are not on a GPU")))
    }

    /// The address of elements that this rank's stream is going to read, which is made to wait until they are written. They
    /// may be on another GPU.
    pub(crate) fn read_anywhere(&self, data: DeviceSlice) -> Result<u64> {
        Ok(self.memory(data)?.read(&self.stream)? + data.start() as u64)
    }

    /// The address of elements on this GPU that this rank is going to read.
    pub(crate) fn read(&self, data: DeviceSlice) -> Result<u64> {
        if !self.memory(data)?.gpu.is(&self.gpu) {
            return Err(self.wrong(format!("it cannot read {data:?}")));
        }
        self.read_anywhere(data)
    }

    /// The address of elements, for writes, which only the owner's stream may do.
    pub(crate) fn write(&self, to: &mut DeviceSliceMut) -> Result<u64> {
        let memory = self.memory(to.data())?;
        if self.stream != *memory.sharing.stream() {
            return Err(Error::Device {
                device: format!("{:?}", memory.gpu),
                operation: "write",
                message: format!("{} elements that belong to another rank", to.len()),
            });
        }
        Ok(memory.at + to.data().start() as u64)
    }

    /// Lets other ranks read the elements written so far; after this they must not be written to any more.
    pub(crate) fn share(&self, array: &DeviceArray) -> Result<()> {
        let memory = self.memory(array.data())?;
        // If another rank sent the array, that rank has already called this.
        if self.stream != *memory.sharing.stream() {
            return Ok(());
        }
        memory.sharing.share().map_err(self.gpu.failed("mark what is sent"))
    }
}
