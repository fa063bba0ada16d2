//! The program of one rank in each scenario.

use ringspan::attention::{Group, Inputs, backward, forward};
use ringspan::comm::mpi::{Options, Process};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::comm::{Buffer, Communicator, threads};
use ringspan::kernel::{Kernel, View};
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind, World, world};
use ringspan_testing::comm::contract::{both_send_first, bytes, collectives, groups, order, sums};
use ringspan_testing::comm::conversation::converse;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

type Comm = Arc<dyn Communicator>;

pub(crate) fn main(scenario: &[String]) -> ExitCode {
    // As in the command `ringspan`: a process that mpirun ends has a moment left to report why.
    ctrlc::set_handler(|| std::thread::sleep(Duration::from_millis(700))).expect("no other handler");
    let own = std::env::var("OMPI_COMM_WORLD_RANK").unwrap_or_default();
    if scenario[0] == "absent" && scenario[1] == own {
        return ExitCode::FAILURE;
    }
    let deadline = if scenario[0] == "late" { Duration::from_millis(300) } else { Duration::from_secs(60) };
    if scenario[0].starts_with("world") {
        return repeatedly(scenario);
    }
    let process = match Process::start(Options { deadline, ..Options::default() }) {
        Ok(process) => process,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = process.run(|comm| match scenario[0].as_str() {
        "worlds" => worlds_of_a_group(&ProcessGroup::mpi(&process, comm.clone()), &comm),
        _ => play(&comm, scenario),
    });
    if let Err(error) = &result {
        eprintln!("error: {error}");
    }
    match (result.is_ok(), process.end(result.is_ok())) {
        (true, Ok(())) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Worlds that begin and end while the processes stay connected.
fn worlds_of_a_group(processes: &ProcessGroup, comm: &Comm) -> Result<(), Error> {
    let size = comm.size();
    let other = World::start(processes, size + 1, world::Options::default());
    assert!(matches!(other, Err(Error::MeshSize { needed, ranks, .. }) if (needed, ranks) == (size + 1, size)));
    for threads_per_rank in [1, 2] {
        let mut world = World::start(processes, size, world::Options { threads_per_rank, ..Default::default() })?;
        for _ in 0..5 {
            let sums = world.run(|rank| {
                assert_eq!((rank.index(), rank.threads()), (comm.rank(), threads_per_rank));
                let mut sum = [1.0];
                rank.communicator().all_reduce(&mut sum).map(|()| sum[0])
            });
            assert_eq!(sums, Ok(vec![size as f32]));
        }
        let refused = world.run(|_| Err::<(), _>(Error::Layout("no memory".into())));
        assert_eq!(refused, Err(Error::Layout("no memory".into())));
        let after = world.run(|_| Ok::<_, Error>(())).expect_err("a world that failed is closed");
        assert!(after.to_string().contains("the world is closed"), "{after}");
    }
    Ok(())
}

/// Calls of a world that stays, the last of which may fail on one rank.
fn repeatedly(scenario: &[String]) -> ExitCode {
    let done = World::mpi().and_then(|mut world| {
        let mut sums = [0.0];
        for call in 0..20 {
            world.run_with(&mut sums, |rank, sum| {
                let mut term = [(rank.index() + call) as f32];
                rank.communicator().all_reduce(&mut term)?;
                *sum += term[0];
                Ok::<_, Error>(())
            })?;
        }
        let ranks = world.size() as f32;
        let expected = 10.0 * ranks * (ranks - 1.0) + 190.0 * ranks;
        assert_eq!((sums[0], world.local_size()), (expected, 1), "20 calls");
        let victim = scenario.get(1).and_then(|word| word.parse().ok());
        let failing = world.run(|rank| match victim == Some(rank.index()) {
            true => panic!("the victim breaks"),
            false => rank.communicator().barrier(),
        });
        if let Err(error) = failing {
            eprintln!("error: {error}");
            let after = world.run(|rank| rank.communicator().barrier()).expect_err("a world that failed is closed");
            eprintln!("after that: {after}");
            return Err(error);
        }
        world.close()
    });
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn play(comm: &Comm, scenario: &[String]) -> Result<(), Error> {
    let victim = scenario.get(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    let chosen = comm.rank() == victim;
    match scenario[0].as_str() {
        "contract" => contract(comm),
        "large" => both_send_first(comm, 40 << 20),
        "attention" => {
            println!("{}", attention(comm)?);
            Ok(())
        }
        "overlap" => overlap(comm),
        "long talk" => {
            // Rank 0 decides, so that all ranks leave in the same round.
            let start = Instant::now();
            loop {
                let done = (comm.rank() == 0).then(|| Buffer::U8(vec![u8::from(start.elapsed().as_secs() >= 12)]));
                if *comm.broadcast(0, done)? == Buffer::U8(vec![1]) {
                    return Ok(());
                }
            }
        }
        "mismatch" if chosen => comm.all_gather(Buffer::U8(vec![1])).map(drop),
        "lengths" => comm.all_reduce(&mut vec![0.0; if chosen { 5 } else { 4 }]),
        "counts" => {
            let mut counts = vec![1; comm.size()];
            counts[if chosen { 0 } else { 1 }] += 1;
            comm.reduce_scatter(vec![0.0; counts.iter().sum()], &counts).map(drop)
        }
        "bad call" if chosen => comm.send(99, 0, Arc::new(Buffer::U8(vec![]))).map(drop),
        "finished" if chosen => Ok(()),
        "finished" => comm.receive(victim, 5)?.wait().map(drop),
        "late" if chosen => {
            std::thread::sleep(Duration::from_secs(2));
            comm.barrier()
        }
        "circle" => comm.receive((comm.rank() + 1) % comm.size(), 4)?.wait().map(drop),
        what => {
            // All ranks communicate for a while; then the victim ends, and the others go on communicating, or compute.
            (0..50).try_for_each(|_| comm.barrier())?;
            let others_compute = what == "error while others compute";
            if chosen {
                // This leaves the others time to get out of the last barrier.
                std::thread::sleep(Duration::from_millis(if others_compute { 500 } else { 0 }));
                fate(what)?;
            }
            if others_compute {
                std::thread::sleep(Duration::from_secs(60));
            }
            loop {
                comm.barrier()?;
            }
        }
    }
}

/// Ends the victim in the given way.
fn fate(what: &str) -> Result<(), Error> {
    let signal = |name: &str| {
        Command::new("kill").args([name, &std::process::id().to_string()]).status().expect("a kill command");
        std::thread::sleep(Duration::from_secs(60));
    };
    match what {
        "panic" => panic!("the victim breaks"),
        "exit" => std::process::exit(0),
        "kill" => signal("-KILL"),
        "stop" => signal("-STOP"),
        _ => return Err(Error::Layout("no such luck".into())),
    }
    Ok(())
}

fn contract(comm: &Comm) -> Result<(), Error> {
    collectives(comm)?;
    sums(comm)?;
    order(comm)?;
    bytes(comm)?;
    groups(comm)?;
    both_send_first(comm, 3_000_001)?;
    (0..6).try_for_each(|seed| converse(comm, seed * 7919, 60, |_| Ok(())))?;
    // This message goes to a rank that ends without receiving it, and no rank waits for it.
    comm.send((comm.rank() + 1) % comm.size(), 77, Arc::new(Buffer::F32(vec![1.0; 500_000])))?;
    Ok(())
}

/// Attention with a zigzag ring and with Ulysses, forward and backward: returns a hash of the bits of all results.
fn attention(comm: &Comm) -> Result<String, Error> {
    let (len, heads, dim, size) = (777, 8, 32, comm.size());
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, len), size)?;
    let mut hash = 0u64;
    for grid in [(size, 1), (1, size), (size / 2, 2)] {
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), grid)?;
        let group = Group::new(comm.clone(), grid, Kernel::new(1))?;
        let rows = layout.tokens(comm.rank());
        let values = |seed: usize| -> Vec<f32> {
            (0..rows * heads * dim).map(|i| ((i * 37 + seed * 101 + comm.rank() * 7) as f32).sin()).collect()
        };
        let data: Vec<Vec<f32>> = (0..4).map(values).collect();
        let view = |n: usize| View::new(&data[n], rows, heads, dim).expect("its size");
        let score = Score::new(0.2);
        let inputs = Inputs::new(view(0), view(1), view(2), &score);
        let saved = forward(&group, &schedule, &inputs)?;
        let gradients = backward(&group, &schedule, &inputs, &saved, view(3))?;
        for value in [&saved.out, &saved.lse(), &gradients.dq, &gradients.dk, &gradients.dv].into_iter().flatten() {
            hash = hash.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(u64::from(value.to_bits()));
        }
    }
    Ok(format!("bits {hash:016x}, {} bytes sent", comm.bytes_sent()))
}

/// The results of [`attention`] on ranks that are threads.
pub(crate) fn attention_between_threads(ranks: usize) -> Vec<String> {
    threads::run(ranks, threads::Options::default(), |comm| attention(&comm)).expect("nothing fails")
}

/// Transfers make progress while ranks compute and call `progress`: what is left to wait for is a small part of what it is without
/// these calls. The scheduler may take a processor away at any moment, so the median of several waits counts.
fn overlap(comm: &Comm) -> Result<(), Error> {
    let median = |calls: bool| -> Result<f32, Error> {
        let mut waits = (0..9).map(|_| seconds_waited(comm, calls)).collect::<Result<Vec<_>, _>>()?;
        waits.sort_by(f32::total_cmp);
        Ok(waits[4])
    };
    let (with_calls, without) = (median(true)?, median(false)?);
    assert!(4.0 * with_calls < without, "{with_calls} s waited with calls of progress, {without} s without");
    Ok(())
}

/// The seconds that both ranks together wait for a large transfer between them that they started before they computed.
fn seconds_waited(comm: &Comm, calls: bool) -> Result<f32, Error> {
    let other = 1 - comm.rank();
    comm.barrier()?;
    let sent = comm.send(other, 0, Arc::new(Buffer::U8(vec![comm.rank() as u8; 16 << 20])))?;
    let coming = comm.receive(other, 0)?;
    for _ in 0..200 {
        // The sleep stands for a task of a kernel.
        std::thread::sleep(Duration::from_millis(1));
        if calls {
            comm.progress();
        }
    }
    let begin = Instant::now();
    let received = coming.wait()?;
    sent.wait()?;
    let mut waited = [begin.elapsed().as_secs_f32()];
    assert_eq!(received.as_deref(), Some(&Buffer::U8(vec![other as u8; 16 << 20])));
    comm.all_reduce(&mut waited)?;
    Ok(waited[0])
}
