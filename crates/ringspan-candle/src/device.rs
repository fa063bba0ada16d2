//! The devices on which ranks compute, CPU or GPU, chosen once and passed down, and the type in which models compute on them.

use crate::activation_dtype::ActivationDType;
use crate::nvidia::Gpu;
use crate::pool;
use crate::precision::Precision;
use crate::rounding::rounded;
use crate::slices;
use candle_core::{DType, Device, Tensor};
use ringspan::Kernel;
use ringspan::comm::process_group::ProcessGroup;
use ringspan::error::{Error, Result};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A device as a user names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The CPU.
    #[default]
    Cpu,
    /// The NVIDIA GPU of this number, or with `None` all GPUs, assigned to ranks in turn.
    Cuda(Option<usize>),
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self> {
        let unknown = || Error::Unknown {
            what: "device",
            given: given.into(),
            possible: "cpu, cuda (all GPUs, in turn), cuda:N (one of them)",
        };
        match given.split_once(':') {
            None if given == "cpu" => Ok(Self::Cpu),
            None if given == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", number)) => number.parse().map(|number| Self::Cuda(Some(number))).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

/// The device on which one rank computes.
#[derive(Debug, Clone)]
pub struct RankDevice {
    tensors: Device,
    precision: Precision,
    activations: ActivationDType,
    pub(crate) gpu: Option<Gpu>,
}

impl RankDevice {
    /// The CPU, where models compute in f32.
    pub const CPU: Self =
        Self { tensors: Device::Cpu, precision: Precision::F32, activations: ActivationDType::F32, gpu: None };

    /// The GPU of this number, with a CUDA stream of its own for tensors. Models compute in f32 on it.
    ///
    /// # Errors
    /// No driver, no such GPU, or no compiler for kernels; a program that was built without GPUs.
    pub fn gpu(number: usize) -> Result<Self> {
        // Opening the GPU by the library first gives the most helpful error about what is missing.
        let gpu = Gpu::open(number)?;
        let tensors = Device::new_cuda_with_stream(number).map_err(|error| Error::Device {
            device: format!("{gpu:?}"),
            operation: "open for tensors",
            message: error.to_string(),
        })?;
        Ok(Self { tensors, gpu: Some(gpu), ..Self::CPU })
    }

    /// The device of candle's tensors.
    pub fn tensors(&self) -> &Device {
        &self.tensors
    }

    /// The same device, with models that compute in `precision`.
    #[must_use]
    pub fn computing_in(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The type in which models compute on this device.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The same device, with models that round activations to this type where they multiply them with quantized weights. GPUs decode
    /// quantized weights, and round nothing.
    #[must_use]
    pub fn rounding_activations(self, activations: ActivationDType) -> Self {
        Self { activations, ..self }
    }

    /// The type to which models round activations where they multiply them with quantized weights.
    pub fn activations(&self) -> ActivationDType {
        self.activations
    }

    /// An f32 parameter of a model in the type and on the device in which it is used. For bf16 it is rounded on the CPU, so
    /// that half the bytes are copied. A parameter that has this type and device already is not copied.
    ///
    /// # Errors
    /// A GPU without memory for it; other types.
    pub fn parameter(&self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        if self.precision == Precision::F32 || tensor.dtype() != DType::F32 || !tensor.device().is_cpu() {
            return tensor.to_device(&self.tensors)?.to_dtype(self.precision.dtype());
        }
        slices::values(&tensor.contiguous()?, |values| Tensor::from_vec(rounded(values), tensor.shape(), &self.tensors))
    }

    /// The attention kernel of this device; on the CPU it uses `threads` threads of the rank's [pool], and the pool's
    /// instruction set.
    ///
    /// # Errors
    /// A GPU on which no stream can be created.
    pub fn kernel(&self, threads: usize) -> Result<Kernel> {
        if let Some(gpu) = &self.gpu {
            return gpu.kernel();
        }
        match pool::isa() {
            Some(isa) => Kernel::in_current_pool_with_isa(threads, isa),
            None => Ok(Kernel::in_current_pool(threads)),
        }
    }
}

/// The devices of the ranks of this process, assigned to ranks in turn.
#[derive(Debug, Clone)]
pub struct Devices {
    cpu: RankDevice,
    /// The GPUs; empty where all ranks compute on the CPU.
    gpus: Vec<RankDevice>,
}

impl Default for Devices {
    fn default() -> Self {
        Self::CPU
    }
}

impl Devices {
    /// All ranks compute on the CPU.
    pub const CPU: Self = Self { cpu: RankDevice::CPU, gpus: Vec::new() };

    /// Opens the devices of this name. A process that is one rank passes its number among the ranks of its machine, and opens
    /// one GPU.
    ///
    /// # Errors
    /// No driver, no such GPU, no compiler for kernels; GPUs in a program that was built without them.
    pub fn open(name: DeviceName, local_rank: Option<usize>) -> Result<Self> {
        match name {
            DeviceName::Cpu => Ok(Self::CPU),
            DeviceName::Cuda(number) => Self::open_gpus(number, local_rank),
        }
    }

    fn open_gpus(number: Option<usize>, local_rank: Option<usize>) -> Result<Self> {
        // Where there is no GPU, opening the first one returns an error that says what is missing.
        let count = Gpu::count()?.max(1);
        let numbers = match (number, local_rank) {
            (Some(number), _) => number..number + 1,
            // Each process opens its own GPU only, since an open GPU takes some of its memory for every process.
            (None, Some(rank)) => rank % count..rank % count + 1,
            (None, None) => 0..count,
        };
        Ok(Self { gpus: numbers.map(RankDevice::gpu).collect::<Result<_>>()?, ..Self::CPU })
    }

    /// Connects the ranks' GPUs, if ranks are processes that all compute on GPUs and NCCL works: the returned processes send
    /// tensors from GPU to GPU by NCCL. It also returns a description of how attention's blocks are sent, where there is more
    /// than one way. All ranks must call this; `deadline` is the longest wait for another rank. The returned group must be
    /// dropped before the communicator of `processes`.
    ///
    /// # Errors
    /// Failures of NCCL and of other ranks.
    pub fn connect(&self, processes: &ProcessGroup, deadline: Duration) -> Result<(ProcessGroup, Option<String>)> {
        if let Some(gpu) = self.gpus.first().and_then(|device| device.gpu.as_ref()) {
            return gpu.connect(processes, deadline);
        }
        Ok((processes.clone(), None))
    }

    /// The same devices, with models that compute in `precision`.
    #[must_use]
    pub fn computing_in(self, precision: Precision) -> Self {
        let gpus = self.gpus.into_iter().map(|gpu| gpu.computing_in(precision)).collect();
        Self { cpu: self.cpu.computing_in(precision), gpus }
    }

    /// The same devices, with models that round activations to this type where they multiply them with quantized weights on a CPU.
    #[must_use]
    pub fn rounding_activations(self, activations: ActivationDType) -> Self {
        Self { cpu: self.cpu.rounding_activations(activations), ..self }
    }

    /// The number of devices, at least one: ranks whose numbers are equal modulo this share a device.
    pub fn count(&self) -> usize {
        self.gpus.len().max(1)
    }

    /// The device of this rank.
    pub fn of(&self, rank: usize) -> &RankDevice {
        self.gpus.get(rank % self.count()).unwrap_or(&self.cpu)
    }

    /// All devices.
    pub fn iter(&self) -> impl Iterator<Item = &RankDevice> {
        (0..self.count()).map(|rank| self.of(rank))
    }

    /// Whether ranks compute on GPUs.
    pub fn are_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_read_and_others_refused() {
        let read = |name: &str| name.parse::<DeviceName>().ok();
        for name in ["cpu", "cuda", "cuda:3"] {
            assert_eq!(read(name).map(|read| read.to_string()).as_deref(), Some(name));
        }
        assert_eq!((read("cuda"), read("cuda:3")), (Some(DeviceName::Cuda(None)), Some(DeviceName::Cuda(Some(3)))));
        for wrong in ["gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1"] {
            let refused = wrong.parse::<DeviceName>().expect_err("no device").to_string();
            assert!(refused.contains("cuda:N") && refused.contains(wrong), "{refused}");
        }
    }

    #[test]
    fn without_gpus_every_rank_has_the_cpu() {
        let devices = Devices::open(DeviceName::Cpu, Some(3)).expect("a CPU");
        assert_eq!((devices.count(), devices.iter().count(), devices.are_gpus()), (1, 1, false));
        assert!((0..5).all(|rank| devices.of(rank).tensors().is_cpu()));
        for precision in [Precision::F32, Precision::Bf16] {
            assert_eq!(devices.clone().computing_in(precision).of(2).precision(), precision);
        }
    }
}
