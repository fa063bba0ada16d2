//! However a process fails, every other process ends in time and names it and the operation.

use crate::Test;
use crate::mpirun::run;
use std::time::Duration;

/// Time limit for failures that are noticed at once; starting and ending processes takes most of it.
const AT_ONCE: Duration = Duration::from_secs(8);
/// Time limit for failures that are only noticed by silence.
const SILENCE: Duration = Duration::from_secs(14);

pub(crate) const TESTS: [Test; 13] = [
    ("a_world_whose_rank_panics_is_closed_and_says_why", || {
        for victim in [0, 2] {
            let outcome = run(3, &["world", &victim.to_string()]);
            outcome.assert_failure(victim, &["panicked", "the victim breaks"], AT_ONCE);
            let says_why = |text: &String| text.contains("after that:");
            assert!(outcome.ranks.iter().all(says_why), "{:#?}", outcome.ranks);
        }
    }),
    ("an_error_of_any_rank_reaches_all_with_its_name", || {
        for victim in [0, 2, 3] {
            let outcome = run(4, &["error", &victim.to_string()]);
            outcome.assert_failure(victim, &["no such luck", "barrier"], AT_ONCE);
            assert!(outcome.ranks[victim].contains("no such luck"), "{:#?}", outcome.ranks);
        }
    }),
    ("a_panic_of_any_rank_reaches_all_with_its_name", || {
        for victim in [0, 1] {
            run(3, &["panic", &victim.to_string()]).assert_failure(
                victim,
                &["panicked", "the victim breaks", "barrier"],
                AT_ONCE,
            );
        }
    }),
    ("a_rank_that_exits_is_named_by_all", || {
        for victim in [0, 3] {
            run(4, &["exit", &victim.to_string()]).assert_failure(victim, &["process is gone", "barrier"], AT_ONCE);
        }
    }),
    ("a_rank_that_is_killed_is_named_by_all", || {
        for victim in [0, 1, 3] {
            run(4, &["kill", &victim.to_string()]).assert_failure(victim, &["process is gone", "barrier"], AT_ONCE);
        }
    }),
    ("a_rank_that_is_stopped_is_named_by_all", || {
        for victim in [0, 2] {
            run(4, &["stop", &victim.to_string()]).assert_failure(victim, &["no heartbeat", "barrier"], SILENCE);
        }
    }),
    ("ranks_that_compute_end_too", || {
        run(3, &["error while others compute", "1"]).assert_failure(1, &["no such luck", "its own work"], AT_ONCE);
    }),
    ("ranks_in_different_collectives_are_told_both_views", || {
        for (scenario, one, other) in [
            ("mismatch", "all_gather #0", "barrier #0"),
            ("lengths", "of 5 elements", "of 4 elements"),
            ("counts", "reduce_scatter #0", "reduce_scatter #0"),
        ] {
            let outcome = run(3, &[scenario, "2"]);
            assert!(!outcome.good && outcome.elapsed < AT_ONCE, "{:?} {:#?}", outcome.elapsed, outcome.ranks);
            for text in &outcome.ranks {
                assert!(
                    text.contains("but rank") && text.contains(one) && text.contains(other),
                    "{:#?}",
                    outcome.ranks
                );
            }
        }
    }),
    ("a_bad_call_ends_all", || {
        run(3, &["bad call", "1"]).assert_failure(1, &["rank 99 is not in a group of 3"], AT_ONCE);
    }),
    ("a_rank_that_finished_is_not_waited_for", || {
        let outcome = run(2, &["finished", "1"]);
        outcome.assert_failure(1, &["finished without sending", "tag 5"], AT_ONCE);
        // The rank itself ended well, but not the job.
        assert!(outcome.ranks[1].contains("the end of its work"), "{:#?}", outcome.ranks);
    }),
    ("a_wait_ends_at_its_deadline_and_says_what_the_other_does", || {
        for (victim, waiter) in [(0, 2), (1, 0), (1, 2)] {
            let outcome = run(3, &["late", &victim.to_string()]);
            assert!(!outcome.good && outcome.elapsed < AT_ONCE, "{:#?}", outcome.ranks);
            let texts = outcome.ranks.join("\n");
            assert!(texts.contains(&format!("for rank {victim}, which has computed for")), "{waiter}: {texts}");
            assert!(outcome.ranks.iter().all(|text| text.contains("error: rank")), "{:#?}", outcome.ranks);
        }
    }),
    ("ranks_that_wait_in_a_circle_end", || {
        let outcome = run(3, &["circle", "0"]);
        assert!(!outcome.good, "{:#?}", outcome.ranks);
        for text in &outcome.ranks {
            assert!(text.contains("deadlock"), "{:#?}", outcome.ranks);
        }
    }),
    ("a_process_that_never_starts_mpi_ends_all", || {
        let outcome = run(3, &["absent", "1"]);
        assert!(!outcome.good && outcome.elapsed < AT_ONCE, "{:#?}", outcome.ranks);
    }),
];
