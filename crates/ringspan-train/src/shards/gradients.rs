//! Gradients, summed over the ranks while the next unit is computed, of which each rank keeps its shard.

use super::{Shards, exchange::UnderWay, numbers};
use crate::error::{Error, Result};
use ringspan::comm::{Buffer, Communicator};
use ringspan_models::{Unit, gradients::Gradients};
use std::{collections::BTreeMap, sync::Arc};

/// The sums so far of a step's gradients, this rank's shards of them.
pub(crate) struct GradientShards<'a> {
    shards: &'a Shards,
    sums: BTreeMap<Unit, Vec<f32>>,
    under_way: Option<(Unit, UnderWay)>,
}

impl<'a> GradientShards<'a> {
    pub(crate) fn new(shards: &'a Shards) -> Self {
        Self { shards, sums: BTreeMap::new(), under_way: None }
    }

    /// Takes this rank's gradients of a unit. They are on their way when this returns.
    pub(crate) fn add(&mut self, unit: Unit, gradients: Gradients) -> Result<()> {
        // One unit at a time: what is under way takes as much memory as the unit itself.
        self.settle()?;
        let flat = &self.shards.held(unit)?.trained.flat;
        if flat.is_empty() {
            return Ok(());
        }
        let mut parts: Vec<Option<Vec<f32>>> = flat.cut(gradients)?.into_iter().map(Some).collect();
        let part = |rank: usize| Arc::new(Buffer::F32(parts[rank].take().unwrap_or_default()));
        self.under_way = Some((unit, self.shards.exchange.start(part)?));
        Ok(())
    }

    /// Adds what is under way to the sums, in rank order: the same bits whoever comes first.
    fn settle(&mut self) -> Result<()> {
        let Some((unit, under_way)) = self.under_way.take() else { return Ok(()) };
        let mut sum: Option<Vec<f32>> = None;
        for (rank, part) in under_way.finish()?.into_iter().enumerate() {
            match &mut sum {
                None => sum = Some(Arc::try_unwrap(part).map_or_else(|part| numbers(&part).to_vec(), into_numbers)),
                Some(sum) if sum.len() == part.len() => add(sum, numbers(&part)),
                Some(sum) => {
                    return Err(Error::Model(format!(
                        "rank {rank} sent {} gradients of a shard of {}",
                        part.len(),
                        sum.len()
                    )));
                }
            }
        }
        let sum = sum.unwrap_or_default();
        match self.sums.get_mut(&unit) {
            Some(before) => add(before, &sum),
            None => drop(self.sums.insert(unit, sum)),
        }
        Ok(())
    }

    /// The sums over all micro-batches and over `copies`: the ranks that hold the same shard of other copies.
    pub(crate) fn finish(mut self, copies: &dyn Communicator) -> Result<BTreeMap<Unit, Vec<f32>>> {
        self.settle()?;
        for sum in self.sums.values_mut() {
            copies.all_reduce(sum)?;
        }
        Ok(self.sums)
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

fn into_numbers(buffer: Buffer) -> Vec<f32> {
    match buffer {
        Buffer::F32(values) => values,
        _ => Vec::new(),
    }
}
