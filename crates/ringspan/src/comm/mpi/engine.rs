//! All messages between this process and the others, sent and received. They advance only in calls.

use super::wire::{Request, Result, Wire};
use crate::comm::Buffer;
use crate::comm::arrived::Arrived;
use crate::comm::group::part::CollectivePart;
use crate::comm::header::{Content, Header, Kind};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A message that is being sent. MPI reads the memory that is kept here.
struct Outgoing {
    requests: Vec<Request>,
    _header: Vec<u8>,
    _payload: Arc<Buffer>,
}

/// A message that is being received. MPI writes into the buffer.
struct Incoming {
    requests: Vec<Request>,
    content: Content,
    data: Buffer,
}

/// The state of all messages of this process.
pub(super) struct Engine {
    wire: Wire,
    outgoing: BTreeMap<u64, Outgoing>,
    /// Number of the next message that is sent.
    next: u64,
    /// By sender, in the order sent: a message counts as arrived when all before it have.
    incoming: Vec<VecDeque<Incoming>>,
    pub(super) arrived: Arrived,
    /// For each rank, whether it sends nothing more, so that all its messages have arrived.
    finished: Vec<bool>,
    /// Whether MPI has ended or is about to end, so that it must not be called.
    closed: bool,
}

impl Engine {
    pub(super) fn new(wire: Wire) -> Self {
        let incoming = (0..wire.size).map(|_| VecDeque::new()).collect();
        let finished = vec![false; wire.size];
        let arrived = Arrived::new(wire.rank);
        Self { wire, outgoing: BTreeMap::new(), next: 0, incoming, arrived, finished, closed: false }
    }

    pub(super) fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Makes every later call fail: a communicator may outlive its world.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    fn check_open(&self) -> Result<()> {
        if self.closed { Err("the world has ended".into()) } else { Ok(()) }
    }

    /// Starts sending, and returns the message's number, for use with [`has_left`](Self::has_left).
    pub(super) fn send(&mut self, to: usize, content: Content, part: CollectivePart) -> Result<u64> {
        self.check_open()?;
        let number = self.next;
        self.next += 1;
        if to == self.wire.rank {
            self.arrived.put(to, content, part.data);
            return Ok(number);
        }
        let header = Header { content, kind: Kind::of(&part.data), len: part.range.len() }.encode();
        // SAFETY: header and payload are kept in `outgoing` until the requests have finished; moving them leaves their
        // bytes where they are, and a shared buffer is never changed. On an error both are leaked, and so they are by an
        // engine that is dropped with messages under way.
        let started = unsafe {
            self.wire.send_header(to, &header).and_then(|request| {
                let pieces = self.wire.send(to, &part.data, part.range)?;
                Ok(std::iter::once(request).chain(pieces).collect())
            })
        };
        let requests = match started {
            Ok(requests) => requests,
            Err(problem) => {
                std::mem::forget((header, part.data));
                return Err(problem);
            }
        };
        self.outgoing.insert(number, Outgoing { requests, _header: header, _payload: part.data });
        Ok(number)
    }

    pub(super) fn has_left(&self, number: u64) -> bool {
        !self.outgoing.contains_key(&number)
    }

    /// Whether all messages of this process to others have left.
    pub(super) fn is_empty(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Advances all transfers. Returns whether any is in progress, so that the caller should call again soon.
    pub(super) fn progress(&mut self) -> Result<bool> {
        self.check_open()?;
        while let Some((from, header)) = self.wire.header()? {
            let header = Header::decode(&header).ok_or_else(|| format!("rank {from} sent a damaged header"))?;
            let mut data = header.kind.zeros(header.len);
            // SAFETY: the buffer moves into `incoming`, which keeps it, and moving it leaves its elements where they are;
            // it is read once the requests have finished. An engine that is dropped before leaks it.
            let requests = match unsafe { self.wire.receive(from, &mut data) } {
                Ok(requests) => requests,
                Err(problem) => {
                    // Some pieces may already be on their way into the buffer.
                    std::mem::forget(data);
                    return Err(problem);
                }
            };
            self.incoming[from].push_back(Incoming { requests, content: header.content, data });
        }
        let mut busy = false;
        for from in 0..self.incoming.len() {
            for message in &mut self.incoming[from] {
                busy |= !self.wire.finished(&mut message.requests)?;
            }
            while self.incoming[from].front().is_some_and(|message| message.requests.is_empty()) {
                let Some(Incoming { content, data, .. }) = self.incoming[from].pop_front() else { break };
                self.finished[from] |= content == Content::Finished;
                self.arrived.put(from, content, Arc::new(data));
            }
        }
        let mut gone = Vec::new();
        for (number, message) in &mut self.outgoing {
            if self.wire.finished(&mut message.requests)? {
                gone.push(*number);
            }
        }
        gone.iter().for_each(|number| drop(self.outgoing.remove(number)));
        Ok(busy || !self.outgoing.is_empty())
    }

    /// The first of `ranks` that sends nothing more.
    pub(super) fn finished(&self, ranks: &[usize]) -> Option<usize> {
        ranks.iter().copied().find(|rank| self.finished[*rank])
    }

    /// The ranks that may still send messages.
    pub(super) fn unfinished(&self) -> Vec<usize> {
        (0..self.finished.len()).filter(|rank| *rank != self.wire.rank && !self.finished[*rank]).collect()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // MPI may still read or write these buffers, so they are leaked, not freed.
        std::mem::take(&mut self.outgoing).into_values().for_each(std::mem::forget);
        std::mem::take(&mut self.incoming).into_iter().flatten().for_each(std::mem::forget);
    }
}
