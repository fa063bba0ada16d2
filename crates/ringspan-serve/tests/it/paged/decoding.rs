//! Steps that only decode: what ranks send, and the linear layers that they share.

use super::{PagePool, Random, Text, executed, in_bf16};
use crate::support::*;
use ringspan_serve::Model;
use ringspan_serve::engine::step::{Outputs, Step};

/// Widths of the layers of [`wide`] that ranks share, which 16 outputs for each of 4 ranks divide: queries, keys and values; the output of
/// attention; gate times up; the output of the feed-forward layer.
const SHARED_WIDTHS: [usize; 6] = [512, 256, 256, 512, 1536, 512];

/// The hidden states after a step that decodes one token of each of some sequences, `before` tokens long, and the bytes that each rank
/// sends in it.
fn decoded(
    model: &Model,
    ranks: usize,
    (before, streams): (usize, usize),
    shares_layers: bool,
) -> (Vec<f32>, Vec<u64>) {
    let mut pages = PagePool::new(ranks, 300, 4, &mut Random(3));
    let mut texts: Vec<Text> = (0..streams).map(|seed| Text::new(before + 1, seed as u64)).collect();
    let read = texts.iter_mut().map(|text| text.next(before, Outputs::None, &mut pages)).collect();
    let decode = texts.iter_mut().map(|text| text.next(1, Outputs::Last, &mut pages)).collect();
    let steps = [read, decode].map(|sequences| Step { sequences, shares_layers, ..Step::default() });
    executed(model, (ranks, 1), (300, 4), &steps).swap_remove(1)
}

/// A decoding step sends a softmax state of each new token and layer to each other rank, and nothing that grows with the context.
#[test]
fn a_decoding_step_sends_as_much_after_a_long_context_as_after_a_short_one() {
    let model = qwen3();
    // 2 layers, 4 heads, values of width 8, a maximum and a sum.
    let state = 2 * 4 * (8 + 2) * 4;
    for ranks in [1, 2, 4] {
        for (before, streams) in [(3, 1), (150, 1), (3, 5), (150, 5)] {
            let wanted = (ranks - 1) * streams * state;
            let (_, sent) = decoded(&model, ranks, (before, streams), false);
            assert_eq!(sent, vec![wanted as u64; ranks], "{ranks} ranks, {before} before");
        }
    }
}

/// Ranks that share linear layers also send their shares of the outputs of each new token, whatever the context.
#[test]
fn a_decoding_step_that_shares_layers_sends_its_outputs_and_nothing_that_grows_with_the_context() {
    let model = wide();
    // 2 layers, 8 heads, values of width 64, a maximum and a sum.
    let state = 2 * 8 * (64 + 2) * 4;
    // In f32.
    let outputs = 2 * SHARED_WIDTHS.iter().sum::<usize>() * 4;
    for ranks in [1, 2, 4] {
        for (before, streams) in [(3, 1), (150, 1), (3, 5), (150, 5)] {
            let wanted = (ranks - 1) * streams * (state + outputs / ranks);
            let (_, sent) = decoded(&model, ranks, (before, streams), true);
            assert_eq!(sent, vec![wanted as u64; ranks], "{ranks} ranks, {before} before");
        }
    }
}

/// A share has the bits of the same outputs of the whole layer, so tokens do not depend on whether a prompt waits.
#[test]
fn a_decoding_step_that_shares_layers_has_the_bits_of_one_that_does_not() {
    let models = [("f32", wide()), ("bf16", in_bf16(&wide())), ("biases", wide_of("qwen2")), ("q4_0", wide_in_q4_0())];
    for (what, model) in models {
        for ranks in [2, 3, 4] {
            for streams in [1, 5, 20, 40] {
                let [shared, alone] = [true, false].map(|shares| decoded(&model, ranks, (40, streams), shares));
                assert!(alone.0.iter().any(|value| *value != 0.0));
                assert_ne!(shared.1, alone.1, "layers are shared");
                let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&shared.0), bits(&alone.0), "{what}, {ranks} ranks, {streams} streams");
            }
        }
    }
}

/// Small layers are computed by every rank, and so are those of steps with a chunk of a prompt.
#[test]
fn what_cannot_be_shared_with_gain_is_not() {
    for streams in [1, 5] {
        let [shared, alone] = [true, false].map(|shares| decoded(&qwen3(), 2, (40, streams), shares));
        assert_eq!(shared, alone);
    }
    let model = wide();
    let mixed = |shares_layers: bool| {
        let mut pages = PagePool::new(2, 200, 4, &mut Random(3));
        let mut texts = [Text::new(50, 1), Text::new(50, 2)];
        let [first, second] = &mut texts;
        let read = vec![first.next(20, Outputs::None, &mut pages)];
        let both = vec![first.next(1, Outputs::Last, &mut pages), second.next(30, Outputs::Last, &mut pages)];
        let steps = [read, both].map(|sequences| Step { sequences, shares_layers, ..Step::default() });
        executed(&model, (2, 1), (200, 4), &steps)
    };
    assert_eq!(mixed(true), mixed(false));
}
