//! The configuration of a scheduler, as diffusers writes it.

use super::SchedulerKind;
use crate::error::{Error, Result};
use crate::tensor_folder::read_json;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The settings of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SchedulerConfig {
    /// Which scheduler.
    pub kind: SchedulerKind,
    /// The shift of noise levels: above 1, more steps have much noise.
    pub shift: f64,
    /// The time step of pure noise.
    pub train_timesteps: usize,
    /// The order of UniPC: 1 or 2.
    pub solver_order: usize,
}

/// The shift that WAN's 480p models come with.
const DEFAULT_SHIFT: f64 = 3.0;

const EULER: &str = "FlowMatchEulerDiscreteScheduler";
const UNIPC: &str = "UniPCMultistepScheduler";

impl SchedulerConfig {
    /// A scheduler with the shift of WAN's 480p models.
    #[must_use]
    pub fn new(kind: SchedulerKind) -> Self {
        Self { kind, shift: DEFAULT_SHIFT, train_timesteps: 1000, solver_order: 2 }
    }

    /// Reads `scheduler_config.json` of a pipeline's `scheduler` folder.
    ///
    /// # Errors
    /// No such file, another scheduler, settings that change the result and that are not implemented.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("scheduler_config.json");
        let json: Map<String, Value> = read_json(&path)?;
        Self::from_json(&json).map_err(|error| Error::Format { path, problem: error.to_string() })
    }

    /// A configuration from the keys of `scheduler_config.json`.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn from_json(json: &Map<String, Value>) -> Result<Self> {
        let class = json.get("_class_name").and_then(Value::as_str).unwrap_or_default();
        let kind = match class {
            EULER => SchedulerKind::Euler,
            UNIPC => SchedulerKind::UniPc,
            _ => return Err(Error::Config(format!("scheduler '{class}': possible are {EULER}, {UNIPC}"))),
        };
        // What is implemented; for absent keys, diffusers' default is the first.
        let fixed: &[(&str, &[Value])] = match kind {
            SchedulerKind::Euler => &[
                ("use_dynamic_shifting", &[json!(false)]),
                ("invert_sigmas", &[json!(false)]),
                ("shift_terminal", &[Value::Null]),
                ("use_karras_sigmas", &[json!(false)]),
                ("use_exponential_sigmas", &[json!(false)]),
                ("use_beta_sigmas", &[json!(false)]),
                ("stochastic_sampling", &[json!(false)]),
            ],
            SchedulerKind::UniPc => &[
                ("prediction_type", &[json!("epsilon"), json!("flow_prediction")]),
                ("use_flow_sigmas", &[json!(false), json!(true)]),
                ("thresholding", &[json!(false)]),
                ("predict_x0", &[json!(true)]),
                ("solver_type", &[json!("bh2")]),
                ("lower_order_final", &[json!(true)]),
                ("disable_corrector", &[json!([])]),
                ("solver_p", &[Value::Null]),
                ("use_karras_sigmas", &[json!(false)]),
                ("use_exponential_sigmas", &[json!(false)]),
                ("use_beta_sigmas", &[json!(false)]),
                ("final_sigmas_type", &[json!("zero")]),
                ("rescale_betas_zero_snr", &[json!(false)]),
                ("use_dynamic_shifting", &[json!(false)]),
                ("shift_terminal", &[Value::Null]),
            ],
        };
        for (key, values) in fixed {
            let (given, wanted) = (json.get(*key).unwrap_or(&values[0]), &values[values.len() - 1]);
            if given != wanted {
                return Err(Error::Config(format!("{key} is {given}; a {class} is implemented with {wanted}")));
            }
        }
        let number = |key: &str, default: f64| match json.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|number| *number > 0.0)
                .ok_or_else(|| Error::Config(format!("{key} is {value}, expected a number above 0"))),
        };
        let whole = |key: &str, default: f64| match number(key, default)? {
            whole if whole.fract() == 0.0 => Ok(whole as usize),
            other => Err(Error::Config(format!("{key} is {other}, expected a whole number above 0"))),
        };
        let solver_order = whole("solver_order", 2.0)?;
        if solver_order > 2 {
            return Err(Error::Config(format!("solver_order is {solver_order}; 1 and 2 are implemented")));
        }
        let shift = number(if kind == SchedulerKind::Euler { "shift" } else { "flow_shift" }, 1.0)?;
        Ok(Self { kind, shift, train_timesteps: whole("num_train_timesteps", 1000.0)?, solver_order })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Value) -> Result<SchedulerConfig> {
        SchedulerConfig::from_json(json.as_object().expect("an object"))
    }

    #[test]
    fn files_of_diffusers_are_read() -> Result<()> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/transformer/loops");
        let euler = SchedulerConfig::read(&Path::new(folder).join("euler"))?;
        assert_eq!(euler, SchedulerConfig { shift: 7.0, ..SchedulerConfig::new(SchedulerKind::Euler) });
        assert_eq!(
            SchedulerConfig::read(&Path::new(folder).join("unipc"))?,
            SchedulerConfig::new(SchedulerKind::UniPc)
        );
        Ok(())
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        let unipc = |key: &str, value: Value| {
            let mut json =
                json!({ "_class_name": UNIPC, "prediction_type": "flow_prediction", "use_flow_sigmas": true });
            json[key] = value;
            json
        };
        assert!(read(unipc("flow_shift", json!(5))).is_ok());
        for (json, words) in [
            (unipc("solver_type", json!("bh1")), "solver_type is \"bh1\""),
            (unipc("solver_order", json!(3)), "solver_order is 3"),
            (unipc("solver_order", json!(0.4)), "solver_order is 0.4"),
            (unipc("num_train_timesteps", json!(0.3)), "num_train_timesteps is 0.3"),
            (unipc("prediction_type", Value::Null), "prediction_type is null"),
            (unipc("flow_shift", json!(0)), "flow_shift is 0"),
            (json!({ "_class_name": UNIPC }), "prediction_type is \"epsilon\""),
            (json!({ "_class_name": EULER, "use_dynamic_shifting": true }), "use_dynamic_shifting is true"),
            (json!({ "_class_name": "DDIMScheduler" }), "DDIMScheduler"),
            (json!({}), EULER),
        ] {
            let error = read(json).expect_err("must be refused").to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
