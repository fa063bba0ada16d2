//! A rank holds its tensors, two blocks of keys and values, and the kernel's buffers, independently of the number of ranks.
//!
//! Two numbers are compared. The library computes a rank's memory from its plan (`forward_bytes`, `backward_bytes`). The
//! allocator of this test counts everything that all ranks and their kernel threads allocate, with a transport that copies
//! messages as between machines: without copies, a block that several ranks hold would count once. The peaks of ranks need not
//! coincide, so all allocations must be at most the sum of the plans, and each plan must be at most the formula of the design.

use ringspan::attention::{self, Inputs};
use ringspan::comm::{Buffer, Communicator, Pending, threads};
use ringspan::kernel::{self, HeadMap, Kernel, View};
use ringspan::mesh::Grid;
use ringspan::schedule::{Pass, TensorSizes};
use ringspan::{Documents, Error, Group, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use ringspan_testing::{CountingAllocator, delegate_communicator};
use std::sync::{Arc, Mutex};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();
/// Allocations are counted for the process, so only one test may run at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A communicator that copies messages, so that each receiver has its own.
struct Copying(Arc<dyn Communicator>);

/// A receive that copies its message.
struct Copied(Box<dyn Pending>);

impl Pending for Copied {
    fn test(&mut self) -> Result<bool, Error> {
        self.0.test()
    }

    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>, Error> {
        Ok(self.0.wait()?.map(|message| Arc::new((*message).clone())))
    }
}

impl Communicator for Copying {
    delegate_communicator!(0);
    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>, Error> {
        let (len, capacity) = match &*data {
            Buffer::F32(values) => (values.len(), values.capacity()),
            Buffer::U16(values) => (values.len(), values.capacity()),
            other => (other.len(), other.len()),
        };
        assert_eq!(len, capacity, "a message under tag {tag} has room for more than it holds");
        self.0.send(to, tag, data)
    }
    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>, Error> {
        Ok(Box::new(Copied(self.0.receive(from, tag)?)))
    }
    fn progress(&self) {
        self.0.progress();
    }
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Ok(Arc::new(Self(self.0.split(color, key)?)))
    }
}

/// Heads, their width, and the threads of a rank.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    threads: usize,
}

const SMALL_HEADS: Shape = Shape { heads: 4, kv_heads: 2, dim: 64, threads: 2 };
/// Bytes of lists, names and queues of one rank, which the formulas do not count.
const SMALL: f64 = 64e3;

/// The memory of one pass on P ranks, in bytes.
#[derive(Debug)]
struct HeldBytes {
    /// Peak of each rank by its plan.
    planned: Vec<f64>,
    /// Peak of the process, minus what was allocated before the ranks had tensors.
    allocated: f64,
    /// The largest workspace that the kernel declares for one step of a rank.
    workspace: f64,
    /// The largest number of tokens on a rank.
    tokens: f64,
}

/// Measures forward and backward of S tokens in a ring of P ranks.
fn measure(shape: Shape, tokens: usize, ranks: usize, kind: LayoutKind, mask: &Mask) -> [HeldBytes; 2] {
    let layout = Layout::new(kind, &Documents::batch(1, tokens), ranks).expect("a layout");
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, mask, (ranks, 1)).expect("a schedule");
    measure_schedule(shape, &schedule, false)
}

