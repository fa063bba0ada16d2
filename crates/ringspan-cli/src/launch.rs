//! Ranks as threads of this process, or this process as one rank of several: found out before a command runs.

use crate::say;
use anyhow::{Result, anyhow};
use ringspan::comm::launch::Launch;
use ringspan::comm::ranks::Ranks;
use std::process::ExitCode;

/// Which of several processes this is. Launchers say it in the environment.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct LaunchArgs {
    /// This process among several, where the launcher sets no variables: 0 to N - 1 [default: asked of torchrun's, Open
    /// MPI's, PMI's and Slurm's variables]
    #[arg(long, global = true, requires = "world_size", value_name = "RANK", help_heading = "Launch")]
    rank: Option<usize>,
    /// Processes in all, each of which is a rank; needs a build with --features mpi
    #[arg(long, global = true, requires = "rank", value_name = "N", help_heading = "Launch")]
    world_size: Option<usize>,
}

/// Runs a command where its ranks are, and shows its error.
pub(crate) fn run(args: LaunchArgs, command: impl FnOnce(&Ranks) -> Result<ExitCode> + Send) -> ExitCode {
    let launch = Launch::find(args.rank.zip(args.world_size), |name| std::env::var(name).ok());
    let result = match launch {
        // A world of one needs nobody: its ranks are threads.
        Ok(None | Some(Launch { size: 1, .. })) => command(&Ranks::threads()),
        Ok(Some(launch)) => return several(launch, command),
        Err(error) => Err(error.into()),
    };
    result.unwrap_or_else(|error| failed(&error))
}

fn failed(error: &anyhow::Error) -> ExitCode {
    say::error(&format!("error: {}", say::with_causes(error)));
    ExitCode::FAILURE
}

#[cfg(not(feature = "mpi"))]
fn several(launch: Launch, _: impl FnOnce(&Ranks) -> Result<ExitCode> + Send) -> ExitCode {
    failed(&anyhow!(
        "this is {launch}, but this program was built without MPI, so each of the {size} would run alone and write over \
         the others' files: build it with `cargo build --release --features mpi`, or start one process, whose ranks are \
         threads",
        size = launch.size
    ))
}

#[cfg(feature = "mpi")]
fn several(launch: Launch, command: impl FnOnce(&Ranks) -> Result<ExitCode> + Send) -> ExitCode {
    use ringspan::comm::mpi::{Options, World};
    // A process is one rank, so the tensor library's pools get what they get beside other ranks: one thread.
    crate::mesh::limit_threads(launch.size, 1);
    let world = match World::start(Options::default()) {
        Ok(world) => world,
        Err(error) => return failed(&error.into()),
    };
    crate::interrupt::leave_time();
    if world.rank() != 0 {
        say::be_silent();
    }
    let result = world.run(|comm| -> Result<ExitCode> {
        let ranks = Ranks::process(&world, comm);
        if (world.rank(), world.size()) != (launch.rank, launch.size) {
            return Err(anyhow!(
                "this is {launch}, but rank {} of {} for MPI: start the processes with MPI's own mpirun, or with srun",
                world.rank(),
                world.size()
            ));
        }
        if ranks.lead() {
            eprintln!("{launch}");
        }
        // In words, with its causes, since the others are told no more than the text.
        command(&ranks).map_err(|error| anyhow!(say::with_causes(&error)))
    });
    let good = result.is_ok();
    // Shown before the end, which may come with the end of all processes.
    let code = result.unwrap_or_else(|error| failed(&error));
    world.end(good).map_or(ExitCode::FAILURE, |()| code)
}
