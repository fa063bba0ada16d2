//! Predicted memory of a rank that computes on a GPU: what of it lies there, and what stays on the CPU.
//!
//! Shape letters: as in `memory.rs`. On a GPU a layer is made of single operations over all tokens, so more is there at once than
//! on the CPU. The factors are counts of what candle's graph and its gradients hold, found by the driver's count of its pool
//! (`ringspan-cli/tests/gpu_memory.rs` holds them to it).

use super::{
    memory::{Moment, OF_BATCH, fullest},
    shape::Shape,
};
use crate::error::Result;
use ringspan_candle::{kept::Storage, loss};
use ringspan_models::Recompute;

/// Bytes of a number in f32.
const WIDE: u64 = 4;

impl Shape {
    /// What is on the GPU at the fullest moment of a rank with `tokens` tokens; and when that is.
    pub(super) fn gpu_memory(&self, tokens: u64) -> Result<Moment> {
        let held = &self.held;
        let rows = tokens.div_ceil(self.tp);
        let (width, kept) = (self.width(), self.kept(tokens, rows));
        let (stream, whole_stream) = (width * rows * self.hidden, width * tokens * self.hidden);
        let angles = WIDE * tokens * self.dim;
        let head = if self.tied { held.embedding } else { held.head };
        // Of a tied head it waits for the embedding's.
        let (d_head, tied) = match held.embedding_shard + held.head_shard {
            0 => (0, 0),
            _ => (WIDE * head, if self.tied { WIDE * head } else { 0 }),
        };
        let chunk = tokens.min(loss::CHUNK as u64) * self.vocabulary;
        let layer = |gradients: u64| ("a layer, whole, with gradients", width * (held.layer + gradients) + tied);
        // Of the feed-forward part the first gradient is known when most of it is there.
        let of_down = self.feed_forward * self.hidden;
        // The last gradient of a parameter is there twice for a moment.
        let largest = (self.hidden * self.feed_forward.max(self.head_counts().0 * self.dim)).min(held.layer_trained);
        let activations =
            |bytes: u64| ("a layer's activations and their gradients", bytes + self.of_layer(tokens, rows));
        let blocks = ("blocks of other ranks", self.blocks(tokens)?);
        let kept_of = |layers: u64| ("kept of the layers", kept * layers);
        let logits = 3 * WIDE * chunk;
        // Rounded for the products, and the product in its type before it is added.
        let of_head = (WIDE * chunk * 2 + if width < WIDE { width * chunk } else { 0 })
            + if d_head > 0 { d_head + width * head + if width < WIDE { WIDE * head } else { 0 } } else { 0 };
        Ok(fullest(vec![
            (
                "at the loss",
                vec![
                    kept_of(self.layers),
                    ("the head, with its gradient", width * head + d_head),
                    ("logits of a chunk, and what they give", logits.max(of_head)),
                    ("hidden states, with their gradient", 2 * stream + 2 * whole_stream + angles),
                ],
            ),
            (
                "in the last layer's feed-forward part",
                vec![
                    kept_of(self.layers.saturating_sub(1)),
                    layer(of_down.min(held.layer_trained)),
                    activations(self.of_feed_forward(tokens, rows)),
                ],
            ),
            (
                "in the last layer's attention",
                vec![
                    kept_of(self.layers.saturating_sub(1)),
                    layer(held.layer_trained + largest),
                    activations(self.of_attention(tokens, rows)),
                    blocks,
                ],
            ),
            (
                "at the embedding",
                vec![
                    ("the embedding's gradient", width * held.embedding + 2 * WIDE * held.embedding + tied),
                    ("hidden states, with their gradient", 2 * whole_stream + angles),
                ],
            ),
        ]))
    }

    /// What stays on the CPU, of which `batch` tokens are on all ranks.
    pub(super) fn memory_beside_gpu(&self, batch: u64) -> Moment {
        let held = &self.held;
        let moving = |unit: u64| if held.shares() { WIDE * unit } else { 0 };
        let with = |gradients: u64, way: u64| {
            vec![
                ("parameters", WIDE * held.parameters),
                ("optimiser state", self.state),
                ("gradients", WIDE * gradients),
                ("a unit on its way to the GPU and back", way),
                ("tokens of the batch", OF_BATCH * batch),
            ]
        };
        let summed = |units: u64| held.trained.saturating_sub(units);
        fullest(vec![
            (
                "behind the first layer",
                with(
                    summed(held.layer_shard + held.embedding_shard),
                    2 * WIDE * held.layer_trained + moving(held.layer),
                ),
            ),
            ("at the embedding", with(summed(held.embedding_shard), 2 * WIDE * held.embedding + moving(held.layer))),
            ("at the optimiser", with(held.trained, 0)),
        ])
    }

