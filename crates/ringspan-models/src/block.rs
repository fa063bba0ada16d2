//! One layer: attention and a feed-forward part, each behind a norm and added to what came in.
//!
//! Shape letters: T tokens at hand, C hidden size, H query heads, G key-value heads, D head width, I inner width.

mod sparse;

use crate::architecture::Sparse;
use crate::decoder::{Decoder, Weights};
use crate::error::Result;
use crate::lora::matrices;
use crate::portion::Heads;
use crate::recompute::Keeper;
use candle_core::Tensor;
use ringspan_candle::activation::Activation;
use ringspan_candle::gated_mlp::gated_mlp;
use ringspan_candle::geglu::geglu;
use ringspan_candle::linear::linear;
use ringspan_candle::residual::residual;
use ringspan_candle::rope::rope;
use ringspan_candle::swiglu::swiglu;
use ringspan_candle::{Adapter, Attend, TensorParallel};

/// Layer `index` of a model, with its weights.
pub(crate) struct Block<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) weights: &'a Weights,
    pub(crate) index: usize,
    /// Of a layer that is computed twice.
    pub(crate) keeper: Option<&'a Keeper<'a>>,
}

impl Block<'_> {
    /// x `[T, C]` to `[T, C]`, with at least one token; where ranks share layers, this rank's rows of them.
    pub(crate) fn forward(&self, x: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        let model = &self.decoder.model;
        let mut attended = self.attention(&self.rows_of_all(&self.normed("input_layernorm", x)?, attend)?, attend)?;
        let mut before = "post_attention_layernorm";
        if model.post_norms {
            // Gemma gives this name to the norm behind attention, Llama to the one before the feed-forward part.
            attended = self.normed(before, &attended)?;
            before = "pre_feedforward_layernorm";
        }
        let (x, h) = self.decoder.sum_and_norm(self.weights, &self.name(&format!("{before}.weight")), x, &attended)?;
        let mut fed = match self.mixture() {
            // Tokens find their experts row by row.
            Some(sparse) => self.sparse(sparse, &h, attend)?,
            None => {
                let rows = self.rows_of_all(&h, attend)?;
                drop(h);
                self.dense(&rows, attend)?
            }
        };
        if model.post_norms {
            fed = self.normed("post_feedforward_layernorm", &fed)?;
        }
        Ok(residual(&x, &fed)?)
    }

    /// What is left to do for a rank without tokens behind attention: x `[0, C]` to `[0, C]`.
    pub(crate) fn take_part(&self, x: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        match self.mixture() {
            Some(sparse) => self.no_tokens(sparse, x, attend),
            None => Ok(x.clone()),
        }
    }

    fn mixture(&self) -> Option<Sparse> {
        self.decoder.model.sparse.filter(|_| self.decoder.is_sparse(self.index))
    }

    fn attention(&self, h: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        let model = &self.decoder.model;
        let (tokens, dim) = (h.dim(0)?, self.decoder.config().head_dim());
        // As many heads as the weights at hand have.
        let project = |name: &str| -> Result<Tensor> {
            let flat = self.linear(&format!("self_attn.{name}"), h, model.qkv_bias, attend)?;
            Ok(flat.reshape((tokens, flat.dim(1)? / dim, dim))?)
        };
        let (mut q, mut k, v) = (project("q_proj")?, project("k_proj")?, project("v_proj")?);
        if model.qk_norm {
            q = self.normed("self_attn.q_norm", &q)?;
            k = self.normed("self_attn.k_norm", &k)?;
        }
        let place = model.layers[self.index].rope;
        let make = || model.ropes[place].rotation(attend.positions(), attend.length());
        let rotation = self.keeper.map_or_else(make, |keeper| keeper.rotation(place, make));
        let (q, k) = (rope(&q, &rotation)?, rope(&k, &rotation)?);
        let out = attend.attention(
            self.index,
            &q,
            &k,
            &v,
            &model.mask(self.index),
            &self.decoder.score(self.index, attend)?,
        )?;
        self.summed("self_attn.o_proj", &out.flatten_from(1)?, model.output_bias, attend)
    }

    /// The gated feed-forward part of all tokens.
    fn dense(&self, h: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        let model = &self.decoder.model;
        if !model.mlp_bias && !self.decoder.adapts_any(&self.name("mlp.")) {
            let [gate, up, down] = ["gate", "up", "down"].map(|name| self.get(&format!("mlp.{name}_proj.weight")));
            let (gate, up, down) = (gate?, up?, down?);
            let out = match self.keeper {
                Some(keeper) => {
                    let (name, weights) = (self.name("mlp"), [gate, up, down]);
                    keeper.gated(&name, h, weights, model.activation, model.post_norms)?
                }
                None => gated_mlp(h, gate, up, down, model.activation)?,
            };
            return Ok(attend.tensor_parallel().reduce(&out)?);
        }
        let gate = self.linear("mlp.gate_proj", h, model.mlp_bias, attend)?;
        let up = self.linear("mlp.up_proj", h, model.mlp_bias, attend)?;
        let hidden = match model.activation {
            Activation::Silu => swiglu(&gate, &up)?,
            Activation::GeluTanh => geglu(&gate, &up)?,
        };
        self.summed("mlp.down_proj", &hidden, model.mlp_bias, attend)
    }

    /// h, with the rows of all ranks that share this layer.
    fn rows_of_all(&self, h: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        Ok(attend.tensor_parallel().gather(h, attend.positions().len())?)
    }

    /// The linear layer behind which the parts of all ranks are summed, and rows dealt again.
    fn summed(&self, name: &str, x: &Tensor, bias: bool, attend: &dyn Attend) -> Result<Tensor> {
        if attend.tensor_parallel().is_whole() {
            return self.linear(name, x, bias, attend);
        }
        let sum = attend.tensor_parallel().reduce(&self.linear(name, x, false, attend)?)?;
        Ok(if bias { sum.broadcast_add(self.get(&format!("{name}.bias"))?)? } else { sum })
    }

    fn normed(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        self.decoder.normed(self.weights, &self.name(&format!("{name}.weight")), x)
    }

    /// `x weight^T + bias`, and the adapter's part: x `[T, in]`, weight `[out, in]`, bias `[out]`.
    fn linear(&self, name: &str, x: &Tensor, bias: bool, attend: &dyn Attend) -> Result<Tensor> {
        let bias = if bias { Some(self.get(&format!("{name}.bias"))?) } else { None };
        let weight = self.get(&format!("{name}.weight"))?;
        // What a layer ends with is only added to its input: no gradient needs its values, unless they are normed.
        let seen = name != "mlp.down_proj" || self.decoder.model.post_norms;
        let mut out = match self.keeper {
            Some(keeper) => keeper.linear(&self.name(name), x, weight, bias, seen)?,
            None => linear(x, weight, bias)?,
        };
        let first = || self.first_column(name, attend.tensor_parallel());
        if let Some(adapter) = self.adapter(name, first)? {
            let part = adapter.part(x, attend.drops())?;
            out = residual(&out, &part)?;
        }
        Ok(out)
    }

    /// The adapter beside a layer, if it has one. `first` says which is the first column of the layer's input here.
    fn adapter(&self, name: &str, first: impl FnOnce() -> Result<usize>) -> Result<Option<Adapter>> {
        let layer = self.name(name);
        let (Some(lora), Some(size)) = (self.decoder.lora(), self.decoder.adapter(&layer)) else { return Ok(None) };
        let [a, b] = matrices(name);
        Ok(Some(lora.adapter(&layer, size, self.get(&a)?, self.get(&b)?, first()?)))
    }

    /// Where the input of a layer that is here begins: behind its heads, and its part of the width, a rank has no more.
    fn first_column(&self, name: &str, shared: &TensorParallel) -> Result<usize> {
        let config = self.decoder.config();
        Ok(match name {
            "self_attn.o_proj" => Heads::new(config, shared.place())?.queries.start * config.head_dim(),
            "mlp.down_proj" => shared.part(config.intermediate_size).start,
            _ => 0,
        })
    }

    fn get(&self, name: &str) -> Result<&Tensor> {
        self.decoder.get(self.weights, &self.name(name))
    }

    fn name(&self, name: &str) -> String {
        format!("model.layers.{}.{name}", self.index)
    }
}
