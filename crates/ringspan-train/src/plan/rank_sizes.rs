//! The sizes from which memory and traffic are predicted.

use super::{LayerSchedule, experts::Experts, parameter_counts::ParameterCounts};
use crate::{
    config::TrainConfig,
    error::{Result, model_error},
    optimizer::Optimizer,
    spec::RunSpec,
};
use ringspan::schedule::{HeadShare, Pass, TensorSizes};
use ringspan::{Layout, StrategyKind};
use ringspan_candle::shard::ShardSpec;
use ringspan_candle::{DeviceName, Heads, ParallelRank, Precision, Recompute, Unit, stored_activation::Storage};
use ringspan_models::Decoder;

/// Sizes of a model on a rank; each is the maximum over ranks.
#[derive(Clone)]
pub(super) struct Shape {
    pub(super) held: ParameterCounts,
    pub(super) layers: u64,
    pub(super) hidden: u64,
    /// Heads that a rank computes; with tensor parallelism, a share of all.
    pub(super) heads: Heads,
    /// Width of a head of queries and keys, and of a head of values.
    pub(super) dim: u64,
    pub(super) value_dim: u64,
    /// Number of elements per token that attention's linear layers yield: for all tokens, and for this rank's rows.
    pub(super) qkv_elements: [u64; 2],
    /// Number of elements per token in a second copy of queries, made where heads have sinks.
    pub(super) query_copy_for_sinks: u64,
    /// Inner width, on a rank, of feed-forward layers without experts; 0 where all have experts.
    pub(super) feed_forward: u64,
    /// Inner width, on a rank, of the shared experts, which every token visits; 0 where there are none.
    pub(super) shared: u64,
    pub(super) feed_forward_bias: bool,
    pub(super) feed_forward_adapted: bool,
    /// Number of elements per token that come out of those layers of attention that have adapters.
    pub(super) adapted: u64,
    /// Number of elements per token in dropped-out inputs of attention's adapters, and in those of the adapters in a feed-forward
    /// part without experts; 0 without dropout.
    pub(super) dropped: u64,
    pub(super) feed_forward_dropped: u64,
    pub(super) vocabulary: u64,
    /// Whether the embedding is the output head, too.
    pub(super) tied: bool,
    /// Bytes of optimizer state.
    pub(super) state: u64,
    pub(super) ring: u64,
    pub(super) ulysses: usize,
    pub(super) tp: u64,
    pub(super) strategy: StrategyKind,
    pub(super) recompute: Recompute,
    pub(super) storage: Storage,
    /// Whether activations are offloaded from the GPU to the CPU.
    pub(super) offloads: bool,
    /// The type in which the model computes.
    pub(super) precision: Precision,
    /// The type in which a GPU computes; none where the CPU computes.
    pub(super) computes_in: Option<Precision>,
    /// Whether queries and keys are normalised.
    pub(super) norms_heads: bool,
    pub(super) experts: Option<Experts>,
    /// The last layer without experts, and the last layer with experts.
    pub(super) last_of_kind: [Option<u64>; 2],
}

