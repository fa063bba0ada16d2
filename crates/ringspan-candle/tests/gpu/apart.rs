//! Ranks that are threads but behave like processes.

use ringspan::comm::{Buffer, Communicator, Pending};
use ringspan::error::Result;
use std::sync::Arc;

/// A rank's communicator that hands no tensors over from GPU to GPU.
pub(crate) struct Apart(pub(crate) Arc<dyn Communicator>);

impl Communicator for Apart {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn size(&self) -> usize {
        self.0.size()
    }
    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>> {
        assert!(!matches!(*data, Buffer::Device(_)), "a message in the memory of a device");
        self.0.send(to, tag, data)
    }
    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>> {
        self.0.receive(from, tag)
    }
    fn progress(&self) {
        self.0.progress();
    }
    fn all_to_all(&self, parts: Vec<Buffer>) -> Result<Vec<Arc<Buffer>>> {
        self.0.all_to_all(parts)
    }
    fn all_gather(&self, data: Buffer) -> Result<Vec<Arc<Buffer>>> {
        self.0.all_gather(data)
    }
    fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize]) -> Result<Vec<f32>> {
        self.0.reduce_scatter(data, counts)
    }
    fn all_reduce(&self, data: &mut [f32]) -> Result<()> {
        self.0.all_reduce(data)
    }
    fn broadcast(&self, root: usize, data: Option<Buffer>) -> Result<Arc<Buffer>> {
        self.0.broadcast(root, data)
    }
    fn barrier(&self) -> Result<()> {
        self.0.barrier()
    }
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self(self.0.split(color, key)?)))
    }
    fn bytes_sent(&self) -> u64 {
        self.0.bytes_sent()
    }
}
