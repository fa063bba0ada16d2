//! Blocks that move from device to device, with threads as the underlying communicator and a channel that hangs where NCCL
//! would: no order of calls makes it hang, and all ranks name a rank or a device that stops.

use crate::channel::{Cells, Hub};
use ringspan::Error;
use ringspan::comm::threads::{Options, run};
use ringspan::comm::{Buffer, Communicator, Pending, direct};
use ringspan_testing::comm::conversation::{Random, converse};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

type Comm = Arc<dyn Communicator>;

const SOON: Duration = Duration::from_secs(20);

/// Runs ranks whose blocks move on the hub's channels. The underlying communicator fails if it is given a block.
fn fly<T: Send>(
    hub: &Arc<Hub>,
    size: usize,
    deadline: Duration,
    main: impl Fn(&Comm) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    run(size, Options { deadline: 3 * SOON, ..Options::default() }, |comm| {
        let channel = hub.channel(comm.rank());
        main(&direct::over(&*ringspan_testing::comm::as_processes(comm), channel, deadline)?)
    })
}

fn good<T: Send>(size: usize, main: impl Fn(&Comm) -> Result<T, Error> + Sync) -> Vec<T> {
    fly(&Hub::new(size), size, SOON, main).unwrap_or_else(|error| panic!("{size} ranks: {error}"))
}

/// Runs ranks that fail, and returns the error of every rank.
fn failing(
    hub: &Arc<Hub>,
    size: usize,
    deadline: Duration,
    main: impl Fn(&Comm) -> Result<(), Error> + Sync,
) -> Vec<String> {
    let seen = Mutex::new(vec![String::new(); size]);
    let start = Instant::now();
    let _ = run(size, Options { deadline: 3 * SOON, ..Options::default() }, |comm| {
        let channel = hub.channel(comm.rank());
        // A rank that starts late may see the failure before it has connected.
        let result = direct::over(&*ringspan_testing::comm::as_processes(comm.clone()), channel, deadline)
            .and_then(|comm| main(&comm));
        let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        seen.lock().expect("no panic under it")[comm.rank()] = text;
        result
    });
    assert!(start.elapsed() < Duration::from_secs(8), "took {:?}", start.elapsed());
    seen.into_inner().expect("no panic under it")
}

#[test]
fn it_keeps_the_contract_of_every_communicator() {
    for size in [1, 2, 3, 5] {
        good(size, ringspan_testing::comm::contract::collectives);
        good(size, ringspan_testing::comm::contract::bytes);
    }
    good(4, ringspan_testing::comm::contract::sums);
    good(2, ringspan_testing::comm::contract::order);
    good(6, ringspan_testing::comm::contract::groups);
    good(2, |comm| ringspan_testing::comm::contract::both_send_first(comm, 100_000));
}

#[test]
fn random_conversations_of_the_cpu_go_beneath() {
    for seed in 0..8 {
        good(1 + seed as usize % 5, |comm| converse(comm, seed * 7919, 40, |_| Ok(())));
    }
}

fn numbers(from: usize, to: usize, seed: usize, len: usize) -> Vec<u64> {
    (0..len).map(|at| (from * 1_000_000 + to * 10_000 + seed * 100 + at) as u64).collect()
}

/// One message of a random conversation.
#[derive(Clone, Copy)]
struct Sentence {
    from: usize,
    to: usize,
    tag: u64,
    group: usize,
    len: usize,
    device: bool,
}

/// A random list of messages, the same on every rank.
fn sentences(size: usize, random: &mut Random) -> Vec<Sentence> {
    let sentence = |_| Sentence {
        from: random.below(size),
        to: random.below(size),
        tag: random.below(2) as u64,
        group: random.below(2),
        len: random.below(4),
        device: random.below(4) > 0,
    };
    (0..40).map(sentence).collect()
}

/// A started transfer; for a receive also the expected message and its index in the conversation.
type Wait = (Box<dyn Pending>, Option<(Sentence, usize)>);

fn shuffle<T>(all: &mut [T], random: &mut Random) {
    (1..all.len()).for_each(|at| all.swap(at, random.below(at + 1)));
}

