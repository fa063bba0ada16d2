//! The weights of a transformer, unit by unit, as a pass takes them.

use crate::error::{Error, Result};
use ringspan_candle::StoredWeights;
use ringspan_candle::model::Unit;
use std::borrow::Cow;

/// A transformer's weights, which are taken for one unit after the other.
pub trait UnitWeights {
    /// The weights of a unit, with the matrices of its adapters; there may be those of other units, too.
    ///
    /// # Errors
    /// Failures of other ranks, where weights are gathered from them.
    fn unit(&self, unit: Unit) -> Result<Cow<'_, StoredWeights>>;

    /// Announces the unit that is taken next, so that its weights may travel while the present unit computes.
    ///
    /// # Errors
    /// As for [`unit`](Self::unit).
    fn prefetch(&self, _unit: Unit) -> Result<()> {
        Ok(())
    }

    /// Takes back the weights of a unit that is taken next again, so that ranks which gather it do so once.
    fn put_back(&self, _unit: Unit, _weights: Cow<'_, StoredWeights>) {}
}

/// The units of a pass, one after the other, each of which is announced while the one before computes.
pub(crate) struct UnitSequence<'a> {
    weights: &'a dyn UnitWeights,
    rest: std::vec::IntoIter<Unit>,
}

impl<'a> UnitSequence<'a> {
    pub(crate) fn new(weights: &'a dyn UnitWeights, units: Vec<Unit>) -> Self {
        Self { weights, rest: units.into_iter() }
    }

    /// The weights of the next unit.
    pub(crate) fn take(&mut self) -> Result<Cow<'a, StoredWeights>> {
        let Some(unit) = self.rest.next() else {
            return Err(Error::Input("a pass has taken more units than the transformer has".into()));
        };
        let weights = self.weights.unit(unit)?;
        if let Some(next) = self.rest.as_slice().first() {
            self.weights.prefetch(*next)?;
        }
        Ok(weights)
    }
}

impl UnitWeights for StoredWeights {
    fn unit(&self, _: Unit) -> Result<Cow<'_, StoredWeights>> {
        Ok(Cow::Borrowed(self))
    }
}
