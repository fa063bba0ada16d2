//! Sources of a model's parameters: all in memory, or gathered unit by unit.

use crate::decoder::Decoder;
use crate::error::Result;
use ringspan_candle::{StoredWeights, Unit, Weight};
use std::collections::BTreeMap;

/// A source of parameters. A model requests its units in the order in which it computes them.
pub trait Parameters {
    /// Hints that a unit will be requested next, so that gathering it can begin.
    ///
    /// # Errors
    /// Failures of others that hold them.
    fn prefetch(&self, unit: Unit) -> Result<()>;

    /// The parameters of a unit, each with all that the caller computes with.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks that hold them.
    fn unit(&self, decoder: &Decoder, unit: Unit) -> Result<StoredWeights>;
}

/// Parameters that are all in memory, dense or as they are stored.
impl<W: Clone + Into<Weight>> Parameters for BTreeMap<String, W> {
    fn prefetch(&self, _unit: Unit) -> Result<()> {
        Ok(())
    }

    fn unit(&self, decoder: &Decoder, unit: Unit) -> Result<StoredWeights> {
        let of = |(name, _): (String, _)| decoder.parameter(self, &name).cloned().map(|weight| (name, weight.into()));
        decoder.unit_shapes(unit).into_iter().map(of).collect()
    }
}

impl Decoder {
    /// The parameters of the last norm and the output head; with tied weights they come from two units, the embedding's included.
    ///
    /// # Errors
    /// Errors of `parameters`.
    pub fn head_parameters(&self, parameters: &dyn Parameters) -> Result<StoredWeights> {
        let mut head = parameters.unit(self, Unit::Head)?;
        if self.model().head().is_tied() {
            head.extend(parameters.unit(self, Unit::Embedding)?);
        }
        Ok(head)
    }
}
