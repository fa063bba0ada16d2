//! The flags of `ringspan attend`.

use crate::mesh::MeshArgs;
use ringspan::schedule::Strategy;
use ringspan::{LayoutKind, Mask};
use std::path::PathBuf;

/// Attention on given tensors, over a mesh of ranks.
///
/// IN holds q [B,Sq,H,D], k [B,Sk,G,D], v [B,Sk,G,Dv] (f32, bf16 or f16), optionally cu_seqlens i32 [n+1] (packed
/// documents, B = 1; tokens after the last entry are padding), document_ids i32 [B,S] (0 is padding), kv_lengths i32 [B]
/// (hides keys behind it), and d_out [B,Sq,H,Dv] for --backward. OUT gets out (q's type), lse f32 [B,H,Sq] (natural
/// log) and, with --backward, dq, dk, dv in the types of q, k, v.
#[derive(Debug, clap::Args)]
pub(crate) struct AttendArgs {
    /// The safetensors file with the inputs
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// The safetensors file for the results
    #[arg(long, value_name = "OUT")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) mesh: MeshArgs,
    /// How keys and values reach the queries: ring or all-gather
    #[arg(long, default_value = "ring", value_name = "NAME")]
    pub(crate) strategy: Strategy,
    /// Who holds which tokens: contiguous, zigzag, striped:K, per-document-zigzag [default: zigzag for causal masks,
    /// contiguous otherwise]
    #[arg(long, value_name = "NAME")]
    pub(crate) layout: Option<LayoutKind>,
    /// full, causal (aligned to the first key) or causal-bottom-right (aligned to the last: i counts from Sk - Sq)
    #[arg(long, default_value = "full", value_name = "NAME")]
    pub(crate) mask: MaskName,
    /// Key j is visible from query i only if i - LEFT <= j <= i + RIGHT; -1 is no limit
    #[arg(long, value_name = "LEFT,RIGHT", allow_hyphen_values = true, value_parser = window)]
    pub(crate) window: Option<Window>,
    /// Factor on q.k [default: 1/sqrt(D)]
    #[arg(long, value_name = "F", allow_hyphen_values = true)]
    pub(crate) scale: Option<f32>,
    /// Compute dq, dk and dv from d_out as well
    #[arg(long)]
    pub(crate) backward: bool,
    /// Compute N times and report the median of the times
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Write what was run, times, and tokens, FLOPs, bytes sent and peak memory of each rank as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
}

impl AttendArgs {
    /// The mask that --mask and --window ask for together.
    pub(crate) fn visibility(&self) -> Mask {
        let Window { left, right } = self.window.unwrap_or_default();
        self.mask.mask().window(left, right)
    }

    /// The layout asked for, or the one that suits the mask.
    pub(crate) fn layout(&self) -> LayoutKind {
        self.layout.unwrap_or(match self.mask {
            MaskName::Full => LayoutKind::Contiguous,
            MaskName::Causal | MaskName::CausalBottomRight => LayoutKind::Zigzag,
        })
    }
}

/// The masks that have a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum MaskName {
    /// Every query sees every key
    Full,
    /// Query i sees keys up to i
    Causal,
    /// Query i sees keys up to i + Sk - Sq
    CausalBottomRight,
}

impl MaskName {
    fn mask(self) -> Mask {
        match self {
            Self::Full => Mask::full(),
            Self::Causal => Mask::causal(),
            Self::CausalBottomRight => Mask::causal_bottom_right(),
        }
    }
}

/// How far a query sees; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Window {
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
}

fn window(text: &str) -> Result<Window, String> {
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
    fn windows_are_two_numbers_and_minus_one_is_no_limit() {
        assert_eq!(window("3,0"), Ok(Window { left: Some(3), right: Some(0) }));
        assert_eq!(window("-1,-1"), Ok(Window::default()));
        for text in ["3", "", "3,", "-2,0", "a,b", "1,2,3", "99999999999999999999,0"] {
            assert!(window(text).is_err(), "{text}");
        }
    }
}
