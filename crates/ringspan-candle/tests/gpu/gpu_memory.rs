//! Tests of the memory and the speed of GPUs.

use super::{gpu, rounding};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::{DeviceName, Devices, peak};

#[test]
fn a_product_on_a_gpu_runs_at_some_speed() {
    let Some(gpu) = gpu() else { return };
    for device in [gpu.clone(), rounding(&gpu)] {
        let flops = peak::flops_on(&device).expect("a product");
        assert!(flops.is_finite() && flops > 1e6, "{flops} in {:?}", device.precision());
    }
}

#[test]
fn every_rank_has_one_gpu_and_is_counted_there() {
    let Some(gpu) = gpu() else { return };
    assert!(gpu.id().expect("a number").is_some());
    let open = |name| Devices::open(name, None).expect("GPUs that work");
    let all = open(DeviceName::Cuda(None));
    for size in [1, 2, 3, 8] {
        let gpus = all.gpu_memory_use(&ProcessGroup::single(), size).expect("an answer");
        assert_eq!(gpus.len(), all.count());
        assert_eq!(gpus.iter().map(|gpu| gpu.ranks).sum::<usize>(), size);
        assert!(gpus.iter().all(|gpu| gpu.ranks.abs_diff(size / gpus.len()) <= 1), "{gpus:?}");
        assert!(gpus.iter().all(|gpu| 0 < gpu.free && gpu.free <= gpu.total), "{gpus:?}");
    }
    let one = open(DeviceName::Cuda(Some(0))).gpu_memory_use(&ProcessGroup::single(), 5).expect("an answer");
    assert_eq!(one.iter().map(|gpu| gpu.ranks).collect::<Vec<_>>(), [5]);
    assert_eq!(Devices::CPU.gpu_memory_use(&ProcessGroup::single(), 5), Ok(Vec::new()));
}
