//! Data that has arrived at a rank before the rank asks for it: messages by address, and parts of collectives.

use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, GroupId, Mailbox};
use crate::comm::group::part::CollectivePart;
use crate::comm::header::{CallDescription, Content};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The part that another rank sent for a collective, with its description of that collective.
struct ReceivedPart {
    call: CallDescription,
    data: Arc<Buffer>,
}

/// The arrived data of one rank.
pub(in crate::comm) struct Arrived {
    rank: usize,
    mailboxes: HashMap<Address, Mailbox<Arc<Buffer>>>,
    /// Parts of collectives that this rank has not left, by group and number of the collective, then by the sender's world
    /// rank.
    rounds: HashMap<(GroupId, u64), BTreeMap<usize, ReceivedPart>>,
}

impl Arrived {
    pub(in crate::comm) fn new(rank: usize) -> Self {
        Self { rank, mailboxes: HashMap::new(), rounds: HashMap::new() }
    }

    /// Adds data that rank `from` sent.
    pub(in crate::comm) fn put(&mut self, from: usize, content: Content, data: Arc<Buffer>) {
        match content {
            Content::Message { group, tag } => {
                let address = Address { group, from, to: self.rank, tag };
                self.with_mailbox(&address, |mailbox| mailbox.send(data));
            }
            Content::CollectivePart { group, number, call } => {
                self.rounds.entry((group, number)).or_default().insert(from, ReceivedPart { call, data });
            }
            Content::Finished => (),
        }
    }

    /// Calls `act` with the mailbox of an address; idle mailboxes are removed.
    pub(in crate::comm) fn with_mailbox<T>(
        &mut self,
        address: &Address,
        act: impl FnOnce(&mut Mailbox<Arc<Buffer>>) -> T,
    ) -> T {
        let mailbox = self.mailboxes.entry(address.clone()).or_default();
        let result = act(mailbox);
        if mailbox.is_idle() {
            self.mailboxes.remove(address);
        }
        result
    }

    /// The ranks among `ranks` whose part of a collective has not arrived, or a failure if a rank is in another collective.
    pub(in crate::comm) fn missing(
        &self,
        (group, number): (&GroupId, u64),
        own: &CallDescription,
        ranks: &[usize],
    ) -> Result<Vec<usize>, Failure> {
        let Some(round) = self.rounds.get(&(group.clone(), number)) else { return Ok(ranks.to_vec()) };
        match round.iter().find(|(_, other)| other.call != *own) {
            Some((peer, other)) => {
                let operations = [own.text.clone(), other.call.text.clone()];
                Err(Failure::Mismatch { ranks: [self.rank, *peer], operations })
            }
            None => Ok(ranks.iter().copied().filter(|rank| !round.contains_key(rank)).collect()),
        }
    }

    /// Ends a collective: removes and returns the parts of `ranks`, in their order; this rank's part is `own`.
    pub(in crate::comm) fn leave(
        &mut self,
        (group, number): (&GroupId, u64),
        ranks: &[usize],
        mut own: Option<CollectivePart>,
    ) -> Vec<CollectivePart> {
        let mut round = self.rounds.remove(&(group.clone(), number)).unwrap_or_default();
        let part = |rank: &usize| match *rank == self.rank {
            true => own.take(),
            false => round.remove(rank).map(|brought| CollectivePart::whole(brought.data)),
        };
        ranks.iter().filter_map(part).collect()
    }
}
