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
    /// A sampling option, or one of the engine's, is outside its range.
    #[error("{option} {given}: possible is {possible}")]
    InvalidOption {
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
    /// The cache of an engine cannot hold one sequence of the longest length.
    #[error(
        "a sequence of {asked} tokens needs {needed} pages of {page_size} tokens on each of {ranks} ranks ({} bytes a rank), but the \
         cache has {pages_per_rank} pages a rank ({page_bytes} bytes each), which hold {holds} tokens: the cache needs more memory, \
         or the sequence must be shorter",
        .page_bytes.saturating_mul(*.needed as u64).saturating_add(*.window_bytes)
    )]
    CacheTooSmall {
        /// Tokens of the longest sequence.
        asked: usize,
        /// Tokens of a page.
        page_size: usize,
        /// Number of ranks.
        ranks: usize,
        /// Pages that each rank would need.
        needed: usize,
        /// Pages that each rank has.
        pages_per_rank: usize,
        /// Bytes of a page.
        page_bytes: u64,
        /// Bytes that each rank needs for sliding-window layers.
        window_bytes: u64,
        /// Tokens that the pages of all ranks hold.
        holds: usize,
    },
    /// A cache cannot hold the keys or values of a model in blocks.
    #[error(
        "kv-dtype q8_0: a block has {block} numbers, and the model's heads have a width of {width}, which is no multiple of \
         {block}; possible are f32 and bf16"
    )]
    KvDtype {
        /// Width of a head's keys or values.
        width: usize,
        /// Numbers of a block.
        block: usize,
    },
    /// The system does not say how much memory is free.
    #[error("this system does not say how much memory is free; give the size of the cache in bytes")]
    UnknownMemory,
    /// The ranks of a mesh cannot share the model: what was asked, and what is possible.
    #[error("{0}")]
    Mesh(String),
    /// A rank of an engine failed.
    #[error("rank {rank}: {problem}")]
    Rank {
        /// The rank.
        rank: usize,
        /// The problem.
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
