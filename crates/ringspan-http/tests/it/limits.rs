//! Tests of limits: sizes of bodies, API keys, busy engines, clients that disconnect, and shutdown.

use crate::client::{read, start, start_with};
use ringspan_http::Settings;
use ringspan_serve::engine::request::EngineClient;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[track_caller]
fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what} takes too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn bodies_are_json_objects_of_limited_size() {
    let server = start_with(Settings { max_body: 1000, ..Settings::default() }, None);
    let post = |headers: &str, body: &[u8]| server.request("POST", "/v1/completions", headers, body);
    let json = "content-type: application/json\r\n";
    for wrong in [&b"{"[..], b"", b"[]", b"\"x\"", b"{\"prompt\": \"\xff\"}", "[".repeat(900).as_bytes()] {
        post(json, wrong).error(400);
    }
    post("content-type: text/plain\r\n", b"{}").error(415);
    post(json, "{\"prompt\": \"x\"}".repeat(100).as_bytes()).error(413);
    let fine = b"{\"prompt\": \"x\", \"max_tokens\": 1}";
    assert_eq!(post("content-type: application/json; charset=utf-8\r\n", fine).status, 200);
    assert_eq!(post("", fine).status, 200);
    post("origin: http://elsewhere.example\r\n", fine).error(415);
    let error = post(&format!("{json}content-encoding: gzip\r\n"), b"\x1f\x8b\x08").error(415);
    let message = "the body is encoded as gzip; send it without Content-Encoding";
    assert_eq!(error["message"], message);
    assert_eq!(post(&format!("{json}content-encoding: identity\r\n"), fine).status, 200);
}

/// A client that falls silent in the middle of its body is told so; one that is slow is not.
#[test]
fn bodies_come_in_time() {
    let server = start_with(Settings { body_timeout: Duration::from_millis(400), ..Settings::default() }, None);
    let body = b"{\"prompt\": \"x\", \"max_tokens\": 1}";
    let begin = |sent: usize| {
        let mut socket = TcpStream::connect(server.address).expect("a connection");
        let length = body.len();
        write!(socket, "POST /v1/completions HTTP/1.0\r\ncontent-length: {length}\r\n\r\n").expect("sent");
        socket.write_all(&body[..sent]).expect("sent");
        socket
    };
    let silent = begin(5);
    let mut slow = begin(0);
    for byte in body.chunks(5) {
        std::thread::sleep(Duration::from_millis(100));
        slow.write_all(byte).expect("sent");
    }
    assert_eq!(read(slow).status, 200);
    assert!(read(silent).error(408)["message"].as_str().unwrap().contains("in time"));
}

#[test]
fn routes_and_methods_that_do_not_exist_say_so() {
    let server = start();
    assert!(server.get("/v1/nothing").error(404)["message"].as_str().unwrap().contains("/v1/nothing"));
    server.get("/v1/completions").error(405);
    let error = server.complete("x", json!({"model": "gpt-9"})).error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("test"), "{error}");
}

#[test]
fn keys_open_what_is_closed() {
    let keys = vec!["first".to_owned(), "second".to_owned()];
    let server = start_with(Settings { api_keys: keys, ..Settings::default() }, None);
    for path in ["/", "/health", "/version", "/openapi.json"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics"] {
        assert_eq!(server.get(path).error(401)["code"], "invalid_api_key", "{path}");
        for (header, status) in [
            ("authorization: Bearer second\r\n", 200),
            ("authorization: bearer first\r\n", 200),
            ("x-api-key: first\r\n", 200),
            ("authorization: Bearer third\r\n", 401),
            ("authorization: Bearer \r\n", 401),
            ("authorization: Basic first\r\n", 401),
        ] {
            assert_eq!(server.request("GET", path, header, b"").status, status, "{path} {header}");
        }
    }
    server.get("/v1/nothing").error(404);
}

#[test]
fn pages_of_other_origins_are_admitted_if_asked_for() {
    let origin = "origin: http://here.example\r\n";
    let none = start();
    assert!(!none.request("GET", "/version", origin, b"").headers.contains("access-control-allow-origin"));
    let settings = Settings {
        allow_origin: vec!["http://here.example".into()],
        api_keys: vec!["k".into()],
        ..Settings::default()
    };
    let server = start_with(settings, None);
    let answer = server.request("GET", "/version", origin, b"");
    assert!(answer.headers.contains("access-control-allow-origin: http://here.example"), "{}", answer.headers);
    let asked =
        format!("{origin}access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n");
    let answer = server.request("OPTIONS", "/v1/completions", &asked, b"");
    assert!(
        answer.status == 200 && answer.headers.contains("access-control-allow-headers: authorization"),
        "{answer:?}"
    );
}

