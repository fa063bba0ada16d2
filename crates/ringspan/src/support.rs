//! The table of features that work with each strategy.
//!
//! A test computes every cell and compares it with the reference; all combinations work.

use crate::schedule::StrategyKind;

/// A group of rows of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    /// Which rank holds which tokens.
    Layout,
    /// Which keys a query sees.
    Mask,
    /// Scale, bias and other parameters that turn products into softmax weights.
    Score,
    /// Sizes and strides of tensors.
    Shape,
    /// Types in which tensors are stored and sent.
    Type,
}

macro_rules! features {
    ($($feature:ident, $topic:ident, $name:literal;)*) => {
        /// A feature that attention supports.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs)] // The table names each of them.
        pub enum Feature { $($feature),* }

        impl Feature {
            /// All features, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$feature),*];

            /// The name in the table.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$feature => $name),* }
            }

            /// The group of rows it belongs to.
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
    WindowAfterCache, Mask, "window after a cache";
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

/// The table in Markdown, with a row for each feature and a column for each strategy. Each cell covers forward and
/// backward, with the strategy alone and with Ulysses on either axis.
pub fn table() -> String {
    let columns: Vec<&str> = StrategyKind::ALL.iter().map(|strategy| strategy.name()).collect();
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
        table += &format!("| {first} | {} |{}\n", feature.name(), " yes |".repeat(columns.len()));
    }
    table
}
