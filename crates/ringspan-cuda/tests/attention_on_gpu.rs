//! Meshes of ranks whose tensors and results stay on a GPU (or an emulated one, `tools/check_cuda.sh`) give the answer of
//! the f64 reference, and copy nothing between CPU and GPU whose size depends on that of a tensor.

#[cfg(feature = "nccl")]
#[path = "attention_on_gpu/by_nccl.rs"]
mod by_nccl;

use ringspan::attention::{self, Group, Inputs, Merge, Tokens, Wire, on_device};
use ringspan::comm::threads;
use ringspan::kernel::{Kernel, View};
use ringspan::{Error, Layout, LayoutKind, Mask, Run, Schedule, StrategyKind};
use ringspan_cuda::Gpu;
use ringspan_testing::comm::as_processes;
use ringspan_testing::mesh::{Answer, MakeRank, MeshSetup, Problem, relative_l2};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The first GPU, locked for one test at a time, because its counts include all ranks.
fn gpu() -> Option<(&'static Gpu, MutexGuard<'static, ()>)> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::new(());
    let open = || match Gpu::count() {
        Ok(0) => {
            println!("skipped: no GPU on this machine");
            None
        }
        _ => Some(Gpu::open(0).expect("a GPU that works")),
    };
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Some((GPU.get_or_init(open).as_ref()?, alone))
}

/// Bytes that all ranks copied to the GPU, and from it.
type Copied = (u64, u64);

/// Computes the answer with tensors on the GPU; also returns the bytes copied in the forward and in the backward calls.
fn on_gpu(
    gpu: &Gpu,
    problem: &Problem,
    on: MeshSetup,
    make_rank: &MakeRank<'_>,
) -> Result<(Answer, [Copied; 2]), Error> {
    let copied = Mutex::new([(0, 0); 2]);
    let answer =
        problem.on_mesh_with(&problem.inputs_of(on.stored, 3), on, make_rank, &|group, schedule, local, d_out| {
            let (kernel, comm) = (group.kernel(), group.cp());
            let (q, k, v, d_out) = (
                kernel.to_device(local.q)?,
                kernel.to_device(local.k)?,
                kernel.to_device(local.v)?,
                kernel.to_device(d_out)?,
            );
            let bias = local.bias.map(|bias| kernel.to_device(bias)).transpose()?;
            let mut held = Inputs::new(q.view(), k.view(), v.view(), local.score);
            held.bias = bias.as_ref().map(|bias| bias.view());
            // Between two barriers no rank copies anything.
            let count = || -> Result<(Copied, u64), Error> {
                comm.barrier()?;
                let counts = (gpu.copied(), comm.bytes_sent());
                comm.barrier()?;
                Ok(counts)
            };
            let start = count()?;
            let forward = on_device::forward(group, schedule, &held)?;
            let middle = count()?;
            let gradients = on_device::backward(group, schedule, &held, &forward.data(), d_out.view())?;
            let end = count()?;
            let less = |(a, b): Copied, (c, d): Copied| (a - c, b - d);
            *copied.lock().expect("no panic under it") = [less(middle.0, start.0), less(end.0, middle.0)];
            let sent = [middle.1 - start.1, end.1 - middle.1];
            Ok((forward.to_host(kernel)?, gradients.to_host(kernel)?, sent))
        })?;
    Ok((answer, copied.into_inner().expect("no panic under it")))
}

/// Compares the GPU with the reference, and its messages with those of the CPU. Only tables and lists may be copied to the
/// GPU, and `downloads` bytes from it.
fn check(gpu: &Gpu, problem: impl Fn(usize) -> Problem, on: MeshSetup, downloads: [u64; 2]) {
    check_with(gpu, problem, on, downloads, &|comm| Ok((comm, gpu.kernel()?)));
}

