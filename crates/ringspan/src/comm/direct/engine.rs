//! The state of all messages between this rank and the others: notes and payloads over the underlying communicator, flights
//! of the channel. It advances only when it is called. The protocol is described in `README.md`.

use super::channel::{Channel, Transfer};
use super::note::{DeviceAnnouncement, Note};
use crate::comm::arrived::Arrived;
use crate::comm::group::part::CollectivePart;
use crate::comm::header::{Content, Header, Kind};
use crate::comm::{Buffer, Communicator, OnDevice, Pending};
use crate::error::{Error, Result};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Tags on the underlying communicator: notes and payloads each keep their own order.
const NOTES: u64 = 0;
const PAYLOADS: u64 = 1;

/// The state of the connection to another rank.
#[derive(Default)]
struct Peer {
    /// The posted receive of the rank's next note.
    pending_note: Option<Box<dyn Pending>>,
    /// Whether the rank has said that it sends nothing more.
    gone: bool,
    /// The operation that the rank is in, by its last answer; `None` until it answers.
    reported_operation: Option<String>,
    /// Blocks that were announced to the rank and that it has not answered yet, by number of the message.
    unanswered: VecDeque<(u64, Arc<dyn OnDevice>)>,
    /// Messages that the rank announced, in its order: one counts as arrived when all before it have.
    incoming: VecDeque<(Content, IncomingMessage)>,
    /// Number of the first message in `incoming`.
    first: u64,
}

enum IncomingMessage {
    /// A payload that the underlying communicator delivers.
    Payload(Box<dyn Pending>),
    /// A block that a flight of the channel delivers.
    Flight,
    Here(Arc<Buffer>),
}

/// A message of this rank that has not left yet.
enum OutgoingMessage {
    Payload(Box<dyn Pending>),
    Flight,
}

/// A transfer in a flight, with the number of its message.
struct FlightTransfer {
    transfer: Transfer,
    /// Index of the message: for a send among this rank's messages, for a receive among the sender's.
    number: u64,
}

/// The state of all messages of this rank.
pub(super) struct Engine {
    underlying: Arc<dyn Communicator>,
    channel: Box<dyn Channel>,
    peers: Vec<Peer>,
    /// Number of blocks without an answer, over all peers.
    unanswered: usize,
    /// Flights that transfers can still be added to, by number.
    open_flights: BTreeMap<u64, Vec<FlightTransfer>>,
    /// Number of the lowest flight that transfers can still be added to.
    open: u64,
    /// Flights that were started and have not ended, in their order.
    started_flights: VecDeque<(u64, Vec<FlightTransfer>)>,
    leaving: BTreeMap<u64, OutgoingMessage>,
    /// Number of the next message that is sent.
    next: u64,
    pub(super) arrived: Arrived,
    /// The operation that this rank waits in; empty while it computes.
    pub(super) doing: String,
}

