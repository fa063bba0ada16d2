//! Adapter folders as PEFT lays them out: `adapter_config.json` and `adapter_model.safetensors`.

use crate::decoder::Weights;
use crate::error::{Error, Result};
use crate::folder;
use crate::lora::{Lora, ROUTER, TARGETS, is_adapter};
use crate::origin::Base;
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The file that makes a folder one of an adapter.
pub const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// What PEFT puts before the model's names.
const PREFIX: &str = "base_model.model.";

/// `adapter_config.json`, as far as it is needed.
#[derive(Debug, Serialize, Deserialize)]
struct Config {
    peft_type: String,
    task_type: Option<String>,
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    target_modules: Targets,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    lora_dropout: f64,
    #[serde(default)]
    rank_pattern: BTreeMap<String, usize>,
    #[serde(default)]
    alpha_pattern: BTreeMap<String, f64>,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    inference_mode: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Targets {
    Names(Vec<String>),
    Word(String),
}

/// An adapter as read.
#[derive(Debug)]
pub struct Adapter {
    /// The model that it was made for.
    pub base: Base,
    /// Its size, and the layers it stands beside.
    pub lora: Lora,
    /// Its matrices, by the names they have in a [`Decoder`](crate::Decoder) with this `lora`.
    pub weights: Weights,
}

/// Writes the adapters among `weights` for people who load the model in `base`. The configuration comes last: without it
/// the folder is none of an adapter.
///
/// # Errors
/// What the file system says, with the file.
pub fn save(folder: &Path, base: &Path, lora: &Lora, weights: &Weights) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
    let config = Config {
        peft_type: "LORA".into(),
        task_type: Some("CAUSAL_LM".into()),
        base_model_name_or_path: Some(base.to_string_lossy().into_owned()),
        r: lora.rank,
        lora_alpha: lora.alpha,
        target_modules: Targets::Names(lora.targets.clone()),
        bias: Some("none".into()),
        use_rslora: false,
        use_dora: false,
        fan_in_fan_out: false,
        lora_dropout: lora.dropout,
        rank_pattern: BTreeMap::new(),
        alpha_pattern: BTreeMap::new(),
        modules_to_save: None,
        inference_mode: true,
    };
    let path = folder.join(TENSORS);
    let format = |problem: String| Error::Format { path: path.clone(), problem };
    let adapters = weights.iter().filter(|(name, _)| is_adapter(name));
    let named: Vec<(String, Tensor)> =
        adapters.map(|(name, tensor)| Ok((format!("{PREFIX}{name}"), tensor.contiguous()?))).collect::<Result<_>>()?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = safetensors::serialize(named, Some(metadata)).map_err(|error| format(error.to_string()))?;
    let text = serde_json::to_string_pretty(&config).map_err(|error| format(error.to_string()))?;
    folder::replace(&path, &bytes)?;
    folder::replace(&folder.join(CONFIG), text.as_bytes())
}

/// Reads an adapter.
///
/// # Errors
/// Files that are missing or corrupt, and what this crate cannot compute: other methods, biases, ranks that differ.
pub fn load(folder: &Path) -> Result<Adapter> {
    let path = folder.join(CONFIG);
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    };
    let refuse = |problem: String| Error::Format { path: path.clone(), problem };
    let bytes = std::fs::read(&path).map_err(io(&path))?;
    let config: Config = serde_json::from_slice(&bytes).map_err(|error| refuse(error.to_string()))?;
    let unknown = [
        ("peft_type", config.peft_type != "LORA"),
        ("bias", config.bias.as_deref().is_some_and(|bias| bias != "none")),
        ("use_rslora", config.use_rslora),
        ("use_dora", config.use_dora),
        ("fan_in_fan_out", config.fan_in_fan_out),
        ("rank_pattern", !config.rank_pattern.is_empty()),
        ("alpha_pattern", !config.alpha_pattern.is_empty()),
        ("modules_to_save", config.modules_to_save.is_some_and(|modules| !modules.is_empty())),
    ];
    if let Some((key, _)) = unknown.iter().find(|(_, unknown)| *unknown) {
        return Err(refuse(format!("`{key}` is not plain: possible are LORA adapters of one rank, without biases")));
    }
    let base = config.base_model_name_or_path.ok_or_else(|| refuse("it does not name its model".into()))?;
    // Beside the adapter, if it is no path of its own.
    let base = [PathBuf::from(&base), folder.join(&base)].into_iter().find(|base| base.exists()).ok_or_else(|| {
        refuse(format!("its model '{base}' is no folder or file here; set base_model_name_or_path to where it is"))
    })?;

    let path = folder.join(TENSORS);
    let damaged = |problem: String| Error::Format { path: path.clone(), problem };
    let bytes = std::fs::read(&path).map_err(io(&path))?;
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).map_err(|e| damaged(e.to_string()))?;
    let mut weights = Weights::new();
    for (name, tensor) in tensors {
        let known = name.strip_prefix(PREFIX).filter(|name| is_adapter(name));
        let known = known.ok_or_else(|| damaged(format!("tensor {name} belongs to no LoRA adapter")))?;
        weights.insert(known.to_owned(), tensor.to_dtype(DType::F32)?);
    }
    let targets = match config.target_modules {
        Targets::Names(names) => names,
        // "all-linear", or a pattern: the tensors say it better.
        Targets::Word(_) => {
            let beside = |target: &&str| weights.keys().any(|name| name.contains(&format!(".{target}.")));
            TARGETS.iter().chain([&ROUTER]).filter(|target| beside(target)).map(|target| (*target).to_owned()).collect()
        }
    };
    let lora = Lora::new(config.r, config.lora_alpha, targets)?.with_dropout(config.lora_dropout)?;
    Ok(Adapter { base: Base::at(base), lora, weights })
}
