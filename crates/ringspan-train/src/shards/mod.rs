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
    flats: BTreeMap<Unit, Flat>,
    values: BTreeMap<Unit, Arc<Buffer>>,
    /// The unit that is on its way here.
    ahead: RefCell<Option<(Unit, UnderWay)>>,
}

impl Shards {
    /// The shards of this rank of `group`; `read` gives the values of a piece. The group is used for nothing else.
    pub(crate) fn new(
        decoder: &Decoder,
        group: Arc<dyn Communicator>,
        mut read: impl FnMut(&Piece<'_>) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let (rank, ranks) = (group.rank(), group.size());
        let flats: BTreeMap<Unit, Flat> =
            decoder.units().map(|unit| (unit, Flat::new(decoder.unit_shapes(unit), ranks))).collect();
        let mut values = BTreeMap::new();
        for (unit, flat) in &flats {
            let mut shard = Vec::with_capacity(flat.shard(rank).len());
            for piece in flat.pieces(rank) {
                shard.extend(read(&piece)?);
            }
            values.insert(*unit, Arc::new(Buffer::F32(shard)));
        }
        Ok(Self { exchange: Exchange::new(group), flats, values, ahead: RefCell::default() })
    }

    /// The ranks that hold one copy of the parameters together.
    pub(crate) fn group(&self) -> &Arc<dyn Communicator> {
        self.exchange.group()
    }

    /// This rank's pieces of all parameters, with their values.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (Piece<'_>, &[f32])> {
        let rank = self.group().rank();
        self.flats.iter().zip(self.values.values()).flat_map(move |((_, flat), shard)| {
            let values = numbers(shard);
            flat.pieces(rank).map(move |piece| (piece.clone(), &values[piece.of_shard]))
        })
    }

    /// This rank's pieces of all parameters, to be written while training goes on.
    pub(crate) fn slices(&self) -> Vec<Slice> {
        let rank = self.group().rank();
        let of_unit = |(flat, shard): (&Flat, &Arc<Buffer>)| {
            let slice = |piece: Piece<'_>| Slice {
                name: piece.name.to_owned(),
                start: piece.of_parameter.start,
                values: Arc::new(Stretch { shard: shard.clone(), range: piece.of_shard }),
            };
            flat.pieces(rank).map(slice).collect::<Vec<_>>()
        };
        self.flats.values().zip(self.values.values()).flat_map(of_unit).collect()
    }

    /// Calls `update` with each of this rank's pieces, its values, and its gradient.
    pub(crate) fn update(
        &mut self,
        gradients: &BTreeMap<Unit, Vec<f32>>,
        mut update: impl FnMut(&Piece<'_>, &mut [f32], &[f32]) -> Result<()>,
    ) -> Result<()> {
        let rank = self.group().rank();
        for (unit, flat) in &self.flats {
            let (Some(gradient), Some(shard)) = (gradients.get(unit), self.values.get_mut(unit)) else {
                return Err(Error::Model(format!("no gradient came for {unit:?}")));
            };
            // Another rank may hold this buffer still, or a checkpoint be written from it: they keep the old values.
            let Buffer::F32(values) = Arc::make_mut(shard) else { continue };
            for piece in flat.pieces(rank) {
                update(&piece, &mut values[piece.of_shard.clone()], &gradient[piece.of_shard.clone()])?;
            }
        }
        Ok(())
    }

    fn gather(&self, unit: Unit) -> Result<UnderWay> {
        let own = self.values.get(&unit).ok_or_else(|| Error::Model(format!("the model has no {unit:?}")))?;
        self.exchange.start(|_| own.clone())
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
            let under_way = match self.ahead.take() {
                Some((ahead, under_way)) if ahead == unit => under_way,
                other => {
                    // Announced but not asked for: it has to arrive all the same, or it would be taken for the next.
                    other.map_or(Ok(Vec::new()), |(_, under_way)| under_way.finish())?;
                    self.gather(unit)?
                }
            };
            let shards = under_way.finish()?;
            let shards: Vec<&[f32]> = shards.iter().map(|shard| numbers(shard)).collect();
            match self.flats.get(&unit) {
                Some(flat) => flat.whole(&shards),
                None => Err(Error::Model(format!("the model has no {unit:?}"))),
            }
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
