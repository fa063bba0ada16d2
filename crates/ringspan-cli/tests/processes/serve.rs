//! `ringspan serve` under `mpirun`: the answers of one process, and an end for all processes. Needs feature `mpi`.
#![cfg(all(unix, feature = "mpi"))]

use super::mpi::{DEADLINE, Run, finish, start};
use crate::support::http::{request, request_text};
use crate::support::{Bench, model::bench};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Upper limit on the time in which all processes end after a signal.
const SECONDS: Duration = Duration::from_secs(10);

/// A server on processes.
struct Served {
    mpirun: Child,
    ranks: usize,
    /// The lines that the processes print.
    said: TempDir,
    /// Host and port.
    address: String,
}

impl Served {
    fn start(bench: &Bench, ranks: usize, flags: &[&str]) -> Self {
        let said = tempfile::tempdir().expect("a folder");
        let always = ["serve", "--model", "model", "--port", "0", "--threads", "1", "--kv-cache", "16MiB"];
        let mpirun = start(&[(ranks, bench.folder.path(), [&always[..], flags].concat())], said.path());
        let mut served = Self { mpirun, ranks, said, address: String::new() };
        let began = Instant::now();
        while served.address.is_empty() {
            assert!(began.elapsed() < DEADLINE, "it does not listen: {}", served.read(0, "stderr"));
            std::thread::sleep(Duration::from_millis(20));
            let line = served.read(0, "stdout");
            let address = line.strip_prefix("listening on http://").filter(|address| address.ends_with('\n'));
            served.address = address.map(|address| address.trim().to_owned()).unwrap_or_default();
        }
        served
    }

    fn read(&self, rank: usize, name: &str) -> String {
        std::fs::read_to_string(self.said.path().join(format!("1/rank.{rank}/{name}"))).unwrap_or_default()
    }

    fn complete(&self, body: &Value) -> Value {
        let (status, body) = request(&self.address, "POST", "/v1/completions", body).expect("an answer");
        assert_eq!(status, 200, "{body}");
        body["choices"].clone()
    }

    /// The numbers of requests that run and that wait.
    fn requests(&self) -> [f64; 2] {
        ["vllm:num_requests_running", "vllm:num_requests_waiting"].map(|name| self.metric(name))
    }

    /// The bytes that rank 0 has sent.
    fn bytes_sent(&self) -> f64 {
        // Ranks report what they sent when a request is complete, at the latest for this.
        assert_eq!(request(&self.address, "GET", "/health", &Value::Null).expect("an answer").0, 200);
        self.metric("ringspan:transfer_bytes")
    }

    /// The first value of a metric.
    fn metric(&self, name: &str) -> f64 {
        let (_, metrics) = request_text(&self.address, "GET", "/metrics").expect("an answer");
        let line = metrics.lines().find(|line| line.starts_with(name));
        let number = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
        number.unwrap_or_else(|| panic!("no {name}: {metrics}"))
    }

    /// The process of a rank.
    fn process(&self, rank: usize) -> String {
        let parent = self.mpirun.id().to_string();
        let children = Command::new("pgrep").args(["-P", &parent, "ringspan"]).output().expect("pgrep");
        let children = String::from_utf8_lossy(&children.stdout).into_owned();
        let is_rank = |process: &&str| {
            let variables = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            let wanted = format!("OMPI_COMM_WORLD_RANK={rank}");
            variables.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
        };
        children.lines().find(is_rank).expect("the process of the rank").to_owned()
    }

    fn finish(self) -> Run {
        let Self { mpirun, ranks, said, .. } = self;
        finish(mpirun, ranks, said.path())
    }
}

fn signal(signal: &str, process: &str) {
    assert!(Command::new("kill").args([signal, process]).status().expect("kill runs").success());
}

#[test]
fn a_server_on_processes_answers_as_on_one_and_a_signal_ends_all() {
    let meshes: [(usize, &[&str]); 5] =
        [(1, &[]), (2, &["--ring", "2"]), (2, &["--tp", "2"]), (2, &["--pp", "2"]), (2, &["--attn-dp", "2"])];
    answers_as_on_one(&bench(&json!({})), &meshes);
}

