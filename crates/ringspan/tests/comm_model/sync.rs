//! The module `crate::sync` in the model: every lock, wait and thread start asks the scheduler which thread continues.

pub(crate) use shuttle::sync::atomic::AtomicU64;
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};

/// How long a thread spins is the scheduler's choice, which may let another thread continue at the next lock.
pub(crate) fn spin_until(_: impl Fn() -> bool) {}

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
