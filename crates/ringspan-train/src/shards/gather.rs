//! Puts whole parameters together from the shards of all ranks of a copy, for export and for comparisons.

use super::{Shard, Shards, Sums, numbers};
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use ringspan::comm::Buffer;
use ringspan_candle::{Unit, Weights};
use ringspan_models::Decoder;
use std::collections::BTreeMap;

impl Shards {
    /// The whole parameters of a unit, on the first rank of the copy; empty on the others. All its ranks must call this.
    pub(crate) fn whole(&self, decoder: &Decoder, unit: Unit) -> Result<Weights> {
        let own: Vec<&[f32]> = self.held(unit)?.iter().map(|shard| numbers(&shard.values)).collect();
        self.together(decoder, unit, &own, |_| true)
    }

    /// The whole gradients of a unit's trained parameters, on the first rank of the copy; empty on the others. All its ranks must
    /// call this.
    pub(crate) fn whole_gradients(&self, decoder: &Decoder, unit: Unit, sums: &Sums) -> Result<Weights> {
        let own: Vec<&[f32]> = sums.get(&unit).into_iter().flatten().map(Vec::as_slice).collect();
        self.together(decoder, unit, &own, |trained| trained)
    }

    /// Gathers whole parameters from shards; `own` are this rank's, and `asked` chooses between trained and frozen ones.
    fn together(&self, decoder: &Decoder, unit: Unit, own: &[&[f32]], asked: impl Fn(bool) -> bool) -> Result<Weights> {
        let placement = &self.placement;
        let gives = |rank: usize, replica_group: usize| {
            placement.is_sharded() || placement.members(rank, replica_group)[0] == rank
        };
        let kept = |shard: &&Shard| asked(shard.trained);
        let mut sent = Vec::new();
        for (shard, values) in self.held(unit)?.iter().filter(kept).zip(own) {
            if gives(self.copy.rank(), shard.replica_group) {
                sent.extend_from_slice(values);
            }
        }
        let all = self.copy.all_gather(Buffer::F32(sent))?;
        if self.copy.rank() != 0 {
            return Ok(Weights::new());
        }

        let mut values: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
        for (rank, buffer) in all.iter().enumerate() {
            let mut rest = numbers(buffer);
            for trained in [true, false].into_iter().filter(|trained| asked(*trained)) {
                for (replica_group, flat) in placement.flats(decoder, unit, rank, trained)?.iter().enumerate() {
                    let (index, _) = placement.shard(rank, replica_group);
                    let len = if gives(rank, replica_group) { flat.shard(index).len() } else { continue };
                    let Some((shard, later)) = rest.split_at_checked(len) else {
                        return Err(Error::Model(format!("rank {rank} sent {} numbers of {unit:?}", buffer.len())));
                    };
                    rest = later;
                    for partition_shard in flat.partition_shards(index) {
                        let partition = partition_shard.partition;
                        let size = partition.whole.iter().product();
                        let (_, whole) = values
                            .entry(partition.name.clone())
                            .or_insert_with(|| (partition.whole.clone(), vec![0.0; size]));
                        partition_shard.scatter_into(&shard[partition_shard.in_shard.clone()], whole);
                    }
                }
            }
        }
        let tensor = |(name, (shape, values))| Ok((name, Tensor::from_vec(values, shape, &Device::Cpu)?));
        values.into_iter().map(tensor).collect()
    }
}
