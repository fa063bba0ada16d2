//! The flags of `ringspan attend`.

use crate::mesh::MeshArgs;
use anyhow::{Result, bail};
use ringspan::kernel::Isa;
use ringspan::schedule::StrategyChoice;
use ringspan::{LayoutKind, Mask};
use ringspan_candle::DeviceName;
use std::path::PathBuf;
use std::str::FromStr;

/// Attention on given tensors, over a mesh of ranks.
///
/// IN holds q [B,Sq,H,D], k [B,Sk,G,D], v [B,Sk,G,Dv] (f32, bf16 or f16) and d_out [B,Sq,H,Dv] for --backward.
///
/// Optional, the documents: cu_seqlens i32 [n+1] (packed documents, B = 1; tokens after the last entry are padding),
/// document_ids i32 [B,S] (0 is padding), or kv_lengths i32 [B] (hides the keys after that length).
///
/// Optional, the mask: prefix_lengths i32 (one, or one a document; for --mask causal), block_pairs i32 [n,2] (visible
/// pairs of blocks, with --block-size).
///
/// Optional, the score: sinks [H], alibi_slopes [H], relative_bias [buckets,H] (T5), bias [B or 1,H or 1,Sq,Sk]. A score
/// is scale * q.k, then softcap, then ALiBi or T5 and bias, then the mask.
///
/// OUT receives out (q's type), lse f32 [B,H,Sq] (natural log, sinks included) and, with --backward, dq, dk, dv in the types of
/// q, k, v, and f32 d_sinks, d_relative_bias, d_bias in the shapes of their tensors.
#[derive(Debug, clap::Args)]
pub struct AttendArgs {
    /// The safetensors file with the inputs
    #[arg(value_name = "IN", required_unless_present = "support")]
    pub input: Option<PathBuf>,
    /// The safetensors file for the results
    #[arg(long, value_name = "OUT", required_unless_present = "support")]
    pub out: Option<PathBuf>,
    /// Print a table of what can be combined with what, and stop
    #[arg(long, exclusive = true)]
    pub support: bool,
    #[command(flatten)]
    pub mesh: MeshArgs,
    /// Device of the ranks: cpu; cuda: the GPUs of this machine, in turn; cuda:N: one of them
    #[arg(long, default_value = "cpu", value_name = "NAME")]
    pub device: DeviceName,
    /// Instructions that the kernels use: auto (the best this processor has), avx512, avx2 or portable
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub isa: IsaChoice,
    /// Let Ulysses be the outer axis, so that neighbours are next to each other in the ring
    #[arg(long)]
    pub ulysses_outer: bool,
    /// Compute the heads of a Ulysses rank in N parts: one travels while another is computed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub head_chunks: Option<u32>,
    /// Strategy of attention: ring, bidirectional-ring, all-gather, halo, pass-q, or auto: the cheapest by counted bytes and
    /// operations, for the speeds given by --link-bandwidth, --link-latency and --rank-speed
    #[arg(long, default_value = "ring", value_name = "NAME")]
    pub strategy: StrategyChoice,
    /// Bandwidth of a link between ranks, for --strategy auto [default: 10]
    #[arg(long, value_name = "GB/s", value_parser = positive)]
    pub link_bandwidth: Option<f64>,
    /// Latency of a link between ranks, for --strategy auto [default: 5]
    #[arg(long, value_name = "MICROSECONDS", value_parser = positive)]
    pub link_latency: Option<f64>,
    /// Speed of a rank in attention, for --strategy auto [default: 100 for each thread]
    #[arg(long, value_name = "GFLOP/s", value_parser = positive)]
    pub rank_speed: Option<f64>,
    /// Type in which q, k and v travel: f32, bf16 or f16 [default: that of the tensors]; tensors with a larger number than
    /// it has (65504 in f16) are refused, on any mesh. Results and gradients always travel in f32
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<WireName>,
    /// Layout of the tokens over the ranks: contiguous, zigzag, striped:K, per-document-zigzag, balanced, balanced:BLOCK
    /// [default: zigzag for causal masks, contiguous otherwise]
    #[arg(long, value_name = "NAME")]
    pub layout: Option<LayoutKind>,
    /// Mask: full or causal (aligned to the first key), full-bottom-right or causal-bottom-right (aligned to the last: i counts
    /// from Sk - Sq)
    #[arg(long, default_value = "full", value_name = "NAME")]
    pub mask: MaskName,
    /// Key j is visible from query i only if i - LEFT <= j <= i + RIGHT; -1 is no limit. A RIGHT above 0 needs a full
    /// mask
    #[arg(long, value_name = "LEFT,RIGHT", allow_hyphen_values = true, value_parser = window)]
    pub window: Option<Window>,
    /// Cut the tokens of each document into chunks of N; a query sees keys of its own chunk
    #[arg(long, value_name = "N")]
    pub chunk: Option<usize>,
    /// Let every query see the first N tokens of its document, also those ahead of it (prefix-LM)
    #[arg(long, value_name = "N")]
    pub prefix: Option<usize>,
    /// Positions in a block of queries and in a block of keys, for the tensor block_pairs
    #[arg(long, value_name = "QUERIES,KEYS", value_parser = block_size)]
    pub block_size: Option<BlockSize>,
    /// Bound scores: F * tanh(score / F)
    #[arg(long, value_name = "F")]
    pub softcap: Option<f32>,
    /// Add a score of 0 without a value to each softmax, so that a query may attend to nothing
    #[arg(long)]
    pub off_by_one: bool,
    /// Distance from which all keys are in T5's last relative bucket [default: 128]
    #[arg(long, value_name = "N")]
    pub relative_max_distance: Option<usize>,
    /// Give keys ahead of the query relative buckets of their own
    #[arg(long)]
    pub relative_bidirectional: bool,
    /// Drop weights with this probability; the same ones on any mesh
    #[arg(long, value_name = "RATE")]
    pub dropout: Option<f32>,
    /// Seed that determines which weights are dropped [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Factor on q.k [default: 1/sqrt(D)]
    #[arg(long, value_name = "F", allow_hyphen_values = true)]
    pub scale: Option<f32>,
    /// Compute dq, dk and dv from d_out as well
    #[arg(long)]
    pub backward: bool,
    /// Compute N times and report the median of the times
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Write the settings, times, and tokens, FLOPs, bytes sent and peak memory of each rank as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

impl AttendArgs {
    /// The mask given by --mask and --window together.
    ///
    /// # Errors
    /// A causal mask with a window that has keys after the query.
    pub fn visibility(&self) -> Result<Mask> {
        self.mask.within(self.window)
    }

