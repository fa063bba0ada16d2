//! The sequences of a step with few new tokens, mostly one, which every rank computes.

use super::cache::PagedCache;
use super::layer_kind::{LayerKind, LayerPages};
use super::page_map::PageMap;
use crate::error::Result;
use crate::step::StepSequence;
use ringspan::attention::{DecodeTiles, Group, Inputs, Merge, Tokens, on_device};
use ringspan::kernel::{Data, View};
use ringspan::{Mask, Run, Score};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The sequences with few new tokens, as one rank sees them in layers of one kind; each is a document. Each token is a query of its own, so
/// its attention has the same bits however many are computed together.
///
/// Each rank attends to its own pages, and one exchange a layer merges the results, whose size does not depend on the context.
pub(super) struct DecodeBatch {
    queries: Vec<Run>,
    /// This rank's keys, in the order of `cache_rows`.
    keys: Vec<Run>,
    cache_rows: Vec<u32>,
    /// The new tokens whose pages this rank has, with their rows in the cache.
    local_writes: Vec<(usize, u32)>,
    tiles: RefCell<HashMap<Mask, Rc<DecodeTiles>>>,
    /// Length of the longest sequence: positions of queries and keys are counted in it.
    longest: usize,
}

impl DecodeBatch {
    pub(super) fn new(map: &PageMap, sequences: &[&StepSequence], kind: LayerKind) -> Self {
        let (mut queries, mut keys, mut cache_rows, mut local_writes) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut longest = 0;
        for (document, sequence) in sequences.iter().enumerate() {
            let (StepSequence { start, tokens, .. }, table) = (sequence, LayerPages::of(sequence, kind));
            let end = start + tokens.len();
            for position in *start..end {
                if map.owner(position) == map.rank {
                    local_writes.push((queries.len(), map.row(&table, position)));
                }
                queries.push(Run { document, start: position, len: 1, step: 1 });
            }
            keys.extend(map.runs(&table, document, end));
            map.push_rows(&table, end, &mut cache_rows);
            longest = longest.max(end);
        }
        Self { queries, keys, cache_rows, local_writes, tiles: RefCell::default(), longest }
    }

    /// Writes the new keys `[n, G, D]` and values `[n, G, Dv]` whose pages this rank has into the cache.
    pub(super) fn store(&self, cache: &mut PagedCache, layer: usize, keys: Data, values: Data) -> Result<()> {
        cache.write(layer, keys, values, self.local_writes.iter().copied())
    }

    /// Attention of the new tokens over the keys of all ranks: `[n, H, Dv]` on every rank.
    pub(super) fn attend(
        &self,
        group: &Group,
        cache: &PagedCache,
        layer: usize,
        q: View,
        mask: &Mask,
        score: &Score,
    ) -> Result<Vec<f32>> {
        let (k, v) = cache.views(layer, &self.cache_rows)?;
        let (tiles, inputs) = (self.tiles(mask)?, Inputs::new(q, k, v, score));
        let (out, _) = on_device::decode_tiles(group, &tiles, &inputs, Merge::AllGather)?;
        Ok(group.kernel().to_host(out)?)
    }

    /// The visible keys for a mask, found once a step.
    fn tiles(&self, mask: &Mask) -> Result<Rc<DecodeTiles>> {
        if let Some(tiles) = self.tiles.borrow().get(mask) {
            return Ok(tiles.clone());
        }
        let seq_lens = (self.longest, self.longest);
        let tiles = DecodeTiles::joined(&Tokens { queries: &self.queries, keys: &self.keys, seq_lens }, mask)?;
        let tiles = Rc::new(tiles);
        self.tiles.borrow_mut().insert(mask.clone(), tiles.clone());
        Ok(tiles)
    }
}
