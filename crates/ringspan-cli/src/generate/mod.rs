//! `ringspan generate`: continues a prompt.

mod on_engine;
mod on_gpus;
mod printer;

use crate::mesh::MeshArgs;
use crate::model::ModelArgs;
use crate::serve::speculative_tokens;
use crate::{model, output};
use anyhow::{Context, Result, ensure};
use printer::Printer;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_serve::{Options, Sampling};
use std::path::PathBuf;
use std::time::Duration;

/// Continue a prompt with generated text, over a mesh of ranks.
///
/// All ranks prefill the prompt in parallel, and each caches its share of the keys and values. Only the new text is written to
/// standard output; everything else to standard error. The same prompt, seed and flags give the same text, and with
/// --temperature 0 every mesh gives the same text.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("input").required(true).args(["prompt", "prompt_file"]))]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to continue
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with the text to continue
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Upper limit of generated tokens
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Divides the logits before a token is drawn; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8, value_name = "T", allow_hyphen_values = true)]
    temperature: f32,
    /// Draw only from the K most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw only from the most likely tokens that together have probability P
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    top_p: Option<f32>,
    /// Seed of the random stream
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// End before this text; may be given more than once
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Speculative decoding by prompt lookup: propose up to N further tokens, found by the last ones in the text
    /// before, and check them in the same step; the text stays the same, and comes faster if it repeats itself
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = speculative_tokens)]
    num_speculative_tokens: usize,
    #[command(flatten)]
    mesh: MeshArgs,
}

/// A text that was generated, as rank 0 reports it.
struct Generated {
    /// Number of new tokens.
    tokens: usize,
    end_reason: EndReason,
    /// For each rank, the number of tokens whose keys and values it has cached.
    cached: Vec<usize>,
    /// Time from the start to the first token.
    prefill: Duration,
    /// Time for all further tokens.
    decode: Duration,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndReason {
    /// One of the model's end tokens was drawn.
    EndToken,
    /// There are `--max-tokens` tokens.
    MaxTokens,
    /// The memory for keys and values is full.
    Memory,
    /// The printer ended it: at a stop text, or because there is no reader.
    Printer,
}

pub(crate) fn run(args: &GenerateArgs, processes: &ProcessGroup) -> Result<()> {
    let mesh = model::mesh(&args.mesh, &args.model, processes)?;
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    sampling.check()?;
    ensure!(args.stop.iter().all(|stop| !stop.is_empty()), "--stop '' is an empty text, which would end everything");
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (_, Some(file)) => {
            std::fs::read_to_string(file).with_context(|| format!("cannot read {} as text", file.display()))?
        }
        (None, None) => anyhow::bail!("give --prompt or --prompt-file"),
    };
    ensure!(!prompt.is_empty(), "the prompt is empty; give at least one character to go on from");
    let model = args.model.load(&mesh)?;
    let tokenizer = model::tokenizer(&args.model.path)?;
    let tokens = model::encode(&tokenizer, &prompt)?;
    let options =
        Options { sampling, max_tokens: args.max_tokens as usize, stop_tokens: model::end_tokens(&args.model.path)? };

    // The last generated token never passes through the model.
    model::warn_context_overflow(&model, tokens.len() + options.max_tokens - 1);
    ensure!(
        args.num_speculative_tokens == 0 || !mesh.devices.are_gpus(),
        "--num-speculative-tokens {} has no effect on GPUs, where tokens are generated one by one",
        args.num_speculative_tokens
    );
    let weights = model.weight_formats(&mesh.devices);
    let mut printer = Printer::new(&tokenizer, &tokens, &args.stop)?;
    let mesh = model::connected(mesh)?;
    let generated = match mesh.devices.are_gpus() {
        true => on_gpus::generate(&model, &mesh, &tokens, &options, &mut printer)?,
        false => on_engine::generate(model, mesh, &tokens, &options, args.num_speculative_tokens, &mut printer)?,
    };
    let Some(generated) = generated else { return Ok(()) };
    let stopped = printer.finish()?;
    eprintln!("{}", summary(&generated, tokens.len(), stopped));
    weights.iter().for_each(output::note);
    Ok(())
}

fn summary(generated: &Generated, prompt: usize, stopped: bool) -> String {
    let speed = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    let why = match generated.end_reason {
        EndReason::EndToken => "end of text",
        EndReason::MaxTokens => "--max-tokens",
        EndReason::Memory => "the memory for keys and values, which is full",
        EndReason::Printer if stopped => "--stop",
        EndReason::Printer => "the reader left",
    };
    let cached: Vec<String> = generated.cached.iter().map(usize::to_string).collect();
    format!(
        "prompt {prompt} tokens, {:.0} tokens/s; {} new tokens, {:.1} tokens/s; ended by {why}; cached tokens per rank: {}",
        speed(prompt, generated.prefill),
        generated.tokens,
        speed(generated.tokens.saturating_sub(1), generated.decode),
        cached.join(", ")
    )
}
