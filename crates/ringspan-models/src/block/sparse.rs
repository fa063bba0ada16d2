//! A feed-forward part that is a mixture of experts: a router sends each token to a few of them (Shazeer et al., 2017).
//!
//! Shape letters: T tokens at hand, C hidden size, E experts, K experts a token goes to.

use super::Block;
use crate::architecture::Sparse;
use crate::error::Result;
use candle_core::{D, DType, Tensor};
use ringspan_candle::cast::cast;
use ringspan_candle::experts::pressed;
use ringspan_candle::linear::linear;
use ringspan_candle::{Adapter, Attend, Drops, Expert, Experts, Load, Routing};
use std::ops::Range;

/// The matrices of an expert.
const PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl Block<'_> {
    /// h `[T, C]` to `[T, C]`.
    pub(super) fn sparse(&self, sparse: Sparse, h: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        if h.dim(0)? == 0 {
            return self.no_tokens(sparse, h, attend);
        }
        // A rank has its rows of the tokens that it shares.
        let drops = self.drops(attend.tensor_parallel().part(attend.positions().len()), attend);
        let experts = attend.experts();
        let mut probabilities = softmax(&self.router(h, drops.as_ref())?)?;
        for pressure in experts.pressures(self.index) {
            probabilities = pressed(&probabilities, pressure)?;
        }
        let rows = probabilities.to_vec2::<f32>()?;
        let chosen: Vec<u32> = rows.iter().flat_map(|row| largest(row, sparse.top)).collect();
        experts.routed(self.index, load(&rows, &chosen, sparse.experts))?;
        let places = Tensor::from_slice(&chosen, (rows.len(), sparse.top), probabilities.device())?;
        let mut weights = probabilities.gather(&places, 1)?;
        if sparse.normed {
            weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        }
        self.mix(sparse, h, Routing { chosen, weights, drops }, experts)
    }

    /// The experts of a rank without tokens: it may compute those of others. x `[0, C]` to `[0, C]`.
    pub(super) fn no_tokens(&self, sparse: Sparse, x: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        let experts = attend.experts();
        experts.routed(self.index, load(&[], &[], sparse.experts))?;
        // Made from x, as a router's are: the way back visits both on every rank, in one order.
        let weights = cast(&x.reshape((0, sparse.top))?, DType::F32)?;
        self.mix(sparse, x, Routing { chosen: Vec::new(), weights, drops: self.drops(0..0, attend) }, experts)
    }

    /// What is dropped of these tokens on their way into adapters, if anything is.
    fn drops(&self, tokens: Range<usize>, attend: &dyn Attend) -> Option<Drops> {
        let drops = self.decoder.lora().filter(|lora| lora.dropout > 0.0).and(attend.drops())?;
        Some(drops.of(drops.tokens()[tokens].to_vec()))
    }

    /// Logits `[T, E]`, f32 whatever the model computes in: near a tie, what is rounded goes to another expert.
    fn router(&self, h: &Tensor, drops: Option<&Drops>) -> Result<Tensor> {
        let exact = |tensor: &Tensor| cast(tensor, DType::F32);
        let h = &exact(h)?;
        let product = |name: &str, x: &Tensor, weight: &Tensor| match self.keeper {
            Some(keeper) => keeper.router(&self.name(name), x, weight),
            None => Ok(linear(x, weight, None)?),
        };
        let logits = product("mlp.gate", h, &exact(self.get("mlp.gate.weight")?)?)?;
        match self.adapter("mlp.gate", || Ok(0))? {
            // What is seen of either is never rounded.
            Some(adapter) => {
                let adapter = Adapter { a: exact(&adapter.a)?, b: exact(&adapter.b)?, ..adapter };
                Ok((logits + product("mlp.gate.lora_B", &adapter.narrow(h, drops)?, &adapter.b)?)?)
            }
            None => Ok(logits),
        }
    }

    fn mix(&self, sparse: Sparse, x: &Tensor, mut routing: Routing, experts: &dyn Experts) -> Result<Tensor> {
        routing.drops = routing.drops.filter(|_| self.decoder.adapts_any(&self.name("mlp.experts.")));
        let expert = |index: usize| -> Result<Expert> {
            let [gate, up, down] = PARTS.map(|part| format!("mlp.experts.{index}.{part}"));
            let weight = |name: &str| self.get(&format!("{name}.weight")).cloned();
            let whole = || Ok(0);
            // Of what comes out of gate and up, a rank may have a part.
            let narrow = || Ok(experts.part(sparse.wide).start);
            Ok(Expert {
                adapters: [self.adapter(&gate, whole)?, self.adapter(&up, whole)?, self.adapter(&down, narrow)?],
                gate: weight(&gate)?,
                up: weight(&up)?,
                down: weight(&down)?,
            })
        };
        // A layer that is computed again need not have its values.
        debug_assert!(!self.decoder.model.post_norms, "what experts give is only added to the layer's input");
        let expert = |index: usize| expert(index).map_err(candle_core::Error::wrap);
        Ok(experts.mix(self.index, x, &routing, &expert)?)
    }
}

/// Over the last dimension of `[T, E]`.
fn softmax(logits: &Tensor) -> Result<Tensor> {
    // Subtracting a constant of the row changes nothing, so the maximum needs no gradient.
    let exponentials = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?.exp()?;
    Ok(exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?)
}

/// Places of the `count` largest of a row, largest first; of equal ones the first, so that every mesh chooses the same.
fn largest(row: &[f32], count: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..row.len() as u32).collect();
    places.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
    places.truncate(count);
    places
}

fn load(rows: &[Vec<f32>], chosen: &[u32], experts: usize) -> Load {
    let mut load = Load { chosen: vec![0.0; experts], probability: vec![0.0; experts], tokens: rows.len() as f64 };
    chosen.iter().for_each(|&expert| load.chosen[expert as usize] += 1.0);
    for row in rows {
        load.probability.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
    }
    load
}
