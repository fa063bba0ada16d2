//! The transport between threads of one process: waits for others, and wakes the ranks that a message or a failure
//! concerns.

use super::round::Round;
use super::shared::{Awaited, Message, RankState, Shared};
use super::simulated_link::SimulatedLink;
use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, Mailbox};
use crate::comm::group::operation::Operation;
use crate::comm::group::part::CollectivePart;
use crate::comm::group::transport::{Member, Transport};
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, processors, spin_until};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// In larger worlds a rank looks for a deadlock only now and then: the ranks of a ring wait for each other in long chains,
/// and following them at every wait would take longer than the work.
const MAX_RANKS_CHECKED_AT_EACH_WAIT: usize = 64;

/// The shared state behind one lock: ranks exchange few, large messages, so there is little contention.
pub(super) struct ThreadTransport {
    shared: Mutex<Shared>,
    ranks: Vec<RankSignal>,
    /// Whether a rank spins before it sleeps: not if there are more ranks than processors.
    spins: bool,
    deadline: Duration,
}

/// Tells a rank that what it waits for may have come. Each rank has its own, so that a message wakes only its receiver.
struct RankSignal {
    changed: Condvar,
    /// Counts the notifications, for a rank that spins.
    count: AtomicU64,
}

impl RankSignal {
    fn new() -> Self {
        Self { changed: Condvar::new(), count: AtomicU64::new(0) }
    }

    fn notify(&self) {
        self.count.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }
}

impl ThreadTransport {
    pub(super) fn new(size: usize, deadline: Duration, link: Option<SimulatedLink>) -> Self {
        Self {
            shared: Mutex::new(Shared::new(size, link)),
            ranks: (0..size).map(|_| RankSignal::new()).collect(),
            spins: size <= processors(),
            deadline,
        }
    }

    /// Lets all ranks compute again after a call that all of them have finished.
    pub(super) fn restart(&self) -> std::result::Result<(), (usize, String)> {
        self.lock().restart()
    }

    /// Records that `rank` runs on the calling thread.
    pub(super) fn begin(&self, rank: usize) {
        self.lock().begin(rank);
    }

    /// Records that `rank` has finished.
    pub(super) fn finish(&self, rank: usize) {
        self.lock().enter(rank, RankState::Finished);
        self.wake_all();
    }

    /// The ranks that failed, in order of their failures.
    pub(super) fn failed(&self) -> Vec<usize> {
        self.lock().failed.clone()
    }

