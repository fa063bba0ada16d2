//! Attention, decoding and collectives of several ranks in bf16: results equal those in f32 for the same inputs, up to rounding.

use super::bf16::{assert_near, rounding};
use crate::support::{numbers, random};
use candle_core::{DType, Device, Result, Tensor, Var};
use ringspan::attention::{Group, Tokens};
use ringspan::comm::threads::{Options, run};
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Run, Score, StrategyKind};
use ringspan_candle::{Attend, AttentionInputs, Context, Precision, RankDevice, backward_from, collective};
use std::sync::Arc;

fn text(error: candle_core::Error) -> Error {
    Error::Layout(error.to_string())
}

/// The output and the gradients on each of several ranks, and the bytes that rank 0 sent in the forward pass.
fn attended(precision: Precision, (ring, ulysses): (usize, usize), again: bool) -> (Vec<Vec<f32>>, u64) {
    const LEN: usize = 45;
    let heads = [4, 2, 2, 4];
    let layout = Arc::new(Layout::new(LayoutKind::Zigzag, &Documents::batch(1, LEN), ring * ulysses).expect("ranks"));
    let parts = run(ring * ulysses, Options::default(), |comm| {
        let (rank, device) = (comm.rank(), RankDevice::CPU.computing_in(precision));
        let group = Group::new(comm.clone(), (ring, ulysses), Kernel::new(1))?;
        let shard = |heads: usize, seed| -> Result<Tensor> {
            let all = numbers(&random(&[LEN, heads, 16], seed));
            let local = layout.shard(rank, &all, heads * 16).map_err(candle_core::Error::wrap)?;
            device.parameter(&Tensor::from_vec(local, (layout.tokens(rank), heads, 16), &Device::Cpu)?)
        };
        let check = || -> Result<(Vec<Vec<f32>>, u64)> {
            let [q, k, v] = [(4, 1), (2, 2), (2, 3)].map(|(heads, seed)| Var::from_tensor(&shard(heads, seed)?));
            let (q, k, v, sinks) = (q?, k?, v?, device.parameter(&random(&[4], 5))?);
            let context = Context::new(Arc::new(group), layout.clone(), StrategyKind::Ring)?;
            let inputs = AttentionInputs { sinks: Some(&sinks), ..AttentionInputs::new(&q, &k, &v) };
            let mut memory = ringspan_candle::attention::SavedAttention::default();
            let (mask, score, before) = (Mask::causal(), Score::new(0.25), comm.bytes_sent());
            let mut out = context.attention_saving(&mut memory, 0, &inputs, &mask, &score)?;
            let sent = comm.bytes_sent() - before;
            if again {
                out = context.attention_saving(&mut memory, 0, &inputs, &mask, &score)?;
            }
            assert_eq!(out.dtype(), precision.dtype());
            let gradients = backward_from::backward(&out, &shard(4, 9)?)?;
            let of = |x: &Var| gradients.get(x.as_tensor()).map(numbers).expect("a gradient");
            Ok(([numbers(&out), of(&q), of(&k), of(&v)].to_vec(), sent))
        };
        check().map_err(text)
    })
    .expect("runs");
    let heads = [4, heads[0], heads[1], heads[2]];
    let mut whole = heads.map(|heads| vec![0.0; LEN * heads * 16]).to_vec();
    for (rank, (part, _)) in parts.iter().enumerate() {
        for ((part, whole), heads) in part.iter().zip(&mut whole).zip(heads) {
            layout.unshard(rank, part, heads * 16, whole).expect("sizes");
        }
    }
    (whole, parts[0].1)
}

