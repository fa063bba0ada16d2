//! `ringspan serve` and `ringspan bench serve`, as programs: answers that are equal on every mesh, a load, signals.
#![cfg(unix)]

use crate::support::{Bench, http::request, model::bench};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

struct Served {
    process: Child,
    /// Host and port.
    address: String,
}

impl Served {
    fn start(bench: &Bench, flags: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_ringspan"))
            .args(["serve", "--port", "0", "--threads", "1", "--kv-cache", "16MiB", "--model"])
            .arg(bench.path("model"))
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("listening on http://").expect("the address comes first").to_owned();
        Self { process, address }
    }

    /// Sends a request; returns the status and the body.
    fn request(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        request(&self.address, method, path, body).expect("an answer")
    }

    fn text(&self, body: Value) -> Value {
        let (status, body) = self.request("POST", "/v1/completions", &body);
        assert_eq!(status, 200, "{body}");
        body["choices"].clone()
    }

    /// Ends the server by a signal; returns its exit code.
    fn end(&mut self, signal: &str) -> Option<i32> {
        let killed = Command::new("kill").args([signal, &self.process.id().to_string()]).status().expect("kill runs");
        assert!(killed.success());
        self.process.wait().expect("it ends").code()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn answers_are_equal_on_every_mesh_and_a_signal_ends_the_server() {
    let bench = bench(&json!({}));
    let prompt = "line 3 of 4\nline 77 of 8\n".repeat(8);
    let asked = json!({"prompt": [prompt, "line"], "max_tokens": 24, "temperature": 0, "echo": true, "logprobs": 0});
    let mut expected: Option<Value> = None;
    for flags in [
        &["--ring", "1"][..],
        &["--ring", "3"],
        &["--ring", "2", "--ulysses", "2", "--prefill-chunk", "50"],
        &["--ring", "2", "--tp", "2", "--prefill-chunk", "50"],
        &["--pp", "2", "--ring", "2"],
        &["--attn-dp", "2", "--ring", "2", "--prefill-chunk", "50"],
    ] {
        let mut served = Served::start(&bench, flags);
        assert_eq!(served.request("GET", "/health", &Value::Null).0, 200);
        let models = served.request("GET", "/v1/models", &Value::Null).1;
        assert_eq!(models["data"][0]["id"], "model");
        let choices = served.text(asked.clone());
        // The second time, the prefix is in the cache.
        for choices in [&choices, &served.text(asked.clone())] {
            let texts = [&choices[0]["text"], &choices[1]["text"]];
            let expected = expected.get_or_insert_with(|| choices.clone());
            assert_eq!(texts, [&expected[0]["text"], &expected[1]["text"]], "{flags:?}");
            let logprobs = |choices: &Value| -> Vec<f64> {
                choices[0]["logprobs"]["token_logprobs"].as_array().unwrap().iter().filter_map(Value::as_f64).collect()
            };
            let (own, first) = (logprobs(choices), logprobs(expected));
            assert_eq!(own.len(), first.len());
            assert!(own.iter().zip(&first).all(|(a, b)| (a - b).abs() < 1e-4), "{flags:?}");
        }
        let refused =
            served.request("POST", "/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "x"}]}));
        assert_eq!(refused.0, 400, "the model has no template: {}", refused.1);
        assert_eq!(served.end("-TERM"), Some(0));
    }
}

/// A server that is stopped and started again on another mesh finds what it had cached; one of another model begins anew.
#[test]
fn a_session_outlives_the_server() {
    let bench = bench(&json!({}));
    let folder = bench.path("sessions");
    let folder = folder.to_str().expect("a name");
    let prompt = "line 3 of 4\nline 77 of 8\n".repeat(8);
    let asked = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 0});
    let answer = |served: &Served| {
        let (status, body) = served.request("POST", "/v1/completions", &asked);
        assert_eq!(status, 200, "{body}");
        let cached = body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0) as usize;
        let logprobs = body["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("logprobs").clone();
        (cached, body["choices"][0]["text"].clone(), logprobs)
    };
    let mut expected = None;
    let other = &["--dtype", "bf16"][..];
    for (flags, found) in [
        (&["--ring", "3"][..], false),
        (&["--ring", "2", "--ulysses", "2", "--page", "7", "--num-speculative-tokens", "3"], true),
        (&["--page", "64"], true),
        (&["--tp", "2", "--ring", "2"], true),
        (&["--pp", "2"], true),
        // Its own session is saved beside the other, which it cannot read; both are there afterwards.
        (other, false),
        (&["--ring", "2"], true),
        (other, true),
    ] {
        let mut served = Served::start(&bench, &[flags, &["--session-dir", folder]].concat());
        let (cached, text, logprobs) = answer(&served);
        assert_eq!(cached, if found { prompt.len() - 1 } else { 0 }, "{flags:?}");
        if !flags.contains(&"bf16") {
            let (first, others) = expected.get_or_insert_with(|| (text.clone(), logprobs.clone()));
            assert_eq!(text, *first, "{flags:?}");
            let pairs = logprobs.iter().zip(others.iter()).map(|(a, b)| (a.as_f64().unwrap(), b.as_f64().unwrap()));
            assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-4), "{flags:?}");
        }
        assert_eq!(served.end("-TERM"), Some(0));
    }
    let mut files: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|file| file.expect("a file").file_name()).collect();
    files.sort();
    assert_eq!(files, ["session-1.safetensors", "session.safetensors"]);
}

