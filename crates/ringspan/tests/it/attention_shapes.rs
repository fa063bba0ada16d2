//! Tensors and positions that do not fit are errors with numbers: attention's API does not panic.

use ringspan::attention::{Forward, Inputs, Merge, Tokens, backward, decode, forward};
use ringspan::comm::threads;
use ringspan::kernel::{Data, Statistics, View};
use ringspan::{Documents, Error, Group, Layout, LayoutKind, Mask, Run, Schedule, Score, StrategyKind};

const T: usize = 6;
const HEADS: usize = 4;
const DIM: usize = 8;

/// Runs a call on a single rank and returns its result.
fn on_one_rank<R: Send>(call: impl Fn(&Group) -> Result<R, Error> + Sync) -> Result<R, Error> {
    let run = |comm| call(&Group::new(comm, (1, 1), ringspan::Kernel::new(1))?);
    threads::run(1, threads::Options::default(), run).map(|mut results| results.remove(0))
}

fn schedule() -> Schedule {
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, T), 1).expect("a rank");
    Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (1, 1)).expect("fits")
}

fn view(data: &[f32]) -> View<'_> {
    View::new(data, T, HEADS, DIM).expect("its size")
}

/// Views with other shapes of as many elements, and views with rows out of bounds.
fn bent(view: View<'_>) -> Vec<View<'_>> {
    vec![
        View { tokens: HEADS, heads: T, ..view },
        View { tokens: 2 * T, dim: DIM / 2, ..view },
        View { heads: 2 * HEADS, dim: DIM / 2, ..view },
        View { dim: 0, ..view },
        View { token_stride: view.token_stride + 1, ..view },
        View { head_stride: view.head_stride + 1, ..view },
        View { token_stride: usize::MAX, ..view },
        View { head_stride: usize::MAX, ..view },
        View { heads: usize::MAX, head_stride: 0, ..view },
        View { data: Data::F32(&[]), ..view },
    ]
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let (data, schedule, score) = (ringspan_testing::mesh::random(T * HEADS * DIM, 1), schedule(), Score::new(0.3));
    let good = view(&data);
    for bad in bent(good) {
        for (name, inputs) in [
            ("q", Inputs::new(bad, good, good, &score)),
            ("k", Inputs::new(good, bad, good, &score)),
            ("v", Inputs::new(good, good, bad, &score)),
            ("the bias", Inputs::new(good, good, good, &score).with_bias(bad)),
        ] {
            let saved = Forward {
                out: vec![0.0; data.len()],
                statistics: Statistics { max: vec![0.0; T * HEADS], sum: vec![1.0; T * HEADS] },
            };
            let runs = [Run { document: 0, start: 0, len: T, step: 1 }];
            let tokens = Tokens { queries: &runs, keys: &runs, seq_lens: (T, T) };
            let errors = [
                on_one_rank(|group| forward(group, &schedule, &inputs)).err(),
                on_one_rank(|group| backward(group, &schedule, &inputs, &saved, good)).err(),
                on_one_rank(|group| decode(group, &Mask::causal(), &tokens, &inputs, Merge::AllGather)).err(),
            ];
            for error in errors {
                assert!(matches!(error, Some(Error::Shape { .. })), "{name} as {bad:?}: {error:?}");
            }
        }
    }
}

#[test]
fn gradients_of_another_shape_are_refused_before_they_are_read() {
    let (data, schedule, score) = (ringspan_testing::mesh::random(T * HEADS * DIM, 2), schedule(), Score::new(0.3));
    let good = view(&data);
    let inputs = Inputs::new(good, good, good, &score);
    let saved = on_one_rank(|group| forward(group, &schedule, &inputs)).expect("fits");
    for bad in bent(good) {
        let error = on_one_rank(|group| backward(group, &schedule, &inputs, &saved, bad)).expect_err("does not fit");
        assert!(matches!(error, Error::Shape { what: "d_out", .. }), "{bad:?}: {error}");
    }
    assert!(on_one_rank(|group| backward(group, &schedule, &inputs, &saved, good)).is_ok());
}

#[test]
fn positions_that_cannot_be_counted_are_refused() {
    let (data, score) = (ringspan_testing::mesh::random(T * HEADS * DIM, 3), Score::new(0.3));
    let inputs = Inputs::new(view(&data), view(&data), view(&data), &score);
    let run = Run { document: 0, start: 0, len: T, step: 1 };
    for (odd, seq_len) in [
        (Run { step: 0, ..run }, T),
        (Run { step: usize::MAX, ..run }, T),
        (Run { start: usize::MAX, ..run }, T),
        (Run { len: usize::MAX, ..run }, T),
        (run, usize::MAX),
    ] {
        for (queries, keys) in [(odd, run), (run, odd)] {
            let tokens = Tokens { queries: &[queries], keys: &[keys], seq_lens: (seq_len, T) };
            let call = |group: &Group| decode(group, &Mask::causal_bottom_right(), &tokens, &inputs, Merge::Tree);
            let error = on_one_rank(call).expect_err("not a number of tokens");
            assert!(matches!(error, Error::Layout(_)), "{odd:?}: {error}");
        }
    }
}
