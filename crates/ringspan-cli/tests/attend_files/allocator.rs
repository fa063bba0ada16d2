//! An allocator that counts memory by thread, and refuses large blocks as a machine with little memory would.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Larger blocks are refused, so a size that only a broken file claims must be requested in a way that can fail.
pub(crate) const LARGEST: usize = 64 << 20;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

pub(crate) struct Counting;

// SAFETY: all memory comes from the system's allocator; counting touches none of it, and its thread-locals need no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST {
            return std::ptr::null_mut();
        }
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
}

fn count(bytes: isize) {
    // A thread that ends may still free memory when its thread-locals are gone.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        PEAK.with(|peak| peak.set(peak.get().max(now.get())));
    });
}

/// Peak of the bytes that `work` allocated on this thread, beyond what was allocated before.
pub(crate) fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.get();
    PEAK.set(before);
    let result = work();
    (result, PEAK.get().saturating_sub(before).max(0) as usize)
}
