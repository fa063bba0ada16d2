//! The messages between two ranks under one tag, matched with receives in the order both were posted.

use std::collections::VecDeque;
use std::sync::Arc;

/// The key of a mailbox: group, sender and receiver (world ranks), and tag.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::comm) struct Address {
    pub(in crate::comm) group: GroupId,
    pub(in crate::comm) from: usize,
    pub(in crate::comm) to: usize,
    pub(in crate::comm) tag: u64,
}

/// The identity of a group: the splits that led to it, each as the number of the split in its group, and the color.
///
/// All members compute the same id without communication, and no other group has it.
pub(in crate::comm) type GroupId = Arc<[(u64, u64)]>;

/// A message or its receive: the n-th message and the n-th receive of an address share a slot, whichever comes first.
#[derive(Debug)]
enum Slot<M> {
    Wanted,
    Arrived(M),
    /// The receive was dropped; its message will be discarded.
    Abandoned,
    Done,
}

/// A queue of the slots that are not done yet.
#[derive(Debug)]
pub(in crate::comm) struct Mailbox<M> {
    slots: VecDeque<Slot<M>>,
    /// Number of the front slot; `sent` and `posted` are the numbers of the next message and of the next receive.
    first: u64,
    sent: u64,
    posted: u64,
}

impl<M> Default for Mailbox<M> {
    fn default() -> Self {
        Self { slots: VecDeque::new(), first: 0, sent: 0, posted: 0 }
    }
}

impl<M> Mailbox<M> {
    /// Adds a message.
    pub(in crate::comm) fn send(&mut self, data: M) {
        let number = self.sent;
        self.sent += 1;
        match self.slot(number) {
            Some(slot @ Slot::Wanted) => *slot = Slot::Arrived(data),
            Some(slot) => *slot = Slot::Done,
            None => self.slots.push_back(Slot::Arrived(data)),
        }
        self.trim();
    }

    /// Adds a receive, and returns its ticket.
    pub(in crate::comm) fn post(&mut self) -> u64 {
        let ticket = self.posted;
        self.posted += 1;
        if self.slot(ticket).is_none() {
            self.slots.push_back(Slot::Wanted);
        }
        ticket
    }

    /// The message of a ticket, if it has arrived.
    pub(in crate::comm) fn peek(&self, ticket: u64) -> Option<&M> {
        let at = usize::try_from(ticket.checked_sub(self.first)?).ok()?;
        match self.slots.get(at) {
            Some(Slot::Arrived(message)) => Some(message),
            _ => None,
        }
    }

    /// Removes and returns the message of a ticket, if it has arrived.
    pub(in crate::comm) fn take(&mut self, ticket: u64) -> Option<M> {
        let slot = self.slot(ticket).filter(|slot| matches!(slot, Slot::Arrived(_)))?;
        let taken = std::mem::replace(slot, Slot::Done);
        self.trim();
        match taken {
            Slot::Arrived(data) => Some(data),
            _ => None,
        }
    }

    /// Cancels a ticket: its message is discarded, at once or when it arrives.
    pub(in crate::comm) fn abandon(&mut self, ticket: u64) {
        match self.slot(ticket) {
            Some(slot @ Slot::Wanted) => *slot = Slot::Abandoned,
            Some(slot @ Slot::Arrived(_)) => *slot = Slot::Done,
            _ => {}
        }
        self.trim();
    }

    /// Whether no message or receive is pending: the mailbox can be removed.
    pub(in crate::comm) fn is_idle(&self) -> bool {
        self.slots.is_empty()
    }

    fn slot(&mut self, number: u64) -> Option<&mut Slot<M>> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.slots.get_mut(at)
    }

    fn trim(&mut self) {
        while matches!(self.slots.front(), Some(Slot::Done)) {
            self.slots.pop_front();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_take_their_own_message_in_any_order() {
        let mut mailbox = Mailbox::default();
        let early = mailbox.post();
        (1..=3).for_each(|value| mailbox.send(value));
        let (second, third) = (mailbox.post(), mailbox.post());
        assert_eq!(mailbox.take(third), Some(3));
        assert_eq!(mailbox.take(early), Some(1));
        assert_eq!(mailbox.take(early), None);
        assert!(mailbox.peek(second).is_some() && !mailbox.is_idle());
        assert_eq!(mailbox.take(second), Some(2));
        assert!(mailbox.is_idle());
    }

    #[test]
    fn an_abandoned_receive_uses_its_message_up() {
        let mut mailbox = Mailbox::default();
        let (first, second) = (mailbox.post(), mailbox.post());
        mailbox.abandon(first);
        mailbox.send(1);
        assert!(mailbox.peek(first).is_none() && mailbox.peek(second).is_none());
        mailbox.send(2);
        assert_eq!(mailbox.take(second), Some(2));
        let third = mailbox.post();
        mailbox.send(3);
        mailbox.abandon(third);
        assert!(mailbox.is_idle());
    }
}
