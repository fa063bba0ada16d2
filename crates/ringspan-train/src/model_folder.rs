//! Writes a trained model as a folder that other programs read: at the end of a run, and from any of its checkpoints.

use crate::{
    checkpoint::Checkpoints,
    companion_files,
    config::TrainConfig,
    error::{Error, Result, model_error},
    initial_model::InitialModel,
    model_identity::{check_same_configuration, identity},
    settings::{Settings, TrainArgs},
    shards::whole_partition,
};
use candle_core::{Device, Tensor};
use ringspan_candle::{ParallelRank, Unit, Weights};
use ringspan_models::{
    Decoder, ModelSource, adapter,
    folder::{SavedType, Writer},
};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Bytes of data per file: larger models are split into several files, as Hugging Face does.
const MAX_FILE_BYTES: u64 = 5_000_000_000;

/// Writes the model to `config.out`, unit by unit; `gather_unit` returns a unit's unsharded weights. `gather_unit` may be a collective, so
/// ranks on which `writes` is false call it as well. With adapters, writes these, and the merged model if that is asked for.
pub(crate) fn write(
    config: &TrainConfig,
    decoder: &Decoder,
    json: &Value,
    writes: bool,
    gather_unit: impl Fn(Unit) -> Result<Weights>,
) -> Result<()> {
    let out = &config.out;
    let mut writer = None;
    if writes && (config.lora.is_none() || config.lora_merge) {
        // The trained tensors are adapters: once merged, they are no tensors of the model.
        let is_model_tensor = |name: &String| decoder.lora().is_none() || !decoder.trains(name);
        let shapes = decoder.shapes().into_iter().filter(|(name, _)| is_model_tensor(name)).collect();
        let saved = config.export_dtype.unwrap_or_else(|| SavedType::of(json));
        writer = Some(Writer::new(out, json, &shapes, saved, MAX_FILE_BYTES).map_err(model_error)?);
    }
    let mut adapters = Weights::new();
    for unit in decoder.units() {
        let mut weights = gather_unit(unit)?;
        if !writes {
            continue;
        }
        if let Some(lora) = decoder.lora() {
            let trained = weights.iter().filter(|(name, _)| decoder.trains(name));
            adapters.extend(trained.map(|(name, tensor)| (name.clone(), tensor.clone())));
            if writer.is_some() {
                weights = lora.merge(weights).map_err(model_error)?;
            }
        }
        if let Some(writer) = &mut writer {
            weights.iter().try_for_each(|(name, tensor)| writer.write(name, tensor)).map_err(model_error)?;
        }
    }
    if let Some(writer) = writer {
        writer.finish().map_err(model_error)?;
    }
    if let (true, Some(lora), Some(base)) = (writes, decoder.lora(), base_model(config)?) {
        let base = base.canonicalize().unwrap_or(base);
        adapter::save(out, &base, lora, &adapters).map_err(model_error)?;
    }
    Ok(())
}

/// The base model of the adapters that are trained; none where the model itself is trained.
pub(crate) fn base_model(config: &TrainConfig) -> Result<Option<PathBuf>> {
    let Some(model) = config.model.as_ref().filter(|_| config.lora.is_some()) else { return Ok(None) };
    ModelSource::at(model).map(|source| Some(source.base().path().to_owned())).map_err(model_error)
}

/// A model folder that was written from a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The checkpoint's step.
    pub step: u64,
    /// The folder.
    pub out: PathBuf,
}

/// Writes a model folder from a checkpoint of the run in `run`: from the one of `step`, or else from the newest. The folder is
/// `out`, or else the run's own, as at its end. Weights are stored as `dtype`, or else as the run's settings say, or else in the
/// type of the model it began with.
///
/// One unit of the model is in memory at a time.
///
/// # Errors
/// No run or no such checkpoint, a checkpoint of another model, an `out` that holds another model, errors of the file system.
pub fn export(run: &Path, step: Option<u64>, out: Option<&Path>, dtype: Option<SavedType>) -> Result<Exported> {
    let resumed = Settings { resume: Some(run.to_owned()), ..Settings::default() };
    let mut config = TrainConfig::from_args(&TrainArgs { settings: resumed, ..TrainArgs::default() })?;
    config.export_dtype = dtype.or(config.export_dtype);
    let (mut initial_model, weights) = InitialModel::new(&config)?;
    let tokenizer = initial_model.tokenizer(&config)?;
    let (decoder, parameters) = initial_model.build(weights, &config, 1)?;
    let checkpoints = Checkpoints::new(&config.out, config.keep);
    let saved = checkpoints.for_model(step, &identity(decoder.config(), &decoder.shapes()))?;
    check_same_configuration(&config, &saved, &initial_model.json)?;
    let (step, end) = (saved.progress.step, saved.progress.end);
    let parameters = parameters.with_checkpoint(saved, &decoder)?;
    if let Some(out) = out {
        refuse_used_folder(out)?;
        config.out = out.to_owned();
    }
    let single_rank = ParallelRank { tp: (0, 1), ep: (0, 1), moe_tp: (0, 1) };
    let gather_unit = |unit| {
        let partitions = decoder.all_parameters().partitions(unit, single_rank).map_err(model_error)?;
        let tensor = |partition: &ringspan_candle::Partition| {
            let values = parameters.read(&decoder, &whole_partition(partition))?;
            Ok((partition.name.clone(), Tensor::from_vec(values, partition.whole.clone(), &Device::Cpu)?))
        };
        partitions.iter().map(tensor).collect()
    };
    write(&config, &decoder, &initial_model.json, true, gather_unit)?;
    companion_files::write(&config, tokenizer.as_ref(), &initial_model.json, end)?;
    Ok(Exported { step, out: config.out })
}

/// Refuses an export to a folder that already holds a run or a model.
fn refuse_used_folder(out: &Path) -> Result<()> {
    let names = ["model.safetensors", "model.safetensors.index.json", "config.json", adapter::CONFIG, "checkpoints"];
    match names.into_iter().find(|name| out.join(name).exists()) {
        None => Ok(()),
        Some(name) => Err(Error::Settings(format!(
            "{} already holds a run or a model ({name}): choose another --out, or remove it",
            out.display()
        ))),
    }
}