/// Each rank sends and receives its messages in its own order (except those of the same pair and tag), and waits in
/// another.
fn talk(comm: &Comm, seed: u64) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let groups = [comm.clone(), comm.split(0, size - rank)?];
    let place = |group: usize, rank: usize| if group == 0 { rank } else { size - 1 - rank };
    let all = sentences(size, &mut Random(seed));
    let mut random = Random(seed * 31 + rank as u64);
    // Sends and receives are shuffled; those with the same address then take its messages in their order.
    let mut ends: Vec<(bool, Sentence)> = all.iter().flat_map(|s| [(true, *s), (false, *s)]).collect();
    ends.retain(|(sends, s)| if *sends { s.from == rank } else { s.to == rank });
    shuffle(&mut ends, &mut random);
    let key = |(sends, s): &(bool, Sentence)| (*sends, s.from, s.to, s.tag, s.group);
    let mut taken = std::collections::HashMap::new();
    let mut waits: Vec<Wait> = Vec::new();
    for end in &ends {
        let number = taken.entry(key(end)).or_insert(0usize);
        let (at, sentence) = all
            .iter()
            .enumerate()
            .filter(|(_, s)| key(&(end.0, **s)) == key(end))
            .nth(*number)
            .map(|(at, s)| (at, *s))
            .expect("as many as there are ends");
        *number += 1;
        let Sentence { from, to, tag, group, len, device } = sentence;
        if end.0 {
            let values = numbers(from, to, at, len);
            let data = if device { Cells::message(rank, values) } else { Buffer::U64(values) };
            waits.push((groups[group].send(place(group, to), tag, Arc::new(data))?, None));
        } else {
            waits.push((groups[group].receive(place(group, from), tag)?, Some((sentence, at))));
        }
        if random.below(5) == 0 {
            comm.progress();
        }
        if random.below(20) == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
        if random.below(6) == 0 && end.0 {
            // A send ends whether or not it has been received.
            waits.pop().expect("just pushed").0.wait()?;
        }
    }
    shuffle(&mut waits, &mut random);
    for (mut pending, wanted) in waits {
        if random.below(3) == 0 {
            pending.test()?;
        }
        let got = pending.wait()?;
        if let (Some(message), Some((Sentence { from, to, len, device, .. }, at))) = (got, wanted) {
            let wanted = numbers(from, to, at, len);
            match device {
                true => assert_eq!(Cells::read(&message, rank), wanted),
                false => assert_eq!(*message, Buffer::U64(wanted)),
            }
        }
        if random.below(10) == 0 {
            comm.progress();
        }
    }
    comm.barrier()
}

#[test]
fn no_order_of_sends_receives_and_waits_deadlocks() {
    for seed in 0..60 {
        good(2 + seed as usize % 4, |comm| talk(comm, seed));
    }
}

#[test]
fn blocks_cross_in_both_directions_around_rings() {
    for size in [2, 3, 6] {
        good(size, |comm| {
            let (rank, right, left) = (comm.rank(), (comm.rank() + 1) % size, (comm.rank() + size - 1) % size);
            let mut blocks = [numbers(rank, 0, 0, 5), numbers(rank, 1, 0, 7)];
            for _ in 0..size {
                let there = comm.send(right, 0, Arc::new(Cells::message(rank, blocks[0].clone())))?;
                let back = comm.send(left, 1, Arc::new(Cells::message(rank, blocks[1].clone())))?;
                let (from_left, from_right) = (comm.receive(left, 0)?, comm.receive(right, 1)?);
                blocks = [from_left, from_right].map(|pending| {
                    let message = pending.wait().expect("arrives").expect("a payload");
                    Cells::read(&message, rank)
                });
                there.wait()?;
                back.wait()?;
            }
            assert_eq!(blocks, [numbers(rank, 0, 0, 5), numbers(rank, 1, 0, 7)]);
            Ok(())
        });
    }
}

#[test]
fn a_send_ends_though_its_receiver_is_in_a_collective() {
    good(3, |comm| {
        let rank = comm.rank();
        if rank == 0 {
            comm.send(1, 4, Arc::new(Cells::message(0, vec![1, 2, 3])))?.wait()?;
        }
        comm.barrier()?;
        if rank == 1 {
            let message = comm.receive(0, 4)?.wait()?.expect("a payload");
            assert_eq!(Cells::read(&message, 1), [1, 2, 3]);
        }
        Ok(())
    });
}