impl Shape {
    pub(super) fn new(config: &TrainConfig, spec: &RunSpec, recompute: Recompute) -> Result<Self> {
        let model = spec.decoder.config();
        let held = ParameterCounts::new(spec, model)?;
        let tp = config.tp;
        // Heads are distributed evenly to within one, and the rank with most query heads has most of everything else.
        let of = |rank| spec.decoder.head_counts().of_rank((rank, tp)).map_err(model_error);
        let of_ranks = (0..tp).map(of).collect::<Result<Vec<_>>>()?;
        let fullest = (0..tp).max_by_key(|rank| of_ranks[*rank].queries.len()).unwrap_or(0);
        let heads = of_ranks[fullest].clone();
        let experts = Experts::new(spec);
        let layers = model.num_hidden_layers as u64;
        let dense = experts.is_none_or(|experts| experts.layers < layers);
        let feed_forward = if dense { model.intermediate_size.div_ceil(tp) } else { 0 };
        let decoder = &spec.decoder;
        // Some layers may have more adapters than others; the rank with most heads has most of their inputs and outputs.
        let fullest = ParallelRank { tp: (fullest, tp), ..ParallelRank::default() };
        let most_of_layers = |of_attention: bool, numbers: &dyn Fn([usize; 2]) -> usize| -> Result<usize> {
            let of_layer = |index: usize| -> Result<usize> {
                let mut sum = 0;
                for linear in decoder.linear_layers_of(Unit::Layer(index)) {
                    let beside = linear.name.contains(".self_attn.") == of_attention && !linear.is_of_experts();
                    if beside && decoder.adapter(&linear.name).is_some() {
                        sum += numbers(linear.sizes_on(fullest).map_err(model_error)?);
                    }
                }
                Ok(sum)
            };
            (0..model.num_hidden_layers).try_fold(0, |most, index| Ok(most.max(of_layer(index)?)))
        };
        let attention = decoder.model().layer(0).attention();
        let [dim, value_dim] = decoder.head_dims().map(|dim| dim as u64);
        let query_copy_for_sinks = if attention.has_sinks() { heads.queries.len() as u64 * dim } else { 0 };
        let (qkv_elements, shared) = (qkv_elements(decoder, fullest)?, shared(decoder, fullest)?);
        let adapted = most_of_layers(true, &|[outputs, _]| outputs)?;
        let drops = decoder.lora().is_some_and(|lora| lora.dropout > 0.0);
        let inputs = |of_attention| if drops { most_of_layers(of_attention, &|[_, inputs]| inputs) } else { Ok(0) };
        let (dropped, feed_forward_dropped) = (inputs(true)?, inputs(false)?);
        let state = Optimizer::state_bytes(&config.optimizer, held.trained as usize) as u64;
        Ok(Self {
            held,
            layers,
            hidden: model.hidden_size as u64,
            heads,
            adapted: adapted as u64,
            dropped: dropped as u64,
            feed_forward_dropped: if dense { feed_forward_dropped as u64 } else { 0 },
            dim,
            value_dim,
            qkv_elements,
            query_copy_for_sinks,
            feed_forward: feed_forward as u64,
            shared,
            feed_forward_adapted: spec.shapes.keys().any(|name| name.contains("_proj.lora_") && name.contains(".mlp.")),
            feed_forward_bias: spec.shapes.keys().any(|name| name.ends_with("down_proj.bias")),
            vocabulary: model.vocab_size.div_ceil(tp) as u64,
            tied: model.tie_word_embeddings,
            state,
            ring: config.ring as u64,
            ulysses: config.ulysses,
            tp: tp as u64,
            strategy: config.strategy,
            recompute,
            storage: config.activations,
            offloads: config.offload_activations,
            precision: config.dtype,
            computes_in: (config.device != DeviceName::Cpu).then_some(config.dtype),
            norms_heads: spec.shapes.keys().any(|name| name.ends_with("q_norm.weight")),
            experts,
            last_of_kind: [false, true].map(|sparse| {
                let of_kind = |index: &usize| decoder.is_sparse(*index) == sparse;
                (0..model.num_hidden_layers).rev().find(of_kind).map(|index| index as u64)
            }),
        })
    }

    /// This shape with activations offloaded to the CPU.
    pub(super) fn offloaded(&self) -> Self {
        Self { offloads: true, ..self.clone() }
    }

    /// This shape with all activations recomputed.
    pub(super) fn with_full_recompute(&self) -> Self {
        Self { recompute: Recompute::Full, ..self.clone() }
    }

    /// The heads that each rank of the context-parallel group computes.
    pub(super) fn shares(&self) -> Result<Vec<HeadShare>> {
        let (heads, kv_heads) = (self.heads.queries.len(), self.heads.key_values.len());
        Ok(HeadShare::all(heads, kv_heads, (self.ring as usize, self.ulysses).into())?)
    }