/// Layers of 2 MiB and more, which context-parallel processes share when they decode.
#[test]
fn a_server_on_processes_that_share_layers_answers_as_on_one() {
    let wide = json!({
        "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64
    });
    let sent = answers_as_on_one(&bench(&wide), &[(1, &[]), (2, &["--ring", "2"])]);
    // For each token but the first, half of the outputs of qkv and of gate times up in each of 2 layers. Without them, the softmax states
    // (8 heads, 64 values and 2 numbers) and the hidden states are less than half as many bytes.
    let outputs = 23 * 2 * 4 * (512 + 2 * 256 + 1536) / 2;
    assert!(sent[1] > f64::from(outputs), "{sent:?}, {outputs} of shared layers");
}

/// Asks servers on numbers of processes for two texts at once, twice, compares their answers, and ends them by a signal. Returns the
/// bytes that rank 0 of each sends for a short text of 24 tokens.
fn answers_as_on_one(bench: &Bench, meshes: &[(usize, &[&str])]) -> Vec<f64> {
    let prompt = "line 3 of 4\nline 77 of 8\n".repeat(8);
    let asked = json!({"prompt": [prompt, "line"], "max_tokens": 24, "temperature": 0, "echo": true, "logprobs": 0});
    let (mut expected, mut sent): (Option<Value>, Vec<f64>) = (None, Vec::new());
    for (ranks, flags) in meshes {
        let (ranks, served) = (*ranks, Served::start(bench, *ranks, flags));
        assert_eq!(request(&served.address, "GET", "/health", &Value::Null).expect("an answer").0, 200);
        for _ in 0..2 {
            let choices = served.complete(&asked);
            let expected = expected.get_or_insert_with(|| choices.clone());
            for index in 0..2 {
                assert_eq!(choices[index]["text"], expected[index]["text"], "{flags:?}");
                let logprobs = |choices: &Value| -> Vec<f64> {
                    let all = choices[index]["logprobs"]["token_logprobs"].as_array().expect("a list");
                    all.iter().filter_map(Value::as_f64).collect()
                };
                let (own, first) = (logprobs(&choices), logprobs(expected));
                assert_eq!(own.len(), first.len());
                assert!(own.iter().zip(&first).all(|(a, b)| (a - b).abs() < 1e-4), "{flags:?}");
            }
        }
        let before = served.bytes_sent();
        served.complete(&json!({"prompt": "line", "max_tokens": 24, "temperature": 0, "ignore_eos": true}));
        sent.push(served.bytes_sent() - before);
        let ended = Instant::now();
        // The launcher passes the signal on to all processes.
        signal("-TERM", &served.mpirun.id().to_string());
        let run = served.finish();
        assert!(ended.elapsed() < SECONDS, "{flags:?}: {:?}", ended.elapsed());
        assert!(!run.stderr.iter().any(|said| said.contains("error")), "{flags:?}: {:#?}", run.stderr);
        assert!(run.stdout[1..].iter().all(String::is_empty), "only rank 0 of {ranks} prints: {:#?}", run.stdout);
    }
    sent
}

/// What processes have cached is saved at the signal, and found again by other numbers of processes, which share it in other ways.
#[test]
fn a_session_of_processes_is_restored_on_other_meshes() {
    let bench = bench(&json!({}));
    let sessions = tempfile::tempdir().expect("a folder");
    let folder = sessions.path().to_str().expect("text");
    let prompt = "line 3 of 4\nline 77 of 8\n".repeat(8);
    let asked = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0});
    let mut expected: Option<(Value, u64)> = None;
    for (ranks, flags) in
        [(2, &["--ring", "2"][..]), (3, &["--ring", "3"]), (2, &["--tp", "2"]), (2, &["--pp", "2"]), (1, &[])]
    {
        let served = Served::start(&bench, ranks, &[flags, &["--session-dir", folder]].concat());
        let (status, body) = request(&served.address, "POST", "/v1/completions", &asked).expect("an answer");
        assert_eq!(status, 200, "{body}");
        let tokens = |name: &str| body["usage"].pointer(name).and_then(Value::as_u64).expect("a number");
        let (prompt, cached) = (tokens("/prompt_tokens"), tokens("/prompt_tokens_details/cached_tokens"));
        match &expected {
            None => {
                assert_eq!(cached, 0, "nothing is there at first");
                expected = Some((body["choices"][0]["text"].clone(), prompt));
            }
            Some((text, length)) => {
                assert_eq!((&body["choices"][0]["text"], prompt), (text, *length), "{flags:?}");
                assert_eq!(cached, prompt - 1, "{flags:?}: all but the last token was cached");
            }
        }
        signal("-TERM", &served.mpirun.id().to_string());
        let run = served.finish();
        assert!(!run.stderr.iter().any(|said| said.contains("error")), "{flags:?}: {:#?}", run.stderr);
    }
}

