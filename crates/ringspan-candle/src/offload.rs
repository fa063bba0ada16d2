//! Activation offload: what layers keep for the backward pass waits in memory of the CPU, not in that of the GPU.
//!
//! A GPU copies between its memory and pinned memory of the CPU by itself, while it computes. What layer i keeps leaves while
//! layer i + 1 is computed, and comes back while layer i + 1 is differentiated. So what [`STAYING`] layers keep is on the GPU
//! at any time, that of the layer at hand, and that of one that leaves or arrives; of the last [`STAYING`] layers nothing
//! leaves, since it would be wanted again at once. No bit changes, and no CPU waits for a copy.

#[cfg(feature = "cuda")]
mod moving;

use crate::device::RankDevice;
use candle_core::{Result, Tensor};
#[cfg(feature = "cuda")]
use moving::{Mover, Moving};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Layers that have what they keep on the GPU at a time.
pub const STAYING: usize = 2;

/// Moves what one rank's layers keep, pass after pass; buffers stay for the next pass.
pub struct Offload {
    mover: Arc<Mover>,
    pass: Mutex<Pass>,
}

/// A pass through the layers and back.
#[derive(Default)]
struct Pass {
    /// What each layer has sent away, as long as somebody waits for it.
    sent: Vec<Vec<Weak<Mutex<Moving>>>>,
    /// The layer that is computed.
    at: usize,
}

/// A tensor that was sent away. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Away(Arc<Mutex<Moving>>);

impl Offload {
    /// For the rank that computes on this GPU.
    ///
    /// # Errors
    /// A CPU; a driver that gives no stream.
    #[cfg(feature = "cuda")]
    pub fn new(device: &RankDevice) -> ringspan::Result<Self> {
        let failed = |message: String| ringspan::Error::Device {
            device: format!("{:?}", device.tensors()),
            operation: "offload activations",
            message,
        };
        let gpu = device.tensors().as_cuda_device().map_err(|_| failed(ON_CPU.into()))?;
        let mover = Arc::new(Mover::new(gpu).map_err(|error| failed(error.to_string()))?);
        Ok(Self { mover, pass: Mutex::default() })
    }

    /// For the rank that computes on this GPU.
    ///
    /// # Errors
    /// A CPU, which is all that there is without feature `cuda`.
    #[cfg(not(feature = "cuda"))]
    pub fn new(device: &RankDevice) -> ringspan::Result<Self> {
        let device = format!("{:?}", device.tensors());
        Err(ringspan::Error::Device { device, operation: "offload activations", message: ON_CPU.into() })
    }

    /// A new pass through so many layers. What the one before did not use of the memory of the CPU is given back.
    pub fn begin(&self, layers: usize) {
        *self.pass() = Pass { sent: vec![Vec::new(); layers], at: 0 };
        self.mover.begin();
    }

    /// From here on `layer` is computed, after the one before it.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn forward(&self, layer: usize) -> Result<()> {
        let mut pass = self.pass();
        pass.at = layer;
        // That has had the time of a layer to leave.
        pass.sent(layer.checked_sub(STAYING)).try_for_each(|moving| lock(&moving).let_go())
    }

    /// From here on `layer` is differentiated, after the one behind it: what the one before it has sent away comes back.
    ///
    /// # Errors
    /// A GPU without memory for it.
    pub fn backward(&self, layer: usize) -> Result<()> {
        self.pass().sent(layer.checked_sub(1)).try_for_each(|moving| lock(&moving).fetch())
    }

    /// Sends a contiguous tensor of a GPU away, if those of the layer that is computed leave.
    ///
    /// # Errors
    /// No memory of the CPU that the driver can pin; failures of the device.
    pub(crate) fn send(&self, tensor: &Tensor) -> Result<Option<Away>> {
        let mut pass = self.pass();
        let at = pass.at;
        if at + STAYING >= pass.sent.len() || tensor.elem_count() == 0 {
            return Ok(None);
        }
        let moving = Arc::new(Mutex::new(self.mover.send(tensor)?));
        pass.sent[at].push(Arc::downgrade(&moving));
        Ok(Some(Away(moving)))
    }

    /// Bytes of the memory of the CPU that are held, in use or not.
    pub fn held(&self) -> usize {
        self.mover.held()
    }

    fn pass(&self) -> MutexGuard<'_, Pass> {
        lock(&self.pass)
    }
}

impl Pass {
    /// What a layer has sent away, if there is such a layer, and somebody still waits for it.
    fn sent(&self, layer: Option<usize>) -> impl Iterator<Item = Arc<Mutex<Moving>>> {
        layer.and_then(|layer| self.sent.get(layer)).into_iter().flatten().filter_map(Weak::upgrade)
    }
}

impl Away {
    /// The tensor, on the GPU: waited for by the stream that reads it, if it is on its way, and fetched if it is not.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        lock(&self.0).tensor()
    }
}

impl fmt::Debug for Away {
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

/// Without GPUs there is nothing to move.
#[cfg(not(feature = "cuda"))]
enum Mover {}

/// As [`Mover`].
#[cfg(not(feature = "cuda"))]
enum Moving {}

#[cfg(not(feature = "cuda"))]
impl Mover {
    fn begin(&self) {
        match *self {}
    }

    fn send(&self, _: &Tensor) -> Result<Moving> {
        match *self {}
    }

    fn held(&self) -> usize {
        match *self {}
    }
}

#[cfg(not(feature = "cuda"))]
impl Moving {
    fn let_go(&mut self) -> Result<()> {
        match *self {}
    }

    fn fetch(&mut self) -> Result<()> {
        match *self {}
    }

    fn tensor(&mut self) -> Result<Tensor> {
        match *self {}
    }
}
