//! What can go wrong while generating.

/// The result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every way a generation can fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing to go on from.
    #[error("the prompt has no tokens; give at least one")]
    EmptyPrompt,
    /// A token the model has no embedding for.
    #[error("token {token} at position {position} of the prompt: the model knows tokens 0 to {last}", last = .vocabulary.saturating_sub(1))]
    Vocabulary {
        /// The token.
        token: u32,
        /// Where it stands.
        position: usize,
        /// Rows of the embedding.
        vocabulary: usize,
    },
    /// A sampling option outside its range.
    #[error("{option} {given}: possible is {possible}")]
    Sampling {
        /// The option.
        option: &'static str,
        /// What was asked.
        given: String,
        /// What is possible.
        possible: &'static str,
    },
    /// Logits that are no distribution: the model computed NaN or infinity.
    #[error("cannot sample from {vocabulary} logits: {problem}")]
    Logits {
        /// Number of logits.
        vocabulary: usize,
        /// What is wrong, with the first bad place.
        problem: String,
    },
    /// Tokens could not be turned into text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// Attention, layouts or communication.
    #[error(transparent)]
    Ringspan(#[from] ringspan::Error),
    /// Tensor operations.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The model.
    #[error(transparent)]
    Model(#[from] ringspan_models::Error),
}
