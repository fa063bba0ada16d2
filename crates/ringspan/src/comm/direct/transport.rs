//! The transport over the engine: waits that advance all transfers, and end at the deadline or with any rank's failure.

use super::engine::Engine;
use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, Mailbox};
use crate::comm::group::operation::Operation;
use crate::comm::group::part::CollectivePart;
use crate::comm::group::transport::{Member, Transport};
use crate::comm::header::{CallDescription, Content};
use crate::error::{Error, Result};
use std::fmt::Display;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

/// Number of polls without a pause; after that, the pause between two polls while nothing moves.
const EAGER: u32 = 2000;
const PAUSE: Duration = Duration::from_micros(100);

/// How long other ranks have to report their operation, once a wait has reached its deadline.
const QUESTION: Duration = Duration::from_secs(1);

/// How long a rank that has finished, or returned its own error, still sends messages that nothing waits for. The time
/// is limited, because a rank may never receive them.
const FAREWELL: Duration = Duration::from_secs(10);

/// This rank's view of all ranks.
pub(super) struct DirectTransport {
    rank: usize,
    engine: Mutex<Engine>,
    /// The first failure that this rank saw; every later call returns it.
    failure: Mutex<Option<Failure>>,
    deadline: Duration,
    bytes_sent: AtomicU64,
}

