//! Tests of the scheduler with sliding-window layers, whose pages are few.

use super::super::scheduler::Bounds;
use super::harness::{Harness, VOCABULARY, bounds};
use super::request;

/// A sequence holds the pages of its window, however long its text is; those before it stay in the prefix cache as long as there is
/// room, and a hit ends where they are.
#[test]
fn windows_hold_as_many_pages_after_a_long_text_as_after_a_short_one() {
    for ranks in 1..5 {
        let mut harness = Harness::with_window(ranks, 100, bounds(4), true, Some((19, 30)));
        harness.submit(request(&[2; 90], 200), None, None);
        let most = (20usize.div_ceil(4)).div_ceil(ranks) + 2;
        while harness.step() {
            let pages = harness.scheduler.caches()[0].window().expect("windows").pages();
            assert!((0..ranks).all(|rank| pages.used(rank) <= most), "{ranks} ranks");
        }
        let mut harness = harness.finish();
        let text = [harness.clients[0].prompt.clone(), harness.clients[0].answer.clone()].concat();
        harness.submit(request(&text, 1), None, None);
        let scheduled = harness.scheduler.next().expect("a step");
        let sequence = &scheduled.step.sequences[0];
        assert_eq!(sequence.start, 289, "the end of the text is there");
        assert_eq!(sequence.window.first, (289 - 19) / 4);
    }
}

#[test]
fn a_hit_ends_where_the_pages_of_its_window_are_gone() {
    let mut harness = Harness::with_window(1, 200, bounds(4), true, Some((7, 5)));
    let text: Vec<u32> = (0..40).map(|i| i * i % VOCABULARY).collect();
    harness.submit(request(&text, 1), None, None);
    let mut harness = harness.finish();
    // The beginning has lost its window to what came after it: nothing of it helps, except where the window begins the text.
    harness.submit(request(&text[..21], 1), None, None);
    let start = harness.scheduler.next().expect("a step").step.sequences[0].start;
    assert_eq!(start, 0);
    harness.scheduler.fail_all("over");
    let mut harness = Harness::with_window(1, 200, bounds(4), true, Some((7, 80)));
    harness.submit(request(&text, 1), None, None);
    let mut harness = harness.finish();
    harness.submit(request(&text[..21], 1), None, None);
    assert_eq!(harness.scheduler.next().expect("a step").step.sequences[0].start, 20);
}

/// A hit in the middle of a page needs that page and a copy. Where there is no room for both, the page itself is continued: without its
/// rows, the window before them would begin in a page that is gone, and nothing of the text would be a hit.
#[test]
fn a_hit_takes_its_last_page_where_there_is_no_room_for_a_copy() {
    let bounds = Bounds { prefill_chunk: 2, mixed_chunk: Some(2), ..bounds(4) };
    let text: Vec<u32> = (0..22).map(|i| i * i % VOCABULARY).collect();
    for window in [None, Some((5, 3))] {
        let mut harness = Harness::with_window(1, 7, bounds, true, window);
        harness.submit(request(&text, 1), None, None);
        let mut harness = harness.finish();
        // Another request holds the only page that is free, and that of the window before the last two pages.
        harness.submit(request(&[1, 1], 2), None, None);
        assert!(harness.step());
        harness.submit(request(&[text.as_slice(), &[3]].concat(), 1), None, None);
        assert!(harness.step());
        assert_eq!(harness.scheduler.counts().prefix_hits, 22, "{window:?}");
        harness.finish();
    }
}
