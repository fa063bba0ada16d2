//! Finds out before a command runs whether its ranks are threads of this process, or this process is one of several ranks.

use crate::output;
use anyhow::{Result, anyhow};
use ringspan::comm::launch::Launch;
use ringspan::comm::process_group::ProcessGroup;
use std::process::ExitCode;

/// The rank of this process among several. Launchers set it in the environment.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct LaunchArgs {
    /// Rank of this process, 0 to N - 1, if the launcher sets no variables [default: read from the variables of torchrun, Open
    /// MPI, PMI or Slurm]
    #[arg(long, global = true, requires = "world_size", value_name = "RANK", help_heading = "Launch")]
    rank: Option<usize>,
    /// Number of processes, each of which is a rank; needs a build with --features mpi
    #[arg(long, global = true, requires = "rank", value_name = "N", help_heading = "Launch")]
    world_size: Option<usize>,
}

/// Runs a command with its ranks, and prints its error.
pub(crate) fn run(args: LaunchArgs, command: impl FnOnce(&ProcessGroup) -> Result<ExitCode> + Send) -> ExitCode {
    let launch = Launch::find(args.rank.zip(args.world_size), |name| std::env::var(name).ok());
    let result = match launch {
        // A single process needs no MPI: its ranks are threads.
        Ok(None | Some(Launch { size: 1, .. })) => command(&ProcessGroup::single()),
        Ok(Some(launch)) => return several(launch, command),
        Err(error) => Err(error.into()),
    };
    result.unwrap_or_else(|error| failed(&error))
}

fn failed(error: &anyhow::Error) -> ExitCode {
    output::error(&format!("error: {}", output::with_causes(error)));
    ExitCode::FAILURE
}

#[cfg(not(feature = "mpi"))]
fn several(launch: Launch, _: impl FnOnce(&ProcessGroup) -> Result<ExitCode> + Send) -> ExitCode {
    failed(&anyhow!(
        "this is {launch}, but this program was built without MPI, so each of the {size} would run alone and write over \
         the others' files: build it with `cargo build --release --features mpi`, or start one process, whose ranks are \
         threads",
        size = launch.size
    ))
}

#[cfg(feature = "mpi")]
fn several(launch: Launch, command: impl FnOnce(&ProcessGroup) -> Result<ExitCode> + Send) -> ExitCode {
    use ringspan::comm::mpi::{Options, Process};
    // This process is one rank of several, so the tensor library's thread pools are limited to one thread.
    crate::mesh::limit_threads(launch.size, 1);
    let process = match Process::start(Options::default()) {
        Ok(process) => process,
        Err(error) => return failed(&error.into()),
    };
    crate::interrupt::leave_time();
    if process.rank() != 0 {
        output::be_silent();
    }
    let result = process.run(|comm| -> Result<ExitCode> {
        let processes = ProcessGroup::mpi(&process, comm);
        if (process.rank(), process.size()) != (launch.rank, launch.size) {
            return Err(anyhow!(
                "this is {launch}, but rank {} of {} for MPI: start the processes with MPI's own mpirun, or with srun",
                process.rank(),
                process.size()
            ));
        }
        if processes.lead() {
            eprintln!("{launch}");
        }
        // The error becomes text with all its causes, since the other ranks receive only the text.
        command(&processes).map_err(|error| anyhow!(output::with_causes(&error)))
    });
    let good = result.is_ok();
    // The error is printed before MPI is ended, which may end all processes at once.
    let code = result.unwrap_or_else(|error| failed(&error));
    process.end(good).map_or(ExitCode::FAILURE, |()| code)
}
