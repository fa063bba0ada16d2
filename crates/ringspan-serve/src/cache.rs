//! One rank's share of the KV cache.

use candle_core::{Result, Tensor, bail};
use ringspan::Run;

/// Generated tokens are distributed over the ranks in blocks of this many positions: long enough that a rank's rows stay in long runs,
/// short enough that the ranks fill evenly.
pub const BLOCK: usize = 64;

/// The rank, of `ranks`, that caches the keys and values of the generated token at `position`.
pub fn owner(position: usize, ranks: usize) -> usize {
    (position / BLOCK) % ranks.max(1)
}

/// Upper limit on the generated tokens for which a rank allocates room at the start. Beyond it, room doubles whenever it is
/// full: a text may end long before its maximal length.
const MAX_PREALLOCATED: usize = 4096;

/// The cached keys and values of this rank's tokens, layer by layer, on the device that computes.
///
/// Shape letters: n cached tokens, G key-value heads, D and Dv widths of a key head and of a value head.
#[derive(Debug)]
pub struct Cache {
    layers: Vec<Option<Layer>>,
    /// Positions of the cached tokens, in the order of the rows.
    runs: Vec<Run>,
    /// Rows for which a layer allocates room at first, so that growth does not copy.
    expected: usize,
    /// Upper limit of the rows that are expected: room does not grow past it as long as it suffices.
    most: usize,
}

#[derive(Debug)]
struct Layer {
    /// `[n, G, D]`
    keys: GrowingTensor,
    /// `[n, G, Dv]`
    values: GrowingTensor,
}

/// A tensor that grows by rows, which are written in place.
#[derive(Debug)]
struct GrowingTensor {
    /// The allocated rows, of which the first `filled` are in use.
    all: Tensor,
    filled: usize,
}

impl GrowingTensor {
    /// No rows yet, but room for `room` rows of the type and width of `like`.
    fn new(like: &Tensor, room: usize) -> Result<Self> {
        Ok(Self { all: Tensor::zeros(with_rows(like, room), like.dtype(), like.device())?, filled: 0 })
    }

    /// Writes rows in place, after the filled ones; room grows to at most `most` rows if these suffice. A
    /// [`tensor`](Self::tensor) that was returned before must not be in use any more, not even by a graph.
    fn append(&mut self, rows: &Tensor, most: usize) -> Result<()> {
        let (held, needed) = (self.all.dim(0)?, self.filled + rows.dim(0)?);
        if needed == self.filled {
            return Ok(());
        }
        if needed > held {
            let all = Self::new(&self.all, needed.max(held.saturating_mul(2).min(most)))?.all;
            if self.filled > 0 {
                all.slice_set(&self.tensor()?, 0, 0)?;
            }
            self.all = all;
        }
        self.all.slice_set(&rows.contiguous()?, 0, self.filled)?;
        self.filled = needed;
        Ok(())
    }

    /// The filled rows.
    fn tensor(&self) -> Result<Tensor> {
        self.all.narrow(0, 0, self.filled)
    }

    /// Whether rows of this width can be appended.
    fn takes(&self, rows: &Tensor) -> bool {
        self.all.dims()[1..] == rows.dims()[1..]
    }

    fn bytes(&self) -> usize {
        self.filled * self.all.dims()[1..].iter().product::<usize>() * self.all.dtype().size_in_bytes()
    }
}

/// The dimensions of a tensor, with another number of rows.
fn with_rows(tensor: &Tensor, rows: usize) -> Vec<usize> {
    std::iter::once(rows).chain(tensor.dims().iter().skip(1).copied()).collect()
}

impl Cache {
    /// An empty cache for a model of `layers` layers, with room for `expected` tokens.
    pub fn new(layers: usize, expected: usize) -> Self {
        Self { layers: (0..layers).map(|_| None).collect(), runs: Vec::new(), expected, most: usize::MAX }
    }

    /// An empty cache of one of `ranks` ranks, with room for its `prompt` tokens and its share of up to `generated` others.
    pub(crate) fn generating(layers: usize, prompt: usize, generated: usize, ranks: usize) -> Self {
        let share = generated.div_ceil(ranks.max(1)).saturating_add(BLOCK).min(generated);
        let expected = prompt.saturating_add(share.min(MAX_PREALLOCATED));
        Self { most: prompt.saturating_add(share), ..Self::new(layers, expected) }
    }

