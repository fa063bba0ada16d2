//! Steps that read chunks of prompts: what ranks send.

use super::{PagePool, Random, Text, executed};
use crate::support::*;
use ringspan_serve::engine::step::{Outputs, Step};

/// Bytes of a key and a value in f32: 2 heads of width 8 each.
const KEY_AND_VALUE: u64 = 2 * 2 * 8 * 4;
const LAYERS: u64 = 2;

/// The bytes that the busiest of two ranks sends in a step that reads `chunk` tokens of a text, `before` of which have been read.
fn sent(before: usize, chunk: usize) -> u64 {
    let mut pages = PagePool::new(2, 40, 4, &mut Random(3));
    let mut text = Text::new(before + chunk, 1);
    let counts = [before, chunk].into_iter().filter(|count| *count > 0);
    let sequences = counts.map(|count| vec![text.next(count, Outputs::None, &mut pages)]);
    let steps: Vec<Step> = sequences.map(|sequences| Step { sequences, ..Step::default() }).collect();
    let (_, sent) = executed(&qwen3(), (2, 1), (40, 4), &steps).pop().expect("a step");
    sent.into_iter().max().expect("two ranks")
}

/// Few queries behind many keys travel themselves, so what ranks send does not grow with the text.
#[test]
fn a_short_chunk_sends_as_much_behind_a_long_text_as_behind_a_short_one() {
    let short = sent(64, 2);
    assert_eq!(sent(128, 2), short);
    // A ring would send half of the 64 keys and values before the chunk.
    assert!(short < LAYERS * 32 * KEY_AND_VALUE, "{short} bytes");
}

/// Keys and values of many queries travel, since they have fewer heads than these and nothing comes back: to the ranks of their pages,
/// and then to the other rank.
#[test]
fn a_long_chunk_sends_no_more_than_its_keys_and_values() {
    let long = sent(0, 128);
    // A rank sends the keys and values of half of the tokens twice. If queries travelled, they and their outputs, with 4 heads and
    // a softmax state, would take over twice the bytes of one of these.
    let most = LAYERS * (64 + 64) * KEY_AND_VALUE;
    assert!((LAYERS * 64 * KEY_AND_VALUE..=most).contains(&long), "{long} bytes, at most {most}");
}
