//! Ranks as threads: collectives are correct, failures reach all ranks with the name of the failed rank, and nothing hangs.

use ringspan::Error;
use ringspan::comm::threads::{Options, SimulatedLink, memory, run};
use ringspan::comm::{Buffer, Communicator};
use std::sync::Arc;
use std::time::{Duration, Instant};

type Comm = Arc<dyn Communicator>;

/// Runs ranks, and returns each one's error as text, or an empty text.
fn outcomes(size: usize, deadline: Duration, main: impl Fn(&Comm) -> Result<(), Error> + Sync) -> Vec<String> {
    let seen = std::sync::Mutex::new(vec![String::new(); size]);
    let start = Instant::now();
    let _ = run(size, Options { deadline, ..Options::default() }, |comm| {
        let result = main(&comm);
        let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        seen.lock().expect("no panics here")[comm.rank()] = text;
        result
    });
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    seen.into_inner().expect("no panics here")
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn collectives_equal_their_definitions() {
    for size in [1, 2, 3, 5, 8] {
        run(size, Options::default(), |comm| ringspan_testing::comm::contract::collectives(&comm))
            .expect("nothing fails");
    }
}

#[test]
fn sums_are_the_same_bits_on_every_rank_and_in_rank_order() {
    run(6, Options::default(), |comm| ringspan_testing::comm::contract::sums(&comm)).expect("nothing fails");
}

#[test]
fn messages_of_a_tag_keep_their_order_and_tags_do_not_mix() {
    run(2, Options::default(), |comm| ringspan_testing::comm::contract::order(&comm)).expect("nothing fails");
}

#[test]
fn bytes_to_other_ranks_are_counted_and_bytes_to_oneself_are_not() {
    for size in [1, 3, 4] {
        run(size, Options::default(), |comm| ringspan_testing::comm::contract::bytes(&comm)).expect("nothing fails");
    }
}

#[test]
fn split_groups_talk_apart_and_split_again() {
    for size in [2, 6, 7] {
        run(size, Options::default(), |comm| ringspan_testing::comm::contract::groups(&comm)).expect("nothing fails");
    }
}

#[test]
fn a_block_is_handed_over_without_a_copy() {
    run(2, Options::default(), |comm| {
        let block = Arc::new(Buffer::F32(vec![1.0; 1000]));
        let address = Arc::as_ptr(&block) as u64;
        comm.send(1 - comm.rank(), 0, block)?;
        let got = comm.receive(1 - comm.rank(), 0)?.wait()?.expect("a payload");
        let addresses = comm.all_gather(Buffer::U64(vec![address]))?;
        assert_eq!(*addresses[1 - comm.rank()], Buffer::U64(vec![Arc::as_ptr(&got) as u64]));
        Ok::<_, Error>(())
    })
    .expect("nothing fails");
}

#[test]
fn an_error_of_one_rank_reaches_all_with_its_name() {
    let result = run(4, Options::default(), |comm| {
        if comm.rank() == 2 {
            return Err(Error::Layout("no such luck".into()));
        }
        comm.barrier()
    });
    assert_eq!(result, Err(Error::Layout("no such luck".into())));
    let texts = outcomes(4, LONG, |comm| match comm.rank() {
        2 => Err(Error::Layout("no such luck".into())),
        _ => comm.barrier(),
    });
    for rank in [0, 1, 3] {
        assert!(texts[rank].contains("rank 2 failed") && texts[rank].contains("no such luck"), "{}", texts[rank]);
        assert!(texts[rank].contains("barrier"), "{}", texts[rank]);
    }
}

#[test]
fn a_panic_of_one_rank_is_an_error_of_all() {
    let result = run(3, Options::default(), |comm| {
        assert!(comm.rank() != 1, "rank 1 breaks");
        comm.receive(1, 0)?.wait().map(|_| ())
    });
    match result {
        Err(Error::Panicked { rank: 1, message }) => assert!(message.contains("rank 1 breaks")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_in_different_collectives_find_out_at_once() {
    let texts = outcomes(3, LONG, |comm| match comm.rank() {
        0 => comm.all_gather(Buffer::U8(vec![1])).map(|_| ()),
        _ => comm.barrier(),
    });
    let all = texts.join("\n");
    assert!(texts.iter().all(|text| !text.is_empty()), "{all}");
    assert!(all.contains("all_gather #0") && all.contains("barrier #0"), "{all}");
    let texts = outcomes(2, LONG, |comm| comm.all_reduce(&mut vec![0.0; 3 + comm.rank()]));
    assert!(texts.join("\n").contains("of 3 elements") && texts.join("\n").contains("of 4 elements"));
    let texts = outcomes(3, LONG, |comm| {
        let root = usize::from(comm.rank() == 1);
        comm.broadcast(root, (comm.rank() == root).then(|| Buffer::U8(vec![1]))).map(|_| ())
    });
    assert!(texts.iter().all(|text| !text.is_empty()), "{texts:?}");
}

#[test]
fn a_rank_that_finished_is_not_waited_for() {
    let texts = outcomes(2, LONG, |comm| match comm.rank() {
        0 => comm.receive(1, 5)?.wait().map(|_| ()),
        _ => Ok(()),
    });
    assert!(texts[0].contains("finished without sending") && texts[0].contains("tag 5"), "{}", texts[0]);
}

#[test]
fn ranks_that_wait_for_each_other_are_told() {
    let texts = outcomes(3, LONG, |comm| comm.receive((comm.rank() + 1) % 3, 1)?.wait().map(|_| ()));
    assert!(texts.iter().any(|text| text.contains("deadlock")), "{texts:?}");
    let mixed = outcomes(2, LONG, |comm| match comm.rank() {
        0 => comm.receive(1, 1)?.wait().map(|_| ()),
        _ => comm.barrier(),
    });
    assert!(mixed.iter().all(|text| !text.is_empty()), "{mixed:?}");
}

#[test]
fn a_wait_ends_at_its_deadline_and_says_what_the_other_does() {
    let texts = outcomes(2, Duration::from_millis(100), |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
        comm.barrier()
    });
    assert!(texts[0].contains("rank 1, which has computed for"), "{}", texts[0]);
    assert!(texts[1].contains("rank 0 failed"), "{}", texts[1]);
}

#[test]
fn bad_calls_are_refused() {
    let texts = outcomes(2, LONG, |comm| comm.send(5, 0, Arc::new(Buffer::U8(vec![]))).map(|_| ()));
    assert!(texts.iter().any(|text| text.contains("rank 5 is not in a group of 2")), "{texts:?}");
    let texts = outcomes(2, LONG, |comm| comm.all_to_all(vec![Buffer::U8(vec![])]).map(|_| ()));
    assert!(texts.iter().any(|text| text.contains("1 parts for 2 ranks")), "{texts:?}");
    assert!(run(0, Options::default(), |_| Ok::<_, Error>(())).is_err());
}

/// All ranks call the same random collectives of random sizes, and a random rank fails at a random step.
#[test]
fn a_failure_anywhere_in_a_long_conversation_ends_it_for_all() {
    let mut state = 1u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for _ in 0..40 {
        let size = 2 + random(6);
        let script: Vec<(usize, usize)> = (0..30).map(|_| (random(4), random(50))).collect();
        let (victim, at) = (random(size), random(30));
        let texts = outcomes(size, LONG, |comm| {
            for (step, (what, n)) in script.iter().enumerate() {
                if comm.rank() == victim && step == at {
                    return Err(Error::Layout("chosen".into()));
                }
                match what {
                    0 => comm.barrier()?,
                    1 => comm.all_reduce(&mut vec![1.0; *n])?,
                    2 => drop(comm.all_gather(Buffer::U8(vec![0; n * comm.rank()]))?),
                    _ => {
                        let next = (comm.rank() + 1) % comm.size();
                        let previous = (comm.rank() + comm.size() - 1) % comm.size();
                        comm.send(next, *n as u64, Arc::new(Buffer::U8(vec![0; *n])))?;
                        comm.receive(previous, *n as u64)?.wait()?;
                    }
                }
            }
            comm.barrier()
        });
        let named = format!("rank {victim} failed");
        for (rank, text) in texts.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            assert!(text.contains(&named), "rank {rank}: {text}");
        }
    }
}

#[test]
fn over_a_link_messages_arrive_after_their_bytes_and_the_latency() {
    let ms = Duration::from_millis;
    let link = Some(SimulatedLink { bandwidth: 1e6, latency: ms(20) });
    run(2, Options { link, ..Options::default() }, |comm| {
        let peer = 1 - comm.rank();
        // Neither rank sends before both have read the time.
        let start = Instant::now();
        comm.barrier()?;
        for _ in 0..2 {
            comm.send(peer, 0, Arc::new(Buffer::U8(vec![0; 30_000])))?.wait()?;
        }
        let (mut first, second) = (comm.receive(peer, 0)?, comm.receive(peer, 0)?);
        while !first.test()? {
            std::thread::yield_now();
        }
        assert!(start.elapsed() >= ms(30), "30 kB in {:?}", start.elapsed());
        second.wait()?;
        assert!(start.elapsed() >= ms(60), "60 kB in {:?}", start.elapsed());
        first.wait()?;
        let start = Instant::now();
        let mut sum = vec![1.0; 20_000];
        comm.all_reduce(&mut sum)?;
        assert!(sum.iter().all(|x| *x == 2.0));
        // Half of the elements go to the other rank, and then half of the sums come back.
        assert!(start.elapsed() >= ms(2 * 40), "80 kB in {:?}", start.elapsed());
        Ok::<_, Error>(())
    })
    .expect("nothing fails");
}

#[test]
fn a_link_that_is_too_slow_ends_at_the_deadline_or_is_refused() {
    let options = |bandwidth| Options {
        deadline: Duration::from_millis(50),
        link: Some(SimulatedLink { bandwidth, latency: Duration::ZERO }),
        ..Options::default()
    };
    let gathered = |bandwidth| run(2, options(bandwidth), |comm| comm.all_gather(Buffer::U8(vec![0; 1000])).map(drop));
    assert!(matches!(gathered(1e-9), Err(Error::Deadline { .. })));
    gathered(1e9).expect("fast enough");
    for bandwidth in [0.0, -1.0, f64::NAN] {
        assert!(gathered(bandwidth).expect_err("no link").to_string().contains("carries nothing"));
    }
}

#[test]
fn more_ranks_than_there_is_memory_for_are_refused_before_any_starts() {
    let ranks = 1 << 22;
    let started = std::sync::atomic::AtomicUsize::new(0);
    let result = run(ranks, Options::default(), |_| {
        started.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok::<_, Error>(())
    });
    let message = result.expect_err("no machine has so much memory").to_string();
    let needed = format!("{:.1} GB", memory(ranks) as f64 / 1e9);
    assert!(
        message.contains("4194304 ranks") && message.contains(&needed) && message.contains("would fit"),
        "{message}"
    );
    assert_eq!(started.into_inner(), 0);
}
