//! Reduce-scatters gradients: they are summed over the ranks while the next unit is computed, and each rank keeps its shard.

use super::{Shards, Sums, numbers};
use crate::error::{Error, Result};
use ringspan::comm::{Buffer, PendingAllToAll};
use ringspan_candle::Unit;
use ringspan_candle::gradients::Gradients;
use ringspan_candle::transfers::Download;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The sums so far of a step's gradients: this rank's shards of them.
pub(crate) struct GradientShards<'a> {
    shards: &'a Shards,
    sums: Sums,
    in_flight: Option<(Unit, Vec<PendingAllToAll>)>,
    /// The unit whose gradients are copied from a GPU while it computes the next one's.
    downloading: Option<(Unit, Download)>,
}

impl<'a> GradientShards<'a> {
    pub(crate) fn new(shards: &'a Shards) -> Self {
        Self { shards, sums: Sums::new(), in_flight: None, downloading: None }
    }

    /// Adds this rank's gradients of a unit. They are on their way when this returns: to the other ranks, or first from the GPU
    /// to the CPU.
    pub(crate) fn add(&mut self, unit: Unit, gradients: Gradients) -> Result<()> {
        let gradients = self.shards.transfers.download(self.by_partition(unit, gradients)?)?;
        if gradients.is_here() {
            return self.send(unit, gradients);
        }
        match self.downloading.replace((unit, gradients)) {
            Some((before, gradients)) => self.send(before, gradients),
            None => Ok(()),
        }
    }

    /// Splits the gradient of each parameter of which this rank has several partitions into one gradient per partition.
    fn by_partition(&self, unit: Unit, mut gradients: Gradients) -> Result<Gradients> {
        let (mut parts, mut whole) = (Gradients::new(), BTreeSet::new());
        for partition in self.shards.held(unit)?.iter().flat_map(|shard| shard.flat.partitions()) {
            if let (Some(row), Some(gradient)) = (partition.stacked_at, gradients.get(&partition.name)) {
                parts.insert(partition.key().into_owned(), gradient.narrow(0, row, partition.rows.len())?);
                whole.insert(&partition.name);
            }
        }
        gradients.retain(|name, _| !whole.contains(name));
        gradients.extend(parts);
        Ok(gradients)
    }

    /// Sends each member its shard of a unit's gradients.
    fn send(&mut self, unit: Unit, mut gradients: Download) -> Result<()> {
        // Only one unit is under way at a time: its messages take as much memory as the unit itself.
        self.add_received()?;
        let mut in_flight = Vec::new();
        for shard in self.shards.held(unit)?.iter().filter(|shard| shard.trained) {
            let mut parts: Vec<Option<Vec<f32>>> = shard.flat.cut(&mut gradients)?.into_iter().map(Some).collect();
            let part = |rank: usize| Arc::new(Buffer::F32(parts[rank].take().unwrap_or_default()));
            in_flight.push(self.shards.replica_groups[shard.replica_group].exchange.start(part)?);
        }
        if let Some(name) = gradients.rest() {
            return Err(Error::Model(format!("a gradient came for `{name}`, which is no parameter of its unit")));
        }
        self.in_flight = Some((unit, in_flight));
        Ok(())
    }

    /// Adds the gradients that are under way to the sums, in rank order: the bits do not depend on which message comes first.
    fn add_received(&mut self) -> Result<()> {
        let Some((unit, in_flight)) = self.in_flight.take() else { return Ok(()) };
        let sums = in_flight.into_iter().map(sum).collect::<Result<Vec<_>>>()?;
        match self.sums.get_mut(&unit) {
            Some(before) => before.iter_mut().zip(&sums).for_each(|(before, sum)| add(before, sum)),
            None => drop(self.sums.insert(unit, sums)),
        }
        Ok(())
    }

    /// Completes the sums over all micro-batches, and over the ranks that keep the same shards.
    pub(crate) fn finish(mut self) -> Result<Sums> {
        if let Some((unit, gradients)) = self.downloading.take() {
            self.send(unit, gradients)?;
        }
        self.add_received()?;
        for (unit, sums) in &mut self.sums {
            let trained = self.shards.held(*unit)?.iter().filter(|shard| shard.trained);
            for (shard, sum) in trained.zip(sums) {
                let copies = &self.shards.replica_groups[shard.replica_group].copies;
                // A rank alone has nothing to add, and need not hold the unit once more.
                if copies.size() > 1 {
                    copies.all_reduce(sum)?;
                }
            }
        }
        Ok(self.sums)
    }
}

/// Waits for an exchange and sums what all ranks sent.
fn sum(in_flight: PendingAllToAll) -> Result<Vec<f32>> {
    let mut sum: Option<Vec<f32>> = None;
    for (rank, part) in in_flight.wait()?.into_iter().enumerate() {
        match &mut sum {
            None => sum = Some(Arc::try_unwrap(part).map_or_else(|part| numbers(&part).to_vec(), into_numbers)),
            Some(sum) if sum.len() == part.len() => add(sum, numbers(&part)),
            Some(sum) => {
                let (got, expected) = (part.len(), sum.len());
                return Err(Error::Model(format!("rank {rank} sent {got} gradients of a shard of {expected}")));
            }
        }
    }
    Ok(sum.unwrap_or_default())
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
