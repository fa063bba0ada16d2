//! What `Experts` leaves open is enough to spread the experts over ranks: each computes some, for the tokens of all.

mod support;

use candle_core::{Result, Tensor, bail};
use ringspan::LayoutKind;
use ringspan::comm::{Buffer, Communicator};
use ringspan_candle::experts::mixed;
use ringspan_candle::{Expert, Experts, Routing, collective};
use std::sync::Arc;
use support::{Batch, Shared, assert_equal, load, on_mesh_with, on_one_device};

/// Expert e is computed by rank e mod P, for the tokens of all ranks; the outputs are summed over the ranks.
struct Spread(Arc<dyn Communicator>);

impl Experts for Spread {
    fn mix(&self, _: usize, x: &Tensor, routing: &Routing, expert: &dyn Fn(usize) -> Result<Expert>) -> Result<Tensor> {
        let Self(comm) = self;
        let (rank, ranks, own) = (comm.rank(), comm.size(), x.dim(0)?);
        let top = routing.weights.dim(1)?;
        let chosen = Buffer::U64(routing.chosen.iter().map(|expert| u64::from(*expert)).collect());
        let chosen = comm.all_gather(chosen).map_err(candle_core::Error::wrap)?;
        let (all, weights) = (collective::all_gather(comm, x)?, collective::all_gather(comm, &routing.weights)?);
        let (mut places, mut mine, mut first) = (Vec::new(), Vec::new(), 0);
        for (from, chosen) in chosen.iter().enumerate() {
            let Buffer::U64(chosen) = &**chosen else { bail!("another kind of message") };
            if from < rank {
                first += chosen.len() / top;
            }
            mine.extend(chosen.iter().map(|expert| *expert as u32));
        }
        // Choices of others' experts have weight 0 and point at an expert of this rank.
        let is_mine = |expert: &u32| *expert as usize % ranks == rank;
        for expert in &mut mine {
            places.push(f32::from(u8::from(is_mine(expert))));
            *expert = if is_mine(expert) { *expert } else { rank as u32 };
        }
        let places = Tensor::from_vec(places, weights.shape(), weights.device())?;
        let routing = Routing { chosen: mine, weights: (weights * places)? };
        let sum = mixed(&all, &routing, &|index| {
            assert_eq!(index % ranks, rank, "an expert that another rank has");
            expert(index)
        })?;
        collective::all_reduce(comm, &sum)?.narrow(0, first, own)
    }
}

fn spread(comm: &Arc<dyn Communicator>) -> Shared {
    Arc::new(Spread(comm.clone()))
}

#[test]
fn experts_spread_over_ranks_equal_hugging_face() {
    for name in ["qwen3_moe", "qwen3_moe_balanced"] {
        let (decoder, weights, batch, wanted) = load(name);
        for mesh in [(1, 1), (2, 1), (3, 1), (2, 2)] {
            let got = on_mesh_with(&decoder, &weights, &batch, LayoutKind::Zigzag, mesh, &spread);
            assert_equal(&format!("{name}, {mesh:?}"), &got, &wanted);
        }
    }
}

/// Ranks without tokens compute experts all the same, there and back, and meet the others in the same order.
#[test]
fn ranks_without_tokens_compute_the_experts_of_others() {
    let (decoder, weights, whole, _) = load("qwen3_moe");
    let short = Batch { tokens: whole.tokens[..3].to_vec(), rows: 1, len: 3 };
    let (one, _) = on_one_device(&decoder, &weights, &short);
    for mesh in [(5, 1), (3, 2), (1, 4)] {
        let many = on_mesh_with(&decoder, &weights, &short, LayoutKind::Contiguous, mesh, &spread);
        assert_equal(&format!("3 tokens, {mesh:?}"), &many, &one);
    }
}
