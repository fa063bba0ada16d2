//! Predicts the memory of a training: what a rank holds at its peak in a step, beside the frozen weights.
//!
//! Shape letters: T tokens of this rank, C width, N embeddings of the prompts. The factors are counts of the tensors that the graph of a
//! block and its gradients hold at once, fitted to the allocator (`tests/training_memory.rs` compares them with it).

use crate::bytes_text::bytes_text;
use crate::error::{Error, Result};
use crate::transformer::WanConfig;
use ringspan::kernel::{Data, HeadMap, Inputs, Kernel, Score, Tile, TilePosition, View};
use ringspan::mask::Band;
use ringspan::mesh::Grid;
use ringspan_candle::Recompute;
use ringspan_candle::stored_activation::Storage;
use std::fmt;

/// Rows that a feed-forward layer computes at a time, unless its products are stored.
const FEED_FORWARD_ROWS: u64 = 1024;

/// The sizes of a rank's step.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepSizes {
    pub(super) grid: Grid,
    pub(super) threads: usize,
    /// Tokens T of the rank that has most.
    pub(super) tokens: u64,
    /// Elements of a sample's latents.
    pub(super) latents: u64,
    /// Embeddings N of all prompts of a sample.
    pub(super) embeds: u64,
    /// Elements of a sample's prompts as they are given.
    pub(super) prompt: u64,
    /// Samples of a step, which are in memory together.
    pub(super) samples: u64,
    pub(super) recompute: Recompute,
    pub(super) storage: Storage,
}

impl StepSizes {
    /// Bytes that all blocks but the one that is differentiated store for their gradients.
    pub(super) fn stored(&self, config: &WanConfig) -> u64 {
        self.stored_of_block(config) * (config.num_layers as u64).saturating_sub(1)
    }

    /// Bytes that a block stores: its input, with its attention's output and two numbers of each head, or with the outputs of all products.
    fn stored_of_block(&self, config: &WanConfig) -> u64 {
        let (rows, ffn) = (self.tokens * config.width() as u64, self.tokens * config.ffn_dim as u64);
        let element = match self.storage {
            Storage::F32 => 4,
            Storage::Bf16 => 2,
        };
        let statistics = 8 * self.tokens * config.num_attention_heads as u64;
        match self.recompute {
            Recompute::Full => element * rows,
            Recompute::KeepAttention => element * 2 * rows + statistics,
            // Queries, keys, values and outputs of attention to the video, and queries and outputs of attention to the prompt.
            Recompute::Nothing => element * (9 * rows + ffn) + statistics,
        }
    }

    /// Bytes of the block that is differentiated, with blocks of other ranks, the kernels' buffers, and the samples of the step.
    ///
    /// # Errors
    /// A transformer without heads.
    pub(super) fn differentiated_block(&self, config: &WanConfig) -> Result<u64> {
        let (width, ffn) = (config.width() as u64, config.ffn_dim as u64);
        let (rows, prompt) = (self.tokens * width, self.embeds * width);
        let inner = match self.recompute {
            Recompute::Nothing => self.tokens * ffn,
            _ => self.tokens.min(FEED_FORWARD_ROWS) * ffn,
        };
        let after_attention = 41 * rows / 2 + 9 * inner / 4 + 10 * prompt;
        let attention = 11 * rows + self.of_other_ranks(rows) + 4 * prompt;
        let before_attention = 41 * rows / 2 + 4 * prompt;
        // What was stored in bf16 is widened tensor by tensor, and freed with most of the block.
        let widened = match (self.recompute, self.storage) {
            (Recompute::Nothing, Storage::Bf16) => 3 * self.stored_of_block(config) / 4,
            _ => 0,
        };
        let samples =
            6 * self.latents + self.prompt + (self.samples.saturating_sub(1)) * (2 * self.latents + self.prompt);
        let block = after_attention.max(attention).max(before_attention);
        Ok(4 * (block + samples) + self.kernels(config)? + widened)
    }

    /// Upper bound on the bytes of the buffers that the kernels of attention to the video and to the prompt keep from call to call.
    fn kernels(&self, config: &WanConfig) -> Result<u64> {
        let (tokens, dim) = ((self.tokens * self.grid.ulysses as u64) as usize, config.attention_head_dim);
        let own = config.num_attention_heads.div_ceil(self.grid.ulysses.max(1));
        let to_video = self.kernel([tokens, tokens], own, dim)?;
        Ok(to_video + self.kernel([self.tokens as usize, self.embeds as usize], config.num_attention_heads, dim)?)
    }

