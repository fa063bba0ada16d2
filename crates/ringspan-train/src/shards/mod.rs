//! Parameters, gradients and optimiser state sharded over ranks (FSDP; Zhao et al., 2023, and ZeRO; Rajbhandari et al., 2020).
//!
//! A unit's parameters are all-gathered while the unit before is computed, and freed after their use; its gradients are
//! reduce-scattered while the next unit is computed. With a single rank nothing moves. With tensor or expert parallelism, each
//! rank has its partitions of a unit, and shares them only with the other members, which have the same partitions.

mod exchange;
mod flat_parameter;
mod gather;
mod gradient_shards;
mod placement;
mod shared_gathers;
mod stored_matrices;

pub(crate) use flat_parameter::{PartitionShard, whole_partition};
pub(crate) use gradient_shards::GradientShards;
pub(crate) use placement::ShardPlacement;
pub(crate) use shared_gathers::SharedGathers;
pub(crate) use stored_matrices::{ReadMatrix, StoredFormats};

use crate::{
    checkpoint::Slice,
    error::{Error, Result},
};
use candle_core::Tensor;
use exchange::{Exchange, PendingGather};
use flat_parameter::FlatParameter;
use ringspan::comm::{Buffer, Communicator};
use ringspan_candle::model::{Parameter, UnitWeights};
use ringspan_candle::quantized::QuantizedMatrix;
use ringspan_candle::transfers::ReservedMemory;
use ringspan_candle::{Partition, RankDevice, StoredWeights, Transfers, Unit};
use ringspan_models::Decoder;
use std::{cell::RefCell, collections::BTreeMap, ops::Range, sync::Arc};
use stored_matrices::{StoredFlat, StoredShard, weight};

/// This rank's shards of all units.
pub(crate) struct Shards {
    placement: ShardPlacement,
    /// The ranks of this rank's copy of the model.
    copy: Arc<dyn Communicator>,
    replica_groups: Vec<GroupExchange>,
    units: BTreeMap<Unit, Vec<Shard>>,
    /// This rank's shards of matrices that stay as they are stored, each with its replica group.
    stored: BTreeMap<Unit, Vec<(usize, StoredFlat, StoredShard)>>,
    /// Copies gathered parameters to the device that computes, and gradients back. Shards stay on the CPU, in f32.
    transfers: Transfers,
    /// Gathered parameters that the ranks of this process share; none where each has its own copy.
    shared: Option<Arc<SharedGathers>>,
    /// The unit that was prefetched.
    prefetched: RefCell<Option<(Unit, Prefetched)>>,
}

/// The communicators of one of this rank's replica groups.
struct GroupExchange {
    /// Exchanges among the ranks that keep a shard each.
    exchange: Exchange,
    /// The ranks that keep the same shard.
    copies: Arc<dyn Communicator>,
}

/// A shard of a replica group's partitions in a unit: either of the trained ones, or of the frozen ones.
struct Shard {
    replica_group: usize,
    trained: bool,
    flat: FlatParameter,
    values: Arc<Buffer>,
}

/// An all-gather of a unit's partitions that is under way.
struct Gathering {
    /// Exchanges of f32 shards, in the order of the unit's shards.
    numbers: Vec<PendingGather>,
    /// Exchanges of the bytes of matrices that stay as they are stored, of those that the rank does not keep whole.
    stored: Vec<PendingGather>,
}

/// A unit that was prefetched; the default is one of which nothing has begun.
#[derive(Default)]
struct Prefetched {
    /// None where it has not begun, or where the copy of the model is on a single rank.
    gathering: Option<Gathering>,
    /// Memory on the device that computes, in the order of the unit's shards.
    reserved: Vec<ReservedMemory>,
}

