//! The memory of a rank beside weights, and the operations of a step, from shapes alone.
//!
//! Shape letters: T tokens of this rank, S tokens of all videos, C width, H heads, D head width, N embeddings of a prompt.

use crate::transformer::{WanConfig, WeightType};
use ringspan::kernel::Isa;
use ringspan::kernel::product::MOST_PACKED;
use ringspan::mesh::Grid;

/// Rows that a feed-forward layer computes at a time.
const FEED_FORWARD_ROWS: u64 = 1024;
/// Up to this many keys, each thread of the attention kernel packs its own heads; with more, all threads share packed
/// heads.
const KEYS_OF_A_THREAD: u64 = 1024;
/// Upper limit on the bytes that the kernel packs at a time, unless [`KEYS_OF_A_THREAD`] keys take more.
const PACKED_BYTES: u64 = 16 << 20;
const LEAST_KEYS: u64 = 2048;
/// Heads that the kernel packs at a time where all threads share them.
const PACKED_HEADS: u64 = 3;
/// Tensors of the latents' size that a step holds: the latents, the last ones, the velocity and its sum with another, two predictions
/// and the sums of the scheduler.
const LATENTS: u64 = 8;

/// The sizes of a rank's run.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunSizes {
    pub(super) grid: Grid,
    pub(super) threads: u64,
    /// Whether ranks are processes. Between threads a message is handed over, so that two ranks hold it once.
    pub(super) processes: bool,
    /// Tokens T of the rank that has most.
    pub(super) tokens: u64,
    /// Heads of the Ulysses rank that has most.
    pub(super) heads: u64,
    /// Tokens S of all videos.
    pub(super) all_tokens: u64,
    /// Videos.
    pub(super) batch: u64,
    /// Embeddings N of a prompt: of text, and of images.
    pub(super) embeds: u64,
    /// Branches of guidance that a rank computes.
    pub(super) branches: u64,
    /// How many of them each block computes before the next block does.
    pub(super) interleaved: u64,
    /// Whether what the blocks add is kept for later steps.
    pub(super) caches: bool,
}

impl RunSizes {
    /// Bytes that the fullest rank holds beside weights.
    pub(super) fn activations(&self, config: &WanConfig, weights: WeightType) -> u64 {
        // Kernels keep their buffers from call to call.
        let of_ring = self.all_tokens.div_ceil(self.grid.ring.max(1) as u64);
        let element = if Isa::best().multiplies_bf16() { weights.computed_bytes() as u64 } else { 4 };
        let kernels = self.packed(config, of_ring, self.heads, element)
            + self.packed(config, self.batch * self.embeds, config.num_attention_heads as u64, element);
        let of_pass = self.of_block(config, weights).max(self.of_output(config));
        self.of_run(config, weights) + kernels + of_pass + self.of_other_branches(config, weights)
    }

    /// Keys and values that a kernel packs: in f32, or in bf16 if they are stored so and the processor multiplies it.
    fn packed(&self, config: &WanConfig, keys: u64, heads: u64, element: u64) -> u64 {
        let threads = self.threads.max(1);
        let slots = match keys > KEYS_OF_A_THREAD {
            true => heads.min(PACKED_HEADS),
            false => heads.min(threads) + (heads % threads).min(PACKED_HEADS),
        };
        let of_key = element * slots * 2 * config.attention_head_dim as u64;
        (keys * of_key).min(PACKED_BYTES.max(LEAST_KEYS * of_key))
    }

    /// Bytes that are held during a whole run.
    fn of_run(&self, config: &WanConfig, weights: WeightType) -> u64 {
        let (width, blocks) = (config.width() as u64, blocks(config));
        let prompts = self.branches * blocks * 2 * self.batch * self.embeds * width * weights.computed_bytes() as u64;
        // Cosines and sines of half a head, and the number of each token.
        let positions = self.tokens * (4 * config.attention_head_dim as u64 + 8);
        let element = (config.out_channels() * config.patch()) as u64;
        let appended = ((config.in_channels - config.out_channels().min(config.in_channels)) * config.patch()) as u64;
        // What blocks add in each branch, and the embedded patches from which it is counted.
        let rows = self.tokens * width * weights.computed_bytes() as u64;
        let cached = if self.caches { (self.branches + 1) * rows } else { 0 };
        prompts + positions + cached + 4 * self.all_tokens * (LATENTS * element + 2 * appended)
    }

