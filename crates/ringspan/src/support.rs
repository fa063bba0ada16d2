//! What works with what, as a table.
//!
//! Every cell is computed against the reference by a test; a cell that does not work is the error that a call gives.

use crate::attention::supports_bias;
use crate::error::Result;
use crate::schedule::Strategy;

/// A kind of row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    /// Who holds which tokens.
    Layout,
    /// Who sees whom.
    Mask,
    /// From products to weights.
    Score,
    /// Sizes of tensors.
    Shape,
    /// Types that are stored and sent.
    Type,
}

macro_rules! features {
    ($($feature:ident, $topic:ident, $name:literal;)*) => {
        /// Something that attention can be asked for.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs)] // Each is named by the table.
        pub enum Feature { $($feature),* }

        impl Feature {
            /// All of them, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$feature),*];

            /// What it is called in the table.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$feature => $name),* }
            }

            /// What it is a kind of.
            pub const fn topic(self) -> Topic {
                match self { $(Self::$feature => Topic::$topic),* }
            }
        }
    };
}

features! {
    Contiguous, Layout, "contiguous";
    Zigzag, Layout, "zigzag";
    Striped, Layout, "striped:K";
    PerDocumentZigzag, Layout, "per-document-zigzag";
    Balanced, Layout, "balanced";
    Full, Mask, "full";
    Causal, Mask, "causal";
    CausalBottomRight, Mask, "causal-bottom-right";
    Window, Mask, "window, both sides";
    WindowBehindCache, Mask, "window behind a cache";
    Chunked, Mask, "chunked";
    PrefixLm, Mask, "prefix-LM";
    BlockSparse, Mask, "block-sparse";
    Documents, Mask, "packed documents";
    Padding, Mask, "padding right, left, between";
    CrossAttention, Mask, "cross attention";
    Scale, Score, "scale";
    Softcap, Score, "softcap";
    Alibi, Score, "ALiBi slopes";
    RelativeBuckets, Score, "T5 relative buckets";
    Bias, Score, "additive bias";
    Sinks, Score, "sink logits";
    OffByOne, Score, "off-by-one softmax";
    Dropout, Score, "dropout";
    Grouped, Shape, "GQA and MQA";
    UnevenHeads, Shape, "heads that do not divide by U";
    FewTokens, Shape, "more ranks than tokens";
    ValueWidth, Shape, "Dv other than D";
    WideHeads, Shape, "D from 8 to 576";
    Strided, Shape, "strided inputs";
    F32, Type, "f32";
    Bf16, Type, "bf16";
    F16, Type, "f16";
}

impl Feature {
    /// Whether a strategy can do it; all do it forward and backward, alone and with Ulysses on either axis.
    ///
    /// # Errors
    /// The error that attention gives.
    pub fn with(self, strategy: Strategy) -> Result<()> {
        match self {
            Self::Bias => supports_bias(strategy),
            _ => Ok(()),
        }
    }
}

/// The table, in Markdown: a row a feature, a column a strategy, the errors below.
pub fn table() -> String {
    let mut notes: Vec<String> = Vec::new();
    let columns: Vec<&str> = Strategy::ALL.iter().map(|strategy| strategy.name()).collect();
    let mut table = format!(
        "| | |{}|\n|---|---|{}\n",
        columns.iter().map(|c| format!(" {c} ")).collect::<Vec<_>>().join("|"),
        "---|".repeat(columns.len())
    );
    let mut topic = None;
    for feature in Feature::ALL {
        let first = if topic == Some(feature.topic()) {
            String::new()
        } else {
            format!("{:?}", feature.topic()).to_lowercase()
        };
        topic = Some(feature.topic());
        table += &format!("| {first} | {} |", feature.name());
        for strategy in Strategy::ALL {
            let cell = match feature.with(strategy) {
                Ok(()) => "yes".to_owned(),
                Err(error) => {
                    let error = error.to_string();
                    let at = notes.iter().position(|note| *note == error).unwrap_or_else(|| {
                        notes.push(error);
                        notes.len() - 1
                    });
                    format!("no ({})", at + 1)
                }
            };
            table += &format!(" {cell} |");
        }
        table.push('\n');
    }
    for (number, note) in notes.iter().enumerate() {
        table += &format!("\n({}) {note}\n", number + 1);
    }
    table
}
