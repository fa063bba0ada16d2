//! Tests that whatever one rank does wrong, all ranks return at once with an error that names the rank and its
//! operation.

use ringspan::Error;
use ringspan::comm::threads::{Options, run};
use ringspan::comm::{Buffer, Communicator};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type Outcome = Result<(), Error>;

/// Runs ranks, and returns the result of each. The deadline is long, because no test should need it.
fn outcomes(size: usize, main: impl Fn(&Arc<dyn Communicator>) -> Outcome + Sync) -> Vec<Outcome> {
    let seen = Mutex::new(vec![Ok(()); size]);
    let start = Instant::now();
    let _ = run(size, Options { deadline: Duration::from_secs(60), ..Options::default() }, |comm| {
        let result = main(&comm);
        seen.lock().expect("no panics here")[comm.rank()] = result.clone();
        result
    });
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    seen.into_inner().expect("no panics here")
}

fn bytes(len: usize) -> Buffer {
    Buffer::U8(vec![7; len])
}

/// Checks that all ranks report a mismatch that contains both texts.
fn assert_mismatch(outcomes: &[Outcome], one: &str, other: &str) {
    for (rank, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Err(error @ Error::Mismatch { rank: a, peer: b, .. }) => {
                let text = error.to_string();
                assert!(text.contains(one) && text.contains(other), "rank {rank}: {text}");
                assert!(*a == rank || *b != rank, "rank {rank} reports the other's view as its own: {text}");
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
}

#[test]
fn a_mismatch_is_told_to_all_ranks_with_both_views() {
    let got = outcomes(4, |comm| {
        (0..3).try_for_each(|_| comm.barrier())?;
        match comm.rank() {
            0 => comm.all_gather(bytes(1)).map(drop),
            _ => comm.barrier(),
        }
    });
    assert_mismatch(&got, "all_gather #3", "barrier #3");
    let got = outcomes(3, |comm| comm.all_reduce(&mut vec![0.0; if comm.rank() == 2 { 5 } else { 4 }]));
    assert_mismatch(&got, "of 4 elements", "of 5 elements");
    let got = outcomes(2, |comm| {
        let counts = if comm.rank() == 0 { [1, 2] } else { [2, 1] };
        comm.reduce_scatter(vec![0.0; 3], &counts).map(drop)
    });
    assert_mismatch(&got, "[1, 2] elements", "[2, 1] elements");
    let got = outcomes(3, |comm| {
        let root = usize::from(comm.rank() == 1);
        comm.broadcast(root, (comm.rank() == root).then(|| bytes(1))).map(drop)
    });
    assert_mismatch(&got, "from rank 0", "from rank 1");
    let got = outcomes(3, |comm| comm.broadcast(2, None).map(drop));
    assert_mismatch(&got, "broadcast #0 from rank 2", "gave no data");
}

#[test]
fn a_mismatch_in_a_split_group_names_ranks_of_the_world() {
    let got = outcomes(4, |comm| {
        let pair = comm.split(comm.rank() / 2, 0)?;
        match comm.rank() {
            3 => pair.all_gather(bytes(1)).map(drop),
            _ => pair.barrier(),
        }?;
        comm.barrier()
    });
    for rank in [2, 3] {
        let text = got[rank].as_ref().expect_err("a mismatch").to_string();
        assert!(
            text.contains(&format!("rank {rank} is in")) && text.contains("in the group of ranks [2, 3]"),
            "{text}"
        );
    }
    assert!(got.iter().all(Result::is_err), "{got:?}");
}

#[test]
fn after_a_failure_every_later_call_fails() {
    let got = outcomes(2, |comm| {
        if comm.rank() == 1 {
            return Err(Error::Layout("lost".into()));
        }
        let alone = match comm.barrier() {
            Err(Error::PeerFailed { peer: 1, .. }) => comm.split(0, 0).map(drop),
            other => panic!("{other:?}"),
        };
        for result in [
            alone,
            comm.barrier(),
            comm.all_reduce(&mut [1.0]),
            comm.all_gather(bytes(1)).map(drop),
            comm.send(1, 0, Arc::new(bytes(1))).map(drop),
            comm.receive(0, 0).map(drop),
            comm.broadcast(0, Some(bytes(1))).map(drop),
            comm.send(7, 0, Arc::new(bytes(1))).map(drop),
        ] {
            assert!(matches!(result, Err(Error::PeerFailed { rank: 0, peer: 1, .. })), "{result:?}");
        }
        Ok(())
    });
    assert_eq!(got, [Ok(()), Err(Error::Layout("lost".into()))]);
}

#[test]
fn a_rank_that_swallows_an_error_does_not_hide_the_others_results() {
    // Rank 0 fails first, with an invalid call, but returns Ok; so the only error left is that of rank 1.
    let result = run(2, Options::default(), |comm| match comm.rank() {
        0 => Ok(usize::from(comm.send(9, 0, Arc::new(bytes(1))).is_err())),
        _ => comm.receive(0, 0)?.wait().map(|_| 5),
    });
    assert!(matches!(result, Err(Error::PeerFailed { rank: 1, peer: 0, .. })), "{result:?}");
    let result = run(2, Options::default(), |comm| {
        let _ = comm.send(9, 0, Arc::new(bytes(1)));
        Ok::<_, Error>(comm.rank())
    });
    assert_eq!(result, Ok(vec![0, 1]));
}

#[test]
fn a_finished_rank_is_not_waited_for_in_any_way() {
    let sent_too_little = |comm: &Arc<dyn Communicator>, polls: bool| {
        if comm.rank() == 1 {
            return comm.send(0, 5, Arc::new(bytes(1))).map(drop);
        }
        let (first, mut second) = (comm.receive(1, 5)?, comm.receive(1, 5)?);
        assert_eq!(first.wait()?.as_deref(), Some(&bytes(1)));
        while polls && !second.test()? {
            std::thread::yield_now();
        }
        second.wait().map(drop)
    };
    for polls in [false, true] {
        let got = outcomes(2, |comm| sent_too_little(comm, polls));
        let text = got[0].as_ref().expect_err("nothing more comes").to_string();
        assert!(text.contains("rank 1 failed: it finished without sending") && text.contains("tag 5"), "{text}");
    }
    let got = outcomes(3, |comm| if comm.rank() == 2 { Ok(()) } else { comm.barrier() });
    for outcome in &got[..2] {
        assert!(matches!(outcome, Err(Error::PeerFailed { peer: 2, .. })), "{outcome:?}");
    }
}

#[test]
fn ranks_that_wait_in_a_circle_are_told_at_once_who_waits_for_whom() {
    let got = outcomes(3, |comm| comm.receive((comm.rank() + 1) % 3, 4)?.wait().map(drop));
    for outcome in &got {
        let text = outcome.as_ref().expect_err("a deadlock").to_string();
        assert!(text.contains("deadlock"), "{text}");
        for rank in 0..3 {
            let peer = (rank + 1) % 3;
            let wait = format!("rank {rank} waits in receive from rank {peer} (tag 4) for rank {peer}");
            assert!(text.contains(&wait), "{text}");
        }
    }
    let got = outcomes(2, |comm| match comm.rank() {
        0 => comm.receive(1, 1)?.wait().map(drop),
        _ => comm.barrier(),
    });
    assert!(got.iter().all(|outcome| outcome.as_ref().is_err_and(|e| e.to_string().contains("deadlock"))), "{got:?}");
    let got = outcomes(1, |comm| comm.receive(0, 1)?.wait().map(drop));
    assert!(got[0].as_ref().is_err_and(|error| error.to_string().contains("deadlock")), "{got:?}");
}

#[test]
fn a_circle_of_two_is_found_while_a_third_rank_computes() {
    let start = Instant::now();
    let seen = Mutex::new(Vec::new());
    let _ = run(3, Options::default(), |comm| {
        let result = match comm.rank() {
            2 => {
                std::thread::sleep(Duration::from_secs(1));
                Ok(())
            }
            rank => comm.receive(1 - rank, 0)?.wait().map(drop),
        };
        seen.lock().expect("no panics here").push((comm.rank(), start.elapsed()));
        result
    });
    for (rank, after) in seen.into_inner().expect("no panics here") {
        assert!(rank == 2 || after < Duration::from_millis(500), "rank {rank} returned after {after:?}");
    }
}

#[test]
fn a_rank_that_talks_from_a_thread_of_its_own_is_not_called_deadlocked() {
    run(2, Options::default(), |comm| {
        if comm.rank() == 1 {
            comm.receive(0, 1)?.wait()?;
            return comm.send(0, 2, Arc::new(bytes(1))).map(drop);
        }
        comm.send(0, 9, Arc::new(bytes(1)))?;
        std::thread::scope(|scope| {
            let helper = scope.spawn(|| {
                comm.receive(0, 9)?.wait()?;
                std::thread::sleep(Duration::from_millis(100));
                comm.send(1, 1, Arc::new(bytes(1))).map(drop)
            });
            std::thread::sleep(Duration::from_millis(30));
            comm.receive(1, 2)?.wait()?;
            helper.join().expect("no panic")
        })
    })
    .expect("the helper sends in time");
}

#[test]
fn a_panic_of_any_kind_or_an_error_without_a_text_reaches_the_others() {
    struct PanicPayload;
    impl std::fmt::Display for PanicPayload {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("no text")
        }
    }
    impl From<Error> for PanicPayload {
        fn from(_: Error) -> Self {
            Self
        }
    }
    let start = Instant::now();
    let result = run(2, Options::default(), |comm| match comm.rank() {
        0 => Err(PanicPayload),
        _ => Ok(comm.barrier()?),
    });
    assert!(result.is_err() && start.elapsed() < Duration::from_secs(5));
    let result = run(2, Options::default(), |comm| match comm.rank() {
        0 => std::panic::panic_any(17),
        _ => comm.barrier(),
    });
    assert!(matches!(result, Err(Error::Panicked { rank: 0, .. })), "{result:?}");
}

#[test]
fn a_thread_that_cannot_start_is_an_error_of_all() {
    let options = Options { stack_bytes: 1 << 60, ..Options::default() };
    let error = run(2, options, |comm| comm.barrier()).expect_err("no machine has such a stack");
    assert!(error.to_string().contains("stack of 1152921504606846976 bytes"), "{error}");
}