/// A signal to rank 0 alone lets it finish what runs, and ends the others.
#[test]
fn rank_0_drains_and_all_end_well() {
    let bench = bench(&json!({}));
    let served = Served::start(&bench, 2, &["--ring", "2"]);
    let (address, lead) = (served.address.clone(), served.process(0));
    let asked = json!({"prompt": "line", "max_tokens": 400, "temperature": 0, "ignore_eos": true});
    let client = std::thread::spawn(move || request(&address, "POST", "/v1/completions", &asked));
    wait_until_it_runs(&served);
    signal("-TERM", &lead);
    let (status, body) = client.join().expect("no panic").expect("an answer");
    assert_eq!((status, &body["usage"]["completion_tokens"]), (200, &json!(400)), "{body}");
    let run = served.finish();
    assert!(run.good, "{:#?}", run.stderr);
}

#[test]
fn a_killed_rank_ends_the_server_with_its_name_and_requests_in_flight_hear_of_it() {
    let bench = bench(&json!({}));
    let served = Served::start(&bench, 3, &["--ring", "3"]);
    let (address, victim) = (served.address.clone(), served.process(1));
    let asked = json!({"prompt": "line", "max_tokens": 3900, "temperature": 0, "ignore_eos": true});
    let client = std::thread::spawn(move || request(&address, "POST", "/v1/completions", &asked));
    wait_until_it_runs(&served);
    let killed = Instant::now();
    signal("-KILL", &victim);
    let (status, body) = client.join().expect("no panic").expect("an answer, not a closed connection");
    assert!(status >= 500 && body["error"]["message"].to_string().contains("rank 1"), "{status}: {body}");
    let run = served.finish();
    assert!(!run.good && killed.elapsed() < SECONDS, "{:?}", killed.elapsed());
    for rank in [0, 2] {
        let said = &run.stderr[rank];
        assert!(said.contains("rank 1 failed: its process is gone"), "rank {rank}: {said}");
    }
}

