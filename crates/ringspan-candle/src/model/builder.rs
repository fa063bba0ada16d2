//! Collects the parameters of a model while its layers are made.

use super::{Init, LinearLayer, Parameter, Unit, UnitParameters};
use crate::shard::ShardSpec;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;

/// The parameters of a model that is being made, unit by unit. Each layer adds its own when it is made.
#[derive(Debug, Default)]
pub struct ModelBuilder {
    units: RefCell<BTreeMap<Unit, UnitParameters>>,
}

impl ModelBuilder {
    /// A builder for a model without parameters.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Where the layers of a unit are made; names begin with `prefix`.
    pub fn unit(&self, unit: Unit, prefix: impl Display) -> Scope<'_> {
        self.units.borrow_mut().entry(unit).or_default();
        Scope { builder: self, unit, prefix: prefix.to_string() }
    }

    /// The parameters of all units.
    #[must_use]
    pub fn finish(self) -> BTreeMap<Unit, UnitParameters> {
        self.units.into_inner()
    }
}

/// A place in a model's tree of names, as `model.layers.0.self_attn`, where layers are made.
#[derive(Debug, Clone)]
pub struct Scope<'a> {
    builder: &'a ModelBuilder,
    unit: Unit,
    prefix: String,
}

impl Scope<'_> {
    /// The place `name` below this one.
    #[must_use]
    pub fn at(&self, name: impl Display) -> Self {
        Self { prefix: format!("{}.{name}", self.prefix), ..self.clone() }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.prefix
    }

    /// Adds a parameter `name` below this place, and returns its whole name.
    pub fn parameter(&self, name: &str, shape: &[usize], shard: ShardSpec, init: Init) -> String {
        let name = format!("{}.{name}", self.prefix);
        let parameter = Parameter { name: name.clone(), shape: shape.to_vec(), shard, init, is_buffer: false };
        self.with_unit(|unit| unit.parameters.push(parameter));
        name
    }

    /// Adds a parameter that no gradient trains, which each rank holds whole.
    pub fn buffer(&self, name: &str, shape: &[usize], init: Init) -> String {
        let name = format!("{}.{name}", self.prefix);
        let (name_of, shape, shard) = (name.clone(), shape.to_vec(), ShardSpec::Replicated);
        let buffer = Parameter { name: name_of, shape, shard, init, is_buffer: true };
        self.with_unit(|unit| unit.parameters.push(buffer));
        name
    }

    /// Says that the parameter `weight` below this place is that of a linear layer, beside which an adapter can stand.
    pub fn linear_layer(&self, [outputs, inputs]: [usize; 2], shard: ShardSpec, is_router: bool) {
        let layer = LinearLayer { name: self.prefix.clone(), outputs, inputs, shard, is_router };
        self.with_unit(|unit| unit.linear_layers.push(layer));
    }

    fn with_unit(&self, change: impl FnOnce(&mut UnitParameters)) {
        change(self.builder.units.borrow_mut().entry(self.unit).or_default());
    }
}
