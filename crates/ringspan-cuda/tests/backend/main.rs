//! The checks of any backend on the GPUs of this machine (or on emulated ones, `tools/check_cuda.sh`), and what only GPUs have.

mod streams;

use ringspan::Kernel;
use ringspan::kernel::View;
use ringspan_cuda::Gpu;
use ringspan_testing::Kernels;
use std::sync::OnceLock;

/// The GPUs of this machine, each opened once.
fn gpus() -> &'static [Gpu] {
    static GPUS: OnceLock<Vec<Gpu>> = OnceLock::new();
    GPUS.get_or_init(|| {
        let count = Gpu::count().expect("a driver that works");
        if count == 0 {
            println!("skipped: no GPU on this machine");
        }
        (0..count).map(|number| Gpu::open(number).expect("a GPU that works")).collect()
    })
}

/// The first GPU; for bf16 also the others, which may have other tensor cores.
struct Gpus;

impl Kernels for Gpus {
    fn one(&self) -> Option<Kernel> {
        gpus().first().map(|gpu| gpu.kernel().expect("a stream"))
    }

    fn others_for_bf16(&self) -> Vec<Kernel> {
        gpus().iter().skip(1).map(|gpu| gpu.kernel().expect("a stream")).collect()
    }
}

ringspan_testing::check_kernels!(Gpus);
ringspan_testing::check_backend!(Gpus);

#[test]
fn a_gpu_is_given_no_rows_that_leave_their_tensor() {
    let Some(gpu) = Gpus.one() else { return };
    let data = vec![0.0; 70 * 2 * 16];
    let view = View::new(&data, 70, 2, 16).expect("its size");
    assert!(gpu.delta(view, view).is_ok());
    for (token_stride, head_stride) in [(33, 16), (32, 17), (usize::MAX, 16), (32, usize::MAX)] {
        let error = gpu.delta(View { token_stride, head_stride, ..view }, view).expect_err("leaves it").to_string();
        assert!(error.contains("[70, 2, 16]") && error.contains("leaves its 2240 elements"), "{error}");
    }
}

#[test]
fn a_gpu_is_given_no_tensor_of_the_cpu() {
    let Some(gpu) = Gpus.one() else { return };
    let view = View::new(&[1.0; 8], 2, 2, 2).expect("its size");
    let error = gpu.backend().expect("a GPU's kernel").delta(&view, &view).expect_err("on the CPU").to_string();
    assert!(error.contains("8 elements are in the memory of the CPU"), "{error}");
}
