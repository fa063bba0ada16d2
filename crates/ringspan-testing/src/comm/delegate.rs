//! A macro for communicators that wrap another one, and delegate most methods to it.

/// Defines the methods that a wrapping communicator passes on unchanged to its field `$inner`: all except `send`, `receive`,
/// `progress` and `split`. It needs `Arc`, `Buffer` and `Error` in scope.
#[macro_export]
macro_rules! delegate_communicator {
    ($inner:tt) => {
        fn rank(&self) -> usize {
            self.$inner.rank()
        }
        fn size(&self) -> usize {
            self.$inner.size()
        }
        fn all_to_all(&self, parts: Vec<Buffer>) -> Result<Vec<Arc<Buffer>>, Error> {
            self.$inner.all_to_all(parts)
        }
        fn all_gather(&self, data: Buffer) -> Result<Vec<Arc<Buffer>>, Error> {
            self.$inner.all_gather(data)
        }
        fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize]) -> Result<Vec<f32>, Error> {
            self.$inner.reduce_scatter(data, counts)
        }
        fn all_reduce(&self, data: &mut [f32]) -> Result<(), Error> {
            self.$inner.all_reduce(data)
        }
        fn broadcast(&self, root: usize, data: Option<Buffer>) -> Result<Arc<Buffer>, Error> {
            self.$inner.broadcast(root, data)
        }
        fn barrier(&self) -> Result<(), Error> {
            self.$inner.barrier()
        }
        fn bytes_sent(&self) -> u64 {
            self.$inner.bytes_sent()
        }
    };
}
