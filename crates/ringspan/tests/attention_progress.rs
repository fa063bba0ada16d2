//! Kernels advance communication between their tasks, for transports that do not move messages by themselves.

use ringspan::attention::{Group, Inputs, backward, forward};
use ringspan::comm::{Buffer, Communicator, Pending, threads};
use ringspan::kernel::{Kernel, View};
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use ringspan_testing::delegate_communicator;
use ringspan_testing::mesh::random;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Stands for a transport that only moves messages in calls of `progress`: counts these calls.
struct Lazy {
    inner: Arc<dyn Communicator>,
    calls: Arc<AtomicUsize>,
}

impl Communicator for Lazy {
    delegate_communicator!(inner);
    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>, Error> {
        self.inner.send(to, tag, data)
    }
    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>, Error> {
        self.inner.receive(from, tag)
    }
    fn progress(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Ok(Arc::new(Lazy { inner: self.inner.split(color, key)?, calls: self.calls.clone() }))
    }
}

#[test]
fn a_kernel_moves_the_transfers_of_its_group_while_it_computes() {
    let (len, heads, dim) = (2048, 2, 64);
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, len), 2).expect("ranks");
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (2, 1)).expect("fits");
    let calls = threads::run(2, threads::Options::default(), |comm| {
        let calls = Arc::new(AtomicUsize::new(0));
        let own = Arc::new(AtomicUsize::new(0));
        let counted = own.clone();
        let kernel = Kernel::new(1).with_progress(Arc::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        let kernel = kernel.with_pause(Duration::ZERO);
        let group = Group::new(Arc::new(Lazy { inner: comm, calls: calls.clone() }), (2, 1), kernel)?;
        let values = random(layout.tokens(0) * heads * dim, 1);
        let view = View::new(&values, layout.tokens(0), heads, dim).expect("its size");
        let score = Score::new(0.1);
        let inputs = Inputs::new(view, view, view, &score);
        let saved = forward(&group, &schedule, &inputs)?;
        let forward_calls = calls.load(Ordering::Relaxed);
        backward(&group, &schedule, &inputs, &saved, view)?;
        Ok::<_, Error>([forward_calls, calls.load(Ordering::Relaxed) - forward_calls, own.load(Ordering::Relaxed)])
    });
    for [forward, backward, own] in calls.expect("runs") {
        // Two steps of 1024 queries and two heads make dozens of tasks, and each calls the communicators of both axes.
        assert!(forward >= 16 && backward >= 16, "{forward} and {backward} calls");
        assert_eq!(2 * own, forward + backward, "the kernel's own hook is called as often");
    }
}
