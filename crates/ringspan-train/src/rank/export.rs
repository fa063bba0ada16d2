//! Exports the trained model as a folder that other programs read.

use super::Rank;
use crate::{error::Result, model_folder};

impl Rank<'_> {
    /// Writes the model to the run's folder, unit by unit: rank 0 holds one at a time.
    pub(super) fn export(&self) -> Result<()> {
        let (decoder, writes) = (&self.setup.spec.decoder, self.world.rank() == 0);
        let whole = |unit| self.shards.whole(decoder, unit);
        model_folder::write(self.config, decoder, &self.setup.config_json, writes, whole)
    }
}
