//! Every transfer is started before the computation that it overlaps with, and waited for after it.

use ringspan::attention::{Group, Inputs, backward, forward};
use ringspan::comm::{Buffer, Communicator, Pending, threads};
use ringspan::kernel::{Kernel, View};
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use ringspan_testing::delegate_communicator;
use ringspan_testing::mesh::random;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The actions of a rank, in order. Messages are numbered in the order in which they are started.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    Sends(usize),
    Receives(usize),
    /// A task of a kernel.
    Computes,
    HasReceived(usize),
    HasSent(usize),
}

type Log = Arc<Mutex<Vec<Event>>>;

fn note(log: &Log, event: Event) {
    log.lock().unwrap_or_else(PoisonError::into_inner).push(event);
}

/// Records which transfers are started and waited for, and passes the calls on.
struct RecordingComm {
    inner: Arc<dyn Communicator>,
    log: Log,
}

impl RecordingComm {
    fn started(&self, event: fn(usize) -> Event) -> usize {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let number = log.iter().filter(|e| matches!(e, Event::Sends(_) | Event::Receives(_))).count();
        log.push(event(number));
        number
    }

    fn pending(&self, inner: Box<dyn Pending>, ends: Event) -> Box<dyn Pending> {
        Box::new(Waiting { inner, ends, log: self.log.clone() })
    }
}

struct Waiting {
    inner: Box<dyn Pending>,
    ends: Event,
    log: Log,
}

impl Pending for Waiting {
    fn test(&mut self) -> Result<bool, Error> {
        self.inner.test()
    }
    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>, Error> {
        note(&self.log, self.ends);
        self.inner.wait()
    }
}

impl Communicator for RecordingComm {
    delegate_communicator!(inner);
    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>, Error> {
        let number = self.started(Event::Sends);
        Ok(self.pending(self.inner.send(to, tag, data)?, Event::HasSent(number)))
    }
    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>, Error> {
        let number = self.started(Event::Receives);
        Ok(self.pending(self.inner.receive(from, tag)?, Event::HasReceived(number)))
    }
    fn progress(&self) {
        self.inner.progress();
    }
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Ok(Arc::new(RecordingComm { inner: self.inner.split(color, key)?, log: self.log.clone() }))
    }
}

/// The events of each rank of a mesh in a forward pass, and in a backward pass.
fn events(ring: usize, ulysses: usize, chunks: usize) -> Vec<[Vec<Event>; 2]> {
    let ranks = ring * ulysses;
    let (len, heads, dim) = (300 * ranks, 2 * ulysses, 32);
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, len), ranks).expect("ranks");
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (ring, ulysses)).expect("fits");
    let schedule = schedule.with_head_chunks(chunks);
    let run = threads::run(ranks, threads::Options::default(), |comm| {
        let log = Log::default();
        let own = log.clone();
        let kernel =
            Kernel::new(1).with_progress(Arc::new(move || note(&own, Event::Computes))).with_pause(Duration::ZERO);
        let group = Group::new(Arc::new(RecordingComm { inner: comm, log: log.clone() }), (ring, ulysses), kernel)?;
        let values = random(layout.tokens(0) * heads * dim, 1);
        let view = View::new(&values, layout.tokens(0), heads, dim).expect("its size");
        let score = Score::new(0.1);
        let inputs = Inputs::new(view, view, view, &score);
        let take = || std::mem::take(&mut *log.lock().unwrap_or_else(PoisonError::into_inner));
        let saved = forward(&group, &schedule, &inputs)?;
        let events = take();
        backward(&group, &schedule, &inputs, &saved, view)?;
        Ok::<_, Error>([events, take()])
    });
    run.expect("runs")
}

#[test]
fn every_block_travels_while_its_receiver_computes() {
    for ranks in [2, 4] {
        for (rank, [forward, backward]) in events(ranks, 1, 1).into_iter().enumerate() {
            let position = |events: &[Event], event: Event| events.iter().position(|e| *e == event);
            let computes_between = |events: &[Event], from: usize, to: usize| {
                events[from..to].iter().filter(|event| **event == Event::Computes).count()
            };
            let mut hops = 0;
            for (at, event) in forward.iter().enumerate() {
                match *event {
                    Event::Receives(number) => {
                        let end = position(&forward, Event::HasReceived(number)).expect("it is waited for");
                        assert!(computes_between(&forward, at, end) >= 2, "rank {rank} of {ranks}: {forward:?}");
                        hops += 1;
                    }
                    Event::Sends(number) => {
                        let end = position(&forward, Event::HasSent(number)).expect("it is waited for");
                        assert!(computes_between(&forward, at, end) >= 2, "rank {rank} of {ranks}: {forward:?}");
                    }
                    _ => {}
                }
            }
            assert_eq!(hops, ranks - 1);
            // Only the last block of gradients arrives after all computation; the other blocks overlap, as in the forward
            // pass.
            let hidden = |(at, event): &(usize, &Event)| match **event {
                Event::Receives(number) => position(&backward, Event::HasReceived(number))
                    .is_some_and(|end| computes_between(&backward, *at, end) >= 2),
                _ => false,
            };
            let hidden = backward.iter().enumerate().filter(hidden).count();
            assert!(hidden >= 2 * (ranks - 1) - 1, "rank {rank} of {ranks}: {hidden} hidden in {backward:?}");
        }
    }
}

#[test]
fn a_part_of_the_heads_travels_while_another_is_computed() {
    for (rank, [forward, backward]) in events(1, 2, 2).into_iter().enumerate() {
        let hidden = |events: &[Event]| {
            let ends = |number| events.iter().position(|event| *event == Event::HasReceived(number));
            let computes = |from: usize, to: usize| events[from..to].iter().filter(|e| **e == Event::Computes).count();
            let of = |(at, event): (usize, &Event)| match *event {
                Event::Receives(number) => Some(computes(at, ends(number)?) >= 2),
                _ => None,
            };
            let received: Vec<bool> = events.iter().enumerate().filter_map(of).collect();
            (received.iter().filter(|hidden| **hidden).count(), received.len())
        };
        // q, k and v of the second part arrive while the first is computed; out, maximum and sum of the first return while
        // the second is computed. Backward, d_out and three statistics travel too, and dq, dk and dv return.
        assert_eq!(hidden(&forward), (6, 12), "rank {rank}: {forward:?}");
        assert_eq!(hidden(&backward), (10, 20), "rank {rank}: {backward:?}");
    }
}
