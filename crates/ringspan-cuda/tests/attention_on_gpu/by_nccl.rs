//! Ranks whose blocks go by NCCL, as between processes: here ranks are threads, and the underlying communicator refuses
//! device memory.

use super::*;
use ringspan::comm::Communicator;
use ringspan_cuda::nccl::{self, Options};
use std::sync::Arc;
use std::time::{Duration, Instant};

type Comm = Arc<dyn Communicator>;

const SOON: Duration = Duration::from_secs(120);

/// The first GPU, if NCCL is installed and allows ranks to share it.
fn shared() -> Option<(&'static Gpu, MutexGuard<'static, ()>)> {
    let (gpu, alone) = gpu()?;
    if let Err(error) = nccl::version() {
        println!("skipped: {error}");
        return None;
    }
    if std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").as_deref() != Ok("1") {
        println!("skipped: ranks share a GPU only where NCCL_MULTI_RANK_GPU_ENABLE=1");
        return None;
    }
    Some((gpu, alone))
}

fn connected(comm: Comm, gpu: &Gpu, deadline: Duration) -> Result<Comm, Error> {
    nccl::over(&*as_processes(comm), gpu, Options { deadline, shared_gpus: true })
}

fn check_by_nccl(gpu: &Gpu, problem: impl Fn(usize) -> Problem, on: MeshSetup) {
    check_with(gpu, problem, on, [0, 0], &|comm| Ok((connected(comm, gpu, SOON)?, gpu.kernel()?)));
}

#[test]
fn one_rank_connects_and_ends() {
    let Some((gpu, _alone)) = gpu() else { return };
    if let Err(error) = nccl::version() {
        println!("skipped: {error}");
        return;
    }
    let answers = threads::run(1, threads::Options::default(), |comm| {
        assert_eq!(nccl::obstacle(&*comm, gpu, &Options::default())?, None);
        let comm = nccl::over(&*comm, gpu, Options { deadline: SOON, ..Options::default() })?;
        let group = Group::new(comm.clone(), (1, 1), gpu.kernel()?)?;
        let problem = causal(4, 2, 16);
        let inputs = problem.inputs(3);
        let layout = Layout::new(LayoutKind::Contiguous, &problem.k_documents, 1)?;
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &problem.mask, (1, 1))?;
        let view = |values, heads| View::new(values, 100, heads, 16).expect("its size");
        let local = Inputs::new(view(&inputs.q, 4), view(&inputs.k, 2), view(&inputs.v, 2), &problem.score);
        let out = attention::forward(&group, &schedule, &local)?.out;
        comm.barrier()?;
        Ok::<_, Error>(relative_l2(&out, &problem.reference(&inputs).out))
    });
    assert!(answers.expect("runs")[0] <= 1e-5);
}

#[test]
fn blocks_go_round_rings_in_both_directions() {
    let Some((gpu, _alone)) = shared() else { return };
    for (kind, strategy, ranks) in [
        (LayoutKind::Zigzag, StrategyKind::Ring, 4),
        (LayoutKind::Contiguous, StrategyKind::Ring, 3),
        (LayoutKind::Striped(1), StrategyKind::BidirectionalRing, 4),
        (LayoutKind::Zigzag, StrategyKind::AllGather, 3),
    ] {
        check_by_nccl(gpu, |dim| causal(4, 2, dim), MeshSetup::new(kind, strategy, (ranks, 1)));
    }
}

#[test]
fn rows_queries_and_heads_go_there_and_back() {
    let Some((gpu, _alone)) = shared() else { return };
    let window = |dim| Problem::new(1, 90, 4, 2, dim, Mask::causal().window(Some(20), None));
    check_by_nccl(gpu, window, MeshSetup::new(LayoutKind::Striped(4), StrategyKind::Halo, (3, 1)));
    check_by_nccl(gpu, |dim| causal(4, 2, dim), MeshSetup::new(LayoutKind::Zigzag, StrategyKind::PassQ, (3, 1)));
    for (heads, kv_heads, grid) in [(4, 2, (1, 2)), (4, 1, (2, 2)), (6, 3, (2, 3))] {
        check_by_nccl(
            gpu,
            |dim| causal(heads, kv_heads, dim),
            MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, grid),
        );
    }
    let on = MeshSetup { head_chunks: 2, ..MeshSetup::new(LayoutKind::Contiguous, StrategyKind::AllGather, (2, 2)) };
    check_by_nccl(gpu, |dim| causal(8, 4, dim), on);
}

#[test]
fn blocks_of_16_bits_travel_as_they_are() {
    let Some((gpu, _alone)) = shared() else { return };
    for (stored, grid) in [(Wire::Bf16, (3, 1)), (Wire::F16, (2, 2))] {
        let on = MeshSetup { stored, wire: stored, ..MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, grid) };
        check_by_nccl(gpu, |dim| causal(4, 2, dim), on);
    }
}

#[test]
fn each_rank_has_a_gpu_of_its_own() {
    let Some((gpu, _alone)) = gpu() else { return };
    if nccl::version().is_err() || Gpu::count() == Ok(1) {
        println!("skipped: no NCCL, or one GPU");
        return;
    }
    let second = Gpu::open(1).expect("a GPU that works");
    let of = |rank: usize| if rank == 0 { gpu } else { &second };
    let problem = causal(4, 2, 16);
    for strategy in [StrategyKind::Ring, StrategyKind::PassQ] {
        let on = MeshSetup::new(LayoutKind::Zigzag, strategy, (2, 1));
        let inputs = problem.inputs(3);
        let make_rank = |comm: Comm| {
            let gpu = of(comm.rank());
            let options = Options { deadline: SOON, ..Options::default() };
            assert_eq!(nccl::obstacle(&*comm, gpu, &options)?, None);
            Ok((nccl::over(&*as_processes(comm), gpu, options)?, gpu.kernel()?))
        };
        let got = problem.on_mesh_with(&inputs, on, &make_rank, &|group, schedule, local, d_out| {
            let forward = attention::forward(group, schedule, local)?;
            let gradients = attention::backward(group, schedule, local, &forward, d_out)?;
            Ok((forward, gradients, [0; 2]))
        });
        let got = got.unwrap_or_else(|error| panic!("{on:?}: {error}"));
        if let Some((name, error)) = problem.reference(&inputs).difference(&got, 1e-5) {
            panic!("{on:?}: {name} differs by {error:e}");
        }
    }
}

