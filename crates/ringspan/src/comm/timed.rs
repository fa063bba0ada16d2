//! A communicator that measures how long its rank waits for others.

use super::{Buffer, Communicator, Pending};
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Measures how long a rank waits in transfers and collectives, over this group and all groups split from it.
///
/// A transfer that finishes before the rank waits for it adds nothing: the measured time is transfers that did not overlap
/// with computation, and the lateness of other ranks.
pub struct TimedCommunicator {
    inner: Arc<dyn Communicator>,
    clock: Clock,
}

/// Nanoseconds spent waiting.
#[derive(Debug, Clone, Default)]
struct Clock(Arc<AtomicU64>);

impl Clock {
    fn time<T>(&self, wait: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = wait();
        self.0.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }
}

impl TimedCommunicator {
    /// Wraps `inner` and starts measuring.
    pub fn new(inner: Arc<dyn Communicator>) -> Self {
        Self { inner, clock: Clock::default() }
    }

    /// The time that this rank has waited so far.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.clock.0.load(Ordering::Relaxed))
    }
}

impl Communicator for TimedCommunicator {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>> {
        let inner = self.inner.send(to, tag, data)?;
        Ok(Box::new(TimedPending { inner, clock: self.clock.clone() }))
    }

    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>> {
        let inner = self.inner.receive(from, tag)?;
        Ok(Box::new(TimedPending { inner, clock: self.clock.clone() }))
    }

    fn progress(&self) {
        self.inner.progress();
    }

    fn passes_device_memory(&self) -> bool {
        self.inner.passes_device_memory()
    }

    fn all_to_all(&self, parts: Vec<Buffer>) -> Result<Vec<Arc<Buffer>>> {
        self.clock.time(|| self.inner.all_to_all(parts))
    }

    fn all_gather(&self, data: Buffer) -> Result<Vec<Arc<Buffer>>> {
        self.clock.time(|| self.inner.all_gather(data))
    }

    fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize]) -> Result<Vec<f32>> {
        self.clock.time(|| self.inner.reduce_scatter(data, counts))
    }

    fn all_reduce(&self, data: &mut [f32]) -> Result<()> {
        self.clock.time(|| self.inner.all_reduce(data))
    }

    fn broadcast(&self, root: usize, data: Option<Buffer>) -> Result<Arc<Buffer>> {
        self.clock.time(|| self.inner.broadcast(root, data))
    }

    fn barrier(&self) -> Result<()> {
        self.clock.time(|| self.inner.barrier())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>> {
        let inner = self.inner.split(color, key)?;
        Ok(Arc::new(Self { inner, clock: self.clock.clone() }))
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
}

struct TimedPending {
    inner: Box<dyn Pending>,
    clock: Clock,
}

impl Pending for TimedPending {
    fn test(&mut self) -> Result<bool> {
        self.inner.test()
    }

    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>> {
        let Self { inner, clock } = *self;
        clock.time(|| inner.wait())
    }
}
