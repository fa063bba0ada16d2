//! An allocator that counts bytes, for tests of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What a thread allocated and did not free during one measurement, in bytes.
#[derive(Clone, Copy)]
struct ThreadBytes {
    measurement: usize,
    /// Below 0 in a thread that frees what others allocated.
    allocated: isize,
    peak: isize,
}

thread_local! {
    static THREAD_BYTES: Cell<ThreadBytes> = const { Cell::new(ThreadBytes { measurement: 0, allocated: 0, peak: 0 }) };
}

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
///
/// let rank = |bytes| move || drop(vec![1u8; bytes]);
/// let ((), peaks) = ALLOCATOR.thread_peaks_of(|| [1000, 2000].map(rank).into_iter().for_each(|rank| std::thread::spawn(rank).join().unwrap()));
/// assert!(peaks >= 3000);
/// ```
#[derive(Debug, Default)]
pub struct CountingAllocator {
    allocated: AtomicUsize,
    peak: AtomicUsize,
    measurement: AtomicUsize,
    thread_peaks: AtomicUsize,
}

impl CountingAllocator {
    /// An allocator that has counted nothing.
    pub const fn new() -> Self {
        Self {
            allocated: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            measurement: AtomicUsize::new(0),
            thread_peaks: AtomicUsize::new(0),
        }
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

    /// The result of `work`, and the sum of the peaks of all threads while it ran, which ranks that are threads would need if their peaks
    /// coincided. Unlike [`peak_of`](Self::peak_of) it does not depend on which of them runs when. A buffer counts for the thread that
    /// allocates it until a thread frees it, so the sum is right if each thread gives away as many bytes as it receives.
    pub fn thread_peaks_of<R>(&self, work: impl FnOnce() -> R) -> (R, usize) {
        self.measurement.fetch_add(1, Relaxed);
        self.thread_peaks.store(0, Relaxed);
        let result = work();
        (result, self.thread_peaks.load(Relaxed))
    }

    fn count(&self, bytes: usize) {
        self.peak.fetch_max(self.allocated.fetch_add(bytes, Relaxed) + bytes, Relaxed);
        let growth = self.count_in_thread(bytes as isize);
        self.thread_peaks.fetch_add(growth, Relaxed);
    }

    /// Adds `bytes` to what this thread allocated, and returns by how much its peak grew.
    fn count_in_thread(&self, bytes: isize) -> usize {
        let measurement = self.measurement.load(Relaxed);
        THREAD_BYTES.with(|of_thread| {
            let before = of_thread.get();
            let (allocated, peak) =
                if before.measurement == measurement { (before.allocated, before.peak) } else { (0, 0) };
            let allocated = allocated + bytes;
            of_thread.set(ThreadBytes { measurement, allocated, peak: peak.max(allocated) });
            (allocated - peak).max(0) as usize
        })
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
        self.count_in_thread(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}
