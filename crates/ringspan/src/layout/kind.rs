//! The rules that distribute tokens over ranks.

use super::gathered;
use crate::documents::{Documents, Run};
use crate::error::Error;
use std::ops::Range;
use std::str::FromStr;

/// A rule that distributes the tokens of each batch row over P ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayoutKind {
    /// Rank r holds the r-th of P equal parts of the row.
    Contiguous,
    /// Rank r holds parts r and 2P-1-r of 2P equal parts, so causal work is the same on every rank.
    Zigzag,
    /// Token t belongs to rank (t / K) mod P.
    Striped(usize),
    /// Zigzag inside each document, so that packed documents are balanced one by one.
    PerDocumentZigzag,
    /// Each block of this many tokens (`None` chooses a size) goes to the rank with the fewest visible pairs so far.
    Balanced(Option<usize>),
}

const POSSIBLE: &str =
    "contiguous, zigzag, striped:K (K >= 1), per-document-zigzag, balanced, balanced:BLOCK (BLOCK >= 1)";

/// Up to this stripe width, a rank has one run with a step for each column of its stripes; above it, each stripe is a run.
///
/// A stripe width K gives K runs with a step, or S/(K*P) runs without: the former are fewer if stripes are narrow. The
/// choice depends on K alone, so that queries and keys of any length have equal steps.
const STEPPED_STRIPE: usize = 16;

impl LayoutKind {
    /// Checks that stripes and blocks have at least one token.
    pub(super) fn check(self) -> Result<(), Error> {
        match self {
            Self::Striped(0) | Self::Balanced(Some(0)) => {
                Err(Error::Layout(format!("{self} distributes 0 tokens at a time; at least 1 is needed")))
            }
            _ => Ok(()),
        }
    }

    /// Distributes tokens by position; [`Balanced`](Self::Balanced) falls back to contiguous parts, because it needs a
    /// mask.
    pub(super) fn distribute(self, documents: &Documents, ranks: usize) -> Vec<Vec<Run>> {
        let mut out = vec![Vec::new(); ranks];
        let mut units: Vec<Vec<DocumentSpan>> = Vec::new();
        let mut last_row = None;
        for (index, document) in documents.iter().enumerate() {
            if units.is_empty() || self == Self::PerDocumentZigzag || last_row != Some(document.row) {
                units.push(Vec::new());
            }
            last_row = Some(document.row);
            let Some(unit) = units.last_mut() else { continue };
            unit.extend(document.spans.iter().map(|span| DocumentSpan { document: index, span: span.clone() }));
        }
        for unit in &units {
            // Documents with gaps may interleave; the tokens of a row are ordered by their index in the flat batch.
            let mut unit: Vec<&DocumentSpan> = unit.iter().collect();
            unit.sort_by_key(|document_span| documents.get(document_span.document).offset + document_span.span.start);
            let tokens = unit.iter().map(|document_span| document_span.span.len()).sum();
            let before: Vec<usize> = std::iter::once(0)
                .chain(unit.iter().scan(0, |before, document_span| {
                    *before += document_span.span.len();
                    Some(*before)
                }))
                .collect();
            for (rank, runs) in out.iter_mut().enumerate() {
                for progression in self.share(tokens, rank, ranks) {
                    cut(&unit, &before, progression, runs);
                }
            }
        }
        gathered(out, documents)
    }

    /// The indices of `rank`'s tokens among the `n` tokens of a row, in local order.
    fn share(self, n: usize, rank: usize, ranks: usize) -> Vec<Progression> {
        let part = |index: usize, parts: usize| {
            // The product n * parts may overflow 64 bits.
            let at = |i: usize| (n as u128 * i as u128 / parts as u128) as usize;
            Progression { start: at(index), end: at(index + 1), step: 1 }
        };
        match self {
            Self::Contiguous | Self::Balanced(_) => vec![part(rank, ranks)],
            Self::Zigzag | Self::PerDocumentZigzag => {
                vec![part(rank, 2 * ranks), part(2 * ranks - 1 - rank, 2 * ranks)]
            }
            Self::Striped(width) if width <= STEPPED_STRIPE => {
                let residue = |c| Progression { start: rank * width + c, end: n, step: width * ranks };
                (0..width).map(residue).collect()
            }
            Self::Striped(width) => (rank.saturating_mul(width)..n)
                .step_by(width.saturating_mul(ranks))
                .map(|start| Progression { start, end: start.saturating_add(width).min(n), step: 1 })
                .collect(),
        }
    }
}

/// A span of one document in a row.
struct DocumentSpan {
    document: usize,
    span: Range<usize>,
}

/// The token indices `start, start + step, ..` below `end`.
#[derive(Clone, Copy)]
struct Progression {
    start: usize,
    end: usize,
    step: usize,
}

/// Cuts a progression of token indices at the borders of the spans; `before` holds, for each span, the number of tokens in the spans before
/// it.
fn cut(spans: &[&DocumentSpan], before: &[usize], progression: Progression, runs: &mut Vec<Run>) {
    let Progression { start, end, step } = progression;
    let first_span = before.partition_point(|&before| before <= start).saturating_sub(1);
    for (document_span, &from) in spans.iter().zip(before).skip(first_span).take_while(|(_, from)| **from < end) {
        let first = if start >= from { start } else { start + (from - start).div_ceil(step) * step };
        let last = (from + document_span.span.len()).min(end);
        if first >= last {
            continue;
        }
        runs.push(Run {
            document: document_span.document,
            start: document_span.span.start + (first - from),
            len: (last - first).div_ceil(step),
            step,
        });
    }
}

impl std::fmt::Display for LayoutKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Contiguous => f.write_str("contiguous"),
            Self::Zigzag => f.write_str("zigzag"),
            Self::Striped(width) => write!(f, "striped:{width}"),
            Self::PerDocumentZigzag => f.write_str("per-document-zigzag"),
            Self::Balanced(None) => f.write_str("balanced"),
            Self::Balanced(Some(block)) => write!(f, "balanced:{block}"),
        }
    }
}

impl FromStr for LayoutKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || Error::Unknown { what: "layout", given: text.to_owned(), possible: POSSIBLE };
        match text {
            "contiguous" => Ok(Self::Contiguous),
            "zigzag" => Ok(Self::Zigzag),
            "striped" => Ok(Self::Striped(1)),
            "per-document-zigzag" => Ok(Self::PerDocumentZigzag),
            "balanced" => Ok(Self::Balanced(None)),
            _ => match text.split_once(':').map(|(name, size)| (name, size.parse::<usize>())) {
                Some(("striped", Ok(width))) if width > 0 => Ok(Self::Striped(width)),
                Some(("balanced", Ok(block))) if block > 0 => Ok(Self::Balanced(Some(block))),
                _ => Err(unknown()),
            },
        }
    }
}
