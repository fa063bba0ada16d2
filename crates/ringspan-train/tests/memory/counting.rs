//! Counts what a training allocates. The count is of the whole process, so one test runs at a time.

use candle_core::{DType, Device, Tensor};
use ringspan_train::{Observer, Plan, Settings, StepMetrics, TrainConfig, train};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The system's allocator with a count of its bytes.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A lock that a test holds while it runs.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes that a training allocates.
#[derive(Default)]
pub(crate) struct Peak {
    pub(crate) plan: Plan,
    /// Bytes in use before the training.
    pub(crate) before: usize,
    /// Most bytes in use at once during the steps after the first.
    pub(crate) most: usize,
}

impl Observer for Peak {
    fn planned(&mut self, plan: &Plan) {
        self.plan = plan.clone();
    }
    fn stepped(&mut self, metrics: &StepMetrics) {
        if metrics.step == 1 {
            MOST.store(NOW.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.most = MOST.load(Ordering::Relaxed);
    }
}

/// The result of `work`, and the most bytes that it had in use at once.
pub(crate) fn most_of<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let made = work();
    (made, MOST.load(Ordering::Relaxed) - before)
}

/// Bytes that a thread keeps once it has multiplied matrices: a buffer as large as the processor's second-level cache. Threads of an
/// earlier test may still be ending, and free memory meanwhile, so this is the median of five threads.
pub(crate) fn kept_by_products() -> usize {
    let work = || {
        let before = NOW.load(Ordering::Relaxed);
        let [x, y] = [(64, 64), (64, 64)].map(|shape| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap());
        drop(x.matmul(&y).unwrap());
        drop((x, y));
        NOW.load(Ordering::Relaxed).saturating_sub(before)
    };
    let mut kept = [(); 5].map(|()| std::thread::spawn(work).join().unwrap());
    kept.sort_unstable();
    kept[2]
}

/// Runs a training, measures it, and removes its output folder.
pub(crate) fn peak(settings: Settings) -> Peak {
    let mut peak = Peak { before: NOW.load(Ordering::Relaxed), ..Peak::default() };
    let outcome = train(&TrainConfig::resolve(settings).unwrap(), &AtomicBool::new(false), &mut peak).unwrap();
    std::fs::remove_dir_all(outcome.out).unwrap();
    peak
}
