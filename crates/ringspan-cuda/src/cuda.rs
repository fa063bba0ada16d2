//! A rank's share of a GPU: a stream, waits on it, and launches of kernels.

use crate::gpu::Gpu;
use crate::kernel_params;
use crate::options::Options;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg, sys};
use ringspan::kernel::Progress;
use ringspan::{Error, Result};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// A rank's share of a GPU, with its own stream.
pub(crate) struct Cuda {
    pub(crate) gpu: Gpu,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) progress: Option<Progress>,
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
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let stream = gpu.0.context.new_stream().map_err(gpu.failed("make a stream"))?;
        Ok(Self { gpu: gpu.clone(), stream, progress: None, steps: Mutex::default() })
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Marks the end of a step of a plan, and waits if the GPU is more than [`STEPS`] steps behind.
    pub(crate) fn step(&self) -> Result<()> {
        let end = self.stream.record_event(None).map_err(self.gpu.failed("mark the end of a step"))?;
        let before = {
            let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
            steps.push_back(end);
            if steps.len() > STEPS { steps.pop_front() } else { None }
        };
        before.map_or(Ok(()), |event| self.wait_for(&event))
    }

    /// Waits for all started work, while communication goes on.
    pub(crate) fn wait(&self) -> Result<()> {
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

    /// Starts a kernel with `grid` thread blocks.
    pub(crate) fn launch<J: DeviceRepr>(
        &self,
        options: &Options,
        name: &'static str,
        params: &J,
        grid: (i32, i32),
    ) -> Result<()> {
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
        function
            .set_attribute(most, kernel_params::checked(bytes))
            .map_err(self.gpu.failed("ask for shared memory"))?;
        let config = LaunchConfig {
            grid_dim: (grid.0.unsigned_abs(), grid.1.unsigned_abs(), 1),
            block_dim: (options.threads as u32, 1, 1),
            shared_mem_bytes: bytes as u32,
        };
        // SAFETY: the kernel accesses what the params's pointers and sizes describe, which belong together; it was compiled
        // with these options.
        let started = unsafe { self.stream.launch_builder(&function).arg(params).launch(config) };
        started.map(drop).map_err(self.gpu.failed("start a kernel"))
    }

    /// Copies data to the GPU; at least one element, so that there is a valid pointer.
    pub(crate) fn upload_all<T: DeviceRepr + Default + Clone>(&self, data: &[T]) -> Result<CudaSlice<T>> {
        let one = [T::default()];
        let data = if data.is_empty() { &one } else { data };
        self.gpu.0.uploaded.fetch_add(size_of_val(data) as u64, Ordering::Relaxed);
        self.stream.clone_htod(data).map_err(self.gpu.failed("copy to the GPU"))
    }

    pub(crate) fn zeros<T: DeviceRepr + cudarc::driver::ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>> {
        self.stream.alloc_zeros(len.max(1)).map_err(self.gpu.failed("take memory"))
    }

    /// The address of a buffer on the GPU.
    pub(crate) fn at<T>(&self, buffer: &CudaSlice<T>) -> u64 {
        buffer.device_ptr(&self.stream).0
    }
}

/// A size as an i32, in which kernels count.
pub(crate) fn count(size: usize, what: &'static str) -> Result<i32> {
    i32::try_from(size).map_err(|_| Error::Device {
        device: "CUDA".into(),
        operation: "attention",
        message: format!("{size} {what} in one call; a kernel counts to {}", i32::MAX),
    })
}