    /// Number of cached tokens.
    pub fn tokens(&self) -> usize {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Bytes of the cached keys and values.
    pub fn bytes(&self) -> usize {
        self.layers.iter().flatten().map(|layer| layer.keys.bytes() + layer.values.bytes()).sum()
    }

    /// Announces the positions of the rows that every layer will append next.
    pub(crate) fn announce(&mut self, runs: &[Run]) {
        for run in runs.iter().filter(|run| run.len > 0) {
            match self.runs.last_mut() {
                Some(last) if last.step == 1 && run.step == 1 && last.start + last.len == run.start => {
                    last.len += run.len
                }
                _ => self.runs.push(Run { document: 0, ..*run }),
            }
        }
    }

    /// Appends keys `[T, G, D]` and values `[T, G, Dv]` to a layer, on their device.
    pub(crate) fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let ((tokens, kv_heads, _), (v_tokens, v_heads, _)) = (k.dims3()?, v.dims3()?);
        let (held, expected, layers) = (self.tokens(), self.expected.max(tokens), self.layers.len());
        let most = self.most;
        let Some(layer) = self.layers.get_mut(layer) else { bail!("layer {layer} of a cache of {layers} layers") };
        let Layer { keys, values } = match layer {
            Some(layer) => layer,
            None => {
                layer.insert(Layer { keys: GrowingTensor::new(k, expected)?, values: GrowingTensor::new(v, expected)? })
            }
        };
        if (v_tokens, v_heads) != (tokens, kv_heads) || !keys.takes(k) || !values.takes(v) {
            let (of_keys, of_values) = (&keys.all.dims()[1..], &values.all.dims()[1..]);
            bail!(
                "keys {:?} and values {:?} do not fit a cache whose rows are {of_keys:?} and {of_values:?}",
                k.dims(),
                v.dims()
            );
        }
        if keys.filled + tokens != held {
            bail!("a layer would hold {} keys, but {held} tokens are announced", keys.filled + tokens);
        }
        keys.append(k, most)?;
        values.append(v, most)
    }

    /// The keys `[n, G, D]` and values `[n, G, Dv]` of a layer; `None` before its first rows.
    pub(crate) fn layer(&self, layer: usize) -> Result<Option<(Tensor, Tensor)>> {
        match self.layers.get(layer) {
            Some(Some(Layer { keys, values })) => Ok(Some((keys.tensor()?, values.tensor()?))),
            _ => Ok(None),
        }
    }

    /// The positions of the cached tokens, in the order of the rows.
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
        cache.announce(&[run(0, 2)]);
        assert!(cache.append(1, &k, &k).is_err(), "a layer that does not exist");
        assert!(cache.append(0, &k, &k).is_ok(), "2 rows in all");
        let wide = Tensor::zeros((0, 1, 5), candle_core::DType::F32, &Device::Cpu).expect("tensor");
        let refused = cache.append(0, &wide, &wide).expect_err("other heads").to_string();
        assert!(refused.contains("[0, 1, 5]") && refused.contains("[1, 4]"), "{refused}");
    }

    /// The room is bounded, since memory would not suffice for all tokens that a text might have.
    #[test]
    fn room_is_for_what_may_come_up_to_a_bound() {
        let room = |prompt, generated, ranks| Cache::generating(1, prompt, generated, ranks).expected;
        assert_eq!(room(10, 0, 2), 10);
        assert_eq!(room(10, 20, 2), 30);
        assert_eq!(room(10, 1000, 2), 10 + 500 + BLOCK, "blocks are not distributed evenly");
        for generated in [2_000_000_000, usize::MAX] {
            assert_eq!(room(10, generated, 3), 10 + MAX_PREALLOCATED);
        }
    }

    #[test]
    fn room_doubles_but_not_past_what_may_come() -> Result<()> {
        let (prompt, generated) = (5000, MAX_PREALLOCATED + 900);
        let mut cache = Cache::generating(1, prompt, generated, 1);
        let rooms = |cache: &Cache| cache.layers[0].as_ref().map(|layer| layer.keys.all.dim(0)).transpose();
        for (start, len, room) in [
            (0, prompt, prompt + MAX_PREALLOCATED),
            (prompt, MAX_PREALLOCATED, prompt + MAX_PREALLOCATED),
            (prompt + MAX_PREALLOCATED, 1, prompt + generated),
            (prompt + MAX_PREALLOCATED + 1, 899, prompt + generated),
        ] {
            let rows = Tensor::zeros((len, 1, 2), candle_core::DType::F32, &Device::Cpu)?;
            cache.announce(&[run(start, len)]);
            cache.append(0, &rows, &rows)?;
            assert_eq!(rooms(&cache)?, Some(room), "after {start} + {len} tokens");
        }
        Ok(())
    }

    #[test]
    fn rows_stay_in_order_when_more_come_than_were_expected() -> Result<()> {
        let (mut cache, mut wanted) = (Cache::new(1, 3), Vec::new());
        for (start, len) in [(0, 2), (2, 0), (2, 1), (3, 1), (4, 7)] {
            let numbers = |scale: f32| (start * 4..(start + len) * 4).map(|x| x as f32 * scale).collect::<Vec<_>>();
            let tensor = |scale| Tensor::from_vec(numbers(scale), (len, 2, 2), &Device::Cpu);
            cache.announce(&[run(start, len)]);
            cache.append(0, &tensor(1.0)?, &tensor(-1.0)?)?;
            wanted.extend(numbers(1.0));
            let (keys, values) = cache.layer(0)?.expect("keys and values");
            assert_eq!(keys.flatten_all()?.to_vec1::<f32>()?, wanted);
            assert_eq!(values.neg()?.flatten_all()?.to_vec1::<f32>()?, wanted);
        }
        assert_eq!((cache.tokens(), cache.bytes()), (11, 11 * 2 * 4 * 4));
        Ok(())
    }
}
