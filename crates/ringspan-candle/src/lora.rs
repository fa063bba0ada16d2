//! A low-rank adapter (LoRA) of a linear layer (Hu et al., 2021, arXiv:2106.09685).
//!
//! Shape letters: T tokens, R rank of the adapter.

use crate::adapter_rows::AdapterRows;
use crate::cast::cast;
use crate::linear::linear_wide;
use crate::tensor_product::product_of;
use candle_core::{Result, Tensor, bail};
use std::collections::BTreeMap;
use std::sync::Arc;

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// The checkpoint names of the matrices A and B that adapt the linear layer `name`.
#[must_use]
pub fn weight_names(name: &str) -> [String; 2] {
    [format!("{name}.{A}"), format!("{name}.{B}")]
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
    /// For each layer with several adapters that are joined, these, in the order of their columns.
    pub joined: BTreeMap<String, Arc<[JoinedAdapter]>>,
}

/// One of several adapters of a layer whose matrices are joined: A below each other, B side by side. So one product with the layer's
/// weight serves rows of all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JoinedAdapter {
    /// The number by which rows ask for it ([`AdapterSelection`](crate::AdapterSelection)).
    pub slot: u64,
    /// Its rank and scale.
    pub size: AdapterSize,
}

/// How the matrices of a layer's adapter are used: everything but their values.
#[derive(Debug, Clone)]
pub(crate) struct AdapterSettings {
    scale: f64,
    dropout: f64,
    layer: usize,
    joined: Option<Arc<[JoinedAdapter]>>,
}

impl Adapters {
    /// No adapters.
    #[must_use]
    pub const fn none() -> Self {
        Self { sizes: BTreeMap::new(), dropout: 0.0, joined: BTreeMap::new() }
    }

    /// Several adapters as one, for rows that each ask for one of them by its slot. A layer is adapted if any of them adapts it; its
    /// matrices are those of the adapters that do, joined in this order.
    #[must_use]
    pub fn joined(adapters: &[(u64, &Self)]) -> Self {
        let mut joined: BTreeMap<String, Vec<JoinedAdapter>> = BTreeMap::new();
        for (slot, adapter) in adapters {
            for (layer, size) in &adapter.sizes {
                joined.entry(layer.clone()).or_default().push(JoinedAdapter { slot: *slot, size: *size });
            }
        }
        let whole = |(layer, all): (&String, &Vec<JoinedAdapter>)| {
            let rank = all.iter().map(|adapter| adapter.size.rank).sum();
            (layer.clone(), AdapterSize { rank, scale: 1.0 })
        };
        let sizes = joined.iter().map(whole).collect();
        let joined = joined.into_iter().map(|(layer, all)| (layer, all.into())).collect();
        Self { sizes, dropout: 0.0, joined }
    }

    /// The size of the adapter of the layer with this whole name, if the layer is adapted.
    #[must_use]
    pub fn size(&self, layer: &str) -> Option<AdapterSize> {
        self.sizes.get(layer).copied()
    }

    /// Whether adapters treat rows differently: they drop a share of their inputs in training, or each row asks for one of several.
    pub(crate) fn depend_on_rows(&self) -> bool {
        !self.sizes.is_empty() && self.dropout > 0.0 || !self.joined.is_empty()
    }

    /// The settings of a layer's adapter, if the layer is adapted. Each layer has dropout of its own, as in PEFT.
    pub(crate) fn adapter_of(&self, layer: &str) -> Option<AdapterSettings> {
        let AdapterSize { scale, .. } = self.size(layer)?;
        // Half of the 64-bit words are used, since the generator counts upwards from this number.
        let stream = (dropout_stream(layer) >> 1) as usize;
        Some(AdapterSettings { scale, dropout: self.dropout, layer: stream, joined: self.joined.get(layer).cloned() })
    }
}

impl AdapterSettings {
    /// The adapter with these matrices, or this rank's shards of them; `first` is the first column of the layer's input on
    /// this rank.
    pub(crate) fn adapter(self, a: &Tensor, b: &Tensor, first: usize) -> Adapter {
        let Self { scale, dropout, layer, joined } = self;
        Adapter { a: a.clone(), b: b.clone(), scale, dropout, layer, first, joined }
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
    /// If the matrices are those of several adapters, these: then each row has the contribution of the one that it asks for.
    pub joined: Option<Arc<[JoinedAdapter]>>,
}

impl Adapter {
    /// The adapter's contribution to the layer, `scale (x A^T) B^T`: x `[T, in]` to `[T, out]`. It is f32, since it is
    /// rounded once, after it was added to the layer's own output; differentiable in x and in the matrices. `rows` is the dropout of x
    /// in training, or which of joined adapters each row asks for.
    ///
    /// # Errors
    /// Shapes that do not fit, and joined adapters of which rows do not ask for one.
    pub fn delta(&self, x: &Tensor, rows: Option<&AdapterRows>) -> Result<Tensor> {
        linear_wide(&self.down(x, rows)?, &self.b)
    }

