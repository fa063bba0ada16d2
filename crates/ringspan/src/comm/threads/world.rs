//! What the ranks of one process share: messages, collectives under way, what each rank does, and the first failure.

use super::failure::Failure;
use super::mailbox::{Address, GroupId, Mailbox};
use super::operation::{Operation, listing};
use super::round::{Part, Round};
use crate::comm::Buffer;
use crate::error::{Error, Result};
use crate::sync::thread::{self, ThreadId};
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Want {
    Message { address: Address, ticket: u64 },
    Round { group: GroupId, number: u64 },
}

/// What a rank is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Computes,
    Waits { operation: Operation, want: Want },
    Finished,
}

#[derive(Debug, Clone)]
struct Activity {
    state: State,
    since: Instant,
    /// The thread the rank was started on.
    home: Option<ThreadId>,
    /// Whether it also talks from other threads: then no wait of one thread proves that the rank is stuck.
    threads: bool,
}

struct Shared {
    mailboxes: HashMap<Address, Mailbox>,
    rounds: HashMap<(GroupId, u64), Round>,
    ranks: Vec<Activity>,
    bytes_sent: Vec<u64>,
    failure: Option<Failure>,
    /// Ranks that failed, in order.
    failed: Vec<usize>,
}

/// The shared state, behind one lock; ranks exchange few, large messages.
pub(super) struct World {
    shared: Mutex<Shared>,
    /// One a rank, so that a message wakes only its receiver.
    changed: Vec<Condvar>,
    deadline: Duration,
}

impl World {
    pub(super) fn new(size: usize, deadline: Duration) -> Self {
        let idle = Activity { state: State::Computes, since: Instant::now(), home: None, threads: false };
        let shared = Shared {
            mailboxes: HashMap::new(),
            rounds: HashMap::new(),
            ranks: vec![idle; size],
            bytes_sent: vec![0; size],
            failure: None,
            failed: Vec::new(),
        };
        Self { shared: Mutex::new(shared), changed: (0..size).map(|_| Condvar::new()).collect(), deadline }
    }

    /// Records that `rank` runs on the calling thread.
    pub(super) fn begin(&self, rank: usize) {
        self.lock().ranks[rank].home = Some(thread::current().id());
    }

    /// Records that `rank` is done.
    pub(super) fn finish(&self, rank: usize) {
        self.lock().enter(rank, State::Finished);
        self.wake_all();
    }

    /// Records that `rank` failed; the first failure is what the others are told.
    pub(super) fn fail(&self, rank: usize, message: String) {
        self.lock().fail(rank, Failure::Rank { peer: rank, message });
        self.wake_all();
    }

    /// The ranks that failed, in order.
    pub(super) fn failed(&self) -> Vec<usize> {
        self.lock().failed.clone()
    }

    pub(super) fn bytes_sent(&self, rank: usize) -> u64 {
        self.lock().bytes_sent[rank]
    }

    /// An error if the world has failed.
    pub(super) fn check(&self, rank: usize, operation: &Operation) -> Result<()> {
        self.lock().check(rank, operation)
    }

    /// Puts a message into its mailbox. Payload to other ranks is counted.
    pub(super) fn send(&self, address: Address, operation: &Operation, data: Arc<Buffer>) -> Result<()> {
        let mut shared = self.lock();
        shared.check(address.from, operation)?;
        shared.note_thread(address.from);
        let (from, to) = (address.from, address.to);
        if from != to {
            shared.bytes_sent[from] += data.bytes();
        }
        shared.with_mailbox(address, |mailbox| mailbox.send(data));
        drop(shared);
        self.changed[to].notify_all();
        Ok(())
    }

    /// Posts a receive and returns its ticket.
    pub(super) fn post(&self, address: &Address, operation: &Operation) -> Result<u64> {
        let mut shared = self.lock();
        shared.check(address.to, operation)?;
        shared.note_thread(address.to);
        Ok(shared.with_mailbox(address.clone(), Mailbox::post))
    }

