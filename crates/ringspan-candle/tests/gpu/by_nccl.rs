//! Tests of ranks whose tensors are sent by NCCL, as between processes. Threads stand for the processes, with a
//! communicator that takes no tensors on GPUs. The results have the same bits as on ranks that hand their tensors over.

use crate::ranks::{MESHES, MakeComm, Mesh, collectives, collectives_of, on_ranks, sums_in_order};
use crate::{gpu, numbers, random, rounding};
use candle_core::{DType, Result, Tensor};
use ringspan::Error;
use ringspan::comm::{Communicator, threads};
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::{RankDevice, collective};
use ringspan_cuda::Gpu;
use ringspan_cuda::nccl::{self, Options};
use ringspan_testing::comm::as_processes;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type Comm = Arc<dyn Communicator>;

const SOON: Duration = Duration::from_secs(120);

/// The first GPU, if NCCL is installed and lets several ranks share a GPU.
fn shared() -> Option<RankDevice> {
    let device = gpu()?;
    if let Err(error) = nccl::version() {
        println!("skipped: {error}");
        return None;
    }
    if std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").as_deref() != Ok("1") {
        println!("skipped: ranks share a GPU only where NCCL_MULTI_RANK_GPU_ENABLE=1");
        return None;
    }
    Some(device)
}

fn kernel_gpu(device: &RankDevice) -> Gpu {
    Gpu::of(&device.kernel(1).expect("a stream")).expect("a GPU").clone()
}

fn connected(comm: Comm, gpu: &Gpu) -> Result<Comm> {
    let options = Options { deadline: SOON, shared_gpus: true };
    nccl::over(&*as_processes(comm), gpu, options).map_err(candle_core::Error::wrap)
}

#[test]
fn collectives_by_nccl_have_the_bits_of_copies_and_pass_no_tensor_through_the_cpu() {
    let Some(gpu) = shared() else { return };
    let shared = kernel_gpu(&gpu);
    for gpu in [gpu.clone(), rounding(&gpu)] {
        // The underlying communicator sends only words that describe tensors, equally many for any width.
        let beneath = [3, 40].map(|width| {
            let wanted = collectives(&gpu, width, &Ok);
            let (before, bytes) = (shared.copied(), Mutex::new(vec![0; 3]));
            let got = on_ranks(3, |comm| {
                let (rank, nccl_comm) = (comm.rank(), connected(comm.clone(), &shared)?);
                let connected = comm.bytes_sent();
                let results = collectives_of(&gpu, width, &nccl_comm)?;
                bytes.lock().expect("no panic under it")[rank] = comm.bytes_sent() - connected;
                Ok(results)
            });
            assert_eq!(got, wanted, "rows of {width} in {}", gpu.precision());
            assert_eq!(shared.copied(), before, "bytes copied to the GPU and from it");
            bytes.into_inner().expect("no panic under it")
        });
        assert_eq!(beneath[0], beneath[1], "bytes beneath, in {}", gpu.precision());
    }
    let [got, wanted] = sums_in_order(&gpu, &|comm| connected(comm, &shared));
    assert_eq!(got, wanted, "sums are added in rank order");
}

#[test]
fn attention_by_nccl_has_the_bits_of_copies_and_passes_no_tensor_through_the_cpu() {
    let Some(gpu) = shared() else { return };
    let shared = kernel_gpu(&gpu);
    let make_comm: MakeComm = &|comm| connected(comm, &shared);
    // The meshes cover blocks around a ring, queries sent forth and back, and heads exchanged in addition to a ring.
    let meshes = MESHES.into_iter().filter(|(.., grid)| [(3, 1), (2, 1), (2, 2)].contains(grid));
    for (kind, strategy, grid) in meshes {
        let mesh = Mesh::new(kind, strategy, grid);
        let wanted = mesh.run(&gpu);
        assert_eq!(mesh.run_by(&gpu, make_comm), wanted, "{mesh:?}: results, and bytes copied");
        if grid == (2, 2) {
            let again = Mesh { again: Some(Storage::F32), ..mesh };
            assert_eq!(again.run_by(&gpu, make_comm), wanted, "{mesh:?}, again");
            let gpu = rounding(&gpu);
            assert_eq!(mesh.run_by(&gpu, make_comm), mesh.run(&gpu), "{mesh:?} in bf16");
        }
    }
}

