#![doc = include_str!("../README.md")]
#![allow(rustdoc::broken_intra_doc_links)] // Shapes like [B,S] in the texts of --help are no links.

mod allocator;
pub mod attend;
mod bench;
mod decode_latents;
mod denoise;
mod device;
mod draw;
mod duration_text;
mod encode_frames;
mod export;
pub mod files;
mod generate;
mod header;
mod interrupt;
mod launch;
mod mesh;
mod model;
mod output;
mod score;
mod serve;
mod session;
mod text_embed;
mod tokens;
mod topology;
mod train;
mod verify;
mod video;
mod video_io;
mod video_training;

pub use allocator::CountingAllocator;

use clap::{Parser, Subcommand};
use ringspan::comm::process_group::ProcessGroup;
use std::process::ExitCode;

/// Context parallelism: train and run transformers over sequences cut across ranks.
#[derive(Debug, Parser)]
#[command(name = "ringspan", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    launch: launch::LaunchArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model, or adapters for one, on text cut across ranks
    Train(Box<train::TrainArgs>),
    Export(export::ExportArgs),
    Generate(generate::GenerateArgs),
    Serve(Box<serve::ServeArgs>),
    Score(score::ScoreArgs),
    Denoise(denoise::DenoiseArgs),
    Attend(attend::AttendArgs),
    Draw(draw::DrawArgs),
    Mesh(topology::TopologyArgs),
    Verify(verify::VerifyArgs),
    Bench(bench::BenchArgs),
    DecodeLatents(decode_latents::DecodeLatentsArgs),
    EncodeFrames(encode_frames::EncodeFramesArgs),
    TextEmbed(text_embed::TextEmbedArgs),
    Video(Box<video::VideoArgs>),
}

/// Chooses how long mimalloc keeps freed memory, in milliseconds. By default it returns memory that was free for a second, and each
/// training step requests and clears the same pages anew, which takes 8 % of the step: so memory is kept for ever (-1), except by a
/// server, which would keep the most that any thread has needed for one prompt, and by stages of videos, which would keep buffers of
/// all layers, each of other sizes.
fn keep_memory(command: &Command) {
    /// The option `mi_option_purge_delay`, for which the crate has no constant.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    let delay = match command {
        Command::Serve(_) => return,
        Command::Denoise(_) | Command::DecodeLatents(_) | Command::EncodeFrames(_) | Command::Video(_) => 400,
        _ => -1,
    };
    // SAFETY: sets an integer option, for which every value is valid.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, delay) };
}

/// Runs the command that the arguments of this process ask for.
#[must_use]
pub fn main() -> ExitCode {
    let Cli { launch, command } = Cli::parse();
    keep_memory(&command);
    launch::run(launch, |ranks| {
        interrupt::install()?;
        run(command, ranks)
    })
}

fn run(command: Command, processes: &ProcessGroup) -> anyhow::Result<ExitCode> {
    if !matches!(command, Command::Train(_)) {
        // A training compares its settings across processes one by one.
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        processes.agree(&[("the command line".into(), arguments.join(" "))])?;
    }
    match command {
        Command::Train(args) => return train::run(*args, processes),
        Command::Export(args) => export::run(&args, processes),
        Command::Generate(args) => generate::run(&args, processes),
        Command::Serve(args) => serve::run(&args, processes),
        Command::Score(args) => score::run(&args, processes),
        Command::Denoise(args) => denoise::run(&args, processes),
        Command::Attend(args) => attend::run(&args, processes),
        Command::Draw(args) => draw::run(&args, processes),
        Command::Mesh(args) => topology::run(&args, processes),
        Command::Verify(args) => verify::run(&args, processes),
        Command::Bench(args) => bench::run(&args),
        Command::DecodeLatents(args) => decode_latents::run(&args, processes),
        Command::EncodeFrames(args) => encode_frames::run(&args, processes),
        Command::TextEmbed(args) => text_embed::run(&args, processes),
        Command::Video(args) => video::run(&args, processes),
    }?;
    Ok(ExitCode::SUCCESS)
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
