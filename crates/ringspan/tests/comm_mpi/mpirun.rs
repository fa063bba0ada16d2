//! Starts this program under `mpirun`, and collects what each rank says.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// No test may need longer.
const DEADLINE: Duration = Duration::from_secs(90);

/// What became of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) good: bool,
    /// What each rank wrote, to either stream.
    pub(crate) ranks: Vec<String>,
    /// Time of the whole run, with the start of the processes.
    pub(crate) elapsed: Duration,
}

/// Runs a scenario on `ranks` processes.
pub(crate) fn run(ranks: usize, scenario: &[&str]) -> Outcome {
    launch(ranks, scenario, None)
}

/// As [`run`], and does something to the processes meanwhile, by their ids.
pub(crate) fn run_and(ranks: usize, scenario: &[&str], act: fn(&[String])) -> Outcome {
    launch(ranks, scenario, Some(act))
}

fn launch(ranks: usize, scenario: &[&str], act: Option<fn(&[String])>) -> Outcome {
    let start = Instant::now();
    let program = std::env::current_exe().expect("this program has a path");
    let folder = tempfile::tempdir().expect("a folder");
    // A file of each process, since their lines would cut each other up in one stream.
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

/// The processes of a run, as far as they are there within a moment.
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

/// Whether it ended well; a run past the deadline is ended and fails the test.
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

    /// All but the `victim` must say who failed and in what they were, in time.
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
