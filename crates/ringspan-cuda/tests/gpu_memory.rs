//! Tests of the memory that a GPU (or an emulated one, `tools/check_cuda.sh`) reports. The counts are of the process, so this
//! is a single test.

use ringspan::kernel::View;
use ringspan_cuda::Gpu;

/// Bytes of an array, which is far larger than what the driver allocates for itself meanwhile.
const BLOCK: usize = 32 << 20;

#[test]
fn a_gpu_says_what_is_free_and_what_was_in_use() {
    let count = Gpu::count().expect("a driver that works");
    if count == 0 {
        println!("skipped: no GPU on this machine");
        return;
    }
    let gpus: Vec<Gpu> = (0..count).map(|number| Gpu::open(number).expect("a GPU that works")).collect();
    for (index, gpu) in gpus.iter().enumerate() {
        let id = gpu.id().expect("a number");
        assert!(gpus[..index].iter().all(|other| other.id() != Ok(id)), "{gpu:?} has the number of another");
    }
    let gpu = &gpus[0];
    assert_eq!(Gpu::open(0).expect("a GPU that works").id(), gpu.id(), "the same GPU, opened again");

    let kernel = gpu.kernel().expect("a stream");
    let zeros = vec![0.0f32; BLOCK / 4];
    let view = View::new(&zeros, BLOCK / 4 / 64, 1, 64).expect("its size");
    let hold = || kernel.to_device(view).expect("room for a block");
    let most = |gpu: &Gpu| gpu.peak_used().expect("a count");
    let about = |bytes: u64, blocks: u64| (blocks * BLOCK as u64..(blocks + 1) * BLOCK as u64).contains(&bytes);
    let before = gpu.memory().expect("an answer");
    assert!(before.free <= before.total && before.total > 4 * BLOCK as u64, "{before:?}");
    most(gpu);
    let (first, second) = (hold(), hold());
    drop(first);
    assert!(about(most(gpu), 2), "two were there at once");
    let held = gpu.memory().expect("an answer");
    assert!(held.total == before.total && held.free <= before.free - BLOCK as u64, "{before:?}, and now {held:?}");
    assert!(about(most(gpu), 1), "one was left at the last look");
    drop(second);
    assert!(about(most(gpu), 1), "it was there at the last look");
    assert!(about(most(gpu), 0), "nothing was there since");
    if let Some(other) = gpus.get(1) {
        assert!(about(most(other), 0), "each GPU has its own count");
    }
}
