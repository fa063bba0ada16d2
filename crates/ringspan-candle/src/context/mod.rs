//! Attention for a model whose tokens are distributed over a group of ranks.
//!
//! Any candle model can use a [`Context`]: it [shards](Context::shard) tensors of whole sequences, computes
//! [attention](Context::attention) over the tokens of all ranks, and [sums gradients](Context::all_reduce_gradients). A
//! complete program is the page of [this crate](crate). The layers and models of this project take the context as an
//! [`Attend`].

mod batch;
mod builder;
mod heads;
mod parameters;

pub use builder::ContextBuilder;
pub use heads::QkvFormat;

use crate::attend::{Attend, AttentionInputs};
use crate::attention::{SavedAttention, attention, attention_saving};
use crate::dropout::InputDropout;
use crate::experts::{Experts, Local};
use crate::tensor_parallel::TensorParallel;
use candle_core::{Result, Tensor};
use ringspan::attention::Group;
use ringspan::schedule::{Machine, Pass, StrategyChoice, TensorSizes};
use ringspan::{Layout, Mask, Schedule, Score, StrategyKind};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// This rank's tokens of a batch, and the group through which they attend to the tokens of other ranks.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use ringspan::{Mask, World};
/// use ringspan_candle::Context;
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// // One sequence of 7 tokens with 2 heads of width 4: every query sees the keys up to its own, on whatever rank they are.
/// let values = Tensor::arange(0f32, 56.0, &Device::Cpu)?.reshape((1, 7, 2, 4))?;
/// let means = World::threads(3)?.run(|rank| {
///     let context = Context::builder(rank).batch(1, 7).mask(Mask::causal()).build()?;
///     let v = context.shard(&values)?;                                   // [1, 7, 2, 4] to [1, T, 2, 4]
///     let zeros = v.zeros_like()?;                                       // equal scores: attention is the mean
///     let whole = context.unshard(&context.attention(&zeros, &zeros, &v)?)?;
///     Ok::<_, Error>(whole.narrow(2, 0, 1)?.narrow(3, 0, 1)?.flatten_all()?.to_vec1::<f32>()?)
/// })?;
/// let rounded: Vec<f32> = means[0].iter().map(|mean| mean.round()).collect();
/// assert_eq!(rounded, [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0]);
/// assert_eq!(means[0], means[2]);                                          // the same bits on every rank
/// # Ok::<_, Error>(())
/// ```
pub struct Context {
    group: Arc<Group>,
    /// Which rank holds which queries, and which keys: the same layout but for cross attention.
    layout: Arc<Layout>,
    key_layout: Arc<Layout>,
    strategy: StrategyChoice,
    /// Speeds by which [`StrategyChoice::Auto`] chooses.
    machine: Machine,
    head_chunks: usize,
    /// The mask and the tensor format of [`attention`](Self::attention).
    mask: Mask,
    qkv_format: QkvFormat,
    positions: Vec<usize>,
    length: usize,
    experts: Arc<dyn Experts + Send + Sync>,
    tensor_parallel: TensorParallel,
    dropout: Option<InputDropout>,
    /// Layers share masks and planning takes time, so each schedule is made once.
    schedules: Mutex<HashMap<ScheduleKey, Arc<Schedule>>>,
}

/// The inputs that a schedule depends on: the mask, and for a strategy that is chosen also the sizes and the passes.
type ScheduleKey = (Mask, Option<(TensorSizes, bool)>);

impl Context {
    /// A context for tokens that are distributed over the ranks of `group` as `layout` says, for models of this project;
    /// [`builder`](Self::builder) has everything that can be set.
    ///
    /// # Errors
    /// A layout for a number of ranks other than the size of the group.
    pub fn new(group: Arc<Group>, layout: Arc<Layout>, strategy: StrategyKind) -> Result<Self> {
        if layout.ranks() != group.size() {
            candle_core::bail!(
                "the layout distributes tokens to {} ranks, the group has {}",
                layout.ranks(),
                group.size()
            );
        }
        let positions = layout.positions(group.rank());
        let spans = layout.documents().iter().flat_map(|document| &document.spans);
        let length = spans.map(|span| span.end).max().unwrap_or(0);
        Ok(Self {
            group,
            key_layout: layout.clone(),
            layout,
            strategy: strategy.into(),
            machine: Machine::cpu(1),
            head_chunks: 1,
            mask: Mask::full(),
            qkv_format: QkvFormat::default(),
            positions,
            length,
            experts: Arc::new(Local),
            tensor_parallel: TensorParallel::default(),
            dropout: None,
            schedules: Mutex::default(),
        })
    }

