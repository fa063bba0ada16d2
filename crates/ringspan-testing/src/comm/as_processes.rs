//! Threads that communicate as if they were processes.

use crate::hands_on;
use ringspan::Error;
use ringspan::comm::{Buffer, Communicator, Pending};
use std::sync::Arc;

/// A communicator that behaves as between processes: it refuses messages in device memory.
pub fn apart(comm: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
    Arc::new(Apart(comm))
}

struct Apart(Arc<dyn Communicator>);

impl Communicator for Apart {
    hands_on!(0);
    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>, Error> {
        assert!(!matches!(*data, Buffer::Device(_)), "a message in the memory of a device");
        self.0.send(to, tag, data)
    }
    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>, Error> {
        self.0.receive(from, tag)
    }
    fn progress(&self) {
        self.0.progress();
    }
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Ok(apart(self.0.split(color, key)?))
    }
}
