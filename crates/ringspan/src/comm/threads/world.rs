//! What the ranks of one process share: messages, collectives under way, what each rank does, and the first failure.

use super::link::{Link, Wires};
use super::round::Round;
use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, GroupId, Mailbox};
use crate::comm::group::operation::{Operation, listing};
use crate::comm::group::part::Part;
use crate::comm::group::transport::{Member, Transport};
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

/// A message in its mailbox; over a link it may still be on its way.
struct Message {
    data: Arc<Buffer>,
    due: Option<Instant>,
}

struct Shared {
    mailboxes: HashMap<Address, Mailbox<Message>>,
    rounds: HashMap<(GroupId, u64), Round>,
    ranks: Vec<Activity>,
    bytes_sent: Vec<u64>,
    wires: Option<Wires>,
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
    pub(super) fn new(size: usize, deadline: Duration, link: Option<Link>) -> Self {
        let idle = Activity { state: State::Computes, since: Instant::now(), home: None, threads: false };
        let shared = Shared {
            mailboxes: HashMap::new(),
            rounds: HashMap::new(),
            ranks: vec![idle; size],
            bytes_sent: vec![0; size],
            wires: link.map(Wires::new),
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

    /// The ranks that failed, in order.
    pub(super) fn failed(&self) -> Vec<usize> {
        self.lock().failed.clone()
    }

    /// Waits until `want` is here, or the deadline, or until it can no longer come.
    fn wait(&self, rank: usize, operation: &Operation, want: Want) -> Result<MutexGuard<'_, Shared>> {
        let start = Instant::now();
        let mut shared = self.lock();
        let home = shared.note_thread(rank);
        loop {
            shared.check(rank, operation)?;
            let missing = shared.missing(&want);
            let late = if missing.is_empty() { shared.under_way(rank, &want) } else { None };
            let Some(peer) = missing.first().copied().or(late.map(|(peer, _)| peer)) else {
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
            let left = self.deadline - waited;
            let pause = late.map_or(left, |(_, due)| left.min(due.saturating_duration_since(Instant::now())));
            let woken = self.changed[rank].wait_timeout(shared, pause);
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

impl Transport for World {
    fn check(&self, rank: usize, operation: &Operation) -> Result<()> {
        self.lock().check(rank, operation)
    }

    fn fail(&self, rank: usize, message: String) {
        self.lock().fail(rank, Failure::Rank { peer: rank, message });
        self.wake_all();
    }

    /// Puts the message into its mailbox: there it has left.
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
        self.changed[to].notify_all();
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
        let want = Want::Message { address: address.clone(), ticket };
        let missing = shared.missing(&want);
        match shared.finished(&missing) {
            Some(peer) => Err(self.give_up(shared, address.to, operation, peer)),
            None => Ok(missing.is_empty() && shared.under_way(address.to, &want).is_none()),
        }
    }

    fn take(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<Arc<Buffer>> {
        let want = Want::Message { address: address.clone(), ticket };
        let mut shared = self.wait(address.to, operation, want)?;
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

    fn join(&self, member: Member, number: u64, operation: &Operation, parts: Vec<Part>) -> Result<Vec<Part>> {
        let (own, members, place) = (member.rank(), member.ranks, member.place);
        let key = (member.group.clone(), number);
        let mut shared = self.lock();
        shared.check(own, operation)?;
        shared.note_thread(own);
        let bytes: Vec<u64> = parts.iter().map(Part::bytes).collect();
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
        round.bring(place, parts);
        let complete = round.missing().is_empty();
        for (to, &bytes) in bytes.iter().enumerate().filter(|(to, _)| *to != place) {
            shared.bytes_sent[own] += bytes;
            let due = shared.due(own, members[to], bytes);
            if let (Some(due), Some(round)) = (due, shared.rounds.get_mut(&key)) {
                round.delay(own, to, due);
            }
        }
        drop(shared);
        if complete {
            members.iter().for_each(|&member| self.changed[member].notify_all());
        }
        let mut shared = self.wait(own, operation, Want::Round { group: key.0.clone(), number })?;
        let Some(round) = shared.rounds.get_mut(&key) else { return Ok(Vec::new()) };
        let received = round.collect(place);
        if round.is_over() {
            shared.rounds.remove(&key);
        }
        Ok(received)
    }

    fn progress(&self) {}

    fn bytes_sent(&self, rank: usize) -> u64 {
        self.lock().bytes_sent[rank]
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
    fn with_mailbox<T>(&mut self, address: Address, act: impl FnOnce(&mut Mailbox<Message>) -> T) -> T {
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
                Some(mailbox) if mailbox.peek(*ticket).is_some() => Vec::new(),
                _ => vec![address.from],
            },
            Want::Round { group, number } => {
                self.rounds.get(&(group.clone(), *number)).map(Round::missing).unwrap_or_default()
            }
        }
    }

    /// When a message that is sent now arrives, if there is a link.
    fn due(&mut self, from: usize, to: usize, bytes: u64) -> Option<Instant> {
        self.wires.as_mut().map(|wires| wires.arrival(from, to, bytes, Instant::now()))
    }

    /// When what all have sent to `rank` arrives, and from whom, if that is later than now.
    fn under_way(&self, rank: usize, want: &Want) -> Option<(usize, Instant)> {
        let (peer, due) = match want {
            Want::Message { address, ticket } => (address.from, self.mailboxes.get(address)?.peek(*ticket)?.due?),
            Want::Round { group, number } => self.rounds.get(&(group.clone(), *number))?.last(rank)?,
        };
        (due > Instant::now()).then_some((peer, due))
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
