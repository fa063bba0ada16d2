//! Tests of operations on tensors besides attention, on a GPU and on the CPU, and of the order of streams.

use super::*;
use crate::comm::Buffer;
use crate::kernel::{DType as Type, Floats, RowTarget, TensorSlice, read};
use std::sync::Arc;

const TYPES: [Type; 3] = [Type::F32, Type::Bf16, Type::F16];

fn cpu() -> Kernel {
    Kernel::new(1)
}

/// The message as a copy in the memory of the CPU.
fn message(buffer: Buffer) -> Buffer {
    Arc::unwrap_or_clone(cpu().incoming(Arc::new(buffer), Type::F32).expect("a copy"))
}

/// Numbers with every exponent, the neighbours of their 16-bit roundings, infinities and NaN.
fn strange() -> Vec<f32> {
    let exponents = (0..=255u32).flat_map(|exponent| {
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x0001_8000, 0x7F_FFFF]
            .map(|fraction| exponent << 23 | fraction)
    });
    exponents.flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)]).collect()
}

/// Packs some heads of some rows of strided tensors, from each type to each.
#[test]
fn packing_gives_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let rows = [0..3, 5..6, 9..40];
    for from in [Storage::F32, Storage::Bf16, Storage::F16] {
        for to in TYPES {
            // The CPU refuses numbers beyond the other type's range.
            let most = match to {
                Type::F32 => f32::MAX,
                Type::Bf16 => bf16::MAX.to_f32(),
                Type::F16 => f16::MAX.to_f32(),
            };
            let fits = |x: f32| if x.abs() > most { f32::INFINITY.copysign(x) } else { x };
            let values: Vec<f32> = strange().into_iter().map(fits).collect();
            let stored = from.store(&values);
            let view = View {
                data: stored.data(),
                tokens: 40,
                heads: 3,
                dim: 7,
                token_stride: 50,
                head_stride: 9,
                rows: None,
            };
            let whole = View { tokens: 1, heads: 1, dim: values.len(), token_stride: 0, head_stride: 0, ..view };
            let packed = |kernel: &Kernel| {
                let (held, held_whole) = (kernel.hold(view).expect("held"), kernel.hold(whole).expect("held"));
                let slices = [
                    TensorSlice { view: held.view(), heads: 1..3, rows: &rows },
                    TensorSlice { view: held_whole.view(), heads: 0..1, rows: &rows[..0] },
                    TensorSlice { view: held_whole.view(), heads: 0..1, rows: std::slice::from_ref(&(0..1)) },
                ];
                message(kernel.pack(to, &slices).expect("packed"))
            };
            let bits = |buffer: Buffer| -> Vec<u32> {
                match buffer {
                    Buffer::F32(values) => values.iter().map(|x| x.to_bits()).collect(),
                    Buffer::U16(bits) => bits.into_iter().map(u32::from).collect(),
                    other => panic!("{other:?}"),
                }
            };
            // For NaN, the CPU's instructions and ours may keep different bits.
            let number = |bits: &u32| match to {
                Type::F32 => bits & 0x7FFF_FFFF <= 0x7F80_0000,
                Type::Bf16 => bits & 0x7FFF <= 0x7F80,
                Type::F16 => bits & 0x7FFF <= 0x7C00,
            };
            let (wanted, got) = (bits(packed(&cpu())), bits(packed(&gpu)));
            assert_eq!(wanted.len(), 35 * 14 + values.len());
            assert_eq!(wanted.len(), got.len());
            for (at, (wanted, got)) in wanted.iter().zip(&got).enumerate() {
                let same = if number(wanted) { wanted == got } else { !number(got) };
                assert!(same, "{from:?} to {to:?}, element {at}: {got:x} for {wanted:x}");
            }
        }
    }
}