#[test]
fn a_load_is_measured() {
    let bench = bench(&json!({}));
    let served = Served::start(&bench, &["--ring", "2"]);
    let output = bench
        .command("bench")
        .args(["serve", "--url", &format!("http://{}", served.address), "--clients", "1,3"])
        .args(["--prompt-tokens", "20", "--output-tokens", "6", "--requests", "3"])
        .output()
        .expect("the binary runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Vec<&str>> = said.lines().skip(2).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows.iter().map(|row| &row[..2]).collect::<Vec<_>>(), [["1", "3"], ["3", "3"]], "{said}");
}

#[test]
fn flags_that_cannot_be_are_refused() {
    let bench = bench(&json!({}));
    let refusal =
        |flags: &str| crate::support::model::refusal(&bench, "serve", &format!("--model model --port 0 {flags}"));
    assert!(refusal("--device cuda").contains("`serve` computes on CPUs"));
    assert!(refusal("--kv-cache 0%").contains("more than 0%"));
    assert!(refusal("--ep 2 --ring 2").contains("ep 2 shares experts"));
    assert!(refusal("--tp 64").contains("64 ranks cannot share"));
    assert!(refusal("--pp 3").contains("pp 3 leaves stages without one of the 2 layers"));
    assert!(refusal("--tp 0").contains("--tp 0 is no rank"));
    assert!(refusal("--kv-cache 1KiB").contains("page"));
    assert!(refusal("--lora model=model").contains("the model itself"));
    assert!(refusal("--lora a=nowhere").contains("--lora a=nowhere"));
    assert!(refusal("--model-name=").contains("--model-name"));
    for origin in ["a", "http://a/", "http://a/b", "http://a?b"] {
        assert!(refusal(&format!("--allow-origin {origin}")).contains(&format!("`{origin}` is no origin")));
    }
    assert!(refusal("--host nowhere.invalid").contains("nowhere.invalid"));
    assert!(refusal("--session-dir model/config.json").contains("--session-dir model/config.json"));
    assert!(refusal("--num-speculative-tokens 65").contains("0 (none) to 64"));
    assert!(refusal("--api-key-file nowhere").contains("nowhere"));
    assert!(refusal("--allow-origin \u{7f}").contains("origin"));
    assert!(refusal("--host 192.0.2.1").contains("cannot listen on 192.0.2.1:0"));
}
