//! The program's allocator, which counts bytes, so that the memory of a training can be compared with what its plan predicts.

use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering::Relaxed};

/// mimalloc, with a count of the requested bytes. Memory that mimalloc keeps for itself is not counted.
pub struct CountingAllocator;

/// Bytes that are allocated now, but for what [`SMALL_BLOCKS`] count.
static NOW: AtomicIsize = AtomicIsize::new(0);
/// Peak of [`NOW`] since the last call of [`take_peak`].
static MOST: AtomicIsize = AtomicIsize::new(0);

/// A block of fewer bytes is small.
const SMALL: usize = 4096;
/// Bytes of small blocks after which a counter is added to [`NOW`].
const BATCH: isize = 16 << 10;

/// A counter that shares no cache line with others.
#[repr(align(128))]
struct Counter(AtomicIsize);

/// Bytes of small blocks, allocated minus freed, that are not in [`NOW`] yet. Threads have different counters as long as there are
/// enough: processors that allocate at the same time would wait for the cache line of a common one.
static SMALL_BLOCKS: [Counter; 64] = [const { Counter(AtomicIsize::new(0)) }; 64];
/// Number of threads that have allocated so far.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The thread's counter of [`SMALL_BLOCKS`]. It needs no memory of its own and no destructor, so it can be read in an allocator.
    static COUNTER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Peak of the allocated bytes since the last call, or since the program began. Small blocks that are not in [`NOW`] yet make it a megabyte
/// too high or too low at most.
pub(crate) fn take_peak() -> u64 {
    for counter in &SMALL_BLOCKS {
        add(counter.0.swap(0, Relaxed));
    }
    u64::try_from(MOST.swap(NOW.load(Relaxed), Relaxed)).unwrap_or(0)
}

/// Number of threads up to which their heaps may be in large pages.
const FEW: usize = 64;

/// Keeps the heaps of many threads out of large pages (2 MB), of which each thread would touch several and use little: 1,024
/// ranks of five tokens take 0.8 GB instead of 6.3. Where the system refuses, they take more memory and compute the same.
pub(crate) fn avoid_large_pages(threads: usize) {
    if threads <= FEW {
        return;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: sets a flag of this process, which concerns only memory that is touched later.
    unsafe {
        libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
    }
}

/// Counts a block before it is allocated, so that no thread can free a block that is not counted yet.
fn count_allocated(bytes: usize) {
    count(bytes, 1);
}

fn count_freed(bytes: usize) {
    count(bytes, -1);
}

/// Counts a block that is allocated (`sign` 1) or freed (-1).
fn count(bytes: usize, sign: isize) {
    let change = bytes as isize * sign;
    if bytes >= SMALL {
        return add(change);
    }
    let index = COUNTER.get().unwrap_or_else(|| {
        let index = THREADS.fetch_add(1, Relaxed) % SMALL_BLOCKS.len();
        COUNTER.set(Some(index));
        index
    });
    let counter = &SMALL_BLOCKS[index].0;
    if (counter.fetch_add(change, Relaxed) + change).abs() >= BATCH {
        add(counter.swap(0, Relaxed));
    }
}

/// Adds to [`NOW`], and to the peak.
fn add(change: isize) {
    let now = NOW.fetch_add(change, Relaxed) + change;
    // Reading is cheap as long as all threads only read, and few blocks make a new peak.
    if now > MOST.load(Relaxed) {
        MOST.fetch_max(now, Relaxed);
    }
}

fn checked(at: *mut u8, bytes: usize) -> *mut u8 {
    if at.is_null() {
        count_freed(bytes);
    }
    at
}

// SAFETY: every call is passed on to mimalloc unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocated(layout.size());
        // SAFETY: the caller's promise.
        checked(unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocated(layout.size());
        // SAFETY: the caller's promise.
        checked(unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count_freed(layout.size());
        // SAFETY: the caller's promise.
        unsafe { MiMalloc.dealloc(at, layout) }
    }

    /// Counts the old and the new block together for a moment, since a block that cannot grow in place is copied.
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocated(size);
        // SAFETY: the caller's promise.
        let new = unsafe { MiMalloc.realloc(at, layout, size) };
        count_freed(if new.is_null() { size } else { layout.size() });
        new
    }
}

#[cfg(test)]
mod tests {
    /// The program's, as in `main.rs`.
    #[global_allocator]
    static ALLOCATOR: super::CountingAllocator = super::CountingAllocator;

    #[test]
    fn the_peak_is_counted_since_the_last_call() {
        // Far more than other tests of this program allocate meanwhile.
        const BLOCK: usize = 64 << 20;
        let about = |bytes: u64, blocks: u64| (blocks * BLOCK as u64..(blocks + 1) * BLOCK as u64).contains(&bytes);
        super::take_peak();
        drop(std::hint::black_box(vec![1_u8; BLOCK]));
        let kept = std::hint::black_box(vec![0_u8; BLOCK]);
        assert!(about(super::take_peak(), 1));
        drop(kept);
        assert!(about(super::take_peak(), 1), "it was there at the last look");
        assert!(about(super::take_peak(), 0));
        let mut grown = std::hint::black_box(Vec::<u8>::with_capacity(BLOCK));
        grown.reserve_exact(2 * BLOCK);
        drop(std::hint::black_box(grown));
        assert!(about(super::take_peak(), 3));
        // Small blocks that one thread allocates, and another frees. The list of them is one large block.
        let small: Vec<_> = std::hint::black_box((0..BLOCK / 1000).map(|_| Box::new([1_u8; 1024])).collect());
        assert!(about(super::take_peak(), 1));
        std::thread::spawn(move || drop(small)).join().expect("no panic");
        assert!(about(super::take_peak(), 1));
        assert!(about(super::take_peak(), 0));
    }
}
