//! The sizes that memory and traffic follow from.

use super::LayerSchedule;
use crate::{
    config::TrainConfig,
    error::Result,
    optimizer::Optimizer,
    setup::{Setup, model_error},
};
use ringspan::schedule::{HeadShare, Pass, Sizes};
use ringspan::{Layout, Strategy};
use ringspan_candle::{gated_mlp, kept::Storage};
use ringspan_models::{Config, Decoder, Heads, Place, Recompute, Unit};
use std::collections::BTreeSet;

/// Tokens whose logits exist at once; `ringspan_candle::loss` works in chunks of this size.
const LOSS_CHUNK: u64 = 512;

/// Of the rank that has most of each.
pub(super) struct Shape {
    held: Held,
    /// Ranks that hold copies of the model.
    copies: u64,
    layers: u64,
    hidden: u64,
    /// Heads of a rank, where ranks share layers.
    heads: Heads,
    dim: u64,
    feed_forward: u64,
    feed_forward_bias: bool,
    vocabulary: u64,
    /// Bytes of the optimiser's state.
    state: u64,
    ring: u64,
    ulysses: usize,
    tp: u64,
    strategy: Strategy,
    recompute: Recompute,
    activations: Storage,
    /// Whether layers have experts.
    sparse: bool,
}

impl Shape {
    pub(super) fn new(config: &TrainConfig, setup: &Setup, model: &Config) -> Result<Self> {
        let held = Held::new(setup, model)?;
        let tp = config.tp;
        // Shares are equal to within one, and one of them has the most of everything that is dealt.
        let of = |rank| Heads::new(model, (rank, tp)).map_err(model_error);
        let heads = (0..tp).map(of).collect::<Result<Vec<_>>>()?.into_iter().max_by_key(|heads| heads.queries.len());
        let state = Optimizer::state_bytes(&config.method, held.trained as usize) as u64;
        Ok(Self {
            held,
            copies: config.dp_replicate as u64,
            layers: model.num_hidden_layers as u64,
            hidden: model.hidden_size as u64,
            heads: heads
                .unwrap_or(Heads { queries: 0..model.num_attention_heads, key_values: 0..model.num_key_value_heads() }),
            dim: model.head_dim() as u64,
            feed_forward: model.feed_forward_width().div_ceil(tp) as u64,
            feed_forward_bias: setup.shapes.keys().any(|name| name.ends_with("down_proj.bias")),
            vocabulary: model.vocab_size.div_ceil(tp) as u64,
            state,
            ring: config.ring as u64,
            ulysses: config.ulysses,
            tp: tp as u64,
            strategy: config.strategy,
            recompute: config.recompute,
            activations: config.activations,
            sparse: setup.decoder.experts() > 0,
        })
    }

    /// How many heads each place of the cp group gets.
    pub(super) fn shares(&self) -> Result<Vec<HeadShare>> {
        let (heads, kv_heads) = (self.heads.queries.len(), self.heads.key_values.len());
        Ok(HeadShare::all(heads, kv_heads, (self.ring as usize, self.ulysses).into())?)
    }

    /// Of the rank with most tokens. What the backward needs of each layer stays; of one layer at a time everything is
    /// there, with its gradient, the feed-forward layer in tiles; attention adds the blocks of keys, values and their
    /// gradients that are under way. Where ranks share layers, each keeps its rows of what lies between them.
    pub(super) fn memory(&self, layout: &Layout) -> Result<Vec<(&'static str, u64)>> {
        let tokens = (0..layout.ranks()).map(|rank| layout.tokens(rank)).max().unwrap_or(0) as u64;
        let rows = tokens.div_ceil(self.tp);
        let place = tokens * self.ulysses as u64;
        let kv = self.shares()?.iter().map(|s| s.kv.len()).max().unwrap_or(0) as u64;
        let block = place * 2 * kv * self.dim * 4;
        let blocks = match self.strategy {
            Strategy::Ring | Strategy::PassQ => 2.min(self.ring - 1),
            Strategy::BidirectionalRing => 4.min(self.ring - 1),
            // At most: halo fetches parts of them.
            Strategy::AllGather | Strategy::Halo => self.ring - 1,
        };
        let (heads, kv_heads) = (self.heads.queries.len() as u64, self.heads.key_values.len() as u64);
        // Numbers of a layer: of this rank's rows, and of the rows of all that share the layer.
        let (of_rows, of_tokens) = match self.tp {
            1 => (7 * self.hidden, 3 * (heads + kv_heads) * self.dim),
            _ => (5 * self.hidden, 4 * self.hidden + 3 * (heads + kv_heads) * self.dim),
        };
        let layer = rows * of_rows + tokens * of_tokens;
        let attended = heads * self.dim;
        let (log_sums, numbers) = match self.recompute {
            Recompute::Full => (0, rows * self.hidden),
            Recompute::KeepAttention => (heads, rows * self.hidden + tokens * attended),
            Recompute::Nothing if self.keeps_graphs() => (heads, layer),
            Recompute::Nothing => {
                let of_token = 2 * (attended + kv_heads * self.dim) + self.hidden + 2 * self.feed_forward;
                (heads, rows * self.hidden + tokens * of_token)
            }
        };
        let bytes = if self.keeps_graphs() { 4 } else { self.activations.bytes() as u64 };
        let kept = (4 * tokens * log_sums + bytes * numbers) * self.layers + 4 * rows * self.hidden;
        // The fused feed-forward layer knows no biases.
        let wide_tokens = if self.feed_forward_bias { 2 * tokens } else { tokens.min(gated_mlp::TILE as u64) };
        let logits = tokens.min(LOSS_CHUNK) * self.vocabulary * 4;
        let Held { parameters, trained, largest, whole, .. } = self.held;
        Ok(vec![
            ("parameters", 4 * parameters),
            ("gradients", 4 * trained),
            ("optimiser state", self.state),
            ("a layer or the head, whole, with gradients", 4 * 4 * largest),
            ("weights kept of all layers", if self.keeps_graphs() { 4 * whole } else { 0 }),
            ("kept of the layers", kept),
            ("one layer, with gradients", (2 * layer + 3 * wide_tokens * self.feed_forward) * 4),
            ("blocks of other ranks", 2 * blocks * block),
            ("logits of a chunk", logits),
        ])
    }

