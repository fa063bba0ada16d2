//! A file of adapters: which of its tensors changes which module.

use super::LoraSource;
use super::tensor_name::{ModuleNames, Role};
use crate::error::{Error, Result};
use crate::tensor_folder::TensorFolder;
use ringspan_models::{Lora, adapter};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The name of diffusers' file in a folder, and that of PEFT's.
pub(crate) const DIFFUSERS: &str = "pytorch_lora_weights.safetensors";
const PEFT: &str = "adapter_model.safetensors";
/// The entry of a file's metadata in which diffusers keeps PEFT's configuration.
pub(super) const METADATA: &str = "lora_adapter_metadata";

/// The tensors of an adapter's file, which stay on disk.
#[derive(Debug)]
pub(super) struct LoraFile {
    pub(super) tensors: TensorFolder,
    /// The names of tensors by module and role.
    pub(super) modules: BTreeMap<String, BTreeMap<Role, String>>,
    /// PEFT's configuration, if the file or its folder has one.
    config: Option<Lora>,
    pub(super) scale: f64,
}

impl LoraFile {
    /// Opens the file of a source, and finds the modules of the model that its tensors belong to.
    pub(super) fn open(source: &LoraSource, names: &ModuleNames) -> Result<Self> {
        let path = file_of(&source.path)?;
        let (tensors, metadata) = TensorFolder::open_file(&path)?;
        let mut modules: BTreeMap<String, BTreeMap<Role, String>> = BTreeMap::new();
        for (name, _) in tensors.shapes() {
            let refuse = |problem: String| Error::Format { path: path.clone(), problem };
            let (module, role) =
                names.parse(name).map_err(|problem| refuse(format!("tensor {name} has no effect: {problem}")))?;
            let of_module = modules.entry(module.to_owned()).or_default();
            if let Some(other) = of_module.insert(role, name.to_owned()) {
                return Err(refuse(format!("tensors {other} and {name} are the same part of {module}")));
            }
        }
        let config = match metadata.get(METADATA) {
            Some(text) => Some(of_metadata(text, &path)?),
            None => match path.with_file_name(adapter::CONFIG) {
                config if path.ends_with(PEFT) && config.is_file() => {
                    let text = std::fs::read(&config).map_err(|source| Error::Io { path: config.clone(), source })?;
                    Some(adapter::parse_config(&text, &config)?)
                }
                _ => None,
            },
        };
        Ok(Self { tensors, modules, config, scale: source.scale })
    }

    /// The factor of the product of a module's matrices, of this rank: that of its alpha, or of PEFT's configuration, or 1.
    pub(super) fn factor(&self, module: &str, rank: usize) -> Result<f64> {
        if let Some(name) = self.modules.get(module).and_then(|of_module| of_module.get(&Role::Alpha)) {
            let alpha = self.tensors.read(name)?.flatten_all()?.to_vec1::<f32>()?;
            return match alpha[..] {
                [alpha] if alpha.is_finite() => Ok(f64::from(alpha) / rank as f64),
                _ => Err(self.refuse(format!("tensor {name} is {alpha:?}, and must be one finite number"))),
            };
        }
        let Some(config) = &self.config else { return Ok(1.0) };
        let size = config.size(module)?;
        match size.rank == rank {
            true => Ok(size.scale),
            false => Err(self
                .refuse(format!("the adapter of {module} has rank {rank}, and its configuration says {}", size.rank))),
        }
    }

    pub(super) fn refuse(&self, problem: String) -> Error {
        Error::Format { path: self.tensors.path().to_owned(), problem }
    }
}

/// The safetensors file of a path: the path, or the only one that its folder has.
fn file_of(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    if let Some(file) = [DIFFUSERS, PEFT].map(|name| path.join(name)).into_iter().find(|file| file.is_file()) {
        return Ok(file);
    }
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(file);
        }
    }
    match &files[..] {
        [file] => Ok(file.clone()),
        _ => Err(Error::Format {
            path: path.to_owned(),
            problem: format!(
                "a folder of an adapter has {DIFFUSERS}, {PEFT}, or one .safetensors file, and this has {}",
                files.len()
            ),
        }),
    }
}

/// The configuration in diffusers' metadata, whose keys have the name of the transformer before them.
fn of_metadata(text: &str, path: &Path) -> Result<Lora> {
    let refuse = |problem: String| Error::Format { path: path.to_owned(), problem };
    let keys: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| refuse(format!("its {METADATA}: {error}")))?;
    let plain = |(key, value): (String, Value)| (key.trim_start_matches("transformer.").to_owned(), value);
    let keys: Map<String, Value> = keys.into_iter().map(plain).collect();
    let text = serde_json::to_vec(&keys).map_err(|error| refuse(error.to_string()))?;
    Ok(adapter::parse_config(&text, path)?)
}
