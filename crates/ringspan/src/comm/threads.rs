//! Ranks as threads of one process.

mod world;

use super::{Buffer, Communicator, Pending};
use crate::error::{Error, Result};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use world::{Address, Kind, Message, World};

/// How to run ranks as threads.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Longest wait for another rank.
    pub deadline: Duration,
    /// Stack of a rank's thread. Candle's backward recurses once per operation.
    pub stack_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(300), stack_bytes: 64 << 20 }
    }
}

/// Runs `rank_main` on `size` ranks and returns their results in rank order.
///
/// # Errors
/// The error of the rank that failed first. A rank that fails or panics makes the others fail at their next wait.
pub fn run<T, E, F>(size: usize, options: Options, rank_main: F) -> std::result::Result<Vec<T>, E>
where
    F: Fn(Arc<dyn Communicator>) -> std::result::Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    if size == 0 {
        return Err(Error::MeshSize { mesh: "threads".into(), needed: 1, ranks: 0 }.into());
    }
    let world = Arc::new(World::new(size, options.deadline));
    let ranks: Arc<[usize]> = (0..size).collect();
    let mut results = std::thread::scope(|scope| {
        let spawn = |rank: usize| {
            let comm = Group { world: world.clone(), id: 0, ranks: ranks.clone(), rank, next: AtomicU64::new(0) };
            let (world, rank_main) = (world.clone(), &rank_main);
            let main = move || {
                let result = catch_unwind(AssertUnwindSafe(|| rank_main(Arc::new(comm))))
                    .unwrap_or_else(|panic| Err(Error::Panicked { rank, message: panic_message(&*panic) }.into()));
                match &result {
                    Ok(_) => world.finish(rank),
                    Err(error) => world.fail(rank, error.to_string()),
                }
                result
            };
            let thread = std::thread::Builder::new().name(format!("rank-{rank}")).stack_size(options.stack_bytes);
            thread.spawn_scoped(scope, main)
        };
        let started: Vec<_> = (0..size).map(spawn).collect();
        for (rank, error) in started.iter().enumerate().filter_map(|(rank, thread)| Some((rank, thread.as_ref().err()?))) {
            world.fail(rank, format!("its thread did not start: {error}"));
        }
        let join = |(rank, thread): (usize, std::io::Result<std::thread::ScopedJoinHandle<'_, _>>)| {
            let problem = match thread.map(|thread| thread.join()) {
                Ok(Ok(result)) => return result,
                Ok(Err(panic)) => panic_message(&*panic),
                Err(error) => format!("its thread did not start: {error}"),
            };
            Err(Error::Communicator { rank, operation: "run".into(), problem }.into())
        };
        started.into_iter().enumerate().map(join).collect::<Vec<std::result::Result<T, E>>>()
    });
    // The others' errors only tell of the first one.
    let first = world.first_failure().filter(|&rank| results.get(rank).is_some_and(|result| result.is_err()));
    if let Some(rank) = first
        && let Err(error) = results.swap_remove(rank)
    {
        return Err(error);
    }
    results.into_iter().collect()
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}

/// A group of ranks, as one of them sees it.
struct Group {
    world: Arc<World>,
    id: u64,
    /// Ranks of the world, by rank of the group.
    ranks: Arc<[usize]>,
    rank: usize,
    /// Number of the next collective.
    next: AtomicU64,
}

impl Group {
    fn own(&self) -> usize {
        self.ranks[self.rank]
    }

    fn peer(&self, peer: usize, operation: &str) -> Result<usize> {
        self.ranks.get(peer).copied().ok_or_else(|| Error::Communicator {
            rank: self.own(),
            operation: operation.to_owned(),
            problem: format!("rank {peer} is not in a group of {}", self.size()),
        })
    }

    fn refuse<T>(&self, operation: &str, problem: String) -> Result<T> {
        Err(Error::Communicator { rank: self.own(), operation: operation.to_owned(), problem })
    }

    /// All-to-all of whole messages, the base of every collective. `describe` gets the collective's number and says
    /// all that the ranks must agree on; ranks that describe it differently are in different collectives.
    fn exchange(&self, describe: impl FnOnce(u64) -> String, parts: Vec<Arc<Buffer>>) -> Result<Vec<Arc<Buffer>>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let operation = describe(number);
        if parts.len() != self.size() {
            let problem = format!("{} parts for {} ranks", parts.len(), self.size());
            return self.refuse(&operation, problem);
        }
        let kind = Kind::Collective(number);
        let own = parts[self.rank].clone();
        for (rank, data) in parts.into_iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
            let address = Address { group: self.id, from: self.own(), to: self.ranks[rank], kind };
            self.world.post(address, Message { operation: operation.clone(), data })?;
        }
        let mut received = Vec::with_capacity(self.size());
        for (rank, &from) in self.ranks.iter().enumerate() {
            if rank == self.rank {
                received.push(own.clone());
                continue;
            }
            let address = Address { group: self.id, from, to: self.own(), kind };
            let message = self.world.take(address, &operation)?;
            if message.operation != operation {
                let error = Error::Mismatch {
                    rank: self.own(),
                    operation,
                    peer: from,
                    peer_operation: message.operation,
                };
                self.world.fail(self.own(), error.to_string());
                return Err(error);
            }
            received.push(message.data);
        }
        Ok(received)
    }

    fn f32<'a>(&self, buffer: &'a Buffer, operation: &str) -> Result<&'a [f32]> {
        match buffer {
            Buffer::F32(values) => Ok(values),
            other => self.refuse(operation, format!("received {} elements that are not f32", other.len())),
        }
    }

    /// Sum of `parts` in rank order.
    fn sum(&self, parts: &[Arc<Buffer>], len: usize, operation: &str) -> Result<Vec<f32>> {
        let mut sum = vec![0.0; len];
        for part in parts {
            for (sum, x) in sum.iter_mut().zip(self.f32(part, operation)?) {
                *sum += x;
            }
        }
        Ok(sum)
    }
}