    /// Bytes that the busiest rank sends, by purpose: in the passes of `micro_batches` micro-batches, and in `counting` more
    /// forward passes, which end after the last layer.
    pub(super) fn traffic(
        &self,
        layout: &Layout,
        schedules: &[LayerSchedule],
        (micro_batches, counting): (usize, usize),
    ) -> Result<Vec<(&'static str, u64)>> {
        let (times, counting) = (micro_batches as u64, counting as u64);
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
        let ParameterCounts { gathered, gathered_by_layers, cut, summed, .. } = self.held;
        let mut traffic = vec![
            ("attention forward", forward * (forward_times * times + counting)),
            ("attention backward", backward * times),
            ("parameters", 4 * (gathered * times + gathered_by_layers * counting)),
            ("gradients", 4 * cut * times + 4 * summed),
        ];
        if self.tp > 1 {
            // A forward pass alone is a third of forward pass, recomputation and backward pass.
            traffic.push(("rows of shared layers", self.shared_layers(layout) * (3 * times + counting) / 3));
        }
        if let Some(experts) = self.experts.filter(|experts| experts.ep > 1) {
            let way = self.to_experts(&experts, layout);
            let ways = self.ways_to_experts() * times + 2 * counting;
            traffic.push(("tokens to experts", way * ways));
        }
        Ok(traffic)
    }

    /// Number of times that tokens travel to experts or back in a micro-batch: both ways in the forward pass, the recomputation
    /// and the backward pass. Where products are stored, nothing comes back in the recomputation.
    fn ways_to_experts(&self) -> u64 {
        if self.recompute == Recompute::Nothing { 5 } else { 6 }
    }

    /// Bytes of all layers' tokens on one way, where experts are chosen evenly: a token travels once to each rank that has
    /// experts of it.
    fn to_experts(&self, experts: &Experts, layout: &Layout) -> u64 {
        let tokens = (0..layout.ranks()).map(|rank| layout.tokens(rank)).max().unwrap_or(0) as u64;
        let there = experts.tokens_there(tokens.div_ceil(self.tp));
        experts.layers * self.width() * there * self.hidden
    }

    /// Bytes that a tensor-parallel rank sends in a micro-batch: rows are gathered before attention and before the feed-forward
    /// part, and scattered after each, in forward pass, recomputation and backward pass. Embedding and head do so once.
    fn shared_layers(&self, layout: &Layout) -> u64 {
        let tokens = (0..layout.ranks()).map(|rank| layout.tokens(rank)).max().unwrap_or(0) as u64;
        let once = self.width() * tokens * self.hidden * (self.tp - 1) / self.tp;
        let with_experts = self.experts.map_or(0, |experts| experts.layers);
        once * ((2 * self.layers - with_experts) * 2 * 3 + 4)
    }

    fn sizes(&self) -> TensorSizes {
        let (heads, kv_heads) = (self.heads.queries.len(), self.heads.key_values.len());
        let (dim, v_dim) = (self.dim as usize, self.value_dim as usize);
        TensorSizes { heads, kv_heads, dim, v_dim, wire: self.width() as usize, bias_heads: 0 }
    }
}

/// Number of elements per token that the linear layers of a layer's attention yield: those of sharded layers, for all tokens of
/// the tensor-parallel group, and those of replicated layers, for a rank's own rows.
fn qkv_elements(decoder: &Decoder, rank: ParallelRank) -> Result<[u64; 2]> {
    let (mut of_tokens, mut of_rows) = (0, 0);
    for linear in decoder.linear_layers_of(Unit::Layer(0)).iter().filter(|it| it.name.contains(".self_attn.")) {
        let [outputs, _] = linear.sizes_on(rank).map_err(model_error)?;
        *if linear.shard == ShardSpec::Replicated { &mut of_rows } else { &mut of_tokens } += outputs as u64;
    }
    Ok([of_tokens, of_rows])
}

/// The inner width, on a rank, of the shared experts in a layer with experts.
fn shared(decoder: &Decoder, rank: ParallelRank) -> Result<u64> {
    let sparse = (0..decoder.config().num_hidden_layers).find(|layer| decoder.is_sparse(*layer));
    let Some(sparse) = sparse else { return Ok(0) };
    let mut gate_and_up = 0;
    for linear in decoder.linear_layers_of(Unit::Layer(sparse)) {
        let is_of_attention = linear.name.contains(".self_attn.");
        if !is_of_attention && !linear.is_of_experts() && !matches!(linear.shard, ShardSpec::Columns(_)) {
            gate_and_up += linear.sizes_on(rank).map_err(model_error)?[0] as u64;
        }
    }
    Ok(gate_and_up / 2)
}
