//! The reach of attention: the whole text, or only up to the border between the ranks.

use anyhow::Result;
use ringspan::{Documents, Layout, LayoutKind};

/// Number of ranks that share a text.
pub(crate) const RANKS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionReach {
    /// Keys and values go around the ring: every token sees all tokens before it.
    Ring,
    /// The control. Each rank's half of a text is a document of its own, so no token sees across the border.
    Cut,
}

impl AttentionReach {
    pub(crate) const BOTH: [Self; 2] = [Self::Ring, Self::Cut];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Cut => "cut",
        }
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Ring => "ring over 2 ranks",
            Self::Cut => "control: attention cut at the border of the ranks",
        }
    }

    /// Number of documents into which a text of `length` tokens is split for attention.
    pub(crate) fn documents(self, length: usize) -> usize {
        match self {
            Self::Ring => 1,
            Self::Cut => RANKS.min(length),
        }
    }

    /// The layout of a text; in both cases rank 0 has the first half of its tokens and rank 1 the second.
    pub(crate) fn layout(self, length: usize) -> Result<Layout> {
        let parts = self.documents(length);
        let cut = |part: usize| length * part / parts;
        let lengths = (0..parts).map(|part| cut(part + 1) - cut(part)).collect();
        let documents = Documents::from_rows(&[lengths], length)?;
        Ok(Layout::new(LayoutKind::Contiguous, &documents, RANKS)?)
    }
}

/// The rank that holds a token.
pub(crate) fn owner(layout: &Layout, token: usize) -> Option<usize> {
    (0..layout.ranks()).find(|&rank| layout.rows(rank).contains(&token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_deal_halves_and_only_the_ring_leaves_them_one_document() {
        for (reach, documents) in [(AttentionReach::Ring, 1), (AttentionReach::Cut, 2)] {
            let layout = reach.layout(4096).expect("a layout");
            assert_eq!(layout.documents().len(), documents);
            assert_eq!(layout.rows(0), (0..2048).collect::<Vec<_>>());
            assert_eq!(layout.rows(1), (2048..4096).collect::<Vec<_>>());
            assert_eq!((owner(&layout, 2047), owner(&layout, 2048), owner(&layout, 4096)), (Some(0), Some(1), None));
        }
    }
}
