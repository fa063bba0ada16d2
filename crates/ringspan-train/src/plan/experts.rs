//! Predicts the memory and traffic that a mixture of experts adds to a layer, where experts are chosen evenly.
//!
//! Shape letters: R rows of a rank, C hidden size, E experts, K experts that a token goes to, I a rank's part of an expert's
//! width.

use crate::spec::RunSpec;
use ringspan_candle::ParallelRank;
use ringspan_candle::quantized::forward_scratch;

/// The experts of a model, and what a rank holds of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Experts {
    /// Number of layers with experts.
    pub(super) layers: u64,
    /// Number of experts, E.
    all: u64,
    /// Number of experts per token, K.
    top: u64,
    /// Width of an expert on this rank, I.
    wide: u64,
    /// Number of expert parallel ranks, each with whole experts of its own.
    pub(super) ep: u64,
    /// Number of ranks that share the width of each expert.
    width_ranks: u64,
    /// Whether adapters are trained, whether experts and routers have some, and whether adapters have dropout.
    has_adapters: bool,
    adapted: bool,
    router_adapted: bool,
    dropping: bool,
}

impl Experts {
    /// None for a model without experts.
    pub(super) fn new(spec: &RunSpec) -> Option<Self> {
        let (decoder, ParallelRank { ep: (_, ep), moe_tp: (_, width_ranks), .. }) =
            (&spec.decoder, spec.mesh.parallel_rank(0));
        let wide = decoder.mixture()?.width();
        let layers = 0..decoder.config().num_hidden_layers;
        Some(Self {
            layers: layers.filter(|layer| decoder.is_sparse(*layer)).count() as u64,
            all: decoder.experts() as u64,
            top: (decoder.expert_share_per_token() * decoder.experts() as f64).round() as u64,
            wide: wide.div_ceil(width_ranks) as u64,
            ep: ep as u64,
            width_ranks: width_ranks as u64,
            has_adapters: decoder.lora().is_some(),
            adapted: decoder
                .linear_layers()
                .any(|it| it.is_of_experts() && !it.is_router && decoder.adapter(&it.name).is_some()),
            router_adapted: decoder.linear_layers().any(|it| it.is_router && decoder.adapter(&it.name).is_some()),
            dropping: decoder.lora().is_some_and(|lora| lora.dropout > 0.0),
        })
    }

    /// Number of elements in the results of the gate and up projections, for all experts of a rank.
    pub(super) fn products(&self, rows: u64) -> u64 {
        2 * self.choices(rows) * self.wide
    }

    /// Number of elements in the results of a router, and of its adapter, that are stored for the backward pass.
    pub(super) fn router(&self, rows: u64) -> u64 {
        rows * self.all * if self.router_adapted { 2 } else { 1 }
    }

    /// Number of pairs of a token and a chosen expert that a rank computes: as many come from other ranks as go to them.
    fn choices(&self, rows: u64) -> u64 {
        rows * self.width_ranks * self.top
    }

    /// Number of elements in the feed-forward part of a layer that is recomputed and differentiated, without its input and
    /// output, [`Self::products`], and what a single expert adds. `kept` says that the products are stored for the backward pass,
    /// `stored` that experts stay as their file stores them. The factors are counts of what is there at once, found by the
    /// allocator.
    pub(super) fn activations(&self, rows: u64, hidden: u64, kept: bool, stored: bool) -> u64 {
        let gathered = rows * self.width_ranks;
        // Tokens count on each way that they travel, with their gradients; with adapters, so do outputs. Where products are
        // stored, tokens travel once more, at the same time as the gradients of outputs. Less is there where experts stay as they
        // are stored.
        let ways = match (kept, self.adapted && !stored) {
            (true, _) => 6,
            (false, true) => 4,
            (false, false) => 2,
        };
        let under_way = ways * gathered * hidden;
        let to_widths = if self.width_ranks > 1 { under_way } else { 0 };
        let to_experts = if self.ep > 1 { (self.ranks_of_a_token() * under_way as f64) as u64 } else { 0 };
        let dropped = if self.router_adapted && self.dropping { rows * hidden } else { 0 };
        to_widths + to_experts + 10 * rows * self.all + dropped
    }

    /// Number of elements, always f32, that differentiating one expert takes besides its products: experts are differentiated one
    /// by one.
    pub(super) fn activations_of_one(&self, rows: u64, hidden: u64, stored: bool) -> u64 {
        let gathered = rows * self.width_ranks;
        // All tokens may have chosen the same expert, whose adapters read them.
        let adapted = match (self.adapted, stored) {
            (false, _) => 0,
            (true, false) => 3 * gathered * (hidden + self.wide),
            (true, true) => 3 * gathered * (hidden + self.wide) / 2,
        };
        let even = self.choices(rows) * self.ep / self.all.max(1);
        // Where only adapters are trained, a rank's memory peaks at the last layer, whose router chooses experts less
        // evenly than the first layer's.
        let tokens = if self.has_adapters && !self.adapted { gathered.min(2 * even) } else { even };
        let decoded = if stored { forward_scratch(self.wide as usize, hidden as usize) as u64 } else { 0 };
        adapted + tokens * (4 * hidden + 5 * self.wide) + decoded
    }

    /// Bytes of the feed-forward part's activations on a GPU, where all experts are computed at once, with `width`
    /// bytes per element: at their peak, and of candle's graph alone. Tokens and outputs are weighted and added up in
    /// f32; adapters add `adapted` bytes to the graph per element of a product's result.
    pub(super) fn on_gpu(&self, rows: u64, hidden: u64, width: u64, adapted: u64) -> [u64; 2] {
        const WIDE: u64 = 4;
        let choices = self.choices(rows);
        let router = WIDE * rows * self.all;
        let adapted = adapted * choices * (2 * self.wide + hidden);
        let fullest = 11 * WIDE * choices * hidden + 11 * width * choices * self.wide / 2 + 30 * router;
        let graph = 5 * WIDE * choices * hidden + 3 * width * choices * self.wide + 10 * router;
        // Tokens and outputs while they travel, and the gradients of both.
        let under_way = if self.ep > 1 {
            (10.0 * self.ranks_of_a_token() * (WIDE * rows * self.width_ranks * hidden) as f64) as u64
        } else {
            0
        };
        [fullest + under_way + adapted, graph + under_way / 2 + adapted]
    }

    /// Mean number of ranks that have experts of a token.
    fn ranks_of_a_token(&self) -> f64 {
        let ranks = self.ep as f64;
        ranks * (1.0 - (1.0 - 1.0 / ranks).powi(self.top as i32))
    }

    /// Number of tokens that leave a rank with `rows` rows: each travels once to each rank that has experts of it.
    pub(super) fn tokens_there(&self, rows: u64) -> u64 {
        tokens_there(rows, self.top, self.ep)
    }
}

/// Number of tokens that leave a rank with `rows` rows, where each token has `top` experts on `ep` ranks.
fn tokens_there(rows: u64, top: u64, ep: u64) -> u64 {
    // The division comes last: with one expert per token, less than one other rank has it on average.
    rows * top.min(ep) * (ep - 1) / ep.max(1)
}

#[cfg(test)]
mod tests {
    use super::tokens_there;

    #[test]
    fn tokens_with_one_expert_travel_too() {
        assert_eq!(tokens_there(100, 1, 4), 75);
        assert_eq!(tokens_there(100, 8, 4), 300);
        assert_eq!(tokens_there(100, 2, 1), 0);
    }
}
