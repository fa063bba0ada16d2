//! Videos under `mpirun` are those of threads. Needs feature `mpi`.
#![cfg(feature = "mpi")]

use crate::mpi;
use crate::support::video_fixtures::{copy, fixture, write_pipeline};

#[test]
fn a_video_of_processes_is_that_of_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    write_pipeline(&folder.path().join("model"));
    let arguments = |out| {
        let flags = "video --model model --prompt cat --negative rain --frames 9 --height 32 --width 48 --steps 4 --seed 7 \
                     --guidance 4 --guidance-2 3 --threads 1 --ring 2 --preview look.png --out";
        [flags.split_whitespace().collect::<Vec<_>>(), vec![out]].concat()
    };
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("a file");
    mpi::threads(folder.path(), &arguments("threads.safetensors"));
    let preview = read("look.png");
    std::fs::remove_file(folder.path().join("look.png")).expect("it is there");
    let run = mpi::mpirun(&[(2, folder.path(), arguments("processes.safetensors"))]);
    assert!(run.good, "{:#?}", run.stderr);
    assert!(read("processes.safetensors") == read("threads.safetensors") && read("look.png") == preview);
    assert!(run.stderr[0].contains("step 4/4") && run.stdout[1].is_empty(), "{:#?}", run.stderr);
}

/// The pipeline has two transformers, of which the second one's shares replace those of the first.
#[test]
fn a_video_of_processes_that_shard_weights_is_that_of_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    write_pipeline(&folder.path().join("model"));
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("a file");
    let runs = [("--ring 2", ""), ("--ring 2", "--cache-threshold 0.3"), ("--cfg-parallel", "--cache-threshold 0.3")];
    for (mesh, more) in runs {
        let arguments = |flags: &'static str| -> Vec<&str> {
            let always = "video --model model --prompt cat --negative rain --frames 9 --height 32 --width 48 --steps 4 --seed 7 \
                          --guidance 4 --guidance-2 3 --threads 1";
            [always, mesh, more, flags].into_iter().flat_map(str::split_whitespace).collect()
        };
        mpi::threads(folder.path(), &arguments("--out threads.safetensors"));
        let sharded = arguments("--shard-weights --out processes.safetensors");
        let run = mpi::mpirun(&[(2, folder.path(), sharded)]);
        assert!(run.good, "{mesh}: {:#?}", run.stderr);
        assert!(read("processes.safetensors") == read("threads.safetensors"), "{mesh}");
        assert!(run.stderr[0].contains("sharded   a rank holds"), "{:#?}", run.stderr);
    }
}

#[test]
fn adapters_of_processes_are_those_of_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    copy(&fixture("transformer/t2v"), &folder.path().join("model"));
    std::fs::copy(fixture("training/data.safetensors"), folder.path().join("data.safetensors")).expect("copied");
    let arguments = |out| {
        let flags =
            "train --model model --data data.safetensors --lora-rank 2 --steps 3 --lr 0.02 --ring 2 --threads 1 --out";
        [flags.split_whitespace().collect::<Vec<_>>(), vec![out]].concat()
    };
    let adapter = |out: &str| {
        std::fs::read(folder.path().join(out).join("pytorch_lora_weights.safetensors")).expect("an adapter")
    };
    mpi::threads(folder.path(), &arguments("threads"));
    let run = mpi::mpirun(&[(2, folder.path(), arguments("processes"))]);
    assert!(run.good, "{:#?}", run.stderr);
    assert!(adapter("processes") == adapter("threads"));
    assert!(run.stderr[0].contains("a process: its share"), "{:#?}", run.stderr);
}
