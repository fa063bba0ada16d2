//! `ringspan score`: the probabilities that a model gives to the tokens of a text.

use crate::files::{self, OutputTensor};
use crate::mesh::MeshArgs;
use crate::model::ModelArgs;
use crate::tokens::TokenBatch;
use crate::{model, output};
use anyhow::{Context, Result};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::{Document, LayoutKind, StrategyKind};
use ringspan_serve::Batch;
use safetensors::Dtype;
use std::path::PathBuf;
use std::time::Instant;

/// Log-probabilities and perplexity of given tokens, over a mesh of ranks.
///
/// OUT receives logprobs f32 [B,S-1]: the natural log of the probability of token t+1 given tokens 0 to t, 0 after the end of a
/// row; with --logits also logits f32 [B,S,V].
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("input").required(true).args(["tokens", "text"]))]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A safetensors file with tokens (i64 or u32, [B,S]) and, for rows that end earlier, lengths (i32, [B])
    #[arg(long, value_name = "IN")]
    tokens: Option<PathBuf>,
    /// A text file, taken as one document
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The safetensors file for the results
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    /// Write the logits as well
    #[arg(long)]
    logits: bool,
    #[command(flatten)]
    mesh: MeshArgs,
    /// Layout of the tokens over the ranks: contiguous, zigzag, striped:K, per-document-zigzag, balanced, balanced:BLOCK
    #[arg(long, default_value = "zigzag", value_name = "NAME")]
    layout: LayoutKind,
    /// Strategy of attention: ring, bidirectional-ring, all-gather, halo, pass-q
    #[arg(long, default_value = "ring", value_name = "NAME")]
    strategy: StrategyKind,
}

pub(crate) fn run(args: &ScoreArgs, processes: &ProcessGroup) -> Result<()> {
    let mesh = model::mesh(&args.mesh, &args.model, processes)?;
    files::check_output("--out", &args.out)?;
    let model = args.model.load(&mesh)?;
    let batch = match (&args.tokens, &args.text) {
        (Some(file), _) => TokenBatch::read(file, model.vocabulary())?,
        (_, Some(file)) => {
            let text =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {} as text", file.display()))?;
            TokenBatch::one(model::encode(&model::tokenizer(&args.model.path)?, &text)?)
        }
        (None, None) => anyhow::bail!("give --tokens or --text"),
    };
    model::warn_context_overflow(&model, batch.documents.iter().map(Document::tokens).max().unwrap_or(0));
    let mesh = model::connected(mesh)?;
    let began = Instant::now();
    let input = Batch { tokens: &batch.tokens, documents: &batch.documents };
    let scores = ringspan_serve::score(&model, &mesh, input, args.layout, args.strategy, args.logits)?;
    let Some(scores) = scores else { return Ok(()) };
    model.weight_formats(&mesh.devices).iter().for_each(output::note);
    let seconds = began.elapsed().as_secs_f64();

    let TokenBatch { rows, len, .. } = batch;
    let sum: f64 = scores.log_probs.iter().map(|log_prob| f64::from(*log_prob)).sum();
    // The last column is left out, since no token follows it.
    let columns = len.saturating_sub(1);
    let log_probs = scores.log_probs.chunks_exact(len.max(1)).flat_map(|row| &row[..columns]).copied().collect();
    let mut out = vec![OutputTensor::new("logprobs", Dtype::F32, vec![rows, columns], log_probs)];
    if let Some(logits) = scores.logits {
        out.push(OutputTensor::new("logits", Dtype::F32, vec![rows, len, model.vocabulary()], logits));
    }
    files::write_tensors(&args.out, &out)?;
    let tokens = batch.documents.tokens();
    if scores.predicted == 0 {
        return Ok(output::line(format_args!("no token follows another among {tokens}: no perplexity"))?);
    }
    let mean = -sum / scores.predicted as f64;
    output::line(format_args!(
        "perplexity {:.4} ({mean:.6} nats a token) over {} predicted of {tokens} tokens, {:.0} tokens/s",
        mean.exp(),
        scores.predicted,
        tokens as f64 / seconds.max(1e-9)
    ))?;
    Ok(())
}
