//! Tests of salts: requests with different ones share no pages of the prefix cache, and hear of no hits.

use super::engine::{ask, greedy, small, start};
use crate::support::*;
use ringspan_serve::engine::request::{EngineClient, Request};
use std::sync::Arc;

fn salted(prompt: &[u32], salt: Option<&str>) -> Request {
    Request { cache_salt: salt.map(Arc::from), ..greedy(prompt, 12) }
}

#[test]
fn only_requests_with_the_same_salt_find_what_others_have_computed() {
    let model = Arc::new(qwen3());
    let prompt = tokens(21, 3);
    for ring in [1, 3] {
        let engine = start(&model, ring, &small());
        let alone = ask(&engine, salted(&prompt, None));
        for salt in ["one", "two"] {
            let first = ask(&engine, salted(&prompt, Some(salt)));
            assert_eq!((first.cached, &first.tokens), (0, &alone.tokens), "salt {salt}, {ring} ranks");
            let second = ask(&engine, salted(&prompt, Some(salt)));
            assert_eq!((second.cached, &second.tokens), (20, &alone.tokens), "salt {salt}, {ring} ranks");
        }
        assert_eq!(ask(&engine, salted(&prompt, None)).cached, 20);
    }
}

/// A request waits for another that reads the same beginning, but not for one whose pages it may not have.
#[test]
fn requests_at_the_same_time_share_no_pages_across_salts() {
    let model = Arc::new(qwen3());
    let engine = start(&model, 2, &small());
    let prompt = tokens(90, 3);
    let salts = [Some("one"), Some("two"), None, Some("one")];
    let client = engine.client();
    let events = salts.map(|salt| client.submit(salted(&prompt, salt)).expect("taken"));
    let answers = events.map(super::engine::collect);
    assert_eq!(answers[..3].iter().map(|answer| answer.cached).collect::<Vec<_>>(), [0, 0, 0]);
    assert!(answers[3].cached >= 80, "the last request waits for the first: {}", answers[3].cached);
    assert!(answers.iter().all(|answer| answer.tokens == answers[0].tokens));
}

/// The file of a session would have to have the salts, so texts with one are left out of it.
#[test]
fn sessions_have_no_texts_with_a_salt() {
    let model = Arc::new(qwen3());
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("session.safetensors");
    let (open, secret) = (tokens(21, 3), tokens(18, 4));
    let first = start(&model, 2, &small());
    let texts = [(&open, None), (&secret, Some("one"))].map(|(prompt, salt)| ask(&first, salted(prompt, salt)).tokens);
    let saved = first.client().save_session(&file, "qwen3").expect("saved");
    assert_eq!(saved.tokens, open.len() + texts[0].len() - 1);
    let second = start(&model, 2, &small());
    second.client().restore_session(&file, "qwen3").expect("restored");
    assert_eq!(ask(&second, salted(&open, None)).cached, 20);
    for salt in [None, Some("one")] {
        assert_eq!(ask(&second, salted(&secret, salt)).cached, 0, "{salt:?}");
    }
}
