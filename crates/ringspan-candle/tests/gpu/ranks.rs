//! Tests of operations over ranks: attention, decoding and collectives of tensors on a GPU that the ranks share.

use crate::{F32, assert_equal, assert_within, bound, gpu, numbers, random, results, rounding};
use candle_core::{Device, Result, Tensor};
use ringspan::attention::{Group, Tokens};
use ringspan::comm::{Communicator, threads};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Mask, Run, Score, StrategyKind};
use ringspan_candle::attention::SavedAttention;
use ringspan_candle::decode::decode;
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::{Attend, AttentionInputs, Context, RankDevice, collective};
use ringspan_cuda::Gpu;
use ringspan_testing::comm::as_processes;
use std::sync::Arc;

/// The values and gradients of each rank.
pub(crate) type OfRanks = Vec<Vec<Vec<f32>>>;

/// The numbers of bytes that the kernels of all ranks copied to the GPU and from it. Candle's copies are not counted; but if
/// candle copied a tensor to the CPU for attention, a kernel would copy it back.
pub(crate) type Copied = (u64, u64);

/// Wraps the communicator of a rank into the one that it uses.
pub(crate) type MakeComm<'a> = &'a (dyn Fn(Arc<dyn Communicator>) -> Result<Arc<dyn Communicator>> + Sync);

/// Runs `rank` on each of several ranks, and returns their results.
pub(crate) fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync) -> Vec<T> {
    threads::run(ranks, threads::Options::default(), |comm| rank(comm).map_err(Wrapped))
        .map_err(|error| error.0)
        .expect("ranks")
}

/// An error of candle, as a rank returns it.
struct Wrapped(candle_core::Error);

impl From<ringspan::Error> for Wrapped {
    fn from(error: ringspan::Error) -> Self {
        Self(candle_core::Error::wrap(error))
    }
}

impl std::fmt::Display for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Runs `f`, and returns its result with the numbers of bytes that kernels copied during it.
fn counted<T>(device: &RankDevice, f: impl FnOnce() -> T) -> (T, Copied) {
    let gpu = Gpu::of(&device.kernel(1).expect("a stream")).cloned();
    let copied = || gpu.as_ref().map_or((0, 0), Gpu::copied);
    let before = copied();
    let result = f();
    let after = copied();
    (result, (after.0 - before.0, after.1 - before.1))
}

#[track_caller]
pub(crate) fn assert_ranks_within(bound: f64, what: &str, got: &OfRanks, wanted: &OfRanks) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (rank, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert_eq!(got.len(), wanted.len(), "{what}, rank {rank}");
        for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            assert_within(bound, &format!("{what}, rank {rank}, result {index}"), got, wanted);
        }
    }
}

#[track_caller]
fn assert_ranks_equal(what: &str, got: &OfRanks, wanted: &OfRanks) {
    assert_ranks_within(F32, what, got, wanted);
}

pub(crate) fn group(comm: Arc<dyn Communicator>, grid: (usize, usize), kernel: Kernel) -> Result<Arc<Group>> {
    Group::new(comm, grid, kernel).map(Arc::new).map_err(candle_core::Error::wrap)
}

/// The settings of one attention call on each rank of a mesh.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mesh {
    pub(crate) kind: LayoutKind,
    pub(crate) strategy: StrategyKind,
    pub(crate) grid: (usize, usize),
    /// The width of heads.
    pub(crate) dim: usize,
    /// If set, the layer is recomputed, with the output stored in this type.
    pub(crate) again: Option<Storage>,
}

impl Mesh {
    pub(crate) fn new(kind: LayoutKind, strategy: StrategyKind, grid: (usize, usize)) -> Self {
        Self { kind, strategy, grid, dim: 8, again: None }
    }

    /// The output, and the gradient of the tensor of which q, k and v are views.
    pub(crate) fn run(&self, device: &RankDevice) -> (OfRanks, Copied) {
        self.run_by(device, &Ok)
    }

