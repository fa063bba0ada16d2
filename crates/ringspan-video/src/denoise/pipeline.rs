//! The folder of one transformer, or of a pipeline with one or two of them.

use crate::error::{Error, Result};
use crate::scheduler::SchedulerConfig;
use crate::tensor_folder::read_json;
use crate::transformer::{TokenGrid, WanConfig, WanFolder, WanTransformer, WeightType};
use ringspan_candle::StoredWeights;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// What `denoise` reads of a folder.
#[derive(Debug)]
pub struct DenoiseFolder {
    /// The transformer of high noise levels and, if there are two, that of low ones.
    stages: Vec<WanFolder>,
    /// The time step from which on the second transformer computes.
    boundary: f32,
    scheduler: Option<SchedulerConfig>,
    /// Pixels of a latent element's side, and frames of a latent frame.
    scale: [usize; 2],
    weight_type: WeightType,
    /// The weights that are in memory, and whose they are.
    loaded: Mutex<Option<(usize, Arc<StoredWeights>)>>,
}

impl DenoiseFolder {
    /// Opens a transformer's folder, or a pipeline's; weights are read when they are needed.
    ///
    /// # Errors
    /// A folder of something else, files that are missing or corrupt, a second transformer without a boundary.
    pub fn open(path: &Path, weight_type: WeightType) -> Result<Self> {
        let refuse = |problem: String| Err(Error::Format { path: path.to_owned(), problem });
        if path.join("config.json").is_file() {
            let folder = WanFolder::open(path)?;
            let scale = scale(None, &folder);
            let (stages, boundary) = (vec![folder], 0.0);
            return Ok(Self { stages, boundary, scheduler: None, scale, weight_type, loaded: Mutex::default() });
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
        let mut boundary = 0.0;
        if path.join("transformer_2/config.json").is_file() {
            let Some(ratio) = ratio.filter(|ratio| (0.0..=1.0).contains(ratio)) else {
                return refuse(
                    "transformer_2 takes over at the boundary_ratio of model_index.json, and there is none from 0 to 1"
                        .into(),
                );
            };
            stages.push(WanFolder::open(&path.join("transformer_2"))?);
            boundary = ratio as f32 * 1000.0;
            let [first, second] = [0, 1].map(|stage| stages[stage].transformer().config());
            if (first.in_channels, first.out_channels()) != (second.in_channels, second.out_channels()) {
                return refuse(format!(
                    "transformer takes {} channels and transformer_2 {}",
                    first.in_channels, second.in_channels
                ));
            }
        } else if let Some(ratio) = ratio {
            return refuse(format!("model_index.json has boundary_ratio {ratio}, but there is no transformer_2"));
        }
        let scheduler = match path.join("scheduler") {
            folder if folder.is_dir() => Some(SchedulerConfig::read(&folder)?),
            _ => None,
        };
        let scale = scale(Some(path), &stages[0]);
        Ok(Self { stages, boundary, scheduler, scale, weight_type, loaded: Mutex::default() })
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

    /// The stage that computes a time step.
    #[must_use]
    pub fn stage_of(&self, timestep: f32) -> usize {
        usize::from(self.stages.len() > 1 && timestep < self.boundary)
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

    /// The weights of a stage, which the first rank that asks reads for all of this process. Those of the stage before are let go.
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
}

/// Pixels of a latent element's side and frames of a latent frame, as the decoder's configuration says, or else as those of WAN are.
fn scale(pipeline: Option<&Path>, transformer: &WanFolder) -> [usize; 2] {
    let of_wan = [if transformer.transformer().config().out_channels() >= 48 { 16 } else { 8 }, 4];
    let Some(file) = pipeline.map(|path| path.join("vae/config.json")).filter(|file| file.is_file()) else {
        return of_wan;
    };
    let config = read_json::<Map<String, Value>>(&file).unwrap_or_default();
    let key =
        |name: &str, otherwise| config.get(name).and_then(Value::as_u64).map_or(otherwise, |found| found as usize);
    [key("scale_factor_spatial", of_wan[0]).max(1), key("scale_factor_temporal", of_wan[1]).max(1)]
}
