//! Messages that are in the memory of a device.

use std::any::Any;
use std::fmt::Debug;

/// Elements in the memory of a device. A transport passes them on unchanged or refuses them: only the code that made them
/// can read them.
pub trait OnDevice: Any + Debug + Send + Sync {
    /// Number of elements.
    fn elements(&self) -> usize;
    /// Bytes of one element.
    fn width(&self) -> u64;
}

/// Equal means identical: the CPU cannot compare elements on a device.
impl PartialEq for dyn OnDevice {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }
}