    /// Waits until `awaited` has arrived. Fails at the deadline, or once it can no longer arrive.
    fn wait(&self, rank: usize, operation: &Operation, awaited: Awaited) -> Result<MutexGuard<'_, Shared>> {
        let start = Instant::now();
        let mut shared = self.lock();
        let home = shared.note_thread(rank);
        // Every rank of a cycle can detect it, so it does not matter which of them looks, nor when.
        let ranks = self.ranks.len();
        let between_looks =
            Duration::from_millis(if ranks > MAX_RANKS_CHECKED_AT_EACH_WAIT { ranks as u64 } else { 0 });
        let mut next_look = between_looks;
        let mut spins = self.spins;
        loop {
            shared.check(rank, operation)?;
            let missing = shared.missing(&awaited);
            let late = if missing.is_empty() { shared.under_way(rank, &awaited) } else { None };
            let Some(peer) = missing.first().copied().or(late.map(|(peer, _)| peer)) else {
                if home {
                    shared.enter(rank, RankState::Computes);
                }
                return Ok(shared);
            };
            if let Some(peer) = shared.finished(&missing) {
                return Err(self.give_up(shared, rank, operation, peer));
            }
            if spins && late.is_none() {
                let signal = &self.ranks[rank].count;
                let seen = signal.load(Ordering::Acquire);
                drop(shared);
                // A notification may be of something else, so the rank spins on until the time is over.
                spins = spin_until(start, || signal.load(Ordering::Acquire) != seen);
                shared = self.lock();
                continue;
            }
            if home {
                shared.enter(rank, RankState::Waits { operation: operation.clone(), awaited: awaited.clone() });
                let looks = start.elapsed() >= next_look;
                if looks {
                    next_look = start.elapsed() + between_looks;
                }
                if let Some(cycle) = looks.then(|| shared.cycle(rank)).flatten() {
                    let failure = Failure::Deadlock { problem: shared.deadlock(&cycle) };
                    let error = failure.seen_by(rank, operation);
                    shared.fail(rank, failure);
                    drop(shared);
                    self.wake_all();
                    return Err(error);
                }
            }
            let waited = start.elapsed();
            if waited >= self.deadline {
                let error = Error::Deadline {
                    rank,
                    operation: operation.to_string(),
                    peer,
                    peer_state: shared.describe(peer),
                    waited: self.deadline,
                };
                shared.fail(rank, Failure::Rank { peer: rank, message: error.to_string() });
                drop(shared);
                self.wake_all();
                return Err(error);
            }
            let mut left = self.deadline - waited;
            if next_look > waited {
                left = left.min(next_look - waited);
            }
            let pause = late.map_or(left, |(_, due)| left.min(due.saturating_duration_since(Instant::now())));
            let woken = self.ranks[rank].changed.wait_timeout(shared, pause);
            shared = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Fails because `peer` finished before it sent its part of `operation`.
    fn give_up(&self, mut shared: MutexGuard<'_, Shared>, rank: usize, operation: &Operation, peer: usize) -> Error {
        let message = format!("it finished without sending what rank {rank} waits for in {operation}");
        let failure = Failure::Rank { peer, message };
        let error = failure.seen_by(rank, operation);
        shared.fail(rank, failure);
        drop(shared);
        self.wake_all();
        error
    }

    fn wake_all(&self) {
        self.ranks.iter().for_each(RankSignal::notify);
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // No user code runs under the lock, so a panic that poisons it leaves no state inconsistent.
        self.shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Transport for ThreadTransport {
    fn check(&self, rank: usize, operation: &Operation) -> Result<()> {
        self.lock().check(rank, operation)
    }

    fn fail(&self, rank: usize, message: String) {
        self.lock().fail(rank, Failure::Rank { peer: rank, message });
        self.wake_all();
    }

    /// Puts the message into its mailbox, with which the send has ended.
    fn send(&self, address: Address, operation: &Operation, data: Arc<Buffer>) -> Result<u64> {
        let mut shared = self.lock();
        shared.check(address.from, operation)?;
        shared.note_thread(address.from);
        let (from, to) = (address.from, address.to);
        if from != to {
            shared.bytes_sent[from] += data.bytes();
        }
        let due = shared.due(from, to, data.bytes());
        shared.with_mailbox(address, |mailbox| mailbox.send(Message { data, due }));
        drop(shared);
        self.ranks[to].notify();
        Ok(0)
    }

    fn left(&self, rank: usize, _: u64, operation: &Operation) -> Result<bool> {
        self.check(rank, operation).map(|()| true)
    }

    fn wait_left(&self, address: &Address, _: u64, operation: &Operation) -> Result<()> {
        self.check(address.from, operation)
    }

    fn post(&self, address: &Address, operation: &Operation) -> Result<u64> {
        let mut shared = self.lock();
        shared.check(address.to, operation)?;
        shared.note_thread(address.to);
        Ok(shared.with_mailbox(address.clone(), Mailbox::post))
    }

    fn has(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<bool> {
        let shared = self.lock();
        shared.check(address.to, operation)?;
        let awaited = Awaited::Message { address: address.clone(), ticket };
        let missing = shared.missing(&awaited);
        match shared.finished(&missing) {
            Some(peer) => Err(self.give_up(shared, address.to, operation, peer)),
            None => Ok(missing.is_empty() && shared.under_way(address.to, &awaited).is_none()),
        }
    }

    fn take(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<Arc<Buffer>> {
        let awaited = Awaited::Message { address: address.clone(), ticket };
        let mut shared = self.wait(address.to, operation, awaited)?;
        let message = shared.with_mailbox(address.clone(), |mailbox| mailbox.take(ticket));
        message.map(|message| message.data).ok_or_else(|| Error::Communicator {
            rank: address.to,
            operation: operation.to_string(),
            problem: "the message was taken before".into(),
        })
    }

    fn abandon(&self, address: &Address, ticket: u64) {
        self.lock().with_mailbox(address.clone(), |mailbox| mailbox.abandon(ticket));
    }

    fn join(
        &self,
        member: Member,
        number: u64,
        operation: &Operation,
        parts: Vec<CollectivePart>,
    ) -> Result<Vec<CollectivePart>> {
        let (own, members, index) = (member.rank(), member.ranks, member.index);
        let key = (member.group.clone(), number);
        let mut shared = self.lock();
        shared.check(own, operation)?;
        shared.note_thread(own);
        let bytes: Vec<u64> = parts.iter().map(CollectivePart::bytes).collect();
        let new = || Round::new(operation.clone(), own, members.clone());
        let round = shared.rounds.entry(key.clone()).or_insert_with(new);
        if round.operation != *operation {
            let ranks = [own, round.first];
            let operations = [operation.to_string(), round.operation.to_string()];
            let failure = Failure::Mismatch { ranks, operations };
            let error = failure.seen_by(own, operation);
            shared.fail(own, failure);
            drop(shared);
            self.wake_all();
            return Err(error);
        }
        round.bring(index, parts);
        let complete = round.missing().is_empty();
        for (to, &bytes) in bytes.iter().enumerate().filter(|(to, _)| *to != index) {
            shared.bytes_sent[own] += bytes;
            let due = shared.due(own, members[to], bytes);
            if let (Some(due), Some(round)) = (due, shared.rounds.get_mut(&key)) {
                round.delay(own, to, due);
            }
        }
        let awaited = Awaited::Round { group: key.0.clone(), number };
        if complete && shared.under_way(own, &awaited).is_none() {
            // The last rank to join has nothing to wait for.
            let received = shared.leave_round(&key, index);
            drop(shared);
            members.iter().filter(|&&member| member != own).for_each(|&member| self.ranks[member].notify());
            return Ok(received);
        }
        drop(shared);
        if complete {
            members.iter().for_each(|&member| self.ranks[member].notify());
        }
        let mut shared = self.wait(own, operation, awaited)?;
        Ok(shared.leave_round(&key, index))
    }

    fn progress(&self) {}

    fn passes_device_memory(&self) -> bool {
        true
    }

    fn bytes_sent(&self, rank: usize) -> u64 {
        self.lock().bytes_sent[rank]
    }
}
