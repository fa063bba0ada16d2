//! Attention on NVIDIA GPUs: one portable kernel for every shape, mask, score and type, compiled for the shapes at hand.
//!
//! Tensors come from and go to the memory of the CPU, call by call, and while a kernel runs its caller drives communication
//! on; copies do not. The driver and the compiler are loaded when the first
//! [`Gpu`] is opened, so a program with this feature also runs where neither is installed.

mod backward;
mod forward;
mod job;
mod module;
mod tables;

use super::{Data, Progress, View};
use crate::error::{Error, Result};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, LaunchConfig, PushKernelArg, sys};
use job::Job;
use module::{Modules, Options};
use std::sync::Arc;

/// A GPU, and the kernels that were compiled for it; kernels of several ranks may share it.
#[derive(Clone)]
pub struct Gpu(Arc<Shared>);

struct Shared {
    number: usize,
    name: String,
    context: Arc<CudaContext>,
    modules: Modules,
    /// Most bytes of shared memory of a block of threads.
    shared_memory: usize,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} ({})", self.0.number, self.0.name)
    }
}

impl Gpu {
    /// GPUs of this machine; none where there is no driver.
    ///
    /// # Errors
    /// A driver that cannot be used.
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

    /// The GPU of this number.
    ///
    /// # Errors
    /// No driver, no such GPU, or no compiler for kernels.
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
        // SAFETY: the number is where the call may write.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(failed(&device, "ask for its driver"))?;
        module::check_compiler(driver / 1000).map_err(|message| missing(&message))?;
        let context = CudaContext::new(number).map_err(failed(&device, "open"))?;
        // SAFETY: a stream uses only what was made on it, so cudarc need not order streams by events.
        unsafe { context.disable_event_tracking() };
        let attribute = |what| context.attribute(what).map_err(failed(&device, "ask for its limits"));
        let shared_memory = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let capability = context.compute_capability().map_err(failed(&device, "ask for its architecture"))?;
        Ok(Self(Arc::new(Shared {
            number,
            name: context.name().map_err(failed(&device, "ask for its name"))?,
            modules: Modules::new(context.clone(), capability),
            shared_memory: usize::try_from(shared_memory).unwrap_or(0),
            context,
        })))
    }

    fn failed(&self, operation: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error + use<> {
        failed(&format!("{self:?}"), operation)
    }
}

fn driver_is_there() -> bool {
    // SAFETY: loads the driver's library, whose initialisers are its own.
    unsafe { sys::is_culib_present() }
}

fn failed(device: &str, operation: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error + use<> {
    let device = device.to_string();
    move |error| {
        let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |name| name.to_string_lossy().into());
        let text = error.error_string().map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned());
        Error::Device { device: device.clone(), operation, message: format!("{text} ({name})") }
    }
}

/// A rank's share of a GPU: a stream of its own.
pub(super) struct Cuda {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    pub(super) progress: Option<Progress>,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gpu.fmt(f)
    }
}

