//! The folder of one transformer, or of a pipeline with one or two of them.

use crate::error::{Error, Result};
use crate::lora::LoraSource;
use crate::scheduler::SchedulerConfig;
use crate::tensor_folder::read_json;
use crate::transformer::{ShardedWeights, TokenGrid, WanConfig, WanFolder, WanTransformer, WeightShares, WeightType};
use crate::vae::VaeConfig;
use ringspan::comm::Communicator;
use ringspan_candle::StoredWeights;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A folder with the transformers and the scheduler that a run reads.
#[derive(Debug)]
pub struct DenoiseFolder {
    /// The transformer of high noise levels and, if there are two, that of low ones.
    stages: Vec<WanFolder>,
    /// The fraction of the training's time steps below which the second transformer computes.
    boundary_ratio: f64,
    scheduler: Option<SchedulerConfig>,
    /// Pixels of a latent element's side, and frames of a latent frame.
    scale: [usize; 2],
    weight_type: WeightType,
    /// The weights that are in memory, with the number of their stage.
    loaded: Mutex<Option<(usize, Arc<StoredWeights>)>>,
}

impl DenoiseFolder {
    /// Opens a transformer's folder or GGUF file, or a pipeline's folder; weights are read when they are needed.
    ///
    /// # Errors
    /// A folder of something else, files that are missing or corrupt, a second transformer without a boundary.
    pub fn open(path: &Path, weight_type: WeightType) -> Result<Self> {
        let refuse = |problem: String| Err(Error::Format { path: path.to_owned(), problem });
        if path.is_file() || path.join("config.json").is_file() {
            let folder = WanFolder::open(path)?;
            let scale = scale(None, &folder)?;
            let (stages, boundary_ratio) = (vec![folder], 0.0);
            return Ok(Self { stages, boundary_ratio, scheduler: None, scale, weight_type, loaded: Mutex::default() });
        }
        if !path.join("transformer/config.json").is_file() {
            return refuse(
                "neither a transformer's folder (config.json) nor a pipeline's (transformer/config.json); both are what \
                 diffusers saves"
                    .into(),
            );
        }
        let index = match path.join("model_index.json") {
            file if file.is_file() => read_json::<Map<String, Value>>(&file)?,
            _ => Map::new(),
        };
        let mut stages = vec![WanFolder::open(&path.join("transformer"))?];
        let ratio = index.get("boundary_ratio").and_then(Value::as_f64);
        let mut boundary_ratio = 0.0;
        if path.join("transformer_2/config.json").is_file() {
            let Some(ratio) = ratio.filter(|ratio| (0.0..=1.0).contains(ratio)) else {
                return refuse(
                    "transformer_2 takes over at the boundary_ratio of model_index.json, and there is none from 0 to 1"
                        .into(),
                );
            };
            stages.push(WanFolder::open(&path.join("transformer_2"))?);
            boundary_ratio = ratio;
            let [first, second] = [0, 1].map(|stage| stages[stage].transformer().config());
            if let Some((key, first, second)) = difference(first, second) {
                return refuse(format!("transformer has {key} {first} and transformer_2 {second}: they must be equal"));
            }
        } else if let Some(ratio) = ratio {
            return refuse(format!("model_index.json has boundary_ratio {ratio}, but there is no transformer_2"));
        }
        let scheduler = match path.join("scheduler") {
            folder if folder.is_dir() => Some(SchedulerConfig::read(&folder)?),
            _ => None,
        };
        let scale = scale(Some(path), &stages[0])?;
        Ok(Self { stages, boundary_ratio, scheduler, scale, weight_type, loaded: Mutex::default() })
    }

    /// The folder with adapters of the transformer of a stage, instead of those that it had; without sources those stay.
    ///
    /// # Errors
    /// Adapters of a second transformer where there is none; otherwise as for [`WanFolder::with_loras`].
    pub fn with_loras(mut self, stage: usize, sources: &[LoraSource]) -> Result<Self> {
        if let Some(source) = sources.first().filter(|_| stage >= self.stages.len()) {
            return Err(Error::Input(format!("the adapter {source} is for transformer_2, and there is none")));
        }
        if !sources.is_empty() {
            let adapted = self.stages.remove(stage).with_loras(sources)?;
            self.stages.insert(stage, adapted);
        }
        Ok(Self { loaded: Mutex::default(), ..self })
    }

    /// Number of transformers: 1 or 2.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// The transformer of a stage.
    #[must_use]
    pub fn transformer(&self, stage: usize) -> &WanTransformer {
        self.stages[stage].transformer()
    }

