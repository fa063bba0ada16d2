//! The auxiliary loss that balances the load of experts (Fedus et al., 2021, arXiv:2101.03961), over all ranks.

use crate::experts::{Expert, ExpertLoad, Experts, RouterGradient, Routing, SavedExperts};
use candle_core::{Result, Tensor, bail};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Experts with the load-balancing loss.
///
/// The loss is `coefficient * E * sum over experts of f p`: f is the mean number of times that a token is routed to an
/// expert, p the mean probability of the expert, over the tokens of all ranks and all sparse layers, as Hugging Face computes
/// it. It needs sums over the whole forward pass before the first gradient, so each forward and backward pass has a
/// `LoadBalancedExperts` of its own. The loss may span several passes (micro-batches), if the loads of the others are known
/// [beforehand](Self::with_other_load).
pub struct LoadBalancedExperts {
    inner: Arc<dyn Experts + Send + Sync>,
    coefficient: f64,
    /// Sums numbers over all ranks that share the batch.
    sum: Box<Sum>,
    state: Mutex<LoadState>,
    router_gradient: RouterGradient,
    /// The load of the other passes that the loss spans, summed over layers and ranks.
    others: ExpertLoad,
}

/// Sums numbers over ranks, in place.
type Sum = dyn Fn(&mut [f64]) -> Result<()> + Send + Sync;

enum LoadState {
    /// During the forward pass: the load of each layer so far.
    Collecting(BTreeMap<usize, ExpertLoad>),
    /// During the backward pass: the loads summed over layers and ranks, of this pass and of all passes that the loss spans.
    Summed { own: ExpertLoad, all: ExpertLoad },
}

impl LoadBalancedExperts {
    /// `inner` computes the experts; `sum` sums numbers over the ranks, in place, and is called once.
    ///
    /// The coefficient is that of the loss whose gradients this pass computes: where each pass of a step has a loss of its
    /// own, it is this pass's share of the coefficient.
    pub fn new(
        inner: Arc<dyn Experts + Send + Sync>,
        coefficient: f64,
        sum: impl Fn(&mut [f64]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        let sum = Box::new(sum);
        Self {
            inner,
            coefficient,
            sum,
            state: Mutex::new(LoadState::Collecting(BTreeMap::new())),
            router_gradient: RouterGradient::default(),
            others: ExpertLoad::default(),
        }
    }

    /// Makes the loss span other passes (micro-batches), whose summed load is `others`. The loss is then equal in all these
    /// passes, and this pass computes its share of the gradients.
    #[must_use]
    pub fn with_other_load(self, others: ExpertLoad) -> Self {
        Self { others, ..self }
    }

    /// The load of this pass, summed over layers and ranks; `None` before the forward pass has ended.
    pub fn load(&self) -> Option<ExpertLoad> {
        match &*self.state() {
            LoadState::Collecting(_) => None,
            LoadState::Summed { own, .. } => Some(own.clone()),
        }
    }

    /// The loss, equal on every rank; `None` before the forward pass has ended, or without tokens or sparse layers.
    pub fn loss(&self) -> Option<f64> {
        let LoadState::Summed { all: load, .. } = &*self.state() else { return None };
        let products: f64 = load.chosen.iter().zip(&load.probability).map(|(f, p)| f * p).sum();
        let loss = self.coefficient * load.chosen.len() as f64 * products / (load.tokens * load.tokens);
        Some(loss).filter(|_| load.tokens > 0.0)
    }

    fn state(&self) -> MutexGuard<'_, LoadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Experts for LoadBalancedExperts {
    fn mix(
        &self,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        self.inner.mix(layer, x, routing, expert)
    }

    fn mix_saving(
        &self,
        memory: &mut SavedExperts,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        self.inner.mix_saving(memory, layer, x, routing, expert)
    }

    fn local_width(&self, whole: usize) -> Range<usize> {
        self.inner.local_width(whole)
    }

    fn local_experts(&self, experts: usize) -> Range<usize> {
        self.inner.local_experts(experts)
    }

    fn routed(&self, layer: usize, load: ExpertLoad) -> Result<()> {
        if let LoadState::Collecting(layers) = &mut *self.state() {
            layers.insert(layer, load.clone());
        }
        self.inner.routed(layer, load)
    }

    fn forward_ended(&self, experts: usize) -> Result<()> {
        self.inner.forward_ended(experts)?;
        let mut state = self.state();
        let LoadState::Collecting(layers) = &*state else {
            bail!("the forward pass ended twice: each pass needs a LoadBalancedExperts of its own");
        };
        // A rank without tokens has no load, and adds zeros.
        let zeros = || vec![0.0; experts];
        let mut own = ExpertLoad { chosen: zeros(), probability: zeros(), tokens: 0.0 };
        layers.values().for_each(|load| own.add(load));
        let mut sums = [own.chosen, own.probability, vec![own.tokens]].concat();
        (self.sum)(&mut sums)?;
        let tokens = sums[2 * experts];
        sums.truncate(2 * experts);
        let probability = sums.split_off(experts);
        let own = ExpertLoad { chosen: sums, probability, tokens };
        let mut all = own.clone();
        all.add(&self.others);
        // The number of times that an expert is chosen has no gradient; its probability has one.
        let factor = self.coefficient * experts as f64 / (all.tokens * all.tokens).max(1.0);
        let router_gradient = all.chosen.iter().map(|chosen| (factor * chosen) as f32).collect();
        if self.router_gradient.set(router_gradient).is_err() {
            bail!("the forward pass ended on two threads at once");
        }
        *state = LoadState::Summed { own, all };
        Ok(())
    }

    fn router_gradients(&self, layer: usize) -> Vec<RouterGradient> {
        let mut all = self.inner.router_gradients(layer);
        all.push(self.router_gradient.clone());
        all
    }
}
