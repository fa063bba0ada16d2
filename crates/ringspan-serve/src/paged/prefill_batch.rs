//! The chunks of prompts in a step: which rank computes which of their tokens, and which keys it sends and receives.

use super::cache::PagedCache;
use super::elements::{Elements, of_message};
use super::layer_kind::{LayerKind, LayerPages};
use super::page_map::PageMap;
use crate::error::{Error, Result};
use crate::step::StepSequence;
use candle_core::DType;
use ringspan::attention::{Group, Inputs, on_device};
use ringspan::kernel::{Data, View};
use ringspan::schedule::{Pass, TensorSizes};
use ringspan::{Documents, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The sequences of a step with several new tokens, as one rank sees them in layers of one kind; each is a document.
///
/// Each rank computes an early and a late part of each chunk (zigzag), so that causal work is even. Keys and values are with the
/// owners of their pages.
pub(super) struct PrefillBatch {
    query: Layout,
    key: Layout,
    /// For each token of this rank's key layout, its row in the cache.
    cache_rows: Vec<u32>,
    /// For each other rank, the rows computed here whose pages that rank has.
    outgoing: Vec<Vec<usize>>,
    local_writes: Vec<(usize, u32)>,
    /// For each rank, the cache rows of the keys that it sends, in the order in which it sends them.
    incoming: Vec<Vec<u32>>,
    schedules: RefCell<HashMap<Mask, Rc<Schedule>>>,
}

/// Strategies in the order of preference among equals: a ring hides its transfers, and holds two blocks.
const STRATEGIES: [StrategyKind; 3] = [StrategyKind::Ring, StrategyKind::Halo, StrategyKind::PassQ];

impl PrefillBatch {
    pub(super) fn new(map: &PageMap, sequences: &[&StepSequence], kind: LayerKind) -> Result<Self> {
        let continued: Vec<(usize, usize)> =
            sequences.iter().map(|sequence| (sequence.start, sequence.tokens.len())).collect();
        let lengths: Vec<usize> = continued.iter().map(|(start, tokens)| start + tokens).collect();
        let tables: Vec<LayerPages> = sequences.iter().map(|sequence| LayerPages::of(sequence, kind)).collect();
        let held: Vec<(usize, usize)> = tables
            .iter()
            .zip(&lengths)
            .map(|(table, length)| (table.first * map.page_size, length - table.first * map.page_size))
            .collect();
        let query = Layout::new(LayoutKind::PerDocumentZigzag, &Documents::continued(&continued)?, map.ranks)?;
        let key = Layout::paged(&Documents::continued(&held)?, map.page_size, map.ranks)?;
        let mut cache_rows = Vec::with_capacity(key.tokens(map.rank));
        for (table, length) in tables.iter().zip(&lengths) {
            map.push_rows(table, *length, &mut cache_rows);
        }
        let (mut outgoing, mut local_writes) = (vec![Vec::new(); map.ranks], Vec::new());
        let mut incoming = vec![Vec::new(); map.ranks];
        for (from, incoming) in incoming.iter_mut().enumerate() {
            let mut row = 0;
            for run in query.runs(from) {
                let table = &tables[run.document];
                for position in run.positions() {
                    let owner = map.owner(position);
                    match (from == map.rank, owner == map.rank) {
                        (true, true) => local_writes.push((row, map.row(table, position))),
                        (true, false) => outgoing[owner].push(row),
                        (false, true) => incoming.push(map.row(table, position)),
                        (false, false) => {}
                    }
                    row += 1;
                }
            }
        }
        Ok(Self { query, key, cache_rows, outgoing, local_writes, incoming, schedules: RefCell::default() })
    }

    /// The layout of the new tokens over the ranks.
    pub(super) fn layout(&self) -> &Layout {
        &self.query
    }

    /// Sends the new keys `[T, G, D]` and values `[T, G, Dv]` to the ranks that have their pages, and writes those that this rank
    /// has into the cache. The first rows of both are those of the chunks.
    pub(super) fn store(
        &self,
        group: &Group,
        cache: &mut PagedCache,
        layer: usize,
        keys: Data,
        values: Data,
    ) -> Result<()> {
        let (heads, dim, v_dim) = cache.sizes();
        let (dtype, widths) = (cache.computed(), [heads * dim, heads * v_dim]);
        cache.write(layer, keys, values, self.local_writes.iter().copied())?;
        if group.size() == 1 {
            return Ok(());
        }
        let message = |rows: &Vec<usize>| {
            let mut packed = Elements::with_capacity(dtype, rows.len() * (widths[0] + widths[1]));
            for (from, width) in [(keys, widths[0]), (values, widths[1])] {
                rows.iter().try_for_each(|row| packed.extend(from.slice(row * width..(row + 1) * width)))?;
            }
            Ok::<_, Error>(packed.into_message())
        };
        let parts = self.outgoing.iter().map(message).collect::<Result<Vec<_>>>()?;
        let arrived = group.cp().all_to_all(parts)?;
        for (from, (rows, message)) in
            self.incoming.iter().zip(arrived).enumerate().filter(|(from, _)| *from != group.rank())
        {
            let numbers = received(&message, dtype, rows.len() * (widths[0] + widths[1]), from)?;
            let (keys, values) =
                (numbers.slice(0..rows.len() * widths[0]), numbers.slice(rows.len() * widths[0]..numbers.len()));
            cache.write(layer, keys, values, rows.iter().copied().enumerate())?;
        }
        Ok(())
    }

    /// Attention of the chunks' queries on this rank over the keys of all ranks: `[T, H, Dv]`.
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
        let sizes = TensorSizes {
            heads: q.heads,
            kv_heads: k.heads,
            dim: q.dim,
            v_dim: v.dim,
            wire: cache.bytes_on_the_wire(),
            bias_heads: 0,
        };
        let schedule = self.schedule(group, mask, &sizes)?;
        let forward = on_device::forward(group, &schedule, &Inputs::new(q, k, v, score))?;
        Ok(group.kernel().to_host(forward.out)?)
    }

    /// The schedule for a mask whose busiest rank sends least, the same on all ranks; it is made once a step.
    fn schedule(&self, group: &Group, mask: &Mask, sizes: &TensorSizes) -> Result<Rc<Schedule>> {
        if let Some(schedule) = self.schedules.borrow().get(mask) {
            return Ok(schedule.clone());
        }
        let make = |strategy| Schedule::new(strategy, &self.query, &self.key, mask, group.grid());
        let strategies = if group.size() == 1 { &STRATEGIES[..1] } else { &STRATEGIES };
        let mut cheapest: Option<(u64, Schedule)> = None;
        for strategy in strategies {
            let schedule = make(*strategy)?;
            let bytes = |rank| schedule.bytes_sent(Pass::Forward, rank, sizes);
            let most = (0..group.size()).map(bytes).try_fold(0, |most, bytes| Ok::<_, Error>(bytes?.max(most)))?;
            if cheapest.as_ref().is_none_or(|(least, _)| most < *least) {
                cheapest = Some((most, schedule));
            }
        }
        let Some((_, schedule)) = cheapest else { return Err(Error::Step("no strategy to choose from".into())) };
        let schedule = Rc::new(schedule);
        self.schedules.borrow_mut().insert(mask.clone(), schedule.clone());
        Ok(schedule)
    }
}

/// The numbers of a message from a rank, of which there must be `expected`.
pub(super) fn received(
    message: &ringspan::comm::Buffer,
    dtype: DType,
    expected: usize,
    from: usize,
) -> Result<Data<'_>> {
    let numbers = of_message(message, dtype)?;
    match numbers.len() == expected {
        true => Ok(numbers),
        false => Err(Error::Step(format!("rank {from} sent {} numbers, not {expected}", numbers.len()))),
    }
}
