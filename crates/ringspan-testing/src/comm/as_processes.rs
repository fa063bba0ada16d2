//! A communicator of threads that behaves like one of processes.

use crate::delegate_communicator;
use ringspan::Error;
use ringspan::comm::{Buffer, Communicator, Pending};
use std::sync::Arc;

/// Wraps a communicator of threads so that it behaves like one of processes: it refuses messages in device memory.
pub fn as_processes(comm: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
    Arc::new(AsProcesses(comm))
}

struct AsProcesses(Arc<dyn Communicator>);

impl Communicator for AsProcesses {
    delegate_communicator!(0);
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
        Ok(as_processes(self.0.split(color, key)?))
    }
}
