//! Starts this program under `mpirun`, and collects the output of each rank.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a run; no test may need longer.
const DEADLINE: Duration = Duration::from_secs(90);

/// The outcome of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) good: bool,
    /// The output of each rank, from both streams.
    pub(crate) ranks: Vec<String>,
    /// Duration of the whole run, including the start of the processes.
    pub(crate) elapsed: Duration,
}

/// Runs a scenario on `ranks` processes.
pub(crate) fn run(ranks: usize, scenario: &[&str]) -> Outcome {
    launch(ranks, scenario, None)
}

/// Like [`run`], and calls `act` with the ids of the processes while they run.
pub(crate) fn run_and(ranks: usize, scenario: &[&str], act: fn(&[String])) -> Outcome {
    launch(ranks, scenario, Some(act))
}

fn launch(ranks: usize, scenario: &[&str], act: Option<fn(&[String])>) -> Outcome {
    let start = Instant::now();
    let program = std::env::current_exe().expect("this program has a path");
    let folder = tempfile::tempdir().expect("a folder");
    // Each process writes to its own file, since lines would be interleaved in one stream.
    let mut files = folder.path().as_os_str().to_owned();
    files.push(":nocopy");
    let mut child = Command::new("mpirun")
        .args(["--oversubscribe", "--allow-run-as-root", "-n", &ranks.to_string(), "--output-filename"])
        .arg(files)
        .arg(program)
        .arg("rank")
        .args(scenario)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("mpirun is installed");
    if let Some(act) = act {
        act(&started(&child, ranks));
    }
    let good = wait(&mut child, start);
    let said = |rank| {
        let of = folder.path().join("1").join(format!("rank.{rank}"));
        ["stdout", "stderr"].map(|name| std::fs::read_to_string(of.join(name)).unwrap_or_default()).concat()
    };
    Outcome { good, ranks: (0..ranks).map(said).collect(), elapsed: start.elapsed() }
}

/// The ids of a run's processes, once all have started or a second has passed.
fn started(child: &Child, ranks: usize) -> Vec<String> {
    let begin = Instant::now();
    loop {
        let children = Command::new("pgrep").args(["-P", &child.id().to_string(), "comm_mpi"]).output().expect("pgrep");
        let found: Vec<String> = String::from_utf8_lossy(&children.stdout).lines().map(str::to_owned).collect();
        if found.len() >= ranks || begin.elapsed() > Duration::from_secs(1) {
            return found;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for the end and returns whether it was successful; kills the run and fails the test after the time limit.
fn wait(child: &mut Child, start: Instant) -> bool {
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status.success();
        }
        if start.elapsed() > DEADLINE {
            let _ = child.kill();
            let _ = child.wait();
            panic!("mpirun did not end within {DEADLINE:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

impl Outcome {
    pub(crate) fn assert_good(&self) {
        assert!(self.good, "{:#?}", self.ranks);
    }

    /// Checks that all ranks except the `victim` name it and print `words`, in time.
    pub(crate) fn assert_failure(&self, victim: usize, words: &[&str], within: Duration) {
        assert!(!self.good, "it ended well: {:#?}", self.ranks);
        for (rank, text) in self.ranks.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let named = format!("rank {victim} failed");
            for word in [&[named.as_str()], words].concat() {
                assert!(text.contains(word), "rank {rank} does not say {word:?}: {:#?}", self.ranks);
            }
        }
        assert!(self.elapsed < within, "took {:?}: {:#?}", self.elapsed, self.ranks);
    }
}
