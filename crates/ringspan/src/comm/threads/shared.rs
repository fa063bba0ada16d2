//! The state that the ranks of one process share: messages, collectives in progress, and what each rank does.

use super::round::Round;
use super::simulated_link::{SimulatedLink, SimulatedLinks};
use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, GroupId, Mailbox};
use crate::comm::group::operation::{Operation, listing};
use crate::comm::group::part::CollectivePart;
use crate::error::Result;
use crate::sync::thread::{self, ThreadId};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// The message or collective that a rank waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Awaited {
    Message { address: Address, ticket: u64 },
    Round { group: GroupId, number: u64 },
}

/// The state of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankState {
    Computes,
    Waits { operation: Operation, awaited: Awaited },
    Finished,
}

#[derive(Debug, Clone)]
struct Activity {
    state: RankState,
    since: Instant,
    /// The thread on which the rank was started.
    home: Option<ThreadId>,
    /// Whether the rank also communicates from other threads: then one thread's wait does not prove that the rank is stuck.
    threads: bool,
}

/// A message in its mailbox; with a simulated link it is still on its way until `due`.
pub(super) struct Message {
    pub(super) data: Arc<Buffer>,
    pub(super) due: Option<Instant>,
}

/// The shared state, which the world keeps behind one lock.
pub(super) struct Shared {
    mailboxes: HashMap<Address, Mailbox<Message>>,
    pub(super) rounds: HashMap<(GroupId, u64), Round>,
    ranks: Vec<Activity>,
    pub(super) bytes_sent: Vec<u64>,
    wires: Option<SimulatedLinks>,
    failure: Option<Failure>,
    /// The ranks that failed, in order of their failures.
    pub(super) failed: Vec<usize>,
}

impl Shared {
    /// The state of ranks that have not done anything yet; `link` simulates the links between them.
    pub(super) fn new(size: usize, link: Option<SimulatedLink>) -> Self {
        let idle = Activity { state: RankState::Computes, since: Instant::now(), home: None, threads: false };
        Self {
            mailboxes: HashMap::new(),
            rounds: HashMap::new(),
            ranks: vec![idle; size],
            bytes_sent: vec![0; size],
            wires: link.map(SimulatedLinks::new),
            failure: None,
            failed: Vec::new(),
        }
    }

    /// Records that `rank` runs on the calling thread.
    pub(super) fn begin(&mut self, rank: usize) {
        self.ranks[rank].home = Some(thread::current().id());
    }

    /// Lets all ranks compute again after a call that all of them have finished. A message or a collective that is still
    /// unfinished would be taken for one of the next call: the error is a rank that takes part in it, and its description.
    pub(super) fn restart(&mut self) -> std::result::Result<(), (usize, String)> {
        if let Some(Address { from, to, tag, .. }) = self.mailboxes.keys().next() {
            let problem =
                format!("a message from rank {from} to rank {to} under tag {tag} was not both sent and received");
            return Err((*from, problem));
        }
        if let Some(round) = self.rounds.values().next() {
            return Err((round.first, format!("not all ranks left {}", round.operation)));
        }
        for activity in &mut self.ranks {
            (activity.state, activity.since) = (RankState::Computes, Instant::now());
            (activity.home, activity.threads) = (None, false);
        }
        Ok(())
    }

