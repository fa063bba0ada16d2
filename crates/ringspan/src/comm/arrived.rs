//! What has arrived at a rank until it asks for it: messages under their addresses, and parts of collectives.

use crate::comm::Buffer;
use crate::comm::group::failure::Failure;
use crate::comm::group::mailbox::{Address, GroupId, Mailbox};
use crate::comm::group::part::Part;
use crate::comm::header::{Call, Content};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What a rank brought to a collective.
struct Brought {
    call: Call,
    data: Arc<Buffer>,
}

/// Of one rank.
pub(in crate::comm) struct Arrived {
    rank: usize,
    mailboxes: HashMap<Address, Mailbox<Arc<Buffer>>>,
    /// Collectives that this rank has not left, by group and number: what the others brought, by rank of the world.
    rounds: HashMap<(GroupId, u64), BTreeMap<usize, Brought>>,
}

impl Arrived {
    pub(in crate::comm) fn new(rank: usize) -> Self {
        Self { rank, mailboxes: HashMap::new(), rounds: HashMap::new() }
    }

    /// Adds what a rank sent.
    pub(in crate::comm) fn put(&mut self, from: usize, content: Content, data: Arc<Buffer>) {
        match content {
            Content::Message { group, tag } => {
                let address = Address { group, from, to: self.rank, tag };
                self.with_mailbox(&address, |mailbox| mailbox.send(data));
            }
            Content::Part { group, number, call } => {
                self.rounds.entry((group, number)).or_default().insert(from, Brought { call, data });
            }
            Content::Finished => (),
        }
    }

    /// Does something with a mailbox; idle ones are not kept.
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

    /// Those of `ranks` whose part of a collective is not here, or the failure: a part of another collective.
    pub(in crate::comm) fn missing(
        &self,
        (group, number): (&GroupId, u64),
        own: &Call,
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

    /// Ends a collective: what `ranks` brought, in their order, with this rank's own part.
    pub(in crate::comm) fn leave(
        &mut self,
        (group, number): (&GroupId, u64),
        ranks: &[usize],
        mut own: Option<Part>,
    ) -> Vec<Part> {
        let mut round = self.rounds.remove(&(group.clone(), number)).unwrap_or_default();
        let part = |rank: &usize| match *rank == self.rank {
            true => own.take(),
            false => round.remove(rank).map(|brought| Part::whole(brought.data)),
        };
        ranks.iter().filter_map(part).collect()
    }
}
