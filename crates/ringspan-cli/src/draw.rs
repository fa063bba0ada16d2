//! `ringspan draw`: a schedule as a picture or a table.

use crate::attend::args::{MaskName, Window, WireName, window};
use crate::{files, mesh, output};
use anyhow::{Context, Result, ensure};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::mesh::Grid;
use ringspan::schedule::{HeadShare, Pass, TensorSizes};
use ringspan::{Documents, Layout, LayoutKind, Mask, Schedule, StrategyKind};
use std::path::PathBuf;

/// Default number of tokens for each rank: enough to see every border.
const TOKENS: usize = 64;

/// Upper limit on a mask's chunks: more make no readable picture, and take long.
const MOST_CHUNKS: usize = 20_000;

/// Upper limit on ranks: the bytes of each are counted from its plan, which has more steps the more ranks there are.
const MOST_RANKS: usize = 1024;

/// Upper limit on a layout's blocks, since each pair of blocks is examined.
const MOST_BLOCKS: usize = 4096;

/// Draw which rank computes which visible pairs of query and key, in which step, and what it sends.
///
/// With --svg, a picture: the square of queries and keys, and next to it every rank's steps with the bytes sent in them.
/// Without --svg, a table of the same.
#[derive(Debug, clap::Args)]
pub(crate) struct DrawArgs {
    /// Ring size R: ranks between which keys and values move
    #[arg(long, default_value_t = 4, value_name = "R")]
    ring: usize,
    /// Ulysses size U: neighbouring ranks that exchange tokens for heads
    #[arg(long, default_value_t = 1, value_name = "U")]
    ulysses: usize,
    /// Let Ulysses be the outer axis, so that neighbours are next to each other in the ring
    #[arg(long)]
    ulysses_outer: bool,
    /// Strategy of attention: ring, bidirectional-ring, all-gather, halo or pass-q
    #[arg(long, default_value = "ring", value_name = "NAME")]
    strategy: StrategyKind,
    /// Layout of the tokens over the ranks: contiguous, zigzag, striped:K, per-document-zigzag, balanced, balanced:BLOCK
    /// [default: zigzag for causal masks, contiguous otherwise]
    #[arg(long, value_name = "NAME")]
    layout: Option<LayoutKind>,
    /// Mask: full or causal; full-bottom-right and causal-bottom-right are the same here, where there are as many keys as
    /// queries
    #[arg(long, default_value = "causal", value_name = "NAME")]
    mask: MaskName,
    /// Key j is visible from query i only if i - LEFT <= j <= i + RIGHT; -1 is no limit. A RIGHT above 0 needs a full
    /// mask
    #[arg(long, value_name = "LEFT,RIGHT", allow_hyphen_values = true, value_parser = window)]
    window: Option<Window>,
    /// Cut the tokens of each document into chunks of N; a query sees keys of its own chunk
    #[arg(long, value_name = "N")]
    chunk: Option<usize>,
    /// Let every query see the first N tokens of its document, also those ahead of it (prefix-LM)
    #[arg(long, value_name = "N")]
    prefix: Option<usize>,
    /// Tokens of the sequence [default: 64 for each rank]
    #[arg(long, value_name = "S", conflicts_with = "documents")]
    tokens: Option<usize>,
    /// Lengths of packed documents that do not see each other, such as 30,20,14
    #[arg(long, value_name = "N,N,..", value_delimiter = ',')]
    documents: Vec<usize>,
    /// Query heads H, for the bytes
    #[arg(long, default_value_t = 32, value_name = "H")]
    heads: usize,
    /// Key-value heads G, for the bytes
    #[arg(long, default_value_t = 8, value_name = "G")]
    kv_heads: usize,
    /// Width of a head D, for the bytes
    #[arg(long, default_value_t = 128, value_name = "D")]
    dim: usize,
    /// Type in which q, k and v travel, for the bytes: f32, bf16 or f16
    #[arg(long, default_value = "bf16", value_name = "TYPE")]
    dtype: WireName,
    /// Write the picture to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(crate) fn run(args: &DrawArgs, processes: &ProcessGroup) -> Result<()> {
    ensure!(processes.local().is_none(), "draw computes nothing on ranks: start it as one process, without a launcher");
    if let Some(path) = &args.svg {
        files::check_output("--svg", path)?;
    }
    let sizes = args.sizes();
    let schedule = args.schedule()?;
    match &args.svg {
        Some(path) => {
            files::write(path, schedule.draw(&sizes)?.as_bytes())?;
            output::line(format!("{}: {}", path.display(), sent(&schedule, &sizes)?))?;
        }
        None => output::line(format!("{schedule}\n{}", sent(&schedule, &sizes)?))?,
    }
    Ok(())
}

