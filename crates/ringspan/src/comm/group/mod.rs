//! A group of ranks as seen by one of them, over any transport: defines the semantics of all collectives.

pub(super) mod failure;
pub(super) mod mailbox;
pub(super) mod operation;
pub(super) mod part;
mod pending;
pub(super) mod transport;

use crate::comm::{Buffer, Communicator, Pending};
use crate::error::{Error, Result};
use crate::sync::AtomicU64;
use mailbox::{Address, GroupId};
use operation::{Call, Collective, Operation};
use part::CollectivePart;
use pending::{PendingReceive, PendingSend};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use transport::{Member, Transport};

pub(in crate::comm) struct Group<W> {
    world: Arc<W>,
    id: GroupId,
    /// World ranks, by rank in the group.
    ranks: Arc<[usize]>,
    rank: usize,
    /// Number of the next collective.
    next: AtomicU64,
}

/// The result of an exchange: the parts that all ranks sent to this one, in rank order.
struct Exchanged {
    number: u64,
    operation: Operation,
    parts: Vec<CollectivePart>,
}

impl<W: Transport> Group<W> {
    /// The group of all ranks of a world, as seen by `rank`.
    pub(in crate::comm) fn world(world: Arc<W>, ranks: Arc<[usize]>, rank: usize) -> Self {
        Self { world, id: Arc::new([]), ranks, rank, next: AtomicU64::new(0) }
    }

    fn own(&self) -> usize {
        self.ranks[self.rank]
    }

    fn operation(&self, call: Call) -> Operation {
        Operation { call, group: (!self.id.is_empty()).then(|| self.ranks.clone()) }
    }

    /// Numbers a collective and describes it.
    fn begin(&self, collective: Collective) -> (u64, Operation) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number, self.operation(Call::Collective { number, collective }))
    }

    /// Fails the world because of an invalid call, since the other ranks would wait for this rank's part.
    fn refuse<T>(&self, operation: &Operation, problem: String) -> Result<T> {
        self.world.check(self.own(), operation)?;
        let error = Error::Communicator { rank: self.own(), operation: operation.to_string(), problem };
        self.world.fail(self.own(), error.to_string());
        Err(error)
    }

    /// The world rank of a rank of the group, with the operation that `call` makes of it.
    fn peer(&self, peer: usize, call: impl Fn(usize) -> Call) -> Result<(usize, Operation)> {
        match self.ranks.get(peer) {
            Some(&world) => Ok((world, self.operation(call(world)))),
            None => {
                let problem = format!("rank {peer} is not in a group of {}", self.size());
                self.refuse(&self.operation(call(peer)), problem)
            }
        }
    }

    /// Exchanges parts all-to-all, the basis of every collective.
    fn exchange(&self, collective: Collective, parts: Vec<CollectivePart>) -> Result<Exchanged> {
        let (number, operation) = self.begin(collective);
        if parts.len() != self.size() {
            let problem = format!("{} parts for {} ranks", parts.len(), self.size());
            return self.refuse(&operation, problem);
        }
        for part in &parts {
            self.check_memory(&part.data, &operation)?;
        }
        let member = Member { group: &self.id, ranks: &self.ranks, index: self.rank };
        let parts = self.world.join(member, number, &operation, parts)?;
        Ok(Exchanged { number, operation, parts })
    }

    /// Refuses device memory if the transport cannot pass it on.
    fn check_memory(&self, data: &Buffer, operation: &Operation) -> Result<()> {
        match data {
            Buffer::Device(_) if !self.world.passes_device_memory() => {
                let problem = "elements in the memory of a device, which only ranks of one process hand over";
                self.refuse(operation, problem.into())
            }
            _ => Ok(()),
        }
    }

    fn f32<'a>(&self, part: &'a CollectivePart, len: usize, operation: &Operation) -> Result<&'a [f32]> {
        match &*part.data {
            Buffer::F32(values) if part.range.len() == len => Ok(&values[part.range.clone()]),
            other => self.refuse(operation, format!("received {} elements that are not {len} of f32", other.len())),
        }
    }

    /// Sums `parts` in rank order.
    fn sum(&self, parts: &[CollectivePart], len: usize, operation: &Operation) -> Result<Vec<f32>> {
        let mut sum = vec![0.0; len];
        for (rank, part) in parts.iter().enumerate() {
            let part = self.f32(part, len, operation)?;
            if rank == 0 {
                // The first part is copied, not added to 0, which would turn -0 into 0.
                sum.copy_from_slice(part);
                continue;
            }
            for (sum, x) in sum.iter_mut().zip(part) {
                *sum += x;
            }
        }
        Ok(sum)
    }
}

