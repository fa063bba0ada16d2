//! `ringspan serve` under `mpirun`: the answers of one process, and an end for all processes. Needs feature `mpi`.
#![cfg(all(unix, feature = "mpi"))]

use super::mpi::{DEADLINE, Run, finish, start};
use crate::support::http::request;
use crate::support::{Bench, model::bench};
use serde_json::{Value, json};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Upper limit on the time in which all processes end after a signal.
const SECONDS: Duration = Duration::from_secs(10);

/// A server on processes.
struct Served {
    mpirun: Child,
    ranks: usize,
    /// What the processes say.
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
    let bench = bench(&json!({}));
    let prompt = "line 3 of 4\nline 77 of 8\n".repeat(8);
    let asked = json!({"prompt": [prompt, "line"], "max_tokens": 24, "temperature": 0, "echo": true, "logprobs": 0});
    let mut expected: Option<Value> = None;
    let meshes = [(1, &[][..]), (2, &["--ring", "2"]), (2, &["--tp", "2"]), (2, &["--pp", "2"])];
    for (ranks, flags) in meshes {
        let served = Served::start(&bench, ranks, flags);
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
        let ended = Instant::now();
        // The launcher passes the signal on to all processes.
        signal("-TERM", &served.mpirun.id().to_string());
        let run = served.finish();
        assert!(ended.elapsed() < SECONDS, "{flags:?}: {:?}", ended.elapsed());
        assert!(!run.stderr.iter().any(|said| said.contains("error")), "{flags:?}: {:#?}", run.stderr);
        assert!(run.stdout[1..].iter().all(String::is_empty), "only rank 0 prints: {:#?}", run.stdout);
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

/// Waits until the server has generated tokens of a request.
fn wait_until_it_runs(served: &Served) {
    let began = Instant::now();
    loop {
        let (_, metrics) = crate::support::http::request_text(&served.address, "GET", "/metrics").expect("an answer");
        let running = metrics.lines().find(|line| line.starts_with("vllm:num_requests_running"));
        if running.is_some_and(|line| line.ends_with(" 1.0") || line.ends_with(" 1")) {
            return;
        }
        assert!(began.elapsed() < DEADLINE, "{metrics}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
