//! The program's allocator, which counts bytes, so that the memory of a training can be compared with what its plan predicts.

use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// mimalloc, with a count of the requested bytes. Memory that mimalloc keeps for itself is not counted.
pub struct CountingAllocator;

/// Bytes that are allocated now.
static NOW: AtomicUsize = AtomicUsize::new(0);
/// Peak of [`NOW`] since the last call of [`take_peak`].
static MOST: AtomicUsize = AtomicUsize::new(0);

/// Peak of the allocated bytes since the last call, or since the program began.
pub(crate) fn take_peak() -> u64 {
    MOST.swap(NOW.load(Relaxed), Relaxed) as u64
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
    let now = NOW.fetch_add(bytes, Relaxed).wrapping_add(bytes);
    // Reading is cheap as long as all threads only read, and few blocks make a new peak.
    if now > MOST.load(Relaxed) {
        MOST.fetch_max(now, Relaxed);
    }
}

fn count_freed(bytes: usize) {
    NOW.fetch_sub(bytes, Relaxed);
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
        assert!(about(super::take_peak(), 0));
    }
}
