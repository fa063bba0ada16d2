//! The bytes that the transport counts equal the formulas of the design.

use ringspan::attention::{Inputs, Wire, forward};
use ringspan::comm::threads;
use ringspan::kernel::{Data, View};
use ringspan::{Documents, Group, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use ringspan_testing::mesh::{MeshSetup, Problem};

const LEN: usize = 96;

/// Bytes of the keys and values of all tokens, in f32.
fn all_keys(problem: &Problem) -> u64 {
    (LEN * problem.kv_heads * (problem.dim + problem.v_dim) * 4) as u64
}

#[test]
fn a_ring_sends_p_minus_1_blocks_forward_and_twice_that_backward() {
    for (kind, mask) in [(LayoutKind::Zigzag, Mask::causal()), (LayoutKind::Contiguous, Mask::full())] {
        let problem = Problem::new(1, LEN, 4, 2, 16, mask);
        let inputs = problem.inputs(0);
        for ranks in [1, 2, 3, 4, 6, 8] {
            let got = problem.on_mesh(&inputs, MeshSetup::new(kind, StrategyKind::Ring, (ranks, 1))).expect("runs");
            let block = all_keys(&problem) / ranks as u64;
            let hops = ranks as u64 - 1;
            assert_eq!(got.bytes_forward, vec![hops * block; ranks], "forward on {ranks}");
            // P - 1 blocks of keys and values, and P - 1 of their gradients.
            assert_eq!(got.bytes_backward, vec![2 * hops * block; ranks], "backward on {ranks}");
        }
    }
}

#[test]
fn an_all_gather_sends_the_own_block_to_each_other_rank() {
    let problem = Problem::new(1, LEN, 4, 2, 16, Mask::full());
    let got = problem
        .on_mesh(&problem.inputs(0), MeshSetup::new(LayoutKind::Contiguous, StrategyKind::AllGather, (4, 1)))
        .expect("runs");
    assert_eq!(got.bytes_forward, vec![3 * all_keys(&problem) / 4; 4]);
}

#[test]
fn ulysses_sends_the_share_of_other_ranks_of_q_k_v_and_gets_out_and_statistics_back() {
    let problem = Problem::new(1, LEN, 4, 4, 16, Mask::causal());
    let got = problem
        .on_mesh(&problem.inputs(0), MeshSetup::new(LayoutKind::Contiguous, StrategyKind::Ring, (1, 4)))
        .expect("runs");
    // With T = S/4 tokens, 3 of 4 heads are sent as q, k, v; out, maximum and sum of the own head return for 3/4 of the
    // tokens.
    let tokens = (LEN / 4) as u64;
    assert_eq!(got.bytes_forward, vec![tokens * 3 * 3 * 16 * 4 + 3 * tokens * (16 + 2) * 4; 4]);
}

#[test]
fn documents_that_stay_on_a_rank_cost_nothing() {
    let problem = Problem::with_documents(Documents::packed(&[24; 4]), 1, 4, 2, 16, Mask::causal());
    let got = problem
        .on_mesh(&problem.inputs(0), MeshSetup::new(LayoutKind::Contiguous, StrategyKind::Ring, (4, 1)))
        .expect("runs");
    assert_eq!(got.bytes_forward, vec![0; 4]);
    assert_eq!(got.bytes_backward, vec![0; 4]);
}

#[test]
fn a_window_asks_only_the_neighbours_it_reaches() {
    let problem = Problem::new(1, LEN, 4, 2, 16, Mask::causal().window(Some(24), None));
    let got = problem
        .on_mesh(&problem.inputs(0), MeshSetup::new(LayoutKind::Contiguous, StrategyKind::Ring, (4, 1)))
        .expect("runs");
    let block = all_keys(&problem) / 4;
    assert_eq!(got.bytes_forward, vec![block, block, block, 0]);
}

#[test]
fn tensors_travel_as_they_are_stored() {
    let problem = Problem::new(1, LEN, 4, 4, 16, Mask::full());
    let inputs = problem.inputs_of(Wire::Bf16, 3);
    let wanted = problem.reference(&inputs);
    for (grid, elements) in [((4, 1), 3 * all_keys(&problem) / 4 / 4), ((1, 4), LEN as u64 / 4 * 3 * 3 * 16)] {
        for stored in [Wire::F32, Wire::Bf16, Wire::F16] {
            // The group is given no wire type.
            let on =
                MeshSetup { stored, wire: stored, ..MeshSetup::new(LayoutKind::Contiguous, StrategyKind::Ring, grid) };
            let got = problem.on_mesh(&inputs, on).expect("runs");
            assert!(wanted.difference(&got, 8e-3).is_none(), "{on:?}");
            let width = if stored == Wire::F32 { 4 } else { 2 };
            // Output, maximum and sum return from Ulysses in f32.
            let back = if grid.1 > 1 { 3 * (LEN as u64 / 4) * (16 + 2) * 4 } else { 0 };
            assert_eq!(got.bytes_forward, vec![elements * width + back; 4], "{on:?}");
        }
    }
}

#[test]
fn ranks_with_tensors_of_other_types_do_not_take_one_for_the_other() {
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 8), 2).expect("ranks");
    for grid in [(2, 1), (1, 2)] {
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), grid).expect("fits");
        let (long, bf16, f16) =
            (vec![0.5f32; 4 * 2 * 8], vec![half::bf16::ONE; 4 * 2 * 8], vec![half::f16::ONE; 4 * 2 * 8]);
        let types = [Data::F32(&long), Data::Bf16(&bf16), Data::F16(&f16)];
        for (a, b) in [(0, 1), (1, 2), (2, 1), (2, 0)] {
            let call = |comm: std::sync::Arc<dyn ringspan::comm::Communicator>| {
                let data = types[if comm.rank() == 0 { a } else { b }];
                let group = Group::new(comm, grid, ringspan::Kernel::new(1))?;
                let view = View::stored(data, 4, 2, 8).expect("its size");
                forward(&group, &schedule, &Inputs::new(view, view, view, &Score::new(0.3)))
            };
            assert!(threads::run(2, threads::Options::default(), call).is_err(), "{a} and {b} on {grid:?}");
        }
    }
}

#[test]
fn a_number_beyond_the_wire_s_type_stops_all_ranks() {
    let problem = Problem::new(1, LEN, 4, 4, 16, Mask::full());
    for grid in [(3, 1), (1, 3)] {
        let on = MeshSetup { wire: Wire::F16, ..MeshSetup::new(LayoutKind::Contiguous, StrategyKind::Ring, grid) };
        let mut inputs = problem.inputs(3);
        let last = inputs.k.len() - 1;
        // A number that rounds to the largest one can be sent, and so can infinity.
        (inputs.k[last], inputs.v[last]) = (-65519.0, f32::INFINITY);
        problem.on_mesh(&inputs, on).expect("it fits");
        inputs.k[last] = -70000.0;
        let error = problem.on_mesh(&inputs, on).expect_err("it does not").to_string();
        assert!(["-70000.0", "f16", "65504.0"].iter().all(|word| error.contains(word)), "{error}");
        problem.on_mesh(&inputs, MeshSetup { wire: Wire::Bf16, ..on }).expect("bf16 has room");
    }
}