impl Shards {
    /// The shards of this rank of `world`, which consists of copies of `placement`'s ranks, one after the other. `read` returns the
    /// values of a partition shard, `read_stored` the rows and columns of a matrix that stays as it is stored; `device` computes with them.
    /// With `shared`, all ranks are threads of this process, compute on the CPU, and pass the same `shared`.
    pub(crate) fn new(
        decoder: &Decoder,
        world: &dyn Communicator,
        placement: ShardPlacement,
        (device, shared): (&RankDevice, Option<Arc<SharedGathers>>),
        mut read: impl FnMut(&PartitionShard<'_>) -> Result<Vec<f32>>,
        read_stored: &mut ReadMatrix,
    ) -> Result<Self> {
        let (copy, rank) = (world.rank() / placement.ranks(), world.rank() % placement.ranks());
        let replica_group = |replica_group| {
            let first = placement.members(rank, replica_group).first().copied().unwrap_or(rank);
            let (first_owner, copies) = match placement.is_sharded() {
                true => (copy * placement.ranks() + first, (rank, copy)),
                false => (world.rank(), (first, world.rank())),
            };
            let (owners, copies) = (world.split(first_owner, rank)?, world.split(copies.0, copies.1)?);
            Ok::<_, Error>(GroupExchange { exchange: Exchange::new(owners, first_owner, replica_group), copies })
        };
        let replica_groups = (0..placement.replica_groups()).map(replica_group).collect::<Result<_>>()?;
        let (mut units, mut stored) = (BTreeMap::new(), BTreeMap::new());
        for unit in decoder.units() {
            let mut shards = Vec::new();
            for trained in [true, false] {
                for (replica_group, flat) in placement.flats(decoder, unit, rank, trained)?.into_iter().enumerate() {
                    let mut values = Vec::with_capacity(flat.shard(placement.shard(rank, replica_group).0).len());
                    for partition_shard in flat.partition_shards(placement.shard(rank, replica_group).0) {
                        values.extend(read(&partition_shard)?);
                    }
                    if !flat.is_empty() {
                        shards.push(Shard { replica_group, trained, flat, values: Arc::new(Buffer::F32(values)) });
                    }
                }
            }
            units.insert(unit, shards);
            let mut of_unit = Vec::new();
            for (replica_group, flat) in placement.stored_flats(decoder, unit, rank)?.into_iter().enumerate() {
                if !flat.is_empty() {
                    let kept = flat.keep(placement.shard(rank, replica_group).0, read_stored)?;
                    of_unit.push((replica_group, flat, kept));
                }
            }
            stored.insert(unit, of_unit);
        }
        let copy = world.split(copy, rank)?;
        let (transfers, prefetched) = (Transfers::new(device)?, RefCell::default());
        Ok(Self { placement, copy, replica_groups, units, stored, transfers, shared, prefetched })
    }

    /// The ranks that hold one copy of the parameters together.
    pub(crate) fn copy(&self) -> &Arc<dyn Communicator> {
        &self.copy
    }

    /// Whether this rank writes its shards of a replica group to checkpoints: it is the first of the ranks that keep the same ones.
    fn keeps(&self, replica_group: usize) -> bool {
        self.replica_groups[replica_group].copies.rank() == 0
    }

    /// This rank's trained partition shards that it writes to checkpoints, as the first of the ranks that keep them.
    pub(crate) fn kept(&self) -> impl Iterator<Item = PartitionShard<'_>> {
        self.trained().filter(|shard| self.keeps(shard.replica_group)).flat_map(|shard| self.partition_shards_of(shard))
    }

