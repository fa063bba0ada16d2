//! Ranks as processes: they keep the same contract as threads, and however a process fails, all others report it.
//!
//! `cargo test -p ringspan --features mpi --test comm_mpi [NAME]`. The program starts itself under `mpirun`: with the
//! arguments `rank SCENARIO` it is one rank, otherwise it is the test runner.

mod failures;
mod mpirun;
mod rank;

use mpirun::run;
use std::panic::catch_unwind;
use std::process::{Command, ExitCode};
use std::time::Duration;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, scenario @ ..] = &arguments[..]
        && word == "rank"
    {
        return rank::main(scenario);
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let tests = [&CONTRACT[..], &failures::TESTS[..]].concat();
    let chosen: Vec<_> = tests.iter().filter(|(name, _)| filter.is_none_or(|part| name.contains(part))).collect();
    println!("running {} tests", chosen.len());
    let failed = chosen.iter().filter(|(name, test)| {
        let good = catch_unwind(test).is_ok();
        println!("test {name} ... {}", if good { "ok" } else { "FAILED" });
        !good
    });
    match failed.count() {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// The name of a test, and its function.
type Test = (&'static str, fn());

const CONTRACT: [Test; 7] = [
    ("the_contract_holds_on_2_3_4_and_8_processes", || {
        [2, 3, 4, 8].into_iter().for_each(|ranks| run(ranks, &["contract"]).assert_good());
    }),
    ("a_message_of_several_pieces_arrives_whole", || run(2, &["large"]).assert_good()),
    ("attention_has_the_same_bits_as_between_threads", || {
        for ranks in [2, 4, 8] {
            let outcome = run(ranks, &["attention"]);
            outcome.assert_good();
            for (rank, wanted) in rank::attention_between_threads(ranks).into_iter().enumerate() {
                let text = &outcome.ranks[rank];
                assert!(text.contains(&wanted), "rank {rank} of {ranks}: {text}, wanted {wanted}");
            }
        }
    }),
    ("a_job_that_is_suspended_as_a_whole_goes_on", || {
        let suspend = |ids: &[String]| {
            let all = |signal| assert!(Command::new("kill").arg(signal).args(ids).status().expect("kill").success());
            assert_eq!(ids.len(), 3);
            std::thread::sleep(Duration::from_secs(3));
            all("-STOP");
            std::thread::sleep(Duration::from_secs(6));
            all("-CONT");
        };
        mpirun::run_and(3, &["long talk"], suspend).assert_good();
    }),
    ("a_world_takes_work_repeatedly", || [1, 2, 4].into_iter().for_each(|ranks| run(ranks, &["world"]).assert_good())),
    ("worlds_of_processes_begin_and_end_while_these_stay", || run(2, &["worlds"]).assert_good()),
    ("a_transfer_is_over_when_the_compute_beside_it_is", || run(2, &["overlap"]).assert_good()),
];
