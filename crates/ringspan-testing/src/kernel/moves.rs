//! Checks of a backend's operations besides attention, against plain loops.

use super::{Storage, random};
use crate::Kernels;
use half::{bf16, f16};
use ringspan::kernel::{Backend, DType, Data, DeviceArray, Floats, Kernel, RowTarget, StateShape, Statistics};
use ringspan::kernel::{TensorSlice, View};
use std::slice::from_ref;

fn backend(kernel: &Kernel) -> &dyn Backend {
    kernel.backend().expect("a kernel on a device with its own memory")
}

fn upload(kernel: &Kernel, values: &[f32]) -> DeviceArray {
    backend(kernel).upload(Data::F32(values)).expect("copied to the device")
}

fn download(kernel: &Kernel, array: DeviceArray) -> Vec<f32> {
    kernel.to_host(Floats::Device(array)).expect("copied from the device")
}

/// The bits of each element.
fn bits(kernel: &Kernel, array: &DeviceArray) -> Vec<u32> {
    let width = array.dtype().width();
    let mut bytes = vec![0; array.len() * width];
    backend(kernel).download(array.data(), &mut bytes).expect("copied from the device");
    let element = |bytes: &[u8]| match *bytes {
        [a, b] => u32::from(u16::from_ne_bytes([a, b])),
        [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]),
        _ => panic!("{width} bytes"),
    };
    bytes.chunks_exact(width).map(element).collect()
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
pub fn packing_converts_and_selects_rows(kernels: &dyn Kernels) {
    let Some(kernel) = kernels.one() else { return };
    let rows = [0..3, 5..6, 9..40];
    for from in [Storage::F32, Storage::Bf16, Storage::F16] {
        for to in [DType::F32, DType::Bf16, DType::F16] {
            // A number beyond the other type's range is not packed: the CPU refuses it.
            let most = match to {
                DType::F32 => f32::MAX,
                DType::Bf16 => bf16::MAX.to_f32(),
                DType::F16 => f16::MAX.to_f32(),
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
                computes_in_f32: false,
            };
            let whole = View { tokens: 1, heads: 1, dim: values.len(), token_stride: 0, head_stride: 0, ..view };
            let (held, held_whole) = (kernel.to_device(view).expect("held"), kernel.to_device(whole).expect("held"));
            let slices = [
                TensorSlice { view: held.view(), heads: 1..3, rows: &rows },
                TensorSlice { view: held_whole.view(), heads: 0..1, rows: &rows[..0] },
                TensorSlice { view: held_whole.view(), heads: 0..1, rows: from_ref(&(0..1)) },
            ];
            let got = bits(&kernel, &backend(&kernel).pack(to, &slices).expect("packed"));

            let mut wanted: Vec<f32> = Vec::new();
            for row in rows.iter().flat_map(Clone::clone) {
                (1..3).for_each(|head| wanted.extend(&*view.row(row, head)));
            }
            wanted.extend(&*whole.row(0, 0));
            assert_eq!(got.len(), wanted.len(), "{from:?} to {to:?}");
            for (at, (got, x)) in got.into_iter().zip(wanted).enumerate() {
                // A NaN may have any bits of a NaN.
                let (same, is_nan) = match to {
                    DType::F32 => (got == x.to_bits(), f32::from_bits(got).is_nan()),
                    DType::Bf16 => {
                        (got == u32::from(bf16::from_f32(x).to_bits()), bf16::from_bits(got as u16).is_nan())
                    }
                    DType::F16 => (got == u32::from(f16::from_f32(x).to_bits()), f16::from_bits(got as u16).is_nan()),
                };
                assert!(if x.is_nan() { is_nan } else { same }, "{from:?} to {to:?}, element {at}: {got:x} for {x}");
            }
        }
    }
}

/// Adds rows to a sum by a plain loop.
fn add(sum: &mut [f32], target: &RowTarget, values: &[f32]) {
    let rows = target.rows.iter().flat_map(Clone::clone);
    for (row, values) in rows.zip(values.chunks_exact(target.width)) {
        let at = target.offset + row * target.stride;
        sum[at..at + target.width].iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
    }
}

pub fn sums_are_added_to_their_rows(kernels: &dyn Kernels) {
    let Some(kernel) = kernels.one() else { return };
    let (start, values) = (random(40 * 12, 1), random(9 * 5, 2));
    let (all, some, touching) = (0..1, [3..4, 7..12, 30..33], 2..11);
    let all = RowTarget { rows: from_ref(&all), offset: 0, stride: start.len(), width: start.len() };
    let some = RowTarget { rows: &some, offset: 4, stride: 12, width: 5 };
    let touching = RowTarget { rows: from_ref(&touching), offset: 0, stride: 5, width: 5 };

    let (device, added) = (backend(&kernel), upload(&kernel, &values));
    let mut sum = device.zeros(start.len()).expect("zeros");
    device.add(sum.all_mut(), &all, upload(&kernel, &start).data()).expect("added");
    device.add(sum.all_mut(), &some, added.data()).expect("added");
    device.add(sum.split_at_mut(240).1, &touching, added.data()).expect("added");

    let mut wanted = start.clone();
    add(&mut wanted, &some, &values);
    add(&mut wanted[240..], &touching, &values);
    assert_eq!(download(&kernel, sum), wanted);
}

