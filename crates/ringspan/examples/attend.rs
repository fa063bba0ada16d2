//! Attention over four ranks of one process, forward and backward: `cargo run --release --example attend -p ringspan`

use ringspan::attention::{self, Group, Inputs};
use ringspan::kernel::View;
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind, comm::threads};

fn main() -> Result<(), Error> {
    const RANKS: usize = 4;
    let (tokens, heads, kv_heads, dim) = (4096, 8, 2, 64);
    let values = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.7).sin()).collect() };
    let (q, k, v) = (values(tokens * heads * dim), values(tokens * kv_heads * dim), values(tokens * kv_heads * dim));

    // The layout says which rank holds which tokens; the schedule, which rank computes and sends what at which step.
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, tokens), RANKS)?;
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (RANKS, 1))?;
    println!("{schedule}");

    let lines = threads::run(RANKS, threads::Options::default(), |comm| {
        let rank = comm.rank();
        let group = Group::new(comm.clone(), (RANKS, 1), Kernel::new(1))?;
        let shard = |global: &[f32], heads: usize| layout.shard(rank, global, heads * dim);
        let (q, k, v) = (shard(&q, heads)?, shard(&k, kv_heads)?, shard(&v, kv_heads)?);
        let view = |data, heads| View::new(data, layout.tokens(rank), heads, dim).expect("a shard of the layout");
        let (q, k, v) = (view(&q, heads), view(&k, kv_heads), view(&v, kv_heads));
        let score = Score::new(1.0 / (dim as f32).sqrt());
        let inputs = Inputs::new(q, k, v, &score);
        let saved = attention::forward(&group, &schedule, &inputs)?;
        let gradients = attention::backward(&group, &schedule, &inputs, &saved, q)?;
        let norm = gradients.dq.iter().map(|x| x * x).sum::<f32>().sqrt();
        Ok::<_, Error>(format!("rank {rank}: |dq| = {norm:.4}, {} bytes sent", comm.bytes_sent()))
    })?;
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}
