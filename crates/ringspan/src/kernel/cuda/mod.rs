//! Attention on NVIDIA GPUs: a portable kernel for every shape, mask, score and type, and two kernels for tensor cores,
//! which multiply bf16 by warps and by Hopper's warpgroups. All are compiled at run time for the shapes of the call.
//!
//! Calls start work and return, unless they copy numbers to the CPU; a wait drives communication. The driver and the
//! compiler are loaded when the first [`Gpu`] is opened, so a program with this feature also runs on machines without them.

mod backend;
mod backward;
mod connect;
mod cross_stream;
mod forward;
mod job;
mod library;
mod memory;
mod moves;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod nvrtc;
mod options;
mod room;
mod shared_slice;
mod tables;

pub use cross_stream::GpuSource;
pub use memory::{BorrowedSlice, GpuElement};
pub use room::GpuMemory;
pub use shared_slice::SharedSlice;

use super::{DeviceArray, Kernel, Progress, View};
use crate::error::{Error, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, sys};
use job::Job;
use nvrtc::Modules;
use options::{Options, TensorCores};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A GPU, with the kernels compiled for it; kernels of several ranks may share it.
#[derive(Clone)]
pub struct Gpu(Arc<Shared>);

struct Shared {
    number: usize,
    name: String,
    context: Arc<CudaContext>,
    modules: Modules<Options>,
    /// A stream for work that no rank waits for.
    aside: Arc<CudaStream>,
    /// Bytes copied to and from the CPU.
    uploaded: AtomicU64,
    downloaded: AtomicU64,
    /// Bytes in use at the last call of [`Gpu::most_used`].
    in_use: AtomicU64,
    /// Maximum bytes of shared memory of a thread block.
    shared_memory: usize,
    tensor_cores: TensorCores,
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
        room::keep(&context).map_err(failed(&device, "keep memory for later"))?;
        let attribute = |what| context.attribute(what).map_err(failed(&device, "ask for its limits"));
        let shared_memory = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let capability = context.compute_capability().map_err(failed(&device, "ask for its architecture"))?;
        Ok(Self(Arc::new(Shared {
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

    /// Bytes copied from the CPU to the GPU, and from the GPU to the CPU, by all ranks since the GPU was opened.
    pub fn copied(&self) -> (u64, u64) {
        (self.0.uploaded.load(Ordering::Relaxed), self.0.downloaded.load(Ordering::Relaxed))
    }

    /// Whether both are the same GPU of this process.
    fn is(&self, other: &Self) -> bool {
        self.0.context.cu_ctx() == other.0.context.cu_ctx()
    }

    fn failed(&self, operation: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error + use<> {
        failed(&format!("{self:?}"), operation)
    }
}

fn driver_is_there() -> bool {
    library::is_there(library::DRIVER)
}

fn failed(device: &str, operation: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error + use<> {
    let device = device.to_string();
    move |error| {
        let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |name| name.to_string_lossy().into());
        let text = error.error_string().map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned());
        Error::Device { device: device.clone(), operation, message: format!("{text} ({name})") }
    }
}

/// A rank's share of a GPU, with its own stream.
pub(super) struct Cuda {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    progress: Option<Progress>,
    /// Events that mark the ends of the last steps of a plan.
    steps: Mutex<VecDeque<CudaEvent>>,
}

/// Number of steps that are started before the first of them ends: one computes, the next waits for it. More would need
/// memory.
const STEPS: usize = 2;

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gpu.fmt(f)
    }
}

impl Cuda {
    fn new(gpu: &Gpu) -> Result<Self> {
        let stream = gpu.0.context.new_stream().map_err(gpu.failed("make a stream"))?;
        Ok(Self { gpu: gpu.clone(), stream, progress: None, steps: Mutex::default() })
    }

    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The GPU's tensor cores, or none if they cannot read these tensors.
    fn tensor_cores(&self, views: &[(&View, &job::View)]) -> TensorCores {
        let in_eights = |(view, at): &(&View, &job::View)| at.is_in_eights(view.dim, view.data.dtype().width() as u64);
        if views.iter().all(in_eights) { self.gpu.0.tensor_cores } else { TensorCores::None }
    }

    /// Computes the row sums of `out * d_out`, `[H, Tq]`.
    fn delta(&self, out: &View, d_out: &View) -> Result<DeviceArray> {
        let rows = d_out.tokens * d_out.heads;
        let mut sums = self.filled(rows, 0.0)?;
        if rows == 0 {
            return Ok(sums);
        }
        let options = Options::delta(out, d_out);
        let job = Job {
            q: self.view(out)?,
            d_out: self.view(d_out)?,
            out: self.write(&mut sums.all_mut())?,
            queries: count(d_out.tokens, "queries")?,
            heads: count(d_out.heads, "heads")?,
            ..Job::default()
        };
        let blocks = count(rows.div_ceil(options.threads), "blocks of rows")?;
        self.launch(&options, "delta", &job, (blocks, 1))?;
        Ok(sums)
    }

    /// Marks the end of a step of a plan, and waits if the GPU is more than [`STEPS`] steps behind.
    fn step(&self) -> Result<()> {
        let end = self.stream.record_event(None).map_err(self.gpu.failed("mark the end of a step"))?;
        let before = {
            let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
            steps.push_back(end);
            if steps.len() > STEPS { steps.pop_front() } else { None }
        };
        before.map_or(Ok(()), |event| self.wait_for(&event))
    }

    /// Waits for all started work, while communication goes on.
    fn wait(&self) -> Result<()> {
        self.wait_for(&self.stream.record_event(None).map_err(self.gpu.failed("mark what was started"))?)
    }

    fn wait_for(&self, event: &CudaEvent) -> Result<()> {
        while !event.try_is_complete().map_err(self.gpu.failed("compute"))? {
            if let Some(progress) = &self.progress {
                progress();
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn view(&self, view: &View) -> Result<job::View> {
        Ok(job::View::new(view, self.tensor(view)?))
    }

    /// The kernel's view of an optional tensor; null if it is missing.
    fn view_of(&self, view: Option<&View>) -> Result<job::View> {
        view.map_or(Ok(job::View::default()), |view| self.view(view))
    }

    /// Starts a kernel with `grid` thread blocks.
    fn launch<J: DeviceRepr>(&self, options: &Options, name: &'static str, job: &J, grid: (i32, i32)) -> Result<()> {
        let bytes = options.shared_bytes();
        if bytes > self.gpu.0.shared_memory {
            return Err(Error::Device {
                device: format!("{:?}", self.gpu),
                operation: "attention",
                message: format!(
                    "head widths {} and {} need {bytes} bytes of shared memory, and a block of threads has {}",
                    options.dim, options.v_dim, self.gpu.0.shared_memory
                ),
            });
        }
        let module = self.gpu.0.modules.get(options.clone(), &self.gpu.0.context, || options.source())?;
        let function = module.load_function(name).map_err(self.gpu.failed("find a kernel"))?;
        let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(most, job::checked(bytes)).map_err(self.gpu.failed("ask for shared memory"))?;
        let config = LaunchConfig {
            grid_dim: (grid.0.unsigned_abs(), grid.1.unsigned_abs(), 1),
            block_dim: (options.threads as u32, 1, 1),
            shared_mem_bytes: bytes as u32,
        };
        // SAFETY: the kernel accesses what the job's pointers and sizes describe, which belong together; it was compiled
        // with these options.
        let started = unsafe { self.stream.launch_builder(&function).arg(job).launch(config) };
        started.map(drop).map_err(self.gpu.failed("start a kernel"))
    }

    /// Copies data to the GPU; at least one element, so that there is a valid pointer.
    fn upload_all<T: DeviceRepr + Default + Clone>(&self, data: &[T]) -> Result<CudaSlice<T>> {
        let one = [T::default()];
        let data = if data.is_empty() { &one } else { data };
        self.gpu.0.uploaded.fetch_add(size_of_val(data) as u64, Ordering::Relaxed);
        self.stream.clone_htod(data).map_err(self.gpu.failed("copy to the GPU"))
    }

    fn zeros<T: DeviceRepr + cudarc::driver::ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>> {
        self.stream.alloc_zeros(len.max(1)).map_err(self.gpu.failed("take memory"))
    }

    /// The address of a buffer on the GPU.
    fn at<T>(&self, buffer: &CudaSlice<T>) -> u64 {
        use cudarc::driver::DevicePtr;
        buffer.device_ptr(&self.stream).0
    }
}

/// A size as an i32, in which kernels count.
fn count(size: usize, what: &'static str) -> Result<i32> {
    i32::try_from(size).map_err(|_| Error::Device {
        device: "CUDA".into(),
        operation: "attention",
        message: format!("{size} {what} in one call; a kernel counts to {}", i32::MAX),
    })
}
