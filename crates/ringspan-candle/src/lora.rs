//! A low-rank adapter beside a linear layer (Hu et al., 2021, arXiv:2106.09685).
//!
//! Shape letters: T tokens, R inner width.

use crate::cast::cast;
use crate::dropout::Drops;
use crate::linear::linear_wide;
use crate::matmul::product_of;
use candle_core::{Result, Tensor};
use std::collections::BTreeMap;

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// The names of the two matrices beside the linear layer `name`.
#[must_use]
pub fn matrices(name: &str) -> [String; 2] {
    [format!("{name}.{A}"), format!("{name}.{B}")]
}

/// The linear layer beside which the matrix of this name stands, if it is one of an adapter.
#[must_use]
pub fn layer_of(name: &str) -> Option<&str> {
    name.strip_suffix(A).or_else(|| name.strip_suffix(B))?.strip_suffix('.')
}

/// A number of its own for each name, whatever others there are: FNV-1a. Layers drop apart from each other by it.
#[must_use]
pub fn stream(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The size of one adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdapterSize {
    /// Inner width R.
    pub rank: usize,
    /// What the product of its matrices is multiplied with.
    pub scale: f64,
}

/// Which linear layers of a model have adapters beside them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Adapters {
    /// By the whole names of the layers.
    pub sizes: BTreeMap<String, AdapterSize>,
    /// Share of an adapter's input that is dropped in training, in 0..1.
    pub dropout: f64,
}

/// How the matrices of one adapter are used.
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
        Self { sizes: BTreeMap::new(), dropout: 0.0 }
    }

    /// The size of the adapter beside the layer with this whole name, if it has one.
    #[must_use]
    pub fn size(&self, layer: &str) -> Option<AdapterSize> {
        self.sizes.get(layer).copied()
    }

    /// Whether anything of their inputs is dropped in training.
    pub(crate) fn drop_inputs(&self) -> bool {
        !self.sizes.is_empty() && self.dropout > 0.0
    }

    /// What the adapter beside a layer does, if the layer has one. Each layer drops by itself, as in PEFT.
    pub(crate) fn beside(&self, layer: &str) -> Option<AdapterSettings> {
        let AdapterSize { scale, .. } = self.size(layer)?;
        // Half of the words: the generator counts on from this.
        Some(AdapterSettings { scale, dropout: self.dropout, layer: (stream(layer) >> 1) as usize })
    }
}

impl AdapterSettings {
    /// The adapter with these matrices, or a rank's parts of them; `first` is the first column of the layer's input that is here.
    pub(crate) fn adapter(self, a: &Tensor, b: &Tensor, first: usize) -> Adapter {
        let Self { scale, dropout, layer } = self;
        Adapter { a: a.clone(), b: b.clone(), scale, dropout, layer, first }
    }
}

/// An adapter's matrices, and how they are used. A rank that has part of a layer's width has as much of the adapter's.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// `[R, in]`.
    pub a: Tensor,
    /// `[out, R]`.
    pub b: Tensor,
    /// What the product of the matrices is multiplied with.
    pub scale: f64,
    /// Share of the input that is dropped in training, in 0..1.
    pub dropout: f64,
    /// Number of the layer, by which it drops apart from others.
    pub layer: usize,
    /// First column of the input that is here.
    pub first: usize,
}

impl Adapter {
    /// Its part of the layer, `scale (x A^T) B^T`: x `[T, in]` to `[T, out]`, f32, so that it is rounded once, as part of the
    /// layer; differentiable in x and in the matrices. In training, `drops` says what is dropped of x.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn part(&self, x: &Tensor, drops: Option<&Drops>) -> Result<Tensor> {
        linear_wide(&self.narrow(x, drops)?, &self.b)
    }

    /// What B is multiplied with, `scale x A^T`: x `[T, in]` to `[T, R]`, as in [`Self::part`].
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn narrow(&self, x: &Tensor, drops: Option<&Drops>) -> Result<Tensor> {
        // The scale goes to the narrow matrix; both are rounded once.
        cast(&(linear_wide(&self.input(x, drops)?, &self.a)? * self.scale)?, x.dtype())
    }

    /// x with some of it dropped, or a gradient of what was dropped as one of x: dropping is its own backward.
    fn input(&self, x: &Tensor, drops: Option<&Drops>) -> Result<Tensor> {
        match drops.filter(|_| self.dropout > 0.0) {
            Some(drops) => drops.apply(x, self.dropout, self.layer, self.first),
            None => Ok(x.clone()),
        }
    }

    /// The same without a graph.
    pub(crate) fn detach(&self) -> Self {
        Self { a: self.a.detach(), b: self.b.detach(), ..self.clone() }
    }

    /// For the gradient dy `[T, out]` of its part: that of x, `[T, in]`, and that of the narrow product, `[T, R]`, in f32.
    pub(crate) fn backward(&self, dy: &Tensor, drops: Option<&Drops>) -> Result<[Tensor; 2]> {
        let d_narrow = (product_of(dy, &self.b)? * self.scale)?;
        Ok([self.input(&product_of(&d_narrow, &self.a)?, drops)?, d_narrow])
    }

    /// Gradients of A and B, for x, the gradient of the adapter's part and that of the narrow product.
    pub(crate) fn d_matrices(
        &self,
        x: &Tensor,
        dy: &Tensor,
        d_narrow: &Tensor,
        drops: Option<&Drops>,
    ) -> Result<[Tensor; 2]> {
        let x = self.input(x, drops)?;
        let narrow = (product_of(&x, &self.a.t()?)? * self.scale)?;
        let [d_a, d_b] = [product_of(&d_narrow.t()?, &x)?, product_of(&dy.t()?, &narrow)?];
        Ok([cast(&d_a, self.a.dtype())?, cast(&d_b, self.b.dtype())?])
    }
}
