//! What a slower wire would do: messages between two ranks arrive one after the other, each after its time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The wire from each rank to each other one.
///
/// Ranks of one process hand their buffers over at once, so nothing can be hidden behind compute there. With a link a
/// message arrives when the ones before it on the same wire have passed, its bytes have passed, and the latency is over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes a second, above 0.
    pub bandwidth: f64,
    /// From the last byte's departure to its arrival.
    pub latency: Duration,
}

/// The wires of a world.
#[derive(Debug)]
pub(super) struct Wires {
    link: Link,
    /// When each wire, from a rank to a rank, is free again.
    free: HashMap<(usize, usize), Instant>,
}

impl Wires {
    pub(super) fn new(link: Link) -> Self {
        Self { link, free: HashMap::new() }
    }

    /// When a message that is sent `now` arrives; at once if a rank sends it to itself.
    pub(super) fn arrival(&mut self, from: usize, to: usize, bytes: u64, now: Instant) -> Instant {
        if from == to {
            return now;
        }
        let free = self.free.entry((from, to)).or_insert(now);
        let passed = Duration::try_from_secs_f64(bytes as f64 / self.link.bandwidth).unwrap_or(Duration::MAX);
        // A time that the clock cannot hold never comes; the deadline ends that wait.
        let never = now + Duration::from_secs(u32::MAX.into());
        *free = (*free).max(now).checked_add(passed).unwrap_or(never);
        free.checked_add(self.link.latency).unwrap_or(never)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_wire_follow_each_other_and_wires_do_not_wait_for_each_other() {
        let ms = Duration::from_millis;
        let mut wires = Wires::new(Link { bandwidth: 1000.0, latency: ms(5) });
        let now = Instant::now();
        assert_eq!(wires.arrival(0, 1, 100, now), now + ms(105));
        assert_eq!(wires.arrival(0, 1, 50, now), now + ms(155));
        assert_eq!(wires.arrival(1, 0, 50, now), now + ms(55));
        assert_eq!(wires.arrival(2, 2, 50, now), now);
        let later = now + ms(500);
        assert_eq!(wires.arrival(0, 1, 0, later), later + ms(5));
        assert!(wires.arrival(0, 2, u64::MAX, now) > now + ms(1 << 40));
    }
}
