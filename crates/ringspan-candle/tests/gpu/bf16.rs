//! Tests that are specific to models that compute in bf16.

use crate::ranks::{MESHES, Mesh, assert_ranks_within, group, on_ranks};
use crate::{BF16, assert_equal, bound, gpu, numbers, random, rounding};
use candle_core::{DType, Device, Result, Tensor};
use ringspan::comm::Communicator;
use ringspan::{Documents, Layout, LayoutKind, Mask, Score, StrategyKind};
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::transfers::{Parameter, ReservedMemory};
use ringspan_candle::{Attend, AttentionInputs, Context, Precision, RankDevice, Transfers, loss};
use std::sync::Arc;

/// Tests every mesh, with heads of a width that tensor cores take (24) and of another (12), and with stored outputs.
#[test]
fn attention_in_bf16_is_close_to_f32_and_copies_no_tensor_to_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let gpu = rounding(&gpu);
    for (kind, strategy, grid) in MESHES {
        for dim in [12, 24] {
            let mesh = Mesh { dim, ..Mesh::new(kind, strategy, grid) };
            let (wanted, _) = mesh.run(&RankDevice::CPU);
            let (got, (_, down)) = mesh.run(&gpu);
            assert_ranks_within(bound(&gpu), &format!("{mesh:?}"), &got, &wanted);
            assert_eq!(down, 0, "{mesh:?}: bytes copied from the GPU");
            let (again, _) = Mesh { again: Some(Storage::F32), ..mesh }.run(&gpu);
            assert_eq!(again, got, "{mesh:?}: what was kept is what was computed");
        }
    }
}

/// Keys and values are sent in the type in which they are stored.
#[test]
fn blocks_of_bf16_take_half_the_bytes_of_f32() {
    let Some(gpu) = gpu() else { return };
    let sent = |device: &RankDevice| {
        on_ranks(3, |comm| {
            let layout =
                Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 90), 3).map_err(candle_core::Error::wrap)?;
            let kernel = device.kernel(1).map_err(candle_core::Error::wrap)?;
            let (rows, before) = (layout.tokens(comm.rank()), comm.bytes_sent());
            let context = Context::new(group(comm.clone(), (3, 1), kernel)?, Arc::new(layout), StrategyKind::Ring)?;
            let [q, k, v] = [4, 2, 2].map(|heads| device.parameter(&random(&[rows, heads, 16], 3)));
            context.layer_attention(0, &AttentionInputs::new(&q?, &k?, &v?), &Mask::causal(), &Score::new(0.3))?;
            Ok(comm.bytes_sent() - before)
        })
    };
    let (wide, narrow) = (sent(&gpu), sent(&rounding(&gpu)));
    // Each rank sends two blocks of 30 rows, with two heads of width 16 of keys and of values, and a few bytes that describe
    // its tensors.
    let numbers = 2 * 30 * (2 + 2) * 16;
    assert!(wide.iter().zip(&narrow).all(|(wide, narrow)| wide - narrow == 2 * numbers), "{wide:?} {narrow:?}");
    assert!(narrow.iter().all(|narrow| (2 * numbers..2 * numbers + 100).contains(narrow)), "{narrow:?}");
}

/// Products of bf16 with f32 sums are exact up to the error of these sums; rounded to bf16, they would be off by 1e-3.
#[test]
fn logits_are_f32_and_not_rounded() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let gpu = rounding(&gpu);
    let (hidden, head) = (random(&[6, 40], 1), random(&[33, 40], 2));
    let wanted = loss::logits(&hidden, &head)?;
    // Some rows, which begin in the middle of their storage.
    let (there, part) = (gpu.parameter(&hidden)?, 2..5);
    let of_part = loss::logits(&there.narrow(0, part.start, part.len())?, &gpu.parameter(&head)?)?;
    assert_eq!(of_part.dtype(), DType::F32);
    assert_equal("logits", &numbers(&of_part), &numbers(&wanted.narrow(0, part.start, part.len())?));
    let none = loss::logits(&there.narrow(0, 0, 0)?, &gpu.parameter(&head)?)?;
    assert_eq!((none.dims(), none.dtype()), (&[0, 33][..], DType::F32));
    Ok(())
}

