//! Predicted memory of a rank: what is there at the fullest moment of a step.
//!
//! Shape letters: T tokens of a rank's sequences, R its rows of them where ranks share layers, C hidden size. The factors of
//! a layer's activations are counts of what its tape and its gradients hold at once, by the allocator (`tests/memory/plan.rs` holds
//! them to it).

use super::shape::Shape;
use crate::error::Result;
use ringspan::Strategy;
use ringspan_candle::quantized::scratch;
use ringspan_candle::{Recompute, gated_mlp, kept::Storage, loss};

/// Bytes that a rank holds of each token of the whole batch: tokens and targets, as they are and as they are dealt.
pub(super) const OF_BATCH: u64 = 24;

/// Bytes by part.
pub(super) type Parts = Vec<(&'static str, u64)>;

/// When something is there, in words, and what.
pub(super) type Moment = (&'static str, Parts);

/// The moment at which most is there.
pub(super) fn fullest(moments: Vec<Moment>) -> Moment {
    let sum = |parts: &Parts| parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
    moments.into_iter().max_by_key(|(_, parts)| sum(parts)).unwrap_or_default()
}

impl Shape {
    /// What is there at the fullest moment of a rank with `tokens` tokens, of `batch` on all ranks; and when that is.
    pub(super) fn memory(&self, tokens: u64, batch: u64) -> Result<Moment> {
        let (held, width) = (&self.held, self.width());
        let rows = tokens.div_ceil(self.tp);
        let (kept, layers) = (self.kept(tokens, rows), self.layers);
        let last = width * rows * self.hidden;
        let layer = width * (held.layer + held.layer_trained) + held.stored_layer;
        // What other ranks have sent and not yet been told that it was used: half of it, by the allocator.
        let moving = |unit: u64| if held.shares() { 2 * unit } else { 0 };
        // The head's gradient waits for the embedding's.
        let tied = if self.tied && held.embedding_shard > 0 { 4 * held.embedding } else { 0 };
        let always = |gradients: u64| {
            vec![
                ("parameters", 4 * held.parameters),
                ("optimiser state", self.state),
                ("gradients", 4 * gradients),
                ("tokens of the batch", OF_BATCH * batch),
            ]
        };
        let with = |gradients: u64, more: &[(&'static str, u64)]| [always(gradients), more.to_vec()].concat();
        let activations = ("a layer's activations and their gradients", self.activations(tokens, rows));
        let blocks = ("blocks of other ranks", self.blocks(tokens)?);
        let (head, head_shard, stored_head) = match self.tied {
            true => (held.embedding, held.embedding_shard, held.stored_embedding),
            false => (held.head, held.head_shard, held.stored_head),
        };
        // A head that stays as it is has no gradient, and is whole once.
        let scratch =
            |tokens: u64, rows: u64, columns: u64| 4 * scratch(tokens as usize, rows as usize, columns as usize) as u64;
        let (hidden, wide, chunk) = (self.hidden, self.feed_forward, tokens.min(loss::CHUNK as u64));
        let of_layer = scratch(tokens, wide, hidden).max(scratch(tokens, hidden, wide));
        let of_logits = scratch(chunk, self.vocabulary, hidden);
        // A tile of weights is decoded while not all of the gradients of a tile of rows are there.
        let of_tile = 5 * self.width() * tokens.min(gated_mlp::TILE as u64) * self.feed_forward;
        let decoded = if held.stores_layers { of_layer.saturating_sub(of_tile) } else { 0 };
        let decoded_of_layer = ("a tile of a layer, decoded", decoded);
        let decoded_of_head = ("a tile of the head, decoded", if held.stores_head { of_logits } else { 0 });
        // The gradient of the head is f32 in any type.
        let of_head = if head_shard > 0 { (width + 2 * 4) * head } else { width * head + stored_head };
        // Rounded logits stand beside those that turn into their gradient.
        let of_logit = if width < 4 { 4 + width } else { 4 };
        let moments = vec![
            (
                "at the loss",
                with(
                    0,
                    &[
                        ("kept of the layers", kept * layers + last),
                        ("the head, with its gradient", of_head),
                        decoded_of_head,
                        ("logits of a chunk", chunk * self.vocabulary * of_logit),
                        ("hidden states, with their gradient", 2 * width * tokens * self.hidden),
                    ],
                ),
            ),
            (
                "behind the last layer",
                with(
                    held.head_shard,
                    &[
                        ("kept of the layers", kept * layers.saturating_sub(1)),
                        (
                            "a layer, whole, with gradients",
                            layer + moving(if head_shard > 0 { held.head } else { 0 }) + tied,
                        ),
                        activations,
                        decoded_of_layer,
                        blocks,
                    ],
                ),
            ),
            (
                "behind the first layer",
                with(
                    held.trained.saturating_sub(held.layer_shard + held.embedding_shard),
                    &[
                        ("a layer, whole, with gradients", layer + moving(held.layer_trained) + tied),
                        activations,
                        decoded_of_layer,
                        blocks,
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
        Ok(fullest(moments))
    }

    /// Bytes that a layer keeps for its backward; where some have experts, the mean of all.
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
                let [of_tokens, of_rows] = self.projected;
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

    /// Bytes of a layer that is computed again and differentiated: most of them are there while its feed-forward part is
    /// differentiated, or while attention is.
    fn activations(&self, tokens: u64, rows: u64) -> u64 {
        let (width, (queries, keys)) = (self.width(), self.attended());
        let both = queries + keys;
        // The input, its norm, the sum behind attention, its norm, the gradient of the output and that of the second norm; behind
        // these, the gradient of the sum alone. Where ranks share layers, norms and their gradients are those of all tokens.
        let (of_dense, of_experts, of_attention) = match self.tp {
            1 => (6 * rows, 6 * rows, 3 * rows),
            _ => (3 * rows + 4 * tokens, 6 * rows + tokens, 2 * rows + 2 * tokens),
        };
        // Queries, keys, values and output, and the gradients of all four; keys and values once more as the kernel reads them.
        let (attended, differentiated) = (2 * both + 2 * keys, 4 * both + 2 * keys);
        let normed = if self.norms_heads { both } else { 0 };
        let is_kept = self.recompute == Recompute::Nothing;
        let fused = !self.feed_forward_adapted && !self.feed_forward_bias && !self.held.stores_layers;
        let wide = if is_kept && fused { 2 * tokens * self.feed_forward } else { 0 };
        let dense = width * (of_dense * self.hidden + self.feed_forward_activations(tokens)) + self.kept_width() * wide;
        let with_experts = self.experts.map_or(0, |experts| {
            let shared = if self.shared > 0 { tokens * self.hidden } else { 0 };
            let products = if is_kept { self.kept_width() } else { width } * experts.products(rows);
            let stored = self.held.stores_layers;
            let single = 4 * experts.activations_of_one(rows, self.hidden, stored);
            width * (of_experts * self.hidden + shared + experts.activations(rows, self.hidden, is_kept, stored))
                + single
                + products
        });
        let held = width * (tokens * (normed + self.dropped) + rows * self.projected[1]);
        let feed_forward = width * tokens * attended + dense.max(with_experts);
        let gradients = width * tokens * differentiated + self.widened_gradients(tokens);
        held + feed_forward.max(width * of_attention * self.hidden + gradients)
    }

    /// Bytes of attention's gradients, which come in f32 where the model computes in bf16, and are rounded then.
    fn widened_gradients(&self, tokens: u64) -> u64 {
        let (queries, keys) = self.attended();
        if self.width() < 4 { 4 * tokens * (queries + 2 * keys) } else { 0 }
    }

    /// Numbers of the feed-forward part of a layer without experts beside its input and output, as part of [`Self::activations`].
    fn feed_forward_activations(&self, tokens: u64) -> u64 {
        let tile = tokens.min(gated_mlp::TILE as u64);
        // With biases, adapters or stored weights, products are stored of all tokens or of none; such tiles have inputs and outputs
        // of their own.
        let (rows, of_adapters, tiles) = match self.recompute {
            Recompute::Nothing => (tokens, 5, 0),
            _ => (tile, 8, 4 * tile * self.hidden),
        };
        let (wide, tiles) = match (self.feed_forward_adapted, self.feed_forward_bias || self.held.stores_layers) {
            (true, _) => (of_adapters * rows, tiles),
            (false, true) => (6 * rows, tiles),
            _ => (3 * tile, 0),
        };
        tiles + wide * self.feed_forward + rows * self.feed_forward_dropped
    }

    /// Bytes of keys, values and their gradients that are under way, and of heads exchanged for tokens.
    pub(super) fn blocks(&self, tokens: u64) -> Result<u64> {
        let (queries, keys) = self.attended();
        let place = tokens * self.ulysses as u64;
        let kv = self.shares()?.iter().map(|share| share.kv.len()).max().unwrap_or(0) as u64;
        // Keys and values, and their gradients, which are f32 in any type.
        let block = place * kv * (self.dim + self.value_dim) * (self.width() + 4);
        let blocks = match self.strategy {
            Strategy::Ring | Strategy::PassQ => 2.min(self.ring - 1),
            Strategy::BidirectionalRing => 4.min(self.ring - 1),
            // At most: halo fetches parts of them.
            Strategy::AllGather | Strategy::Halo => self.ring - 1,
        };
        let exchanged = if self.ulysses > 1 { 2 * 4 * tokens * 2 * (queries + keys) } else { 0 };
        Ok(blocks * block + exchanged)
    }

    /// Numbers of a token in queries and in keys; where values are of another width, the mean of keys' and theirs.
    pub(super) fn attended(&self) -> (u64, u64) {
        let (heads, kv_heads) = self.head_counts();
        let both = self.dim + self.value_dim;
        (heads * both / 2, kv_heads * both / 2)
    }

    pub(super) fn head_counts(&self) -> (u64, u64) {
        (self.heads.queries.len() as u64, self.heads.key_values.len() as u64)
    }
}
