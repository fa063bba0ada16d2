//! The transport over MPI: waits that advance all transfers, and end at the deadline or with any rank's failure.

use super::engine::Engine;
use super::watch::Watch;
use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, Mailbox};
use crate::comm::group::operation::{Operation, listing};
use crate::comm::group::part::CollectivePart;
use crate::comm::group::transport::{Member, Transport};
use crate::comm::header::{CallDescription, Content};
use crate::error::{Error, Result};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Waits longer than this are reported to the watch, so that other ranks can say what this rank does.
const WORTH_TELLING: Duration = Duration::from_millis(20);
/// Number of polls without a pause; after that, the longest pause between two polls while nothing moves.
const EAGER: u32 = 2000;
const PAUSE: Duration = Duration::from_micros(200);

/// This process's view of all ranks.
pub(super) struct MpiTransport {
    pub(super) rank: usize,
    engine: Mutex<Engine>,
    pub(super) watch: Arc<Watch>,
    deadline: Mutex<Duration>,
    bytes_sent: AtomicU64,
    /// The first thread that communicated, and whether others did.
    talks: Mutex<(Option<ThreadId>, bool)>,
}

impl MpiTransport {
    pub(super) fn new(engine: Engine, watch: Arc<Watch>, deadline: Duration) -> Self {
        let rank = engine.wire().rank;
        let (bytes_sent, talks) = (AtomicU64::new(0), Mutex::new((None, false)));
        Self { rank, engine: Mutex::new(engine), watch, deadline: Mutex::new(deadline), bytes_sent, talks }
    }

    /// Says that this rank sends nothing more, and waits until all ranks have said so. It has no deadline: others may have
    /// hours of work left, and the watch detects whether they are alive.
    pub(super) fn finish(&self) -> Result<()> {
        let nothing = || CollectivePart::whole(Arc::new(Buffer::U8(Vec::new())));
        let operation = &"the end of its work";
        {
            let mut engine = self.engine();
            self.check_with(operation)?;
            let others = (0..engine.wire().size).filter(|rank| *rank != self.rank);
            others.collect::<Vec<_>>().into_iter().try_for_each(|to| {
                let sent = engine.send(to, Content::Finished, nothing());
                sent.map(drop).map_err(|problem| self.lost(operation, problem))
            })?;
        }
        self.watch.note("has finished".into(), Vec::new());
        let unlimited = Duration::MAX;
        self.wait_for(operation, unlimited, |engine| match engine.unfinished() {
            missing if !missing.is_empty() => Ok(ControlFlow::Continue(missing)),
            _ if engine.is_empty() => Ok(ControlFlow::Break(())),
            _ => Ok(ControlFlow::Continue(vec![self.rank])),
        })
    }

    /// Makes all later calls fail before they reach MPI.
    pub(super) fn close(&self) {
        self.engine().close();
    }

    /// Ends all processes.
    pub(super) fn abort(&self) {
        self.engine().wire().abort();
    }

    /// Returns an error if any rank has failed, for a call that has this name.
    pub(super) fn check_call(&self, operation: &'static str) -> Result<()> {
        self.check_with(&operation)
    }

    fn check_with(&self, operation: &impl std::fmt::Display) -> Result<()> {
        self.watch.failure().map_or(Ok(()), |failure| Err(failure.seen_by(self.rank, operation)))
    }

    /// Reports a failure of MPI itself, and returns it as the error of this rank.
    fn lost(&self, operation: &impl std::fmt::Display, problem: String) -> Error {
        let error = Error::Communicator { rank: self.rank, operation: operation.to_string(), problem };
        self.watch.fail(Failure::Rank { peer: self.rank, message: error.to_string() });
        error
    }

    /// Polls, advancing all transfers, until `look` returns a result; until then it returns the ranks that are missing.
    fn wait_for<T>(
        &self,
        operation: &impl std::fmt::Display,
        deadline: Duration,
        mut look: impl FnMut(&mut Engine) -> std::result::Result<ControlFlow<T, Vec<usize>>, Failure>,
    ) -> Result<T> {
        let start = Instant::now();
        let (mut looks, mut told) = (0, None);
        let alone = self.note_thread();
        let result = loop {
            let mut engine = self.engine();
            if let Err(error) = self.check_with(operation) {
                break Err(error);
            }
            let busy = match engine.progress() {
                Ok(busy) => busy,
                Err(problem) => break Err(self.lost(operation, problem)),
            };
            let missing = match look(&mut engine) {
                Ok(ControlFlow::Break(found)) => break Ok(found),
                Ok(ControlFlow::Continue(missing)) => missing,
                Err(failure) => {
                    let error = failure.seen_by(self.rank, operation);
                    self.watch.fail(failure);
                    break Err(error);
                }
            };
            drop(engine);
            let waited = start.elapsed();
            if waited > WORTH_TELLING && deadline != Duration::MAX && told.as_ref() != Some(&missing) {
                let ranks = if missing.len() == 1 { "rank" } else { "ranks" };
                let who = if let [one] = missing[..] { one.to_string() } else { listing(&missing) };
                // A rank that still moves data, or communicates from another thread, is not stuck.
                let waits_for = if alone && !busy { missing.clone() } else { Vec::new() };
                self.watch.note(format!("waits in {operation} for {ranks} {who}"), waits_for);
                told = (!busy).then(|| missing.clone());
            }
            if waited >= deadline {
                break Err(self.too_late(operation, deadline, missing.first().copied().unwrap_or(self.rank)));
            }
            looks = if busy { 0 } else { looks + 1 };
            if looks < EAGER {
                thread::yield_now();
            } else {
                thread::sleep(PAUSE.min(deadline - waited));
            }
        };
        if start.elapsed() > WORTH_TELLING && deadline != Duration::MAX {
            self.watch.note(String::new(), Vec::new());
        }
        result
    }

