//! A low-rank adapter (LoRA) of a linear layer (Hu et al., 2021, arXiv:2106.09685).
//!
//! Shape letters: T tokens, R rank of the adapter.

use crate::adapter_rows::AdapterRows;
use crate::cast::cast;
use crate::linear::linear_wide;
use crate::tensor_product::product_of;
use candle_core::{Result, Tensor};
use std::collections::BTreeMap;

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// The checkpoint names of the matrices A and B that adapt the linear layer `name`.
#[must_use]
pub fn weight_names(name: &str) -> [String; 2] {
    [format!("{name}.{A}"), format!("{name}.{B}")]
}

/// The names of the matrices A and B of one of several adapters of the linear layer `name`.
#[must_use]
pub fn weight_names_by_slot(name: &str, slot: u64) -> [String; 2] {
    [format!("{name}.lora_A.{slot}.weight"), format!("{name}.lora_B.{slot}.weight")]
}

/// The name of the linear layer that the matrix of this name adapts; `None` if the matrix is not an adapter's.
#[must_use]
pub fn layer_of(name: &str) -> Option<&str> {
    name.strip_suffix(A).or_else(|| name.strip_suffix(B))?.strip_suffix('.')
}

/// A number derived from a layer's name alone (FNV-1a), which seeds its dropout differently from that of other layers.
#[must_use]
pub fn dropout_stream(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The size of one adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdapterSize {
    /// The rank R.
    pub rank: usize,
    /// The factor of the product B A; in PEFT, alpha / R or alpha / sqrt(R).
    pub scale: f64,
}

/// Says which linear layers of a model have adapters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Adapters {
    /// Sizes by the whole names of the adapted layers.
    pub sizes: BTreeMap<String, AdapterSize>,
    /// Share of an adapter's input that is dropped in training, in 0..1.
    pub dropout: f64,
    /// Several adapters, of which each row asks for one by its slot ([`AdapterSelection`](crate::AdapterSelection)), in place of one for
    /// all rows.
    pub by_slot: BTreeMap<u64, Self>,
}

/// How the matrices of a layer's adapter are used: everything but their values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdapterSettings {
    scale: f64,
    dropout: f64,
    layer: usize,
}

impl Adapters {
    /// No adapters.
    #[must_use]
    pub const fn none() -> Self {
        Self { sizes: BTreeMap::new(), dropout: 0.0, by_slot: BTreeMap::new() }
    }

    /// Several adapters, each under a slot.
    #[must_use]
    pub fn by_slot(by_slot: BTreeMap<u64, Self>) -> Self {
        Self { by_slot, ..Self::none() }
    }

    /// Whether a layer has an adapter, for some rows at least.
    pub(crate) fn adapt(&self, layer: &str) -> bool {
        self.sizes.contains_key(layer) || self.by_slot.values().any(|adapters| adapters.adapt(layer))
    }

    /// Whether any layer whose name begins with `prefix` has an adapter, for some rows at least.
    pub(crate) fn adapt_below(&self, prefix: &str) -> bool {
        let first = self.sizes.range(prefix.to_owned()..).next();
        first.is_some_and(|(layer, _)| layer.starts_with(prefix))
            || self.by_slot.values().any(|adapters| adapters.adapt_below(prefix))
    }

    /// The size of the adapter of the layer with this whole name, if the layer is adapted.
    #[must_use]
    pub fn size(&self, layer: &str) -> Option<AdapterSize> {
        self.sizes.get(layer).copied()
    }

    /// Whether adapters treat rows differently: they drop a share of their inputs in training, or each row asks for one of several.
    pub(crate) fn depend_on_rows(&self) -> bool {
        !self.sizes.is_empty() && self.dropout > 0.0 || !self.by_slot.is_empty()
    }

    /// The settings of a layer's adapter, if the layer is adapted. Each layer has dropout of its own, as in PEFT.
    pub(crate) fn adapter_of(&self, layer: &str) -> Option<AdapterSettings> {
        let AdapterSize { scale, .. } = self.size(layer)?;
        // Half of the 64-bit words are used, since the generator counts upwards from this number.
        Some(AdapterSettings { scale, dropout: self.dropout, layer: (dropout_stream(layer) >> 1) as usize })
    }
}

