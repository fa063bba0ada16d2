//! Fixtures, ranks and distances.

use candle_core::{Device, Tensor};
use ringspan::attention::Group;
use ringspan::comm::threads;
use ringspan::kernel::Kernel;
use ringspan_candle::model::UnitWeights;
use ringspan_candle::{StoredWeights, pool};
use ringspan_video::transformer::{Conditions, Control, Prompt, TokenGrid, VideoContext, WanFolder, WeightType};
use ringspan_video::{Error, Result};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The folder of a transformer's fixture.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/transformer").join(name)
}

/// The tensors of a fixture's `reference.safetensors`.
pub(crate) fn reference(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture(name).join("reference.safetensors"), &Device::Cpu).expect("a reference")
}

/// The distance of two tensors, relative to the norm of `wanted`.
pub(crate) fn distance(got: &Tensor, wanted: &Tensor) -> f64 {
    assert_eq!(got.dims(), wanted.dims());
    let values = |tensor: &Tensor| tensor.flatten_all().and_then(|all| all.to_vec1::<f32>()).expect("f32");
    let (got, wanted) = (values(got), values(wanted));
    let sum = |terms: &mut dyn Iterator<Item = f64>| terms.map(|x| x * x).sum::<f64>().sqrt();
    let far = sum(&mut got.iter().zip(&wanted).map(|(a, b)| f64::from(a - b)));
    far / sum(&mut wanted.iter().map(|b| f64::from(*b))).max(1e-30)
}

/// Runs `work` on every rank of a ring x Ulysses mesh, and returns the results of all.
pub(crate) fn on_ranks<T: Send>(
    (ring, ulysses): (usize, usize),
    work: impl Fn(Arc<Group>, Arc<Group>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let options = threads::Options { deadline: std::time::Duration::from_secs(60), ..Default::default() };
    threads::run(ring * ulysses, options, |comm| {
        pool::run(1, || {
            let alone = Group::new(comm.split(comm.rank(), 0)?, (1, 1), Kernel::in_current_pool(1))?;
            let group = Group::new(comm, (ring, ulysses), Kernel::in_current_pool(1))?;
            work(Arc::new(group), Arc::new(alone))
        })?
    })
}

/// One forward pass of a fixture's transformer.
pub(crate) struct Pass {
    pub(crate) folder: WanFolder,
    pub(crate) weights: StoredWeights,
    pub(crate) inputs: HashMap<String, Tensor>,
}

impl Pass {
    pub(crate) fn of(name: &str, weights: WeightType) -> Result<Self> {
        let folder = WanFolder::open(&fixture(name))?;
        Ok(Self { weights: folder.load(weights)?, inputs: reference(name), folder })
    }

    /// The velocity as every rank gets it.
    pub(crate) fn velocities(&self, mesh: (usize, usize)) -> Result<Vec<Tensor>> {
        on_ranks(mesh, |group, alone| self.on_rank(&self.weights, group, alone))
    }

    /// The velocity of a rank, with weights that it holds.
    pub(crate) fn on_rank(&self, weights: &dyn UnitWeights, group: Arc<Group>, alone: Arc<Group>) -> Result<Tensor> {
        self.with_prompt(weights, group, alone, |x, Conditions { times, control }, prompt, video| {
            self.folder.transformer().velocity(weights, x, times, prompt, control, video)
        })
    }

    /// Calls `pass` with the latents, what conditions them, and the prompt on a rank.
    pub(crate) fn with_prompt<T>(
        &self,
        weights: &dyn UnitWeights,
        group: Arc<Group>,
        alone: Arc<Group>,
        pass: impl FnOnce(&Tensor, Conditions, &Prompt, &VideoContext) -> Result<T>,
    ) -> Result<T> {
        let (transformer, x) = (self.folder.transformer(), &self.inputs["hidden_states"]);
        let (batch, _, frames, height, width) = x.dims5()?;
        let grid = TokenGrid::new([frames, height, width], transformer.config().patch_size)?;
        let video = VideoContext::new(transformer.config(), group, alone, batch, grid)?;
        let times = video.timesteps(&self.inputs["timestep"].flatten_all()?.to_vec1()?)?;
        let image = self.inputs.get("encoder_hidden_states_image");
        let prompt = transformer.prompt(weights, &self.inputs["encoder_hidden_states"], image, &video)?;
        let scale = match self.inputs.get("control_hidden_states_scale") {
            Some(scale) => scale.to_vec1::<f32>()?,
            None => Vec::new(),
        };
        let control = self.inputs.get("control_hidden_states").map(|control| Control { control, scale: &scale });
        pass(x, Conditions { times: &times, control }, &prompt, &video)
    }
}

/// The message of an error.
pub(crate) fn message<T>(result: Result<T>) -> String {
    result.err().as_ref().map(Error::to_string).expect("must be refused")
}
