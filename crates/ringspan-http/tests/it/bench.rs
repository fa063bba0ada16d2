//! Tests of the load generator against the server.

use crate::client::{start, start_with};
use ringspan_http::Settings;
use ringspan_http::bench::{BenchError, Load};
use std::time::Duration;

#[test]
fn each_number_of_clients_is_measured() {
    let server = start_with(Settings { api_keys: vec!["k".into()], ..Settings::default() }, None);
    let load = Load {
        url: format!("http://{}", server.address),
        api_key: Some("k".into()),
        models: Vec::new(),
        prompt_tokens: 30,
        output_tokens: 5,
        requests: None,
    };
    let mut all = Vec::new();
    load.run(&[1, 3], |measured| all.push(measured.clone())).expect("measured");
    assert_eq!(all.iter().map(|measured| (measured.clients, measured.requests)).collect::<Vec<_>>(), [(1, 4), (3, 12)]);
    for measured in all {
        assert!(
            measured.first_token.median > Duration::ZERO && measured.first_token.p99 >= measured.first_token.median
        );
        assert!(measured.output_tokens_per_second > 0.0);
        // 30 prompt tokens for 5 of the text.
        let ratio = measured.prompt_tokens_per_second / measured.output_tokens_per_second;
        assert!((ratio - 6.0).abs() < 1e-9, "{ratio}");
    }
}

#[test]
fn a_server_that_refuses_is_named_with_its_reason() {
    let server = start();
    let load = |url: String, prompt_tokens| Load {
        url,
        api_key: None,
        models: Vec::new(),
        prompt_tokens,
        output_tokens: 5,
        requests: None,
    };
    let url = format!("http://{}", server.address);
    match load(url, 5000).run(&[1], |_| ()) {
        Err(BenchError::Refused { status: 400, body, .. }) => assert!(body.contains("5000"), "{body}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(load("https://x".into(), 1).run(&[1], |_| ()), Err(BenchError::Url { .. })));
    assert!(matches!(load("http://127.0.0.1:1".into(), 1).run(&[1], |_| ()), Err(BenchError::Connection(_))));
}

#[test]
fn requests_ask_for_models_in_turn() {
    let server = start();
    let url = format!("http://{}", server.address);
    let load = |models: [&str; 2]| Load {
        url: url.clone(),
        api_key: None,
        models: models.map(str::to_owned).to_vec(),
        prompt_tokens: 3,
        output_tokens: 2,
        requests: Some(2),
    };
    load(["test", "test"]).run(&[1], |_| ()).expect("both are there");
    for models in [["test", "verses"], ["verses", "test"]] {
        match load(models).run(&[1], |_| ()) {
            Err(BenchError::Refused { status: 404, body, .. }) => assert!(body.contains("verses"), "{body}"),
            other => panic!("{other:?}"),
        }
    }
}