impl Cuda {
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        let stream = gpu.0.context.new_stream().map_err(gpu.failed("make a stream"))?;
        Ok(Self { gpu: gpu.clone(), stream, progress: None })
    }

    /// Row sums of `out * d_out`, `[H, Tq]`.
    pub(super) fn delta(&self, out: View, d_out: View) -> Result<Vec<f32>> {
        let rows = d_out.tokens * d_out.heads;
        let mut sums = vec![0.0; rows];
        if rows == 0 {
            return Ok(sums);
        }
        let options = Options::delta(&out, &d_out);
        let (out_data, d_out_data) = (self.upload(&out)?, self.upload(&d_out)?);
        let result = self.zeros::<f32>(rows)?;
        let job = Job {
            q: job::View::new(&out, self.at(&out_data)),
            d_out: job::View::new(&d_out, self.at(&d_out_data)),
            out: self.at(&result),
            queries: count(d_out.tokens, "queries")?,
            heads: count(d_out.heads, "heads")?,
            ..Job::default()
        };
        let blocks = count(rows.div_ceil(options.threads), "blocks of rows")?;
        self.launch(&options, "delta", &job, (blocks, 1))?;
        self.download(&result, &mut sums)?;
        Ok(sums)
    }

    /// Runs a kernel with `grid` blocks of threads to its end, while communication goes on.
    fn launch(&self, options: &Options, name: &'static str, job: &Job, grid: (i32, i32)) -> Result<()> {
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
        let module = self.gpu.0.modules.get(options, &format!("{:?}", self.gpu))?;
        let function = module.load_function(name).map_err(self.gpu.failed("find a kernel"))?;
        let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(most, job::checked(bytes)).map_err(self.gpu.failed("ask for shared memory"))?;
        let config = LaunchConfig {
            grid_dim: (grid.0.unsigned_abs(), grid.1.unsigned_abs(), 1),
            block_dim: (options.threads as u32, 1, 1),
            shared_mem_bytes: bytes as u32,
        };
        // SAFETY: the kernel reads and writes what the job's pointers and sizes say, which were made for each other; its
        // options are those it was compiled with.
        let started = unsafe { self.stream.launch_builder(&function).arg(job).launch(config) };
        started.map_err(self.gpu.failed("start a kernel"))?;
        let Some(progress) = &self.progress else { return Ok(()) };
        let end = self.stream.record_event(None).map_err(self.gpu.failed("mark the end of a kernel"))?;
        while !end.try_is_complete().map_err(self.gpu.failed("compute"))? {
            progress();
            std::thread::yield_now();
        }
        progress();
        Ok(())
    }

    fn upload_each<const N: usize>(&self, views: [&View; N]) -> Result<[CudaSlice<u8>; N]> {
        let uploaded = views.into_iter().map(|view| self.upload(view)).collect::<Result<Vec<_>>>()?;
        uploaded.try_into().map_err(|_| Error::Device {
            device: format!("{:?}", self.gpu),
            operation: "copy to the GPU",
            message: format!("not {N} tensors"),
        })
    }

    /// The elements of a tensor, as they are stored. On the GPU nothing stops a row that leaves them, so none may.
    fn upload(&self, view: &View) -> Result<CudaSlice<u8>> {
        let View { tokens, heads, dim, token_stride, head_stride, data } = *view;
        let last = |count: usize, stride: usize| (count - 1).checked_mul(stride);
        let end = match tokens == 0 || heads == 0 {
            true => Some(0),
            false => last(tokens, token_stride)
                .zip(last(heads, head_stride))
                .and_then(|(token, head)| token.checked_add(head)?.checked_add(dim)),
        };
        if end.is_none_or(|end| end > data.len()) {
            return Err(Error::Device {
                device: format!("{:?}", self.gpu),
                operation: "copy to the GPU",
                message: format!(
                    "a tensor [{tokens}, {heads}, {dim}] with strides {token_stride} and {head_stride} leaves its {} elements",
                    data.len()
                ),
            });
        }
        match data {
            Data::F32(data) => self.upload_all(bytemuck::cast_slice(data)),
            Data::Bf16(data) => self.upload_all(bytemuck::cast_slice(data)),
            Data::F16(data) => self.upload_all(bytemuck::cast_slice(data)),
        }
    }

    /// At least one element, so that there is a pointer.
    fn upload_all<T: cudarc::driver::DeviceRepr + Default + Clone>(&self, data: &[T]) -> Result<CudaSlice<T>> {
        let one = [T::default()];
        let data = if data.is_empty() { &one } else { data };
        self.stream.clone_htod(data).map_err(self.gpu.failed("copy to the GPU"))
    }

    fn zeros<T: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> Result<CudaSlice<T>> {
        self.stream.alloc_zeros(len.max(1)).map_err(self.gpu.failed("take memory"))
    }

    /// Waits for all that was started, and copies.
    fn download<T: cudarc::driver::DeviceRepr>(&self, from: &CudaSlice<T>, to: &mut [T]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.stream.memcpy_dtoh(&from.slice(..to.len()), to).map_err(self.gpu.failed("copy from the GPU"))?;
        self.stream.synchronize().map_err(self.gpu.failed("compute"))
    }

    /// Where a buffer lies on the GPU.
    fn at<T>(&self, buffer: &CudaSlice<T>) -> u64 {
        use cudarc::driver::DevicePtr;
        buffer.device_ptr(&self.stream).0
    }
}

/// A size as kernels count.
fn count(size: usize, what: &'static str) -> Result<i32> {
    i32::try_from(size).map_err(|_| Error::Device {
        device: "CUDA".into(),
        operation: "attention",
        message: format!("{size} {what} in one call; a kernel counts to {}", i32::MAX),
    })
}
