//! Tests of collectives and attention as candle operations: values and gradients over ranks equal those of one rank.

use candle_core::{Device, Tensor, Var};
use ringspan::attention::Group;
use ringspan::comm::threads::{Options, run};
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Score, StrategyKind};
use ringspan_candle::{Attend, AttentionInputs, Context, collective};
use std::sync::Arc;

fn text(error: candle_core::Error) -> Error {
    Error::Layout(error.to_string())
}

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 31 + seed * 17) as f32 * 0.37).sin()).collect()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|t| t.to_vec1()).expect("f32")
}

/// The loss is the sum over ranks r of sum(c_r * gathered), so the gradient of each row is the sum of its coefficients in all
/// c_r.
#[test]
fn all_gather_sums_the_gradients_of_all_ranks() {
    run(3, Options::default(), |comm| {
        let rank = comm.rank();
        let check = || -> candle_core::Result<()> {
            let x = Var::from_tensor(&Tensor::from_vec(values(rank * 2, rank), (rank, 2), &Device::Cpu)?)?;
            let all = collective::all_gather(&comm, x.as_tensor())?;
            assert_eq!(flat(&all), [values(2, 1), values(4, 2)].concat());
            let weights = |rank| values(6, 40 + rank);
            let c = Tensor::from_vec(weights(rank), (3, 2), &Device::Cpu)?;
            let gradients = (all * c)?.sum_all()?.backward()?;
            let wanted: Vec<f32> = (0..6).map(|i| (0..3).map(|r| weights(r)[i]).sum()).collect();
            let own = [&wanted[..0], &wanted[..2], &wanted[2..]][rank];
            assert_eq!(gradients.get(&x).map(flat).unwrap_or_default(), own);
            Ok(())
        };
        check().map_err(text)
    })
    .expect("runs");
}

#[test]
fn all_reduce_and_all_to_all_go_back_the_way_they_came() {
    run(2, Options::default(), |comm| {
        let rank = comm.rank();
        let check = || -> candle_core::Result<()> {
            let x = Var::from_tensor(&Tensor::from_vec(values(4, rank), 4, &Device::Cpu)?)?;
            let c = Tensor::from_vec(values(4, 50 + rank), 4, &Device::Cpu)?;
            let sum = collective::all_reduce(&comm, x.as_tensor())?;
            let wanted: Vec<f32> = values(4, 0).iter().zip(values(4, 1)).map(|(a, b)| a + b).collect();
            assert_eq!(flat(&sum), wanted);
            let gradients = (sum * c)?.sum_all()?.backward()?;
            let wanted: Vec<f32> = values(4, 50).iter().zip(values(4, 51)).map(|(a, b)| a + b).collect();
            assert_eq!(gradients.get(&x).map(flat), Some(wanted));

            // Rank 0 keeps 1 row and sends 2; rank 1 sends 1 and keeps none.
            let (send, receive) = if rank == 0 { ([1, 2], [1, 1]) } else { ([1, 0], [2, 0]) };
            let rows = send.iter().sum::<usize>();
            let x = Var::from_tensor(&Tensor::from_vec(values(rows * 2, rank), (rows, 2), &Device::Cpu)?)?;
            let got = collective::all_to_all(&comm, x.as_tensor(), &send, &receive)?;
            let (of_0, of_1) = (values(6, 0), values(2, 1));
            let wanted = if rank == 0 { [&of_0[..2], &of_1].concat() } else { of_0[2..].to_vec() };
            assert_eq!(flat(&got), wanted);
            // The gradient of sum(y^2) / 2 is y itself, which is sent back to where it came from, so it equals x.
            let gradients = (got.sqr()? * 0.5)?.sum_all()?.backward()?;
            assert_eq!(gradients.get(&x).map(flat), Some(flat(x.as_tensor())));
            assert!(collective::all_to_all(&comm, x.as_tensor(), &[9, 9], &receive).is_err());
            Ok(())
        };
        check().map_err(text)
    })
    .expect("runs");
}

