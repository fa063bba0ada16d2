//! `ringspan generate`: continues a prompt.

use crate::mesh::MeshArgs;
use crate::model::ModelArgs;
use crate::{model, say};
use anyhow::{Context, Result, ensure};
use ringspan::comm::Buffer;
use ringspan::comm::ranks::Ranks;
use ringspan_serve::{Generation, Options, Sampling, Stop, TextStream};
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

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
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) fn run(args: &GenerateArgs, ranks: &Ranks) -> Result<()> {
    let mesh = model::mesh(&args.mesh, &args.model, ranks)?;
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
    model::warn_beyond(&model, tokens.len() + options.max_tokens - 1);
    let mut stream = TextStream::new(&tokenizer, &tokens, &args.stop)?;
    let mut written = Ok(true);
    let mesh = model::connected(mesh)?;
    let generations = ringspan_serve::generate(&model, &mesh, &tokens, &options, |token| {
        let text = stream.push(token)?;
        written = say::write(&text);
        let go_on = matches!(written, Ok(true)) && !stream.stopped();
        Ok(if go_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    let cached = generations.iter().map(|rank| Buffer::U64(vec![rank.cached as u64])).collect();
    let Some(cached) = mesh.ranks.gather(cached)? else { return Ok(()) };
    if written.context("cannot write to standard output")? {
        let rest = stream.finish()?;
        let end = if std::io::stdout().is_terminal() { "\n" } else { "" };
        say::write(&(rest + end)).context("cannot write to standard output")?;
    }
    eprintln!("{}", summary(&generations, &cached, tokens.len(), stream.stopped()));
    model.held(&mesh.devices).iter().for_each(say::note);
    Ok(())
}

fn summary(generations: &[Generation], cached: &[Arc<Buffer>], prompt: usize, stopped: bool) -> String {
    let Some(first) = generations.first() else { return String::new() };
    let speed = |tokens: usize, time: std::time::Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    let why = match first.stop {
        Stop::Token => "end of text",
        Stop::Length => "--max-tokens",
        Stop::Caller if stopped => "--stop",
        Stop::Caller => "the reader left",
    };
    let number = |buffer: &Arc<Buffer>| match &**buffer {
        Buffer::U64(number) => number.iter().map(u64::to_string).collect(),
        _ => String::new(),
    };
    let cached: Vec<String> = cached.iter().map(number).collect();
    format!(
        "prompt {prompt} tokens, {:.0} tokens/s; {} new tokens, {:.1} tokens/s; ended by {why}; cached tokens per rank: {}",
        speed(prompt, first.prefill),
        first.tokens.len(),
        speed(first.tokens.len().saturating_sub(1), first.decode),
        cached.join(", ")
    )
}