    /// Of the rank that sends most.
    pub(super) fn traffic(
        &self,
        layout: &Layout,
        schedules: &[LayerSchedule],
        micro_batches: usize,
    ) -> Result<Vec<(&'static str, u64)>> {
        let times = micro_batches as u64;
        let (mut forward, mut backward) = (0, 0);
        let forward_times = if self.recompute == Recompute::Full { 2 } else { 1 };
        for rank in 0..layout.ranks() {
            let of = |pass| -> Result<u64> {
                let all = schedules.iter().map(|s| Ok(s.layers * s.schedule.bytes_sent(pass, rank, &self.sizes())?));
                all.sum()
            };
            forward = forward.max(of(Pass::Forward)?);
            backward = backward.max(of(Pass::Backward)?);
        }
        let Held { trained, gathered, cut, .. } = self.held;
        let over_copies = 8 * trained * (self.copies - 1) / self.copies;
        let mut traffic = vec![
            ("attention forward", forward_times * forward * times),
            ("attention backward", backward * times),
            ("parameters", 4 * gathered * times),
            ("gradients", 4 * cut * times + over_copies),
        ];
        if self.tp > 1 {
            traffic.push(("rows of shared layers", self.shared_layers(layout) * times));
        }
        Ok(traffic)
    }

    /// Two layers in one, attention and feed-forward part, each with its rows gathered before and dealt behind: forward,
    /// again where it is computed again, and backward. Embedding and head do the same once.
    fn shared_layers(&self, layout: &Layout) -> u64 {
        let tokens = (0..layout.ranks()).map(|rank| layout.tokens(rank)).max().unwrap_or(0) as u64;
        let once = 4 * tokens * self.hidden * (self.tp - 1) / self.tp;
        let passes = if self.keeps_graphs() { 2 } else { 3 };
        once * (self.layers * 4 * passes + 4)
    }

    /// Whether layers are kept with all that their operations read, as those with experts are.
    fn keeps_graphs(&self) -> bool {
        self.sparse && self.recompute == Recompute::Nothing
    }

    fn sizes(&self) -> Sizes {
        let (heads, kv_heads, dim) = (self.heads.queries.len(), self.heads.key_values.len(), self.dim as usize);
        Sizes { heads, kv_heads, dim, v_dim: dim, wire: 4 }
    }
}

/// Parameters of the rank that has most of them, in numbers.
struct Held {
    /// Of its shards.
    parameters: u64,
    /// Of its shards, those that are trained.
    trained: u64,
    /// Its portions of the largest unit.
    largest: u64,
    /// Its portions of all units.
    whole: u64,
    /// What it sends of its shards in a micro-batch.
    gathered: u64,
    /// What it sends of its gradients in a micro-batch.
    cut: u64,
}

impl Held {
    fn new(setup: &Setup, model: &Config) -> Result<Self> {
        let (decoder, mesh) = (&setup.decoder, &setup.mesh);
        let mut most = Self { parameters: 0, trained: 0, largest: 0, whole: 0, gathered: 0, cut: 0 };
        let mut seen: BTreeSet<Place> = BTreeSet::new();
        for (rank, place) in mesh.places().iter().enumerate().filter(|(_, place)| seen.insert(**place)) {
            debug_assert_eq!(mesh.place(rank), *place);
            let own = Self::of(rank, setup, decoder, model)?;
            most = Self {
                parameters: most.parameters.max(own.parameters),
                trained: most.trained.max(own.trained),
                largest: most.largest.max(own.largest),
                whole: most.whole.max(own.whole),
                gathered: most.gathered.max(own.gathered),
                cut: most.cut.max(own.cut),
            };
        }
        Ok(most)
    }

    fn of(rank: usize, setup: &Setup, decoder: &Decoder, model: &Config) -> Result<Self> {
        let sharing = &setup.mesh.sharing;
        let mut own = Self { parameters: 0, trained: 0, largest: 0, whole: 0, gathered: 0, cut: 0 };
        for unit in decoder.units() {
            let times = match unit {
                Unit::Layer(_) => 2,
                Unit::Embedding if model.tie_word_embeddings => 2,
                Unit::Embedding | Unit::Head => 1,
            };
            let mut of_unit = 0;
            for trained in [true, false] {
                for (family, flat) in sharing.flats(decoder, unit, rank, trained)?.iter().enumerate() {
                    let (whole, ranks) = (flat.len() as u64, sharing.shard(rank, family).1 as u64);
                    let shard = whole.div_ceil(ranks);
                    of_unit += whole;
                    own.parameters += shard;
                    own.gathered += times * shard * (ranks - 1);
                    if trained {
                        own.trained += shard;
                        own.cut += whole - whole / ranks;
                    }
                }
            }
            own.largest = own.largest.max(of_unit);
            own.whole += of_unit;
        }
        Ok(own)
    }
}
