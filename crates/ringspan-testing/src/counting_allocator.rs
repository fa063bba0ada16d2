//! An allocator that counts bytes, for tests of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator with a count of the bytes that it has given out and not got back, and of their peak.
///
/// It counts for the whole process, so a program that uses it runs one such test at a time:
///
/// ```
/// use ringspan_testing::CountingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator::new();
///
/// let (numbers, peak) = ALLOCATOR.peak_of(|| vec![1u8; 1000]);
/// assert!(peak >= 1000 && ALLOCATOR.allocated() >= numbers.len());
/// ```
#[derive(Debug, Default)]
pub struct CountingAllocator {
    allocated: AtomicUsize,
    peak: AtomicUsize,
}

impl CountingAllocator {
    /// An allocator that has counted nothing.
    pub const fn new() -> Self {
        Self { allocated: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Bytes that are allocated now.
    pub fn allocated(&self) -> usize {
        self.allocated.load(Relaxed)
    }

    /// Most bytes that were allocated at once since the last [`reset_peak`](Self::reset_peak), or since the program began.
    pub fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }

    /// Lets the peak begin with the bytes that are allocated now.
    pub fn reset_peak(&self) {
        self.peak.store(self.allocated(), Relaxed);
    }

    /// The result of `work`, and the most bytes that were allocated at once while it ran, without those allocated before.
    pub fn peak_of<R>(&self, work: impl FnOnce() -> R) -> (R, usize) {
        let before = self.allocated();
        self.reset_peak();
        let result = work();
        (result, self.peak() - before)
    }

    fn count(&self, bytes: usize) {
        self.peak.fetch_max(self.allocated.fetch_add(bytes, Relaxed) + bytes, Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    /// Zeros come from the system, so that they take memory only when they are written.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        self.allocated.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}
