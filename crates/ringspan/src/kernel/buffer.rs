//! Memory of the CPU kernels: aligned buffers that are reused between calls, and outputs shared by workers.

use super::vector::prefetch_line;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// Number of f32 in a cache line.
pub(super) const LINE: usize = 16;

/// A cache line, for alignment: a vector load that straddles two lines costs double.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// Numbers aligned to a cache line. Their initial values are arbitrary, but never uninitialised memory.
pub(super) struct Aligned(Vec<Line>);

impl Aligned {
    pub(super) fn zeros(len: usize) -> Self {
        Self(vec![Line([0.0; LINE]); len.div_ceil(LINE)])
    }

    /// A buffer that `write` fills completely, without zeroing it first: in a large buffer that would cost as much as
    /// packing.
    ///
    /// # Safety
    /// `write` must write all numbers, and must not read any before it has written it.
    pub(super) unsafe fn written(len: usize, write: impl FnOnce(Target)) -> Self {
        let mut lines = Vec::<Line>::with_capacity(len.div_ceil(LINE));
        let spare = lines.spare_capacity_mut();
        // The padding in the last line is not part of `write`'s target.
        for line in &mut spare[len / LINE..len.div_ceil(LINE)] {
            line.write(Line([0.0; LINE]));
        }
        write(Target { data: spare.as_mut_ptr().cast(), len });
        // SAFETY: all lines are written, by the contract of the caller.
        unsafe { lines.set_len(len.div_ceil(LINE)) };
        Self(lines)
    }
}

impl Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: a line is exactly LINE numbers without padding.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * LINE) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: a line is exactly LINE numbers without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * LINE) }
    }
}

/// A vector that `write` fills completely, without zeroing it first: that would cost as much as writing the result.
///
/// # Safety
/// `write` must write all of them; it may read none before.
pub(super) unsafe fn written<T>(len: usize, write: impl FnOnce(Target<T>)) -> Vec<T> {
    let mut elements = Vec::with_capacity(len);
    write(Target { data: elements.as_mut_ptr(), len });
    // SAFETY: all elements are written, by the contract of the caller.
    unsafe { elements.set_len(len) };
    elements
}

/// Rounds up to whole cache lines, so that parts of one buffer are all aligned.
pub(super) fn lines(len: usize) -> usize {
    len.next_multiple_of(LINE)
}

/// Number of elements in the largest buffer that is kept. In calls that need a larger one, page faults take less than a
/// hundredth of the time, and a rank that trains needs the memory for other things between the calls.
pub(super) const LARGEST: usize = 1 << 22;

/// Buffers kept between calls: a fresh buffer costs a page fault per 4 KiB, a tenth of the time of a short call.
#[derive(Default)]
pub(super) struct BufferPool(Mutex<Vec<Aligned>>);

impl BufferPool {
    /// Returns a buffer of at least `len` numbers: the smallest kept one that fits. If none does, the largest kept buffer is freed and
    /// a new one allocated, which is larger and so also serves the calls that used the old one.
    pub(super) fn take(&self, len: usize) -> Aligned {
        let mut kept = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let best = (0..kept.len()).filter(|&i| kept[i].len() >= len).min_by_key(|&i| kept[i].len());
        if let Some(best) = best {
            return kept.swap_remove(best);
        }
        if let Some(largest) = (0..kept.len()).max_by_key(|&i| kept[i].len()) {
            kept.swap_remove(largest);
        }
        drop(kept);
        Aligned::zeros(len)
    }

    /// Number of elements in all kept buffers.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).iter().map(|buffer| buffer.len()).sum()
    }

    /// Keeps a buffer for a later call, if it is not too large.
    pub(super) fn give(&self, buffer: Aligned) {
        if buffer.len() > LARGEST {
            return;
        }
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(buffer);
    }
}

/// An output that several workers write, each its own rows.
#[derive(Clone, Copy)]
pub(super) struct Target<T = f32> {
    data: *mut T,
    len: usize,
}

// SAFETY: the rows a worker may touch are its own, by the contract of `row`.
unsafe impl<T: Send> Send for Target<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Target<T> {}

impl<T> Target<T> {
    pub(super) fn new(data: &mut [T]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len() }
    }

    /// The elements `at..at + len`.
    ///
    /// # Safety
    /// The slice of this target must outlive the result, and no other thread may access these elements meanwhile.
    pub(super) unsafe fn row<'a>(self, at: usize, len: usize) -> &'a mut [T] {
        assert!(at + len <= self.len, "row {at}..{} of {} elements", at + len, self.len);
        // SAFETY: in bounds; exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(at), len) }
    }

    /// Prefetches the elements `at..at + len`.
    #[inline(always)]
    pub(super) fn prefetch(self, at: usize, len: usize) {
        let first = self.data.wrapping_add(at);
        (0..len).step_by(64 / size_of::<T>()).for_each(|i| prefetch_line(first.wrapping_add(i)));
        // The elements need not begin with a cache line, so the last of them may be in one more.
        prefetch_line(first.wrapping_add(len.saturating_sub(1)));
    }

    /// A pointer to the elements `at..at + len`, which may be uninitialised.
    pub(super) fn pointer(self, at: usize, len: usize) -> *mut T {
        assert!(at + len <= self.len, "row {at}..{} of {} elements", at + len, self.len);
        self.data.wrapping_add(at)
    }

    /// The elements `at..at + len`, for reading.
    ///
    /// # Safety
    /// Like [`row`](Self::row), but other threads may read too.
    pub(super) unsafe fn read<'a>(self, at: usize, len: usize) -> &'a [T] {
        assert!(at + len <= self.len, "row {at}..{} of {} elements", at + len, self.len);
        // SAFETY: in bounds; unchanged by the contract.
        unsafe { std::slice::from_raw_parts(self.data.add(at), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_reused() {
        let pool = BufferPool::default();
        let (small, large) = (pool.take(100), pool.take(1000));
        assert_eq!((small.len(), large.len()), (112, 1008));
        let address = large.as_ptr() as usize;
        assert_eq!((address % 64, small.as_ptr() as usize % 64), (0, 0));
        pool.give(small);
        pool.give(large);
        assert_eq!(pool.take(500).as_ptr() as usize, address);
        assert!(pool.take(5000).len() >= 5000);
    }
}