/// Measures forward and backward with a schedule for as many queries as keys.
fn measure_schedule(shape: Shape, schedule: &Schedule, biased: bool) -> [HeldBytes; 2] {
    let Shape { heads, kv_heads, dim, threads: kernel_threads } = shape;
    let (layout, ranks, all) = (schedule.query(), schedule.query().ranks(), schedule.key().documents().row_len());
    let score = Score::new(1.0 / (dim as f32).sqrt());
    let parts = threads::run(ranks, threads::Options::default(), |comm| {
        let rank = comm.rank();
        let group = Group::new(Arc::new(Copying(comm.clone())), schedule.grid(), Kernel::new(kernel_threads))?;
        // Between two barriers the counts do not change, so one rank can read them.
        let alone = |work: &mut dyn FnMut()| -> Result<(), Error> {
            comm.barrier()?;
            if rank == 0 {
                work();
            }
            comm.barrier()
        };
        let (mut base, mut allocated) = (0, [0; 2]);
        alone(&mut || base = ALLOCATOR.allocated())?;
        let own = layout.tokens(rank);
        let tensor = |heads: usize, seed: usize| -> Vec<f32> {
            (0..own * heads * dim).map(|i| (((i + seed) * 7919 % 1009) as f32 / 1009.0) - 0.5).collect()
        };
        let (q, k, v) = (tensor(heads, 1), tensor(kv_heads, 2), tensor(kv_heads, 3));
        let view = |data, heads| View::new(data, own, heads, dim).expect("made of this size");
        let bias = vec![0.5; if biased { own * all } else { 0 }];
        let mut inputs = Inputs::new(view(&q, heads), view(&k, kv_heads), view(&v, kv_heads), &score);
        if biased {
            inputs = inputs.with_bias(View::new(&bias, own, 1, all).expect("made of this size"));
        }

        alone(&mut || ALLOCATOR.reset_peak())?;
        let forward = attention::forward(&group, schedule, &inputs)?;
        alone(&mut || {
            allocated[0] = ALLOCATOR.peak() - base;
            ALLOCATOR.reset_peak();
        })?;
        let d_out = tensor(heads, 4);
        let gradients = attention::backward(&group, schedule, &inputs, &forward, view(&d_out, heads))?;
        alone(&mut || allocated[1] = ALLOCATOR.peak() - base)?;

        let map = HeadMap::grouped(heads, kv_heads)?;
        let workspace = |pass, of: &dyn Fn(&kernel::Inputs, &[kernel::Tile]) -> u64| {
            if schedule.grid().ulysses > 1 {
                return 0;
            }
            let Inputs { q, k, v, bias, .. } = inputs;
            let inputs = kernel::Inputs { q, k, v, heads: &map, score: &score, bias };
            let steps = schedule.plan(pass, rank);
            steps.iter().filter_map(|step| step.compute.as_ref()).map(|c| of(&inputs, &c.tiles)).max().unwrap_or(0)
        };
        let forward_space = workspace(Pass::Forward, &|inputs, tiles| group.kernel().forward_workspace(inputs, tiles));
        let space = workspace(Pass::Backward, &|inputs, tiles| group.kernel().backward_workspace(inputs, tiles));
        // The kernel keeps its buffers for the next call, so backward has those of both passes.
        let spaces = [forward_space, forward_space + space];
        drop(gradients);
        let planned = [
            attention::forward_bytes(&group, schedule, &inputs)?,
            attention::backward_bytes(&group, schedule, &inputs, view(&d_out, heads))?,
        ];
        Ok::<_, Error>((planned, allocated, spaces))
    })
    .expect("nothing fails");
    let most = (0..ranks).map(|rank| layout.tokens(rank)).max().unwrap_or(0);
    [0, 1].map(|pass| HeldBytes {
        planned: parts.iter().map(|part| part.0[pass] as f64).collect(),
        allocated: parts[0].1[pass] as f64,
        workspace: parts.iter().map(|part| part.2[pass]).max().unwrap_or(0) as f64,
        tokens: most as f64,
    })
}

/// Bytes that the design allows for a rank of T tokens, without the kernel's buffers: 4 T times the f32 elements per token.
fn allowed(shape: Shape, tokens: f64) -> [f64; 2] {
    let (h, g, d) = (shape.heads as f64, shape.kv_heads as f64, shape.dim as f64);
    let block = 2.0 * g * d;
    // These are Q, K, V, the output with maximum and sum, and two blocks.
    let forward = h * d + block + h * (d + 2.0) + 2.0 * block;
    // These are Q, K, V, O, dO, maximum, sum and delta; dQ, dK and dV; two blocks of keys and values, and two of their
    // gradients.
    let backward = 3.0 * h * d + block + 3.0 * h + h * d + block + 4.0 * block;
    [forward, backward].map(|elements| elements * 4.0 * tokens)
}

