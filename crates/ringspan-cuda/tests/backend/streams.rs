//! The order of streams: reads wait for writes, memory is freed after its readers, and borrowed slices are ordered with
//! their owner's stream. On a GPU emulated by the CPU, a stream does nothing until it is waited for.

use cudarc::driver::CudaContext;
use half::bf16;
use ringspan::kernel::{Backend, Data, DeviceArray, DeviceSlice, Floats, Kernel, RowTarget};
use ringspan_cuda::{Gpu, GpuSource, SharedSlice};
use std::slice::from_ref;
use std::sync::Arc;

/// Streams of two ranks.
fn ranks() -> Option<[Kernel; 2]> {
    let gpu = match Gpu::count() {
        Ok(0) => return None,
        _ => Gpu::open(0).expect("a GPU that works"),
    };
    Some([gpu.kernel().expect("a stream"), gpu.kernel().expect("a stream")])
}

fn backend(kernel: &Kernel) -> &dyn Backend {
    kernel.backend().expect("a GPU's kernel")
}

fn zeros(kernel: &Kernel) -> DeviceArray {
    backend(kernel).zeros(1000).expect("zeros")
}

fn add(kernel: &Kernel, sum: &mut DeviceArray, values: DeviceSlice) -> ringspan::Result<()> {
    let all = RowTarget { rows: from_ref(&(0..1)), offset: 0, stride: 1000, width: 1000 };
    backend(kernel).add(sum.all_mut(), &all, values)
}

fn ones(kernel: &Kernel) -> DeviceArray {
    let ones = backend(kernel).upload(Data::F32(&[1.0; 1000])).expect("copied");
    sum_of(kernel, &ones)
}

fn share(kernel: &Kernel, array: &DeviceArray) {
    backend(kernel).share(array).expect("shared");
}

fn sum_of(kernel: &Kernel, array: &DeviceArray) -> DeviceArray {
    let mut sum = zeros(kernel);
    add(kernel, &mut sum, array.data()).expect("added");
    sum
}

fn host(kernel: &Kernel, array: &DeviceArray) -> ringspan::Result<Vec<f32>> {
    kernel.to_host(Floats::Device(array.clone()))
}

fn finished(kernel: &Kernel) {
    host(kernel, &zeros(kernel)).expect("all before it is over");
}

#[test]
fn a_reader_waits_for_who_writes() {
    let Some([a, b]) = ranks() else { return };
    let sent = ones(&a);
    share(&a, &sent);
    // Only the second rank's stream waits for the first rank's work.
    assert_eq!(host(&b, &sum_of(&b, &sent)), Ok(vec![1.0; 1000]));
    // An array that was not shared is waited for in its current state.
    assert_eq!(host(&b, &sum_of(&b, &ones(&a))), Ok(vec![1.0; 1000]));
}

#[test]
fn memory_goes_back_when_all_readers_are_done() {
    let Some([a, b]) = ranks() else { return };
    let third = Gpu::of(&a).expect("a GPU's kernel").kernel().expect("a stream");
    let sent = ones(&a);
    share(&a, &sent);
    let sums = [sum_of(&b, &sent), sum_of(&third, &sent)];
    drop(sent);
    // All work that the first rank has started is over, but the readers have not begun.
    finished(&a);
    assert_eq!(host(&third, &sums[1]), Ok(vec![1.0; 1000]));
    finished(&a);
    assert_eq!(host(&b, &sums[0]), Ok(vec![1.0; 1000]));
}

#[test]
fn nobody_writes_to_what_belongs_to_another_rank() {
    let Some([a, b]) = ranks() else { return };
    let mut sum = zeros(&a);
    let error = add(&b, &mut sum, ones(&b).data()).expect_err("another's").to_string();
    assert!(error.contains("1000 elements that belong to another rank"), "{error}");
}