impl<W: Transport> Communicator for Group<W> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>> {
        let elements = data.len();
        let (to, operation) = self.peer(to, |to| Call::Send { elements, to, tag })?;
        self.check_memory(&data, &operation)?;
        let address = Address { group: self.id.clone(), from: self.own(), to, tag };
        let number = self.world.send(address.clone(), &operation, data)?;
        Ok(Box::new(PendingSend { world: self.world.clone(), address, operation, number }))
    }

    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>> {
        let (from, operation) = self.peer(from, |from| Call::Receive { from, tag })?;
        let address = Address { group: self.id.clone(), from, to: self.own(), tag };
        Ok(Box::new(PendingReceive::new(self.world.clone(), address, operation)?))
    }

    fn progress(&self) {
        self.world.progress();
    }

    fn passes_device_memory(&self) -> bool {
        self.world.passes_device_memory()
    }

    fn all_to_all(&self, parts: Vec<Buffer>) -> Result<Vec<Arc<Buffer>>> {
        let parts = parts.into_iter().map(|part| CollectivePart::whole(Arc::new(part))).collect();
        Ok(buffers(self.exchange(Collective::AllToAll, parts)?.parts))
    }

    fn all_gather(&self, data: Buffer) -> Result<Vec<Arc<Buffer>>> {
        let part = CollectivePart::whole(Arc::new(data));
        Ok(buffers(self.exchange(Collective::AllGather, vec![part; self.size()])?.parts))
    }

    fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize]) -> Result<Vec<f32>> {
        let collective = Collective::ReduceScatter { counts: counts.to_vec() };
        let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        if counts.len() != self.size() || total != Some(data.len()) {
            let (_, operation) = self.begin(collective);
            let problem = format!("{} counts for {} elements on {} ranks", counts.len(), data.len(), self.size());
            return self.refuse(&operation, problem);
        }
        let Exchanged { operation, parts, .. } =
            self.exchange(collective, split(Arc::new(Buffer::F32(data)), counts))?;
        self.sum(&parts, counts[self.rank], &operation)
    }

    fn all_reduce(&self, data: &mut [f32]) -> Result<()> {
        let (size, elements) = (self.size(), data.len());
        let (share, more) = (elements / size, elements % size);
        let counts: Vec<usize> = (0..size).map(|rank| share + usize::from(rank < more)).collect();
        let parts = split(Arc::new(Buffer::F32(data.to_vec())), &counts);
        let Exchanged { operation, parts, .. } = self.exchange(Collective::AllReduce { elements }, parts)?;
        let own = CollectivePart::whole(Arc::new(Buffer::F32(self.sum(&parts, counts[self.rank], &operation)?)));
        let Exchanged { operation, parts: sums, .. } =
            self.exchange(Collective::AllReduce { elements }, vec![own; size])?;
        let mut rest = data;
        for (part, &count) in sums.iter().zip(&counts) {
            let (here, later) = rest.split_at_mut(count);
            here.copy_from_slice(self.f32(part, count, &operation)?);
            rest = later;
        }
        Ok(())
    }

    fn broadcast(&self, root: usize, data: Option<Buffer>) -> Result<Arc<Buffer>> {
        let complete = root != self.rank || data.is_some();
        let collective = |root| Collective::Broadcast { root, complete };
        let problem = if root >= self.size() {
            Some(format!("rank {root} is not in a group of {}", self.size()))
        } else if root != self.rank && data.is_some() {
            Some("a rank that is not the root gave data".to_owned())
        } else if !complete && self.size() == 1 {
            Some("the root gave no data".to_owned())
        } else {
            None
        };
        let world_root = self.ranks.get(root).copied().unwrap_or(root);
        if let Some(problem) = problem {
            let (_, operation) = self.begin(collective(world_root));
            return self.refuse(&operation, problem);
        }
        // Ranks without data send empty messages, so that ranks with different roots notice it.
        let part = CollectivePart::whole(Arc::new(data.unwrap_or(Buffer::U8(Vec::new()))));
        let Exchanged { parts, .. } = self.exchange(collective(world_root), vec![part; self.size()])?;
        Ok(buffers(parts).swap_remove(root))
    }

    fn barrier(&self) -> Result<()> {
        let nothing = CollectivePart::whole(Arc::new(Buffer::U8(Vec::new())));
        self.exchange(Collective::Barrier, vec![nothing; self.size()]).map(|_| ())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>> {
        let part = CollectivePart::whole(Arc::new(Buffer::U64(vec![color as u64, key as u64])));
        let Exchanged { number, operation, parts } = self.exchange(Collective::Split, vec![part; self.size()])?;
        let mut members: Vec<(u64, usize)> = Vec::new();
        for (rank, part) in parts.iter().enumerate() {
            match &*part.data {
                Buffer::U64(pair) if pair.len() == 2 => {
                    if pair[0] == color as u64 {
                        members.push((pair[1], rank));
                    }
                }
                _ => return self.refuse(&operation, format!("rank {rank} sent no color and key")),
            }
        }
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank)| *rank == self.rank).unwrap_or_default();
        let ranks = members.iter().map(|(_, rank)| self.ranks[*rank]).collect();
        let id = self.id.iter().copied().chain([(number, color as u64)]).collect();
        Ok(Arc::new(Self { world: self.world.clone(), id, ranks, rank, next: AtomicU64::new(0) }))
    }

    fn bytes_sent(&self) -> u64 {
        self.world.bytes_sent(self.own())
    }
}

fn buffers(parts: Vec<CollectivePart>) -> Vec<Arc<Buffer>> {
    parts.into_iter().map(|part| part.data).collect()
}

/// Divides a buffer into consecutive parts of the given lengths, without copying.
fn split(data: Arc<Buffer>, counts: &[usize]) -> Vec<CollectivePart> {
    let mut start = 0;
    let part = |&count: &usize| {
        let range = start..start + count;
        start = range.end;
        CollectivePart { data: data.clone(), range }
    };
    counts.iter().map(part).collect()
}