#[test]
fn sums_transposes_and_appended_messages_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (start, values) = (random(40 * 12, 1), random(9 * 5, 2));
    let rows = [3..4, 7..12, 30..33];
    let results = |kernel: &Kernel| {
        let hold = |values: &[f32]| -> Floats {
            let view = View::new(values, 1, 1, values.len()).expect("its size");
            let held = kernel.hold(view).expect("held");
            let mut sum = kernel.zeros(values.len()).expect("zeros");
            kernel.add_all(sum.all_mut(), held.view().data).expect("added");
            sum
        };
        let (mut sum, values) = (hold(&start), hold(&values));
        let place = RowTarget { rows: &rows, offset: 4, stride: 12, width: 5 };
        kernel.add(sum.all_mut(), &place, values.data()).expect("added");
        let (_, second) = sum.split_at_mut(12 * 20);
        let touching = RowTarget { rows: std::slice::from_ref(&(2..11)), offset: 0, stride: 5, width: 5 };
        kernel.add(second, &touching, values.data()).expect("added");
        let turned = kernel.transpose(sum.data(), 40, 12).expect("turned");
        let mut all = kernel.room(Type::F32, 45 + 480).expect("room");
        kernel.append(&mut all, 0, values.data()).expect("appended");
        kernel.append(&mut all, 45, turned.data()).expect("appended");
        let [first, second] = <[Floats; 2]>::try_from(turned.parts([180, 300].into_iter())).expect("two parts");
        let (second, third) = second.split(100);
        let host = |values| kernel.to_host(values).expect("copied");
        (message(all), host(first), host(second), host(third))
    };
    assert_eq!(results(&gpu), results(&cpu()));
}

#[test]
fn states_merge_and_finish_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (tokens, heads, v_dim) = (37, 3, 20);
    let rows = tokens * heads;
    let state = |seed: u64| {
        let mut message = random(rows * (v_dim + 2), seed);
        for row in 0..rows {
            // Some rows saw nothing in this state, some of them in none.
            let seen = !row.is_multiple_of(7) && !(row + seed as usize).is_multiple_of(5);
            let (max, sum) = (rows * v_dim + row, rows * (v_dim + 1) + row);
            message[max] = if seen { 9.0 * message[max] } else { f32::NEG_INFINITY };
            message[sum] = if seen { 1.0 + message[sum].abs() } else { 0.0 };
            if !seen {
                let (head, token) = (row / tokens, row % tokens);
                message[(token * heads + head) * v_dim..][..v_dim].fill(0.0);
            }
        }
        message
    };
    for sinks in [None, Some(vec![0.3, -40.0, 7.0])] {
        let results = |kernel: &Kernel| {
            let mut merged = kernel.state(tokens, heads, v_dim).expect("a state");
            for seed in [1, 2, 5] {
                let values = state(seed);
                let held = kernel.hold(View::new(&values, 1, 1, values.len()).expect("its size")).expect("held");
                kernel.merge(&mut merged, held.view().data).expect("merged");
            }
            let (out, statistics) = kernel.finish(merged, sinks.as_deref()).expect("finished");
            (kernel.to_host(out).expect("copied"), statistics.to_host(kernel).expect("copied").lse())
        };
        let ((out, lse), (wanted_out, wanted_lse)) = (results(&gpu), results(&cpu()));
        for (got, wanted) in out.iter().zip(&wanted_out).chain(lse.iter().zip(&wanted_lse)) {
            let near = got == wanted || (got - wanted).abs() <= 2e-6 * wanted.abs().max(0.1);
            assert!(near, "{got} for {wanted}, sinks {sinks:?}");
        }
        assert_eq!((out.len(), lse.len()), (rows * v_dim, rows));
        assert!(sinks.is_some() || lse.contains(&f32::NEG_INFINITY));
    }
}

#[test]
fn what_lies_elsewhere_is_refused() {
    let Some(gpu) = gpu() else { return };
    let values = [1.0; 8];
    let view = View::new(&values, 2, 2, 2).expect("its size");
    let held = gpu.hold(view).expect("held");
    let error = cpu().delta(held.view(), held.view()).expect_err("on a GPU").to_string();
    assert!(error.contains("8 elements lie in the memory of another device"), "{error}");
    let error = cpu().hold(held.view()).expect_err("on a GPU").to_string();
    assert!(error.contains("another device"), "{error}");
    let slice = TensorSlice { view, heads: 0..2, rows: std::slice::from_ref(&(0..2)) };
    let error = gpu.pack(Type::F32, &[slice]).expect_err("on the CPU").to_string();
    assert!(error.contains("8 elements are in the memory of the CPU"), "{error}");
    assert!(read(&Buffer::U64(vec![1]), Type::F32).is_none());
}

/// Streams of two ranks; on a GPU emulated by the CPU, a stream does nothing until it is waited for.
#[cfg(feature = "cuda")]
mod streams {
    use super::*;
    use crate::kernel::{DeviceArray, GpuSource, SharedSlice};
    use cudarc::driver::CudaContext;

    fn ranks() -> Option<[Kernel; 2]> {
        let gpu = match Gpu::count() {
            Ok(0) => return None,
            _ => Gpu::open(0).expect("a GPU that works"),
        };
        Some([gpu.kernel().expect("a stream"), gpu.kernel().expect("a stream")])
    }

