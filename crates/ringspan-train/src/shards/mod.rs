//! Parameters, gradients and optimiser state cut across ranks (FSDP; Zhao et al., 2023, and ZeRO; Rajbhandari et al.,
//! 2020).
//!
//! A unit's parameters are gathered while the unit before is computed, and let go after it; its gradients are summed
//! over the ranks, each rank keeping its shard, while the next unit is computed. With a single rank everything is here
//! and nothing moves.

mod exchange;
mod flat;
mod gradients;

pub(crate) use flat::{Flat, Piece};
pub(crate) use gradients::GradientShards;

use crate::{
    checkpoint::Slice,
    error::{Error, Result},
};
use exchange::{Exchange, UnderWay};
use ringspan::comm::{Buffer, Communicator};
use ringspan_models::{Decoder, Parameters, Unit, Weights};
use std::{cell::RefCell, collections::BTreeMap, ops::Range, sync::Arc};

/// This rank's shard of every unit.
pub(crate) struct Shards {
    exchange: Exchange,
    units: BTreeMap<Unit, Held>,
    /// The unit that is on its way here.
    ahead: RefCell<Option<(Unit, Gathering)>>,
}

/// Shards of a unit: of the parameters that are trained, and of those that stay as they are.
struct Held {
    trained: Shard,
    frozen: Shard,
}

struct Shard {
    flat: Flat,
    values: Arc<Buffer>,
}

/// The shards of all ranks of a unit, under way.
struct Gathering {
    trained: Option<UnderWay>,
    frozen: Option<UnderWay>,
}

impl Shards {
    /// The shards of this rank of `group`; `read` gives the values of a piece. The group is used for nothing else.
    pub(crate) fn new(
        decoder: &Decoder,
        group: Arc<dyn Communicator>,
        mut read: impl FnMut(&Piece<'_>) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let (rank, ranks) = (group.rank(), group.size());
        let mut shard = |shapes| {
            let flat = Flat::new(shapes, ranks);
            let mut values = Vec::with_capacity(flat.shard(rank).len());
            for piece in flat.pieces(rank) {
                values.extend(read(&piece)?);
            }
            Ok::<_, Error>(Shard { flat, values: Arc::new(Buffer::F32(values)) })
        };
        let mut units = BTreeMap::new();
        for unit in decoder.units() {
            let (trained, frozen) = decoder.unit_shapes(unit).into_iter().partition(|(name, _)| decoder.trains(name));
            units.insert(unit, Held { trained: shard(trained)?, frozen: shard(frozen)? });
        }
        Ok(Self { exchange: Exchange::new(group), units, ahead: RefCell::default() })
    }

    /// The ranks that hold one copy of the parameters together.
    pub(crate) fn group(&self) -> &Arc<dyn Communicator> {
        self.exchange.group()
    }

    /// This rank's pieces of what is trained, with the number of their elements.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let rank = self.group().rank();
        self.units.values().flat_map(move |held| held.trained.flat.pieces(rank))
    }

    /// This rank's pieces of what is trained, to be written while training goes on.
    pub(crate) fn slices(&self) -> Vec<Slice> {
        let rank = self.group().rank();
        let of_unit = |Held { trained, .. }: &Held| {
            let slice = |piece: Piece<'_>| Slice {
                name: piece.name.to_owned(),
                start: piece.of_parameter.start,
                values: Arc::new(Stretch { shard: trained.values.clone(), range: piece.of_shard }),
            };
            trained.flat.pieces(rank).map(slice).collect::<Vec<_>>()
        };
        self.units.values().flat_map(of_unit).collect()
    }

    /// Calls `update` with each of this rank's pieces of what is trained, its values, and its gradient.
    pub(crate) fn update(
        &mut self,
        gradients: &BTreeMap<Unit, Vec<f32>>,
        mut update: impl FnMut(&Piece<'_>, &mut [f32], &[f32]) -> Result<()>,
    ) -> Result<()> {
        let rank = self.group().rank();
        for (unit, Held { trained: Shard { flat, values }, .. }) in &mut self.units {
            if flat.is_empty() {
                continue;
            }
            let gradient = gradients.get(unit).ok_or_else(|| Error::Model(format!("no gradient came for {unit:?}")))?;
            // Another rank may hold this buffer still, or a checkpoint be written from it: they keep the old values.
            let Buffer::F32(values) = Arc::make_mut(values) else { continue };
            for piece in flat.pieces(rank) {
                update(&piece, &mut values[piece.of_shard.clone()], &gradient[piece.of_shard.clone()])?;
            }
        }
        Ok(())
    }

    fn held(&self, unit: Unit) -> Result<&Held> {
        self.units.get(&unit).ok_or_else(|| Error::Model(format!("the model has no {unit:?}")))
    }

    fn gather(&self, unit: Unit) -> Result<Gathering> {
        let Held { trained, frozen } = self.held(unit)?;
        let start = |Shard { flat, values }: &Shard| {
            (!flat.is_empty()).then(|| self.exchange.start(|_| values.clone())).transpose()
        };
        Ok(Gathering { trained: start(trained)?, frozen: start(frozen)? })
    }
}

impl Gathering {
    /// The parameters of the unit, when all shards are here.
    fn finish(self, held: &Held) -> Result<Weights> {
        let mut weights = Weights::new();
        for (under_way, shard) in [(self.trained, &held.trained), (self.frozen, &held.frozen)] {
            let Some(under_way) = under_way else { continue };
            let shards = under_way.finish()?;
            weights.extend(shard.flat.whole(&shards.iter().map(|shard| numbers(shard)).collect::<Vec<_>>())?);
        }
        Ok(weights)
    }
}

impl Parameters for Shards {
    fn prefetch(&self, unit: Unit) -> ringspan_models::Result<()> {
        let mut ahead = self.ahead.borrow_mut();
        if ahead.is_none() && self.group().size() > 1 {
            *ahead = Some((unit, self.gather(unit).map_err(candle_core::Error::wrap)?));
        }
        Ok(())
    }

    fn unit(&self, _decoder: &Decoder, unit: Unit) -> ringspan_models::Result<Weights> {
        let whole = || {
            let gathering = match self.ahead.take() {
                Some((ahead, gathering)) if ahead == unit => gathering,
                // Announced but not asked for: it has to arrive all the same, or it would be taken for the next.
                Some((other, gathering)) => {
                    gathering.finish(self.held(other)?)?;
                    self.gather(unit)?
                }
                None => self.gather(unit)?,
            };
            gathering.finish(self.held(unit)?)
        };
        Ok(whole().map_err(candle_core::Error::wrap)?)
    }
}

/// Part of a shard, kept as it is even if the rank goes on.
struct Stretch {
    shard: Arc<Buffer>,
    range: Range<usize>,
}

impl AsRef<[f32]> for Stretch {
    fn as_ref(&self) -> &[f32] {
        &numbers(&self.shard)[self.range.clone()]
    }
}

/// The numbers of a shard; none if it is something else, which its length then tells.
fn numbers(buffer: &Buffer) -> &[f32] {
    match buffer {
        Buffer::F32(values) => values,
        _ => &[],
    }
}