    /// The requested layout, or else the one that suits the mask.
    pub fn layout(&self) -> LayoutKind {
        self.layout.unwrap_or(self.mask.layout())
    }
}

/// A given instruction set, or the request to choose the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IsaChoice {
    Auto,
    Fixed(Isa),
}

impl IsaChoice {
    /// The requested instruction set, if there is one.
    pub fn fixed(self) -> Option<Isa> {
        match self {
            Self::Auto => None,
            Self::Fixed(isa) => Some(isa),
        }
    }
}

impl FromStr for IsaChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Fixed).map_err(|error: ringspan::Error| format!("{error}, and auto")),
        }
    }
}

/// The type in which q, k and v travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum WireName {
    F32,
    Bf16,
    F16,
}

/// Numbers of positions in a block of queries and in a block of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSize {
    pub queries: usize,
    pub keys: usize,
}

fn block_size(text: &str) -> Result<BlockSize, String> {
    let sizes = text.split_once(',').map(|(q, k)| (q.trim().parse(), k.trim().parse()));
    match sizes {
        Some((Ok(queries), Ok(keys))) if queries > 0 && keys > 0 => Ok(BlockSize { queries, keys }),
        _ => Err("expected two numbers of at least 1, QUERIES,KEYS, such as 128,128".into()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a number above 0".into()),
    }
}

/// The masks that can be chosen by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MaskName {
    /// Every query sees every key
    Full,
    /// Query i sees keys up to i
    Causal,
    /// Query i sees keys up to i + Sk - Sq
    CausalBottomRight,
    /// Every query sees every key; windows and chunks count from i + Sk - Sq
    FullBottomRight,
}

impl MaskName {
    /// This mask, limited to a window.
    ///
    /// # Errors
    /// A causal mask with a window that has keys after the query.
    pub fn within(self, window: Option<Window>) -> Result<Mask> {
        let Window { left, right } = window.unwrap_or_default();
        let ahead = right.unwrap_or(0);
        let (mask, causal) = match self {
            Self::Full => (Mask::full(), None),
            Self::FullBottomRight => (Mask::full_bottom_right(), None),
            Self::Causal => (Mask::causal(), Some(("causal", "full"))),
            Self::CausalBottomRight => {
                (Mask::causal_bottom_right(), Some(("causal-bottom-right", "full-bottom-right")))
            }
        };
        if let Some((name, other)) = causal.filter(|_| ahead > 0) {
            bail!(
                "--window sees {ahead} keys ahead, which --mask {name} hides: give --mask {other}, or a RIGHT of 0 or -1"
            );
        }
        Ok(mask.window(left, right))
    }

    /// The layout that balances the work under this mask.
    pub fn layout(self) -> LayoutKind {
        match self {
            Self::Full | Self::FullBottomRight => LayoutKind::Contiguous,
            Self::Causal | Self::CausalBottomRight => LayoutKind::Zigzag,
        }
    }
}

/// Numbers of keys before and after a query that it sees; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Window {
    pub left: Option<usize>,
    pub right: Option<usize>,
}

pub fn window(text: &str) -> Result<Window, String> {
    let side = |side: &str| match side.trim().parse::<i64>() {
        Ok(-1) => Ok(None),
        Ok(n) if (0..=i64::MAX / 8).contains(&n) => Ok(Some(n as usize)),
        _ => Err(format!("'{side}' is neither a number of tokens nor -1 (no limit)")),
    };
    match text.split_once(',') {
        Some((left, right)) => Ok(Window { left: side(left)?, right: side(right)? }),
        None => Err("expected two numbers, LEFT,RIGHT, such as 128,0 or -1,5".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_sees_ahead_needs_a_full_mask() {
        let ahead = Some(Window { left: None, right: Some(9) });
        for (name, other) in [(MaskName::Causal, "--mask full,"), (MaskName::CausalBottomRight, "full-bottom-right")] {
            let message = name.within(ahead).expect_err("keys ahead").to_string();
            assert!(message.contains("9 keys ahead") && message.contains(other), "{message}");
            assert!(name.within(Some(Window { left: Some(3), right: Some(0) })).is_ok());
        }
        assert!(MaskName::Full.within(ahead).is_ok() && MaskName::FullBottomRight.within(ahead).is_ok());
    }

    #[test]
    fn windows_are_two_numbers_and_minus_one_is_no_limit() {
        assert_eq!(window("3,0"), Ok(Window { left: Some(3), right: Some(0) }));
        assert_eq!(window("-1,-1"), Ok(Window::default()));
        for text in ["3", "", "3,", "-2,0", "a,b", "1,2,3", "99999999999999999999,0"] {
            assert!(window(text).is_err(), "{text}");
        }
    }
}