impl AdapterSettings {
    /// The adapter with these matrices, or this rank's shards of them; `first` is the first column of the layer's input on
    /// this rank.
    pub(crate) fn adapter(self, a: &Tensor, b: &Tensor, first: usize) -> Adapter {
        let Self { scale, dropout, layer } = self;
        Adapter { a: a.clone(), b: b.clone(), scale, dropout, layer, first }
    }
}

/// An adapter's matrices, and how they are used. A rank that holds a shard of a layer's width holds the corresponding shard
/// of its adapter.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// The matrix A `[R, in]`.
    pub a: Tensor,
    /// The matrix B `[out, R]`.
    pub b: Tensor,
    /// The factor of the product B A.
    pub scale: f64,
    /// Share of the input that is dropped in training, in 0..1.
    pub dropout: f64,
    /// The number of the layer, by which its dropout differs from that of other layers.
    pub layer: usize,
    /// The first column of the layer's input on this rank.
    pub first: usize,
}

impl Adapter {
    /// The adapter's contribution to the layer, `scale (x A^T) B^T`: x `[T, in]` to `[T, out]`. It is f32, since it is
    /// rounded once, after it was added to the layer's own output; differentiable in x and in the matrices. In training, `rows` has the
    /// dropout of x.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn delta(&self, x: &Tensor, rows: Option<&AdapterRows>) -> Result<Tensor> {
        linear_wide(&self.down(x, rows)?, &self.b)
    }

    /// The input of B, `scale x A^T`: x `[T, in]` to `[T, R]`, with `rows` as in [`Self::delta`].
    ///
    /// # Errors
    /// As for [`delta`](Self::delta).
    pub fn down(&self, x: &Tensor, rows: Option<&AdapterRows>) -> Result<Tensor> {
        // Scaling the narrow product costs less than scaling the output; product and scale are rounded together.
        cast(&(linear_wide(&self.input(x, rows)?, &self.a)? * self.scale)?, x.dtype())
    }

    /// Applies dropout to x; as dropout is its own backward pass, this also turns the gradient of the dropped input into that
    /// of x.
    fn input(&self, x: &Tensor, rows: Option<&AdapterRows>) -> Result<Tensor> {
        match rows.and_then(AdapterRows::dropout).filter(|_| self.dropout > 0.0) {
            Some(dropout) => dropout.apply(x, self.dropout, self.layer, self.first),
            None => Ok(x.clone()),
        }
    }

    /// The same adapter without the graph that computed its matrices.
    pub(crate) fn detach(&self) -> Self {
        Self { a: self.a.detach(), b: self.b.detach(), ..self.clone() }
    }

    /// For the gradient dy `[T, out]` of the adapter's contribution, the gradients of x `[T, in]` and of the narrow product x
    /// A^T `[T, R]`, in f32.
    pub(crate) fn backward(&self, dy: &Tensor, rows: Option<&AdapterRows>) -> Result<[Tensor; 2]> {
        let d_narrow = (product_of(dy, &self.b)? * self.scale)?;
        Ok([self.input(&product_of(&d_narrow, &self.a)?, rows)?, d_narrow])
    }

    /// Gradients of A and B, from x, the gradient of the adapter's contribution and the gradient of the narrow product.
    pub(crate) fn d_matrices(
        &self,
        x: &Tensor,
        dy: &Tensor,
        d_narrow: &Tensor,
        rows: Option<&AdapterRows>,
    ) -> Result<[Tensor; 2]> {
        let x = self.input(x, rows)?;
        let narrow = (product_of(&x, &self.a.t()?)? * self.scale)?;
        let [d_a, d_b] = [product_of(&d_narrow.t()?, &x)?, product_of(&dy.t()?, &narrow)?];
        Ok([cast(&d_a, self.a.dtype())?, cast(&d_b, self.b.dtype())?])
    }
}