impl Communicator for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>> {
        let operation = format!("send of {} elements to rank {to} (tag {tag})", data.len());
        let to = self.peer(to, &operation)?;
        let address = Address { group: self.id, from: self.own(), to, kind: Kind::Tag(tag) };
        self.world.post(address, Message { operation, data })?;
        Ok(Box::new(Sent))
    }

    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>> {
        let operation = format!("receive from rank {from} (tag {tag})");
        let from = self.peer(from, &operation)?;
        let address = Address { group: self.id, from, to: self.own(), kind: Kind::Tag(tag) };
        Ok(Box::new(Receiving { world: self.world.clone(), address, operation }))
    }

    fn all_to_all(&self, parts: Vec<Buffer>) -> Result<Vec<Arc<Buffer>>> {
        self.exchange(|number| format!("all_to_all #{number}"), parts.into_iter().map(Arc::new).collect())
    }

    fn all_gather(&self, data: Buffer) -> Result<Vec<Arc<Buffer>>> {
        let data = Arc::new(data);
        self.exchange(|number| format!("all_gather #{number}"), vec![data; self.size()])
    }

    fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize]) -> Result<Vec<f32>> {
        let describe = |number: u64| format!("reduce_scatter #{number} of {counts:?} elements");
        if counts.len() != self.size() || counts.iter().sum::<usize>() != data.len() {
            let problem = format!("{} elements for {} ranks", data.len(), self.size());
            return self.refuse(&describe(self.next.load(Ordering::Relaxed)), problem);
        }
        let parts = split(&data, counts);
        self.sum(&self.exchange(describe, parts)?, counts[self.rank], "reduce_scatter")
    }

    fn all_reduce(&self, data: &mut [f32]) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        let (size, len) = (self.size(), data.len());
        let counts: Vec<usize> = (0..size).map(|rank| (rank + 1) * len / size - rank * len / size).collect();
        let parts = self.exchange(|number| format!("all_reduce #{number} of {len} elements"), split(data, &counts))?;
        let own = Arc::new(Buffer::F32(self.sum(&parts, counts[self.rank], "all_reduce")?));
        let sums = self.exchange(|number| format!("all_reduce #{number} of {len} elements"), vec![own; size])?;
        let mut rest = data;
        for (part, &count) in sums.iter().zip(&counts) {
            let (here, later) = rest.split_at_mut(count);
            here.copy_from_slice(self.f32(part, "all_reduce")?);
            rest = later;
        }
        Ok(())
    }

    fn broadcast(&self, root: usize, data: Option<Buffer>) -> Result<Arc<Buffer>> {
        let describe = |number: u64| format!("broadcast #{number} from rank {root}");
        let operation = || describe(self.next.load(Ordering::Relaxed));
        self.peer(root, &operation())?;
        if data.is_some() != (root == self.rank) {
            let problem = if root == self.rank { "the root gave no data" } else { "a rank that is not the root gave data" };
            return self.refuse(&operation(), problem.to_owned());
        }
        // Ranks without data send empty messages, so that ranks with different roots find out.
        let data = Arc::new(data.unwrap_or(Buffer::U8(Vec::new())));
        Ok(self.exchange(describe, vec![data; self.size()])?.swap_remove(root))
    }

    fn barrier(&self) -> Result<()> {
        let nothing = Arc::new(Buffer::U8(Vec::new()));
        self.exchange(|number| format!("barrier #{number}"), vec![nothing; self.size()]).map(|_| ())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>> {
        let number = self.next.load(Ordering::Relaxed);
        let own = Arc::new(Buffer::U64(vec![color as u64, key as u64]));
        let all = self.exchange(|number| format!("split #{number}"), vec![own; self.size()])?;
        let mut members: Vec<(u64, usize)> = Vec::new();
        for (rank, theirs) in all.iter().enumerate() {
            match &**theirs {
                Buffer::U64(pair) if pair.len() == 2 => {
                    if pair[0] == color as u64 {
                        members.push((pair[1], rank));
                    }
                }
                _ => return self.refuse("split", format!("rank {rank} sent no color and key")),
            }
        }
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank)| *rank == self.rank).unwrap_or_default();
        let ranks = members.iter().map(|(_, rank)| self.ranks[*rank]).collect();
        let id = self.world.group_id(self.id, number, color as u64);
        Ok(Arc::new(Self { world: self.world.clone(), id, ranks, rank, next: AtomicU64::new(0) }))
    }

    fn bytes_sent(&self) -> u64 {
        self.world.bytes_sent(self.own())
    }
}

/// Parts of the given lengths, in order.
fn split(data: &[f32], counts: &[usize]) -> Vec<Arc<Buffer>> {
    let mut rest = data;
    let mut parts = Vec::with_capacity(counts.len());
    for &count in counts {
        let (part, later) = rest.split_at(count);
        parts.push(Arc::new(Buffer::F32(part.to_vec())));
        rest = later;
    }
    parts
}

/// A send ends when it starts: the mailbox owns the message.
struct Sent;

impl Pending for Sent {
    fn test(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>> {
        Ok(None)
    }
}

struct Receiving {
    world: Arc<World>,
    address: Address,
    operation: String,
}

impl Pending for Receiving {
    fn test(&mut self) -> Result<bool> {
        self.world.has(self.address, &self.operation)
    }

    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>> {
        Ok(Some(self.world.take(self.address, &self.operation)?.data))
    }
}
