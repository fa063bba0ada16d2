//! Predicts the memory of a rank that computes on a GPU: on the GPU, and on the CPU.
//!
//! Shape letters are those of `cpu_memory.rs`. On a GPU a layer is made of single operations over all tokens, so more is there at
//! once than on the CPU. The factors are counts of what candle's graph and its gradients hold, found by the driver's count of its
//! pool (`ringspan-cli/tests/gpu/gpu_memory.rs` compares them with it).

use super::{
    cpu_memory::{BATCH_BYTES_PER_TOKEN, MemoryMoment, peak_moment},
    rank_sizes::Shape,
};
use crate::error::Result;
use ringspan_candle::{Recompute, loss, offload, stored_activation::Storage};

/// Bytes of an f32 element.
const WIDE: u64 = 4;

/// Number of layers whose stored activations are on the GPU at a time, where activations are offloaded.
const RESIDENT_LAYERS: u64 = offload::RESIDENT_LAYERS as u64;

impl Shape {
    /// Predicted memory on the GPU of a rank with `tokens` tokens: the fullest moment, and its parts.
    pub(super) fn gpu_memory(&self, tokens: u64) -> Result<MemoryMoment> {
        let held = &self.held;
        let rows = tokens.div_ceil(self.tp);
        let (width, kept) = (self.width(), self.kept(tokens, rows));
        let (stream, whole_stream) = (width * rows * self.hidden, width * tokens * self.hidden);
        let angles = WIDE * tokens * self.dim;
        let head = if self.tied { held.embedding } else { held.head };
        // The gradient of a tied head waits for the embedding's; that of another head, or of a layer, waits until the next unit's
        // are known.
        let (d_head, tied) = match held.embedding_shard + held.head_shard {
            0 => (0, 0),
            _ => (WIDE * head, if self.tied { WIDE * head } else { 0 }),
        };
        let chunk = tokens.min(loss::CHUNK_ON_GPU as u64) * self.vocabulary;
        // Each layer is prefetched while the one before it is computed, so two are there, unless only one is left.
        let weights = |layers: u64| width * held.layer * layers.min(2);
        let layer = |layers: u64, gradients: u64| {
            ("a layer, whole, with gradients, and the next", weights(layers) + width * gradients + tied)
        };
        let leaving = |bytes: u64| ("gradients on their way to the CPU", bytes);
        let (of_head, of_layer) = (d_head - tied, width * held.layer_trained);
        // When the memory of the feed-forward part peaks, only its first gradient is known, that of the down
        // projection.
        let of_down = (self.feed_forward * self.hidden).min(held.layer_trained);
        // A parameter's last gradient is there twice for a moment.
        let largest = (self.hidden * self.feed_forward.max(self.head_counts().0 * self.dim)).min(held.layer_trained);
        let activations =
            |bytes: u64| ("a layer's activations and their gradients", bytes + self.of_layer(tokens, rows));
        let blocks = ("blocks of other ranks", self.blocks(tokens)?);
        let stays = if self.offloads { self.statistics(tokens) } else { kept };
        let kept_of =
            |layers: u64, staying: u64| ("stored activations", stays * layers + (kept - stays) * layers.min(staying));
        let mut moments = vec![
            (
                "at the loss",
                vec![
                    kept_of(self.layers, RESIDENT_LAYERS),
                    ("the head, with its gradient, and a layer", width * head + d_head + weights(1)),
                    ("logits of a chunk", WIDE * chunk + if width < WIDE { width * chunk } else { 0 }),
                    ("hidden states, with their gradient", 2 * stream + 2 * whole_stream + angles),
                ],
            ),
            (
                "at the embedding",
                vec![
                    ("the embedding's gradient", 2 * WIDE * held.embedding + tied),
                    leaving(of_layer),
                    ("hidden states, with their gradient", 2 * whole_stream + angles),
                ],
            ),
        ];
        for (earlier, names, layers) in [
            (of_head, ["in the last layer's feed-forward part", "in the last layer's attention"], self.layers),
            (
                of_layer,
                ["in the last but one layer's feed-forward part", "in the last but one layer's attention"],
                self.layers.saturating_sub(1),
            ),
        ] {
            let kept = kept_of(layers.saturating_sub(1), RESIDENT_LAYERS - 1);
            let fed = activations(self.of_feed_forward(tokens, rows));
            let attended = activations(self.of_attention(tokens, rows));
            moments.push((names[0], vec![kept, layer(layers, of_down), leaving(earlier), fed]));
            let all = layer(layers, held.layer_trained + largest);
            moments.push((names[1], vec![kept, all, leaving(earlier), attended, blocks]));
        }
        Ok(peak_moment(moments))
    }

