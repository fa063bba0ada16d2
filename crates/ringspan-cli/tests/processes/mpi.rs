//! Commands under `mpirun` give the bits that threads give, and errors that name the rank. Needs feature `mpi`.
#![cfg(feature = "mpi")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Upper limit on the time of a run.
pub(super) const DEADLINE: Duration = Duration::from_secs(240);

/// The result of a run, with the output of each of its processes.
pub(super) struct Run {
    pub(super) good: bool,
    pub(super) stdout: Vec<String>,
    pub(super) stderr: Vec<String>,
}

/// Processes of a run: their number, their folder, their arguments.
pub(super) type Group<'a> = (usize, &'a Path, Vec<&'a str>);

pub(super) fn start(groups: &[Group<'_>], said: &Path) -> Child {
    let mut files = said.as_os_str().to_owned();
    files.push(":nocopy");
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--allow-run-as-root", "--output-filename"]).arg(files);
    for (number, (ranks, folder, arguments)) in groups.iter().enumerate() {
        if number > 0 {
            command.arg(":");
        }
        command.args(["-n", &ranks.to_string(), "-wdir"]).arg(folder);
        command.arg(env!("CARGO_BIN_EXE_ringspan")).args(arguments);
    }
    let null = || Stdio::null();
    command.stdin(null()).stdout(null()).stderr(null()).spawn().expect("mpirun is installed")
}

pub(super) fn finish(mut child: Child, ranks: usize, said: &Path) -> Run {
    let began = Instant::now();
    let good = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break status.success(),
            None if began.elapsed() > DEADLINE => {
                let _ = child.kill();
                let _ = child.wait();
                panic!("mpirun did not end within {DEADLINE:?}");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let of = |name: &str| {
        let text = |rank| std::fs::read_to_string(said.join(format!("1/rank.{rank}/{name}"))).unwrap_or_default();
        (0..ranks).map(text).collect()
    };
    Run { good, stdout: of("stdout"), stderr: of("stderr") }
}

pub(super) fn mpirun(groups: &[Group<'_>]) -> Run {
    let said = tempfile::tempdir().expect("a folder");
    finish(start(groups, said.path()), groups.iter().map(|group| group.0).sum(), said.path())
}

/// Runs the command as one process, whose ranks are threads.
pub(super) fn threads(folder: &Path, arguments: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_ringspan")).current_dir(folder).args(arguments).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn corpus(text: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("corpus")).expect("room");
    for n in 0..12 {
        std::fs::write(folder.path().join(format!("corpus/{n}.txt")), format!("{n} {text}").repeat(40 + n))
            .expect("room");
    }
    folder
}

const TEXT: &str = "the quick brown fox jumps over the lazy dog. ";

/// Arguments of a short training on a mesh.
fn training<'a>(out: &'a str, mesh: &[&'a str]) -> Vec<&'a str> {
    let settings = ["train", "--data", "corpus", "--sequence-length", "300", "--steps", "4", "--sample-tokens", "0"];
    [&settings[..], &["--threads", "1", "--out", out], mesh].concat()
}

/// Loss, gradient norm and held-out loss of every step, to the last digit.
fn losses(out: PathBuf) -> Vec<String> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let numbers = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        format!("{} {} {} {}", line["step"], line["loss"], line["grad_norm"], line["held_out_loss"])
    };
    text.lines().map(numbers).collect()
}

#[test]
fn a_training_on_processes_gives_what_it_gives_on_threads_bit_for_bit() {
    let corpus = corpus(TEXT);
    let folder = corpus.path();
    // The number of ranks, how many of them share a copy of the parameters, and the flags of the mesh.
    let meshes: [(usize, usize, &[&str]); 4] = [
        (2, 2, &["--ring", "2"]),
        (4, 4, &["--ring", "2", "--tp", "2"]),
        (4, 4, &["--dp-shard", "2", "--ring", "2", "--grad-accumulation", "2"]),
        (8, 4, &["--dp-replicate", "2", "--ring", "2", "--ulysses", "2", "--layout", "zigzag"]),
    ];
    for (ranks, sharers, mesh) in meshes {
        let name = mesh.concat();
        let (one, many) = (format!("threads-{ranks}{name}"), format!("processes-{ranks}{name}"));
        threads(folder, &training(&one, mesh));
        let run = mpirun(&[(ranks, folder, training(&many, mesh))]);
        assert!(run.good, "{:#?}", run.stderr);
        let of_threads = losses(folder.join(&one));
        assert!(of_threads.len() == 5 && of_threads == losses(folder.join(&many)), "{ranks} ranks: {of_threads:#?}");
        let shards = (1..=sharers).map(|n| format!("checkpoints/step-000004/shard-{n:05}-of-{sharers:05}.safetensors"));
        for file in shards.chain(["model.safetensors".into()]) {
            let [one, many] = [&one, &many].map(|out| std::fs::read(folder.join(out).join(&file)).expect("a file"));
            assert!(one == many, "{file} of {ranks} ranks differs");
        }
        assert!(run.stderr[0].contains(&format!("rank 0 of {ranks} processes, by Open MPI")), "{}", run.stderr[0]);
        assert!(run.stderr[0].contains(&format!("{ranks} processes, {ranks} of them on this machine")));
        assert!(run.stdout[0].contains("held-out perplexity"), "{}", run.stdout[0]);
        for rank in 1..ranks {
            assert!(run.stdout[rank].is_empty() && run.stderr[rank].is_empty(), "rank {rank}: {}", run.stderr[rank]);
        }
    }
    // A run can be resumed by processes or by threads, whichever began it.
    let resumed = |out: &'static str| vec!["train", "--resume", out, "--steps", "6", "--threads", "1"];
    threads(folder, &resumed("threads-2--ring2"));
    let run = mpirun(&[(2, folder, resumed("processes-2--ring2"))]);
    assert!(run.good, "{:#?}", run.stderr);
    let of_threads = losses(folder.join("threads-2--ring2"));
    assert!(of_threads.len() == 8 && of_threads == losses(folder.join("processes-2--ring2")), "{of_threads:#?}");
}

#[test]
fn verify_score_and_generate_give_what_they_give_on_threads() {
    let corpus = corpus(TEXT);
    let folder = corpus.path();
    let mesh = ["--ring", "2", "--ulysses", "2", "--threads", "1"];
    let on_mesh = |arguments: &[&'static str]| [arguments, &mesh].concat();
    let verify = on_mesh(&["verify", "--tiny", "--sequence-length", "100"]);
    let run = mpirun(&[(4, folder, verify.clone())]);
    assert!(run.good, "{:#?}", run.stderr);
    assert_eq!(run.stdout[0], threads(folder, &verify));
    assert!(run.stdout[0].contains("PASS") && run.stdout[1..].iter().all(String::is_empty));

    threads(folder, &training("model", &["--ring", "1"]));
    let generate = on_mesh(&["generate", "--model", "model", "--prompt", "the quick ", "--max-tokens", "30"]);
    let run = mpirun(&[(4, folder, generate.clone())]);
    assert!(run.good, "{:#?}", run.stderr);
    // mpirun gives processes a terminal, to which a line break is written after the text.
    assert_eq!(run.stdout[0].trim_end_matches('\n'), threads(folder, &generate));
    assert!(!run.stdout[0].is_empty() && run.stdout[1..].iter().all(String::is_empty));
    assert!(run.stderr[0].contains("cached tokens per rank: ") && run.stderr[0].matches(", ").count() >= 5);

    let score = |out| on_mesh(&["score", "--model", "model", "--text", "corpus/3.txt", "--logits", "--out", out]);
    let run = mpirun(&[(4, folder, score("processes.safetensors"))]);
    assert!(run.good, "{:#?}", run.stderr);
    threads(folder, &score("threads.safetensors"));
    let [one, many] = ["threads", "processes"].map(|name| std::fs::read(folder.join(format!("{name}.safetensors"))));
    assert!(one.expect("a file") == many.expect("a file"));
}

#[test]
fn attend_gives_what_it_gives_on_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let (len, heads, dim) = (190, 4, 16);
    let values = |seed: usize| -> Vec<u8> {
        (0..len * heads * dim).flat_map(|i| (((i * 31 + seed) as f32) * 0.7).sin().to_le_bytes()).collect()
    };
    let data: Vec<Vec<u8>> = (0..4).map(values).collect();
    let tensors = ["q", "k", "v", "d_out"].into_iter().zip(&data).map(|(name, bytes)| {
        let shape = vec![1, len, heads, dim];
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes).expect("its size"))
    });
    let file = safetensors::serialize(tensors, None).expect("tensors");
    std::fs::write(folder.join("in.safetensors"), file).expect("room");
    let attend = |out, report| {
        let arguments = ["attend", "in.safetensors", "--mask", "causal", "--backward", "--ring", "2", "--ulysses", "2"];
        [&arguments[..], &["--threads", "1", "--out", out, "--report", report]].concat()
    };
    threads(folder, &attend("threads.safetensors", "threads.json"));
    let run = mpirun(&[(4, folder, attend("processes.safetensors", "processes.json"))]);
    assert!(run.good, "{:#?}", run.stderr);
    let read = |name: &str| std::fs::read(folder.join(name)).expect("a file");
    assert!(read("threads.safetensors") == read("processes.safetensors"));
    let ranks = |name| serde_json::from_slice::<serde_json::Value>(&read(name)).expect("JSON")["ranks"].clone();
    assert_eq!(ranks("threads.json"), ranks("processes.json"));
    assert_eq!(ranks("threads.json").as_array().map(Vec::len), Some(4));
}