#[test]
fn attention_on_every_mesh() {
    let (wanted, _) = attended(Precision::F32, (1, 1), false);
    for grid in [(1, 1), (3, 1), (1, 2), (2, 2)] {
        let (got, sent) = attended(Precision::Bf16, grid, false);
        for (which, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert_near(&format!("{grid:?}: {which}"), got, wanted);
        }
        assert_eq!(attended(Precision::Bf16, grid, true).0, got, "{grid:?}: what was kept is what was computed");
        let wide = attended(Precision::F32, grid, false).1;
        if grid == (3, 1) {
            // Rank 0 sends two blocks of 15 rows, with two heads of width 16 of keys and of values; the few bytes that
            // describe them cancel.
            assert_eq!(wide - sent, 2 * 2 * 15 * (2 + 2) * 16, "keys and values travel in bf16");
        }
    }
}

#[test]
fn decoding_reads_keys_and_values_in_bf16() {
    let on = |precision: Precision| {
        run(2, Options::default(), |comm| {
            let (rank, device) = (comm.rank(), RankDevice::CPU.computing_in(precision));
            let group = Group::new(comm, (2, 1), Kernel::new(1))?;
            let check = || {
                let at = |shape: &[usize], seed| device.parameter(&random(shape, seed));
                let (q, k, v) =
                    (at(&[1, 4, 16], 1)?, at(&[9, 2, 16], 2 + rank as u64)?, at(&[9, 2, 16], 5 + rank as u64)?);
                let run = |start, len| Run { document: 0, start, len, step: 1 };
                let (queries, keys) = (vec![run(17, 1)], vec![run(9 * rank, 9)]);
                let tokens = Tokens { queries: &queries, keys: &keys, seq_lens: (18, 18) };
                let out = ringspan_candle::decode::decode(
                    &group,
                    &Mask::causal(),
                    &tokens,
                    &AttentionInputs::new(&q, &k, &v),
                    &Score::new(0.25),
                )?;
                assert_eq!(out.dtype(), precision.dtype());
                Ok(numbers(&out))
            };
            check().map_err(text)
        })
        .expect("runs")
    };
    for (got, wanted) in on(Precision::Bf16).iter().zip(on(Precision::F32)) {
        assert_near("decoded", got, &wanted);
    }
}

/// Sums over ranks are added in f32 and rounded once; values that are only moved are not rounded.
#[test]
fn collectives_move_words_and_sum_in_f32() {
    run(8, Options::default(), |comm| {
        let rank = comm.rank();
        let check = || -> Result<()> {
            let own = if rank == 0 { 256.0 } else { 1.0f32 };
            let x = Var::from_tensor(&rounding().parameter(&Tensor::full(own, (8, 3), &Device::Cpu)?)?)?;
            let counts = vec![1; 8];
            let before = comm.bytes_sent();
            let all = collective::all_gather_of(&comm, &x.narrow(0, 0, 1)?, counts.clone())?;
            let sent = comm.bytes_sent() - before;
            assert!((7 * 3 * 2..7 * 3 * 4).contains(&sent), "{sent} bytes of 7 x 3 numbers");
            assert_eq!(numbers(&all)[..6], [256.0, 256.0, 256.0, 1.0, 1.0, 1.0]);
            let (sum, scattered) = (collective::all_reduce(&comm, &x)?, collective::reduce_scatter(&comm, &x, counts)?);
            assert!(numbers(&sum).iter().chain(&numbers(&scattered)).all(|sum| *sum == 264.0), "263 is no bf16");
            let exchanged = collective::all_to_all(&comm, &x, &[1; 8], &[1; 8])?;
            assert_eq!(numbers(&exchanged)[..6], numbers(&all)[..6]);
            for y in [&all, &sum, &scattered, &exchanged] {
                assert_eq!(y.dtype(), DType::BF16);
            }
            // The gradient of a sum over ranks is the sum of the ranks' gradients.
            let gradients = backward_from::backward(&sum, &x.as_detached_tensor())?;
            assert!(gradients.get(&x).map(numbers).expect("a gradient").iter().all(|d| *d == 264.0));
            let gradients = backward_from::backward(&exchanged, &exchanged.detach())?;
            assert_eq!(gradients.get(&x).map(numbers), Some(numbers(&x)));
            Ok(())
        };
        check().map_err(text)
    })
    .expect("runs");
}