    fn ones(kernel: &Kernel) -> DeviceArray {
        let ones = View::new(&[1.0; 1000], 1, 1, 1000).expect("its size");
        let mut sum = kernel.zeros(1000).expect("zeros");
        kernel.add_all(sum.all_mut(), kernel.hold(ones).expect("held").view().data).expect("added");
        let Floats::Device(array) = sum else { panic!("on a GPU") };
        array
    }

    fn share(kernel: &Kernel, array: &DeviceArray) {
        kernel.backend().expect("a GPU's kernel").share(array).expect("shared");
    }

    fn sum_of(kernel: &Kernel, array: &DeviceArray) -> Floats {
        let mut sum = kernel.zeros(1000).expect("zeros");
        kernel.add_all(sum.all_mut(), Data::Device(array.data())).expect("added");
        sum
    }

    fn finished(kernel: &Kernel) {
        kernel.to_host(kernel.zeros(1).expect("a zero")).expect("all before it is over");
    }

    #[test]
    fn a_reader_waits_for_who_writes() {
        let Some([a, b]) = ranks() else { return };
        let sent = ones(&a);
        share(&a, &sent);
        // Only the second rank's stream waits for the first rank's work.
        assert_eq!(b.to_host(sum_of(&b, &sent)), Ok(vec![1.0; 1000]));
        // An array that was not shared is waited for in its current state.
        assert_eq!(b.to_host(sum_of(&b, &ones(&a))), Ok(vec![1.0; 1000]));
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
        assert_eq!(third.to_host(sums[1].clone()), Ok(vec![1.0; 1000]));
        finished(&a);
        assert_eq!(b.to_host(sums[0].clone()), Ok(vec![1.0; 1000]));
    }

    #[test]
    fn nobody_writes_to_what_belongs_to_another_rank() {
        let Some([a, b]) = ranks() else { return };
        let mut sum = a.zeros(1000).expect("zeros");
        let error = b.add_all(sum.all_mut(), Data::Device(ones(&b).data())).expect_err("another's").to_string();
        assert!(error.contains("1000 elements that belong to another rank"), "{error}");
    }

    #[test]
    fn a_loan_is_ordered_with_the_lender() {
        let Some([a, _]) = ranks() else { return };
        let context = CudaContext::new(0).expect("the same GPU");
        let stream = context.new_stream().expect("a stream");
        let mut slice = stream.clone_htod(&vec![1.0f32; 1000]).expect("a copy");
        let lent = Gpu::of(&a).expect("a GPU's kernel").borrow(&slice).expect("lent");
        let mut sum = a.zeros(1000).expect("zeros");
        a.add_all(sum.all_mut(), Data::Device(lent.data())).expect("added");
        drop(lent);
        // This is ordered after the loan, although this rank has not begun to read.
        stream.memset_zeros(&mut slice).expect("zeros");
        stream.synchronize().expect("over");
        let Floats::Device(array) = &sum else { panic!("on a GPU") };
        let mut back = stream.alloc_zeros::<f32>(1000).expect("memory");
        let source = GpuSource::of_array(array).expect("on a GPU");
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
            let error = hand(990..1001).expect_err("behind its end").to_string();
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
        let error = other.add_all(other.zeros(1000).expect("zeros").all_mut(), Data::Device(sent.data()));
        assert!(error.expect_err("another GPU's").to_string().contains("it cannot read 1000 F32 on GPU 0"));
        let message = Arc::new(Floats::Device(sent).into_message());
        let copy = other.incoming(message, Type::F32).expect("copied");
        let data = read(&copy, Type::F32).expect("f32");
        let mut sum = other.zeros(1000).expect("zeros");
        other.add_all(sum.all_mut(), data).expect("added");
        assert_eq!(other.to_host(sum), Ok(vec![1.0; 1000]));
    }
}

#[test]
fn a_rank_without_rows_adds_nothing() {
    for kernel in kernels(&[1]) {
        let mut sum = kernel.zeros(0).expect("zeros");
        let nothing = kernel.hold(View::new(&[], 0, 1, 4).expect("its size")).expect("held");
        kernel.add_all(sum.all_mut(), nothing.view().data).expect("added");
        let place = RowTarget { rows: std::slice::from_ref(&(0..0)), offset: 0, stride: 8, width: 4 };
        kernel.add(sum.all_mut(), &place, nothing.view().data).expect("added");
        assert!(kernel.to_host(sum).expect("copied").is_empty());
    }
}
