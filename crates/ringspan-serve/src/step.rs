//! One step of the engine: which tokens of which sequences all ranks compute next, and in which pages of the cache they are.

/// A step, the same on all ranks. Rank 0 makes it, and all execute it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Rows of the cache to copy before anything is computed.
    pub copies: Vec<PageCopy>,
    /// The sequences with new tokens.
    pub sequences: Vec<StepSequence>,
    /// Whether context-parallel ranks, all of which have the rows of sequences that are decoded, may share linear layers: each computes
    /// a part of the outputs. A step with a chunk of a prompt cannot.
    pub shares_layers: bool,
}

impl Step {
    /// What the ranks of an attention replica compute of the step.
    #[must_use]
    pub fn of_replica(&self, replica: usize) -> Self {
        let copies = self.copies.iter().filter(|copy| copy.replica == replica).copied().collect();
        let sequences = self.sequences.iter().filter(|sequence| sequence.replica == replica).cloned().collect();
        Self { copies, sequences, ..*self }
    }
}

/// New tokens of a sequence.
///
/// Page i of a sequence has the positions `i * page` to `(i + 1) * page`, and is on rank `i mod P` of its attention replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSequence {
    /// Position of the first new token: the number of tokens whose keys and values are in the cache.
    pub start: usize,
    /// The new tokens; at least one. Up to [`MAX_REPLICATED_TOKENS`] are computed on all ranks; more are a chunk of a prompt, which ranks
    /// share.
    pub tokens: Vec<u32>,
    /// The pages of the sequence, up to its last new token, in full-attention layers: page i is the page `pages[i]` of
    /// the rank that has it.
    pub pages: Vec<u32>,
    /// The pages of the sequence in sliding-window layers.
    pub window: WindowPages,
    /// The hidden states that rank 0 needs.
    pub outputs: Outputs,
    /// The slot of the adapter with which the tokens are computed; `None` for the base model.
    pub adapter: Option<u64>,
    /// The attention replica that computes the sequence and has its pages.
    pub replica: usize,
}

/// The last pages of a sequence in sliding-window layers, with all keys that its next tokens attend to. They are
/// numbered apart from the pages of full-attention layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WindowPages {
    /// Index of the first of them: earlier pages are not there any more.
    pub first: usize,
    /// Page `first + i` of the sequence is the page `pages[i]` of the rank that has it.
    pub pages: Vec<u32>,
}

impl WindowPages {
    /// Index after the last page.
    pub fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// Page `index` of the sequence, if it is there.
    pub fn get(&self, index: usize) -> Option<u32> {
        self.pages.get(index.checked_sub(self.first)?).copied()
    }
}

/// Largest number of new tokens of a sequence that every rank computes itself, with one small exchange a layer. To distribute so few
/// tokens would save less than exchanging their keys and values costs.
pub const MAX_REPLICATED_TOKENS: usize = 8;

impl StepSequence {
    /// Whether the new tokens are distributed over the ranks, rather than each rank computing all of them.
    pub fn is_distributed(&self) -> bool {
        self.tokens.len() > MAX_REPLICATED_TOKENS
    }

    /// Number of hidden states that rank 0 needs.
    pub(crate) fn output_rows(&self) -> usize {
        match self.outputs {
            Outputs::None => 0,
            Outputs::Last => 1,
            Outputs::All => self.tokens.len(),
        }
    }
}

/// A page of a rank, in full-attention and in sliding-window layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachePage {
    /// The page of full-attention layers.
    pub full: u32,
    /// The page of sliding-window layers; `None` if it has left the window and was freed.
    pub window: Option<u32>,
}

impl From<u32> for CachePage {
    fn from(full: u32) -> Self {
        Self { full, window: None }
    }
}

/// Copies the first rows of a page to another page of the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The attention replica of the rank that has both pages.
    pub replica: usize,
    /// The rank, among the context-parallel ranks of its replica.
    pub rank: usize,
    /// The page that is read.
    pub from: u32,
    /// The page that is written.
    pub to: u32,
    /// The page that is read, and the one that is written, of sliding-window layers; `None` if they need no row of it.
    pub window: Option<[u32; 2]>,
    /// Number of rows.
    pub rows: usize,
}

/// The hidden states of a sequence that are needed after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outputs {
    /// No hidden state is needed: later steps prefill more of the prompt.
    None,
    /// The hidden state of the last new token is needed.
    Last,
    /// The hidden states of all new tokens are needed.
    All,
}
