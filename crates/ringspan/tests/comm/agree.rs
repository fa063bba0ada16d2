//! All ranks are told which settings differ before they work together.

use ringspan::Result;
use ringspan::comm::agree::{Setting, agree, smallest};
use ringspan::comm::threads::{Options, run};

fn outcome(of: impl Fn(usize) -> Vec<(&'static str, &'static str)> + Sync) -> Result<Vec<()>> {
    run(4, Options::default(), |comm| {
        let own = of(comm.rank());
        let own: Vec<Setting> = own.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        agree(&*comm, &own)
    })
}

#[test]
fn the_first_rank_that_differs_is_named_with_the_setting() {
    outcome(|_| vec![("--lr", "0.1"), ("--steps", "20")]).expect("all the same");
    outcome(|_| vec![]).expect("nothing to compare");
    let error = outcome(|rank| vec![("--lr", "0.1"), ("--steps", if rank >= 2 { "30" } else { "20" })]);
    let text = error.expect_err("rank 2 differs").to_string();
    assert!(text.contains("rank 2 has --steps: 30, but rank 0 has 20"), "{text}");
    let error = outcome(|rank| if rank == 3 { vec![("--lr", "")] } else { vec![] });
    assert!(error.expect_err("rank 3 differs").to_string().contains("rank 3 has --lr: , but rank 0 has nothing"));
    // The same settings in another order are reported as another list.
    let error = outcome(|rank| if rank == 1 { vec![("b", "2"), ("a", "1")] } else { vec![("a", "1"), ("b", "2")] });
    assert!(error.expect_err("rank 1 differs").to_string().contains("the order of the settings"));
}

#[test]
fn all_ranks_get_the_smallest_number() {
    let numbers = [7, u64::MAX, 3, 3];
    let got = run(4, Options::default(), |comm| smallest(&*comm, numbers[comm.rank()]));
    assert_eq!(got.expect("no rank fails"), [3; 4]);
}