    /// Like [`run`](Self::run), with communicators that `means` wraps.
    pub(crate) fn run_by(&self, device: &RankDevice, make_comm: MakeComm) -> (OfRanks, Copied) {
        let documents = Documents::packed(&[31, 19, 40]);
        let rank = |comm: Arc<dyn Communicator>| {
            let (own, comm) = (comm.rank(), make_comm(comm)?);
            let layout = Layout::new(self.kind, &documents, comm.size()).map_err(candle_core::Error::wrap)?;
            let rows = layout.tokens(own);
            let kernel = device.kernel(1).map_err(candle_core::Error::wrap)?;
            let context = Context::new(group(comm, self.grid, kernel)?, Arc::new(layout), self.strategy)?;
            // The tensor is laid out like the output of one projection for all three: a token's heads are consecutive.
            let projected = random(&[rows, 8, self.dim], own as u64 + 1);
            Ok(results(device, &[projected], &|_, x| {
                // On the GPU the views are read with their strides and offsets; on the CPU they are copied first.
                let part = |from, heads| {
                    let part = x[0].narrow(1, from, heads)?;
                    if device.tensors().is_cpu() { part.force_contiguous() } else { Ok(part) }
                };
                let (q, k, v) = (part(0, 4)?, part(4, 2)?, part(6, 2)?);
                let (mask, score) = (Mask::causal(), Score::new(0.3));
                let Some(storage) = self.again else {
                    return context.layer_attention(0, &AttentionInputs::new(&q, &k, &v), &mask, &score);
                };
                let mut memory = SavedAttention::new(storage);
                let mut call =
                    || context.attention_saving(&mut memory, 0, &AttentionInputs::new(&q, &k, &v), &mask, &score);
                // The graph of the first computation is dropped before the recomputation.
                drop(call()?);
                call()
            }))
        };
        counted(device, || on_ranks(self.grid.0 * self.grid.1, rank))
    }
}

pub(crate) const MESHES: [(LayoutKind, StrategyKind, (usize, usize)); 7] = [
    (LayoutKind::Contiguous, StrategyKind::Ring, (1, 1)),
    (LayoutKind::Zigzag, StrategyKind::Ring, (3, 1)),
    (LayoutKind::Striped(4), StrategyKind::BidirectionalRing, (4, 1)),
    (LayoutKind::Contiguous, StrategyKind::PassQ, (2, 1)),
    (LayoutKind::Zigzag, StrategyKind::AllGather, (1, 2)),
    (LayoutKind::Zigzag, StrategyKind::Ring, (1, 4)),
    (LayoutKind::Zigzag, StrategyKind::Ring, (2, 2)),
];

#[test]
fn attention_matches_the_cpu_and_copies_no_tensor_to_it() {
    let Some(gpu) = gpu() else { return };
    for (kind, strategy, grid) in MESHES {
        let mut tables = None;
        // Heads of any width have the same tiles, so only copies of whole tensors would make these counts differ.
        for dim in [8, 24] {
            let mesh = Mesh { dim, ..Mesh::new(kind, strategy, grid) };
            let what = format!("{mesh:?}");
            let (wanted, _) = mesh.run(&RankDevice::CPU);
            let (got, (up, down)) = mesh.run(&gpu);
            assert_ranks_equal(&what, &got, &wanted);
            assert_eq!((up, down), (*tables.get_or_insert(up), 0), "{what}: bytes copied to the GPU and from it");
            if dim == 8 {
                let (got, copied) = Mesh { again: Some(Storage::F32), ..mesh }.run(&gpu);
                assert_ranks_equal(&format!("{what}, again"), &got, &wanted);
                assert_eq!(copied, (up, 0), "{what}, again: bytes copied to the GPU and from it");
            }
        }
    }
}

#[test]
fn what_attention_keeps_may_be_rounded() {
    let Some(gpu) = gpu() else { return };
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    for grid in [(1, 1), (2, 2)] {
        let mesh = Mesh::new(LayoutKind::Zigzag, StrategyKind::Ring, grid);
        let (whole, copied) = mesh.run(&gpu);
        let (rounded, also_copied) = Mesh { again: Some(Storage::Bf16), ..mesh }.run(&gpu);
        assert_eq!(copied, also_copied, "{mesh:?}");
        for (rounded, whole) in rounded.iter().flatten().zip(whole.iter().flatten()) {
            let off = norm(&mut rounded.iter().zip(whole).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            let all = norm(&mut whole.iter().map(|x| f64::from(*x)));
            assert!(off > 0.0 && off < 4e-3 * all, "{mesh:?}: off by {:e}", off / all);
        }
    }
}

/// Attention reads its inputs after the work that candle has started on them, even if nothing waited for it, and before later
/// writes to them.
#[test]
fn attention_is_ordered_with_candles_work_before_and_after() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let run = |device: &RankDevice| -> Vec<Vec<f32>> {
        on_ranks(2, |comm| {
            let own = comm.rank() as u64;
            let layout =
                Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 80), 2).map_err(candle_core::Error::wrap)?;
            let kernel = device.kernel(1).map_err(candle_core::Error::wrap)?;
            let context = Context::new(group(comm, (2, 1), kernel)?, Arc::new(layout), StrategyKind::Ring)?;
            let mut x = random(&[40, 4, 8], 5 + own).to_device(device.tensors())?;
            for _ in 0..4 {
                let (q, k) = ((&x * 1.5)?, x.sqr()?.affine(0.5, 0.1)?);
                let out =
                    context.layer_attention(0, &AttentionInputs::new(&q, &k, &x), &Mask::causal(), &Score::new(0.3))?;
                q.zero_set()?;
                k.zero_set()?;
                x = ((out * 2.0)? + &q)?;
            }
            Ok(numbers(&x))
        })
    };
    for (got, wanted) in run(&gpu).iter().zip(&run(&RankDevice::CPU)) {
        assert_equal("a chain of layers", got, wanted);
    }
    Ok(())
}