pub fn matrices_are_transposed_and_messages_appended(kernels: &dyn Kernels) {
    let Some(kernel) = kernels.one() else { return };
    let (matrix, values) = (random(40 * 12, 1), random(45, 2));
    let device = backend(&kernel);
    let turned = device.transpose(upload(&kernel, &matrix).data(), 40, 12).expect("turned");
    let mut all = device.allocate(DType::F32, 45 + 480).expect("memory");
    device.append(&mut all, 0, upload(&kernel, &values).data()).expect("appended");
    device.append(&mut all, 45, turned.data()).expect("appended");

    let column = |column: usize| matrix.iter().skip(column).step_by(12);
    let wanted: Vec<f32> = values.iter().chain((0..12).flat_map(column)).copied().collect();
    assert_eq!(download(&kernel, all.part(180..280)), wanted[180..280]);
    assert_eq!(download(&kernel, all), wanted);
}

/// A softmax state as in messages: out `[T, H, Dv]`, maximum and sum `[H, T]`. Some rows saw nothing, a few of them in no state.
fn state(seed: u64, StateShape { tokens, heads, v_dim }: StateShape) -> Vec<f32> {
    let rows = tokens * heads;
    let mut message = random(rows * (v_dim + 2), seed);
    for row in 0..rows {
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
}

pub fn states_merge_and_finish(kernels: &dyn Kernels) {
    let Some(kernel) = kernels.one() else { return };
    let shape @ StateShape { tokens, heads, v_dim } = StateShape { tokens: 37, heads: 3, v_dim: 20 };
    let (rows, device) = (shape.rows(), backend(&kernel));
    let states = [1, 2, 5].map(|seed| state(seed, shape));
    for sinks in [None, Some([0.3, -40.0, 7.0])] {
        let mut merged = device.softmax_state(shape).expect("a state");
        for state in &states {
            device.merge(&mut merged, shape, upload(&kernel, state).data()).expect("merged");
        }
        let sinks = sinks.as_ref().map(|sinks| &sinks[..]);
        let (out, Statistics { max, sum }) = device.finish(merged, shape, sinks).expect("finished");
        let out = download(&kernel, out);
        let lse = Statistics { max: download(&kernel, max), sum: download(&kernel, sum) }.lse();
        assert_eq!((out.len(), lse.len()), (rows * v_dim, rows));

        for row in 0..rows {
            let (head, token) = (row / tokens, row % tokens);
            let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let max_of = |state: &[f32]| f64::from(state[rows * v_dim + row]);
            let max = states.iter().map(|state| max_of(state)).fold(sink, f64::max);
            let weight = |logit: f64| if logit == f64::NEG_INFINITY { 0.0 } else { (logit - max).exp() };
            let sum_of = |state: &[f32]| weight(max_of(state)) * f64::from(state[rows * (v_dim + 1) + row]);
            let sum: f64 = weight(sink) + states.iter().map(|state| sum_of(state)).sum::<f64>();
            near(lse[row], max + sum.ln(), &format!("log-sum-exp of row {row}, sinks {sinks:?}"));
            for at in (token * heads + head) * v_dim..(token * heads + head + 1) * v_dim {
                let total: f64 = states.iter().map(|state| weight(max_of(state)) * f64::from(state[at])).sum();
                let wanted = if sum > 0.0 { total / sum } else { 0.0 };
                near(out[at], wanted, &format!("out of row {row}, sinks {sinks:?}"));
            }
        }
        assert!(sinks.is_some() || lse.contains(&f32::NEG_INFINITY));
    }
}

fn near(got: f32, wanted: f64, what: &str) {
    let near = f64::from(got) == wanted || (f64::from(got) - wanted).abs() <= 5e-6 * wanted.abs().max(0.1);
    assert!(near, "{what}: {got} for {wanted}");
}

/// A rank without tokens has empty sums.
pub fn nothing_is_added_to_no_rows(kernels: &dyn Kernels) {
    let Some(kernel) = kernels.one() else { return };
    let device = backend(&kernel);
    let mut sum = device.zeros(0).expect("zeros");
    let nothing = kernel.to_device(View::new(&[], 0, 1, 4).expect("its size")).expect("held");
    let Data::Device(nothing) = nothing.view().data else { panic!("on the CPU") };
    let target = RowTarget { rows: from_ref(&(0..0)), offset: 0, stride: 8, width: 4 };
    device.add(sum.all_mut(), &target, nothing).expect("added");
    assert!(download(&kernel, sum).is_empty());
}

pub fn the_cpu_refuses_what_it_cannot_read(kernels: &dyn Kernels) {
    let Some(kernel) = kernels.one() else { return };
    let held = kernel.to_device(View::new(&[1.0; 8], 2, 2, 2).expect("its size")).expect("held");
    let error = Kernel::new(1).delta(held.view(), held.view()).expect_err("on a device").to_string();
    assert!(error.contains("8 elements lie in the memory of another device"), "{error}");
    let error = Kernel::new(1).to_device(held.view()).expect_err("on a device").to_string();
    assert!(error.contains("another device"), "{error}");
}
