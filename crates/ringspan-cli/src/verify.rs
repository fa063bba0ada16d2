//! `ringspan verify`: the same batch on one rank and on a mesh, compared number by number.

use crate::mesh::MeshArgs;
use crate::{model, say};
use anyhow::{Context, Result, bail, ensure};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan::attention::Group;
use ringspan::comm::Buffer;
use ringspan::comm::ranks::Ranks;
use ringspan::{Documents, Layout, LayoutKind, Strategy};
use ringspan_candle::Context as Attention;
use ringspan_candle::loss::{self, IGNORE};
use ringspan_models::{Config, Decoder, Recompute, gradients};
use ringspan_serve::{Mesh, Model};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// The greatest relative difference that passes: what f32 rounding in another order can do, and no more.
const TOLERANCE: f64 = 1e-5;

/// Runs the same batch (two ragged rows of packed documents) on one rank and on the asked mesh, and compares loss,
/// logits and every parameter's gradient.
///
/// Prints the relative L2 difference of each and PASS or FAIL; the exit code is 1 if any is above 1e-5.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["model", "tiny"]))]
pub(crate) struct VerifyArgs {
    /// A model folder as Hugging Face's: config.json, safetensors
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// A small model with random weights
    #[arg(long)]
    tiny: bool,
    #[command(flatten)]
    mesh: MeshArgs,
    /// Who holds which tokens: contiguous, zigzag, striped:K, per-document-zigzag, balanced, balanced:BLOCK
    #[arg(long, default_value = "zigzag", value_name = "NAME")]
    layout: LayoutKind,
    /// How queries meet keys: ring, bidirectional-ring, all-gather, halo, pass-q
    #[arg(long, default_value = "ring", value_name = "NAME")]
    strategy: Strategy,
    /// Tokens S of a row
    #[arg(long, default_value_t = 256, value_name = "S", value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    sequence_length: u32,
    /// Start of the random stream of the tokens
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
}

pub(crate) fn run(args: &VerifyArgs, ranks: &Ranks) -> Result<()> {
    let mesh = model::mesh(&args.mesh, ranks)?;
    let model = match &args.model {
        Some(path) => model::load(path, &mesh)?,
        None => tiny(&mesh)?,
    };
    let batch = Batch::random(args.sequence_length as usize, model.vocabulary(), args.seed)?;
    say::line(format_args!(
        "2 rows of {} tokens in {} documents, {} of them tokens to predict: 1 rank against ring {} x ulysses {}, {}, {}",
        args.sequence_length,
        batch.documents.len(),
        batch.valid,
        mesh.ring,
        mesh.ulysses,
        args.strategy,
        args.layout
    ))?;
    // First the mesh: where ranks are processes, only one of them has anything to do afterwards.
    let Some(actual) = pass(&model, &mesh, &batch, args.layout, args.strategy)? else { return Ok(()) };
    let one = Mesh { ring: 1, ulysses: 1, ranks: Ranks::threads(), ..mesh };
    let expected = pass(&model, &one, &batch, args.layout, args.strategy)?.context("a rank of its own")?;

    let mut lines = vec![("loss".to_owned(), (expected.loss - actual.loss).abs() / expected.loss.abs())];
    lines.push(("logits".to_owned(), difference(&expected.logits, &actual.logits)));
    for (name, gradient) in &expected.gradients {
        let other = actual.gradients.get(name).with_context(|| format!("the mesh gave no gradient of {name}"))?;
        lines.push((format!("d {name}"), difference(gradient, other)));
    }
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut failed = 0;
    for (name, difference) in &lines {
        // Written this way, NaN fails.
        let good = *difference <= TOLERANCE;
        failed += usize::from(!good);
        say::line(format_args!("{name:width$}  {difference:9.2e}{}", if good { "" } else { "  FAIL" }))?;
    }
    let worst = lines.iter().map(|(_, difference)| *difference).fold(0.0, f64::max);
    if failed > 0 {
        say::line("FAIL")?;
        bail!("{failed} of {} differ by more than {TOLERANCE:.0e} (relative L2), at worst by {worst:.2e}", lines.len());
    }
    say::line(format_args!(
        "PASS: {} quantities, at worst {worst:.2e} apart (relative L2; {TOLERANCE:.0e} passes)",
        lines.len()
    ))?;
    Ok(())
}

/// A Qwen3 of two layers: query and key norms, grouped heads, untied head.
fn tiny(mesh: &Mesh) -> Result<Model> {
    let (heads, kv_heads) = (8, 2);
    ringspan::schedule::HeadShare::all(heads, kv_heads, (mesh.ring, mesh.ulysses).into())?;
    let config: Config = serde_json::from_value(serde_json::json!({
        "model_type": "qwen3", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 1 << 20, "tie_word_embeddings": false, "hidden_act": "silu"
    }))?;
    let decoder = Decoder::new(config)?;
    let weights = decoder.init(1)?;
    Ok(Model::new(decoder, weights)?)
}

/// Two rows of packed documents, the second shorter.
struct Batch {
    documents: Documents,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    valid: usize,
}