    /// This rank's partition shards of trained parameters.
    pub(crate) fn partition_shards(&self) -> impl Iterator<Item = PartitionShard<'_>> {
        self.trained().flat_map(|shard| self.partition_shards_of(shard))
    }

    fn trained(&self) -> impl Iterator<Item = &Shard> {
        self.units.values().flatten().filter(|shard| shard.trained)
    }

    fn partition_shards_of<'a>(&self, shard: &'a Shard) -> impl Iterator<Item = PartitionShard<'a>> + use<'a> {
        shard.flat.partition_shards(self.replica_groups[shard.replica_group].exchange.group().rank())
    }

    /// The values of the partition shards that this rank writes to checkpoints; they share the shards' memory while training goes on.
    pub(crate) fn slices(&self) -> Vec<Slice> {
        let mut slices = Vec::new();
        for shard in self.trained().filter(|shard| self.keeps(shard.replica_group)) {
            for partition_shard in self.partition_shards_of(shard) {
                let values = ShardSlice { shard: shard.values.clone(), range: partition_shard.in_shard.clone() };
                slices.push(partition_shard.slice(partition_shard.partition.name.clone(), Arc::new(values)));
            }
        }
        slices
    }

    /// The sum over the copy's ranks of the squares of a step's gradients, each element counted once.
    pub(crate) fn sum_of_squares(&self, gradients: &Sums, of: impl Fn(&[f32]) -> f64) -> f64 {
        let of_unit = |(unit, shards): (&Unit, &Vec<Shard>)| -> f64 {
            let sums = gradients.get(unit).into_iter().flatten();
            let trained = shards.iter().filter(|shard| shard.trained);
            let once = |shard: &Shard, sum: &[f32]| match self.placement.is_sharded() {
                true => of(sum),
                false => of(sum) / self.placement.members(self.copy.rank(), shard.replica_group).len() as f64,
            };
            trained.zip(sums).map(|(shard, sum)| once(shard, sum)).sum()
        };
        self.units.iter().map(of_unit).sum()
    }

    /// Calls `update` with each of this rank's trained partition shards, its values, and its gradient.
    pub(crate) fn update(
        &mut self,
        gradients: &Sums,
        mut update: impl FnMut(&PartitionShard<'_>, &mut [f32], &[f32]) -> Result<()>,
    ) -> Result<()> {
        for (unit, shards) in &mut self.units {
            let missing = || Error::Model(format!("no gradient came for {unit:?}"));
            let mut of_unit = gradients.get(unit).into_iter().flatten();
            for shard in shards.iter_mut().filter(|shard| shard.trained) {
                let gradient = of_unit.next().ok_or_else(missing)?;
                // Another rank, or the thread that writes a checkpoint, may still hold this buffer: it keeps the old values.
                let Buffer::F32(values) = Arc::make_mut(&mut shard.values) else { continue };
                for partition_shard in
                    shard.flat.partition_shards(self.replica_groups[shard.replica_group].exchange.group().rank())
                {
                    update(
                        &partition_shard,
                        &mut values[partition_shard.in_shard.clone()],
                        &gradient[partition_shard.in_shard.clone()],
                    )?;
                }
            }
        }
        Ok(())
    }

    fn held(&self, unit: Unit) -> Result<&[Shard]> {
        let held = self.units.get(&unit).map(Vec::as_slice);
        held.ok_or_else(|| Error::Model(format!("the model has no {unit:?}")))
    }

    fn gather(&self, unit: Unit) -> Result<Gathering> {
        let start = |Shard { replica_group, values, .. }: &Shard| {
            self.replica_groups[*replica_group].exchange.start_gather(values)
        };
        let numbers = self.held(unit)?.iter().map(start).collect::<Result<_>>()?;
        let stored = self.held_stored(unit).iter().filter_map(|(replica_group, _, kept)| match kept {
            StoredShard::Whole(_) => None,
            StoredShard::Part(bytes) => Some(self.replica_groups[*replica_group].exchange.start_gather(bytes)),
        });
        Ok(Gathering { numbers, stored: stored.collect::<Result<_>>()? })
    }

    fn held_stored(&self, unit: Unit) -> &[(usize, StoredFlat, StoredShard)] {
        self.stored.get(&unit).map_or(&[], Vec::as_slice)
    }

    /// Puts together the unit's partitions of matrices that stay as they are stored.
    fn stored_partitions(
        &self,
        unit: Unit,
        under_way: Vec<PendingGather>,
    ) -> Result<Vec<(&Partition, QuantizedMatrix)>> {
        let (mut all, mut under_way) = (Vec::new(), under_way.into_iter());
        let shared = self.shared.as_ref().map(|shared| &shared.stored);
        for (replica_group, flat, kept) in self.held_stored(unit) {
            match (kept, kept.is_part().then(|| under_way.next()).flatten()) {
                (StoredShard::Whole(matrices), _) => all.extend(flat.partitions().zip(matrices.iter().cloned())),
                (StoredShard::Part(_), Some(under_way)) => {
                    let exchange = &self.replica_groups[*replica_group].exchange;
                    all.extend(
                        flat.partitions().zip(exchange.finish_gather(under_way, shared, |shards| flat.whole(shards))?),
                    );
                }
                (StoredShard::Part(_), None) => return Err(Error::Model(format!("no bytes of {unit:?} came"))),
            }
        }
        Ok(all)
    }

    /// Reserves memory for the unit on the device that computes.
    fn reserved(&self, unit: Unit) -> Result<Vec<ReservedMemory>> {
        let reserved = |shard: &Shard| Ok(self.transfers.reserve(&shard.flat.sizes().collect::<Vec<_>>())?);
        self.held(unit)?.iter().map(reserved).collect()
    }

    /// Waits for all shards of a unit and puts its partitions together on the device that computes.
    fn finish(&self, unit: Unit, Prefetched { gathering, reserved }: Prefetched) -> Result<StoredWeights> {
        let gathering = gathering.map_or_else(|| self.gather(unit), Ok)?;
        let reserved = reserved.into_iter().chain(std::iter::repeat_with(ReservedMemory::default));
        let (mut weights, mut stacked) = (StoredWeights::new(), BTreeMap::new());
        let shared = self.shared.as_ref().map(|shared| &shared.numbers);
        for ((under_way, reserved), shard) in gathering.numbers.into_iter().zip(reserved).zip(self.held(unit)?) {
            let assemble = |shards: &[Arc<Buffer>]| {
                let shards: Vec<&[f32]> = shards.iter().map(|shard| numbers(shard)).collect();
                Ok(self.transfers.upload(reserved, &shard.flat.whole(&shards)?)?)
            };
            let exchange = &self.replica_groups[shard.replica_group].exchange;
            let tensors = exchange.finish_gather(under_way, shared, assemble)?;
            for (partition, tensor) in shard.flat.partitions().zip(tensors) {
                match partition.stacked_at {
                    None => drop(weights.insert(partition.name.clone(), tensor.into())),
                    Some(row) => drop(stacked.entry(&partition.name).or_insert_with(BTreeMap::new).insert(row, tensor)),
                }
            }
        }
        for (name, parts) in stacked {
            let parts: Vec<Tensor> = parts.into_values().collect();
            weights.insert(name.clone(), Tensor::cat(&parts, 0)?.into());
        }
        let mut stacked = BTreeMap::new();
        let precision = self.transfers.precision();
        for (partition, matrix) in self.stored_partitions(unit, gathering.stored)? {
            match partition.stacked_at {
                None => {
                    drop(weights.insert(partition.name.clone(), weight(partition, matrix.computing_in(precision))?))
                }
                Some(row) => drop(stacked.entry(&partition.name).or_insert_with(BTreeMap::new).insert(row, matrix)),
            }
        }
        for (name, parts) in stacked {
            let parts: Vec<QuantizedMatrix> = parts.into_values().collect();
            weights.insert(name.clone(), QuantizedMatrix::concat_rows(&parts)?.computing_in(precision).into());
        }
        Ok(weights)
    }
}

