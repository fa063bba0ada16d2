//! Long random conversations, checked against direct computation; also with one rank that fails at a random point.

use ringspan::Error;
use ringspan::comm::threads::{Options, run};
use ringspan_testing::comm::conversation::{Random, converse};
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[test]
fn random_conversations_give_what_direct_computation_gives() {
    for seed in 0..24 {
        let size = 1 + seed as usize % 8;
        run(size, Options::default(), |comm| converse(&comm, seed * 7919, 60, |_| Ok(()))).expect("nothing fails");
    }
}

#[test]
fn a_rank_that_fails_at_a_random_step_is_named_by_all_within_seconds() {
    let mut random = Random(5);
    for seed in 0..40u64 {
        let (size, steps) = (2 + random.below(7), 30);
        let (victim, at, panics) = (random.below(size), random.below(steps), random.below(2) == 0);
        let seen = Mutex::new(vec![None; size]);
        let start = Instant::now();
        let result = run(size, Options::default(), |comm| {
            let rank = comm.rank();
            let fate = |step: usize| match (rank == victim && step == at, panics) {
                (true, true) => std::panic::panic_any("chosen"),
                (true, false) => Err(Error::Layout("chosen".into())),
                _ => Ok(()),
            };
            // The barrier is for ranks that do not need any more messages of the failed rank.
            let result = converse(&comm, seed, steps, fate).and_then(|()| comm.barrier());
            seen.lock().expect("no panics here")[rank] = Some(result.clone());
            result
        });
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
        match result {
            Err(Error::Panicked { rank, .. }) if panics => assert_eq!(rank, victim),
            Err(Error::Layout(text)) if !panics => assert_eq!(text, "chosen"),
            other => panic!("{other:?}"),
        }
        for (rank, result) in seen.into_inner().expect("no panics here").into_iter().enumerate() {
            match result {
                Some(Err(Error::PeerFailed { peer, message, .. })) => {
                    assert_eq!(peer, victim);
                    assert!(message.contains("chosen"), "{message}");
                }
                other => assert_eq!(rank, victim, "{other:?}"),
            }
        }
    }
}
