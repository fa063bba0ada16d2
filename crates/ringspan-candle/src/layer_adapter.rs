//! The adapters of one layer: one for all rows, or several of which each row asks for one.
//!
//! Shape letters: T rows, n rows of one adapter, R rank of an adapter.

use crate::adapter_rows::AdapterRows;
use crate::linear::linear_wide;
use crate::lora::Adapter;
use candle_core::{DType, Result, Tensor, bail};

/// The adapters of a layer.
#[derive(Debug, Clone)]
pub enum LayerAdapter {
    /// One adapter for all rows.
    One(Adapter),
    /// Adapters by slot. A row has the contribution of the one that it asks for ([`AdapterSelection`](crate::AdapterSelection)), or none if
    /// the layer has no such adapter. They are served, and have no gradients.
    BySlot(Vec<(u64, Adapter)>),
}

/// The rows that ask for one adapter.
pub(crate) struct AdaptedRows {
    /// Indices of the rows `[n]`, in ascending order.
    pub(crate) rows: Vec<u32>,
    /// The contribution of the adapter to the output of these rows `[n, out]`, in f32.
    pub(crate) delta: Tensor,
}

impl From<Adapter> for LayerAdapter {
    fn from(adapter: Adapter) -> Self {
        Self::One(adapter)
    }
}

impl LayerAdapter {
    /// The contribution to the layer of x `[T, in]`, `[T, out]` in f32.
    ///
    /// # Errors
    /// Shapes that do not fit, and several adapters where rows do not say which of them they ask for.
    pub fn delta(&self, x: &Tensor, rows: Option<&AdapterRows>) -> Result<Tensor> {
        let adapters = match self {
            Self::One(adapter) => return adapter.delta(x, rows),
            Self::BySlot(adapters) => adapters,
        };
        let Some((_, first)) = adapters.first() else { bail!("no adapter of a layer that has some") };
        let mut whole = Tensor::zeros((x.dim(0)?, first.b.dim(0)?), DType::F32, x.device())?;
        for AdaptedRows { rows, delta } in adapted_rows(adapters, x, rows)? {
            let rows = Tensor::from_vec(rows, delta.dim(0)?, x.device())?;
            whole = whole.index_add(&rows, &delta, 0)?;
        }
        Ok(whole)
    }

    /// The adapter of all rows.
    ///
    /// # Errors
    /// Several adapters, which are not trained.
    pub(crate) fn trained(&self) -> Result<&Adapter> {
        match self {
            Self::One(adapter) => Ok(adapter),
            Self::BySlot(_) => bail!("adapters of which each row asks for one are served, and have no gradients"),
        }
    }

    /// The matrices that can be trained.
    pub(crate) fn matrices(&self) -> Option<[&Tensor; 2]> {
        match self {
            Self::One(adapter) => Some([&adapter.a, &adapter.b]),
            Self::BySlot(_) => None,
        }
    }

    /// The same adapters without the graphs that computed their matrices.
    pub(crate) fn detach(&self) -> Self {
        match self {
            Self::One(adapter) => Self::One(adapter.detach()),
            Self::BySlot(_) => self.clone(),
        }
    }
}

/// The rows of x `[T, in]` that ask for each adapter, of those that are asked for, with its contribution. Rows are computed adapter by
/// adapter: each reads the matrices of its own, and a broken one does not reach rows of others.
pub(crate) fn adapted_rows(
    adapters: &[(u64, Adapter)],
    x: &Tensor,
    rows: Option<&AdapterRows>,
) -> Result<Vec<AdaptedRows>> {
    let selection = AdapterRows::selection(rows, x.dim(0)?)?;
    let mut adapted = Vec::new();
    for (slot, adapter) in adapters {
        let asking = selection.adapters().iter().zip(0..).filter(|(asked, _)| **asked == Some(*slot));
        let rows: Vec<u32> = asking.map(|(_, row)| row).collect();
        if rows.is_empty() {
            continue;
        }
        let of_rows = match rows.len() == selection.adapters().len() {
            true => x.clone(),
            false => x.index_select(&Tensor::new(rows.as_slice(), x.device())?, 0)?,
        };
        let delta = linear_wide(&adapter.down(&of_rows, None)?, &adapter.b)?;
        adapted.push(AdaptedRows { rows, delta });
    }
    Ok(adapted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter_rows::AdapterSelection;
    use candle_core::Device;

    fn wave(shape: (usize, usize), pace: f32) -> Result<Tensor> {
        Tensor::from_vec((0..shape.0 * shape.1).map(|i| (i as f32 * pace).sin()).collect(), shape, &Device::Cpu)
    }

    fn adapter(rank: usize, scale: f64, pace: f32) -> Result<Adapter> {
        let [a, b] = [wave((rank, 6), pace)?, wave((5, rank), 2.0 * pace)?];
        Ok(Adapter { a, b, scale, dropout: 0.0, layer: 0, first: 0 })
    }

    /// Rows have the contribution of the adapter that they ask for, also if another is broken; rows without one have none.
    #[test]
    fn a_row_has_the_contribution_of_its_own_adapter() -> Result<()> {
        let (mut first, second, x) = (adapter(2, 0.5, 0.7)?, adapter(3, -2.0, 0.3)?, wave((5, 6), 0.9)?);
        let selection = AdapterSelection::new(vec![Some(0), None, Some(4), Some(4), Some(7)]);
        let selection = AdapterRows::Selection(selection);
        for broken in [false, true] {
            if broken {
                first.a = (first.a * f64::INFINITY)?;
                first.b = (first.b * f64::NAN)?;
            }
            let both = LayerAdapter::BySlot(vec![(4, first.clone()), (0, second.clone())]);
            let rows = both.delta(&x, Some(&selection))?.to_vec2::<f32>()?;
            let [of_first, of_second] = [&first, &second].map(|adapter| adapter.delta(&x, None)?.to_vec2::<f32>());
            let (of_first, of_second, zeros) = (of_first?, of_second?, vec![0.0; 5]);
            let expected = [&of_second[0], &zeros, &of_first[2], &of_first[3], &zeros];
            for (at, (row, expected)) in rows.iter().zip(expected).enumerate().filter(|(at, _)| !broken || at / 2 != 1)
            {
                let difference = row.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(difference < 1e-6, "row {at}: {row:?} is not {expected:?}");
            }
            assert!(both.delta(&x, None).is_err(), "rows must say which adapter they ask for");
            assert!(both.delta(&x, Some(&selection.narrow(0..4))).is_err(), "each row must");
        }
        Ok(())
    }
}
