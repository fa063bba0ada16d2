//! What the ranks of one process share: mailboxes, what each rank is doing, and the first failure.

use crate::comm::Buffer;
use crate::error::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Where a message waits: group, sender and receiver (ranks of the world), and what it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) group: u64,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) kind: Kind,
}

/// Messages between two ranks carry the caller's tag; those of a collective its number in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Tag(u64),
    Collective(u64),
}

/// A message, and the operation it was sent in.
#[derive(Debug, Clone)]
pub(super) struct Message {
    pub(super) operation: String,
    pub(super) data: Arc<Buffer>,
}

/// What a rank is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Computes,
    Waits { operation: String, address: Address },
    Finished,
}

/// Why the world ended.
#[derive(Debug, Clone)]
struct Failure {
    rank: usize,
    message: String,
}

struct Shared {
    mailboxes: HashMap<Address, VecDeque<Message>>,
    states: Vec<(State, Instant)>,
    bytes_sent: Vec<u64>,
    /// Ids of groups, by parent, number of the split in it, and color.
    groups: HashMap<(u64, u64, u64), u64>,
    failure: Option<Failure>,
}

/// The shared state of all ranks, behind one lock; ranks exchange few, large messages.
pub(super) struct World {
    shared: Mutex<Shared>,
    changed: Condvar,
    deadline: Duration,
}

impl World {
    pub(super) fn new(size: usize, deadline: Duration) -> Self {
        let shared = Shared {
            mailboxes: HashMap::new(),
            states: vec![(State::Computes, Instant::now()); size],
            bytes_sent: vec![0; size],
            groups: HashMap::new(),
            failure: None,
        };
        Self { shared: Mutex::new(shared), changed: Condvar::new(), deadline }
    }

    pub(super) fn bytes_sent(&self, rank: usize) -> u64 {
        self.lock().bytes_sent[rank]
    }

    /// The id of a group split from another: the same for all its members, another one for any other group.
    pub(super) fn group_id(&self, parent: u64, number: u64, color: u64) -> u64 {
        let groups = &mut self.lock().groups;
        let next = groups.len() as u64 + 1;
        *groups.entry((parent, number, color)).or_insert(next)
    }

    /// Puts a message into its mailbox. Payload to other ranks is counted.
    pub(super) fn post(&self, address: Address, message: Message) -> Result<()> {
        let mut shared = self.lock();
        shared.check(address.from, &message.operation)?;
        if address.from != address.to {
            shared.bytes_sent[address.from] += message.data.bytes();
        }
        shared.mailboxes.entry(address).or_default().push_back(message);
        drop(shared);
        self.changed.notify_all();
        Ok(())
    }

    /// Whether a message is there.
    pub(super) fn has(&self, address: Address, operation: &str) -> Result<bool> {
        let shared = self.lock();
        shared.check(address.to, operation)?;
        Ok(shared.mailboxes.contains_key(&address))
    }

    /// Takes the next message at `address`, waiting for it until the deadline.
    pub(super) fn take(&self, address: Address, operation: &str) -> Result<Message> {
        let (rank, start) = (address.to, Instant::now());
        let mut shared = self.lock();
        loop {
            shared.check(rank, operation)?;
            if let Some(message) = shared.pop(address) {
                shared.enter(rank, State::Computes);
                return Ok(message);
            }
            shared.enter(rank, State::Waits { operation: operation.to_owned(), address });
            let waited = start.elapsed();
            let stuck = shared.stuck(rank, operation, address);
            let error = match stuck {
                Some(error) => Some(error),
                None if waited >= self.deadline => Some(Error::Deadline {
                    rank,
                    operation: operation.to_owned(),
                    peer: address.from,
                    peer_state: shared.describe(address.from),
                    waited: self.deadline,
                }),
                None => None,
            };
            if let Some(error) = error {
                shared.fail(rank, error.to_string());
                drop(shared);
                self.changed.notify_all();
                return Err(error);
            }
            shared = self
                .changed
                .wait_timeout(shared, self.deadline - waited)
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .0;
        }
    }

    /// Records that `rank` failed; the first failure is what the others are told.
    pub(super) fn fail(&self, rank: usize, message: String) {
        self.lock().fail(rank, message);
        self.changed.notify_all();
    }

    /// Records that `rank` is done.
    pub(super) fn finish(&self, rank: usize) {
        self.lock().enter(rank, State::Finished);
        self.changed.notify_all();
    }

    /// The rank that failed first.
    pub(super) fn first_failure(&self) -> Option<usize> {
        self.lock().failure.as_ref().map(|failure| failure.rank)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A rank that panicked while it held the lock left the maps whole: each change is one insertion or removal.
        self.shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Shared {
    fn check(&self, rank: usize, operation: &str) -> Result<()> {
        match &self.failure {
            Some(Failure { rank: peer, message }) => Err(Error::PeerFailed {
                rank,
                operation: operation.to_owned(),
                peer: *peer,
                message: message.clone(),
            }),
            None => Ok(()),
        }
    }

    fn pop(&mut self, address: Address) -> Option<Message> {
        let queue = self.mailboxes.get_mut(&address)?;
        let message = queue.pop_front();
        if queue.is_empty() {
            self.mailboxes.remove(&address);
        }
        message
    }

    fn enter(&mut self, rank: usize, state: State) {
        if self.states[rank].0 != state {
            self.states[rank] = (state, Instant::now());
        }
    }

    fn fail(&mut self, rank: usize, message: String) {
        self.failure.get_or_insert(Failure { rank, message });
    }

    /// An error if the message can no longer come: its sender is done, is in another collective of the same number,
    /// or nobody is left who could send anything.
    fn stuck(&self, rank: usize, operation: &str, address: Address) -> Option<Error> {
        let peer = address.from;
        if self.states[peer].0 == State::Finished {
            return Some(Error::Deadline {
                rank,
                operation: operation.to_owned(),
                peer,
                peer_state: "finished without sending what this rank waits for".into(),
                waited: Duration::ZERO,
            });
        }
        let waits = |(state, _): &(State, Instant)| match state {
            State::Computes => false,
            State::Waits { address, .. } => !self.mailboxes.contains_key(address),
            State::Finished => true,
        };
        self.states.iter().all(waits).then(|| Error::Communicator {
            rank,
            operation: operation.to_owned(),
            problem: format!(
                "deadlock: {}",
                (0..self.states.len()).map(|r| format!("rank {r} {}", self.describe(r))).collect::<Vec<_>>().join("; ")
            ),
        })
    }

    fn describe(&self, rank: usize) -> String {
        let (state, since) = &self.states[rank];
        match state {
            State::Computes => format!("has computed for {:.1?}", since.elapsed()),
            State::Waits { operation, address } => format!("waits in {operation} for rank {}", address.from),
            State::Finished => "has finished".into(),
        }
    }
}
