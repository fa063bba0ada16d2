//! Weights of which each rank holds a share.

use super::weight_message::{decode, encode};
use super::weight_shares::WeightShares;
use crate::error::{Error, Result, of_candle};
use bytes::Bytes;
use ringspan::comm::{Buffer, Communicator, PendingAllToAll};
use ringspan_candle::model::{Parameter, Unit, UnitWeights};
use ringspan_candle::{StoredWeights, Weight};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A transformer's weights, fully sharded: each rank holds some of every unit's, and the whole unit only while it computes with it
/// (as in FSDP and ZeRO 3). All ranks must take and announce the same units in the same order.
pub struct ShardedWeights {
    /// A group for these messages alone.
    comm: Arc<dyn Communicator>,
    units: BTreeMap<Unit, ShardedUnit>,
    /// Weights that every rank holds: the matrices of adapters.
    replicated: StoredWeights,
    /// The unit that is taken next, if that is known.
    ahead: RefCell<Option<(Unit, UnitAhead)>>,
}

/// Weights of a unit that is taken next.
enum UnitAhead {
    /// They are travelling.
    Travelling(PendingAllToAll),
    /// They were put back.
    Here(StoredWeights),
}

struct ShardedUnit {
    /// The names of the weights of each rank.
    names: Vec<Vec<String>>,
    /// This rank's weights as a message, which is sent as it is.
    own: Arc<Buffer>,
}

/// The tag of all messages: they arrive in the order in which they are sent.
const TAG: u64 = 0;

impl ShardedWeights {
    /// Reads this rank's share; `read` reads a weight by its name.
    pub(super) fn new(
        comm: Arc<dyn Communicator>,
        shares: &WeightShares,
        replicated: StoredWeights,
        read: impl Fn(&str) -> Result<Weight>,
    ) -> Result<Self> {
        let mut units = BTreeMap::new();
        for (unit, shares) in shares.units() {
            let share = shares.get(comm.rank());
            // Room for all of it from the beginning: allocators leave a block that is made smaller later where it is.
            let mut own = Vec::with_capacity(share.map_or(0, |share| share.bytes as usize));
            for name in share.into_iter().flat_map(|share| &share.names) {
                encode(&read(name)?, &mut own)?;
            }
            let names = shares.iter().map(|share| share.names.clone()).collect();
            units.insert(*unit, ShardedUnit { names, own: Arc::new(Buffer::U8(own)) });
        }
        Ok(Self { comm, units, replicated, ahead: RefCell::default() })
    }

    /// Bytes that this rank holds, adapters apart.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.units.values().map(|unit| unit.own.bytes()).sum()
    }

    /// Begins to gather a unit.
    fn start(&self, unit: &ShardedUnit) -> Result<PendingAllToAll> {
        Ok(self.comm.start_all_to_all(TAG, vec![unit.own.clone(); self.comm.size()])?)
    }

    /// The weights of a unit: its adapters' matrices, and what all ranks hold of its other parameters.
    fn gathered(&self, unit: Unit, parameters: &[Parameter]) -> Result<StoredWeights> {
        let replicated = |Parameter { name, .. }: &Parameter| Some((name.clone(), self.replicated.get(name)?.clone()));
        let mut weights: StoredWeights = parameters.iter().filter_map(replicated).collect();
        let Some(sharded) = self.units.get(&unit) else { return Ok(weights) };
        let mut messages = match self.ahead.take() {
            Some((ahead, UnitAhead::Here(weights))) if ahead == unit => return Ok(weights),
            Some((ahead, UnitAhead::Travelling(messages))) if ahead == unit => messages,
            // What was announced and is not taken has been sent all the same.
            Some((_, UnitAhead::Travelling(other))) => {
                other.wait()?;
                self.start(sharded)?
            }
            Some((_, UnitAhead::Here(_))) | None => self.start(sharded)?,
        };
        // Each message is freed before the weights of the next one are made.
        for (rank, names) in sharded.names.iter().enumerate() {
            let refuse = |problem: String| Err(Error::Mesh(format!("rank {rank} has sent {problem} for {unit:?}")));
            let mut message = match messages.next_part()?.map(Arc::try_unwrap) {
                Some(Ok(Buffer::U8(bytes))) => Bytes::from(bytes),
                Some(Err(held)) if matches!(*held, Buffer::U8(_)) => Bytes::from_owner(HeldBytes(held)),
                _ => return refuse("no bytes".into()),
            };
            for name in names {
                match decode(&mut message) {
                    Ok(weight) => weights.insert(name.clone(), weight),
                    Err(error) => return refuse(format!("what is not {name}, {error},")),
                };
            }
            if !message.is_empty() {
                return refuse(format!("{} bytes too many", message.len()));
            }
        }
        messages.finish()?;
        Ok(weights)
    }
}

impl UnitWeights for ShardedWeights {
    fn unit(&self, unit: Unit, parameters: &[Parameter]) -> candle_core::Result<StoredWeights> {
        self.gathered(unit, parameters).map_err(of_candle)
    }

    fn prefetch(&self, unit: Unit) -> candle_core::Result<()> {
        let mut ahead = self.ahead.borrow_mut();
        let is_wanted = match &*ahead {
            Some((_, UnitAhead::Travelling(_))) => false,
            Some((here, UnitAhead::Here(_))) => *here != unit,
            None => true,
        };
        if let Some(sharded) = self.units.get(&unit).filter(|_| is_wanted) {
            *ahead = Some((unit, UnitAhead::Travelling(self.start(sharded).map_err(of_candle)?)));
        }
        Ok(())
    }

    fn put_back(&self, unit: Unit, weights: StoredWeights) {
        let mut ahead = self.ahead.borrow_mut();
        if self.units.contains_key(&unit) && ahead.is_none() {
            *ahead = Some((unit, UnitAhead::Here(weights)));
        }
    }
}

/// A message that is held elsewhere, too: this rank's own, or one that ranks of this process share.
struct HeldBytes(Arc<Buffer>);

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        match &*self.0 {
            Buffer::U8(bytes) => bytes,
            _ => &[],
        }
    }
}

impl fmt::Debug for ShardedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { comm, units, replicated, .. } = self;
        f.debug_struct("ShardedWeights")
            .field("rank", &comm.rank())
            .field("units", &units.len())
            .field("bytes", &self.bytes())
            .field("replicated", &replicated.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transformer::{WanFolder, WeightType};
    use ringspan::comm::threads;
    use std::path::Path;

    #[test]
    fn ranks_hold_the_bytes_that_are_planned() -> Result<()> {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        for (name, of) in [
            ("transformer/t2v", WeightType::F32),
            ("transformer/i2v", WeightType::Bf16),
            ("transformer/ti2v", WeightType::AsStored),
            ("transformer/vace", WeightType::AsStored),
            ("gguf/wan.gguf", WeightType::AsStored),
        ] {
            let folder = WanFolder::open(&fixtures.join(name))?;
            for ranks in [2, 3] {
                let held = threads::run(ranks, threads::Options::default(), |comm| {
                    Result::Ok(folder.load_share(of, comm)?.bytes())
                })?;
                let planned = folder.shares(of, ranks);
                assert_eq!(held.into_iter().max(), Some(planned.most()), "{name} as {of} on {ranks} ranks");
            }
        }
        Ok(())
    }
}
