//! The command `ringspan`: trains and runs transformers over sequences cut across ranks.
#![allow(rustdoc::broken_intra_doc_links)] // Shapes like [B,S] in the texts of --help are no links.

mod attend;
mod draw;
mod files;
mod generate;
mod header;
mod interrupt;
mod mesh;
mod model;
mod say;
mod score;
mod tokens;
mod topology;
mod train;
mod verify;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// candle takes and returns large buffers all the time; the system's allocator gives their pages back each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Context parallelism: train and run transformers over sequences cut across ranks.
#[derive(Debug, Parser)]
#[command(name = "ringspan", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(Box<train::TrainArgs>),
    Generate(generate::GenerateArgs),
    Score(score::ScoreArgs),
    Attend(attend::AttendArgs),
    Draw(draw::DrawArgs),
    Mesh(topology::TopologyArgs),
    Verify(verify::VerifyArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match interrupt::install().and_then(|()| run(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(args) => train::run(*args),
        Command::Generate(args) => generate::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Attend(args) => attend::run(&args),
        Command::Draw(args) => draw::run(&args),
        Command::Mesh(args) => topology::run(&args),
        Command::Verify(args) => verify::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::CommandFactory;

    #[test]
    fn the_flags_do_not_contradict_each_other() {
        Cli::command().debug_assert();
    }
}
