//! The state that the ranks of one process share: messages, collectives in progress, and what each rank does.

use super::link::{Link, Wires};
use super::round::Round;
use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, GroupId, Mailbox};
use crate::comm::group::operation::{Operation, listing};
use crate::error::Result;
use crate::sync::thread::{self, ThreadId};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// The message or collective that a rank waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Want {
    Message { address: Address, ticket: u64 },
    Round { group: GroupId, number: u64 },
}

/// The state of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    Computes,
    Waits { operation: Operation, want: Want },
    Finished,
}

#[derive(Debug, Clone)]
struct Activity {
    state: State,
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
    wires: Option<Wires>,
    failure: Option<Failure>,
    /// The ranks that failed, in order of their failures.
    pub(super) failed: Vec<usize>,
}

impl Shared {
    /// The state of ranks that have not done anything yet; `link` simulates the links between them.
    pub(super) fn new(size: usize, link: Option<Link>) -> Self {
        let idle = Activity { state: State::Computes, since: Instant::now(), home: None, threads: false };
        Self {
            mailboxes: HashMap::new(),
            rounds: HashMap::new(),
            ranks: vec![idle; size],
            bytes_sent: vec![0; size],
            wires: link.map(Wires::new),
            failure: None,
            failed: Vec::new(),
        }
    }

    /// Records that `rank` runs on the calling thread.
    pub(super) fn begin(&mut self, rank: usize) {
        self.ranks[rank].home = Some(thread::current().id());
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

    pub(super) fn enter(&mut self, rank: usize, state: State) {
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

    /// The ranks that still have to send what is waited for.
    pub(super) fn missing(&self, want: &Want) -> Vec<usize> {
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

    /// The arrival time of a message that is sent now, with a simulated link.
    pub(super) fn due(&mut self, from: usize, to: usize, bytes: u64) -> Option<Instant> {
        self.wires.as_mut().map(|wires| wires.arrival(from, to, bytes, Instant::now()))
    }

    /// The sender and arrival time of what `rank` waits for, if everything has been sent but is not due yet.
    pub(super) fn under_way(&self, rank: usize, want: &Want) -> Option<(usize, Instant)> {
        let (peer, due) = match want {
            Want::Message { address, ticket } => (address.from, self.mailboxes.get(address)?.peek(*ticket)?.due?),
            Want::Round { group, number } => self.rounds.get(&(group.clone(), *number))?.last(rank)?,
        };
        (due > Instant::now()).then_some((peer, due))
    }

    pub(super) fn finished(&self, ranks: &[usize]) -> Option<usize> {
        ranks.iter().copied().find(|&rank| self.ranks[rank].state == State::Finished)
    }

    /// A cycle of ranks that starts with `rank`: each waits for the next, and the last for the first.
    ///
    /// A rank needs all ranks it waits for, so one cycle is a deadlock, whatever the others do. Any new cycle contains the
    /// rank that began to wait last.
    pub(super) fn circle(&self, rank: usize) -> Option<Vec<usize>> {
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

    /// Describes a deadlock: the ranks of the cycle first, then the others.
    pub(super) fn deadlock(&self, circle: &[usize]) -> String {
        let describe = |rank: &usize| format!("rank {rank} {}", self.describe(*rank));
        let others = (0..self.ranks.len()).filter(|rank| !circle.contains(rank)).take(16);
        let all: Vec<String> = circle.iter().copied().chain(others).map(|rank| describe(&rank)).collect();
        format!("deadlock: {}", all.join("; "))
    }

    pub(super) fn describe(&self, rank: usize) -> String {
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
