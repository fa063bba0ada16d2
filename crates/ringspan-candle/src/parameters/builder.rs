//! Collects the parameters of a model while its layers are constructed.

use super::{Init, LinearLayer, ModelParameters, Parameter, Unit, UnitParameters};
use crate::shard::ShardSpec;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;

/// The parameters of a model under construction, unit by unit. Each layer adds its own when it is constructed.
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

    /// The scope in which the layers of a unit are constructed; their names begin with `prefix`.
    pub fn unit(&self, unit: Unit, prefix: impl Display) -> Scope<'_> {
        self.units.borrow_mut().entry(unit).or_default();
        Scope { builder: self, unit, prefix: prefix.to_string() }
    }

    /// The parameters of all units.
    #[must_use]
    pub fn finish(self) -> ModelParameters {
        ModelParameters::new(self.units.into_inner())
    }
}

/// A prefix of parameter names, such as `model.layers.0.self_attn`, under which layers are constructed.
#[derive(Debug, Clone)]
pub struct Scope<'a> {
    builder: &'a ModelBuilder,
    unit: Unit,
    prefix: String,
}

impl Scope<'_> {
    /// The scope `name` within this one.
    #[must_use]
    pub fn at(&self, name: impl Display) -> Self {
        Self { prefix: self.name_of(name), ..self.clone() }
    }

    /// The whole name of `name` in this scope; a scope without a prefix is that of a whole checkpoint.
    fn name_of(&self, name: impl Display) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    /// The prefix of names in this scope.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.prefix
    }

    /// Adds a parameter `name` in this scope, and returns its whole name.
    pub fn parameter(&self, name: &str, shape: &[usize], shard: ShardSpec, init: Init) -> String {
        let name = self.name_of(name);
        let parameter = Parameter { name: name.clone(), shape: shape.to_vec(), shard, init, is_buffer: false };
        self.with_unit(|unit| unit.parameters.push(parameter));
        name
    }

    /// Adds a parameter that is not trained by gradients and that each rank holds whole; returns its whole name.
    pub fn buffer(&self, name: &str, shape: &[usize], init: Init) -> String {
        let name = self.name_of(name);
        let (name_of, shape, shard) = (name.clone(), shape.to_vec(), ShardSpec::Replicated);
        let buffer = Parameter { name: name_of, shape, shard, init, is_buffer: true };
        self.with_unit(|unit| unit.parameters.push(buffer));
        name
    }

    /// Declares that this scope's parameter `weight` is that of a linear layer, which can be adapted.
    pub fn linear_layer(&self, [outputs, inputs]: [usize; 2], shard: ShardSpec, is_router: bool) {
        let layer = LinearLayer { name: self.prefix.clone(), outputs, inputs, shard, is_router };
        self.with_unit(|unit| unit.linear_layers.push(layer));
    }

    fn with_unit(&self, change: impl FnOnce(&mut UnitParameters)) {
        change(self.builder.units.borrow_mut().entry(self.unit).or_default());
    }
}
