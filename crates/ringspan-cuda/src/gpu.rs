//! A GPU of this machine, and the kernels compiled for it.

use crate::error::failed;
use crate::library;
use crate::nvrtc::{self, Modules};
use crate::options::{Options, TensorCores};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use ringspan::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A GPU, with the kernels compiled for it; kernels of several ranks may share it.
///
/// ```no_run
/// use ringspan_cuda::Gpu;
///
/// for number in 0..Gpu::count()? {
///     let gpu = Gpu::open(number)?;
///     println!("GPU {number}: {:?}", gpu.kernel()?);             // a kernel, and a stream, for each rank
/// }
/// # Ok::<_, ringspan::Error>(())
/// ```
#[derive(Clone)]
pub struct Gpu(pub(crate) Arc<GpuState>);

pub(crate) struct GpuState {
    pub(crate) number: usize,
    pub(crate) name: String,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) modules: Modules<Options>,
    /// A stream for work that no rank waits for.
    pub(crate) aside: Arc<CudaStream>,
    /// Bytes copied to and from the CPU.
    pub(crate) uploaded: AtomicU64,
    pub(crate) downloaded: AtomicU64,
    /// Bytes in use at the last call of [`Gpu::peak_used`].
    pub(crate) in_use: AtomicU64,
    /// Maximum bytes of shared memory of a thread block.
    pub(crate) shared_memory: usize,
    pub(crate) tensor_cores: TensorCores,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} ({})", self.0.number, self.0.name)
    }
}

impl Gpu {
    /// Number of GPUs of this machine; 0 without a driver.
    ///
    /// # Errors
    /// A driver that fails.
    pub fn count() -> Result<usize> {
        if !driver_is_there() {
            return Ok(0);
        }
        match CudaContext::device_count() {
            Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
            Err(error) => Err(failed("CUDA", "count GPUs")(error)),
        }
    }

    /// Opens the GPU with this number.
    ///
    /// # Errors
    /// No driver, no such GPU, or no compiler for its kernels.
    pub fn open(number: usize) -> Result<Self> {
        let device = format!("GPU {number}");
        let missing =
            |message: &str| Error::Device { device: device.clone(), operation: "open", message: message.into() };
        let count = Self::count()?;
        if !driver_is_there() {
            return Err(missing("no NVIDIA driver was found (libcuda.so.1)"));
        }
        if count == 0 {
            return Err(missing("the driver sees no GPU (CUDA_VISIBLE_DEVICES? a container that was given none?)"));
        }
        if number >= count {
            return Err(missing(&format!("there are {count} GPUs, numbered from 0")));
        }
        let mut driver = 0;
        // SAFETY: the call writes to a valid number.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(failed(&device, "ask for its driver"))?;
        nvrtc::check(driver / 1000).map_err(|message| missing(&message))?;
        let context = CudaContext::new(number).map_err(failed(&device, "open"))?;
        // SAFETY: `Memory` orders the streams of ranks; everything else is used only on the stream it was made on.
        unsafe { context.disable_event_tracking() };
        keep_freed_memory(&context).map_err(failed(&device, "keep memory for later"))?;
        let attribute = |what| context.attribute(what).map_err(failed(&device, "ask for its limits"));
        let shared_memory = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let capability = context.compute_capability().map_err(failed(&device, "ask for its architecture"))?;
        Ok(Self(Arc::new(GpuState {
            number,
            name: context.name().map_err(failed(&device, "ask for its name"))?,
            modules: Modules::default(),
            tensor_cores: TensorCores::of(capability),
            shared_memory: usize::try_from(shared_memory).unwrap_or(0),
            aside: context.new_stream().map_err(failed(&device, "make a stream"))?,
            uploaded: AtomicU64::new(0),
            downloaded: AtomicU64::new(0),
            in_use: AtomicU64::new(0),
            context,
        })))
    }

    /// Bytes copied from the CPU to the GPU, and from the GPU to the CPU, by all ranks since the GPU was opened.
    pub fn copied(&self) -> (u64, u64) {
        (self.0.uploaded.load(Ordering::Relaxed), self.0.downloaded.load(Ordering::Relaxed))
    }

    /// Whether both are the same GPU of this process.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.context.cu_ctx() == other.0.context.cu_ctx()
    }

    pub(crate) fn failed(&self, operation: &'static str) -> impl Fn(DriverError) -> Error + use<> {
        failed(&format!("{self:?}"), operation)
    }
}

fn driver_is_there() -> bool {
    library::is_there(library::DRIVER)
}

/// Makes the device's pool keep freed memory for this process. By default the driver returns it to the device at every
/// synchronisation, and must allocate it again for the next layer.
fn keep_freed_memory(context: &CudaContext) -> std::result::Result<(), DriverError> {
    let has_pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    if context.attribute(has_pools)? == 0 {
        return Ok(());
    }
    context.bind_to_thread()?;
    let (threshold, mut all) = (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
    // SAFETY: the device is that of the context; the attribute is a 64-bit number.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        result::mem_pool::set_attribute(pool, threshold, (&raw mut all).cast())
    }
}
