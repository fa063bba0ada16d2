//! What a run is about to do, in numbers, before it does it.

use crate::{
    config::TrainConfig,
    data::Batch,
    error::{Error, Result},
    observer::grouped,
    optimizer::{Method, Optimizer},
    rank::mesh,
    setup::Setup,
};
use ringspan::schedule::{HeadShare, Pass, Sizes};
use ringspan::{Layout, Schedule, Strategy};
use ringspan_candle::gated_mlp;
use ringspan_models::{Config, Recompute, Unit};
use std::fmt;

/// Rings up to this size are drawn step by step; larger drawings hide the rest of the plan.
const DRAWN_RING: usize = 4;

/// The plan of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// The model, in words.
    pub model: String,
    /// Why the model may make little of its sequences, in words; empty if nothing speaks against it.
    pub warning: String,
    /// What is trained beside the model instead of it, in words; empty if nothing is.
    pub adapters: String,
    /// The data, in words.
    pub data: String,
    /// The mesh, in words.
    pub mesh: String,
    /// Who holds what and how it travels, in words.
    pub attention: String,
    /// Who holds which parameters, in words; empty where every rank holds all.
    pub sharding: String,
    /// The schedule of the first batch, drawn; empty for one rank and for large rings.
    pub schedule: String,
    /// Optimiser and learning rate, in words.
    pub optimizer: String,
    /// Output, in words.
    pub saving: String,
    /// Tokens of a step, over all ranks.
    pub tokens_per_step: u64,
    /// Tokens of the first micro-batch on each rank.
    pub tokens_per_rank: Vec<usize>,
    /// Predicted bytes of the fullest rank, by part.
    pub memory: Vec<(&'static str, u64)>,
    /// Predicted bytes that the busiest rank sends in a step, by purpose.
    pub traffic: Vec<(&'static str, u64)>,
    /// Steps in all.
    pub steps: u64,
    /// Steps that are done.
    pub first_step: u64,
}

impl Plan {
    pub(crate) fn new(config: &TrainConfig, setup: &Setup, model: &Config) -> Result<Self> {
        let mut plan = Self {
            model: match &config.model {
                Some(path) => format!("{}, from {}", setup.model.summary, path.display()),
                None => format!("{}, new (seed {})", setup.model.summary, config.seed),
            },
            data: setup.data.summary.clone(),
            steps: config.lr.steps,
            first_step: setup.first_step,
            saving: match config.save_every {
                Some(n) => format!("{}, a checkpoint every {n} steps", config.out.display()),
                None => format!("{}, one checkpoint at the end", config.out.display()),
            },
            ..Self::default()
        };
        let TrainConfig { dp_replicate, dp_shard, ring, ulysses, .. } = *config;
        let axes = format!("dp_replicate {dp_replicate} x dp_shard {dp_shard} x ring {ring} x ulysses {ulysses}");
        let threads = if config.threads == 1 { "1 thread".into() } else { format!("{} threads", config.threads) };
        let place = match config.local_ranks {
            None => "ranks in this process".into(),
            Some(local) => format!("processes, {local} of them on this machine"),
        };
        plan.mesh = format!("{axes} = {} {place}, {threads} each", config.ranks());
        plan.optimizer = optimizer_words(config);
        plan.warning = model.beyond(config.sequence_length).map(|beyond| beyond.to_string()).unwrap_or_default();
        if let Some(lora) = &config.lora {
            let (rank, alpha, targets) = (lora.rank, lora.alpha, lora.targets.join(", "));
            plan.adapters = format!("LoRA of rank {rank}, alpha {alpha}, beside {targets}; the model stays as it is");
        }

        let Some(batch) = setup.first_batch(config.grad_accumulation) else { return Ok(plan) };
        let batches = setup.feed.clone().next_step(config.grad_accumulation);
        plan.tokens_per_step = batches.iter().map(Batch::real_tokens).sum();
        let cp = config.ring * config.ulysses;
        let mut first: Option<(Layout, Vec<LayerSchedule>)> = None;
        for replica in 0..config.data_ranks() {
            let part = batch.part(replica, config.data_ranks());
            let layout = Layout::new(config.layout, &part.documents()?, cp)?;
            plan.tokens_per_rank.extend((0..cp).map(|rank| layout.tokens(rank)));
            if replica == 0 {
                let schedules = layer_schedules(config, model, &layout)?;
                first = Some((layout, schedules));
            }
        }
        let Some((layout, schedules)) = first else { return Ok(plan) };
        plan.attention = match (config.ring, cp) {
            (_, 1) => "whole sequences on each rank".into(),
            (1, _) => format!("layout {}, heads exchanged (ulysses)", layout_words(config)),
            _ => format!("layout {}, keys and values by {}", layout_words(config), config.strategy),
        };
        if cp > 1 && config.ring <= DRAWN_RING {
            let drawn = schedules.iter().map(|LayerSchedule { schedule, layers }| format!("{layers} x {schedule}"));
            plan.schedule = drawn.collect::<Vec<_>>().join("\n");
        }
        let shares = HeadShare::all(
            model.num_attention_heads,
            model.num_key_value_heads(),
            (config.ring, config.ulysses).into(),
        )?;
        plan.sharding = match config.sharers() {
            1 => String::new(),
            n => format!("parameters, gradients and optimiser state cut over {n} ranks, gathered layer by layer"),
        };
        let shape = Shape::new(config, setup, model);
        plan.memory = shape.memory(&layout, &shares);
        plan.traffic = shape.traffic(&layout, &schedules, batches.len())?;
        debug_assert_eq!(mesh(config)?.world(), config.ranks());
        Ok(plan)
    }

    /// Bytes of the fullest rank.
    #[must_use]
    pub fn rank_bytes(&self) -> u64 {
        self.memory.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Refuses a run that cannot fit into the memory that is free, where the system tells.
    pub(crate) fn check_memory(&self, config: &TrainConfig) -> Result<()> {
        let here = config.local_ranks.unwrap_or(self.tokens_per_rank.len());
        let needed = self.rank_bytes() * here as u64;
        match available_memory() {
            Some(free) if needed > free => Err(Error::Settings(format!(
                "this needs about {} ({} ranks of up to {}), but only {} of memory is free: lower --sequence-length, \
                 --batch-size or the number of ranks on this machine\n{self}",
                bytes(needed),
                here,
                bytes(self.rank_bytes()),
                bytes(free)
            ))),
            _ => Ok(()),
        }
    }
}

fn layout_words(config: &TrainConfig) -> String {
    config.layout.to_string()
}

fn optimizer_words(config: &TrainConfig) -> String {
    let method = match config.method {
        Method::AdamW { beta1, beta2, weight_decay, .. } => {
            format!("adamw (betas {beta1}, {beta2}; weight decay {weight_decay})")
        }
        Method::Sgd { momentum, weight_decay } => format!("sgd (momentum {momentum}; weight decay {weight_decay})"),
    };
    let clip = config.grad_clip.map_or_else(|| "no clipping".into(), |c| format!("gradients clipped to norm {c}"));
    format!("{method}, lr {} {} after {} steps of warm-up, {clip}", config.lr.peak, config.lr.decay, config.lr.warmup)
}

/// The sizes that memory and traffic follow from.
struct Shape {
    parameters: u64,
    /// Parameters that are trained.
    trained: u64,
    /// Parameters of the largest unit.
    largest: u64,
    /// Parameters that a micro-batch gathers, counted as often as it does.
    gathered: u64,
    /// Ranks that share a copy of the parameters.
    sharers: u64,
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    dim: u64,
    feed_forward: u64,
    feed_forward_bias: bool,
    vocabulary: u64,
    state: u64,
    ranks: u64,
    ring: u64,
    ulysses: usize,
    strategy: Strategy,
    recompute: Recompute,
}

impl Shape {
    fn new(config: &TrainConfig, setup: &Setup, model: &Config) -> Self {
        let parameters: usize = setup.shapes.values().map(|shape| shape.iter().product::<usize>()).sum();
        let decoder = &setup.decoder;
        let size = |unit| -> usize {
            decoder.unit_shapes(unit).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
        };
        let again = |unit| match unit {
            Unit::Layer(_) => 2,
            Unit::Embedding if model.tie_word_embeddings => 2,
            Unit::Embedding | Unit::Head => 1,
        };
        let of_name = |(name, shape): (&String, &Vec<usize>)| -> usize {
            if decoder.trains(name) { shape.iter().product() } else { 0 }
        };
        let trained: usize = setup.shapes.iter().map(of_name).sum();
        Self {
            parameters: parameters as u64,
            trained: trained as u64,
            largest: decoder.units().map(size).max().unwrap_or(0) as u64,
            gathered: decoder.units().map(|unit| again(unit) * size(unit)).sum::<usize>() as u64,
            sharers: config.sharers() as u64,
            layers: model.num_hidden_layers as u64,
            hidden: model.hidden_size as u64,
            heads: model.num_attention_heads as u64,
            kv_heads: model.num_key_value_heads() as u64,
            dim: model.head_dim() as u64,
            feed_forward: model.feed_forward_width() as u64,
            feed_forward_bias: setup.shapes.keys().any(|name| name.ends_with("down_proj.bias")),
            vocabulary: model.vocab_size as u64,
            state: Optimizer::state_bytes(&config.method, trained) as u64,
            ranks: config.ranks() as u64,
            ring: config.ring as u64,
            ulysses: config.ulysses,
            strategy: config.strategy,
            recompute: config.recompute,
        }
    }

    /// Of the rank with most tokens. What the backward needs of each layer stays; of one layer at a time everything is
    /// there, with its gradient, the feed-forward layer in tiles; attention adds the blocks of keys, values and their gradients that are under way.
    fn memory(&self, layout: &Layout, shares: &[HeadShare]) -> Vec<(&'static str, u64)> {
        let tokens = (0..layout.ranks()).map(|rank| layout.tokens(rank)).max().unwrap_or(0) as u64;
        let place = tokens * self.ulysses as u64;
        let kv = shares.iter().map(|s| s.kv.len()).max().unwrap_or(0) as u64;
        let block = place * 2 * kv * self.dim * 4;
        let blocks = match self.strategy {
            Strategy::Ring | Strategy::PassQ => 2.min(self.ring - 1),
            Strategy::BidirectionalRing => 4.min(self.ring - 1),
            // At most: halo fetches parts of them.
            Strategy::AllGather | Strategy::Halo => self.ring - 1,
        };
        let layer = 7 * self.hidden + 3 * (self.heads + self.kv_heads) * self.dim;
        let kept = match self.recompute {
            Recompute::Full => self.hidden,
            Recompute::KeepAttention => self.hidden + self.heads * (self.dim + 1),
            Recompute::Nothing => layer + self.heads,
        };
        // The fused feed-forward layer knows no biases.
        let wide_tokens = if self.feed_forward_bias { 2 * tokens } else { tokens.min(gated_mlp::TILE as u64) };
        let logits = tokens.min(LOSS_CHUNK) * self.vocabulary * 4;
        vec![
            ("parameters", (4 * self.parameters).div_ceil(self.sharers)),
            ("gradients", (4 * self.trained).div_ceil(self.sharers)),
            ("optimiser state", self.state.div_ceil(self.sharers)),
            ("a layer or the head, whole, with gradients", 4 * 4 * self.largest),
            ("weights kept of all layers", if self.recompute == Recompute::Nothing { 4 * self.parameters } else { 0 }),
            ("kept of the layers", tokens * 4 * (kept * self.layers + self.hidden)),
            ("one layer, with gradients", (2 * tokens * layer + 3 * wide_tokens * self.feed_forward) * 4),
            ("blocks of other ranks", 2 * blocks * block),
            ("logits of a chunk", logits),
        ]
    }

    /// Of the rank that sends most.
    fn traffic(
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
        Ok(vec![
            ("attention forward", forward_times * forward * times),
            ("attention backward", backward * times),
            ("parameters", 4 * self.gathered * times * (self.sharers - 1) / self.sharers),
            ("gradients", self.gradients(times)),
        ])
    }

    fn sizes(&self) -> Sizes {
        let [heads, kv_heads, dim] = [self.heads, self.kv_heads, self.dim].map(|size| size as usize);
        Sizes { heads, kv_heads, dim, v_dim: dim, wire: 4 }
    }

    /// Cut over the ranks that share a copy in every micro-batch, and summed over the copies in the end.
    fn gradients(&self, micro_batches: u64) -> u64 {
        let (sharers, copies) = (self.sharers, self.ranks / self.sharers);
        let cut = 4 * self.trained * (sharers - 1) / sharers;
        micro_batches * cut + 8 * self.trained / sharers * (copies - 1) / copies
    }
}

/// The schedule of the layers that share a mask.
struct LayerSchedule {
    schedule: Schedule,
    layers: u64,
}

fn layer_schedules(config: &TrainConfig, model: &Config, layout: &Layout) -> Result<Vec<LayerSchedule>> {
    let mut all: Vec<LayerSchedule> = Vec::new();
    for mask in (0..model.num_hidden_layers).map(|layer| model.mask(layer)) {
        if let Some(same) = all.iter_mut().find(|other| *other.schedule.mask() == mask) {
            same.layers += 1;
            continue;
        }
        let schedule = Schedule::new(config.strategy, layout, layout, &mask, (config.ring, config.ulysses))?;
        all.push(LayerSchedule { schedule, layers: 1 });
    }
    Ok(all)
}

/// Tokens whose logits exist at once; `ringspan_candle::loss` works in chunks of this size.
const LOSS_CHUNK: u64 = 512;

/// 1536 as "1.5 KiB".
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Free memory, where the system says so in the Linux way.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes * 1024)
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = |list: &[(&str, u64)]| {
            let shown: Vec<String> =
                list.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {}", bytes(*n))).collect();
            shown.join(", ")
        };
        let total = |list: &[(&str, u64)]| bytes(list.iter().map(|(_, n)| n).sum());
        writeln!(f, "model      {}", self.model)?;
        if !self.warning.is_empty() {
            writeln!(f, "warning    {}", self.warning)?;
        }
        if !self.adapters.is_empty() {
            writeln!(f, "adapters   {}", self.adapters)?;
        }
        writeln!(f, "data       {}", self.data)?;
        writeln!(f, "mesh       {}", self.mesh)?;
        writeln!(f, "attention  {}", self.attention)?;
        for line in self.schedule.lines() {
            writeln!(f, "           {line}")?;
        }
        if !self.sharding.is_empty() {
            writeln!(f, "sharding   {}", self.sharding)?;
        }
        let most = self.tokens_per_rank.iter().max().unwrap_or(&0);
        let least = self.tokens_per_rank.iter().min().unwrap_or(&0);
        let each = if most == least { format!("{most} on each rank") } else { format!("{least} to {most} on a rank") };
        writeln!(f, "tokens     {} a step, {each} at a time", grouped(self.tokens_per_step))?;
        writeln!(f, "memory     about {} a rank: {}", total(&self.memory), parts(&self.memory))?;
        if self.tokens_per_rank.len() > 1 {
            writeln!(f, "sent       about {} a step by a rank: {}", total(&self.traffic), parts(&self.traffic))?;
        }
        writeln!(f, "optimiser  {}", self.optimizer)?;
        match self.first_step {
            0 => writeln!(f, "steps      {}", self.steps)?,
            done => writeln!(f, "steps      {} to {}, resumed", done + 1, self.steps)?,
        }
        write!(f, "output     {}", self.saving)
    }
}