/// A tensor is sent after the work that candle has started on it, even if nothing waited for this work, and before later
/// writes to it.
#[test]
fn collectives_are_ordered_with_candles_work_before_and_after() {
    let Some(gpu) = shared() else { return };
    let shared = kernel_gpu(&gpu);
    let run = |make_comm: MakeComm, writes: bool| {
        on_ranks(3, |comm| {
            let (own, comm) = (comm.rank(), make_comm(comm)?);
            let mut x = random(&[6, 5], 5 + own as u64).to_device(gpu.tensors())?;
            for _ in 0..3 {
                let (a, b) = ((&x * 1.5)?, x.sqr()?.affine(0.5, 0.1)?);
                let sum = collective::all_reduce(&comm, &a)?;
                let scattered = collective::all_to_all(&comm, &b, &[1, 2, 3], &[own + 1; 3])?;
                if writes {
                    // Nothing else reads these tensors: their elements have been sent.
                    a.zero_set()?;
                    b.zero_set()?;
                }
                let all = collective::all_gather(&comm, &(scattered * 2.0)?)?;
                x = (all.narrow(0, 3 * own, 6)? + sum)?.affine(0.2, 0.0)?;
            }
            Ok(numbers(&x))
        })
    };
    assert_eq!(run(&|comm| connected(comm, &shared), true), run(&Ok, false));
}

/// Each rank has a GPU of its own, as NCCL expects.
#[test]
fn collectives_go_from_gpu_to_gpu() {
    let Some(first) = gpu() else { return };
    if nccl::version().is_err() || Gpu::count() == Ok(1) {
        println!("no NCCL, or one GPU on this machine: ranks on two were not tried");
        return;
    }
    let second = RankDevice::gpu(1).expect("a GPU that works");
    let run = |by_nccl: bool| {
        on_ranks(2, |comm| {
            let (own, device) = (comm.rank(), [&first, &second][comm.rank()]);
            let options = Options { deadline: SOON, ..Options::default() };
            let over = |comm: Comm| nccl::over(&*as_processes(comm), &kernel_gpu(device), options);
            let comm = if by_nccl { over(comm).map_err(candle_core::Error::wrap)? } else { comm };
            let x = device.parameter(&random(&[4, 3], own as u64))?;
            let all = collective::all_gather(&comm, &x)?;
            assert!(all.device().same_device(device.tensors()));
            let sum = collective::reduce_scatter(&comm, &x, vec![1, 3])?;
            Ok([numbers(&all), numbers(&sum)].concat())
        })
    };
    assert_eq!(run(true), run(false));
}

/// Tests another width, another type and other counts: the shapes of tensors from other processes are not known.
#[test]
fn ranks_that_disagree_get_an_error_in_time() {
    let Some(gpu) = shared() else { return };
    let shared = kernel_gpu(&gpu);
    let tensor = |shape: &[usize], dtype| random(shape, 3).to_device(gpu.tensors())?.to_dtype(dtype);
    let of = |odd: bool| if odd { (4, DType::BF16) } else { (3, DType::F32) };
    type Call<'a> = &'a (dyn Fn(&Comm, bool) -> Result<Tensor> + Sync);
    let calls: [(&str, Call); 6] = [
        ("all_reduce of other widths", &|comm, odd| {
            collective::all_reduce(comm, &tensor(&[2, of(odd).0], DType::F32)?)
        }),
        ("all_reduce of other types", &|comm, odd| collective::all_reduce(comm, &tensor(&[2, 3], of(odd).1)?)),
        ("all_gather of other widths", &|comm, odd| {
            collective::all_gather_of(comm, &tensor(&[2, of(odd).0], DType::F32)?, vec![2; 3])
        }),
        ("all_gather of other counts", &|comm, odd| {
            let own = comm.rank();
            let counts = (0..3).map(|rank| if odd && rank != own { 1 } else { 2 }).collect();
            collective::all_gather_of(comm, &tensor(&[2, 3], DType::F32)?, counts)
        }),
        ("reduce_scatter of other counts", &|comm, odd| {
            let counts = if odd { vec![0, 1, 2] } else { vec![1; 3] };
            collective::reduce_scatter(comm, &tensor(&[3, 3], DType::F32)?, counts)
        }),
        ("all_to_all of other counts", &|comm, odd| {
            let send = if odd { [0, 0, 3] } else { [1; 3] };
            collective::all_to_all(comm, &tensor(&[3, 3], DType::F32)?, &send, &[1; 3])
        }),
    ];
    for (what, call) in calls {
        let start = Instant::now();
        let ended = threads::run(3, threads::Options::default(), |comm| {
            let rank = comm.rank();
            let other = |error: candle_core::Error| Error::Layout(error.to_string());
            call(&connected(comm, &shared).map_err(other)?, rank == 1).map(drop).map_err(other)
        });
        let error = ended.expect_err(what).to_string();
        assert!(error.contains("sent") && error.contains("expected") && error.contains("rank "), "{what}: {error}");
        assert!(start.elapsed() < SOON / 4, "{what} took {:?}", start.elapsed());
    }
}