/// Waits until the server has a request that runs.
fn wait_until_it_runs(served: &Served) {
    let began = Instant::now();
    while served.requests()[0] == 0.0 {
        assert!(began.elapsed() < DEADLINE, "nothing runs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn none_of_many_requests_is_silent_when_a_rank_is_killed() {
    kill_a_rank_under(120, 16);
}

#[test]
#[ignore = "a thousand connections"]
fn none_of_a_thousand_requests_is_silent_when_a_rank_is_killed() {
    kill_a_rank_under(1000, 64);
}

/// The answer to a streamed request, once its head has come.
#[derive(Debug, PartialEq)]
enum StreamOutcome {
    /// A text to its end.
    Text { text: String, tokens: u64 },
    /// An error, as a body or as an event.
    Error(String),
    /// Neither of them.
    Broken(String),
}

/// Kills a rank when all requests are at the server, which computes `together` at a time: some are answered, some run, and the
/// others wait. All of them must be answered or hear of the rank; so must later ones, unless the server listens no more.
fn kill_a_rank_under(clients: usize, together: usize) {
    let bench = bench(&json!({}));
    let served = Served::start(&bench, 3, &["--ring", "3", "--max-running", &together.to_string()]);
    let (address, victim) = (served.address.clone(), served.process(1));
    let short_ones = (0..2 * SHORT_KINDS).filter(|number| !is_long(*number));
    let alone: Vec<StreamOutcome> =
        short_ones.map(|number| stream(&address, &streamed(number), || {}).expect("an answer")).collect();

    let begun = Arc::new(AtomicUsize::new(0));
    let (sender, answers) = channel();
    let start_client = |number: usize| {
        let (address, begun, sender) = (address.clone(), begun.clone(), sender.clone());
        std::thread::spawn(move || {
            let begins = || {
                begun.fetch_add(1, Ordering::SeqCst);
            };
            let answer = stream(&address, &streamed(number), begins);
            // Nobody listens any more where the test has failed.
            let _ = sender.send((number, answer));
        });
    };
    (0..clients).for_each(&start_client);
    let mut heard = Vec::new();
    let began = Instant::now();
    loop {
        heard.extend(answers.try_iter());
        let (begun, [running, waiting]) = (begun.load(Ordering::SeqCst), served.requests());
        if begun == clients && heard.len() >= together / 2 && running > 0.0 && waiting > 0.0 {
            break;
        }
        let answered = heard.len();
        let state = format!("{begun} of {clients} taken, {answered} answered, {running} run, {waiting} wait");
        assert!(began.elapsed() < DEADLINE, "{state}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = Instant::now();
    signal("-KILL", &victim);
    let all = clients + clients / 10;
    for number in clients..all {
        start_client(number);
        std::thread::sleep(Duration::from_millis(10));
    }
    while heard.len() < all {
        let left = SECONDS.saturating_sub(killed.elapsed());
        let silent = all - heard.len();
        heard.push(answers.recv_timeout(left).unwrap_or_else(|_| panic!("{silent} requests are silent")));
    }

    let run = served.finish();
    assert!(!run.good && killed.elapsed() < SECONDS, "{:?}", killed.elapsed());
    for rank in [0, 2] {
        let said = &run.stderr[rank];
        assert!(said.contains("rank 1 failed: its process is gone"), "rank {rank}: {said}");
    }
    let (mut answered, mut failed, mut late) = (0, 0, 0);
    for (number, answer) in heard {
        match answer {
            Ok(StreamOutcome::Text { tokens, .. }) if is_long(number) => {
                assert_eq!(Some(tokens), streamed(number)["max_tokens"].as_u64(), "request {number}");
                answered += 1;
            }
            Ok(text @ StreamOutcome::Text { .. }) => {
                assert_eq!(text, alone[number / 2 % SHORT_KINDS], "request {number} has another text than alone");
                answered += 1;
            }
            Ok(StreamOutcome::Error(message)) => {
                assert!(message.contains("rank 1"), "request {number}: {message}");
                failed += 1;
            }
            Ok(StreamOutcome::Broken(answer)) => panic!("request {number} was taken and has no end: {answer}"),
            Err(error) => {
                assert!(number >= clients, "request {number} was at the server: {error}");
                late += 1;
            }
        }
    }
    println!("{answered} answered, {failed} told of the rank, {late} after the server's end");
    assert!(failed > together, "those that waited hear of it as well");
}

/// Number of different short requests. They have the even numbers.
const SHORT_KINDS: usize = 10;

fn is_long(number: usize) -> bool {
    number % 2 == 1
}

/// One of many requests. Those that are long still run or wait when the rank is killed.
fn streamed(number: usize) -> Value {
    let kind = number / 2 % SHORT_KINDS;
    let max_tokens = if is_long(number) { 1000 + number % 7 * 300 } else { 1 + 2 * kind };
    json!({"prompt": format!("line {kind} of 4\n").repeat(1 + 6 * kind), "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}})
}

/// Asks for a streamed completion; calls `begins` when the head of the answer is there. An error is that of a connection on
/// which there is none.
fn stream(address: &str, asked: &Value, begins: impl FnOnce()) -> std::io::Result<StreamOutcome> {
    let mut socket = TcpStream::connect(address)?;
    let body = asked.to_string();
    write!(socket, "POST /v1/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
    let mut reader = BufReader::new(socket);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    begins();
    let mut body = Vec::new();
    let end = reader.read_to_end(&mut body);
    let body = String::from_utf8_lossy(&body);
    Ok(read_answer(&body).unwrap_or_else(|| StreamOutcome::Broken(format!("{head}{body}, {end:?}"))))
}

/// Reads the body of an answer; `None` if it has neither the end of a text nor an error.
fn read_answer(body: &str) -> Option<StreamOutcome> {
    let error_of =
        |value: &Value| value["error"]["message"].as_str().map(|message| StreamOutcome::Error(message.to_owned()));
    if let Ok(whole) = serde_json::from_str::<Value>(body) {
        return error_of(&whole);
    }
    let (mut all, mut is_finished, mut generated) = (String::new(), false, None);
    for data in body.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            return is_finished.then_some(StreamOutcome::Text { text: all, tokens: generated? });
        }
        let event: Value = serde_json::from_str(data).ok()?;
        if let Some(error) = error_of(&event) {
            return Some(error);
        }
        let choice = &event["choices"][0];
        all.push_str(choice["text"].as_str().unwrap_or_default());
        is_finished |= choice["finish_reason"] == "length";
        generated = event["usage"]["completion_tokens"].as_u64();
    }
    None
}
