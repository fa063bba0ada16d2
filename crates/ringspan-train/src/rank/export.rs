//! The trained model as a folder that others read.

use super::Rank;
use crate::{error::Result, setup::model_error};
use ringspan_models::{Weights, adapter, folder::Writer};

/// Bytes of data from which the model is cut into several files, as Hugging Face does.
const FILE: u64 = 5_000_000_000;

impl Rank<'_> {
    /// Writes the model to the run's folder, unit by unit: rank 0 holds one at a time. With adapters, these, and the model
    /// they are merged into where that is asked for.
    pub(super) fn export(&self) -> Result<()> {
        let (decoder, config, out) = (&self.setup.decoder, self.config, &self.config.out);
        let writes = self.world.rank() == 0;
        let mut writer = None;
        if writes && (config.lora.is_none() || config.lora_merge) {
            // Adapters alone are trained, and not part of the model they stand beside.
            let plain = |name: &String| decoder.lora().is_none() || !decoder.trains(name);
            let shapes = decoder.shapes().into_iter().filter(|(name, _)| plain(name)).collect();
            writer = Some(Writer::new(out, &self.setup.config_json, &shapes, FILE).map_err(model_error)?);
        }
        let mut adapters = Weights::new();
        for unit in decoder.units() {
            let mut weights = self.shards.whole(decoder, unit)?;
            if !writes {
                continue;
            }
            if let Some(lora) = decoder.lora() {
                let of_unit = weights.iter().filter(|(name, _)| decoder.trains(name));
                adapters.extend(of_unit.map(|(name, tensor)| (name.clone(), tensor.clone())));
                weights = lora.merge(weights).map_err(model_error)?;
            }
            if let Some(writer) = &mut writer {
                weights.iter().try_for_each(|(name, tensor)| writer.write(name, tensor)).map_err(model_error)?;
            }
        }
        if let Some(writer) = writer {
            writer.finish().map_err(model_error)?;
        }
        if let (true, Some(lora), Some(base)) = (writes, decoder.lora(), &config.model) {
            let base = base.canonicalize().unwrap_or_else(|_| base.clone());
            adapter::save(out, &base, lora, &adapters).map_err(model_error)?;
        }
        Ok(())
    }
}