/// This rank's shards of the sums of gradients, in the order of each unit's trained shards.
pub(crate) type Sums = BTreeMap<Unit, Vec<Vec<f32>>>;

impl UnitWeights for Shards {
    fn prefetch(&self, unit: Unit) -> candle_core::Result<()> {
        let mut ahead = self.prefetched.borrow_mut();
        if ahead.is_none() {
            let announced = || {
                let gathering = if self.copy.size() > 1 { Some(self.gather(unit)?) } else { None };
                Ok::<_, Error>(Prefetched { gathering, reserved: self.reserved(unit)? })
            };
            *ahead = Some((unit, announced().map_err(candle_core::Error::wrap)?));
        }
        Ok(())
    }

    fn unit(&self, unit: Unit, _: &[Parameter]) -> candle_core::Result<StoredWeights> {
        let whole = || {
            let prefetched = match self.prefetched.take() {
                Some((announced, ahead)) if announced == unit => ahead,
                // A unit that was prefetched but is not asked for has to be received all the same, or it would be taken for the
                // next one.
                Some((_, Prefetched { gathering: Some(gathering), .. })) => {
                    let all = gathering.numbers.into_iter().chain(gathering.stored);
                    all.into_iter().try_for_each(PendingGather::discard)?;
                    Prefetched::default()
                }
                _ => Prefetched::default(),
            };
            self.finish(unit, prefetched)
        };
        whole().map_err(candle_core::Error::wrap)
    }
}

/// A part of a shard; it keeps its values even if the rank updates the shard.
struct ShardSlice {
    shard: Arc<Buffer>,
    range: Range<usize>,
}

impl AsRef<[f32]> for ShardSlice {
    fn as_ref(&self) -> &[f32] {
        &numbers(&self.shard)[self.range.clone()]
    }
}

/// The elements of an f32 shard; none for a buffer of another type, which its length then reveals.
fn numbers(buffer: &Buffer) -> &[f32] {
    match buffer {
        Buffer::F32(values) => values,
        _ => &[],
    }
}
