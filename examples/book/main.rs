//! Asks a model two questions about a text as long as a book, on 1, 2 and 4 ranks, and compares the answers.
//!
//! `cargo run --release --example book -- --model gemma-3-270m-it.gguf` puts the first 32,768 tokens of this project's documents
//! before each question; `--text novel.txt` takes another text. The text's keys and values are cut over the ranks, so each rank
//! holds its part of the cache, reads its part of the prompt, and all of them answer. The second question finds the text in the
//! cache and reads its own words only. The answers must be the same on every number of ranks.

mod answer;
mod prompt;

use answer::{Answer, PreparedPrompts};
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use prompt::Book;
use ringspan_candle::{Devices, Precision};
use ringspan_models::{Decoder, ModelSource};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Model};
use std::path::PathBuf;
use std::sync::Arc;

/// The engine allocates and frees buffers all the time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Tokens of a page of the cache.
const PAGE: usize = 64;

/// Asks a model about a long text, on several numbers of ranks.
#[derive(Debug, Parser)]
#[command(name = "book")]
struct Args {
    /// A model folder in the layout of Hugging Face, or a GGUF file
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Files of the text, one after the other
    #[arg(long, value_name = "FILE", num_args = 1.., default_values = ["README.md", "ARCHITECTURE.md", "BENCHMARKS.md", "CHANGELOG.md"])]
    text: Vec<PathBuf>,
    /// Tokens of the text that are read, from its beginning; a shorter text is read whole
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    tokens: usize,
    /// Questions about the text, each asked separately
    #[arg(long, value_name = "TEXT", num_args = 1.., default_values = ["What is this text about?", "What is the ring?"])]
    question: Vec<String>,
    /// Numbers of ranks, one after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4])]
    ranks: Vec<usize>,
    /// Tokens of an answer at most
    #[arg(long, value_name = "N", default_value_t = 32)]
    max_tokens: usize,
}

fn main() -> Result<()> {
    run(&Args::parse())
}

/// Asks all questions on each number of ranks.
///
/// # Errors
/// Files that cannot be read, failures of ranks, and answers that differ from those of the first number of ranks.
fn run(args: &Args) -> Result<()> {
    let source = ModelSource::at(&args.model).context("--model")?;
    let book = Book::read(&source, &args.text, args.tokens)?;
    let prompts: Vec<Vec<u32>> = args.question.iter().map(|question| book.ask(question)).collect::<Result<_>>()?;
    let longest = prompts.iter().map(Vec::len).max().context("--question: at least one")?;
    let prepared = PreparedPrompts { prompts: &prompts, max_tokens: args.max_tokens, end_tokens: source.end_tokens()? };
    let (config, lora, weights) = source.load_stored()?;
    ensure!(lora.is_none(), "--model {}: an adapter; give the model itself", args.model.display());
    let devices = Devices::CPU.computing_in(Precision::F32);
    let model = Arc::new(Model::new(Decoder::new(config)?, weights)?.on(&devices)?);
    let mut first: Option<Vec<Answer>> = None;
    for &ranks in &args.ranks {
        ensure!(ranks > 0, "--ranks 0: at least one rank");
        let answers = on_ranks(&model, ranks, longest + args.max_tokens, &prepared)?;
        for (question, answer) in args.question.iter().zip(&answers) {
            println!("{ranks} rank(s): {answer}");
            println!("  {question}\n  {}", book.text(&answer.tokens)?.trim().replace('\n', "\n  "));
        }
        match &first {
            None => first = Some(answers),
            Some(first) => check_equal(first, &answers, (args.ranks[0], ranks))?,
        }
    }
    println!(
        "The answers are the same on {} rank(s).",
        args.ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
    );
    Ok(())
}

/// Starts an engine on so many ranks, and asks it.
fn on_ranks(model: &Arc<Model>, ranks: usize, length: usize, prepared: &PreparedPrompts<'_>) -> Result<Vec<Answer>> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mesh = Mesh { ring: ranks, threads: (cores / ranks).max(1), ..Mesh::single() };
    let options = EngineOptions {
        page_size: PAGE,
        // The text, and a page for the end of each question and its answer.
        kv_cache: KvCacheSize::Pages(length.div_ceil(PAGE * ranks) + 2 * prepared.prompts.len()),
        max_model_len: Some(length),
        max_running: 1,
        ..EngineOptions::default()
    };
    let engine = Engine::start(model.clone(), mesh, &options)?;
    let answers = prepared.ask(&engine)?;
    engine.shutdown(true)?;
    Ok(answers)
}

fn check_equal(first: &[Answer], answers: &[Answer], (one, other): (usize, usize)) -> Result<()> {
    for (index, (first, answer)) in first.iter().zip(answers).enumerate() {
        if first.tokens != answer.tokens {
            bail!(
                "question {}: {one} rank(s) answered {:?}, and {other} rank(s) {:?}",
                index + 1,
                first.tokens,
                answer.tokens
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringspan_models::folder;
    use serde_json::json;

    /// A new byte-level model.
    fn write_model(path: &std::path::Path) -> Result<()> {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "initializer_range": 0.3,
            "eos_token_id": 256,
        });
        let decoder = Decoder::new(serde_json::from_value(config.clone())?)?;
        folder::save(path, &config, &decoder.init(1)?)?;
        let tokenizer = ringspan_train::Tokenizer::byte_level(path)?;
        Ok(std::fs::write(path.join("tokenizer.json"), tokenizer.to_json()?)?)
    }

    #[test]
    fn a_small_model_answers_the_same_on_every_number_of_ranks() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        write_model(&model).expect("a model");
        let text = folder.path().join("text.txt");
        std::fs::write(&text, "One two three. ".repeat(100)).expect("written");
        let args = |tokens| Args {
            model: model.clone(),
            text: vec![text.clone()],
            tokens,
            question: vec!["How many?".into(), "Why?".into()],
            ranks: vec![1, 2, 3],
            max_tokens: 5,
        };
        run(&args(700)).expect("equal answers");
        let missing = run(&Args { text: vec!["no-such-file".into()], ..args(10) }).expect_err("no text").to_string();
        assert!(missing.contains("no-such-file"), "{missing}");
    }
}
