//! The loss that keeps the load of experts even (Fedus et al., 2021, arXiv:2101.03961), over all ranks.

use crate::experts::{Expert, Experts, Load, Memory, Pressure, Routing};
use candle_core::{Result, Tensor, bail};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Experts whose load is watched, and pressed towards an even one.
///
/// The loss is `coefficient * E * sum over experts of f p`: f is the mean number of tokens' choices, p the mean
/// probability of an expert, over the tokens of all ranks and all sparse layers, as Hugging Face computes it. It needs
/// sums over the whole forward pass before the first gradient, so one `Balanced` serves one pass forward and back. The
/// tokens may be those of several passes, if what routers do in the others is known [before](Self::beside).
pub struct Balanced {
    inner: Arc<dyn Experts + Send + Sync>,
    coefficient: f64,
    /// Over all ranks that share the batch.
    sum: Box<Sum>,
    state: Mutex<State>,
    pressure: Pressure,
    /// What routers do in the other passes that the loss is over, summed over layers and ranks.
    others: Load,
}

/// Adds numbers over ranks, in place.
type Sum = dyn Fn(&mut [f64]) -> Result<()> + Send + Sync;

enum State {
    /// Forward: what each layer's router did.
    Watching(BTreeMap<usize, Load>),
    /// Backward: the sums over layers and ranks, of this pass and of all that the loss is over.
    Summed { own: Load, all: Load },
}

impl Balanced {
    /// `inner` computes the experts; `sum` adds numbers over the ranks, in place, and is called once.
    ///
    /// The coefficient is that of the loss whose gradients the pass yields: where each pass of a step has a loss of its own, its
    /// share of it.
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
            state: Mutex::new(State::Watching(BTreeMap::new())),
            pressure: Pressure::default(),
            others: Load::default(),
        }
    }

    /// The same, of a pass beside others: the loss is over the tokens of all, and the same in each of them, and this one yields
    /// its part of the gradients.
    #[must_use]
    pub fn beside(self, others: Load) -> Self {
        Self { others, ..self }
    }

    /// What routers did in this pass, summed over layers and ranks; none before the forward pass ended.
    pub fn load(&self) -> Option<Load> {
        match &*self.state() {
            State::Watching(_) => None,
            State::Summed { own, .. } => Some(own.clone()),
        }
    }

    /// The loss, the same on every rank; none before the forward pass ended, or if there is no token or sparse layer.
    pub fn loss(&self) -> Option<f64> {
        let State::Summed { all: load, .. } = &*self.state() else { return None };
        let products: f64 = load.chosen.iter().zip(&load.probability).map(|(f, p)| f * p).sum();
        let loss = self.coefficient * load.chosen.len() as f64 * products / (load.tokens * load.tokens);
        Some(loss).filter(|_| load.tokens > 0.0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Experts for Balanced {
    fn mix(
        &self,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        self.inner.mix(layer, x, routing, expert)
    }

    fn mix_keeping(
        &self,
        memory: &mut Memory,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        self.inner.mix_keeping(memory, layer, x, routing, expert)
    }

    fn part(&self, whole: usize) -> Range<usize> {
        self.inner.part(whole)
    }

    fn held(&self, experts: usize) -> Range<usize> {
        self.inner.held(experts)
    }

    fn routed(&self, layer: usize, load: Load) -> Result<()> {
        if let State::Watching(layers) = &mut *self.state() {
            layers.insert(layer, load.clone());
        }
        self.inner.routed(layer, load)
    }

    fn forward_ended(&self, experts: usize) -> Result<()> {
        self.inner.forward_ended(experts)?;
        let mut state = self.state();
        let State::Watching(layers) = &*state else {
            bail!("the forward pass ended twice: experts are balanced once a pass, with a new Balanced each");
        };
        // A rank without tokens has seen no router, and adds zeros.
        let zeros = || vec![0.0; experts];
        let mut own = Load { chosen: zeros(), probability: zeros(), tokens: 0.0 };
        layers.values().for_each(|load| own.add(load));
        let mut sums = [own.chosen, own.probability, vec![own.tokens]].concat();
        (self.sum)(&mut sums)?;
        let tokens = sums[2 * experts];
        sums.truncate(2 * experts);
        let probability = sums.split_off(experts);
        let own = Load { chosen: sums, probability, tokens };
        let mut all = own.clone();
        all.add(&self.others);
        // How often an expert was chosen has no gradient, its probability has.
        let factor = self.coefficient * experts as f64 / (all.tokens * all.tokens).max(1.0);
        let pressure = all.chosen.iter().map(|chosen| (factor * chosen) as f32).collect();
        if self.pressure.set(pressure).is_err() {
            bail!("the forward pass ended on two threads at once");
        }
        *state = State::Summed { own, all };
        Ok(())
    }

    fn pressures(&self, layer: usize) -> Vec<Pressure> {
        let mut all = self.inner.pressures(layer);
        all.push(self.pressure.clone());
        all
    }
}
