//! Errors of generation.

/// The result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every way a generation can fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The prompt is empty.
    #[error("the prompt has no tokens; give at least one")]
    EmptyPrompt,
    /// The prompt has a token that is outside the vocabulary.
    #[error("token {token} at position {position} of the prompt: the model knows tokens 0 to {last}", last = .vocabulary.saturating_sub(1))]
    Vocabulary {
        /// The token.
        token: u32,
        /// Its index in the prompt.
        position: usize,
        /// Number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// A sampling option is outside its range.
    #[error("{option} {given}: possible is {possible}")]
    Sampling {
        /// The option's name.
        option: &'static str,
        /// The value that was given.
        given: String,
        /// The values that are possible.
        possible: &'static str,
    },
    /// Logits are not a distribution: the model computed NaN or infinity.
    #[error("cannot sample from {vocabulary} logits: {problem}")]
    Logits {
        /// Number of logits.
        vocabulary: usize,
        /// A description of what is wrong, with the first bad token.
        problem: String,
    },
    /// A step of the engine, or its cache, does not fit: what was asked, and what is possible.
    #[error("{0}")]
    Step(String),
    /// Tokens could not be decoded to text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// Attention, layout or communication failed.
    #[error(transparent)]
    Ringspan(#[from] ringspan::Error),
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The model could not be read or computed.
    #[error(transparent)]
    Model(#[from] ringspan_models::Error),
}