#[test]
fn a_parameter_is_rounded_before_it_is_uploaded_and_not_twice() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let gpu = rounding(&gpu);
    assert_eq!(gpu.precision(), Precision::Bf16);
    let third = Tensor::new(&[[1.0f32 / 3.0, -2.0], [1e-30, 5.0]], &Device::Cpu)?;
    let there = gpu.parameter(&third.t()?)?;
    assert_eq!((there.dtype(), there.dims()), (DType::BF16, &[2, 2][..]));
    assert_eq!(numbers(&there), numbers(&third.t()?.to_dtype(DType::BF16)?), "of its elements in its order");
    assert_eq!(numbers(&gpu.parameter(&there)?), numbers(&there));
    let parameter = Parameter { parts: vec![&[1.0 / 3.0], &[2.0]], shape: 2.into() };
    let there = &Transfers::new(&gpu).expect("a stream").upload(ReservedMemory::default(), &[parameter])?[0];
    assert!(there.is_variable());
    assert_eq!((there.dtype(), numbers(there)), (DType::BF16, vec![0.333_984_38, 2.0]));
    assert_eq!(gpu.parameter(&third.narrow(0, 0, 0)?)?.dims(), [0, 2]);
    Ok(())
}

/// A sum over ranks is rounded once: the sum of 256 and seven ones, rounded after each addition, would stay 256.
#[test]
fn sums_over_ranks_are_added_up_in_f32() {
    let Some(gpu) = gpu() else { return };
    let gpu = rounding(&gpu);
    let sums = on_ranks(8, |comm: Arc<dyn Communicator>| {
        let own = if comm.rank() == 0 { 256.0 } else { 1.0f32 };
        let x = gpu.parameter(&Tensor::full(own, (8, 1), &Device::Cpu)?)?;
        let all = ringspan_candle::collective::all_reduce(&comm, &x)?;
        let scattered = ringspan_candle::collective::reduce_scatter(&comm, &x, vec![1; 8])?;
        assert_eq!((all.dtype(), scattered.dtype()), (DType::BF16, DType::BF16));
        Ok((numbers(&all)[0], numbers(&scattered)[0]))
    });
    // 263 is halfway between 262 and 264, and the tie goes to the even mantissa of 264.
    assert!(sums.iter().all(|sum| *sum == (264.0, 264.0)), "{sums:?}");
}

#[test]
fn a_kernel_of_the_cpu_takes_tensors_in_bf16_and_brings_them_back() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let gpu = rounding(&gpu);
    let comm = on_ranks(1, Ok).remove(0);
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 5), 1).map_err(candle_core::Error::wrap)?;
    let kernel = RankDevice::CPU.kernel(1).map_err(candle_core::Error::wrap)?;
    let context = Context::new(group(comm, (1, 1), kernel)?, Arc::new(layout), StrategyKind::Ring)?;
    let here = rounding(&RankDevice::CPU).parameter(&random(&[5, 2, 8], 1))?;
    let attended =
        |x: &Tensor| context.layer_attention(0, &AttentionInputs::new(x, x, x), &Mask::causal(), &Score::new(0.3));
    let (got, wanted) = (attended(&gpu.parameter(&here)?)?, attended(&here)?);
    assert!(got.device().same_device(gpu.tensors()));
    assert_eq!((got.dtype(), numbers(&got)), (DType::BF16, numbers(&wanted)));
    Ok(())
}

/// Results in bf16 and f32 differ by less than the bound, but by much more than rounding errors of f32.
#[test]
fn the_bounds_tell_bf16_from_f32() {
    let Some(gpu) = gpu() else { return };
    let mesh = Mesh::new(LayoutKind::Zigzag, StrategyKind::Ring, (2, 1));
    let (f32, bf16) = (mesh.run(&gpu).0, mesh.run(&rounding(&gpu)).0);
    for (f32, bf16) in f32.iter().flatten().zip(bf16.iter().flatten()) {
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let off = norm(&mut f32.iter().zip(bf16).map(|(a, b)| a - b)) / norm(&mut f32.iter().copied());
        assert!(off > 5e-4 && off < BF16, "{off:e}");
    }
}