/// Checks both passes; returns the largest bytes of a rank by its plan, for comparison.
fn check(what: &str, shape: Shape, got: &[HeldBytes; 2]) -> [f64; 2] {
    [0, 1].map(|pass| {
        let HeldBytes { planned, allocated, workspace, tokens } = &got[pass];
        let most = planned.iter().fold(0.0f64, |most, bytes| most.max(*bytes));
        let ranks = planned.len() as f64;
        let limit = 1.15 * allowed(shape, *tokens)[pass] + workspace;
        let name = format!("{what} on {ranks} ranks, {}", ["forward", "backward"][pass]);
        println!(
            "{name}: plan {:.2} MB, process / P {:.2} MB, limit {:.2} MB ({:.2} of it the kernel's)",
            most / 1e6,
            allocated / ranks / 1e6,
            limit / 1e6,
            workspace / 1e6
        );
        assert!(most <= limit, "{name}: a rank holds {most} bytes by its plan, more than {limit}");
        // Plans do not count messages that were sent and not received yet (a block of keys; backward also one of gradients),
        // nor the buffers that the kernel keeps from the forward pass.
        let waiting = (1.0 + pass as f64) * 4.0 * tokens * (2 * shape.kv_heads * shape.dim) as f64;
        let unknown = ranks * (waiting + SMALL + if pass == 1 { *workspace } else { 0.0 });
        let sum = planned.iter().sum::<f64>();
        assert!(*allocated <= sum + unknown, "{name}: {allocated} bytes allocated, {sum} planned, {unknown} besides");
        most
    })
}

fn cases() -> [(&'static str, LayoutKind, Mask); 2] {
    [("causal zigzag", LayoutKind::Zigzag, Mask::causal()), ("full", LayoutKind::Contiguous, Mask::full())]
}

#[test]
fn with_as_many_tokens_a_rank_more_ranks_take_no_more_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for (name, kind, mask) in cases() {
        let mut two = None;
        for ranks in [1, 2, 4, 8, 16] {
            let now = check(name, SMALL_HEADS, &measure(SMALL_HEADS, 256 * ranks, ranks, kind, &mask));
            if ranks == 1 {
                // A single rank has no blocks of others.
                continue;
            }
            let two = *two.get_or_insert(now);
            // Only plans are compared, because the number of messages that wait to be received depends on timing.
            for (pass, (now, two)) in now.iter().zip(two).enumerate() {
                assert!(*now <= 1.01 * two, "{name} pass {pass}: {now} bytes on {ranks} ranks, {two} on 2");
            }
        }
    }
}

#[test]
fn more_ranks_for_the_same_tokens_take_less_memory_each() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for (name, kind, mask) in cases() {
        for ranks in [1, 2, 4, 8, 16] {
            check(name, SMALL_HEADS, &measure(SMALL_HEADS, 2048, ranks, kind, &mask));
        }
    }
}

#[test]
fn a_rank_holds_little_more_than_its_tensors_and_two_blocks() {
    a_rank_holds_little_more(&[1, 2, 4]);
}

#[test]
#[ignore = "takes a minute"]
fn one_of_many_ranks_holds_little_more_than_its_tensors_and_two_blocks() {
    a_rank_holds_little_more(&[8, 16]);
}

/// Checks everything that ranks with one thread allocate, including the kernel's buffers, by the allocator alone.
fn a_rank_holds_little_more(numbers_of_ranks: &[usize]) {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let shape = Shape { heads: 16, kv_heads: 4, dim: 128, threads: 1 };
    for ((name, kind, mask), &ranks) in
        cases().into_iter().flat_map(|case| numbers_of_ranks.iter().map(move |ranks| (case.clone(), ranks)))
    {
        // The number of messages that wait to be received depends on timing, so the best of several runs counts.
        let (mut least, mut limits) = ([f64::INFINITY; 2], [0.0; 2]);
        for _ in 0..3 {
            let run = measure(shape, 256 * ranks, ranks, kind, &mask);
            for pass in [0, 1] {
                let wanted = allowed(shape, run[pass].tokens)[pass];
                let each = run[pass].allocated / ranks as f64;
                println!("{name} on {ranks} ranks, pass {pass}: {:.3} of the tensors and blocks", each / wanted);
                least[pass] = least[pass].min(each);
                limits[pass] = 1.15 * wanted + SMALL;
            }
            if least[0] <= limits[0] && least[1] <= limits[1] {
                break;
            }
        }
        for pass in [0, 1] {
            let (each, limit) = (least[pass], limits[pass]);
            assert!(each <= limit, "{name} on {ranks} ranks, pass {pass}: {each} bytes a rank, more than {limit}");
        }
    }
}