impl DirectTransport {
    pub(super) fn new(engine: Engine, deadline: Duration) -> Self {
        let rank = engine.rank();
        let (failure, bytes_sent) = (Mutex::new(None), AtomicU64::new(0));
        Self { rank, engine: Mutex::new(engine), failure, deadline, bytes_sent }
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failure(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_with(&self, operation: &impl Display) -> Result<()> {
        self.failure().as_ref().map_or(Ok(()), |failure| Err(failure.seen_by(self.rank, operation)))
    }

    /// Records `failure` if it is the first, and ends all flights: they could wait for a rank that never comes.
    fn give_up(&self, engine: &mut Engine, failure: Failure) {
        if self.failure().replace(failure).is_none() {
            engine.abort();
        }
    }

    /// Converts an error of the underlying communicator, the channel or a note into the failure of `operation`.
    fn lost(&self, engine: &mut Engine, operation: &impl Display, error: Error) -> Error {
        if let Err(first) = self.check_with(operation) {
            return first;
        }
        let own = |error: &Error| Failure::Rank { peer: self.rank, message: error.to_string() };
        let (failure, error) = match error {
            // The operation of the underlying communicator means nothing to the caller, so it is replaced.
            Error::PeerFailed { peer, message, .. } => {
                let failure = Failure::Rank { peer, message };
                let error = failure.seen_by(self.rank, operation);
                (failure, error)
            }
            Error::Device { device, operation: asked, message } => {
                let problem = format!("{device}: {asked}: {message}");
                let error = Error::Communicator { rank: self.rank, operation: operation.to_string(), problem };
                (own(&error), error)
            }
            Error::Communicator { rank, problem, .. } => {
                let error = Error::Communicator { rank, operation: operation.to_string(), problem };
                (own(&error), error)
            }
            error => (own(&error), error),
        };
        self.give_up(engine, failure);
        error
    }

    /// Polls, advancing all transfers, until `look` returns a result; until then it returns the ranks that are missing.
    fn wait_for<T>(
        &self,
        operation: &Operation,
        mut look: impl FnMut(&mut Engine) -> std::result::Result<ControlFlow<T, Vec<usize>>, Failure>,
    ) -> Result<T> {
        let (start, mut looks, mut asked) = (Instant::now(), 0, None);
        self.engine().doing = operation.to_string();
        loop {
            let mut engine = self.engine();
            self.check_with(operation)?;
            let busy = engine.drive().map_err(|error| self.lost(&mut engine, operation, error))?;
            let missing = match look(&mut engine) {
                Ok(ControlFlow::Break(found)) => {
                    engine.doing.clear();
                    return Ok(found);
                }
                Ok(ControlFlow::Continue(missing)) => missing,
                Err(failure) => {
                    let error = failure.seen_by(self.rank, operation);
                    self.give_up(&mut engine, failure);
                    return Err(error);
                }
            };
            self.ask_of_the_gone(&mut engine, operation, &missing)?;
            let waited = start.elapsed();
            if waited >= self.deadline && asked.is_none() {
                // The rank waited for may be waiting itself; a rank that does not answer is the one that delays all others.
                asked = Some(waited);
                engine.ask().map_err(|error| self.lost(&mut engine, operation, error))?;
            }
            let over = |asked: Duration| engine.silent().is_none() || waited - asked >= QUESTION.min(self.deadline);
            if asked.is_some_and(over) {
                let peer = engine.silent().or(missing.first().copied()).unwrap_or(self.rank);
                let (rank, operation, peer_state) = (self.rank, operation.to_string(), engine.describe(peer));
                let error = Error::Deadline { rank, operation, peer, peer_state, waited: self.deadline };
                self.give_up(&mut engine, Failure::Rank { peer: rank, message: error.to_string() });
                return Err(error);
            }
            drop(engine);
            looks = if busy { 0 } else { looks + 1 };
            if looks < EAGER {
                thread::yield_now();
            } else {
                thread::sleep(PAUSE);
            }
        }
    }

    /// A rank that sends nothing more but is waited for has failed or finished: the underlying communicator knows which.
    fn ask_of_the_gone(&self, engine: &mut Engine, operation: &Operation, missing: &[usize]) -> Result<()> {
        let Some(peer) = engine.gone(missing) else { return Ok(()) };
        engine.next_note(peer).map(drop).map_err(|error| self.lost(engine, operation, error))
    }

    fn send_part(
        &self,
        engine: &mut Engine,
        operation: &Operation,
        to: usize,
        message: (Content, CollectivePart),
    ) -> Result<u64> {
        let (content, part) = message;
        if to != self.rank {
            self.bytes_sent.fetch_add(part.bytes(), Ordering::Relaxed);
        }
        engine.send(to, content, part).map_err(|error| self.lost(engine, operation, error))
    }
}

impl Transport for DirectTransport {
    fn check(&self, _: usize, operation: &Operation) -> Result<()> {
        self.check_with(operation)
    }

    fn fail(&self, rank: usize, message: String) {
        self.give_up(&mut self.engine(), Failure::Rank { peer: rank, message });
    }

    fn send(&self, address: Address, operation: &Operation, data: Arc<Buffer>) -> Result<u64> {
        let mut engine = self.engine();
        self.check_with(operation)?;
        let content = Content::Message { group: address.group, tag: address.tag };
        self.send_part(&mut engine, operation, address.to, (content, CollectivePart::whole(data)))
    }

    fn left(&self, _: usize, number: u64, operation: &Operation) -> Result<bool> {
        let mut engine = self.engine();
        self.check_with(operation)?;
        engine.drive().map_err(|error| self.lost(&mut engine, operation, error))?;
        Ok(engine.has_left(number))
    }

    fn wait_left(&self, address: &Address, number: u64, operation: &Operation) -> Result<()> {
        self.wait_for(operation, |engine| match engine.has_left(number) {
            true => Ok(ControlFlow::Break(())),
            false => Ok(ControlFlow::Continue(vec![address.to])),
        })
    }

    fn post(&self, address: &Address, operation: &Operation) -> Result<u64> {
        let mut engine = self.engine();
        self.check_with(operation)?;
        Ok(engine.arrived.with_mailbox(address, Mailbox::post))
    }

    fn has(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<bool> {
        let mut engine = self.engine();
        self.check_with(operation)?;
        engine.drive().map_err(|error| self.lost(&mut engine, operation, error))?;
        let here = engine.arrived.with_mailbox(address, |mailbox| mailbox.peek(ticket).is_some());
        if !here {
            self.ask_of_the_gone(&mut engine, operation, &[address.from])?;
        }
        Ok(here)
    }

    fn take(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<Arc<Buffer>> {
        self.wait_for(operation, |engine| {
            Ok(match engine.arrived.with_mailbox(address, |mailbox| mailbox.take(ticket)) {
                Some(data) => ControlFlow::Break(data),
                None => ControlFlow::Continue(vec![address.from]),
            })
        })
    }

    fn abandon(&self, address: &Address, ticket: u64) {
        self.engine().arrived.with_mailbox(address, |mailbox| mailbox.abandon(ticket));
    }

    fn join(
        &self,
        member: Member,
        number: u64,
        operation: &Operation,
        parts: Vec<CollectivePart>,
    ) -> Result<Vec<CollectivePart>> {
        let Member { group, ranks, index } = member;
        let call = CallDescription::new(operation);
        let (mut own, mut sent) = (None, Vec::new());
        {
            let mut engine = self.engine();
            self.check_with(operation)?;
            for (to, part) in parts.into_iter().enumerate() {
                if to == index {
                    own = Some(part);
                    continue;
                }
                let content = Content::CollectivePart { group: group.clone(), number, call: call.clone() };
                sent.push((ranks[to], self.send_part(&mut engine, operation, ranks[to], (content, part))?));
            }
        }
        let others: Vec<usize> = ranks.iter().copied().filter(|rank| *rank != self.rank).collect();
        self.wait_for(operation, |engine| {
            let mut missing = engine.arrived.missing((group, number), &call, &others)?;
            // This rank's sends must also have left: once it computes again, nothing advances them.
            missing.extend(sent.iter().filter(|(_, number)| !engine.has_left(*number)).map(|(to, _)| *to));
            match missing.is_empty() {
                true => Ok(ControlFlow::Break(engine.arrived.leave((group, number), ranks, own.take()))),
                false => Ok(ControlFlow::Continue(missing)),
            }
        })
    }

    fn progress(&self) {
        // If another thread holds the engine, that thread advances the transfers.
        let mut engine = match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let operation = &"progress";
        if self.check_with(operation).is_ok()
            && let Err(error) = engine.drive()
        {
            self.lost(&mut engine, operation, error);
        }
    }

    fn passes_device_memory(&self) -> bool {
        true
    }

    fn bytes_sent(&self, _: usize) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }
}

impl Drop for DirectTransport {
    fn drop(&mut self) {
        let engine = self.engine.get_mut().unwrap_or_else(PoisonError::into_inner);
        let failed = self.failure.get_mut().unwrap_or_else(PoisonError::into_inner).is_some();
        if failed || thread::panicking() {
            // The underlying communicator tells the others; flights to them must not wait for this rank.
            engine.abort();
            return;
        }
        // Waits for messages that this rank sent and did not wait for.
        let start = Instant::now();
        loop {
            if engine.is_quiet() && engine.bye().is_ok() {
                return;
            }
            if engine.drive().is_err() || start.elapsed() >= FAREWELL.min(self.deadline) {
                engine.abort();
                return;
            }
            thread::sleep(PAUSE);
        }
    }
}