#[test]
fn a_busy_engine_is_429_and_a_dead_one_503() {
    let server = start();
    server.engine.most.store(1, Ordering::SeqCst);
    let running = server.send(
        "POST",
        "/v1/completions",
        "content-type: application/json\r\n",
        json!({"prompt": "SLOW", "max_tokens": 4000, "stream": true}).to_string().as_bytes(),
    );
    wait_until("the start", || server.engine.live.load(Ordering::SeqCst) == 1);
    let answer = server.complete("x", json!({}));
    answer.error(429);
    assert!(answer.headers.contains("retry-after: 1"), "{}", answer.headers);
    // The engine computes none of several texts when it refuses one of them.
    server.engine.most.store(3, Ordering::SeqCst);
    server.complete("SLOW", json!({"n": 5})).error(429);
    wait_until("the end of the others", || server.engine.live.load(Ordering::SeqCst) == 1);
    drop(running);
    wait_until("the end of a request whose client left", || server.engine.live.load(Ordering::SeqCst) == 0);
    server.engine.dead.store(true, Ordering::SeqCst);
    for answer in [server.complete("x", json!({})), server.get("/health")] {
        assert!(answer.error(503)["message"].as_str().unwrap().contains("rank 1"));
    }
}

#[test]
fn clients_that_leave_end_their_requests() {
    let server = start();
    for stream in [true, false] {
        let body = json!({"prompt": "SLOW", "max_tokens": 4000, "stream": stream, "n": 2});
        let socket =
            server.send("POST", "/v1/completions", "content-type: application/json\r\n", body.to_string().as_bytes());
        wait_until("the start", || server.engine.live.load(Ordering::SeqCst) == 2);
        drop(socket);
        wait_until("the end", || server.engine.live.load(Ordering::SeqCst) == 0);
    }
}

#[test]
fn failures_of_the_engine_are_500_or_an_event() {
    let server = start();
    assert!(server.complete("FAIL", json!({})).error(500)["message"].as_str().unwrap().contains("rank 1"));
    let chunks = server.complete("FAIL", json!({"stream": true})).chunks();
    assert_eq!(chunks.last().unwrap()["error"]["type"], "server_error");
}

fn first_bytes(socket: &mut TcpStream) {
    assert!(socket.read(&mut [0; 64]).expect("the beginning of an answer") > 0);
}

#[test]
fn a_server_that_stops_finishes_what_runs_and_takes_nothing_new() {
    let server = start();
    let body = json!({"prompt": "SLOW", "max_tokens": 40, "stream": true}).to_string();
    let mut socket = server.send("POST", "/v1/completions", "content-type: application/json\r\n", body.as_bytes());
    first_bytes(&mut socket);
    server.stop();
    wait_until("the closing of the port", || TcpStream::connect(server.address).is_err());
    let mut rest = String::new();
    socket.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("[DONE]"), "{rest}");
    assert!(server.join(), "everything was finished");
}

#[test]
fn the_time_to_finish_has_an_end() {
    let server = start_with(Settings { drain: Duration::from_millis(100), ..Settings::default() }, None);
    let body = json!({"prompt": "SLOW", "max_tokens": 4000, "stream": true}).to_string();
    let mut socket = server.send("POST", "/v1/completions", "content-type: application/json\r\n", body.as_bytes());
    first_bytes(&mut socket);
    let whole = json!({"prompt": "SLOW", "max_tokens": 4000}).to_string();
    let other = server.send("POST", "/v1/completions", "content-type: application/json\r\n", whole.as_bytes());
    wait_until("both requests", || server.engine.live.load(Ordering::SeqCst) == 2);
    let live = server.engine.live.clone();
    assert!(!server.join(), "requests were cut");
    wait_until("the end of the requests", || live.load(Ordering::SeqCst) == 0);
    let mut rest = String::new();
    socket.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("the server ends") && rest.contains("[DONE]"), "{rest}");
    let error = read(other).error(503);
    assert!(error["message"].as_str().unwrap().contains("the server ends"), "{error}");
}

/// A request that could never be queued is wrong; clients would repeat one that comes at a bad time.
#[test]
fn more_texts_than_may_wait_are_refused_for_good() {
    let server = start();
    let most = server.engine.limits().max_waiting;
    let error = server.complete("say:a", json!({"n": 128, "prompt": vec!["say:a"; most / 128 + 1]})).error(400);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(&format!("at most {most} may wait")) && message.contains("n = 128"), "{message}");
}

/// Encoding such a text would take seconds and gigabytes, to find what its length tells.
#[test]
fn prompts_far_too_long_are_refused_before_they_are_encoded() {
    let server = start();
    let error = server.complete("word ".repeat(200_000), json!({})).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["message"].as_str().unwrap().contains("the prompt has 1000000 bytes"), "{error}");
}

#[test]
fn two_hundred_clients_at_once_hear_their_own_texts() {
    let server = start();
    std::thread::scope(|scope| {
        for client in 0..200 {
            let server = &server;
            scope.spawn(move || {
                let text = format!("client {client} with its text ä😀");
                let body = json!({"prompt": format!("say:{text}"), "max_tokens": 100, "stream": true}).to_string();
                let answer = read(server.send("POST", "/v1/completions", "", body.as_bytes()));
                let said: String =
                    answer.chunks().iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
                assert_eq!(said, text);
            });
        }
    });
    assert_eq!(server.engine.live.load(Ordering::SeqCst), 0);
}
