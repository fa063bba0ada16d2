//! The steps of `attend` from a file's bytes to a plan, without computing.

use clap::Parser;
use ringspan::{Documents, Layout, LayoutKind, Schedule, StrategyKind};
use ringspan_cli::attend::AttendArgs;
use ringspan_cli::attend::input::{self, Input};
use ringspan_cli::attend::parameters;
use ringspan_cli::files::{TensorBytes, Tensors};
use std::path::Path;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: AttendArgs,
}

/// Flags that fit the tensors in the file.
fn flags(tensors: &Tensors<'_>) -> AttendArgs {
    let blocks: &[&str] = if tensors.has("block_pairs") { &["--block-size", "3,2"] } else { &[] };
    let flags = ["attend", "in.safetensors", "--out", "out", "--mask", "causal"].iter().chain(blocks);
    Cli::try_parse_from(flags).expect("flags that exist").args
}

/// Reads a file as `attend` does, and checks the resulting input; errors are returned as text.
pub(crate) fn read(bytes: &[u8], backward: bool) -> Result<(), String> {
    let file = TensorBytes::new(Path::new("in.safetensors"), bytes.to_vec());
    let tensors = file.parse().map_err(|error| format!("{error:#}"))?;
    let input = Input::new(&tensors, backward).map_err(|error| format!("{error:#}"))?;
    input::unknown(&tensors);
    let s = input.sizes;
    assert!(s.heads.is_multiple_of(s.kv_heads), "{s:?}");
    assert_eq!(input.d_out.is_some(), backward);
    for (given, tokens) in [(Some(input.q), s.queries), (Some(input.k), s.keys), (Some(input.v), s.keys)]
        .into_iter()
        .chain([(input.d_out, s.queries)])
    {
        let Some(given) = given else { continue };
        let width = given.shape[2] * given.shape[3];
        let rows: Vec<usize> = (0..s.batch * tokens).collect();
        assert_eq!(given.float_rows(&rows, width).len(), rows.len() * width);
    }
    for (documents, tokens) in [(&input.query_documents, s.queries), (&input.key_documents, s.keys)] {
        check(documents, s.batch * tokens);
    }
    let args = flags(&tensors);
    let text = |error: anyhow::Error| format!("in.safetensors: {error:#}");
    let mask = parameters::mask(&args, &tensors, input.query_documents.len()).map_err(text)?;
    parameters::terms(&args, &tensors, &s).map_err(text)?;
    // Masks made from the file's tensors must not break the plan either.
    if let Ok((query, key)) = Layout::pair(LayoutKind::Zigzag, &input.query_documents, &input.key_documents, &mask, 2) {
        let _ = Schedule::new(StrategyKind::Ring, &query, &key, &mask, (2, 1));
    }
    Ok(())
}

/// Checks that documents lie inside the batch, on which the rest of the program relies.
fn check(documents: &Documents, size: usize) {
    assert!(documents.size() == size && documents.tokens() <= size, "{documents:?}");
    for ranks in 1..4 {
        let Ok(layout) = Layout::new(LayoutKind::Zigzag, documents, ranks) else { continue };
        let rows: Vec<usize> = (0..ranks).flat_map(|rank| layout.rows(rank)).collect();
        assert!(rows.len() == documents.tokens() && rows.iter().all(|row| *row < size), "{documents:?}");
    }
}