    pub(super) fn check(&self, rank: usize, operation: &Operation) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.seen_by(rank, operation)))
    }

    pub(super) fn fail(&mut self, rank: usize, failure: Failure) {
        self.failure.get_or_insert(failure);
        if !self.failed.contains(&rank) {
            self.failed.push(rank);
        }
    }

    pub(super) fn enter(&mut self, rank: usize, state: RankState) {
        let activity = &mut self.ranks[rank];
        if activity.state != state {
            activity.state = state;
            activity.since = Instant::now();
        }
    }

    /// Records that the rank communicates from the calling thread; returns whether the rank was started on it.
    pub(super) fn note_thread(&mut self, rank: usize) -> bool {
        let activity = &mut self.ranks[rank];
        let home = activity.home == Some(thread::current().id());
        activity.threads |= !home;
        home
    }

    /// Calls `act` with the mailbox of an address; idle mailboxes are removed.
    pub(super) fn with_mailbox<T>(&mut self, address: Address, act: impl FnOnce(&mut Mailbox<Message>) -> T) -> T {
        let mailbox = self.mailboxes.entry(address.clone()).or_default();
        let result = act(mailbox);
        if mailbox.is_idle() {
            self.mailboxes.remove(&address);
        }
        result
    }

    /// Takes what the ranks of a collective sent to rank `index` of their group; the last rank to leave removes the collective.
    pub(super) fn leave_round(&mut self, key: &(GroupId, u64), index: usize) -> Vec<CollectivePart> {
        let Some(round) = self.rounds.get_mut(key) else { return Vec::new() };
        let received = round.collect(index);
        if round.is_over() {
            self.rounds.remove(key);
        }
        received
    }

    /// The ranks that still have to send what is waited for.
    pub(super) fn missing(&self, awaited: &Awaited) -> Vec<usize> {
        match awaited {
            Awaited::Message { address, ticket } => match self.mailboxes.get(address) {
                Some(mailbox) if mailbox.peek(*ticket).is_some() => Vec::new(),
                _ => vec![address.from],
            },
            Awaited::Round { group, number } => {
                self.rounds.get(&(group.clone(), *number)).map(Round::missing).unwrap_or_default()
            }
        }
    }

    /// The arrival time of a message that is sent now, with a simulated link.
    pub(super) fn due(&mut self, from: usize, to: usize, bytes: u64) -> Option<Instant> {
        self.wires.as_mut().map(|wires| wires.arrival(from, to, bytes, Instant::now()))
    }

    /// The sender and arrival time of what `rank` waits for, if everything has been sent but is not due yet.
    pub(super) fn under_way(&self, rank: usize, awaited: &Awaited) -> Option<(usize, Instant)> {
        let (peer, due) = match awaited {
            Awaited::Message { address, ticket } => (address.from, self.mailboxes.get(address)?.peek(*ticket)?.due?),
            Awaited::Round { group, number } => self.rounds.get(&(group.clone(), *number))?.last(rank)?,
        };
        (due > Instant::now()).then_some((peer, due))
    }

    pub(super) fn finished(&self, ranks: &[usize]) -> Option<usize> {
        ranks.iter().copied().find(|&rank| self.ranks[rank].state == RankState::Finished)
    }

    /// A cycle of ranks that starts with `rank`: each waits for the next, and the last for the first.
    ///
    /// A rank needs all ranks it waits for, so one cycle is a deadlock, whatever the others do. Any new cycle contains the
    /// rank that began to wait last.
    pub(super) fn cycle(&self, rank: usize) -> Option<Vec<usize>> {
        let mut came_from: HashMap<usize, usize> = HashMap::new();
        let mut next = VecDeque::from([rank]);
        while let Some(waiter) = next.pop_front() {
            let activity = &self.ranks[waiter];
            let RankState::Waits { awaited, .. } = &activity.state else { continue };
            if activity.threads {
                continue;
            }
            for peer in self.missing(awaited) {
                if peer == rank {
                    let mut cycle = vec![waiter];
                    while let Some(before) = cycle.last().filter(|last| **last != rank).and_then(|l| came_from.get(l)) {
                        cycle.push(*before);
                    }
                    cycle.reverse();
                    return Some(cycle);
                }
                if let std::collections::hash_map::Entry::Vacant(entry) = came_from.entry(peer) {
                    entry.insert(waiter);
                    next.push_back(peer);
                }
            }
        }
        None
    }

    /// Describes a deadlock: the ranks of the cycle first, then the others.
    pub(super) fn deadlock(&self, cycle: &[usize]) -> String {
        let describe = |rank: &usize| format!("rank {rank} {}", self.describe(*rank));
        let others = (0..self.ranks.len()).filter(|rank| !cycle.contains(rank)).take(16);
        let all: Vec<String> = cycle.iter().copied().chain(others).map(|rank| describe(&rank)).collect();
        format!("deadlock: {}", all.join("; "))
    }

    pub(super) fn describe(&self, rank: usize) -> String {
        let Activity { state, since, .. } = &self.ranks[rank];
        match state {
            RankState::Computes => format!("has computed for {:.1?}", since.elapsed()),
            RankState::Waits { operation, awaited } => {
                let missing = self.missing(awaited);
                let ranks = if missing.len() == 1 { "rank" } else { "ranks" };
                let who = if let [one] = missing[..] { one.to_string() } else { listing(&missing) };
                format!("waits in {operation} for {ranks} {who}")
            }
            RankState::Finished => "has finished".into(),
        }
    }
}
