//! Collectives over f64 numbers.

use ringspan::Error;
use ringspan::comm::numbers::{all_gather, all_reduce};
use ringspan::comm::threads::{self, Options};

#[test]
fn no_bit_is_lost_and_all_ranks_have_the_same_sums() {
    let own = |rank: usize| [0.1 * rank as f64, f64::MIN_POSITIVE, -1e300];
    let got = threads::run(3, Options::default(), |comm| {
        let own = own(comm.rank());
        Ok::<_, Error>((all_gather(&*comm, &own)?, all_reduce(&*comm, &own)?))
    })
    .expect("runs");
    for (all, sums) in got {
        assert_eq!(all, [own(0), own(1), own(2)]);
        assert_eq!(sums, [0.0 + 0.0 + 0.1 + 0.2, 3.0 * f64::MIN_POSITIVE, -3e300]);
    }
}

#[test]
fn a_rank_that_gives_fewer_is_an_error_with_the_numbers() {
    let failed = threads::run(2, Options::default(), |comm| all_gather(&*comm, &vec![1.0; 1 + comm.rank()]).map(drop));
    let message = failed.expect_err("they differ").to_string();
    assert!(message.contains("gathering numbers") && message.contains("of 2"), "{message}");
}