#[test]
fn a_kernel_on_the_cpu_takes_tensors_there_and_one_on_another_gpu_refuses_them() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let call = |device: &RankDevice, kernel: Kernel| -> Result<Vec<Vec<f32>>> {
        let comm = on_ranks(1, Ok).remove(0);
        let layout =
            Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 20), 1).map_err(candle_core::Error::wrap)?;
        let context = Context::new(group(comm, (1, 1), kernel)?, Arc::new(layout), StrategyKind::Ring)?;
        let inputs = [[20, 4, 8], [20, 2, 8], [20, 2, 8]].map(|shape| random(&shape, 3));
        let attend = |x: &[Tensor]| {
            context.layer_attention(0, &AttentionInputs::new(&x[0], &x[1], &x[2]), &Mask::causal(), &Score::new(0.3))
        };
        let there: Vec<Tensor> = inputs.iter().map(|x| x.to_device(device.tensors())).collect::<Result<_>>()?;
        attend(&there)?;
        Ok(results(device, &inputs, &|_, x| attend(x)))
    };
    let wanted = call(&RankDevice::CPU, Kernel::new(1))?;
    let mixed = [call(&gpu, Kernel::new(1))?, call(&RankDevice::CPU, gpu.kernel(1).expect("a stream"))?];
    for (got, wanted) in mixed.iter().flatten().zip(wanted.iter().chain(&wanted)) {
        assert_equal("tensors here, the kernel there", got, wanted);
    }
    if Gpu::count().is_ok_and(|count| count > 1) {
        let other = Gpu::open(1).and_then(|gpu| gpu.kernel()).expect("a GPU that works");
        let refused = call(&gpu, other).expect_err("of another GPU").to_string();
        assert!(refused.contains("GPU 1") && refused.contains("that lie on GPU 0"), "{refused}");
    }
    Ok(())
}

/// Decodes one step over a KV cache with spare room at its end, of which a rank may hold nothing.
#[test]
fn decoding_over_a_cache_on_the_gpu_copies_no_tensor_to_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (ranks, held) in [(1, 70), (3, 70), (3, 20)] {
        let mut tables = None;
        for dim in [8, 32] {
            let documents = Documents::batch(1, held);
            let layout = Layout::new(LayoutKind::Striped(16), &documents, ranks).map_err(candle_core::Error::wrap)?;
            let query = [Run { document: 0, start: held - 1, len: 1, step: 1 }];
            let run = |device: &RankDevice| {
                counted(device, || {
                    on_ranks(ranks, |comm| {
                        let (own, rows) = (comm.rank(), layout.tokens(comm.rank()));
                        let kernel = device.kernel(1).map_err(candle_core::Error::wrap)?;
                        let group = group(comm, (ranks, 1), kernel)?;
                        let on = |shape: &[usize], seed| device.parameter(&random(shape, seed));
                        let cache = |seed| -> Result<Tensor> {
                            let dtype = device.precision().dtype();
                            let room = Tensor::zeros((rows + 5, 2, dim), dtype, device.tensors())?;
                            if rows > 0 {
                                room.slice_set(&on(&[rows, 2, dim], seed + own as u64)?, 0, 0)?;
                            }
                            room.narrow(0, 0, rows)
                        };
                        let (q, k, v) = (on(&[1, 4, dim], 9)?, cache(20)?, cache(40)?);
                        let tokens = Tokens { queries: &query, keys: layout.runs(own), seq_lens: (held, held) };
                        let out = decode(
                            &group,
                            &Mask::causal(),
                            &tokens,
                            &AttentionInputs::new(&q, &k, &v),
                            &Score::new(0.3),
                        )?;
                        assert!(out.device().same_device(device.tensors()));
                        assert_eq!(out.dtype(), q.dtype());
                        Ok(numbers(&out))
                    })
                })
            };
            let (wanted, _) = run(&RankDevice::CPU);
            for gpu in [gpu.clone(), rounding(&gpu)] {
                let (got, (up, down)) = run(&gpu);
                for (got, wanted) in got.iter().zip(&wanted) {
                    let what = format!("{ranks} ranks, {held} tokens, {}", gpu.precision());
                    assert_within(bound(&gpu), &what, got, wanted);
                }
                assert_eq!((up, down), (*tables.get_or_insert(up), 0), "{ranks} ranks: bytes copied");
            }
        }
    }
    Ok(())
}

