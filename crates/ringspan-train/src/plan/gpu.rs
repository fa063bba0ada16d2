//! Predicted memory of a rank that computes on a GPU: what of it lies there, and what stays on the CPU.
//!
//! Shape letters: as in `memory.rs`. On a GPU a layer is made of single operations over all tokens, so more is there at once than
//! on the CPU. The factors are counts of what candle's graph and its gradients hold, found by the driver's count of its pool
//! (`ringspan-cli/tests/gpu/gpu_memory.rs` holds them to it).

use super::{
    memory::{Moment, OF_BATCH, fullest},
    shape::Shape,
};
use crate::error::Result;
use ringspan_candle::{Recompute, kept::Storage, loss, offload};

/// Bytes of a number in f32.
const WIDE: u64 = 4;

/// Layers that have what they keep on the GPU at a time.
const STAYING: u64 = offload::STAYING as u64;

impl Shape {
    /// What is on the GPU at the fullest moment of a rank with `tokens` tokens; and when that is.
    pub(super) fn gpu_memory(&self, tokens: u64) -> Result<Moment> {
        let held = &self.held;
        let rows = tokens.div_ceil(self.tp);
        let (width, kept) = (self.width(), self.kept(tokens, rows));
        let (stream, whole_stream) = (width * rows * self.hidden, width * tokens * self.hidden);
        let angles = WIDE * tokens * self.dim;
        let head = if self.tied { held.embedding } else { held.head };
        // Of a tied head it waits for the embedding's; of another, and of a layer, until the next unit's are known.
        let (d_head, tied) = match held.embedding_shard + held.head_shard {
            0 => (0, 0),
            _ => (WIDE * head, if self.tied { WIDE * head } else { 0 }),
        };
        let chunk = tokens.min(loss::CHUNK_ON_GPU as u64) * self.vocabulary;
        // A unit is announced while the one before it is computed: not behind the first layer.
        let weights = |layers: u64| width * held.layer * layers.min(2);
        let layer = |layers: u64, gradients: u64| {
            ("a layer, whole, with gradients, and the next", weights(layers) + width * gradients + tied)
        };
        let leaving = |bytes: u64| ("gradients on their way to the CPU", bytes);
        let (of_head, of_layer) = (d_head - tied, width * held.layer_trained);
        // Of the feed-forward part the first gradient is known when most of it is there.
        let of_down = (self.feed_forward * self.hidden).min(held.layer_trained);
        // The last gradient of a parameter is there twice for a moment.
        let largest = (self.hidden * self.feed_forward.max(self.head_counts().0 * self.dim)).min(held.layer_trained);
        let activations =
            |bytes: u64| ("a layer's activations and their gradients", bytes + self.of_layer(tokens, rows));
        let blocks = ("blocks of other ranks", self.blocks(tokens)?);
        let stays = if self.offloads { self.statistics(tokens) } else { kept };
        let kept_of =
            |layers: u64, staying: u64| ("kept of the layers", stays * layers + (kept - stays) * layers.min(staying));
        let mut moments = vec![
            (
                "at the loss",
                vec![
                    kept_of(self.layers, STAYING),
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
        for (behind, names, layers) in [
            (of_head, ["in the last layer's feed-forward part", "in the last layer's attention"], self.layers),
            (
                of_layer,
                ["in the last but one layer's feed-forward part", "in the last but one layer's attention"],
                self.layers.saturating_sub(1),
            ),
        ] {
            let kept = kept_of(layers.saturating_sub(1), STAYING - 1);
            let fed = activations(self.of_feed_forward(tokens, rows));
            let attended = activations(self.of_attention(tokens, rows));
            moments.push((names[0], vec![kept, layer(layers, of_down), leaving(behind), fed]));
            let all = layer(layers, held.layer_trained + largest);
            moments.push((names[1], vec![kept, all, leaving(behind), attended, blocks]));
        }
        Ok(fullest(moments))
    }

    /// What stays on the CPU for `tokens` tokens of this rank, of which `batch` are on all ranks.
    pub(super) fn memory_beside_gpu(&self, tokens: u64, batch: u64) -> Moment {
        let held = &self.held;
        let moving = |unit: u64| if held.shares() { WIDE * unit } else { 0 };
        let away = match self.offloads {
            true => self.away(tokens) * self.layers.saturating_sub(STAYING),
            false => 0,
        };
        // Two pieces of each size: one is filled or read, one is copied.
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
                ("kept of the layers", away),
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

    /// Bytes of a layer's maxima and sums of softmaxes, which wait on the GPU whatever leaves it.
    fn statistics(&self, tokens: u64) -> u64 {
        match self.recompute {
            Recompute::Full => 0,
            Recompute::KeepAttention | Recompute::Nothing => 2 * WIDE * tokens * self.head_counts().0,
        }
    }

    /// Bytes that a layer lets wait on the CPU.
    pub(super) fn away(&self, tokens: u64) -> u64 {
        self.kept(tokens, tokens.div_ceil(self.tp)) - self.statistics(tokens)
    }

    /// Bytes of a layer that is computed again, until it is differentiated: of the graph without what the feed-forward part has
    /// of its own, of hidden states on the way, and of what was kept and is held by the graph.
    fn of_layer(&self, tokens: u64, rows: u64) -> u64 {
        let ((heads, _), (attended, keys)) = (self.head_counts(), self.attended());
        // Before attention rows are gathered, and behind it there are partial sums of all of them.
        let stream = if self.tp > 1 { 8 * rows + 11 * tokens } else { 10 * tokens } * self.hidden;
        // Products, what is turned, what is normed.
        let projected = tokens * ((if self.norms_heads { 4 } else { 3 }) * (attended + keys) + self.linked);
        let held = match self.recompute {
            Recompute::Nothing => tokens * (attended + 2 * keys + self.hidden + 2 * self.feed_forward),
            _ => 0,
        };
        self.width() * (stream + projected + held) + WIDE * tokens * (2 * heads + self.dim) + self.of_adapters(tokens)
    }

    /// Bytes of the graph that adapters add: of each output its part, in f32, and the sum; and of what is dropped of an input
    /// the mask, the result and its copy.
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

    /// Bytes that an adapter adds to the graph of a number of its layer's output: its part, and the sum.
    fn of_adapted_output(&self) -> u64 {
        WIDE + self.width()
    }

    /// Bytes of the feed-forward part at its fullest: gate, up, their product, and gradients of all, on their way twice.
    fn of_feed_forward(&self, tokens: u64, rows: u64) -> u64 {
        let [fullest, _] = self.of_experts(rows);
        fullest.max(8 * self.width() * tokens * self.feed_forward)
    }

    /// Bytes of experts at their fullest, and of their graph; 0 where there are none.
    fn of_experts(&self, rows: u64) -> [u64; 2] {
        // Of experts a part and the sum are f32, beside what is rounded.
        let rounded = if self.width() < WIDE { WIDE + self.width() } else { 0 };
        let adapted = if self.feed_forward_adapted { 2 * WIDE + rounded } else { 0 };
        self.experts.map_or([0; 2], |experts| experts.on_gpu(rows, self.hidden, self.width(), adapted))
    }

    /// Bytes of attention's gradients, which come in f32, beside the graph of the feed-forward part.
    fn of_attention(&self, tokens: u64, rows: u64) -> u64 {
        let (width, (attended, keys)) = (self.width(), self.attended());
        // From the kernel's to candle's, one after the other; then in the type of the model, on their way twice.
        let copied = width * attended + 2 * WIDE * (attended + keys);
        let added = width * (4 * attended + 2 * keys);
        let [_, of_experts] = self.of_experts(rows);
        let fed = of_experts.max(3 * width * tokens * self.feed_forward);
        tokens * copied.max(added) + width * rows * self.hidden + fed
    }

    /// Bytes of a number that a layer reads and returns.
    pub(super) fn width(&self) -> u64 {
        self.precision.dtype().size_in_bytes() as u64
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
