//! One rank's share of the key-value cache.

use candle_core::{Result, Tensor, bail};
use ringspan::Run;
use ringspan::kernel::View;

/// Generated tokens go to the ranks in blocks of this many positions: long enough that a rank's rows stay long runs,
/// short enough that the ranks fill evenly.
pub const BLOCK: usize = 64;

/// The rank, of `ranks`, that keeps the keys and values of the generated token at `position`.
pub fn owner(position: usize, ranks: usize) -> usize {
    (position / BLOCK) % ranks.max(1)
}

/// The keys and values of the tokens that this rank keeps, layer by layer.
///
/// Shape letters: n tokens held, G key-value heads, D and Dv head widths.
#[derive(Debug)]
pub struct Cache {
    layers: Vec<Layer>,
    /// Positions of the rows, in row order.
    runs: Vec<Run>,
    /// Rows that will be needed, so that growth does not copy.
    expected: usize,
}

#[derive(Debug, Default)]
struct Layer {
    kv_heads: usize,
    dim: usize,
    v_dim: usize,
    /// `[n, G, D]`
    keys: Vec<f32>,
    /// `[n, G, Dv]`
    values: Vec<f32>,
}

impl Cache {
    /// An empty cache for a model of `layers` layers, with room for `expected` tokens.
    pub fn new(layers: usize, expected: usize) -> Self {
        Self { layers: (0..layers).map(|_| Layer::default()).collect(), runs: Vec::new(), expected }
    }

    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Bytes of the keys and values held.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| (layer.keys.len() + layer.values.len()) * size_of::<f32>()).sum()
    }

    /// Says where the rows that every layer appends next stand.
    pub(crate) fn grow(&mut self, runs: &[Run]) {
        for run in runs.iter().filter(|run| run.len > 0) {
            match self.runs.last_mut() {
                Some(last) if last.step == 1 && run.step == 1 && last.start + last.len == run.start => {
                    last.len += run.len
                }
                _ => self.runs.push(Run { document: 0, ..*run }),
            }
        }
    }

    /// Appends keys `[T, G, D]` and values `[T, G, Dv]` to a layer.
    pub(crate) fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let (tokens, kv_heads, dim) = k.dims3()?;
        let (v_tokens, v_heads, v_dim) = v.dims3()?;
        let (held, expected) = (self.tokens(), self.expected);
        let layers = self.layers.len();
        let Some(layer) = self.layers.get_mut(layer) else { bail!("layer {layer} of a cache of {layers} layers") };
        if layer.keys.is_empty() {
            (layer.kv_heads, layer.dim, layer.v_dim) = (kv_heads, dim, v_dim);
            layer.keys.reserve_exact(expected.max(tokens) * kv_heads * dim);
            layer.values.reserve_exact(expected.max(tokens) * kv_heads * v_dim);
        }
        if (v_tokens, v_heads) != (tokens, kv_heads)
            || (layer.kv_heads, layer.dim, layer.v_dim) != (kv_heads, dim, v_dim)
        {
            bail!(
                "keys {:?} and values {:?} do not fit a cache of {} heads of {} and {}",
                k.dims(),
                v.dims(),
                layer.kv_heads,
                layer.dim,
                layer.v_dim
            );
        }
        layer.keys.extend(k.flatten_all()?.to_vec1::<f32>()?);
        layer.values.extend(v.flatten_all()?.to_vec1::<f32>()?);
        if layer.keys.len() != held * kv_heads * dim {
            bail!("a layer holds {} keys, but {held} tokens are announced", layer.keys.len() / (kv_heads * dim));
        }
        Ok(())
    }

    /// The keys and values of a layer; `None` while there are none.
    pub(crate) fn layer(&self, layer: usize) -> Option<(View<'_>, View<'_>)> {
        let Layer { kv_heads, dim, v_dim, keys, values } = self.layers.get(layer)?;
        let tokens = self.tokens();
        if tokens == 0 {
            return None;
        }
        Some((View::new(keys, tokens, *kv_heads, *dim)?, View::new(values, tokens, *kv_heads, *v_dim)?))
    }

    /// The tokens of the rows, in their order.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};

    fn run(start: usize, len: usize) -> Run {
        Run { document: 0, start, len, step: 1 }
    }

    #[test]
    fn generated_tokens_go_round_the_ranks_in_blocks() {
        for ranks in 1..6 {
            let mut counts = vec![0; ranks];
            for position in 0..BLOCK * ranks * 3 {
                counts[owner(position, ranks)] += 1;
            }
            assert_eq!(counts, vec![BLOCK * 3; ranks]);
        }
        assert_eq!((owner(BLOCK - 1, 3), owner(BLOCK, 3), owner(BLOCK * 3, 3)), (0, 1, 0));
    }

    #[test]
    fn rows_that_were_not_announced_are_refused() {
        let mut cache = Cache::new(1, 8);
        let k = Tensor::zeros((2, 1, 4), candle_core::DType::F32, &Device::Cpu).expect("tensor");
        assert!(cache.append(0, &k, &k).is_err());
        cache.grow(&[run(0, 4)]);
        assert!(cache.append(1, &k, &k).is_err(), "a layer that does not exist");
        assert!(cache.append(0, &k, &k).is_ok(), "4 rows in all");
    }
}