    /// Whether the message of a ticket is here; an error if it can never come.
    pub(super) fn has(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<bool> {
        let shared = self.lock();
        shared.check(address.to, operation)?;
        let missing = shared.missing(&Want::Message { address: address.clone(), ticket });
        match shared.finished(&missing) {
            Some(peer) => Err(self.give_up(shared, address.to, operation, peer)),
            None => Ok(missing.is_empty()),
        }
    }

    /// Takes the message of a ticket, waiting for it until the deadline.
    pub(super) fn take(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<Arc<Buffer>> {
        let want = Want::Message { address: address.clone(), ticket };
        let mut shared = self.wait(address.to, operation, want)?;
        shared.with_mailbox(address.clone(), |mailbox| mailbox.take(ticket)).ok_or_else(|| Error::Communicator {
            rank: address.to,
            operation: operation.to_string(),
            problem: "the message was taken before".into(),
        })
    }

    /// Gives a posted receive up.
    pub(super) fn abandon(&self, address: &Address, ticket: u64) {
        self.lock().with_mailbox(address.clone(), |mailbox| mailbox.abandon(ticket));
    }

    /// Joins collective `number` of a group as its `rank`, with one part for each member; returns what they brought
    /// for this one, in rank order, once all are here. Payload to other ranks is counted.
    pub(super) fn join(
        &self,
        (group, members, rank): (&GroupId, &Arc<[usize]>, usize),
        number: u64,
        operation: &Operation,
        parts: Vec<Part>,
    ) -> Result<Vec<Part>> {
        let own = members[rank];
        let key = (group.clone(), number);
        let mut shared = self.lock();
        shared.check(own, operation)?;
        shared.note_thread(own);
        let bytes: u64 = parts.iter().enumerate().filter(|(to, _)| *to != rank).map(|(_, part)| part.bytes()).sum();
        let new = || Round::new(operation.clone(), own, members.clone());
        let round = shared.rounds.entry(key.clone()).or_insert_with(new);
        if round.operation != *operation {
            let ranks = [own, round.first];
            let operations = [operation.clone(), round.operation.clone()];
            let failure = Failure::Mismatch { ranks, operations };
            let error = failure.seen_by(own, operation);
            shared.fail(own, failure);
            drop(shared);
            self.wake_all();
            return Err(error);
        }
        round.bring(rank, parts);
        let complete = round.missing().is_empty();
        shared.bytes_sent[own] += bytes;
        drop(shared);
        if complete {
            members.iter().for_each(|&member| self.changed[member].notify_all());
        }
        let mut shared = self.wait(own, operation, Want::Round { group: key.0.clone(), number })?;
        let Some(round) = shared.rounds.get_mut(&key) else { return Ok(Vec::new()) };
        let received = round.collect(rank);
        if round.is_over() {
            shared.rounds.remove(&key);
        }
        Ok(received)
    }

    /// Waits until `want` is here, or the deadline, or until it can no longer come.
    fn wait(&self, rank: usize, operation: &Operation, want: Want) -> Result<MutexGuard<'_, Shared>> {
        let start = Instant::now();
        let mut shared = self.lock();
        let home = shared.note_thread(rank);
        loop {
            shared.check(rank, operation)?;
            let missing = shared.missing(&want);
            let Some(&peer) = missing.first() else {
                if home {
                    shared.enter(rank, State::Computes);
                }
                return Ok(shared);
            };
            if let Some(peer) = shared.finished(&missing) {
                return Err(self.give_up(shared, rank, operation, peer));
            }
            if home {
                shared.enter(rank, State::Waits { operation: operation.clone(), want: want.clone() });
                if let Some(circle) = shared.circle(rank) {
                    let failure = Failure::Deadlock { problem: shared.deadlock(&circle) };
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
            let woken = self.changed[rank].wait_timeout(shared, self.deadline - waited);
            shared = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Fails because `peer` finished before it did its part of `operation`.
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
        self.changed.iter().for_each(Condvar::notify_all);
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // No code of a user runs under the lock, so a panic under it leaves nothing half done that matters.
        self.shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Shared {
    fn check(&self, rank: usize, operation: &Operation) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.seen_by(rank, operation)))
    }

    fn fail(&mut self, rank: usize, failure: Failure) {
        self.failure.get_or_insert(failure);
        if !self.failed.contains(&rank) {
            self.failed.push(rank);
        }
    }

    fn enter(&mut self, rank: usize, state: State) {
        let activity = &mut self.ranks[rank];
        if activity.state != state {
            activity.state = state;
            activity.since = Instant::now();
        }
    }

    /// Whether the calling thread is the one the rank was started on.
    fn note_thread(&mut self, rank: usize) -> bool {
        let activity = &mut self.ranks[rank];
        let home = activity.home == Some(thread::current().id());
        activity.threads |= !home;
        home
    }

    /// Does something with a mailbox; idle ones are not kept.
    fn with_mailbox<T>(&mut self, address: Address, act: impl FnOnce(&mut Mailbox) -> T) -> T {
        let mailbox = self.mailboxes.entry(address.clone()).or_default();
        let result = act(mailbox);
        if mailbox.is_idle() {
            self.mailboxes.remove(&address);
        }
        result
    }

    /// Ranks that have not done their part yet.
    fn missing(&self, want: &Want) -> Vec<usize> {
        match want {
            Want::Message { address, ticket } => match self.mailboxes.get(address) {
                Some(mailbox) if mailbox.has(*ticket) => Vec::new(),
                _ => vec![address.from],
            },
            Want::Round { group, number } => {
                self.rounds.get(&(group.clone(), *number)).map(Round::missing).unwrap_or_default()
            }
        }
    }

    fn finished(&self, ranks: &[usize]) -> Option<usize> {
        ranks.iter().copied().find(|&rank| self.ranks[rank].state == State::Finished)
    }

    /// Ranks that wait for each other, beginning with `rank`, each for the next and the last for the first.
    ///
    /// A rank needs all it waits for, so one circle is a deadlock, whatever the other ranks do. Any new circle goes
    /// through the rank that began to wait last.
    fn circle(&self, rank: usize) -> Option<Vec<usize>> {
        let mut came_from: HashMap<usize, usize> = HashMap::new();
        let mut next = VecDeque::from([rank]);
        while let Some(waiter) = next.pop_front() {
            let activity = &self.ranks[waiter];
            let State::Waits { want, .. } = &activity.state else { continue };
            if activity.threads {
                continue;
            }
            for peer in self.missing(want) {
                if peer == rank {
                    let mut circle = vec![waiter];
                    while let Some(before) = circle.last().filter(|last| **last != rank).and_then(|l| came_from.get(l))
                    {
                        circle.push(*before);
                    }
                    circle.reverse();
                    return Some(circle);
                }
                if let std::collections::hash_map::Entry::Vacant(entry) = came_from.entry(peer) {
                    entry.insert(waiter);
                    next.push_back(peer);
                }
            }
        }
        None
    }

    /// A deadlock in words: the circle first, then what the other ranks do.
    fn deadlock(&self, circle: &[usize]) -> String {
        let describe = |rank: &usize| format!("rank {rank} {}", self.describe(*rank));
        let others = (0..self.ranks.len()).filter(|rank| !circle.contains(rank)).take(16);
        let all: Vec<String> = circle.iter().copied().chain(others).map(|rank| describe(&rank)).collect();
        format!("deadlock: {}", all.join("; "))
    }

    fn describe(&self, rank: usize) -> String {
        let Activity { state, since, .. } = &self.ranks[rank];
        match state {
            State::Computes => format!("has computed for {:.1?}", since.elapsed()),
            State::Waits { operation, want } => {
                let missing = self.missing(want);
                let ranks = if missing.len() == 1 { "rank" } else { "ranks" };
                let who = if let [one] = missing[..] { one.to_string() } else { listing(&missing) };
                format!("waits in {operation} for {ranks} {who}")
            }
            State::Finished => "has finished".into(),
        }
    }
}
