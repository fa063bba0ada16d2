//! The module `crate::sync` in the model: every lock, wait and thread start asks the scheduler which thread continues.

pub(crate) use shuttle::sync::atomic::AtomicU64;
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};

/// Any number of ranks spins in the model, so that its interleavings are the same on every machine.
pub(crate) fn processors() -> usize {
    usize::MAX
}

/// Spinning ends at once: the scheduler may let other threads continue at the next lock.
pub(crate) fn spin_until(_: std::time::Instant, is_so: impl Fn() -> bool) -> bool {
    is_so()
}

pub(crate) mod thread {
    pub(crate) use shuttle::thread::{Scope, ScopedJoinHandle, ThreadId, current, scope};

    /// A substitute for `std::thread::Builder` as far as it is used. The model ignores names and stack sizes.
    pub(crate) struct Builder;

    impl Builder {
        pub(crate) fn new() -> Self {
            Self
        }

        pub(crate) fn name(self, _: String) -> Self {
            self
        }

        pub(crate) fn stack_size(self, _: usize) -> Self {
            self
        }

        pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
            self,
            scope: &'scope Scope<'scope, '_>,
            main: impl FnOnce() -> T + Send + 'scope,
        ) -> std::io::Result<ScopedJoinHandle<'scope, T>> {
            Ok(scope.spawn(main))
        }
    }
}
