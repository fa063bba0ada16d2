//! The checks of meshes, with ranks that have a thread each.

use ringspan::Kernel;
use ringspan_testing::Kernels;

struct OneThread;

impl Kernels for OneThread {
    fn one(&self) -> Option<Kernel> {
        Some(Kernel::new(1))
    }
}

ringspan_testing::check_meshes!(OneThread);