#[test]
fn processes_that_do_not_fit_the_mesh_or_each_other_are_refused() {
    let corpus = corpus(TEXT);
    let folder = corpus.path();
    let refused = |groups: &[Group<'_>], words: &[&str]| {
        let run = mpirun(groups);
        assert!(!run.good);
        for (rank, said) in run.stderr.iter().enumerate() {
            assert!(words.iter().all(|word| said.contains(word)), "rank {rank}: {:#?}, wanted {words:?}", run.stderr);
        }
        assert!(!folder.join("out/metrics.jsonl").exists(), "something was written");
    };
    refused(&[(3, folder, training("out", &["--ring", "2"]))], &["needs 2 ranks, but there are 3"]);
    refused(&[(3, folder, vec!["verify", "--tiny", "--ring", "4"])], &["needs 4 ranks, but there are 3"]);
    refused(&[(2, folder, vec!["draw"])], &["start it as one process"]);
    let other = [training("out", &["--ring", "2"]), vec!["--lr", "0.01"]].concat();
    refused(
        &[(1, folder, training("out", &["--ring", "2"])), (1, folder, other)],
        &["rank 1 has --lr: 0.01, but rank 0 has nothing"],
    );
    let elsewhere = self::corpus("the slow brown fox lies under the busy dog. ");
    let same = training("out", &["--ring", "2"]);
    refused(&[(1, folder, same.clone()), (1, elsewhere.path(), same)], &["rank 1 has the data: ", "but rank 0 has"]);
    refused(
        &[(1, folder, vec!["verify", "--tiny", "--ring", "2"]), (1, folder, vec!["verify", "--tiny", "--ring=2"])],
        &["rank 1 has the command line: verify --tiny --ring=2, but rank 0 has verify --tiny --ring 2"],
    );
}

