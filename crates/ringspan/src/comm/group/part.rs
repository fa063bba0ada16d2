//! What a rank brings to a collective for another.

use crate::comm::Buffer;
use std::ops::Range;
use std::sync::Arc;

/// Some elements of a buffer; ranks that get different parts of one share it.
#[derive(Debug, Clone)]
pub(in crate::comm) struct Part {
    pub(in crate::comm) data: Arc<Buffer>,
    pub(in crate::comm) range: Range<usize>,
}

impl Part {
    pub(in crate::comm) fn whole(data: Arc<Buffer>) -> Self {
        let range = 0..data.len();
        Self { data, range }
    }

    pub(in crate::comm) fn bytes(&self) -> u64 {
        self.data.width() * self.range.len() as u64
    }
}