#[test]
fn a_borrowed_slice_is_ordered_with_its_owners_stream() {
    let Some([a, _]) = ranks() else { return };
    let context = CudaContext::new(0).expect("the same GPU");
    let stream = context.new_stream().expect("a stream");
    let mut slice = stream.clone_htod(&vec![1.0f32; 1000]).expect("a copy");
    let lent = Gpu::of(&a).expect("a GPU's kernel").borrow(&slice).expect("lent");
    let mut sum = zeros(&a);
    add(&a, &mut sum, lent.data()).expect("added");
    drop(lent);
    // This is ordered after the borrow, although this rank has not begun to read.
    stream.memset_zeros(&mut slice).expect("zeros");
    stream.synchronize().expect("over");
    let mut back = stream.alloc_zeros::<f32>(1000).expect("memory");
    let source = GpuSource::of_array(&sum).expect("on a GPU");
    source.copy_to(&mut back).expect("copied");
    assert_eq!(stream.clone_dtoh(&back).expect("a copy"), vec![1.0; 1000]);
    let mut short = stream.alloc_zeros::<f32>(10).expect("memory");
    let error = source.copy_to(&mut short).expect_err("too short").to_string();
    assert!(error.contains("1000 F32") && error.contains("to 10 f32 elements"), "{error}");
}

/// The reader may be a stream of another GPU, which only starts after the owner is dropped.
#[test]
fn what_is_handed_over_is_copied_from_where_it_is() {
    let Some([a, _]) = ranks() else { return };
    let stream = CudaContext::new(0).expect("the same GPU").new_stream().expect("a stream");
    let numbers: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    for device in 0..Gpu::count().map_or(1, |count| count.min(2)) {
        let reader = CudaContext::new(device).expect("a GPU that works").new_stream().expect("a stream");
        let slice = Arc::new(stream.clone_htod(&numbers).expect("a copy"));
        // SAFETY: the owner is the slice, and nobody writes to it.
        let hand = |range| unsafe { SharedSlice::new(&slice, range, slice.clone()) };
        let error = hand(990..1001).expect_err("beyond its end").to_string();
        assert!(error.contains("elements 990..1001 of 1000"), "{error}");
        let handed = hand(100..120).expect("handed over");
        assert!(handed.owner().is::<Arc<cudarc::driver::CudaSlice<f32>>>());
        drop(slice);
        let source = GpuSource::of(&handed).expect("on a GPU");
        assert!(source.len() == 20 && source.is_of::<f32>() && !source.is_of::<bf16>());
        let mut to = reader.alloc_zeros::<f32>(30).expect("memory");
        source.copy_to(&mut to.slice_mut(5..25)).expect("copied");
        let error = source.copy_to(&mut to).expect_err("too long").to_string();
        assert!(error.contains("20 F32 on GPU 0 to 30 f32 elements on GPU"), "{error}");
        drop(handed);
        let got = reader.clone_dtoh(&to).expect("a copy");
        assert_eq!((&got[5..25], got[4], got[25]), (&numbers[100..120], 0.0, 0.0));
    }
    assert_eq!(GpuSource::of(&ones(&a)).map(|source| source.len()), Some(1000));
}

#[test]
fn a_message_of_another_gpu_is_copied() {
    let Some([a, _]) = ranks() else { return };
    if Gpu::count().is_ok_and(|count| count < 2) {
        println!("skipped: one GPU on this machine");
        return;
    }
    let other = Gpu::open(1).and_then(|gpu| gpu.kernel()).expect("a GPU that works");
    let sent = ones(&a);
    share(&a, &sent);
    let error = add(&other, &mut zeros(&other), sent.data()).expect_err("another GPU's").to_string();
    assert!(error.contains("it cannot read 1000 F32 on GPU 0"), "{error}");
    let copy = backend(&other).copy(sent.data()).expect("copied");
    assert_eq!(host(&other, &sum_of(&other, &copy)), Ok(vec![1.0; 1000]));
}
