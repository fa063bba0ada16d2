//! Attention of a model that generates: over the ranks while the prompt is read, over the caches afterwards.

use crate::cache::{Cache, owner};
use candle_core::{Device, Result, Tensor, bail};
use ringspan::attention::Group;
use ringspan::comm::Buffer;
use ringspan::kernel::{HeadMap, Inputs, Partial, Place, Score, Tile, View};
use ringspan::{Band, Mask, Run};
use ringspan_candle::{Attend, Context};
use std::cell::RefCell;
use std::ops::Range;

/// Reads the prompt: attention over all ranks, and each keeps the keys and values of its own tokens.
pub(crate) struct Prefill<'a> {
    context: &'a Context,
    cache: RefCell<&'a mut Cache>,
}

impl<'a> Prefill<'a> {
    /// The prompt lies as in the context's layout; the cache is empty.
    pub(crate) fn new(context: &'a Context, cache: &'a mut Cache) -> Self {
        cache.grow(context.layout().runs(context.group().rank()));
        Self { context, cache: RefCell::new(cache) }
    }
}

impl Attend for Prefill<'_> {
    fn attention(&self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask, scale: f32) -> Result<Tensor> {
        self.cache.borrow_mut().append(layer, k, v)?;
        self.context.attention(layer, q, k, v, mask, scale)
    }

    fn positions(&self) -> &[usize] {
        self.context.positions()
    }
}

/// One new token, which every rank has: each looks at the keys it keeps, and the partial results are merged.
pub(crate) struct Decode<'a> {
    group: &'a Group,
    cache: RefCell<&'a mut Cache>,
    position: [usize; 1],
    keeps: bool,
}

impl<'a> Decode<'a> {
    /// The new token stands at `position`, behind all others.
    pub(crate) fn new(group: &'a Group, cache: &'a mut Cache, position: usize) -> Self {
        let keeps = owner(position, group.size()) == group.rank();
        if keeps {
            cache.grow(&[Run { document: 0, start: position, len: 1, step: 1 }]);
        }
        Self { group, cache: RefCell::new(cache), position: [position], keeps }
    }

    /// What this rank's keys give the query, as `[out, max, sum]` in one block.
    fn local(
        &self,
        layer: usize,
        q: View<'_>,
        v_dim: usize,
        kv_heads: usize,
        mask: &Mask,
        score: &Score,
    ) -> Result<Partial> {
        let cache = self.cache.borrow();
        let mut partial = Partial::new(1, q.heads, v_dim);
        let Some((k, v)) = cache.layer(layer) else { return Ok(partial) };
        let rows = cache.visible(self.position[0], mask).map_err(candle_core::Error::wrap)?;
        // Everything in these rows is visible, and no score here asks where they lie.
        let all = |len: usize| Band { lo: 1 - len as i64, hi: 0 };
        let tile = |k: Range<usize>| Tile { q: 0..1, band: all(k.len()), k, place: Place::START };
        let tiles: Vec<Tile> = rows.into_iter().map(tile).collect();
        if tiles.is_empty() {
            return Ok(partial);
        }
        let group = q.heads / kv_heads.max(1);
        let map = (0..q.heads).map(|head| head / group.max(1)).collect();
        let map = HeadMap::new(map, kv_heads).map_err(candle_core::Error::wrap)?;
        let inputs = Inputs { q, k, v, heads: &map, score, bias: None };
        self.group.kernel().forward(&inputs, &tiles, &mut partial);
        Ok(partial)
    }
}

impl Attend for Decode<'_> {
    fn attention(&self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask, scale: f32) -> Result<Tensor> {
        let (tokens, heads, dim) = q.dims3()?;
        let (_, kv_heads, v_dim) = v.dims3()?;
        if tokens != 1 {
            bail!("decoding takes one token at a time, not {tokens}");
        }
        if self.keeps {
            self.cache.borrow_mut().append(layer, k, v)?;
        }
        let q = q.flatten_all()?.to_vec1::<f32>()?;
        let Some(q) = View::new(&q, 1, heads, dim) else { bail!("a query of {} elements", q.len()) };
        let partial = self.local(layer, q, v_dim, kv_heads, mask, &Score::new(scale))?;
        let out = merge(self.group, partial, heads, v_dim).map_err(candle_core::Error::wrap)?;
        Tensor::from_vec(out, (1, heads, v_dim), &Device::Cpu)
    }

    fn positions(&self) -> &[usize] {
        &self.position
    }
}

/// Attention of one token over the keys of all ranks, from what each rank's keys give: the same bits on every rank,
/// because all add the same numbers in rank order.
fn merge(group: &Group, partial: Partial, heads: usize, v_dim: usize) -> ringspan::Result<Vec<f32>> {
    let Partial { out, max, sum } = partial;
    let message: Vec<f32> = out.into_iter().chain(max).chain(sum).collect();
    let size = message.len();
    let parts = group.cp().all_gather(Buffer::F32(message))?;
    let mut views = Vec::with_capacity(parts.len());
    for (peer, part) in parts.iter().enumerate() {
        match &**part {
            Buffer::F32(values) if values.len() == size => views.push(values.split_at(heads * v_dim)),
            _ => {
                return Err(ringspan::Error::Communicator {
                    rank: group.rank(),
                    operation: "the merge of a new token's attention".into(),
                    problem: format!("rank {peer} sent no part of {size} floats"),
                });
            }
        }
    }
    let mut out = vec![0.0; heads * v_dim];
    for (head, out) in out.chunks_exact_mut(v_dim.max(1)).enumerate() {
        let greatest = views.iter().map(|(_, stats)| stats[head]).fold(f32::NEG_INFINITY, f32::max);
        if greatest == f32::NEG_INFINITY {
            continue;
        }
        let mut total = 0.0;
        for (values, stats) in &views {
            let weight = (stats[head] - greatest).exp2();
            total += weight * stats[heads + head];
            for (sum, value) in out.iter_mut().zip(&values[head * v_dim..]) {
                *sum += weight * value;
            }
        }
        out.iter_mut().for_each(|value| *value /= total);
    }
    Ok(out)
}
