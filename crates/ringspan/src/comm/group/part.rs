//! The part of a rank's data that a collective sends to another rank.

use crate::comm::Buffer;
use std::ops::Range;
use std::sync::Arc;

/// A range of a buffer. Parts of the same buffer share it.
#[derive(Debug, Clone)]
pub(in crate::comm) struct CollectivePart {
    pub(in crate::comm) data: Arc<Buffer>,
    pub(in crate::comm) range: Range<usize>,
}

impl CollectivePart {
    pub(in crate::comm) fn whole(data: Arc<Buffer>) -> Self {
        let range = 0..data.len();
        Self { data, range }
    }

    pub(in crate::comm) fn bytes(&self) -> u64 {
        self.data.width() * self.range.len() as u64
    }
}