impl Batch {
    fn random(len: usize, vocabulary: usize, seed: u64) -> Result<Self> {
        ensure!(vocabulary > 0, "the model knows no token");
        let half = len / 2 + 1;
        let third = (len - half) / 2;
        let rows = [vec![half, third, len - half - third], vec![len / 3 + 1, (len - len / 3 - 1) * 2 / 3]];
        let documents = Documents::from_rows(&rows, len)?;
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let tokens: Vec<u32> = (0..2 * len).map(|_| (random.next_u64() % vocabulary as u64) as u32).collect();
        let mut targets = vec![IGNORE; 2 * len];
        for document in documents.iter() {
            for position in 1..document.tokens() {
                targets[document.offset + position - 1] = tokens[document.offset + position];
            }
        }
        let valid = targets.iter().filter(|target| **target != IGNORE).count();
        Ok(Self { documents, tokens, targets, valid })
    }
}

/// What is compared.
struct Outcome {
    loss: f64,
    /// `[2 * S, V]`, 0 in padding.
    logits: Vec<f32>,
    gradients: BTreeMap<String, Vec<f32>>,
}

/// One forward and backward pass on a mesh; none in a process without rank 0.
fn pass(model: &Model, mesh: &Mesh, batch: &Batch, layout: LayoutKind, strategy: Strategy) -> Result<Option<Outcome>> {
    let layout = Arc::new(Layout::new(layout, &batch.documents, mesh.ring * mesh.ulysses)?);
    let mut parts = mesh.run(|group| pass_on_rank(&group, model, batch, &layout, strategy))?;
    let own = parts.iter_mut().map(|part| Buffer::F32(std::mem::take(&mut part.logits))).collect();
    let Some(all) = mesh.ranks.gather(own)? else { return Ok(None) };
    let vocabulary = model.vocabulary();
    let mut logits = vec![0.0; batch.tokens.len() * vocabulary];
    for (rank, part) in all.iter().enumerate() {
        layout.unshard(rank, part.f32()?, vocabulary, &mut logits)?;
    }
    let first = parts.into_iter().next().context("a mesh without ranks")?;
    Ok(Some(Outcome { logits, ..first }))
}

/// As [`pass`], but with this rank's logits; loss and gradients are summed over the ranks.
fn pass_on_rank(
    group: &Arc<Group>,
    model: &Model,
    batch: &Batch,
    layout: &Arc<Layout>,
    strategy: Strategy,
) -> ringspan_serve::Result<Outcome> {
    let rank = group.rank();
    let (tokens, targets) = (layout.shard(rank, &batch.tokens, 1)?, layout.shard(rank, &batch.targets, 1)?);
    let attention = Attention::new(group.clone(), layout.clone(), strategy)?;
    let (decoder, weights) = (model.decoder(), model.weights());
    let hidden = decoder.norm(weights, &model.hidden(&tokens, &attention)?)?;
    let logits = loss::logits(&hidden, &decoder.head(weights)?)?.flatten_all()?.to_vec1()?;

    // The valid targets of all ranks, so that the gradients of the ranks simply add up.
    let scale = 1.0 / batch.valid.max(1) as f32;
    let mut summed = BTreeMap::new();
    let nll = gradients::loss_and_gradients(
        decoder,
        weights,
        &tokens,
        &targets,
        scale,
        Recompute::default(),
        &attention,
        &mut |_, gradients| {
            for (name, gradient) in gradients {
                let mut gradient: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
                group.cp().all_reduce(&mut gradient).map_err(candle_core::Error::wrap)?;
                summed.insert(name, gradient);
            }
            Ok(())
        },
    )?;
    let mut sum = 0.0;
    for part in group.cp().all_gather(Buffer::U64(vec![nll.to_bits()]))? {
        match &*part {
            Buffer::U64(bits) => sum += bits.iter().map(|bits| f64::from_bits(*bits)).sum::<f64>(),
            _ => sum = f64::NAN,
        }
    }
    Ok(Outcome { loss: sum / batch.valid.max(1) as f64, logits, gradients: summed })
}

/// ‖a - b‖ / ‖a‖, or ‖b‖ where a is 0.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let size = norm(&mut a.iter().map(|a| f64::from(*a)));
    if size > 0.0 { apart / size } else { apart }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_is_relative_and_nan_never_passes() {
        assert_eq!(difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(difference(&[3.0, 4.0], &[0.0, 0.0]), 1.0);
        assert_eq!(difference(&[0.0], &[2.0]), 2.0);
        let unknown = difference(&[1.0], &[f32::NAN]);
        assert!(unknown.is_nan() || unknown > TOLERANCE, "{unknown}");
        assert_eq!(difference(&[1.0], &[]), f64::INFINITY);
    }

    #[test]
    fn the_batch_is_ragged_and_packed_for_every_length() {
        for len in 2..70 {
            let batch = Batch::random(len, 11, 3).expect("fits");
            assert_eq!(batch.documents.len(), 5);
            assert!(batch.documents.tokens() <= 2 * len && batch.documents.tokens() > len);
            assert!(batch.valid > 0, "length {len}");
        }
    }
}