#[test]
fn a_step_of_decoding_merges_states_by_nccl() {
    let Some((gpu, _alone)) = shared() else { return };
    let problem = Problem::cross(1, 1, 150, 4, 2, 16, Mask::causal_bottom_right());
    let inputs = problem.inputs(5);
    let wanted = problem.reference(&inputs);
    for (ranks, merge) in [(3, Merge::AllGather), (4, Merge::Tree)] {
        let layout = Layout::new(LayoutKind::Striped(16), &problem.k_documents, ranks).expect("ranks");
        let query = [Run { document: 0, start: 0, len: 1, step: 1 }];
        let answers = threads::run(ranks, threads::Options::default(), |comm| {
            let rank = comm.rank();
            let group = Group::new(connected(comm, gpu, SOON)?, (ranks, 1), gpu.kernel()?)?;
            let (k, v) = (layout.shard(rank, &inputs.k, 2 * 16)?, layout.shard(rank, &inputs.v, 2 * 16)?);
            let view = |values, tokens, heads| View::new(values, tokens, heads, 16).expect("its size");
            let (k, v) = (view(&k, layout.tokens(rank), 2), view(&v, layout.tokens(rank), 2));
            let local = Inputs::new(view(&inputs.q, 1, 4), k, v, &problem.score);
            let tokens = Tokens { queries: &query, keys: layout.runs(rank), seq_lens: (1, 150) };
            attention::decode(&group, &problem.mask, &tokens, &local, merge)
        });
        for (out, lse) in answers.expect("decodes") {
            assert!(relative_l2(&out, &wanted.out) <= 1e-5 && relative_l2(&lse, &wanted.lse) <= 1e-5, "{merge:?}");
        }
    }
}

#[test]
fn ranks_that_share_a_gpu_are_told_before_nccl_is() {
    let Some((gpu, _alone)) = gpu() else { return };
    if nccl::version().is_err() {
        println!("skipped: no NCCL");
        return;
    }
    let told = threads::run(2, threads::Options::default(), |comm| {
        let obstacle = nccl::obstacle(&*comm, gpu, &Options::default())?;
        let error = nccl::over(&*comm, gpu, Options::default()).err().map(|error| error.to_string());
        Ok::<_, Error>((obstacle, error))
    });
    for (obstacle, error) in told.expect("nobody fails") {
        let words = "ranks 0 and 1 share a GPU";
        assert!(obstacle.is_some_and(|text| text.contains(words)) && error.is_some_and(|text| text.contains(words)));
    }
}

/// One rank does not call attention, because it fails or sleeps: the others return errors that name it.
#[test]
fn a_rank_that_fails_or_stops_is_named_within_the_deadline() {
    let Some((gpu, _alone)) = shared() else { return };
    let problem = causal(4, 2, 8);
    let inputs = problem.inputs(3);
    let layout = Layout::new(LayoutKind::Zigzag, &problem.k_documents, 3).expect("a layout");
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &problem.mask, (3, 1)).expect("a schedule");
    for stops in [false, true] {
        let deadline = Duration::from_secs(if stops { 2 } else { 60 });
        let texts = Mutex::new(vec![String::new(); 3]);
        let start = Instant::now();
        let _ = threads::run(3, threads::Options::default(), |comm| {
            let rank = comm.rank();
            let run = |comm: Comm| -> Result<(), Error> {
                let comm = connected(comm, gpu, deadline)?;
                let group = Group::new(comm.clone(), (3, 1), gpu.kernel()?)?;
                let (k, v) = (layout.shard(rank, &inputs.k, 2 * 8)?, layout.shard(rank, &inputs.v, 2 * 8)?);
                let q = layout.shard(rank, &inputs.q, 4 * 8)?;
                let view = |values, heads| View::new(values, layout.tokens(rank), heads, 8).expect("its size");
                let local = Inputs::new(view(&q, 4), view(&k, 2), view(&v, 2), &problem.score);
                attention::forward(&group, &schedule, &local)?;
                comm.barrier()?;
                match (rank, stops) {
                    (1, false) => return Err(Error::Layout("chosen".into())),
                    (1, true) => std::thread::sleep(2 * deadline),
                    _ => (),
                }
                attention::forward(&group, &schedule, &local).map(drop)
            };
            let result = run(comm);
            let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
            texts.lock().expect("no panic under it")[rank] = text;
            result
        });
        assert!(start.elapsed() < Duration::from_secs(30), "took {:?}", start.elapsed());
        let texts = texts.into_inner().expect("no panic under it");
        let words = if stops { "for rank 1, which" } else { "rank 1 failed: layout: chosen" };
        // The first rank that reaches its deadline ends the others.
        let named = texts.iter().filter(|text| text.contains(words)).count();
        assert!(named >= if stops { 1 } else { 2 } && texts.iter().all(|text| !text.is_empty()), "{texts:?}");
        let named = [0, 2].iter().all(|rank| texts[*rank].contains(&format!("rank {rank}")));
        assert!(named && texts[0].contains("rank 1"), "{texts:?}");
    }
}