/// Like [`check`], for ranks with the given communicators and kernels.
fn check_with(
    gpu: &Gpu,
    problem: impl Fn(usize) -> Problem,
    on: MeshSetup,
    downloads: [u64; 2],
    make_rank: &MakeRank<'_>,
) {
    let mut tables = None;
    for dim in [8, 24] {
        let problem = problem(dim);
        let what = format!("{}, {on:?}", problem.name);
        let inputs = problem.inputs_of(on.stored, 3);
        let wanted = problem.reference(&inputs);
        let (got, copied) = on_gpu(gpu, &problem, on, make_rank).unwrap_or_else(|error| panic!("{what}: {error}"));
        // Tensor cores round the weights to bf16 before they multiply them.
        let bound = if on.wire == Wire::Bf16 { 8e-3 } else { 1e-5 };
        if let Some((name, error)) = wanted.difference(&got, bound) {
            panic!("{what}: {name} differs by {error:e}");
        }
        let host = problem.on_mesh_by(&inputs, on, &|| Ok(Kernel::new(1)), &|group, schedule, local, d_out| {
            let comm = group.cp();
            let before = comm.bytes_sent();
            let forward = attention::forward(group, schedule, local)?;
            let between = comm.bytes_sent();
            let gradients = attention::backward(group, schedule, local, &forward, d_out)?;
            Ok((forward, gradients, [between - before, comm.bytes_sent() - between]))
        });
        let host = host.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(got.bytes_forward, host.bytes_forward, "{what}: bytes of the forward pass");
        assert_eq!(got.bytes_backward, host.bytes_backward, "{what}: bytes of the backward pass");
        assert_eq!(copied.map(|(_, down)| down), downloads, "{what}: bytes copied from the GPU");
        // The tables depend on the tiles, which are the same for any head width.
        let up = copied.map(|(up, _)| up);
        assert_eq!(*tables.get_or_insert(up), up, "{what}: bytes copied to the GPU");
    }
}

fn causal(heads: usize, kv_heads: usize, dim: usize) -> Problem {
    Problem::new(2, 50, heads, kv_heads, dim, Mask::causal())
}

#[test]
fn blocks_go_round_rings_without_the_cpu() {
    let Some((gpu, _alone)) = gpu() else { return };
    for (kind, strategy, ranks) in [
        (LayoutKind::Zigzag, StrategyKind::Ring, 1),
        (LayoutKind::Zigzag, StrategyKind::Ring, 4),
        (LayoutKind::Contiguous, StrategyKind::Ring, 3),
        (LayoutKind::Striped(1), StrategyKind::BidirectionalRing, 4),
        (LayoutKind::Zigzag, StrategyKind::AllGather, 3),
    ] {
        check(gpu, |dim| causal(4, 2, dim), MeshSetup::new(kind, strategy, (ranks, 1)), [0, 0]);
    }
}

#[test]
fn rows_and_queries_travel_without_the_cpu() {
    let Some((gpu, _alone)) = gpu() else { return };
    let window = |dim| Problem::new(1, 90, 4, 2, dim, Mask::causal().window(Some(20), None));
    for kind in [LayoutKind::Contiguous, LayoutKind::Striped(4)] {
        check(gpu, window, MeshSetup::new(kind, StrategyKind::Halo, (3, 1)), [0, 0]);
    }
    let few = |dim| Problem::cross(1, 20, 90, 4, 1, dim, Mask::causal_bottom_right());
    check(gpu, few, MeshSetup::new(LayoutKind::Contiguous, StrategyKind::PassQ, (4, 1)), [0, 0]);
}

#[test]
fn tokens_become_heads_without_the_cpu() {
    let Some((gpu, _alone)) = gpu() else { return };
    // Some key-value heads divide by the members, some are fewer than the members.
    for (heads, kv_heads, grid) in [(4, 2, (1, 2)), (6, 2, (1, 3)), (4, 1, (2, 2)), (6, 3, (2, 3))] {
        let on = MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, grid);
        check(gpu, |dim| causal(heads, kv_heads, dim), on, [0, 0]);
    }
    let on = MeshSetup { head_chunks: 2, ..MeshSetup::new(LayoutKind::Contiguous, StrategyKind::AllGather, (2, 2)) };
    check(gpu, |dim| causal(8, 4, dim), on, [0, 0]);
}

