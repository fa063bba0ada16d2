//! Messages in the memory of a device.

use std::any::Any;
use std::fmt::Debug;

/// Elements in the memory of a device. A transport hands them over as they are, or not at all: only who made them knows how
/// to read them.
pub trait OnDevice: Any + Debug + Send + Sync {
    /// How many.
    fn elements(&self) -> usize;
    /// Bytes of one element.
    fn width(&self) -> u64;
}

/// The same elements; others that are equal are unknown to the CPU.
impl PartialEq for dyn OnDevice {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }
}
