//! Simulates a slower link: messages between two ranks arrive one after the other, each after its transfer time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The simulated link from each rank to each other rank.
///
/// Ranks of one process pass buffers at once, so there is no transfer time that could overlap with computation. With a
/// link, a message arrives when earlier messages between the two ranks and its own bytes have been transferred, plus the
/// latency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimulatedLink {
    /// Bytes per second, above 0.
    pub bandwidth: f64,
    /// Time from sending the last byte to its arrival.
    pub latency: Duration,
}

/// The links between all pairs of ranks.
#[derive(Debug)]
pub(super) struct SimulatedLinks {
    link: SimulatedLink,
    /// For each pair of sender and receiver, the time at which its link is free again.
    free: HashMap<(usize, usize), Instant>,
}

impl SimulatedLinks {
    pub(super) fn new(link: SimulatedLink) -> Self {
        Self { link, free: HashMap::new() }
    }

    /// The arrival time of a message that is sent `now`; a message to oneself arrives at once.
    pub(super) fn arrival(&mut self, from: usize, to: usize, bytes: u64, now: Instant) -> Instant {
        if from == to {
            return now;
        }
        let free = self.free.entry((from, to)).or_insert(now);
        let passed = Duration::try_from_secs_f64(bytes as f64 / self.link.bandwidth).unwrap_or(Duration::MAX);
        // If the clock cannot represent the time, the message never arrives, and the wait ends at its deadline.
        let never = now + Duration::from_secs(u32::MAX.into());
        *free = (*free).max(now).checked_add(passed).unwrap_or(never);
        free.checked_add(self.link.latency).unwrap_or(never)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_link_follow_each_other_and_links_do_not_wait_for_each_other() {
        let ms = Duration::from_millis;
        let mut wires = SimulatedLinks::new(SimulatedLink { bandwidth: 1000.0, latency: ms(5) });
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
