//! The error of a model that cannot be sharded over so many ranks.

/// More ranks than a model can be sharded over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// Heads or a width that cannot be distributed over so many ranks.
    #[error("tensor parallel: {0}")]
    Tensor(String),
    /// Experts or a width of experts that cannot be distributed over so many ranks.
    #[error("expert parallel: {0}")]
    Expert(String),
}
