//! Activation offload: activations that layers store for the backward pass are kept in CPU memory instead of GPU
//! memory.
//!
//! A GPU copies between its memory and pinned CPU memory while it computes. The activations of layer i are copied to the CPU
//! while layer i + 1 is computed, and copied back while layer i + 1 is differentiated. So the activations of at most
//! [`RESIDENT_LAYERS`] layers are on the GPU at any time: those of the current layer, and those of one that is being copied. The
//! activations of the last [`RESIDENT_LAYERS`] layers stay, since they are needed again at once. No bit changes, and no CPU thread
//! waits for a copy.

#[cfg_attr(not(feature = "cuda"), path = "offload/without_gpu.rs")]
mod offload_stream;

use crate::device::RankDevice;
use candle_core::{Result, Tensor};
use offload_stream::{OffloadStream, OffloadTransfer};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Number of layers whose activations are on the GPU at a time.
pub const RESIDENT_LAYERS: usize = 2;

/// Offloads the activations of one rank, pass after pass; pinned buffers are used again by the next pass.
pub struct Offload {
    stream: Arc<OffloadStream>,
    pass: Mutex<OffloadPass>,
}

/// One pass through the layers, forward and backward.
#[derive(Default)]
struct OffloadPass {
    /// The offloaded tensors of each layer, as long as something will read them.
    sent: Vec<Vec<Weak<Mutex<OffloadTransfer>>>>,
    /// The current layer.
    at: usize,
}

/// An offloaded tensor. Clones refer to the same tensor.
#[derive(Clone)]
pub(crate) struct OffloadedActivation(Arc<Mutex<OffloadTransfer>>);

impl Offload {
    /// An offload of the activations of the rank that computes on this GPU.
    ///
    /// # Errors
    /// A CPU, the only kind of device without the feature `cuda`; a GPU on which no stream can be created.
    pub fn new(device: &RankDevice) -> ringspan::Result<Self> {
        let failed = |message: String| ringspan::Error::Device {
            device: format!("{:?}", device.tensors()),
            operation: "offload activations",
            message,
        };
        let gpu = device.tensors().as_cuda_device().map_err(|_| failed(ON_CPU.into()))?;
        let stream = Arc::new(OffloadStream::new(gpu).map_err(|error| failed(error.to_string()))?);
        Ok(Self { stream, pass: Mutex::default() })
    }

    /// Begins a new pass through this many layers. Pinned memory that the pass before did not use is freed.
    pub fn begin(&self, layers: usize) {
        *self.pass() = OffloadPass { sent: vec![Vec::new(); layers], at: 0 };
        self.stream.begin();
    }

    /// Announces that `layer` is computed from here on; layers are announced in ascending order.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn forward(&self, layer: usize) -> Result<()> {
        let mut pass = self.pass();
        pass.at = layer;
        // The activations of this layer had the time of one layer to be copied, so their GPU memory is freed.
        pass.sent(layer.checked_sub(RESIDENT_LAYERS)).try_for_each(|moving| lock(&moving).free_gpu_memory())
    }

    /// Announces that `layer` is differentiated from here on; layers are announced in descending order. The activations of
    /// the layer before it are copied back.
    ///
    /// # Errors
    /// A GPU without memory for the activations.
    pub fn backward(&self, layer: usize) -> Result<()> {
        self.pass().sent(layer.checked_sub(1)).try_for_each(|moving| lock(&moving).fetch())
    }

    /// Offloads a contiguous tensor on a GPU; `None` if the activations of the current layer stay.
    ///
    /// # Errors
    /// No memory of the CPU that the driver can pin; failures of the device.
    pub(crate) fn send(&self, tensor: &Tensor) -> Result<Option<OffloadedActivation>> {
        let mut pass = self.pass();
        let at = pass.at;
        if at + RESIDENT_LAYERS >= pass.sent.len() || tensor.elem_count() == 0 {
            return Ok(None);
        }
        let moving = Arc::new(Mutex::new(self.stream.send(tensor)?));
        pass.sent[at].push(Arc::downgrade(&moving));
        Ok(Some(OffloadedActivation(moving)))
    }

    /// Bytes of pinned CPU memory, in use or free.
    pub fn held(&self) -> usize {
        self.stream.held()
    }

    fn pass(&self) -> MutexGuard<'_, OffloadPass> {
        lock(&self.pass)
    }
}

impl OffloadPass {
    /// The offloaded tensors of a layer, if there is such a layer, that something will read.
    fn sent(&self, layer: Option<usize>) -> impl Iterator<Item = Arc<Mutex<OffloadTransfer>>> {
        layer.and_then(|layer| self.sent.get(layer)).into_iter().flatten().filter_map(Weak::upgrade)
    }
}

impl OffloadedActivation {
    /// The tensor on the GPU. Candle's stream waits for the copy if it is under way; the copy is started if it was not.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        lock(&self.0).tensor()
    }
}

impl fmt::Debug for OffloadedActivation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor that was sent away")
    }
}

impl fmt::Debug for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of activations on the CPU", self.held())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const ON_CPU: &str = "there is no GPU whose activations could wait in the memory of the CPU";