#[test]
fn attention_of_parts_of_a_tensor_is_that_of_their_copies() -> candle_core::Result<()> {
    let comm = run(1, Options::default(), Ok::<_, Error>).expect("one rank").remove(0);
    let group = Arc::new(Group::new(comm, (1, 1), Kernel::new(1)).expect("one rank"));
    let layout = Arc::new(Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 9), 1).expect("one rank"));
    let context = Context::new(group, layout, StrategyKind::Ring)?;
    let results = |copies: bool| -> candle_core::Result<[Vec<f32>; 2]> {
        // Query, key and value heads are in one tensor, whose first two tokens are left out.
        let x = Var::from_tensor(&Tensor::from_vec(values(11 * 8 * 8, 5), (11, 8, 8), &Device::Cpu)?)?;
        let part = |from, heads| {
            let part = x.narrow(0, 2, 9)?.narrow(1, from, heads)?;
            if copies { part.force_contiguous() } else { Ok(part) }
        };
        let out = context.layer_attention(
            0,
            &AttentionInputs::new(&part(0, 4)?, &part(4, 2)?, &part(6, 2)?),
            &Mask::causal(),
            &Score::new(0.35),
        )?;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        Ok([flat(&out), gradients.get(&x).map(flat).unwrap_or_default()])
    };
    assert_eq!(results(false)?, results(true)?);
    Ok(())
}

#[test]
fn attention_of_a_context_has_the_gradients_of_one_rank() {
    const LEN: usize = 30;
    let on = |ring: usize, ulysses: usize| -> Vec<Vec<f32>> {
        let layout =
            Arc::new(Layout::new(LayoutKind::Zigzag, &Documents::batch(1, LEN), ring * ulysses).expect("ranks"));
        let parts = run(ring * ulysses, Options::default(), |comm| {
            let rank = comm.rank();
            let group = Group::new(comm, (ring, ulysses), Kernel::new(1))?;
            let shard = |heads: usize, seed| -> Result<Var, Error> {
                let local = layout.shard(rank, &values(LEN * heads * 8, seed), heads * 8)?;
                let tensor = Tensor::from_vec(local, (layout.tokens(rank), heads, 8), &Device::Cpu).map_err(text)?;
                Var::from_tensor(&tensor).map_err(text)
            };
            let (q, k, v) = (shard(4, 1)?, shard(2, 2)?, shard(2, 3)?);
            let check = || -> candle_core::Result<Vec<Vec<f32>>> {
                let context = Context::new(Arc::new(group), layout.clone(), StrategyKind::Ring)?;
                assert_eq!(context.positions(), layout.rows(rank));
                let out = context.layer_attention(
                    0,
                    &AttentionInputs::new(&q, &k, &v),
                    &Mask::causal(),
                    &Score::new(0.35),
                )?;
                let gradients = out.sqr()?.sum_all()?.backward()?;
                Ok([&q, &k, &v].map(|x| gradients.get(x).map(flat).unwrap_or_default()).to_vec())
            };
            check().map_err(text)
        })
        .expect("runs");
        let mut whole = [4, 2, 2].map(|heads| vec![0.0; LEN * heads * 8]).to_vec();
        for (rank, part) in parts.iter().enumerate() {
            for ((part, whole), heads) in part.iter().zip(&mut whole).zip([4, 2, 2]) {
                layout.unshard(rank, part, heads * 8, whole).expect("sizes");
            }
        }
        whole
    };
    let one = on(1, 1);
    assert!(one.iter().all(|gradient| gradient.iter().any(|x| x.abs() > 1e-3)));
    for (ring, ulysses) in [(2, 1), (3, 1), (1, 4), (2, 2)] {
        for (many, one) in on(ring, ulysses).iter().zip(&one) {
            let difference: f32 = many.iter().zip(one).map(|(a, b)| (a - b).powi(2)).sum();
            let norm: f32 = one.iter().map(|x| x * x).sum();
            assert!(difference.sqrt() <= 1e-5 * norm.sqrt(), "ring {ring} x ulysses {ulysses}");
        }
    }
}