#[test]
fn tensors_of_16_bits_travel_as_they_are() {
    let Some((gpu, _alone)) = gpu() else { return };
    for stored in [Wire::Bf16, Wire::F16] {
        for grid in [(3, 1), (2, 2)] {
            let on = MeshSetup { stored, wire: stored, ..MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, grid) };
            check(gpu, |dim| causal(4, 2, dim), on, [0, 0]);
        }
    }
    let strided = |dim| Problem { strided: true, ..causal(4, 2, dim) };
    let on = MeshSetup { stored: Wire::Bf16, ..MeshSetup::new(LayoutKind::Zigzag, StrategyKind::PassQ, (2, 1)) };
    check(gpu, strided, on, [0, 0]);
}

#[test]
fn scores_of_all_kinds() {
    let Some((gpu, _alone)) = gpu() else { return };
    for grid in [(2, 1), (2, 2)] {
        let on = MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, grid);
        // With sinks, maximum, sum and delta of all queries and heads are copied to the CPU.
        check(gpu, |dim| causal(4, 2, dim).with_softcap().with_sinks(), on, [0, 3 * 4 * 4 * 100]);
        check(gpu, |dim| causal(4, 2, dim).with_alibi().with_dropout(), on, [0, 0]);
        // With buckets, their gradients [H, 12] are copied to the CPU, for the heads of each rank.
        let tables = 4 * 4 * 12 * grid.0 as u64;
        check(gpu, |dim| causal(4, 2, dim).with_buckets().with_bias(1), on, [0, tables]);
        check(gpu, |dim| causal(4, 2, dim).with_bias(4), on, [0, 0]);
        // A bias travels with its queries.
        let on = MeshSetup {
            stored: Wire::Bf16,
            wire: Wire::Bf16,
            ..MeshSetup::new(LayoutKind::Zigzag, StrategyKind::PassQ, grid)
        };
        check(gpu, |dim| causal(4, 2, dim).with_bias(4), on, [0, 0]);
    }
}

/// If a transport cannot pass on GPU memory, messages go through the memory of the CPU, with the same answer.
#[test]
fn messages_between_processes_go_through_the_cpu() {
    let Some((gpu, _alone)) = gpu() else { return };
    for (grid, strategy) in [((3, 1), StrategyKind::Ring), ((2, 2), StrategyKind::PassQ)] {
        let problem = causal(4, 2, 16);
        let on = MeshSetup { stored: Wire::F16, wire: Wire::F16, ..MeshSetup::new(LayoutKind::Zigzag, strategy, grid) };
        let inputs = problem.inputs_of(on.stored, 3);
        let wanted = problem.reference(&inputs);
        let ranks = on.grid.size().expect("a small grid");
        let layout = Layout::new(on.kind, &problem.k_documents, ranks).expect("a layout");
        let schedule = Schedule::new(strategy, &layout, &layout, &problem.mask, on.grid).expect("a schedule");
        let outs = threads::run(ranks, threads::Options::default(), |comm| {
            let rank = comm.rank();
            let group = Group::new(as_processes(comm), on.grid, gpu.kernel()?)?.with_wire(on.wire);
            let shard = |values: &[f32], heads: usize| layout.shard(rank, values, heads * 16);
            let (q, k, v) = (shard(&inputs.q, 4)?, shard(&inputs.k, 2)?, shard(&inputs.v, 2)?);
            let view = |values, heads| View::new(values, layout.tokens(rank), heads, 16).expect("its size");
            let local = Inputs::new(view(&q, 4), view(&k, 2), view(&v, 2), &problem.score);
            Ok::<_, Error>(attention::forward(&group, &schedule, &local)?.out)
        });
        let mut out = vec![0.0; wanted.out.len()];
        for (rank, part) in outs.expect("runs").iter().enumerate() {
            layout.unshard(rank, part, 4 * 16, &mut out).expect("its rows");
        }
        assert!(relative_l2(&out, &wanted.out) <= 1e-5, "{on:?}");
    }
}

