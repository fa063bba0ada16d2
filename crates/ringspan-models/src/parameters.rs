//! Where a model's parameters come from: held whole, or brought here unit by unit.

use crate::decoder::Decoder;
use crate::error::Result;
use ringspan_candle::{StoredWeights, Unit, Weight};
use std::collections::BTreeMap;

/// A source of parameters. A model asks for its units in the order in which it computes them.
pub trait Parameters {
    /// Begins to bring a unit here, which will be asked for next. Only a hint.
    ///
    /// # Errors
    /// Failures of other ranks.
    fn prefetch(&self, unit: Unit) -> Result<()>;

    /// The parameters of a unit, whole.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    fn unit(&self, decoder: &Decoder, unit: Unit) -> Result<StoredWeights>;
}

/// Parameters that are here, dense or as they are stored.
impl<W: Clone + Into<Weight>> Parameters for BTreeMap<String, W> {
    fn prefetch(&self, _unit: Unit) -> Result<()> {
        Ok(())
    }

    fn unit(&self, decoder: &Decoder, unit: Unit) -> Result<StoredWeights> {
        let of = |(name, _): (String, _)| decoder.parameter(self, &name).cloned().map(|weight| (name, weight.into()));
        decoder.unit_shapes(unit).into_iter().map(of).collect()
    }
}