impl Engine {
    pub(super) fn new(underlying: Arc<dyn Communicator>, channel: Box<dyn Channel>) -> Self {
        let peers = (0..underlying.size()).map(|_| Peer::default()).collect();
        let arrived = Arrived::new(underlying.rank());
        Self {
            underlying,
            channel,
            peers,
            unanswered: 0,
            open_flights: BTreeMap::new(),
            open: 0,
            started_flights: VecDeque::new(),
            leaving: BTreeMap::new(),
            next: 0,
            arrived,
            doing: String::new(),
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.underlying.rank()
    }

    /// Starts sending, and returns the message's number, for use with [`has_left`](Self::has_left).
    pub(super) fn send(&mut self, to: usize, content: Content, part: CollectivePart) -> Result<u64> {
        let number = self.next;
        self.next += 1;
        if to == self.rank() {
            self.arrived.put(to, content, part.data);
            return Ok(number);
        }
        if let Buffer::Device(elements) = &*part.data {
            let device =
                Some(DeviceAnnouncement { type_code: self.channel.type_code(&**elements)?, earliest: self.open });
            self.note(
                to,
                &Note::Announce { header: Header { content, kind: Kind::U8, len: elements.elements() }, device },
            )?;
            if elements.elements() > 0 {
                self.peers[to].unanswered.push_back((number, elements.clone()));
                self.unanswered += 1;
                self.leaving.insert(number, OutgoingMessage::Flight);
            }
            return Ok(number);
        }
        let header = Header { content, kind: Kind::of(&part.data), len: part.range.len() };
        self.note(to, &Note::Announce { header, device: None })?;
        let payload = self.underlying.send(to, PAYLOADS, whole(part))?;
        self.leaving.insert(number, OutgoingMessage::Payload(payload));
        Ok(number)
    }

    pub(super) fn has_left(&self, number: u64) -> bool {
        !self.leaving.contains_key(&number)
    }

    /// Whether this rank has no message that has not left, and no flight.
    pub(super) fn is_quiet(&self) -> bool {
        self.leaving.is_empty() && self.open_flights.is_empty() && self.started_flights.is_empty()
    }

    /// Asks all other ranks what they do.
    pub(super) fn ask(&mut self) -> Result<()> {
        self.peers.iter_mut().for_each(|peer| peer.reported_operation = None);
        let others: Vec<usize> = (0..self.peers.len()).filter(|rank| *rank != self.rank()).collect();
        others.into_iter().filter(|to| !self.peers[*to].gone).try_for_each(|to| self.note(to, &Note::Question))
    }

    /// The first rank that has not answered the question of [`ask`](Self::ask).
    pub(super) fn silent(&self) -> Option<usize> {
        let silent =
            |(rank, peer): &(usize, &Peer)| *rank != self.rank() && !peer.gone && peer.reported_operation.is_none();
        self.peers.iter().enumerate().find(silent).map(|(rank, _)| rank)
    }

    /// Tells all ranks that no message follows.
    pub(super) fn bye(&mut self) -> Result<()> {
        let others = (0..self.peers.len()).filter(|rank| *rank != self.rank());
        others.collect::<Vec<_>>().into_iter().try_for_each(|to| self.note(to, &Note::Bye))
    }

    /// Ends all flights, whatever they carry.
    pub(super) fn abort(&mut self) {
        self.channel.abort();
    }

    /// Advances all transfers. Returns whether any is in progress, so that the caller should call again soon.
    pub(super) fn drive(&mut self) -> Result<bool> {
        let mut moved = false;
        for from in (0..self.peers.len()).filter(|from| *from != self.underlying.rank()).collect::<Vec<_>>() {
            while !self.peers[from].gone {
                let Some(note) = self.next_note(from)? else { break };
                self.handle_note(from, note)?;
                moved = true;
            }
        }
        self.start_flights()?;
        for _ in 0..self.channel.take_ended()? {
            self.complete_flight();
            moved = true;
        }
        let mut left = Vec::new();
        for (number, leaving) in &mut self.leaving {
            if let OutgoingMessage::Payload(payload) = leaving
                && payload.test()?
            {
                left.push(*number);
            }
        }
        left.iter().for_each(|number| drop(self.leaving.remove(number)));
        for from in 0..self.peers.len() {
            self.deliver(from)?;
        }
        Ok(moved || self.unanswered > 0 || !self.started_flights.is_empty())
    }

    /// The next note of a rank, if one has arrived. A rank that has ended sends none: then the error is the failure of its
    /// end.
    pub(super) fn next_note(&mut self, from: usize) -> Result<Option<Note>> {
        let mut pending_note = match self.peers[from].pending_note.take() {
            Some(pending_note) => pending_note,
            None => self.underlying.receive(from, NOTES)?,
        };
        if !pending_note.test()? {
            self.peers[from].pending_note = Some(pending_note);
            return Ok(None);
        }
        let damaged = || self.broken(format!("rank {from} sent a damaged note"));
        match pending_note.wait()?.as_deref() {
            Some(Buffer::U8(bytes)) => Note::decode(bytes).map(Some).ok_or_else(damaged),
            _ => Err(damaged()),
        }
    }

    fn handle_note(&mut self, from: usize, note: Note) -> Result<()> {
        match note {
            Note::Announce { header, device } => {
                let coming = match device {
                    None => IncomingMessage::Payload(self.underlying.receive(from, PAYLOADS)?),
                    Some(way) => self.allocate_block(from, header.len, way)?,
                };
                self.peers[from].incoming.push_back((header.content, coming));
            }
            Note::Answer { flight } => {
                let Some((number, elements)) = self.peers[from].unanswered.pop_front() else {
                    return Err(self.broken(format!("rank {from} answered what was not announced")));
                };
                if flight < self.open {
                    return Err(self.broken(format!("rank {from} sent a block after flight {flight}, which has left")));
                }
                self.unanswered -= 1;
                let transfer = Transfer::Send { to: from, elements };
                self.open_flights.entry(flight).or_default().push(FlightTransfer { transfer, number });
            }
            Note::Question => self.note(from, &Note::Doing { text: self.doing.clone() })?,
            Note::Doing { text } => self.peers[from].reported_operation = Some(text),
            Note::Bye => {
                // Blocks that the rank has not answered are not wanted any more.
                for (number, _) in std::mem::take(&mut self.peers[from].unanswered) {
                    self.unanswered -= 1;
                    self.leaving.remove(&number);
                }
                self.peers[from].gone = true;
            }
        }
        Ok(())
    }

    /// Allocates an announced block and answers: the block goes with the first flight that is open at both ends.
    fn allocate_block(
        &mut self,
        from: usize,
        len: usize,
        DeviceAnnouncement { type_code, earliest }: DeviceAnnouncement,
    ) -> Result<IncomingMessage> {
        let elements = self.channel.allocate(type_code, len)?;
        if len == 0 {
            return Ok(IncomingMessage::Here(Arc::new(Buffer::Device(elements))));
        }
        let flight = earliest.max(self.open);
        let Peer { first, incoming, .. } = &self.peers[from];
        let number = first + incoming.len() as u64;
        let transfer = Transfer::Receive { from, elements };
        self.open_flights.entry(flight).or_default().push(FlightTransfer { transfer, number });
        self.note(from, &Note::Answer { flight })?;
        Ok(IncomingMessage::Flight)
    }

    /// Starts flights. None may start while an answer is missing, because the block in question could belong to it.
    fn start_flights(&mut self) -> Result<()> {
        while self.unanswered == 0
            && let Some((flight, transfers)) = self.open_flights.pop_first()
        {
            self.open = flight.checked_add(1).ok_or_else(|| self.broken("flights are counted to 2^64".into()))?;
            self.channel.start(transfers.iter().map(|member| member.transfer.clone()).collect())?;
            self.started_flights.push_back((flight, transfers));
        }
        Ok(())
    }

    /// Completes the transfers of the first flight, which has ended.
    fn complete_flight(&mut self) {
        for FlightTransfer { transfer, number } in
            self.started_flights.pop_front().map(|(_, all)| all).into_iter().flatten()
        {
            match transfer {
                Transfer::Send { .. } => drop(self.leaving.remove(&number)),
                Transfer::Receive { from, elements } => {
                    let Peer { first, incoming, .. } = &mut self.peers[from];
                    let at = usize::try_from(number - *first).unwrap_or(usize::MAX);
                    if let Some((_, coming)) = incoming.get_mut(at) {
                        *coming = IncomingMessage::Here(Arc::new(Buffer::Device(elements)));
                    }
                }
            }
        }
    }

    /// Hands over the messages of a rank that have arrived, in order.
    fn deliver(&mut self, from: usize) -> Result<()> {
        while let Some((content, coming)) = self.peers[from].incoming.pop_front() {
            let data = match coming {
                IncomingMessage::Here(data) => Ok(data),
                IncomingMessage::Flight => Err(IncomingMessage::Flight),
                IncomingMessage::Payload(mut payload) => match payload.test()? {
                    true => {
                        Ok(payload.wait()?.ok_or_else(|| self.broken("a receive ended without a payload".into()))?)
                    }
                    false => Err(IncomingMessage::Payload(payload)),
                },
            };
            match data {
                Ok(data) => {
                    self.peers[from].first += 1;
                    // A finished rank says so by a note (`Bye`), so the content is never `Finished`.
                    self.arrived.put(from, content, data);
                }
                Err(coming) => {
                    self.peers[from].incoming.push_front((content, coming));
                    break;
                }
            }
        }
        Ok(())
    }

    fn note(&self, to: usize, note: &Note) -> Result<()> {
        // The send completes even if nobody waits for it.
        self.underlying.send(to, NOTES, Arc::new(Buffer::U8(note.encode()))).map(drop)
    }

    fn broken(&self, problem: String) -> Error {
        Error::Communicator { rank: self.rank(), operation: "moving blocks between devices".into(), problem }
    }

    /// The first of `ranks` that sends nothing more, and whose messages have all arrived here: a flight may have ended
    /// there earlier than here.
    pub(super) fn gone(&self, ranks: &[usize]) -> Option<usize> {
        let flights = || self.open_flights.values().chain(self.started_flights.iter().map(|(_, transfers)| transfers));
        let with = |rank: usize| flights().flatten().any(|member| member.transfer.peer() == rank);
        let over = |rank: &usize| self.peers[*rank].gone && self.peers[*rank].incoming.is_empty() && !with(*rank);
        ranks.iter().copied().find(over)
    }

    /// Describes what is known of a rank that is waited for.
    pub(super) fn describe(&self, peer: usize) -> String {
        let with = |(_, transfers): &&(u64, Vec<FlightTransfer>)| transfers.iter().any(|p| p.transfer.peer() == peer);
        let Peer { unanswered, incoming, gone, reported_operation, .. } = &self.peers[peer];
        let doing = match reported_operation.as_deref() {
            None => "it does not say what it does".into(),
            Some("") => "it computes".into(),
            Some(text) => format!("it waits in {text}"),
        };
        let known = if let Some((flight, transfers)) = self.started_flights.iter().find(with) {
            let count = transfers.len();
            format!("has a block in flight {flight} ({count} blocks here), which has not ended")
        } else if *gone {
            "has finished".into()
        } else if !unanswered.is_empty() {
            format!("has not answered the announcement of {} blocks", unanswered.len())
        } else if matches!(incoming.front(), Some((_, IncomingMessage::Payload(_)))) {
            "has announced a message that is still on its way".into()
        } else if self.unanswered > 0 {
            format!("may wait as well: other ranks have not answered the announcement of {} blocks", self.unanswered)
        } else {
            "has announced nothing that is not here".into()
        };
        format!("{known}; {doing}")
    }
}

/// Copies a part into its own buffer, unless it is a whole buffer.
fn whole(CollectivePart { data, range }: CollectivePart) -> Arc<Buffer> {
    if range.len() == data.len() {
        return data;
    }
    Arc::new(match &*data {
        Buffer::F32(values) => Buffer::F32(values[range].to_vec()),
        Buffer::U16(values) => Buffer::U16(values[range].to_vec()),
        Buffer::U64(values) => Buffer::U64(values[range].to_vec()),
        Buffer::U8(values) => Buffer::U8(values[range].to_vec()),
        // Groups never divide a device buffer.
        Buffer::Device(elements) => Buffer::Device(elements.clone()),
    })
}