#[test]
fn a_rank_killed_in_training_is_named_by_all_and_the_run_goes_on_from_its_checkpoint() {
    let corpus = corpus(TEXT);
    let folder = corpus.path();
    let said = tempfile::tempdir().expect("a folder");
    let arguments = ["train", "--data", "corpus", "--sequence-length", "300", "--steps", "10000", "--ring", "3"];
    let arguments = [&arguments[..], &["--threads", "1", "--save-every", "1", "--out", "out"]].concat();
    let child = start(&[(3, folder, arguments)], said.path());
    let began = Instant::now();
    while !folder.join("out/checkpoints/step-000002").exists() && !folder.join("out/checkpoints/step-000003").exists() {
        assert!(began.elapsed() < DEADLINE, "no checkpoint");
        std::thread::sleep(Duration::from_millis(5));
    }
    let children = Command::new("pgrep").args(["-P", &child.id().to_string(), "ringspan"]).output().expect("pgrep");
    let children = String::from_utf8_lossy(&children.stdout).into_owned();
    let victim = children.lines().last().expect("three processes");
    let killed = Instant::now();
    assert!(Command::new("kill").args(["-KILL", victim]).status().expect("kill").success());
    let run = finish(child, 3, said.path());
    assert!(!run.good && killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    let named: Vec<usize> =
        (0..3).filter(|rank| run.stderr.iter().any(|said| said.contains(&format!("rank {rank} failed")))).collect();
    let &[named] = &named[..] else { panic!("{named:?}: {:#?}", run.stderr) };
    for (rank, said) in run.stderr.iter().enumerate().filter(|(rank, _)| *rank != named) {
        assert!(said.contains(&format!("rank {named} failed: its process is gone")), "rank {rank}: {said}");
    }
    let kept = std::fs::read_dir(folder.join("out/checkpoints")).expect("checkpoints").flatten();
    let last = kept.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse::<u64>().ok()).max();
    let steps = (last.expect("a checkpoint") + 1).to_string();
    threads(folder, &["train", "--resume", "out", "--steps", &steps, "--sample-tokens", "0"]);
}
