//! A few queries on every rank over a cache spread by (position / block) mod P: all ranks give the f64 reference's answer.

use super::{Problem, relative_l2};
use crate::Kernels;
use ringspan::attention::{Group, Inputs, Merge, Tokens, decode};
use ringspan::comm::threads;
use ringspan::kernel::{Kernel, View};
use ringspan::schedule::{DecodeSchedule, TensorSizes};
use ringspan::{Error, Layout, LayoutKind, Mask, Run};

/// Output, log-sum-exp and bytes sent of every rank.
fn on_ranks(
    kernels: &dyn Kernels,
    problem: &Problem,
    ranks: usize,
    block: usize,
    together: bool,
    merge: Merge,
) -> Vec<(Vec<f32>, Vec<f32>, u64)> {
    let inputs = problem.inputs(5);
    let Problem { queries, keys, heads, kv_heads, dim, v_dim, .. } = *problem;
    let layout = Layout::new(LayoutKind::Striped(block), &problem.k_documents, ranks).expect("ranks");
    let query = [Run { document: 0, start: 0, len: queries, step: 1 }];
    let each: Vec<Run> = (0..queries).map(|start| Run { start, len: 1, ..query[0] }).collect();
    // Stripes of up to 16 tokens are runs with a step of P times their width, wider ones have a step of 1: only with the
    // latter can consecutive queries form one tile.
    let queries_of = if together { &query[..] } else { &each };
    let run = |comm: std::sync::Arc<dyn ringspan::comm::Communicator>| {
        let rank = comm.rank();
        let group = Group::new(comm.clone(), (ranks, 1), one(kernels))?;
        let (k, v) = (layout.shard(rank, &inputs.k, kv_heads * dim)?, layout.shard(rank, &inputs.v, kv_heads * v_dim)?);
        let view = |data, tokens, heads, dim| View::new(data, tokens, heads, dim).expect("its size");
        let held = layout.tokens(rank);
        let q = view(&inputs.q, queries, heads, dim);
        let local = Inputs::new(q, view(&k, held, kv_heads, dim), view(&v, held, kv_heads, v_dim), &problem.score);
        let tokens = Tokens { queries: queries_of, keys: layout.runs(rank), seq_lens: (queries, keys) };
        let before = comm.bytes_sent();
        let (out, lse) = decode(&group, &problem.mask, &tokens, &local, merge)?;
        Ok::<_, Error>((out, lse, comm.bytes_sent() - before))
    };
    threads::run(ranks, threads::Options::default(), run).expect("decodes")
}

/// A kernel of a rank, after a check has seen that this machine has one.
fn one(kernels: &dyn Kernels) -> Kernel {
    kernels.one().expect("the device of a moment ago")
}

fn check(kernels: &dyn Kernels, problem: Problem) {
    if kernels.one().is_none() {
        return;
    }
    let wanted = problem.reference(&problem.inputs(5));
    for ranks in [1, 2, 3, 4, 7, 8] {
        for (block, merge) in
            [(1, Merge::AllGather), (16, Merge::Tree), (17, Merge::Tree), (64, Merge::AllGather), (1, Merge::Tree)]
        {
            let together = block > 1 || merge == Merge::Tree;
            let answers = on_ranks(kernels, &problem, ranks, block, together, merge);
            for (rank, (out, lse, _)) in answers.iter().enumerate() {
                let what =
                    format!("{}, rank {rank} of {ranks}, blocks of {block}, {together}, {merge:?}", problem.name);
                assert!(relative_l2(out, &wanted.out) <= 1e-5, "{what}: out");
                assert!(relative_l2(lse, &wanted.lse) <= 1e-5, "{what}: lse");
                assert_eq!((out, lse), (&answers[0].0, &answers[0].1), "{what}: other bits than rank 0");
            }
        }
    }
}

pub fn one_query_or_a_few_over_a_spread_cache(kernels: &dyn Kernels) {
    for queries in [1, 3, 5] {
        check(kernels, Problem::cross(1, queries, 150, 4, 2, 32, Mask::causal_bottom_right()));
        check(kernels, Problem::cross(1, queries, 150, 8, 1, 16, Mask::causal_bottom_right().window(Some(40), None)));
    }
    check(kernels, Problem { v_dim: 24, ..Problem::cross(1, 2, 77, 4, 4, 16, Mask::full()) });
}

pub fn ranks_without_keys_or_without_visible_ones_contribute_nothing(kernels: &dyn Kernels) {
    for keys in [0, 1, 5] {
        check(kernels, Problem::cross(1, 1, keys, 4, 2, 16, Mask::causal_bottom_right()));
    }
    check(kernels, Problem::cross(1, 2, 200, 4, 2, 16, Mask::causal_bottom_right().window(Some(3), None)));
}

pub fn scores_of_all_kinds(kernels: &dyn Kernels) {
    let problem = || Problem::cross(1, 2, 90, 4, 2, 16, Mask::causal_bottom_right());
    check(kernels, problem().with_softcap().with_sinks());
    check(kernels, problem().with_alibi());
    check(kernels, problem().with_buckets().with_sinks());
}

pub fn a_bias_too_short_for_the_keys_is_refused(kernels: &dyn Kernels) {
    if kernels.one().is_none() {
        return;
    }
    let problem = Problem::cross(1, 1, 30, 2, 2, 8, Mask::causal_bottom_right());
    let inputs = problem.inputs(5);
    let bias = vec![0.0; 2 * 20];
    let error = threads::run(1, threads::Options::default(), |comm| {
        let group = Group::new(comm, (1, 1), one(kernels))?;
        let view = |data, tokens, dim| View::new(data, tokens, 2, dim).expect("its size");
        let local = Inputs::new(view(&inputs.q, 1, 8), view(&inputs.k, 30, 8), view(&inputs.v, 30, 8), &problem.score);
        let runs = [1, 30].map(|len| Run { document: 0, start: 0, len, step: 1 });
        let tokens = Tokens { queries: &runs[..1], keys: &runs[1..], seq_lens: (1, 30) };
        decode(&group, &problem.mask, &tokens, &local.with_bias(view(&bias, 1, 20)), Merge::AllGather)
    });
    let message = error.expect_err("30 keys, 20 terms").to_string();
    assert!(message.contains("30") && message.contains("20"), "{message}");
}

pub fn the_exchange_is_one_state_a_message(kernels: &dyn Kernels) {
    if kernels.one().is_none() {
        return;
    }
    let problem = Problem::cross(1, 1, 64, 4, 2, 32, Mask::causal_bottom_right());
    let state = (4 * (32 + 2) * 4) as u64;
    let sizes = TensorSizes { heads: 4, kv_heads: 2, dim: 32, v_dim: 32, wire: 4, bias_heads: 0 };
    for ranks in [2, 3, 4, 7, 8] {
        let sent = |merge| {
            on_ranks(kernels, &problem, ranks, 16, true, merge).into_iter().map(|answer| answer.2).collect::<Vec<_>>()
        };
        assert_eq!(sent(Merge::AllGather), vec![(ranks as u64 - 1) * state; ranks]);
        let tree = sent(Merge::Tree);
        assert_eq!(tree.iter().sum::<u64>(), 2 * (ranks as u64 - 1) * state);
        for merge in [Merge::AllGather, Merge::Tree] {
            let schedule = DecodeSchedule::new(merge, ranks, 1);
            let planned: Vec<u64> = (0..ranks).map(|rank| schedule.bytes_sent(rank, &sizes)).collect();
            assert_eq!(sent(merge), planned, "{merge:?} on {ranks} ranks");
        }
    }
}
