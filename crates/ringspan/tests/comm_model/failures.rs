//! In every interleaving, a failure reaches all ranks, names the failed rank, and leaves no rank waiting.

use super::comm::Buffer;
use super::error::Error;
use super::{Comm, Outcome, explore, number, outcome};

/// How rank 1 ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Fails,
    Panics,
    /// It makes an invalid call instead of a collective.
    Refused,
    Leaves,
}

impl End {
    fn now(self, comm: &Comm) -> Result<(), Error> {
        match self {
            Self::Fails => Err(Error::Layout("lost".into())),
            // `panic!` would call the model's hook, which prints the interleaving of every run.
            Self::Panics => std::panic::resume_unwind(Box::new("lost")),
            Self::Refused => comm.reduce_scatter(vec![0.0; 3], &[1]).map(drop),
            Self::Leaves => Ok(()),
        }
    }

    /// Whether `error` is the one that the others are told about rank 1.
    fn is_told_by(self, error: &Error) -> bool {
        let Error::PeerFailed { peer: 1, message, .. } = error else { return false };
        message.contains(match self {
            Self::Fails | Self::Panics => "lost",
            Self::Refused => "1 counts for 3 elements on 3 ranks",
            Self::Leaves => "it finished without sending",
        })
    }
}

/// Checks that `run` returns rank 1's own error, and that the others name it, or are `Ok` if `may_pass`.
fn check(end: End, got: &Outcome<()>, may_pass: bool) {
    match (end, &got.whole) {
        (End::Fails, Err(Error::Layout(_)))
        | (End::Panics, Err(Error::Panicked { rank: 1, .. }))
        | (End::Refused, Err(Error::Communicator { rank: 1, .. })) => {}
        (End::Leaves, Err(error)) if end.is_told_by(error) => {}
        (_, other) => panic!("{end:?}: run returned {other:?}"),
    }
    for rank in [0, 2] {
        match &got.ranks[rank] {
            Some(Ok(())) if may_pass => {}
            Some(Err(error)) if end.is_told_by(error) => {}
            other => panic!("{end:?}: rank {rank} has {other:?}"),
        }
    }
}

#[test]
fn a_rank_that_ends_before_a_collective_ends_it_for_all() {
    for end in [End::Fails, End::Panics, End::Refused, End::Leaves] {
        explore(4000, move || {
            let got = outcome(3, |comm| match comm.rank() {
                1 => end.now(comm),
                _ => comm.all_reduce(&mut [1.0; 4]),
            });
            check(end, &got, false);
        });
    }
}

#[test]
fn a_rank_that_ends_between_the_halves_of_a_collective_ends_it_for_all() {
    // all_reduce has two rounds: rank 1 joins a first collective, and ends while others may not have left it yet.
    for end in [End::Fails, End::Panics, End::Refused, End::Leaves] {
        explore(4000, move || {
            let got = outcome(3, |comm| {
                comm.barrier()?;
                if comm.rank() == 1 {
                    return end.now(comm);
                }
                comm.barrier()
            });
            check(end, &got, false);
        });
    }
}

#[test]
fn a_rank_that_fails_after_the_last_collective_takes_nothing_from_those_who_left_it() {
    for end in [End::Fails, End::Panics] {
        explore(4000, move || {
            let got = outcome(3, |comm| {
                let all = comm.all_gather(Buffer::U64(vec![comm.rank() as u64]))?;
                assert_eq!(all.len(), 3);
                if comm.rank() == 1 { end.now(comm) } else { Ok(()) }
            });
            check(end, &got, true);
        });
    }
    explore(4000, || {
        let got = outcome(3, |comm| comm.barrier());
        assert_eq!(got.whole, Ok(vec![(); 3]));
    });
}

#[test]
fn a_receive_from_a_rank_that_ends_names_it() {
    for end in [End::Fails, End::Panics, End::Leaves] {
        explore(4000, move || {
            let got = outcome(3, |comm| match comm.rank() {
                1 => {
                    comm.send(0, 5, number(1))?;
                    end.now(comm)
                }
                0 => {
                    let (first, second) = (comm.receive(1, 5)?, comm.receive(1, 5)?);
                    first.wait()?;
                    second.wait().map(drop)
                }
                // This rank waits for a rank that waits for the one that ends.
                _ => comm.receive(0, 6)?.wait().map(drop),
            });
            check(end, &got, false);
        });
    }
}

#[test]
fn of_two_ranks_that_fail_at_once_all_are_told_the_same_one() {
    explore(15000, || {
        let got = outcome(4, |comm| match comm.rank() {
            rank @ 0..2 => Err::<(), _>(Error::Layout(format!("rank {rank} lost"))),
            _ => comm.barrier(),
        });
        let Err(Error::Layout(first)) = &got.whole else { panic!("{:?}", got.whole) };
        for rank in [2, 3] {
            match &got.ranks[rank] {
                Some(Err(Error::PeerFailed { message, .. })) if message.contains(first.as_str()) => {}
                other => panic!("the first was {first}, but rank {rank} has {other:?}"),
            }
        }
    });
}

#[test]
fn ranks_in_different_collectives_all_see_both_views() {
    explore(15000, || {
        let got = outcome(3, |comm| match comm.rank() {
            0 => comm.all_gather(Buffer::U8(vec![1])).map(drop),
            _ => comm.barrier(),
        });
        for (rank, result) in got.ranks.iter().enumerate() {
            match result {
                Some(Err(error @ Error::Mismatch { .. })) => {
                    let text = error.to_string();
                    assert!(text.contains("all_gather #0") && text.contains("barrier #0"), "rank {rank}: {text}");
                }
                other => panic!("rank {rank} has {other:?}"),
            }
        }
    });
}

#[test]
fn a_circle_of_waiting_ranks_is_found_by_whoever_closes_it() {
    explore(15000, || {
        // Rank 3 is not in the cycle, but waits for a rank in it.
        let got = outcome(4, |comm| comm.receive((comm.rank() + 1) % 3, 4)?.wait().map(drop));
        for (rank, result) in got.ranks.iter().enumerate() {
            match result {
                Some(Err(error @ Error::Communicator { .. })) if error.to_string().contains("deadlock") => {}
                other => panic!("rank {rank} has {other:?}"),
            }
        }
    });
}

#[test]
fn ranks_that_only_wait_long_are_not_called_deadlocked() {
    explore(7000, || {
        // Each rank waits for the next, and the last one sends: until then the chain looks like a cycle.
        let got = outcome(3, |comm| {
            let rank = comm.rank();
            if rank < 2 {
                comm.receive(rank + 1, 0)?.wait()?;
            }
            if rank > 0 {
                comm.send(rank - 1, 0, number(1))?;
            } else {
                comm.send(2, 1, number(1))?;
            }
            if rank == 2 { comm.receive(0, 1)?.wait().map(drop) } else { Ok(()) }
        });
        assert_eq!(got.whole, Ok(vec![(); 3]));
    });
}