    /// Bytes of a layer that is computed again, until it is differentiated: of the graph without what the feed-forward part has
    /// of its own, of hidden states on the way, and of what was kept and is held by the graph.
    fn of_layer(&self, tokens: u64, rows: u64) -> u64 {
        let (heads, kv_heads) = self.head_counts();
        let (attended, keys) = (heads * self.dim, kv_heads * self.dim);
        // Before attention rows are gathered, and behind it there are partial sums of all of them.
        let stream = if self.tp > 1 { 11 * rows + 11 * tokens } else { 13 * tokens } * self.hidden;
        // Products, what is turned, what is normed.
        let projected = (if self.norms_heads { 4 } else { 3 }) * tokens * (attended + keys);
        let held = match self.recompute {
            Recompute::Nothing => tokens * (attended + 2 * keys + self.hidden + 2 * self.feed_forward),
            _ => 0,
        };
        self.width() * (stream + projected + held) + WIDE * tokens * (heads + self.dim) + self.of_adapters(tokens)
    }

    /// Bytes of the graph that adapters add: of each output its part and the sum, in f32, beside what is rounded; and of what is
    /// dropped of an input the mask, the result and its copy.
    fn of_adapters(&self, tokens: u64) -> u64 {
        let rounds = self.width() < WIDE;
        let (wide, outputs) = match self.feed_forward_adapted && self.feed_forward > 0 {
            true => (self.feed_forward, self.adapted + 2 * self.feed_forward + self.hidden),
            false => (0, self.adapted),
        };
        let gradients = if rounds { 10 * wide } else { 0 };
        let dropped = (WIDE + 2 * self.width()) * (self.dropped + self.feed_forward_dropped);
        tokens * (self.of_adapted_output() * outputs + gradients + dropped)
    }

    /// Bytes that an adapter adds to the graph of a number of its layer's output.
    fn of_adapted_output(&self) -> u64 {
        2 * WIDE + if self.width() < WIDE { WIDE + self.width() } else { 0 }
    }

    /// Bytes of the feed-forward part at its fullest: gate, up, their product, and gradients of all, on their way twice.
    fn of_feed_forward(&self, tokens: u64, rows: u64) -> u64 {
        let [fullest, _] = self.of_experts(rows);
        fullest.max(8 * self.width() * tokens * self.feed_forward)
    }

    /// Bytes of experts at their fullest, and of their graph; 0 where there are none.
    fn of_experts(&self, rows: u64) -> [u64; 2] {
        let adapted = if self.feed_forward_adapted { self.of_adapted_output() } else { 0 };
        self.experts.map_or([0; 2], |experts| experts.on_gpu(rows, self.hidden, self.width(), adapted))
    }

    /// Bytes of attention's gradients, which come in f32, beside the graph of the feed-forward part.
    fn of_attention(&self, tokens: u64, rows: u64) -> u64 {
        let (width, (heads, kv_heads)) = (self.width(), self.head_counts());
        let (attended, keys) = (heads * self.dim, kv_heads * self.dim);
        // From the kernel's to candle's, one after the other; then in the type of the model, on their way twice.
        let copied = width * attended + 2 * WIDE * (attended + keys);
        let added = width * (4 * attended + 2 * keys);
        let [_, of_experts] = self.of_experts(rows);
        let fed = of_experts.max(3 * width * tokens * self.feed_forward);
        tokens * copied.max(added) + width * rows * self.hidden + fed
    }

    /// Bytes of a number that a layer reads and returns.
    pub(super) fn width(&self) -> u64 {
        self.computes_in.map_or(WIDE, |precision| precision.dtype().size_in_bytes() as u64)
    }

    /// Bytes of a number that waits for the backward pass.
    pub(super) fn kept_width(&self) -> u64 {
        match self.storage {
            Storage::F32 => self.width(),
            Storage::Bf16 => Storage::Bf16.bytes() as u64,
        }
    }

    /// Whether experts' products wait, too.
    pub(super) fn keeps_experts(&self) -> bool {
        self.recompute == Recompute::Nothing && self.computes_in.is_none()
    }
}
