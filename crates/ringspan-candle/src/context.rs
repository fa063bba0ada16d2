//! Attention for a model whose tokens are distributed over a group of ranks.

use crate::attend::{Attend, AttentionInputs};
use crate::attention::{Memory, attention, attention_keeping};
use crate::dropout::Drops;
use crate::experts::{Experts, Local};
use crate::tensor_parallel::TensorParallel;
use candle_core::{Result, Tensor};
use ringspan::attention::Group;
use ringspan::{Layout, Mask, Schedule, Score, Strategy};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// This rank's tokens of a batch, and the group through which they attend to the tokens of other ranks.
pub struct Context {
    group: Arc<Group>,
    layout: Arc<Layout>,
    strategy: Strategy,
    positions: Vec<usize>,
    length: usize,
    experts: Arc<dyn Experts + Send + Sync>,
    tensor_parallel: TensorParallel,
    drops: Option<Drops>,
    /// Schedules by mask. Layers share masks and planning takes time, so each schedule is made once.
    schedules: Mutex<HashMap<Mask, Arc<Schedule>>>,
}

impl Context {
    /// A context for tokens that are distributed over the ranks of `group` as `layout` says.
    ///
    /// # Errors
    /// A layout for a number of ranks other than the size of the group.
    pub fn new(group: Arc<Group>, layout: Arc<Layout>, strategy: Strategy) -> Result<Self> {
        if layout.ranks() != group.size() {
            candle_core::bail!("the layout deals to {} ranks, the group has {}", layout.ranks(), group.size());
        }
        let positions = layout.positions(group.rank());
        let spans = layout.documents().iter().flat_map(|document| &document.spans);
        let length = spans.map(|span| span.end).max().unwrap_or(0);
        let (experts, tensor_parallel) = (Arc::new(Local), TensorParallel::default());
        let schedules = Mutex::default();
        Ok(Self { group, layout, strategy, positions, length, experts, tensor_parallel, drops: None, schedules })
    }

    /// Sets the implementation of the experts of sparse layers; by default this rank computes all of them.
    pub fn with_experts(self, experts: Arc<dyn Experts + Send + Sync>) -> Self {
        Self { experts, ..self }
    }

    /// Sets the tensor-parallel group, whose ranks have the same tokens and share the width of layers.
    pub fn with_tensor_parallel(self, tensor_parallel: TensorParallel) -> Self {
        Self { tensor_parallel, ..self }
    }

    /// Sets the dropout of layer inputs; the tokens of `drops` must be those of this rank.
    pub fn with_drops(self, drops: Drops) -> Self {
        Self { drops: Some(drops), ..self }
    }

    /// Announces that sequences will grow to `length` tokens: rotary embeddings whose frequencies depend on the length are
    /// made for it.
    pub fn growing_to(self, length: usize) -> Self {
        Self { length: self.length.max(length), ..self }
    }

    /// The layout: which rank holds which tokens.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The context-parallel group: the ranks that share the batch's sequences.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// The schedule of attention with `mask`.
    ///
    /// # Errors
    /// Masks and layouts that [`Schedule::new`] refuses.
    pub fn schedule(&self, mask: &Mask) -> Result<Arc<Schedule>> {
        let mut schedules = self.schedules.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(schedule) = schedules.get(mask) {
            return Ok(schedule.clone());
        }
        let schedule = Schedule::new(self.strategy, &self.layout, &self.layout, mask, self.group.grid())
            .map_err(candle_core::Error::wrap)?;
        let schedule = Arc::new(schedule);
        schedules.insert(mask.clone(), schedule.clone());
        Ok(schedule)
    }
}

impl Attend for Context {
    fn attention(&self, _layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor> {
        attention(&self.group, &self.schedule(mask)?, inputs, score.clone())
    }

    fn attention_keeping(
        &self,
        memory: &mut Memory,
        _layer: usize,
        inputs: &AttentionInputs,
        mask: &Mask,
        score: &Score,
    ) -> Result<Tensor> {
        attention_keeping(&self.group, &self.schedule(mask)?, inputs, score.clone(), memory)
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

    fn drops(&self) -> Option<&Drops> {
        self.drops.as_ref()
    }
}