    /// Whether the rank has only communicated from one thread: then a wait of that thread is a wait of the rank.
    fn note_thread(&self) -> bool {
        let mut talks = self.talks.lock().unwrap_or_else(PoisonError::into_inner);
        let here = thread::current().id();
        let first = *talks.0.get_or_insert(here);
        talks.1 |= first != here;
        !talks.1
    }

    fn too_late(&self, operation: &impl std::fmt::Display, waited: Duration, peer: usize) -> Error {
        let (rank, operation) = (self.rank, operation.to_string());
        let error = Error::Deadline { rank, operation, peer, peer_state: self.watch.describe(peer), waited };
        self.watch.fail(Failure::Rank { peer: rank, message: error.to_string() });
        error
    }

    /// The failure of a rank that finished before it sent its part of `operation`.
    fn gone(&self, peer: usize, operation: &Operation) -> Failure {
        let message = format!("it finished without sending what rank {} waits for in {operation}", self.rank);
        Failure::Rank { peer, message }
    }

    pub(super) fn set_deadline(&self, deadline: Duration) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
    }

    fn deadline(&self) -> Duration {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for MpiTransport {
    fn check(&self, _: usize, operation: &Operation) -> Result<()> {
        self.check_with(operation)
    }

    fn fail(&self, rank: usize, message: String) {
        self.watch.fail(Failure::Rank { peer: rank, message });
    }

    fn send(&self, address: Address, operation: &Operation, data: Arc<Buffer>) -> Result<u64> {
        self.note_thread();
        let mut engine = self.engine();
        self.check_with(operation)?;
        if address.to != self.rank {
            self.bytes_sent.fetch_add(data.bytes(), Ordering::Relaxed);
        }
        let content = Content::Message { group: address.group, tag: address.tag };
        let sent = engine.send(address.to, content, CollectivePart::whole(data)).and_then(|number| {
            // Polling sends the header at once, so that the receiver can fetch the payload.
            engine.progress()?;
            Ok(number)
        });
        sent.map_err(|problem| self.lost(operation, problem))
    }

    fn left(&self, _: usize, number: u64, operation: &Operation) -> Result<bool> {
        let mut engine = self.engine();
        self.check_with(operation)?;
        engine.progress().map_err(|problem| self.lost(operation, problem))?;
        Ok(engine.has_left(number))
    }

    fn wait_left(&self, address: &Address, number: u64, operation: &Operation) -> Result<()> {
        self.wait_for(operation, self.deadline(), |engine| match engine.has_left(number) {
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
        engine.progress().map_err(|problem| self.lost(operation, problem))?;
        let here = engine.arrived.with_mailbox(address, |mailbox| mailbox.peek(ticket).is_some());
        match engine.finished(&[address.from]).filter(|_| !here) {
            None => Ok(here),
            Some(peer) => {
                let failure = self.gone(peer, operation);
                let error = failure.seen_by(self.rank, operation);
                self.watch.fail(failure);
                Err(error)
            }
        }
    }

    fn take(&self, address: &Address, ticket: u64, operation: &Operation) -> Result<Arc<Buffer>> {
        self.wait_for(operation, self.deadline(), |engine| {
            match engine.arrived.with_mailbox(address, |mailbox| mailbox.take(ticket)) {
                Some(data) => Ok(ControlFlow::Break(data)),
                None => match engine.finished(&[address.from]) {
                    Some(peer) => Err(self.gone(peer, operation)),
                    None => Ok(ControlFlow::Continue(vec![address.from])),
                },
            }
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
        let mut own = None;
        let mut sent = Vec::new();
        {
            let mut engine = self.engine();
            self.check_with(operation)?;
            for (to, part) in parts.into_iter().enumerate() {
                if to == index {
                    own = Some(part);
                    continue;
                }
                self.bytes_sent.fetch_add(part.bytes(), Ordering::Relaxed);
                let content = Content::CollectivePart { group: group.clone(), number, call: call.clone() };
                let started = engine.send(ranks[to], content, part);
                sent.push(started.map_err(|problem| self.lost(operation, problem))?);
            }
        }
        let others: Vec<usize> = ranks.iter().copied().filter(|rank| *rank != self.rank).collect();
        self.wait_for(operation, self.deadline(), |engine| {
            let missing = engine.arrived.missing((group, number), &call, &others)?;
            if let Some(peer) = engine.finished(&missing) {
                return Err(self.gone(peer, operation));
            }
            // This rank's sends must also have left: once it computes again, nothing advances them.
            match missing.is_empty() && sent.iter().all(|number| engine.has_left(*number)) {
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
        if let Err(problem) = engine.progress() {
            self.lost(&"progress", problem);
        }
    }

    fn bytes_sent(&self, _: usize) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }
}
