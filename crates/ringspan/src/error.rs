//! The errors of the library, with the numbers that are needed to fix the call.

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
        /// Number of ranks available.
        ranks: usize,
    },
    /// An axis of a mesh is unknown, repeated or empty.
    #[error("mesh {mesh}: {problem}")]
    MeshAxis {
        /// The axes and their sizes, as text.
        mesh: String,
        /// The problem in words.
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
        /// The name of the tensor.
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
    /// A layout cannot be made from the given arguments.
    #[error("layout: {0}")]
    Layout(String),
    /// The plans of a strategy do not fit each other, or leave something out.
    #[error("strategy {strategy}: ring rank {ring_rank} {problem}")]
    Plan {
        /// The strategy's name.
        strategy: String,
        /// The ring rank whose plan is wrong.
        ring_rank: usize,
        /// The problem, as what the rank does.
        problem: String,
    },
    /// A mask cannot be made from the given arguments, or does not fit the documents.
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
        /// The instruction sets of this processor, fastest first.
        available: String,
    },
    /// An element is too large for the type in which its tensor would travel between ranks.
    #[error("a tensor holds {value}, which cannot travel as {wire}: that ends at {limit}")]
    WireRange {
        /// The element.
        value: String,
        /// The wire type.
        wire: &'static str,
        /// The largest number of that type.
        limit: String,
    },
    /// A device other than the CPU is missing, or failed.
    #[error("{device}: {operation}: {message}")]
    Device {
        /// The device.
        device: String,
        /// The operation it was asked for.
        operation: &'static str,
        /// The message of the device or its driver.
        message: String,
    },
    /// A drawing would not be readable.
    #[error("drawing: {0}")]
    Drawing(String),
    /// Two options that do not work together.
    #[error("{what} does not work with {with}: {why}")]
    Unsupported {
        /// The option that was asked for.
        what: &'static str,
        /// The option that it does not work with.
        with: &'static str,
        /// The reason, and what to do instead.
        why: &'static str,
    },
    /// The value of an option is not one of its possible values.
    #[error("unknown {what} '{given}': possible are {possible}")]
    Unknown {
        /// The option.
        what: &'static str,
        /// The value that was given.
        given: String,
        /// The possible values.
        possible: &'static str,
    },
    /// Another rank failed, so this rank stopped.
    #[error("rank {rank} stopped in {operation}: rank {peer} failed: {message}")]
    PeerFailed {
        /// The rank that reports.
        rank: usize,
        /// The operation it was in.
        operation: String,
        /// The rank that failed first.
        peer: usize,
        /// The error of the rank that failed.
        message: String,
    },
    /// Two ranks are in different operations that should be the same.
    #[error("rank {rank} is in {operation}, but rank {peer} is in {peer_operation}")]
    Mismatch {
        /// The rank that reports.
        rank: usize,
        /// The operation it was in.
        operation: String,
        /// The other rank.
        peer: usize,
        /// The operation of the other rank.
        peer_operation: String,
    },
    /// A wait went past its deadline.
    #[error("rank {rank} waited {waited:?} in {operation} for rank {peer}, which {peer_state}")]
    Deadline {
        /// The rank that reports.
        rank: usize,
        /// The operation it was in.
        operation: String,
        /// The rank waited for.
        peer: usize,
        /// The known state of the other rank, in words.
        peer_state: String,
        /// How long the rank waited.
        waited: Duration,
    },
    /// Ranks were started with different settings.
    #[error("rank {rank} has {what}: {value}, but rank 0 has {first}; all ranks need the same")]
    Disagreement {
        /// The first rank that differs.
        rank: usize,
        /// The setting.
        what: String,
        /// Its value on that rank.
        value: String,
        /// Its value on rank 0.
        first: String,
    },
    /// A process cannot tell which rank it is.
    #[error("launch: {problem}")]
    Launch {
        /// The problem, with names and values.
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
        /// The operation it was in.
        operation: String,
        /// The problem, with numbers.
        problem: String,
    },
}