    /// The stage that computes a time step of a scheduler.
    #[must_use]
    pub fn stage_of(&self, timestep: f32, scheduler: &SchedulerConfig) -> usize {
        let boundary = self.boundary_ratio * scheduler.train_timesteps as f64;
        usize::from(self.stages.len() > 1 && f64::from(timestep) < boundary)
    }

    /// The type of weights in memory.
    #[must_use]
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// The scheduler of the pipeline, if it has one.
    #[must_use]
    pub fn scheduler(&self) -> Option<SchedulerConfig> {
        self.scheduler
    }

    /// The latents' frames, rows and columns of a video.
    ///
    /// # Errors
    /// Frames that are not 4k + 1, sides that patches do not divide, more tokens on an axis than a transformer has positions.
    pub fn latents_of(&self, [frames, height, width]: [usize; 3]) -> Result<[usize; 3]> {
        let [side, each] = self.scale;
        if frames == 0 || !(frames - 1).is_multiple_of(each) {
            return Err(Error::Frames { frames, each });
        }
        let WanConfig { patch_size, rope_max_seq_len, .. } = self.transformer(0).config();
        let [_, rows, columns] = *patch_size;
        for (name, size, patch) in [("height", height, rows), ("width", width, columns)] {
            if size == 0 || !size.is_multiple_of(side * patch) {
                return Err(Error::Size { side: name, size, each: side * patch, patch, scale: side });
            }
        }
        let latents = [(frames - 1) / each + 1, height / side, width / side];
        TokenGrid::new(latents, *patch_size)?.check_positions(*rope_max_seq_len)?;
        Ok(latents)
    }

    /// Bytes that the weights of a stage take in memory.
    #[must_use]
    pub fn bytes(&self, stage: usize) -> u64 {
        self.stages[stage].bytes(self.weight_type)
    }

    /// The weights of a stage, which the first rank that asks reads for all of this process. Those of the stage before
    /// are freed.
    ///
    /// # Errors
    /// Failures of the file system.
    pub fn weights(&self, stage: usize) -> Result<Arc<StoredWeights>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, weights)) = loaded.as_ref().filter(|(of, _)| *of == stage) {
            return Ok(weights.clone());
        }
        *loaded = None;
        let weights = Arc::new(self.stages[stage].load(self.weight_type)?);
        *loaded = Some((stage, weights.clone()));
        Ok(weights)
    }

    /// How so many ranks share the weights of a stage, and the bytes of adapters, which each of them holds.
    pub(super) fn shares(&self, stage: usize, ranks: usize) -> (WeightShares, u64) {
        let folder = &self.stages[stage];
        (folder.shares(self.weight_type, ranks), folder.adapter_bytes(self.weight_type))
    }

    /// The weights of a stage, of which each rank of `ranks` reads and holds a share.
    ///
    /// # Errors
    /// Failures of the file system.
    pub fn weight_share(&self, stage: usize, ranks: &Arc<dyn Communicator>) -> Result<ShardedWeights> {
        self.stages[stage].load_share(self.weight_type, ranks.clone())
    }

    /// Frees the weights in memory.
    pub fn release(&self) {
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The first size in which two transformers of a pipeline differ though they compute the same tokens with the same inputs.
fn difference(first: &WanConfig, second: &WanConfig) -> Option<(&'static str, String, String)> {
    let sizes = |config: &WanConfig| {
        [
            ("in_channels", config.in_channels.to_string()),
            ("out_channels", config.out_channels().to_string()),
            ("num_attention_heads", config.num_attention_heads.to_string()),
            ("attention_head_dim", config.attention_head_dim.to_string()),
            ("patch_size", format!("{:?}", config.patch_size)),
            ("rope_max_seq_len", config.rope_max_seq_len.to_string()),
            ("text_dim", config.text_dim.to_string()),
            ("image_dim", format!("{:?}", config.image_dim)),
            ("vace_layers", format!("{:?}", config.vace_layers)),
            ("vace_in_channels", format!("{:?}", config.vace_in_channels)),
        ]
    };
    let pairs = sizes(first).into_iter().zip(sizes(second));
    pairs.map(|((key, first), (_, second))| (key, first, second)).find(|(_, first, second)| first != second)
}

/// Pixels of a latent element's side and frames of a latent frame: those of the pipeline's decoder, or else of WAN's.
fn scale(pipeline: Option<&Path>, transformer: &WanFolder) -> Result<[usize; 2]> {
    match pipeline.map(|path| path.join("vae")).filter(|vae| vae.join("config.json").is_file()) {
        Some(vae) => VaeConfig::read(&vae).map(|config| [config.space(), config.time()]),
        None => Ok([if transformer.transformer().config().out_channels() >= 48 { 16 } else { 8 }, 4]),
    }
}
