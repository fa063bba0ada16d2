//! The scaling of the rotary embedding in GGUF files.

use super::metadata::Metadata;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::rope;
use crate::rope_parameters::Parameters;
use serde_json::{Value, json};

/// Tensor with the divisors of the frequencies of Llama 3's rotary embedding, one for each pair.
const FACTORS: &str = "rope_freqs.weight";
/// Tensors with the divisors of LongRoPE for short and for long texts.
const BY_LENGTH: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// Whether a tensor holds divisors of the rotary embedding's frequencies, and is no parameter of the model.
pub(super) fn is_factors(tensor: &str) -> bool {
    tensor == FACTORS || BY_LENGTH.contains(&tensor)
}

/// LongRoPE's divisors for short and for long texts, each if the file has them.
pub(super) fn pair_factors(metadata: &Metadata) -> Result<[Option<Vec<f32>>; 2]> {
    let [short, long] = BY_LENGTH.map(|name| metadata.has(name).then(|| factors(metadata, name)).transpose());
    Ok([short?, long?])
}

fn factors(metadata: &Metadata, name: &str) -> Result<Vec<f32>> {
    Ok(metadata.file().tensor(name)?.flatten_all()?.to_vec1::<f32>()?)
}

/// The `rope_scaling` of the model, if its rotary embedding is scaled; `config` is the configuration as far as it has been
/// read.
///
/// # Errors
/// An unknown kind of scaling, and divisors that no known kind produces.
pub(super) fn scaling(metadata: &Metadata, config: &Value) -> Result<Option<Value>> {
    if metadata.has(FACTORS) {
        let factors = factors(metadata, FACTORS)?;
        return llama3(config, &factors).map(Some).map_err(|problem| metadata.file().broken(&problem));
    }
    match metadata.text("rope.scaling.type") {
        None | Some("none") => Ok(None),
        // LongRoPE's divisors are tensors, which the families that use it read by [`pair_factors`].
        Some("longrope") if metadata.has(BY_LENGTH[0]) => Ok(None),
        Some(kind @ ("linear" | "yarn")) => {
            // Keys that the family has set because files do not record them.
            let known = config["rope_scaling"].as_object().filter(|_| kind == "yarn");
            let mut scaling = Value::Object(known.cloned().unwrap_or_default());
            scaling["rope_type"] = json!(kind);
            scaling["factor"] = json!(metadata.number("rope.scaling.factor"));
            if kind == "yarn" {
                yarn(metadata, &mut scaling)?;
            }
            Ok(Some(scaling))
        }
        Some(other) => {
            let architecture = metadata.architecture;
            let problem =
                format!("{architecture}.rope.scaling.type '{other}' is unknown: possible are none, linear, yarn");
            Err(metadata.file().broken(&problem))
        }
    }
}

/// Adds the parameters of YaRN that files record.
fn yarn(metadata: &Metadata, scaling: &mut Value) -> Result<()> {
    if let Some(length) = metadata.count("rope.scaling.original_context_length")? {
        scaling["original_max_position_embeddings"] = json!(length);
    }
    for key in ["beta_fast", "beta_slow"] {
        if let Some(turns) = metadata.number(&format!("rope.scaling.yarn_{key}")) {
            scaling[key] = json!(turns);
        }
    }
    for key in ["yarn_ext_factor", "yarn_attn_factor"] {
        if let Some(factor) = metadata.number(&format!("rope.scaling.{key}")).filter(|factor| *factor != 1.0) {
            let architecture = metadata.architecture;
            let problem = format!("{architecture}.rope.scaling.{key} is {factor}: possible is 1");
            return Err(metadata.file().broken(&problem));
        }
    }
    Ok(())
}

/// Derives the parameters of Llama 3.1's scaling from its result: files have the divisor of each frequency, not the parameters.
/// All published models differ in the factor only, so it is taken from the largest divisor, and the others are checked.
fn llama3(config: &Value, factors: &[f32]) -> std::result::Result<Value, String> {
    let factor = factors.iter().copied().fold(1.0, f32::max);
    let parameters = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let frequencies = |parameters: Option<Value>| -> Result<Vec<f64>> {
        let config: Config =
            serde_json::from_value(config.clone()).map_err(|error| Error::Config(error.to_string()))?;
        config.check()?;
        let parse =
            |value| serde_json::from_value::<Parameters>(value).map_err(|error| Error::Config(error.to_string()));
        Ok(rope::new(&config, parameters.map(parse).transpose()?.as_ref(), 10_000.0)?.frequencies)
    };
    let both = frequencies(None).and_then(|plain| Ok((plain, frequencies(Some(parameters.clone()))?)));
    let (plain, scaled) = both.map_err(|error| error.to_string())?;
    let same =
        |((plain, scaled), factor): ((&f64, &f64), &f32)| (plain / scaled / f64::from(*factor) - 1.0).abs() < 1e-3;
    if plain.len() == factors.len() && plain.iter().zip(&scaled).zip(factors).all(same) {
        return Ok(parameters);
    }
    Err(format!(
        "the {} factors of {FACTORS} are not those of Llama 3.1 for heads of {}: possible are low_freq_factor 1, \
         high_freq_factor 4 and 8192 original positions",
        factors.len(),
        2 * plain.len()
    ))
}
