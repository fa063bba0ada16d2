//! Tests that a process that was started as one of several never takes itself for the only one.

use std::process::Command;

fn draw(variables: &[(&str, &str)], flags: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringspan"));
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK"] {
        command.env_remove(name);
    }
    let output = command.envs(variables.iter().copied()).arg("draw").args(flags).output().expect("it starts");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn variables_of_launchers_are_read_and_checked() {
    assert_eq!(draw(&[], &[]), (true, String::new()));
    assert_eq!(draw(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")], &[]), (true, String::new()));
    // Without LOCAL_RANK, these variables may describe a machine rather than a process, and are ignored.
    assert_eq!(draw(&[("RANK", "0"), ("WORLD_SIZE", "2")], &[]), (true, String::new()));
    for (variables, flags, word) in [
        (&[("PMI_RANK", "0"), ("PMI_SIZE", "many")][..], &[][..], "PMI_SIZE is 'many', no number"),
        (&[("PMI_RANK", "4"), ("PMI_SIZE", "4")], &[], "rank 4 of 4"),
        (&[], &["--rank", "2", "--world-size", "2"], "rank 2 of 2"),
        (&[], &["--rank", "2"], "--world-size"),
    ] {
        let (good, said) = draw(variables, flags);
        assert!(!good && said.contains(word), "{said}");
    }
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_program_without_mpi_refuses_to_be_one_of_several_and_says_how_to_build_it() {
    let torchrun = [("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")];
    let (good, said) = draw(&torchrun, &[]);
    assert!(!good && said.contains("rank 1 of 8 processes, by torchrun (RANK, WORLD_SIZE)"), "{said}");
    assert!(said.contains("cargo build --release --features mpi") && said.contains("each of the 8"), "{said}");
}

#[cfg(feature = "mpi")]
#[test]
fn a_launcher_that_is_not_mpis_is_refused_with_both_numbers() {
    let (good, said) = draw(&[("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")], &[]);
    assert!(
        !good && said.contains("rank 1 of 8 processes, by torchrun") && said.contains("rank 0 of 1 for MPI"),
        "{said}"
    );
}