impl DrawArgs {
    fn sizes(&self) -> TensorSizes {
        let wire = if self.dtype == WireName::F32 { 4 } else { 2 };
        TensorSizes { heads: self.heads, kv_heads: self.kv_heads, dim: self.dim, v_dim: self.dim, wire, bias_heads: 0 }
    }

    fn mask(&self, longest: usize) -> Result<Mask> {
        let mut mask = self.mask.within(self.window)?;
        if let Some(size) = self.chunk {
            mask = mask.chunked(size).context("--chunk")?;
            let chunks = longest.div_ceil(size);
            ensure!(
                chunks <= MOST_CHUNKS,
                "--chunk {size} cuts {longest} tokens into {chunks} chunks, and at most {MOST_CHUNKS} can be drawn"
            );
        }
        ensure!(
            mask.limits_ahead() || self.prefix.is_none(),
            "--prefix opens keys ahead of a query, and this mask ({mask}) hides none of them; give --mask causal, or a \
             --window with a limit ahead"
        );
        Ok(match self.prefix {
            Some(length) => mask.prefix_lm([length]),
            None => mask,
        })
    }

    fn schedule(&self) -> Result<Schedule> {
        let Self { ring, ulysses, .. } = *self;
        let ranks = mesh::ranks(ring, ulysses, &[])?;
        ensure!(
            ranks <= MOST_RANKS,
            "--ring {ring} x --ulysses {ulysses} is {ranks} ranks, and at most {MOST_RANKS} can be drawn"
        );
        let mut grid = Grid::new(ring, ulysses);
        if self.ulysses_outer {
            ensure!(
                ring > 1 && ulysses > 1,
                "--ulysses-outer orders two axes, but this is --ring {ring} --ulysses {ulysses}"
            );
            grid = grid.with_ulysses_outer();
        }
        HeadShare::all(self.heads, self.kv_heads, grid)?;
        let documents = match &self.documents[..] {
            [] => Documents::batch(1, self.tokens.unwrap_or(TOKENS * ranks)),
            lengths => {
                let total = lengths.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
                total.context("--documents hold more tokens than can be counted")?;
                Documents::packed(lengths)
            }
        };
        ensure!(documents.size() < 1 << 40, "{} tokens are more than can be drawn", documents.size());
        let longest = documents.iter().map(|document| document.seq_len).max().unwrap_or(0);
        let mask = self.mask(longest)?;
        let layout = self.layout.unwrap_or(self.mask.layout());
        // These layouts have a run for each block, so their runs grow with the tokens; narrower stripes are runs with a step.
        if let LayoutKind::Striped(width @ 17..) | LayoutKind::Balanced(Some(width)) = layout {
            let blocks = documents.size() / width;
            ensure!(
                blocks <= MOST_BLOCKS,
                "--layout {layout} deals {blocks} blocks, and at most {MOST_BLOCKS} can be drawn"
            );
        }
        let (query, key) = Layout::pair(layout, &documents, &documents, &mask, ranks)?;
        Ok(Schedule::new(self.strategy, &query, &key, &mask, grid)?)
    }
}

/// A sentence on the bytes of the rank that sends most.
fn sent(schedule: &Schedule, sizes: &TensorSizes) -> Result<String> {
    let most = |pass| -> Result<u64> {
        let bytes = (0..schedule.query().ranks()).map(|rank| schedule.bytes_sent(pass, rank, sizes));
        Ok(bytes.collect::<ringspan::Result<Vec<_>>>()?.into_iter().max().unwrap_or(0))
    };
    let (forward, backward) = (most(Pass::Forward)?, most(Pass::Backward)?);
    Ok(format!("a rank sends up to {forward} bytes forward and {backward} backward"))
}