/// The memory computed from the plan is right for every strategy, with Ulysses, parts of the heads and a bias. Lengths
/// and heads are not powers of two, so that a growing vector would have spare capacity; the transport above checks this
/// for each message.
#[test]
fn plans_count_every_way_to_compute() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let shape = Shape { heads: 12, kv_heads: 6, dim: 40, threads: 1 };
    let grids = [Grid::new(4, 1), Grid::new(1, 4), Grid::new(2, 2), Grid::new(2, 2).with_ulysses_outer()];
    for (strategy, grid) in StrategyKind::ALL.into_iter().flat_map(|strategy| grids.map(|grid| (strategy, grid))) {
        for (chunks, biased) in [(1, false), (3, true)] {
            let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 272 * 4), 4).expect("a layout");
            let schedule = Schedule::new(strategy, &layout, &layout, &Mask::causal(), grid).expect("a schedule");
            let schedule = schedule.with_head_chunks(chunks);
            let sizes =
                TensorSizes { heads: 12, kv_heads: 6, dim: 40, v_dim: 40, wire: 4, bias_heads: usize::from(biased) };
            let got = measure_schedule(shape, &schedule, biased);
            for (pass, held) in [Pass::Forward, Pass::Backward].into_iter().zip(got) {
                let planned = held.planned.iter().sum::<f64>();
                // The plan does not count messages of a ring that wait to be received: at most all that is sent. Exchanges are
                // waited for.
                let sent = |rank| schedule.bytes_sent(pass, rank, &sizes).expect("fits") as f64;
                let sent = (0..4).map(sent).sum::<f64>();
                let what = format!("{strategy} on {grid}, {chunks} parts, bias {biased}, {pass:?}");
                println!("{what}: planned {planned:.0}, allocated {:.0}, sent {sent:.0}", held.allocated);
                let unknown = if grid.ring == 1 { 0.1 * planned } else { sent };
                assert!(held.allocated <= planned + unknown + 4.0 * SMALL, "{what}");
                // The peaks of ranks need not coincide.
                assert!(planned <= 1.4 * held.allocated, "{what}");
            }
        }
    }
}

/// Two documents whose tokens alternate at random take as much memory as two consecutive documents. If scores depend on
/// positions, the lists of tiles are counted, and do not grow with the square of the tokens.
#[test]
fn documents_in_pieces_take_no_more_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let shape = Shape { heads: 2, kv_heads: 1, dim: 64, threads: 1 };
    let tokens = 2000;
    let held = |id: fn(usize) -> i32, ranks: usize, biased: bool| {
        let ids: Vec<i32> = (0..tokens).map(id).collect();
        let documents = Documents::from_ids(&ids, tokens).expect("a row");
        let layout = Layout::new(LayoutKind::Zigzag, &documents, ranks).expect("a layout");
        let schedule =
            Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (ranks, 1)).expect("a schedule");
        let runs: usize = (0..ranks).map(|rank| layout.runs(rank).len()).sum();
        (measure_schedule(shape, &schedule, biased), runs)
    };
    let random = |token: usize| 1 + ((token as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 61 & 1) as i32;
    for ranks in [1, 3] {
        let ((pieces, runs), (halves, _)) =
            (held(random, ranks, false), held(|token| 1 + (token >= 1000) as i32, ranks, false));
        assert!(runs > 300, "{runs} runs are no pieces");
        let (biased, _) = held(random, ranks, true);
        for pass in [0, 1] {
            let sum = |held: &HeldBytes| held.planned.iter().sum::<f64>();
            let (in_pieces, whole) = (sum(&pieces[pass]), sum(&halves[pass]));
            println!(
                "{ranks} ranks, pass {pass}: {in_pieces} in pieces, {whole} in halves, {} with a bias",
                sum(&biased[pass])
            );
            assert!(in_pieces <= 1.3 * whole, "{in_pieces} bytes in pieces, {whole} in halves");
            for held in [&pieces[pass], &biased[pass]] {
                let waiting = ranks as f64 * (1.0 + pass as f64) * 4.0 * held.tokens * 128.0;
                let kept = if pass == 1 { ranks as f64 * 2e6 } else { 0.0 };
                let known = sum(held) + waiting + kept + ranks as f64 * SMALL;
                assert!(held.allocated <= known, "pass {pass}: {} bytes allocated, {known} known", held.allocated);
            }
        }
    }
}