    /// Predicted memory on the CPU of a rank with `tokens` tokens that computes on a GPU, where all ranks have `batch` tokens.
    pub(super) fn cpu_memory_of_gpu_rank(&self, tokens: u64, batch: u64) -> MemoryMoment {
        let held = &self.held;
        let moving = |unit: u64| if held.shares() { WIDE * unit } else { 0 };
        let away = match self.offloads {
            true => self.away(tokens) * self.layers.saturating_sub(RESIDENT_LAYERS),
            false => 0,
        };
        // There are two pinned buffers of each size: one is filled or read while the other one is copied.
        let trained = |shard: u64, unit: u64| if shard > 0 { unit } else { 0 };
        let (d_embedding, d_head) =
            (trained(held.embedding_shard, held.embedding), trained(held.head_shard, held.head));
        let pinned = self.width() * (held.layer + held.layer_trained + held.embedding + held.head)
            + WIDE * (d_embedding + d_head);
        let with = |gradients: u64, way: u64| {
            vec![
                ("parameters", WIDE * held.parameters),
                ("optimiser state", self.state),
                ("gradients", WIDE * gradients),
                ("units on their way to the GPU and back", 2 * pinned + way),
                ("stored activations", away),
                ("tokens of the batch", BATCH_BYTES_PER_TOKEN * batch),
            ]
        };
        let summed = |units: u64| held.trained.saturating_sub(units);
        peak_moment(vec![
            (
                "after the first layer",
                with(
                    summed(held.layer_shard + held.embedding_shard),
                    2 * WIDE * held.layer_trained + moving(held.layer),
                ),
            ),
            ("at the embedding", with(summed(held.embedding_shard), 2 * WIDE * held.embedding + moving(held.layer))),
            ("at the optimiser", with(held.trained, 0)),
        ])
    }

    /// Bytes of a layer's softmax statistics (maxima and sums), which stay on the GPU even if other activations are offloaded.
    fn statistics(&self, tokens: u64) -> u64 {
        match self.recompute {
            Recompute::Full => 0,
            Recompute::KeepAttention | Recompute::Nothing => 2 * WIDE * tokens * self.head_counts().0,
        }
    }

    /// Bytes of a layer's activations that are offloaded to the CPU.
    pub(super) fn away(&self, tokens: u64) -> u64 {
        self.kept(tokens, tokens.div_ceil(self.tp)) - self.statistics(tokens)
    }

    /// Bytes of a recomputed layer until it is differentiated: candle's graph without the feed-forward part's own tensors, hidden
    /// states in passing, and stored activations that the graph holds.
    fn of_layer(&self, tokens: u64, rows: u64) -> u64 {
        let ((heads, _), (attended, keys)) = (self.head_counts(), self.attended());
        // With tensor parallelism, rows are gathered before attention, and after it there are partial sums of all of them.
        let stream = if self.tp > 1 { 8 * rows + 11 * tokens } else { 10 * tokens } * self.hidden;
        // These are the results of projections, of rotations and of the norms of heads.
        let qkv_elements =
            tokens * ((if self.norms_heads { 4 } else { 3 }) * (attended + keys) + self.query_copy_for_sinks);
        let held = match self.recompute {
            Recompute::Nothing => tokens * (attended + 2 * keys + self.hidden + 2 * self.feed_forward),
            _ => 0,
        };
        self.width() * (stream + qkv_elements + held)
            + WIDE * tokens * (2 * heads + self.dim)
            + self.of_adapters(tokens)
    }

    /// Bytes that adapters add to the graph: per output, the adapter's part in f32 and the sum; per input with dropout, the mask,
    /// the result and its copy.
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

    /// Bytes that an adapter adds to the graph per element of its layer's output: its part, and the sum.
    fn of_adapted_output(&self) -> u64 {
        WIDE + self.width()
    }

    /// Peak bytes of the feed-forward part: gate, up, their product, and the gradients of all, some of them twice.
    fn of_feed_forward(&self, tokens: u64, rows: u64) -> u64 {
        let [fullest, _] = self.of_experts(rows);
        fullest.max(8 * self.width() * tokens * self.feed_forward)
    }

    /// Peak bytes of experts, and bytes of their graph alone; 0 for a model without experts.
    fn of_experts(&self, rows: u64) -> [u64; 2] {
        // An adapter's part and the sum are f32; in bf16 there are rounded tensors besides.
        let rounded = if self.width() < WIDE { WIDE + self.width() } else { 0 };
        let adapted = if self.feed_forward_adapted { 2 * WIDE + rounded } else { 0 };
        self.experts.map_or([0; 2], |experts| experts.on_gpu(rows, self.hidden, self.width(), adapted))
    }

    /// Bytes while attention is differentiated: its gradients, which come in f32, and the graph of the feed-forward part.
    fn of_attention(&self, tokens: u64, rows: u64) -> u64 {
        let (width, (attended, keys)) = (self.width(), self.attended());
        // Gradients are copied from the kernel's memory to candle's, one after the other; then they are in the model's type, some
        // twice.
        let copied = width * attended + 2 * WIDE * (attended + keys);
        let added = width * (4 * attended + 2 * keys);
        let [_, of_experts] = self.of_experts(rows);
        let fed = of_experts.max(3 * width * tokens * self.feed_forward);
        tokens * copied.max(added) + width * rows * self.hidden + fed
    }

    /// Bytes per element of a layer's input and output.
    pub(super) fn width(&self) -> u64 {
        self.precision.dtype().size_in_bytes() as u64
    }

    /// Bytes per element of an activation that is stored for the backward pass.
    pub(super) fn kept_width(&self) -> u64 {
        match self.storage {
            Storage::F32 => self.width(),
            Storage::Bf16 => Storage::Bf16.bytes() as u64,
        }
    }

    /// Whether the results of experts' products are stored for the backward pass, too.
    pub(super) fn keeps_experts(&self) -> bool {
        self.recompute == Recompute::Nothing && self.computes_in.is_none()
    }
}