    /// Like [`new`](Self::new), for cross attention: the queries' layout and the keys'.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn between(group: Arc<Group>, (queries, keys): (Layout, Layout), strategy: StrategyKind) -> Result<Self> {
        if keys.ranks() != group.size() {
            candle_core::bail!("the layout distributes keys to {} ranks, the group has {}", keys.ranks(), group.size());
        }
        Ok(Self { key_layout: Arc::new(keys), ..Self::new(group, Arc::new(queries), strategy)? })
    }

    /// Sets the implementation of the experts of sparse layers; by default this rank computes all of them.
    pub fn with_experts(self, experts: Arc<dyn Experts + Send + Sync>) -> Self {
        Self { experts, ..self }
    }

    /// Sets the tensor-parallel group, whose ranks have the same tokens and share the width of layers.
    pub fn with_tensor_parallel(self, tensor_parallel: TensorParallel) -> Self {
        Self { tensor_parallel, ..self }
    }

    /// Sets the dropout of layer inputs; the tokens of `dropout` must be those of this rank.
    pub fn with_input_dropout(self, dropout: InputDropout) -> Self {
        Self { dropout: Some(dropout), ..self }
    }

    /// Cuts the exchange of heads between Ulysses ranks into up to `chunks` parts, of which one travels while another is computed. Results
    /// have the same bits for any number, and one Ulysses rank exchanges none.
    pub fn with_head_chunks(self, chunks: usize) -> Self {
        Self { head_chunks: chunks, ..self }
    }

    /// Announces that sequences will grow to `length` tokens: rotary embeddings whose frequencies depend on the length are
    /// made for it.
    pub fn with_max_length(self, length: usize) -> Self {
        Self { length: self.length.max(length), ..self }
    }

    /// The layout: which rank holds which tokens.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The order of dims of queries, keys, values and outputs of [`attention`](Self::attention).
    pub fn qkv_format(&self) -> QkvFormat {
        self.qkv_format
    }

    /// The context-parallel group: the ranks that share the batch's sequences.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// The schedule of attention with `mask` by a strategy that was named.
    ///
    /// # Errors
    /// Masks and layouts that [`Schedule::new`] refuses, and the strategy `auto`, which depends on the sizes of tensors.
    pub fn schedule(&self, mask: &Mask) -> Result<Arc<Schedule>> {
        if self.strategy.is_auto() {
            candle_core::bail!("the schedule of strategy auto depends on the sizes of queries, keys and values");
        }
        self.schedule_once((mask.clone(), None))
    }

    /// The schedule of attention of these inputs.
    fn schedule_of(&self, inputs: &AttentionInputs, mask: &Mask) -> Result<Arc<Schedule>> {
        if !self.strategy.is_auto() {
            return self.schedule(mask);
        }
        let ((_, heads, dim), (_, kv_heads, v_dim)) = (inputs.q.dims3()?, inputs.v.dims3()?);
        let wire = self.group.wire_bytes().unwrap_or(inputs.q.dtype().size_in_bytes());
        let bias_heads = inputs.bias.map_or(Ok(0), |bias| bias.dim(1))?;
        let sizes = TensorSizes { heads, kv_heads, dim, v_dim, wire, bias_heads };
        self.schedule_once((mask.clone(), Some((sizes, inputs.q.track_op()))))
    }

    fn schedule_once(&self, key: ScheduleKey) -> Result<Arc<Schedule>> {
        let mut schedules = self.schedules.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(schedule) = schedules.get(&key) {
            return Ok(schedule.clone());
        }
        let (mask, of_inputs) = &key;
        let schedule = |strategy| {
            let schedule = Schedule::new(strategy, &self.layout, &self.key_layout, mask, self.group.grid())?;
            Ok(schedule.with_head_chunks(self.head_chunks))
        };
        let made = match (&self.strategy, of_inputs) {
            (StrategyChoice::Fixed(strategy), _) => schedule(strategy.clone()),
            (choice, Some((sizes, trained))) => {
                let passes = if *trained { &[Pass::Forward, Pass::Backward][..] } else { &[Pass::Forward] };
                choice.schedule(schedule, sizes, &self.machine, passes)
            }
            (StrategyChoice::Auto, None) => candle_core::bail!("strategy auto chooses by the sizes of tensors"),
        };
        let made = Arc::new(made.map_err(candle_core::Error::wrap)?);
        schedules.insert(key, made.clone());
        Ok(made)
    }
}

impl Attend for Context {
    fn layer_attention(&self, _layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor> {
        attention(&self.group, &self.schedule_of(inputs, mask)?, inputs, score.clone())
    }

    fn attention_saving(
        &self,
        memory: &mut SavedAttention,
        _layer: usize,
        inputs: &AttentionInputs,
        mask: &Mask,
        score: &Score,
    ) -> Result<Tensor> {
        attention_saving(&self.group, &self.schedule_of(inputs, mask)?, inputs, score.clone(), memory)
    }

    fn positions(&self) -> &[usize] {
        &self.positions
    }

    fn length(&self) -> usize {
        self.length
    }

    fn experts(&self) -> &dyn Experts {
        &*self.experts
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        &self.tensor_parallel
    }

    fn input_dropout(&self) -> Option<&InputDropout> {
        self.dropout.as_ref()
    }
}
