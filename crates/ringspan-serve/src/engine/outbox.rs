//! Events on their way to the clients.

use super::request::Event;
use tokio::sync::mpsc::UnboundedSender;

/// Events of a step, which clients hear of once all ranks have begun the next step: a thread that writes an answer takes the processor of
/// a rank for a moment, and if it took that of rank 0 before, all ranks would wait.
#[derive(Debug, Default)]
pub(super) struct Outbox(Vec<(UnboundedSender<Event>, Event)>);

impl Outbox {
    /// Adds an event for the client behind `to`.
    pub(super) fn add(&mut self, to: &UnboundedSender<Event>, event: Event) {
        self.0.push((to.clone(), event));
    }

    /// Sends all events, in the order in which they were added.
    pub(super) fn send(&mut self) {
        for (to, event) in self.0.drain(..) {
            // The client may have left.
            let _ = to.send(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::FinishReason;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    #[test]
    fn events_wait_until_they_are_sent_and_keep_their_order() {
        let mut outbox = Outbox::default();
        let ((first, mut first_events), (second, mut second_events)) = (unbounded_channel(), unbounded_channel());
        let (gone, _) = unbounded_channel();
        outbox.add(&gone, Event::Token(1, None));
        for token in [7, 8] {
            outbox.add(&first, Event::Token(token, None));
            outbox.add(&second, Event::Token(token + 10, None));
        }
        outbox.add(&first, Event::Finished { reason: FinishReason::Length });
        // The channel is open until the last event has been sent, even if nothing else holds it.
        drop((first, second));
        assert!(first_events.try_recv().is_err() && second_events.try_recv().is_err());
        outbox.send();
        outbox.send();
        let check = |expected: &[u32], events: &mut UnboundedReceiver<Event>| {
            for token in expected {
                assert!(matches!(events.try_recv(), Ok(Event::Token(sent, None)) if sent == *token));
            }
        };
        check(&[7, 8], &mut first_events);
        check(&[17, 18], &mut second_events);
        assert!(matches!(first_events.try_recv(), Ok(Event::Finished { .. })));
        assert!(first_events.try_recv().is_err() && second_events.try_recv().is_err());
    }
}