    /// Peak of the bytes that are held while a block computes.
    fn of_block(&self, config: &WanConfig, weights: WeightType) -> u64 {
        let (width, element) = (config.width() as u64, weights.computed_bytes() as u64);
        let rows = self.tokens * width;
        let control = if config.vace_layers.is_some() { 2 * rows * element } else { 0 };
        // The input, the attention output, the sum of both, its norm, and queries before and after their norm.
        // The product from which queries come packs some of its matrix before their norm is there.
        let to_prompt = 5 * rows * element + (rows * element).max(packed_weights(width * width, weights));
        // The input, the attention output, the sum, its norm, the output, and the inner width of some rows, before and
        // after the activation, or what a product packs of a matrix instead of one of these.
        let some = self.tokens.min(FEED_FORWARD_ROWS);
        let inner = some * config.ffn_dim as u64 * element;
        let second = inner.max(packed_weights(width * config.ffn_dim as u64, weights));
        let feed_forward = 5 * rows * element + inner + second + some * width * element;
        control + self.attention(config, element).max(to_prompt).max(feed_forward)
    }

    /// What a branch holds while a block computes another: the residual stream, with VACE that of the control blocks and what they
    /// add, and its patches.
    fn of_other_branches(&self, config: &WanConfig, weights: WeightType) -> u64 {
        let rows = self.tokens * config.width() as u64 * weights.computed_bytes() as u64;
        let streams = if config.vace_layers.is_some() { 3 * rows } else { rows };
        let patches = 4 * self.tokens * (config.out_channels() * config.patch()) as u64;
        self.interleaved.saturating_sub(1) * (streams + patches)
    }

    /// Attention over all ranks: the input, queries, keys and values; outputs with maximum and sum of each head in f32, and outputs in
    /// the model's type; with Ulysses, the same of this rank's heads; with a ring, a block of others, or two between processes.
    fn attention(&self, config: &WanConfig, element: u64) -> u64 {
        let (width, dim) = (config.width() as u64, config.attention_head_dim as u64);
        let results = |rows: u64, heads: u64| 4 * rows * heads * (dim + 2);
        let rounded = if element < 4 { self.tokens * width * element } else { 0 };
        let mut bytes =
            4 * self.tokens * width * element + results(self.tokens, config.num_attention_heads as u64) + rounded;
        let (ring, ulysses) = (self.grid.ring as u64, self.grid.ulysses as u64);
        let of_ring = self.all_tokens.div_ceil(ring.max(1));
        let of_heads = of_ring * self.heads * dim * element;
        let messages = if self.processes { 2 } else { 1 };
        if ulysses > 1 {
            bytes += 3 * of_heads * messages + results(of_ring, self.heads);
        }
        if ring > 1 {
            bytes += 2 * of_heads * messages;
        }
        bytes
    }

    /// Bytes of the output head: the residual stream, its norm, and the patches of all tokens, which are gathered and
    /// put together.
    fn of_output(&self, config: &WanConfig) -> u64 {
        let patches = (config.out_channels() * config.patch()) as u64;
        4 * (2 * self.tokens * config.width() as u64 + (self.tokens + 3 * self.all_tokens) * patches)
    }

    /// Bytes that the fullest rank sends in a step beside attention: its tokens' velocity to the other ranks of its branch, and in
    /// parallel branches the whole velocity to the other branch.
    pub(super) fn gathered(&self, config: &WanConfig, parallel: bool) -> u64 {
        let of_token = 4 * (config.out_channels() * config.patch()) as u64;
        let ranks = (self.grid.ring * self.grid.ulysses) as u64;
        let across = if parallel { self.all_tokens * of_token } else { 0 };
        self.branches * self.tokens * of_token * (ranks - 1) + across
    }

    /// Floating-point operations of one branch of a step, over all ranks: two for each weight and token, and four for each pair of
    /// a query and a key in each of their numbers. Norms and activations are left out.
    pub(super) fn operations(&self, config: &WanConfig) -> f64 {
        let (width, tokens) = (config.width() as f64, self.all_tokens as f64);
        // Queries, keys, values and outputs of the video; queries and outputs to the prompt; feed-forward.
        let of_token = 6.0 * width * width + 2.0 * width * config.ffn_dim as f64;
        let pairs = tokens * (tokens / self.batch.max(1) as f64 + self.embeds as f64);
        let ends = width * (config.patch() * (config.in_channels + config.out_channels())) as f64;
        blocks(config) as f64 * (2.0 * tokens * of_token + 4.0 * width * pairs) + 2.0 * tokens * ends
    }
}

/// Bytes that a product with a matrix of so many elements packs of it at a time: in f32, or as pairs of bf16 if the processor multiplies
/// these.
fn packed_weights(elements: u64, weights: WeightType) -> u64 {
    let pair = if weights == WeightType::Bf16 && Isa::best().multiplies_bf16() { 2 } else { 1 };
    4 * elements.div_ceil(pair).min(MOST_PACKED as u64)
}

/// Blocks, VACE's control blocks included.
fn blocks(config: &WanConfig) -> u64 {
    (config.num_layers + config.vace_layers.as_ref().map_or(0, Vec::len)) as u64
}