/// Values and gradients of all collectives, for rows of this width, on ranks with and without rows.
pub(crate) fn collectives(device: &RankDevice, width: usize, make_comm: MakeComm) -> OfRanks {
    on_ranks(3, |comm| collectives_of(device, width, &make_comm(comm)?))
}

/// Like [`collectives`], on one of three ranks.
pub(crate) fn collectives_of(device: &RankDevice, width: usize, comm: &Arc<dyn Communicator>) -> Result<Vec<Vec<f32>>> {
    let own = comm.rank();
    let input = |rows: usize| [random(&[rows, width], own as u64 + 7)];
    let gathered = results(device, &input(2 * own), &|_, x| collective::all_gather(comm, &x[0]));
    let summed = results(device, &input(2), &|_, x| collective::all_reduce(comm, &x[0]));
    let scattered = results(device, &input(5), &|_, x| collective::reduce_scatter(comm, &x[0], vec![3, 0, 2]));
    // Rank r sends r rows to each of the others, and none to itself.
    let others = |rows: [usize; 3]| [0, 1, 2].map(|rank| if rank == own { 0 } else { rows[rank] });
    let (send, receive) = (others([own; 3]), others([0, 1, 2]));
    let sent = results(device, &input(2 * own), &|_, x| {
        // The rows are those of a wider tensor, as a layer may have them.
        let x = Tensor::cat(&[&x[0], &x[0]], 1)?.narrow(1, 1, width + 1)?;
        collective::all_to_all(comm, &x, &send, &receive)
    });
    Ok([gathered, summed, scattered, sent].concat())
}

/// Sums of numbers whose result depends on the order of addition, on each of three ranks; and the sums in rank order.
pub(crate) fn sums_in_order(device: &RankDevice, make_comm: MakeComm) -> [Vec<Vec<f32>>; 2] {
    let all = [[1e8, -1e8, 1.0], [1.0, 1e8, -1e8], [3e7, 1.0, 1.0]];
    let sums = on_ranks(3, |comm| {
        let (own, comm) = (comm.rank(), make_comm(comm)?);
        let rows: Vec<f32> = all.iter().map(|of_ranks| of_ranks[own]).collect();
        let x = device.parameter(&Tensor::new(rows, &Device::Cpu)?.unsqueeze(1)?)?;
        let sum = collective::all_reduce(&comm, &x)?;
        Ok([numbers(&sum), numbers(&collective::reduce_scatter(&comm, &x, vec![1; 3])?)].concat())
    });
    let wanted = all.map(|[a, b, c]: [f32; 3]| a + b + c);
    [sums, (0..3).map(|rank| [&wanted[..], &wanted[rank..=rank]].concat()).collect()]
}

#[test]
fn sums_are_added_in_rank_order() {
    let Some(gpu) = gpu() else { return };
    for device in [RankDevice::CPU, gpu] {
        let [got, wanted] = sums_in_order(&device, &Ok);
        assert_eq!(got, wanted, "{device:?}");
    }
}

#[test]
fn collectives_have_the_results_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let wanted = collectives(&RankDevice::CPU, 3, &Ok);
    for gpu in [gpu.clone(), rounding(&gpu)] {
        assert_ranks_within(bound(&gpu), "handed over", &collectives(&gpu, 3, &Ok), &wanted);
        let apart = collectives(&gpu, 3, &|comm| Ok(as_processes(comm)));
        assert_ranks_within(bound(&gpu), "through the CPU", &apart, &wanted);
    }
}

/// Tests ranks on two GPUs, two on each: a tensor is copied directly from another GPU.
#[test]
fn collectives_reach_ranks_on_other_gpus() {
    let Some(gpu) = gpu() else { return };
    if !Gpu::count().is_ok_and(|count| count > 1) {
        println!("one GPU on this machine: ranks on two were not tried");
        return;
    }
    let second = RankDevice::gpu(1).expect("a GPU that works");
    for (first, second) in [(gpu.clone(), second.clone()), (rounding(&gpu), rounding(&second))] {
        let sums = on_ranks(4, |comm| {
            let device = [&first, &second][comm.rank() % 2];
            let x = Tensor::full(comm.rank() as f32 + 1.0, (2, 3), &Device::Cpu)?;
            let sum = collective::all_reduce(&comm, &device.parameter(&x)?)?;
            assert!(sum.device().same_device(device.tensors()));
            Ok(numbers(&sum))
        });
        assert_eq!(sums, vec![vec![10.0; 6]; 4]);
        let wanted = collectives(&first, 3, &Ok);
        let of = |comm: Arc<dyn Communicator>| collectives_of([&first, &second][comm.rank() % 2], 3, &comm);
        assert_eq!(on_ranks(3, of), wanted, "the bits of ranks on one GPU");
    }
}
