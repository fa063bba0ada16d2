//! A model that finds a pass key in 16,384 tokens, trained from nothing on two ranks.
//!
//! `cargo run --release --example passkey` writes texts with a pass key in the first half and a question at the end, and
//! trains a small model on them: first on short texts, then, with its rotary embedding scaled, on longer ones. Rank 0
//! holds the first half of every text and rank 1 the second, so the key can be told only if attention reaches across the
//! ranks. The same training with attention cut at that border is the control. Both are then asked about texts they have
//! never seen, and the losses are drawn into an SVG.

mod accuracy;
mod attention_reach;
mod document;
mod model;
mod plot;
mod stage;

use anyhow::{Context, Result, ensure};
use attention_reach::{AttentionReach, owner};
use clap::Parser;
use document::Document;
use plot::{Curve, Plot};
use stage::Stage;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Like the command `ringspan`, training allocates and frees buffers all the time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The model learns the task on short texts, where it soon sees what to look for; then its rotary embedding is scaled once for
/// the longest texts, and it is tuned.
const STAGES: [Stage; 3] = [
    Stage { length: 128, texts: 32, steps: 300, lr: 5e-3, rope_scaling: None },
    Stage { length: 4096, texts: 4, steps: 20, lr: 3e-4, rope_scaling: Some("yarn:128") },
    Stage { length: 16_384, texts: 1, steps: 20, lr: 3e-4, rope_scaling: None },
];

/// Share of the keys that has to be found.
const WANTED: f64 = 0.95;

/// Trains a model to find a pass key across two ranks, and the same model with attention cut between them.
#[derive(Debug, Parser)]
#[command(name = "passkey")]
struct Args {
    /// Folder for texts, models and the plot; new
    #[arg(long, value_name = "DIR", default_value = "passkey-out")]
    out: PathBuf,
    /// Seed of the texts and of the new model
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Held-out texts that the models are asked about
    #[arg(long, value_name = "N", default_value_t = 100)]
    questions: usize,
}

fn main() -> Result<()> {
    let began = Instant::now();
    let args = Args::parse();
    let found = run(&args.out, &STAGES, args.seed, args.questions)?;
    println!("{:.0} s in all", began.elapsed().as_secs_f64());
    let wanted = (WANTED * args.questions as f64).ceil() as usize;
    ensure!(found >= wanted, "{found} of {} keys found, fewer than {wanted}", args.questions);
    Ok(())
}

/// Trains both models and tests them; returns the number of keys that the model with the ring finds.
fn run(out: &Path, stages: &[Stage], seed: u64, questions: usize) -> Result<usize> {
    ensure!(!out.exists(), "{} is there already: remove it, or name another folder with --out", out.display());
    let (first, last) = stages.first().zip(stages.last()).context("a training has at least one stage")?;
    std::fs::create_dir_all(out.join("data")).with_context(|| format!("cannot create {}", out.display()))?;
    for (stage, salt) in stages.iter().zip(1..) {
        stage.write_data(out, salted(seed, salt))?;
    }
    let new = out.join("new");
    model::write(&new, first.length, seed)?;
    let held_out = document::documents(last.length, questions, salted(seed, 0))?;
    tell_ranks(&held_out, last.length)?;

    let mut curves = Vec::new();
    let mut trained = Vec::new();
    for reach in AttentionReach::BOTH {
        let (mut losses, mut at) = (Vec::new(), new.clone());
        for stage in stages {
            let (of_stage, next) = stage.train(out, &at, reach, seed)?;
            losses.extend(of_stage);
            at = next;
        }
        println!("asking about {questions} texts of {} tokens that no model has seen ...", last.length);
        let right = accuracy::exact_matches(&at, &held_out, reach)?;
        println!("{}: {right} of {questions} keys", reach.words());
        curves.push(Curve { name: format!("{}: {right} of {questions} keys found", reach.words()), losses });
        trained.push((at, right));
    }
    let plot = Plot { stages, curves };
    let svg = out.join("passkey.svg");
    std::fs::write(&svg, plot.svg()).with_context(|| format!("cannot write {}", svg.display()))?;
    let Some((folder, found)) = trained.first() else { return Ok(0) };
    if let Some(first) = held_out.first() {
        let prompt = out.join("question.txt");
        std::fs::write(&prompt, &first.prompt).with_context(|| format!("cannot write {}", prompt.display()))?;
        println!("plot {}; ask the model yourself, the key is {}:", svg.display(), first.key);
        println!(
            "  cargo run --release -- generate --model {} --prompt-file {} --max-tokens {} --temperature 0 --ring 2",
            folder.display(),
            prompt.display(),
            document::DIGITS
        );
    }
    Ok(*found)
}

/// Prints which rank holds which part of a text, according to the layout.
fn tell_ranks(held_out: &[Document], length: usize) -> Result<()> {
    let layout = AttentionReach::Ring.layout(length)?;
    for rank in 0..layout.ranks() {
        let rows = layout.rows(rank);
        if let (Some(first), Some(last)) = (rows.first(), rows.last()) {
            println!("rank {rank} holds tokens {first} to {last} of a text of {length}");
        }
    }
    let Some(first) = held_out.first() else { return Ok(()) };
    let mut apart = 0;
    for document in held_out {
        let needle = [document.needle.start, document.needle.end - 1].map(|token| owner(&layout, token));
        let question = [document.prompt.len() - 1, document.answer().end - 1].map(|token| owner(&layout, token));
        apart += usize::from(needle == [Some(0); 2] && question == [Some(1); 2]);
    }
    println!("the first text has {:?} at token {}", document_needle(first), first.needle.start);
    println!("needle on rank 0, question and answer on rank 1: {apart} of {} held-out texts", held_out.len());
    ensure!(apart == held_out.len(), "a needle and its question share a rank");
    Ok(())
}

fn document_needle(document: &Document) -> &str {
    document.prompt[document.needle.clone()].trim()
}

/// Gives different texts different random streams.
fn salted(seed: u64, salt: u64) -> u64 {
    seed.wrapping_mul(STAGES.len() as u64 + 1).wrapping_add(salt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_short_stages_train_ask_and_draw() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("run");
        let stage = |length, steps, rope_scaling| Stage { length, texts: 2, steps, lr: 1e-3, rope_scaling };
        let found = run(&out, &[stage(128, 3, None), stage(256, 2, Some("yarn:2"))], 3, 2).expect("a run");
        assert!(found <= 2);
        let svg = std::fs::read_to_string(out.join("passkey.svg")).expect("a plot");
        assert!(svg.contains("ring over 2 ranks: ") && svg.contains("control: "));
        for folder in ["new", "ring-128", "ring-256", "cut-128", "cut-256"] {
            assert!(out.join(folder).join("model.safetensors").exists(), "{folder}");
        }
        let config = std::fs::read_to_string(out.join("ring-256/config.json")).expect("a configuration");
        assert!(config.contains("yarn") && config.contains("256"), "{config}");
        let message = run(&out, &[stage(128, 3, None)], 3, 2).expect_err("a used folder").to_string();
        assert!(message.contains("--out"), "{message}");
    }
}