    /// The input of B, `scale x A^T`: x `[T, in]` to `[T, R]`, with `rows` as in [`Self::delta`].
    ///
    /// # Errors
    /// As for [`delta`](Self::delta).
    pub fn down(&self, x: &Tensor, rows: Option<&AdapterRows>) -> Result<Tensor> {
        let narrow = linear_wide(&self.input(x, rows)?, &self.a)?;
        // Scaling the narrow product costs less than scaling the output; product and scale are rounded together.
        let scaled = match &self.joined {
            None => (narrow * self.scale)?,
            Some(joined) => selected(&narrow, joined, rows)?,
        };
        cast(&scaled, x.dtype())
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
        if self.joined.is_some() {
            bail!("adapters that are joined to be served have no gradients");
        }
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

/// Keeps those products `[T, R]` of each row with joined matrices A that belong to the adapter that the row asks for, scaled. The others
/// become zeros, even where they are not finite: a broken adapter does not disturb rows of others.
fn selected(narrow: &Tensor, joined: &[JoinedAdapter], rows: Option<&AdapterRows>) -> Result<Tensor> {
    let selection = AdapterRows::selection(rows, narrow.dim(0)?)?;
    let (mut is_asked_for, mut scales) = (Vec::new(), Vec::new());
    for slot in selection.adapters() {
        for JoinedAdapter { slot: of_columns, size } in joined {
            let is_own = *slot == Some(*of_columns);
            is_asked_for.extend(std::iter::repeat_n(u8::from(is_own), size.rank));
            scales.extend(std::iter::repeat_n(if is_own { size.scale as f32 } else { 0.0 }, size.rank));
        }
    }
    let (shape, device) = (narrow.shape(), narrow.device());
    let is_asked_for = Tensor::from_vec(is_asked_for, shape, device)?;
    let scaled = (narrow * Tensor::from_vec(scales, shape, device)?)?;
    is_asked_for.where_cond(&scaled, &scaled.zeros_like()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter_rows::AdapterSelection;
    use candle_core::Device;

    fn wave(shape: (usize, usize), pace: f32) -> Result<Tensor> {
        Tensor::from_vec((0..shape.0 * shape.1).map(|i| (i as f32 * pace).sin()).collect(), shape, &Device::Cpu)
    }

    fn one(rank: usize, scale: f64, pace: f32) -> Result<(Adapters, Adapter)> {
        let sizes = BTreeMap::from([("layer".to_owned(), AdapterSize { rank, scale })]);
        let adapters = Adapters { sizes, ..Adapters::none() };
        let [a, b] = [wave((rank, 6), pace)?, wave((5, rank), 2.0 * pace)?];
        let adapter = adapters.adapter_of("layer").expect("adapted").adapter(&a, &b, 0);
        Ok((adapters, adapter))
    }

    /// Rows of joined adapters have the contribution of the one that they ask for, also if another is broken; rows without one have none.
    #[test]
    fn a_row_has_the_contribution_of_its_own_adapter() -> Result<()> {
        let [(first, mut alone), (second, other)] = [one(2, 0.5, 0.7)?, one(3, -2.0, 0.3)?];
        let joined = Adapters::joined(&[(4, &first), (0, &second)]);
        assert_eq!(joined.size("layer").map(|size| size.rank), Some(5));
        let x = wave((5, 6), 0.9)?;
        let asked = vec![Some(0), None, Some(4), Some(4), Some(7)];
        let selection = AdapterRows::Selection(AdapterSelection::new(asked));
        for broken in [false, true] {
            if broken {
                alone.a = (alone.a * f64::INFINITY)?;
            }
            let (a, b) = (Tensor::cat(&[&alone.a, &other.a], 0)?, Tensor::cat(&[&alone.b, &other.b], 1)?);
            let adapter = joined.adapter_of("layer").expect("adapted").adapter(&a, &b, 0);
            let rows = adapter.delta(&x, Some(&selection))?.to_vec2::<f32>()?;
            let [of_first, of_second] = [alone.delta(&x, None)?.to_vec2::<f32>()?, other.delta(&x, None)?.to_vec2()?];
            let zeros = vec![0.0; 5];
            let expected = [&of_second[0], &zeros, &of_first[2], &of_first[3], &zeros];
            for (at, (row, expected)) in rows.iter().zip(expected).enumerate().filter(|(at, _)| !broken || at / 2 != 1)
            {
                let difference = row.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(difference < 1e-6, "row {at}: {row:?} is not {expected:?}");
            }
            assert!(adapter.delta(&x, None).is_err(), "rows must say which adapter they ask for");
            assert!(adapter.delta(&x, Some(&selection.narrow(0..4))).is_err(), "each row must");
            assert!(adapter.backward(&wave((5, 5), 0.2)?, Some(&selection)).is_err());
        }
        Ok(())
    }
}