#[test]
fn messages_that_nobody_waits_for_still_arrive() {
    good(2, |comm| {
        if comm.rank() == 0 {
            drop(comm.send(1, 0, Arc::new(Cells::message(0, vec![5])))?);
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
        let message = comm.receive(0, 0)?.wait()?.expect("a payload");
        assert_eq!(Cells::read(&message, 1), [5]);
        Ok(())
    });
}

#[test]
fn collectives_carry_blocks() {
    for size in [1, 3, 4] {
        good(size, |comm| {
            let rank = comm.rank();
            let parts = (0..size).map(|to| Cells::message(rank, numbers(rank, to, 0, to + rank))).collect();
            for (from, part) in comm.all_to_all(parts)?.iter().enumerate() {
                assert_eq!(Cells::read(part, rank), numbers(from, rank, 0, rank + from));
            }
            for (from, part) in comm.all_gather(Cells::message(rank, numbers(rank, 9, 0, rank)))?.iter().enumerate() {
                assert_eq!(Cells::read(part, rank), numbers(from, 9, 0, from));
            }
            let given = (rank == size - 1).then(|| Cells::message(rank, vec![4, 4]));
            assert_eq!(Cells::read(&*comm.broadcast(size - 1, given)?, rank), [4, 4]);
            Ok(())
        });
    }
}

#[test]
fn a_rank_that_fails_is_named_by_all_others_at_once() {
    for panics in [false, true] {
        let texts = failing(&Hub::new(4), 4, SOON, |comm| {
            let (rank, right) = (comm.rank(), (comm.rank() + 1) % 4);
            let sent = comm.send(right, 0, Arc::new(Cells::message(rank, vec![1; 9])))?;
            if rank == 2 {
                // The block has been announced, and no rank will answer.
                if panics {
                    std::panic::panic_any("chosen");
                }
                return Err(Error::Layout("chosen".into()));
            }
            let message = comm.receive((rank + 3) % 4, 0)?.wait()?;
            sent.wait()?;
            drop(message);
            comm.barrier()
        });
        for (rank, text) in texts.iter().enumerate().filter(|(rank, _)| *rank != 2) {
            let names = text.contains(&format!("rank {rank} stopped in")) && text.contains("rank 2 failed: ");
            assert!(names && text.contains("chosen"), "rank {rank}: {text}");
        }
    }
}

#[test]
fn a_rank_that_ends_early_is_named() {
    let texts = failing(&Hub::new(3), 3, SOON, |comm| match comm.rank() {
        1 => Ok(()),
        _ => comm.receive(1, 7)?.wait().map(drop),
    });
    for rank in [0, 2] {
        assert!(texts[rank].contains("rank 1 failed: it finished"), "rank {rank}: {}", texts[rank]);
    }
    assert!(texts.iter().any(|text| text.contains("receive from rank 1 (tag 7)")), "{texts:?}");
}

#[test]
fn a_rank_that_stops_answering_is_named_at_the_deadline() {
    let deadline = Duration::from_millis(700);
    let texts = failing(&Hub::new(3), 3, deadline, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(3 * deadline);
            return comm.barrier();
        }
        comm.send(1, 3, Arc::new(Cells::message(comm.rank(), vec![1])))?.wait().map(drop)
    });
    let late = texts.iter().find(|text| text.contains("waited")).expect("a deadline");
    for words in ["in send of 1 elements to rank 1 (tag 3)", "for rank 1, which has not answered"] {
        assert!(late.contains(words), "{late}");
    }
    assert!(texts.iter().all(|text| !text.is_empty()), "{texts:?}");
}

/// Most ranks wait for ranks that are waiting themselves.
#[test]
fn a_rank_that_stops_is_named_by_ranks_that_do_not_talk_to_it() {
    let deadline = Duration::from_millis(700);
    let texts = failing(&Hub::new(5), 5, deadline, |comm| {
        let (rank, right) = (comm.rank(), (comm.rank() + 1) % 5);
        if rank == 1 {
            std::thread::sleep(4 * deadline);
            return comm.barrier();
        }
        // Rank 4 reaches its deadline first; it waits for rank 3, which waits for 2, which waits for 1.
        if rank != 4 {
            std::thread::sleep(Duration::from_millis(100));
        }
        comm.receive((rank + 4) % 5, 0)?.wait()?;
        comm.send(right, 0, Arc::new(Cells::message(rank, vec![1; 9])))?.wait().map(drop)
    });
    let words =
        "in receive from rank 3 (tag 0) for rank 1, which has announced nothing that is not here; it does not say";
    assert!(texts[4].contains(words), "{texts:?}");
    assert!(texts.iter().all(|text| text.contains("for rank 1, which")), "{texts:?}");
}

#[test]
fn a_device_that_stops_is_named_at_the_deadline_and_its_flights_are_aborted() {
    let (hub, deadline) = (Hub::new(3), Duration::from_millis(700));
    hub.stop(2);
    let announced = Barrier::new(3);
    let texts = failing(&hub, 3, deadline, |comm| {
        let (rank, right) = (comm.rank(), (comm.rank() + 1) % 3);
        let sent = comm.send(right, 0, Arc::new(Cells::message(rank, vec![1; 9])))?;
        // A rank that polls before the block from its left is announced would start flight 0 with its own block only.
        announced.wait();
        comm.receive((rank + 2) % 3, 0)?.wait()?;
        sent.wait().map(drop)
    });
    let late = texts.iter().find(|text| text.contains("waited")).expect("a deadline");
    assert!(late.contains("which has a block in flight 0 (2 blocks here), which has not ended"), "{late}");
    assert!(texts.iter().all(|text| !text.is_empty()), "{texts:?}");
    assert!((0..3).all(|rank| hub.was_aborted(rank)), "a channel goes on");
}

#[test]
fn different_collectives_are_a_mismatch() {
    let texts = failing(&Hub::new(2), 2, SOON, |comm| match comm.rank() {
        0 => comm.all_gather(Cells::message(0, vec![1])).map(drop),
        _ => comm.barrier(),
    });
    assert!(texts.iter().any(|text| text.contains("all_gather #0") && text.contains("barrier #0")), "{texts:?}");
    assert!(texts.iter().all(|text| !text.is_empty()), "{texts:?}");
}
