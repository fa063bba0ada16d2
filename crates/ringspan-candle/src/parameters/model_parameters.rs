//! All parameters of a model, and how ranks share them.

use super::{LinearLayer, Parameter, Unit, UnitParameters};
use crate::lora::{Adapters, layer_of};
use crate::shard::{ParallelRank, Partition, ReplicaGroup, ShardError, ShardSpec, replica_groups};
use std::collections::BTreeMap;

/// The parameters of a model by unit.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelParameters(BTreeMap<Unit, UnitParameters>);

impl ModelParameters {
    /// The parameters of a model that has these units.
    #[must_use]
    pub fn new(units: BTreeMap<Unit, UnitParameters>) -> Self {
        Self(units)
    }

    /// The same parameters with the matrices of these adapters in place of any others; they follow the other parameters of their unit.
    #[must_use]
    pub fn with_adapters(&self, adapters: &Adapters) -> Self {
        let mut units = self.0.clone();
        for UnitParameters { parameters, linear_layers } in units.values_mut() {
            parameters.retain(|parameter| layer_of(&parameter.name).is_none());
            let adapted = linear_layers.iter().filter_map(|layer| Some((layer, adapters.size(&layer.name)?)));
            for (layer, size) in adapted {
                parameters.extend(layer.adapter_parameters(size.rank));
            }
        }
        Self(units)
    }

    /// The parameters of a unit.
    #[must_use]
    pub fn of_unit(&self, unit: Unit) -> &[Parameter] {
        self.0.get(&unit).map_or(&[], |unit| &unit.parameters)
    }

    /// The parameters of all units.
    pub fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.0.values().flat_map(|unit| &unit.parameters)
    }

    /// The linear layers of a unit, each of which can have an adapter.
    #[must_use]
    pub fn linear_layers_of(&self, unit: Unit) -> &[LinearLayer] {
        self.0.get(&unit).map_or(&[], |unit| &unit.linear_layers)
    }

    /// The linear layers of all units, each of which can have an adapter.
    pub fn linear_layers(&self) -> impl Iterator<Item = &LinearLayer> {
        self.0.values().flat_map(|unit| &unit.linear_layers)
    }

    /// The part of each parameter of a unit that a rank computes with (its tensor- and expert-parallel shard).
    ///
    /// # Errors
    /// More ranks than the heads can be distributed over.
    pub fn partitions(&self, unit: Unit, rank: ParallelRank) -> Result<Vec<Partition>, ShardError> {
        let mut all = Vec::new();
        for Parameter { name, shape, shard, .. } in self.of_unit(unit) {
            all.extend(shard.partitions(name, shape, rank)?);
        }
        Ok(all)
    }

    /// The replica groups that a rank belongs to, in an order that is the same for all ranks.
    ///
    /// # Errors
    /// More ranks than the heads can be distributed over.
    pub fn replica_groups(&self, rank: ParallelRank) -> Result<Vec<ReplicaGroup>, ShardError> {
        replica_groups(self.iter().map(|parameter| &parameter.shard), rank)
    }

    /// Refuses more ranks than the model can be sharded over: `tp` for tensor parallelism, `ep` for expert parallelism, and
    /// `moe_tp` for sharding the width of an expert.
    ///
    /// # Errors
    /// A dimension that is too small, with the numbers; a model without experts.
    pub fn check(&self, tp: usize, ep: usize, moe_tp: usize) -> Result<(), ShardError> {
        if ep * moe_tp > 1 && !self.iter().any(|parameter| parameter.shard.is_of_experts()) {
            let problem = format!("ep {ep} x moe_tp {moe_tp} ranks share experts, and the model has none");
            return Err(ShardError::Expert(problem));
        }
        let rank = ParallelRank { tp: (0, tp), ep: (0, ep), moe_tp: (0, moe_tp) };
        self.iter().try_for_each(|parameter| parameter.shard.check(&parameter.shape, rank))
    }
}

impl Parameter {
    /// Whether it is one tensor that stacks the matrices of all experts of a layer.
    #[must_use]
    pub fn is_expert_stack(&self) -> bool {
        matches!(self.shard, ShardSpec::Experts(_)) && self.shape.len() == 3
    }
}
