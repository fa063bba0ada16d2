//! A network whose weights stay on disk until a pass needs them, and are let go after it.

use super::config::VaeConfig;
use super::network::{Load, Network};
use crate::error::Result;
use crate::tensor_folder::TensorFolder;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Makes the layers of a network.
pub(super) type Build = fn(&VaeConfig, &TensorFolder, Load) -> Result<Network>;

/// The layers of a network without their weights, and the files that have these.
pub(super) struct StoredNetwork {
    config: VaeConfig,
    folder: Arc<TensorFolder>,
    build: Build,
    sizes: Network,
    /// What was read last, as long as a rank of this process computes with it.
    loaded: Mutex<(Range<usize>, Weak<Network>)>,
}

impl StoredNetwork {
    /// Checks the shapes of all tensors.
    ///
    /// # Errors
    /// Tensors that are missing or of another shape.
    pub(super) fn new(config: VaeConfig, folder: Arc<TensorFolder>, build: Build) -> Result<Self> {
        let sizes = build(&config, &folder, Load::Sizes)?;
        Ok(Self { config, folder, build, sizes, loaded: Mutex::new((0..0, Weak::new())) })
    }

    pub(super) fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// The layers without weights.
    pub(super) fn sizes(&self) -> &Network {
        &self.sizes
    }

    /// Reads the weights of some segments, or returns those that another rank of this process has read and still uses. Each video of a
    /// batch reads them again.
    ///
    /// # Errors
    /// Failures of the file system.
    pub(super) fn load(&self, segments: &Range<usize>) -> Result<Arc<Network>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(network) = loaded.1.upgrade().filter(|_| loaded.0 == *segments) {
            return Ok(network);
        }
        let network = Arc::new((self.build)(&self.config, &self.folder, Load::Weights(segments.clone()))?);
        *loaded = (segments.clone(), Arc::downgrade(&network));
        Ok(network)
    }
}
