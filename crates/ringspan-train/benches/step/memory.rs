//! Counts what the command's allocator gives out.

use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Counts the bytes that are allocated, and the most of them since [`restart`].
pub(crate) struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn took(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call is passed to mimalloc unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { MiMalloc.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        took(size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { MiMalloc.realloc(memory, layout, size) }
    }
}

/// Lets the process keep freed memory, as the command does.
pub(crate) fn keep() {
    /// mimalloc's number of the option `mi_option_purge_delay`.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: this sets a number, and every number is valid; -1 means that memory is never given back.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}

/// Starts a new peak from the bytes that are allocated.
pub(crate) fn restart() {
    PEAK.store(NOW.load(Relaxed), Relaxed);
}

/// The most bytes that were allocated at once since [`restart`].
pub(crate) fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// The most memory that the operating system ever gave this process, where it tells.
pub(crate) fn resident_peak() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}
