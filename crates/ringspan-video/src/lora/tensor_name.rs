//! Parses the names of tensors in adapter files: the role of a tensor, and the module that it belongs to.

use crate::original_names::original_name;
use ringspan_candle::model::ModelParameters;
use std::collections::HashMap;

/// The role of a tensor in an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// The matrix A `[R, in]`.
    Down,
    /// The matrix B `[out, R]`.
    Up,
    /// The numerator of the product's factor `alpha / R`.
    Alpha,
    /// The bias of B, which has the product's factor, too.
    UpBias,
    /// A difference that is added to a bias.
    BiasDifference,
    /// A difference that is added to a weight.
    Difference,
}

/// The ends of names: diffusers and PEFT, the latter in memory, kohya's trainers, old files of diffusers, differences.
const ENDS: [(&str, Role); 12] = [
    (".lora_A.weight", Role::Down),
    (".lora_B.weight", Role::Up),
    (".lora_A.default.weight", Role::Down),
    (".lora_B.default.weight", Role::Up),
    (".lora_down.weight", Role::Down),
    (".lora_up.weight", Role::Up),
    (".lora.down.weight", Role::Down),
    (".lora.up.weight", Role::Up),
    (".alpha", Role::Alpha),
    (".lora_B.bias", Role::UpBias),
    (".diff_b", Role::BiasDifference),
    (".diff", Role::Difference),
];

/// Prefixes that programs put before the names of a model's modules.
const PREFIXES: [&str; 7] =
    ["transformer.", "diffusion_model.", "model.diffusion_model.", "base_model.model.", "pipe.dit.", "lora_unet_", ""];

/// The modules of a transformer by the names that files have for them.
pub(super) struct ModuleNames(HashMap<String, String>);

impl ModuleNames {
    pub(super) fn new(parameters: &ModelParameters) -> Self {
        let mut names = HashMap::new();
        for parameter in parameters.iter() {
            let name = &parameter.name;
            let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
            let original = original_name(module);
            for known in [module.replace('.', "_"), original.replace('.', "_"), original, module.to_owned()] {
                names.insert(known, module.to_owned());
            }
        }
        Self(names)
    }

    /// The role of a tensor and the module to which it belongs; the reason why if it has none.
    pub(super) fn parse(&self, name: &str) -> Result<(&str, Role), String> {
        let ends = ENDS.iter().find_map(|(end, role)| Some((name.strip_suffix(end)?, *role)));
        let Some((prefixed, role)) = ends else {
            let ends = ENDS.map(|(end, _)| end).join(", ");
            return Err(format!("it is no tensor of a LoRA adapter, whose names end with one of {ends}"));
        };
        let module = PREFIXES.iter().find_map(|prefix| self.0.get(prefixed.strip_prefix(prefix)?));
        module.map(|module| (module.as_str(), role)).ok_or_else(|| "the model has no such module".into())
    }
}
