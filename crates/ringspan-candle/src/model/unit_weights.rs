//! Sources of a model's weights: all in memory, or gathered unit by unit.

use super::{ModelParameters, Parameter, StoredWeights, Unit};
use crate::weight::Weight;
use candle_core::{Result, bail};
use std::collections::BTreeMap;

/// A source of a model's weights. A pass takes those of one unit after the other, in the order in which it computes them.
pub trait UnitWeights {
    /// The weights of a unit, whose parameters are `parameters`; on a rank that has a part of a model's experts, those of its own. Sources
    /// that know their units by themselves need not look at `parameters`.
    ///
    /// # Errors
    /// Missing weights, unless they are first missed where they are read; failures of other ranks that hold them.
    fn unit(&self, unit: Unit, parameters: &[Parameter]) -> Result<StoredWeights>;

    /// Announces the unit that is taken next, so that its weights may travel while the present one computes.
    ///
    /// # Errors
    /// Failures of other ranks that hold them.
    fn prefetch(&self, _unit: Unit) -> Result<()> {
        Ok(())
    }

    /// Takes back the weights of a unit that is taken next again, so that ranks which gather it do so once.
    fn put_back(&self, _unit: Unit, _weights: StoredWeights) {}
}

/// Weights that are all in memory, dense or as they are stored.
impl<W: Clone + Into<Weight>> UnitWeights for BTreeMap<String, W> {
    fn unit(&self, _: Unit, parameters: &[Parameter]) -> Result<StoredWeights> {
        let weight = |Parameter { name, shape, .. }: &Parameter| match self.get(name) {
            Some(weight) => Ok((name.clone(), weight.clone().into())),
            None => bail!("the model needs tensor {name} {shape:?}, which the weights do not have"),
        };
        parameters.iter().map(weight).collect()
    }
}

/// The units of a pass, one after the other, each of which is announced while the one before computes.
pub struct UnitSequence<'a> {
    weights: &'a dyn UnitWeights,
    parameters: &'a ModelParameters,
    rest: std::vec::IntoIter<Unit>,
}

impl<'a> UnitSequence<'a> {
    /// The weights of these units of a model that has `parameters`.
    pub fn new(weights: &'a dyn UnitWeights, parameters: &'a ModelParameters, units: Vec<Unit>) -> Self {
        Self { weights, parameters, rest: units.into_iter() }
    }

    /// The weights of the next unit.
    ///
    /// # Errors
    /// The source fails, or the pass takes more units than it has named.
    pub fn take(&mut self) -> Result<StoredWeights> {
        let Some(unit) = self.rest.next() else { bail!("a pass takes more units than it has named") };
        let weights = self.weights.unit(unit, self.parameters.of_unit(unit))?;
        if let Some(next) = self.rest.as_slice().first() {
            self.weights.prefetch(*next)?;
        }
        Ok(weights)
    }
}
