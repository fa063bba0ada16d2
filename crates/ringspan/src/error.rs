//! What can go wrong, with the numbers a person needs to mend the call.

use std::time::Duration;

/// The result of a fallible Ringspan call.
pub type Result<T> = std::result::Result<T, Error>;

/// Every way a call into the library can fail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Axis sizes and the number of ranks do not fit.
    #[error("mesh {mesh} needs {needed} ranks, but there are {ranks}")]
    MeshSize {
        /// The axes and their sizes, as text.
        mesh: String,
        /// Product of the sizes.
        needed: usize,
        /// Ranks at hand.
        ranks: usize,
    },
    /// An axis of a mesh is unknown, repeated or empty.
    #[error("mesh {mesh}: {problem}")]
    MeshAxis {
        /// The axes and their sizes, as text.
        mesh: String,
        /// What is wrong.
        problem: String,
    },
    /// More Ulysses ranks than query heads: some rank would have no head to compute.
    #[error(
        "ulysses {ulysses} needs at least {ulysses} query heads, but there are {heads}: \
         use ulysses <= {heads} and a larger ring (ring x ulysses = {ranks})"
    )]
    UlyssesHeads {
        /// Size of the Ulysses axis.
        ulysses: usize,
        /// Query heads H.
        heads: usize,
        /// Ranks of the context-parallel group.
        ranks: usize,
    },
    /// Query heads are not a multiple of key-value heads.
    #[error("{heads} query heads cannot share {kv_heads} key-value heads: {heads} is not a multiple of {kv_heads}")]
    HeadGroups {
        /// Query heads H.
        heads: usize,
        /// Key-value heads G.
        kv_heads: usize,
    },
    /// A tensor has another size than the call needs.
    #[error("{operation}: {what} has {actual} elements, expected {expected} ({shape})")]
    Shape {
        /// The operation that was asked for.
        operation: &'static str,
        /// Which tensor.
        what: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements given.
        actual: usize,
        /// The expected shape, in words.
        shape: String,
    },
    /// Documents overlap, leave the tensor, or queries and keys do not pair up.
    #[error("documents: {0}")]
    Documents(String),
    /// A layout cannot be made from what was asked.
    #[error("layout: {0}")]
    Layout(String),
    /// A mask cannot be made from what was asked, or does not fit the documents.
    #[error("mask: {0}")]
    Mask(String),
    /// A parameter of the score does not fit the heads, or has no meaning.
    #[error("score: {0}")]
    Score(String),
    /// No kernel is compiled for an instruction set of this name.
    #[error("unknown instruction set {name}; known are portable, avx2 and avx512")]
    UnknownIsa {
        /// The name that was asked for.
        name: String,
    },
    /// A kernel was asked for instructions that this processor lacks.
    #[error("this processor has no {isa}; it has {available}")]
    MissingIsa {
        /// The instruction set that was asked for.
        isa: String,
        /// Those of this processor, the fastest first.
        available: String,
    },
    /// A number is too large for the type in which it would travel between ranks.
    #[error("a tensor holds {value}, which cannot travel as {wire}: that ends at {limit}")]
    WireRange {
        /// The number.
        value: String,
        /// The type.
        wire: &'static str,
        /// Its greatest number.
        limit: String,
    },
    /// A device other than the CPU is not there, or failed.
    #[error("{device}: {operation}: {message}")]
    Device {
        /// Which one.
        device: String,
        /// What it was asked for.
        operation: &'static str,
        /// What it or its driver said.
        message: String,
    },
    /// A picture would not be readable.
    #[error("drawing: {0}")]
    Drawing(String),
    /// Two things that do not go together.
    #[error("{what} does not work with {with}: {why}")]
    Unsupported {
        /// What was asked.
        what: &'static str,
        /// With what.
        with: &'static str,
        /// Why not, and what to do instead.
        why: &'static str,
    },
    /// A word is not in the vocabulary of an option.
    #[error("unknown {what} '{given}': possible are {possible}")]
    Unknown {
        /// The option.
        what: &'static str,
        /// What was asked.
        given: String,
        /// What is possible.
        possible: &'static str,
    },
    /// Another rank failed; this one stopped because of it.
    #[error("rank {rank} stopped in {operation}: rank {peer} failed: {message}")]
    PeerFailed {
        /// The rank that reports.
        rank: usize,
        /// What it was doing.
        operation: String,
        /// The rank that failed first.
        peer: usize,
        /// Why that one failed.
        message: String,
    },
    /// Two ranks disagree about what they do together.
    #[error("rank {rank} is in {operation}, but rank {peer} is in {peer_operation}")]
    Mismatch {
        /// The rank that reports.
        rank: usize,
        /// What it was doing.
        operation: String,
        /// The other rank.
        peer: usize,
        /// What the other one was doing.
        peer_operation: String,
    },
    /// A wait went past its deadline.
    #[error("rank {rank} waited {waited:?} in {operation} for rank {peer}, which {peer_state}")]
    Deadline {
        /// The rank that reports.
        rank: usize,
        /// What it was doing.
        operation: String,
        /// The rank waited for.
        peer: usize,
        /// What is known of the other rank.
        peer_state: String,
        /// How long it waited.
        waited: Duration,
    },
    /// Ranks were started with different settings.
    #[error("rank {rank} has {what}: {value}, but rank 0 has {first}; all ranks need the same")]
    Disagreement {
        /// The first rank that differs.
        rank: usize,
        /// The setting.
        what: String,
        /// Its value there.
        value: String,
        /// Its value on rank 0.
        first: String,
    },
    /// A process cannot tell which rank it is.
    #[error("launch: {problem}")]
    Launch {
        /// What is wrong, with names and values.
        problem: String,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A call to a communicator makes no sense.
    #[error("rank {rank}, {operation}: {problem}")]
    Communicator {
        /// The rank that reports.
        rank: usize,
        /// What it was doing.
        operation: String,
        /// What is wrong, with numbers.
        problem: String,
    },
}
