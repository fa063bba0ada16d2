//! Predicts the memory of a rank: what it holds at its peak in a step.
//!
//! Shape letters: T tokens of a rank's sequences, R the rows of them that a tensor-parallel rank has, C hidden size. The factors
//! of a layer's activations are counts of what its tape and its gradients hold at once, by the allocator (`tests/memory/plan.rs`
//! compares them with it).

use super::rank_sizes::Shape;
use crate::error::Result;
use ringspan::StrategyKind;
use ringspan::kernel::product::MOST_PACKED;
use ringspan_candle::quantized::{backward_scratch, forward_scratch};
use ringspan_candle::{Recompute, gated_mlp, loss, stored_activation::Storage};

/// Bytes that a rank holds per token of the whole batch: tokens and targets, of the batch and as they are distributed over ranks.
pub(super) const BATCH_BYTES_PER_TOKEN: u64 = 24;

/// Bytes of the largest buffer that a kernel of attention keeps between calls.
const CACHED_KERNEL_BUFFER: u64 = 16 << 20;

/// Bytes by named part of the memory.
pub(super) type MemoryParts = Vec<(&'static str, u64)>;

/// Bytes of the numbers that products with a stored matrix of `rows` x `columns` dequantize at once, with the bytes that are there
/// `besides` in the forward and in the backward pass: those of the fuller pass.
fn decoding([rows, columns]: [u64; 2], besides: [u64; 2]) -> u64 {
    let [rows, columns] = [rows, columns].map(|size| size as usize);
    let [forward, backward] = [forward_scratch(rows, columns), backward_scratch(rows, columns)];
    (4 * forward as u64 + besides[0]).max(4 * backward as u64 + besides[1])
}

/// A moment of a step, in words, and the memory that it takes.
pub(super) type MemoryMoment = (&'static str, MemoryParts);

/// The moment that takes most memory.
pub(super) fn peak_moment(moments: Vec<MemoryMoment>) -> MemoryMoment {
    let sum = |parts: &MemoryParts| parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
    moments.into_iter().max_by_key(|(_, parts)| sum(parts)).unwrap_or_default()
}

impl Shape {
    /// Predicted memory of a rank with `tokens` tokens that computes on the CPU, where all ranks have `batch` tokens.
    pub(super) fn memory(&self, tokens: u64, batch: u64) -> Result<MemoryMoment> {
        let (held, width) = (&self.held, self.width());
        let rows = tokens.div_ceil(self.tp);
        let (kept, layers) = (self.kept(tokens, rows), self.layers);
        let last = width * rows * self.hidden;
        // Layers with experts and layers without, in each phase of a layer: the bytes that the layers before the last such layer
        // keep, its parameters with their gradients, its activations, and blocks of other ranks. Blocks of a ring are freed before
        // the feed-forward part, but experts send about as much there.
        let (ring_blocks, exchanged) = (self.ring_blocks(tokens)?, self.exchanged_heads(tokens));
        let kinds = [false, true].into_iter().zip(self.last_of_kind).filter_map(|(sparse, last)| Some((sparse, last?)));
        let of_kind = kinds.flat_map(|(sparse, last)| {
            let parameters = if sparse {
                held.layer_copy + held.layer_trained
            } else {
                held.dense_layer_copy + held.dense_layer_trained
            };
            let [feed_forward, attention] = self.activations(tokens, rows, sparse);
            let of_experts = if sparse { ring_blocks } else { 0 };
            let phases = [(feed_forward, of_experts + exchanged), (attention, ring_blocks + exchanged)];
            phases.map(|(bytes, blocks)| (kept * last, width * parameters + held.stored_layer, bytes, blocks))
        });
        let of_kind: Vec<_> = of_kind.collect();
        let (kept_before, layer, of_last, blocks_of_last) =
            of_kind.iter().copied().max_by_key(|(a, b, c, d)| a + b + c + d).unwrap_or_default();
        let (_, first_layer, of_first, blocks_of_first) =
            of_kind.iter().copied().max_by_key(|(_, b, c, d)| b + c + d).unwrap_or_default();
        // Messages that were received, and whose senders do not know yet that they were used: half of a unit, by the allocator.
        let moving = |unit: u64| if held.shares() { 2 * unit } else { 0 };
        // The gradient of a tied head waits for the embedding's.
        let tied = if self.tied && held.embedding_shard > 0 { 4 * held.embedding } else { 0 };
        let always = |gradients: u64| {
            vec![
                ("parameters", 4 * held.parameters),
                ("optimiser state", self.state),
                ("gradients", 4 * gradients),
                ("tokens of the batch", BATCH_BYTES_PER_TOKEN * batch),
            ]
        };
        let with = |gradients: u64, more: &[(&'static str, u64)]| [always(gradients), more.to_vec()].concat();
        let activations = |bytes: u64| ("a layer's activations and their gradients", bytes);
        let blocks = |bytes: u64| ("blocks of other ranks", bytes);
        let (head, head_copy, head_shard, stored_head) = match self.tied {
            true => (held.embedding, held.embedding_copy, held.embedding_shard, held.stored_embedding),
            false => (held.head, held.head_copy, held.head_shard, held.stored_head),
        };
        let (hidden, wide, chunk) = (self.hidden, self.feed_forward, tokens.min(loss::CHUNK as u64));
        let of_logits = decoding([self.vocabulary, hidden], [0, 0]);
        // A dequantized part of a weight is there with two of the five tensors of a tile of rows when up is computed, and with four when
        // gradients are. The values of down are not computed again.
        let narrow = self.width() * tokens.min(gated_mlp::TILE as u64) * self.feed_forward;
        let of_rows = narrow + self.widened_products(tokens) / 5;
        let of_layer = decoding([wide, hidden], [2 * of_rows, 4 * of_rows])
            .max(4 * backward_scratch(hidden as usize, wide as usize) as u64 + 4 * of_rows);
        let decoded = if held.stores_layers { of_layer.saturating_sub(5 * of_rows) } else { 0 };
        let decoded_of_layer = ("a part of a layer, dequantized", decoded);
        let decoded_of_head = ("a tile of the head, decoded", if held.stores_head { of_logits } else { 0 });
        // A frozen head has no gradient, and is there once. A gradient is f32 whatever type the model computes in.
        let of_head = width * head_copy + if head_shard > 0 { 2 * 4 * head } else { stored_head };
        // In bf16, rounded logits take memory besides those that turn into their gradient.
        let of_logit = if width < 4 { 4 + width } else { 4 };
        let moments = vec![
            (
                "at the loss",
                with(
                    0,
                    &[
                        ("stored activations", kept * layers + last),
                        ("the head, with its gradient", of_head),
                        decoded_of_head,
                        ("logits of a chunk", chunk * self.vocabulary * of_logit),
                        ("hidden states, with their gradient", 2 * width * tokens * self.hidden),
                    ],
                ),
            ),
            (
                "after the last layer",
                with(
                    held.head_shard,
                    &[
                        ("stored activations", kept_before),
                        (
                            "a layer, whole, with gradients",
                            layer + moving(if head_shard > 0 { held.head } else { 0 }) + tied,
                        ),
                        activations(of_last),
                        decoded_of_layer,
                        blocks(blocks_of_last),
                    ],
                ),
            ),
            (
                "after the first layer",
                with(
                    held.trained.saturating_sub(held.layer_shard + held.embedding_shard),
                    &[
                        ("a layer, whole, with gradients", first_layer + moving(held.layer_trained) + tied),
                        activations(of_first),
                        decoded_of_layer,
                        blocks(blocks_of_first),
                    ],
                ),
            ),
            (
                "at the embedding",
                with(
                    held.trained.saturating_sub(held.embedding_shard),
                    &[
                        ("the embedding's gradient", 2 * 4 * held.embedding + moving(held.layer_trained) + tied),
                        ("hidden states, with their gradient", 2 * 4 * tokens * self.hidden),
                    ],
                ),
            ),
            ("at the optimiser", always(held.trained)),
        ];
        Ok(peak_moment(moments))
    }

    /// Bytes of activations that a layer stores for its backward pass; where only some layers have experts, the mean of all
    /// layers.
    pub(super) fn kept(&self, tokens: u64, rows: u64) -> u64 {
        let (heads, _) = self.head_counts();
        let attended = heads * self.value_dim;
        let mean = |of_dense: u64, of_sparse: u64| {
            let sparse = self.experts.map_or(0, |experts| experts.layers);
            (of_dense * (self.layers - sparse) + of_sparse * sparse) / self.layers.max(1)
        };
        let (statistics, numbers) = match self.recompute {
            Recompute::Full => (0, rows * self.hidden),
            Recompute::KeepAttention => (2 * heads, rows * self.hidden + tokens * attended),
            Recompute::Nothing => {
                let [of_tokens, of_rows] = self.qkv_elements;
                let kept = self.experts.filter(|_| self.keeps_experts());
                let of_experts = kept.map_or(0, |experts| experts.products(rows));
                let fed = mean(2 * tokens * self.feed_forward, of_experts + 2 * tokens * self.shared);
                (2 * heads, rows * (self.hidden + of_rows) + tokens * (attended + of_tokens) + fed)
            }
        };
        let routers = match (self.experts, self.recompute, self.storage) {
            (Some(experts), Recompute::Nothing, _) | (Some(experts), _, Storage::Bf16) => mean(0, experts.router(rows)),
            _ => 0,
        };
        4 * (tokens * statistics + routers) + self.kept_width() * numbers
    }

    /// Bytes of a layer that is recomputed and differentiated, while its feed-forward part is differentiated, and while attention is
    /// or the linear layers before it; only then blocks of other ranks are there. A `sparse` layer has experts.
    fn activations(&self, tokens: u64, rows: u64, sparse: bool) -> [u64; 2] {
        let (width, (queries, keys)) = (self.width(), self.attended());
        // With the feed-forward part, there are the input, the sum after attention, its norm, the gradient of the output and that
        // of the norm; with attention, the input and the gradient that bypasses attention; after it, also the input's norm, its
        // gradient, and what one linear layer adds to that. With tensor parallelism, norms and their gradients are of all
        // tokens.
        let (of_dense, of_experts) = match self.tp {
            1 => (5 * rows, 5 * rows),
            // Ranks that compute adapters in tiles do not all reach their peak at the same time.
            _ if self.feed_forward_adapted => (3 * rows + 2 * tokens, 5 * rows),
            _ => (3 * rows + 3 * tokens, 5 * rows),
        };
        // Latent attention gathers narrower tensors than norms, and makes queries, keys and values of parts by candle's operations,
        // whose graph holds the parts until all of it is differentiated.
        let is_latent = self.dim != self.value_dim;
        let (of_attention, of_inputs) = match self.tp {
            tp if tp == 1 || is_latent => (2 * rows, 5 * rows),
            _ => (2 * rows + tokens, 2 * rows + 3 * tokens),
        };
        let of_parts = if is_latent { 5 * (queries + keys) } else { 0 };
        // The kernel keeps a buffer with keys and values as it reads them, if that is not large.
        let packed = Some(4 * 2 * tokens * keys).filter(|bytes| *bytes <= CACHED_KERNEL_BUFFER).unwrap_or(0);
        let is_kept = self.recompute == Recompute::Nothing;
        let stored = if is_kept { self.kept_width() * tokens * (queries + 2 * keys) } else { 0 };
        let normed = if self.norms_heads { queries + keys } else { 0 };
        let fused = !self.feed_forward_adapted && !self.feed_forward_bias && !self.held.stores_layers;
        let wide = if is_kept && fused { 2 * tokens * self.feed_forward } else { 0 };
        let dense = width * (of_dense * self.hidden + self.feed_forward_activations(tokens)) + self.kept_width() * wide;
        let with_experts = self.experts.filter(|_| sparse).map_or(0, |experts| {
            let shared = if self.shared > 0 && self.tp == 1 { tokens * self.hidden } else { 0 };
            let products = if is_kept { self.kept_width() } else { width } * experts.products(rows);
            let stored = self.held.stores_layers;
            let single = 4 * experts.activations_of_one(rows, self.hidden, stored);
            width * (of_experts * self.hidden + shared + experts.activations(rows, self.hidden, is_kept, stored))
                + single
                + products
        });
        // Tensor parallel ranks sum in f32 whatever the type of the model.
        let summed = if self.tp > 1 && width < 4 { 4 * tokens * self.hidden } else { 0 };
        let part =
            if sparse { with_experts } else { dense + self.packed_factor(tokens) + self.widened_products(tokens) };
        let feed_forward = stored + width * tokens * queries + part;
        // There are queries, keys and values, their gradients, and the gradient of attention's output.
        let differentiated = width * tokens * (3 * queries + 4 * keys) + self.widened_gradients(tokens);
        let attention = width * of_attention * self.hidden + differentiated;
        let inputs = width * (of_inputs * self.hidden + tokens * (queries + 2 * keys));
        let held = width * (tokens * (normed + of_parts + self.dropped) + rows * self.qkv_elements[1]);
        [feed_forward, held + attention.max(inputs)].map(|bytes| summed + packed + bytes)
    }

    /// Bytes of attention's gradients, which come in f32 where the model computes in bf16, and are then rounded.
    fn widened_gradients(&self, tokens: u64) -> u64 {
        let (queries, keys) = self.attended();
        if self.width() < 4 { 4 * tokens * (queries + 2 * keys) } else { 0 }
    }

    /// Bytes of the feed-forward part's products in f32, where weights are as they are stored and the model computes in bf16: inputs are
    /// widened for them, and their results and gradients are there in f32 and, rounded, in bf16. The factors are counts by the allocator.
    fn widened_products(&self, tokens: u64) -> u64 {
        if self.width() == 4 || !self.held.stores_layers || self.feed_forward_adapted {
            return 0;
        }
        let is_kept = self.recompute == Recompute::Nothing;
        let rows = if is_kept { tokens } else { tokens.min(gated_mlp::TILE as u64) };
        rows * (22 * self.feed_forward + 12 * self.hidden)
    }

    /// Bytes of the packed factor of a product in the feed-forward part of a layer that computes in bf16: a weight, or for its gradient
    /// the inner activations. Products of f32 have buffers whose size depends on the processor, which are no part of a plan.
    fn packed_factor(&self, tokens: u64) -> u64 {
        let terms = self.hidden.max(tokens.min(gated_mlp::TILE as u64));
        // Without adapters, the packed tile of a stored weight counts where it is decoded.
        let is_counted = self.held.stores_layers && !self.feed_forward_adapted;
        if self.width() < 4 && !is_counted { 4 * (terms * self.feed_forward).min(MOST_PACKED as u64) } else { 0 }
    }

    /// Number of elements in the feed-forward part of a layer without experts, besides its input and output, for
    /// [`Self::activations`].
    fn feed_forward_activations(&self, tokens: u64) -> u64 {
        let tile = tokens.min(gated_mlp::TILE as u64);
        // With biases, adapters or stored weights, the results of products are stored for all tokens or for none, and tiles have
        // inputs and outputs of their own.
        let (rows, of_adapters, tiles) = match self.recompute {
            Recompute::Nothing => (tokens, 5, 0),
            // A tile of all rows is not copied.
            _ if tokens == tile => (tile, 5, 2 * tile * self.hidden),
            _ => (tile, 5, 3 * tile * self.hidden),
        };
        let (wide, tiles) = match (self.feed_forward_adapted, self.feed_forward_bias || self.held.stores_layers) {
            (true, _) => (of_adapters * rows, tiles),
            (false, true) => (5 * rows, tiles),
            _ => (3 * tile, 0),
        };
        tiles + wide * self.feed_forward + rows * self.feed_forward_dropped
    }

    /// Bytes of what comes from other ranks for attention.
    pub(super) fn blocks(&self, tokens: u64) -> Result<u64> {
        Ok(self.ring_blocks(tokens)? + self.exchanged_heads(tokens))
    }

    /// Bytes of the Ulysses exchange of heads for tokens.
    fn exchanged_heads(&self, tokens: u64) -> u64 {
        let (queries, keys) = self.attended();
        if self.ulysses > 1 { 2 * 4 * tokens * 2 * (queries + keys) } else { 0 }
    }

    /// Bytes of keys, values and their gradients that travel between ranks.
    fn ring_blocks(&self, tokens: u64) -> Result<u64> {
        let exchanged = tokens * self.ulysses as u64;
        let kv = self.shares()?.iter().map(|share| share.kv.len()).max().unwrap_or(0) as u64;
        // Keys and values have the model's type, and their gradients are f32.
        let block = exchanged * kv * (self.dim + self.value_dim) * (self.width() + 4);
        let blocks = match self.strategy {
            StrategyKind::Ring | StrategyKind::PassQ => 2.min(self.ring - 1),
            StrategyKind::BidirectionalRing => 4.min(self.ring - 1),
            // This is an upper bound: halo fetches only parts of blocks.
            StrategyKind::AllGather | StrategyKind::Halo => self.ring - 1,
        };
        Ok(blocks * block)
    }

    /// Number of elements per token in queries and in keys; where values have another width, that of a head is the mean of both.
    pub(super) fn attended(&self) -> (u64, u64) {
        let (heads, kv_heads) = self.head_counts();
        let both = self.dim + self.value_dim;
        (heads * both / 2, kv_heads * both / 2)
    }

    pub(super) fn head_counts(&self) -> (u64, u64) {
        (self.heads.queries.len() as u64, self.heads.key_values.len() as u64)
    }
}