/// Blocks from another GPU, or from a rank on the CPU, are copied to the device that uses them.
#[test]
fn ranks_on_different_devices_share_a_sequence() {
    let Some((gpu, _alone)) = gpu() else { return };
    let second = Gpu::count().is_ok_and(|count| count > 1).then(|| Gpu::open(1).expect("a GPU that works"));
    let problem = causal(4, 2, 16);
    for (grid, strategy) in [((4, 1), StrategyKind::Ring), ((2, 2), StrategyKind::Ring), ((4, 1), StrategyKind::PassQ)]
    {
        let on =
            MeshSetup { stored: Wire::Bf16, wire: Wire::Bf16, ..MeshSetup::new(LayoutKind::Zigzag, strategy, grid) };
        let inputs = problem.inputs_of(on.stored, 3);
        let turn = AtomicUsize::new(0);
        let kernel = || match (turn.fetch_add(1, Ordering::Relaxed) % 3, &second) {
            (0, _) => Ok(Kernel::new(1)),
            (1, Some(second)) => second.kernel(),
            _ => gpu.kernel(),
        };
        let got = problem.on_mesh_by(&inputs, on, &kernel, &|group, schedule, local, d_out| {
            let forward = attention::forward(group, schedule, local)?;
            let gradients = attention::backward(group, schedule, local, &forward, d_out)?;
            Ok((forward, gradients, [0; 2]))
        });
        let got = got.unwrap_or_else(|error| panic!("{on:?}: {error}"));
        // If the CPU multiplies bf16, it rounds weights to bf16.
        if let Some((name, error)) = problem.reference(&inputs).difference(&got, 8e-3) {
            panic!("{on:?}: {name} differs by {error:e}");
        }
    }
}

#[test]
fn a_step_of_decoding_copies_no_tensor() {
    let Some((gpu, _alone)) = gpu() else { return };
    for (ranks, merge) in [(1, Merge::AllGather), (3, Merge::AllGather), (4, Merge::Tree)] {
        let mut tables = None;
        for dim in [8, 32] {
            let problem = Problem::cross(1, 1, 150, 4, 2, dim, Mask::causal_bottom_right());
            let inputs = problem.inputs(5);
            let wanted = problem.reference(&inputs);
            let layout = Layout::new(LayoutKind::Striped(16), &problem.k_documents, ranks).expect("ranks");
            let query = [Run { document: 0, start: 0, len: 1, step: 1 }];
            let run = |comm: std::sync::Arc<dyn ringspan::comm::Communicator>| {
                let rank = comm.rank();
                let group = Group::new(comm.clone(), (ranks, 1), gpu.kernel()?)?;
                let kernel = group.kernel();
                let (k, v) = (layout.shard(rank, &inputs.k, 2 * dim)?, layout.shard(rank, &inputs.v, 2 * dim)?);
                let hold =
                    |values, tokens, heads| kernel.to_device(View::new(values, tokens, heads, dim).expect("its size"));
                let (q, k, v) =
                    (hold(&inputs.q, 1, 4)?, hold(&k, layout.tokens(rank), 2)?, hold(&v, layout.tokens(rank), 2)?);
                let local = Inputs::new(q.view(), k.view(), v.view(), &problem.score);
                let tokens = Tokens { queries: &query, keys: layout.runs(rank), seq_lens: (1, 150) };
                let count = || comm.barrier().and_then(|()| Ok((gpu.copied(), comm.barrier()?).0));
                let before = count()?;
                let (out, statistics) = on_device::decode(&group, &problem.mask, &tokens, &local, merge)?;
                let after = count()?;
                let lse = statistics.to_host(kernel)?.lse();
                Ok::<_, Error>((kernel.to_host(out)?, lse, (after.0 - before.0, after.1 - before.1)))
            };
            let answers = threads::run(ranks, threads::Options::default(), run).expect("decodes");
            for (out, lse, (up, down)) in answers {
                assert!(relative_l2(&out, &wanted.out) <= 1e-5 && relative_l2(&lse, &wanted.lse) <= 1e-5, "{ranks}");
                assert_eq!((*tables.get_or_insert(up), 0), (up, down), "bytes copied, {ranks} ranks, {merge:?}");
            }
        }
    }
}
