//! The checks of meshes, whose ranks share the first GPU. They are for real GPUs: emulated ones would take long.

use ringspan::Kernel;
use ringspan_cuda::Gpu;
use ringspan_testing::Kernels;
use std::sync::OnceLock;

struct FirstGpu;

impl Kernels for FirstGpu {
    fn one(&self) -> Option<Kernel> {
        static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
        let open = || match Gpu::count() {
            Ok(0) => {
                println!("skipped: no GPU on this machine");
                None
            }
            _ => Some(Gpu::open(0).expect("a GPU that works")),
        };
        GPU.get_or_init(open).as_ref().map(|gpu| gpu.kernel().expect("a stream"))
    }
}

ringspan_testing::check_meshes!(FirstGpu);