    /// Bytes of a kernel's buffers after a forward and a backward pass.
    fn kernel(&self, [queries, keys]: [usize; 2], heads: usize, dim: usize) -> Result<u64> {
        let view = |tokens| View {
            data: Data::F32(&[]),
            tokens,
            heads,
            dim,
            token_stride: heads * dim,
            head_stride: dim,
            rows: None,
            computes_in_f32: false,
        };
        let map = HeadMap::grouped(heads, heads)?;
        let (score, kernel) = (Score::new(1.0), Kernel::in_current_pool(self.threads));
        let inputs = Inputs { q: view(queries), k: view(keys), v: view(keys), heads: &map, score: &score, bias: None };
        let band = Band { lo: i64::MIN, hi: i64::MAX };
        let tiles = [Tile { q: 0..queries, k: 0..keys, band, position: TilePosition::START }];
        Ok(kernel.forward_workspace(&inputs, &tiles) + kernel.backward_workspace(&inputs, &tiles))
    }

    /// Elements of keys, values and their gradients that are exchanged with other ranks, for queries of `rows` elements.
    fn of_other_ranks(&self, rows: u64) -> u64 {
        let blocks = 2.min((self.grid.ring as u64).saturating_sub(1));
        let heads = if self.grid.ulysses > 1 { 8 } else { 0 };
        (4 * blocks + heads) * rows
    }
}

/// The predicted memory of a training, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingMemory {
    /// The frozen weights of a process, which its ranks share, or its share of them with the largest unit and what it receives of the next
    /// one.
    pub weights: u64,
    /// A rank's adapters, their gradients and the optimiser's state.
    pub adapters: u64,
    /// What a rank's blocks store for their gradients.
    pub stored: u64,
    /// The block of a rank that is differentiated, with blocks of other ranks, the kernels' buffers, and the samples of the step.
    pub differentiated_block: u64,
    /// Flags that would need less and are not given.
    savings: [Option<&'static str>; 2],
    local: LocalRanks,
}

/// The ranks of this machine, and their processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LocalRanks {
    pub(super) ranks: usize,
    pub(super) processes: usize,
}

impl TrainingMemory {
    pub(super) fn new(
        weights: u64,
        adapters: u64,
        sizes: &StepSizes,
        config: &WanConfig,
        local: LocalRanks,
    ) -> Result<Self> {
        let savings = [
            (sizes.recompute != Recompute::Full).then_some("--recompute full"),
            (sizes.storage == Storage::F32).then_some("--activations bf16"),
        ];
        let (stored, differentiated_block) = (sizes.stored(config), sizes.differentiated_block(config)?);
        Ok(Self { weights, adapters, stored, differentiated_block, savings, local })
    }

    /// What each rank holds beside the weights.
    #[must_use]
    pub fn of_rank(&self) -> u64 {
        self.adapters + self.stored + self.differentiated_block
    }

    /// What the ranks of this machine hold together.
    #[must_use]
    pub fn machine_bytes(&self) -> u64 {
        self.weights * self.local.processes as u64 + self.of_rank() * self.local.ranks as u64
    }

    /// Refuses a training that needs more than `free` bytes on this machine.
    ///
    /// # Errors
    /// The numbers, and what needs less.
    pub fn check_free(&self, free: u64) -> Result<()> {
        if self.machine_bytes() <= free {
            return Ok(());
        }
        Err(Error::Input(format!(
            "this training needs about {} of memory on this machine (weights {}, {} ranks of {}: {}), and {} are free; what needs less: {}ranks \
             on more machines, smaller videos",
            bytes_text(self.machine_bytes()),
            bytes_text(self.weights),
            self.local.ranks,
            bytes_text(self.of_rank()),
            self.parts(),
            bytes_text(free),
            self.savings.into_iter().flatten().map(|flag| format!("{flag}, ")).collect::<String>()
        )))
    }

    fn parts(&self) -> String {
        let [adapters, stored, block] = [self.adapters, self.stored, self.differentiated_block].map(bytes_text);
        format!(
            "{adapters} adapters with their optimiser, {stored} stored activations, {block} for a block and the samples"
        )
    }
}

impl fmt::Display for TrainingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} a rank ({}) beside the weights", bytes_text(self.of_rank()), self.parts())
    }
}
