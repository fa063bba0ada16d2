//! One rank's pages of the KV cache.

use super::cache_memory::{CacheMemory, PrefaultBudget};
use super::elements::{Elements, of_message};
use super::kv_dtype::KvDtype;
use super::layer_kind::{LayerKind, LayerPages, PerKind, window_lookback};
use super::page_map::PageMap;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::step::{CachePage, PageCopy, Step, StepSequence};
use candle_core::DType;
use ringspan::comm::Buffer;
use ringspan::kernel::{Data, View};
use std::collections::HashSet;

/// The pages that one rank holds: for each layer, keys `[pages, page, G, D]` and values `[pages, page, G, Dv]`. Sliding-window layers
/// have other pages than full-attention layers, and another number of them. A page takes memory when it is first written, or a little
/// earlier.
#[derive(Debug)]
pub struct PagedCache {
    layers: Vec<Layer>,
    shape: Shape,
    dtype: KvDtype,
    /// The type in which the model computes, and in which ranks send new keys and values.
    computed: DType,
    pages: PerKind<usize>,
    page_size: usize,
    max_length: Option<usize>,
    /// The model's layer that is the first one of the cache.
    first_layer: usize,
    /// The largest number of tokens before its own that a token sees in layers with a window.
    lookback: Option<usize>,
    prefault_budget: PrefaultBudget,
}

#[derive(Debug)]
struct Layer {
    kind: LayerKind,
    keys: CacheMemory,
    values: CacheMemory,
}

impl Layer {
    fn memories(&mut self) -> [&mut CacheMemory; 2] {
        [&mut self.keys, &mut self.values]
    }
}

/// The sizes of a token's keys and values in a layer.
#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: usize,
    dim: usize,
    v_dim: usize,
}

impl Shape {
    fn of(model: &Model) -> Self {
        let [dim, v_dim] = model.decoder().head_dims();
        Self { heads: model.key_value_heads(), dim, v_dim }
    }

    /// Numbers of a token's keys, and of its values.
    fn widths(self) -> [usize; 2] {
        [self.heads * self.dim, self.heads * self.v_dim]
    }
}

impl PagedCache {
    /// A cache of `pages` pages of `page` tokens in the type in which the model computes, for sequences of up to the model's
    /// `max_position_embeddings` tokens.
    ///
    /// # Errors
    /// No pages, pages without tokens, more rows than can be numbered, and a model on a GPU.
    pub fn new(model: &Model, pages: impl Into<PerKind<usize>>, page_size: usize) -> Result<Self> {
        Self::with_dtype(model, pages, page_size, None)
    }

    /// Like [`new`](Self::new), in another type; `None` for that in which the model computes.
    ///
    /// # Errors
    /// As for [`new`](Self::new), and heads that the type does not allow.
    pub fn with_dtype(
        model: &Model,
        pages: impl Into<PerKind<usize>>,
        page_size: usize,
        dtype: Option<KvDtype>,
    ) -> Result<Self> {
        let pages = pages.into();
        if let Some(weight) = model.weights(0).values().find(|weight| !weight.device().is_cpu()) {
            return Err(Error::Step(format!(
                "the paged cache is in the memory of the CPU, and the model's weights are on {:?}",
                weight.device()
            )));
        }
        let (shape, dtype) = (Shape::of(model), dtype.map_or_else(|| KvDtype::of(model), Ok)?);
        dtype.check(model)?;
        let [k_width, v_width] = shape.widths();
        let of_token = model.layers() * bytes_per_token(model, dtype);
        let layer = |layer: usize| {
            let kind = LayerKind::of(model, layer);
            let pages = *pages.of(kind);
            let rows = pages.checked_mul(page_size).filter(|rows| u32::try_from(*rows).is_ok() && *rows > 0);
            let bytes = |rows: &usize| rows.checked_mul(of_token).filter(|bytes| isize::try_from(*bytes).is_ok());
            let Some(rows) = rows.filter(|rows| bytes(rows).is_some()) else {
                return Err(Error::Step(format!(
                    "a cache of {pages} pages of {page_size} tokens: possible is 1 to {} tokens in all, as far as there is memory",
                    u32::MAX
                )));
            };
            let zeros = |width: usize| CacheMemory::zeros(dtype, rows * width);
            Ok(Layer { kind, keys: zeros(k_width), values: zeros(v_width) })
        };
        let layers = model.layer_range().map(layer).collect::<Result<_>>()?;
        let max_length = model.decoder().config().max_position_embeddings;
        let first_layer = model.layer_range().start;
        let (computed, lookback) = (model.computed_in(), window_lookback(model));
        let prefault_budget = PrefaultBudget::default();
        Ok(Self {
            layers,
            shape,
            dtype,
            computed,
            pages,
            page_size,
            max_length,
            first_layer,
            lookback,
            prefault_budget,
        })
    }

    /// Sets the most tokens that a sequence may have. Rotary embeddings that depend on a length are made for this one, so that a
    /// token's keys are the same in every step.
    #[must_use]
    pub fn with_max_length(self, tokens: usize) -> Self {
        Self { max_length: Some(tokens), ..self }
    }

    /// The most tokens that a sequence may have; `None` if nothing limits it.
    #[must_use]
    pub fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// Numbers of pages.
    #[must_use]
    pub fn pages(&self) -> PerKind<usize> {
        self.pages
    }

    /// Tokens in a page.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let numbers: usize = self.shape.widths().iter().sum();
        let pages: usize = self.layers.iter().map(|layer| *self.pages.of(layer.kind)).sum();
        pages * self.page_size * self.dtype.bytes(numbers)
    }

    /// Bytes of a page of `page` tokens, over all layers, in this type; `None` for that in which the model computes.
    ///
    /// # Errors
    /// Heads that the type does not allow, and a model that computes in a type in which no cache is.
    pub fn bytes_per_page(model: &Model, page_size: usize, dtype: Option<KvDtype>) -> Result<usize> {
        Ok(model.layers() * Self::bytes_per_page_and_layer(model, page_size, dtype)?)
    }

    /// Bytes of a page of `page` tokens in one layer.
    ///
    /// # Errors
    /// As for [`bytes_per_page`](Self::bytes_per_page).
    pub(crate) fn bytes_per_page_and_layer(model: &Model, page_size: usize, dtype: Option<KvDtype>) -> Result<usize> {
        let dtype = dtype.map_or_else(|| KvDtype::of(model), Ok)?;
        dtype.check(model)?;
        Ok(page_size.saturating_mul(bytes_per_token(model, dtype)))
    }

    /// The kind of one of the model's layers, which must be in this cache.
    pub(super) fn kind(&self, layer: usize) -> Result<LayerKind> {
        Ok(self.layer(layer)?.kind)
    }

    fn layer(&self, layer: usize) -> Result<&Layer> {
        let own = layer.checked_sub(self.first_layer).and_then(|layer| self.layers.get(layer));
        own.ok_or_else(|| Error::Step(format!("layer {layer} of a cache of {} layers", self.layers.len())))
    }

    /// Whether there are layers of each kind.
    pub(super) fn kinds(&self) -> PerKind<bool> {
        let has = |kind| self.layers.iter().any(|layer| layer.kind == kind);
        PerKind { full: has(LayerKind::Full), window: has(LayerKind::Window) }
    }

    /// The type in which the model computes.
    pub(super) fn computed(&self) -> DType {
        self.computed
    }

    /// Bytes of one element of the keys and values that ranks send each other for attention: 2 if model and cache are in bf16, else 4.
    pub(super) fn bytes_on_the_wire(&self) -> usize {
        match (self.dtype, self.computed) {
            (KvDtype::Bf16, DType::BF16) => 2,
            _ => 4,
        }
    }

    /// Number of key-value heads G, widths D and Dv.
    pub(super) fn sizes(&self) -> (usize, usize, usize) {
        (self.shape.heads, self.shape.dim, self.shape.v_dim)
    }

    /// Checks that a step can be executed with this cache, in the same way on all ranks.
    pub(super) fn check(&self, map: &PageMap, step: &Step) -> Result<()> {
        for copy in &step.copies {
            let &PageCopy { rank, from, to, window, rows, .. } = copy;
            let Self { pages, page_size, .. } = self;
            let is_beyond = |[from, to]: [u32; 2], pages| pages <= from.max(to) as usize;
            if rank >= map.ranks
                || self.has(LayerKind::Full) && is_beyond([from, to], pages.full)
                || self.has(LayerKind::Window) && window.is_some_and(|window| is_beyond(window, pages.window))
                || rows > *page_size
            {
                let pages = pages.full;
                return Err(Error::Step(format!(
                    "{copy:?}, with {} ranks of {pages} pages of {page_size} tokens",
                    map.ranks
                )));
            }
        }
        let mut written = HashSet::new();
        for (number, sequence) in step.sequences.iter().enumerate() {
            let StepSequence { start, tokens, .. } = sequence;
            let wrong = |what: String| Err(Error::Step(format!("sequence {number} of the step {what}")));
            if tokens.is_empty() {
                return wrong("has no new tokens".into());
            }
            let end = start.saturating_add(tokens.len());
            if let Some(most) = self.max_length.filter(|most| end > *most) {
                return wrong(format!("grows to {end} tokens; possible are {most}"));
            }
            for kind in LayerKind::ALL.into_iter().filter(|kind| self.has(*kind)) {
                let (table, most) = (LayerPages::of(sequence, kind), *self.pages.of(kind));
                let first_needed = match (kind, self.lookback) {
                    (LayerKind::Window, Some(lookback)) => start.saturating_sub(lookback) / self.page_size,
                    _ => 0,
                };
                if table.end() != end.div_ceil(self.page_size) {
                    let (given, needed) = (table.end(), end.div_ceil(self.page_size));
                    return wrong(format!(
                        "has {given} pages; {end} tokens need {needed} of {} tokens",
                        self.page_size
                    ));
                }
                if table.first > first_needed {
                    return wrong(format!(
                        "has pages from {} on; its window begins in page {first_needed}",
                        table.first
                    ));
                }
                if let Some(page) = table.pages.iter().find(|page| **page as usize >= most) {
                    return wrong(format!("has page {page}; a rank has {most}"));
                }
                for index in start / self.page_size..table.end() {
                    let (page, owner) = (table.page(index), index % map.ranks);
                    if !written.insert((kind == LayerKind::Window, owner, page)) {
                        return wrong(format!("writes page {page} of rank {owner}, which is written already"));
                    }
                }
            }
        }
        Ok(())
    }

    fn has(&self, kind: LayerKind) -> bool {
        *self.kinds().of(kind)
    }

    /// Makes the first memory of each layer exist, which the first step writes.
    pub(crate) fn prefault_first(&mut self) {
        for memory in self.layers.iter_mut().flat_map(Layer::memories) {
            memory.prefault_piece();
        }
    }

    /// Makes memory exist that will be written next, behind what is written in each layer. Called after each step, it keeps later steps
    /// from waiting for much new memory.
    pub(crate) fn prefault(&mut self) {
        let mut memories: Vec<_> = self.layers.iter_mut().flat_map(Layer::memories).collect();
        self.prefault_budget.spend(&mut memories);
    }

    /// Executes the copies of this rank's pages.
    pub(super) fn copy(&mut self, rank: usize, copies: &[PageCopy]) {
        let widths = self.shape.widths();
        for PageCopy { from, to, window, rows, .. } in copies.iter().filter(|copy| copy.rank == rank) {
            for Layer { kind, keys, values } in &mut self.layers {
                let pages = if *kind == LayerKind::Window { *window } else { Some([*from, *to]) };
                let Some([from, to]) = pages else { continue };
                for (elements, width) in [keys, values].into_iter().zip(widths) {
                    let (from, to) = (from as usize * self.page_size * width, to as usize * self.page_size * width);
                    elements.copy_within(from..from + rows * width, to);
                }
            }
        }
    }

    /// Type of the numbers in rows that are read, and how many a token has in all layers, W. Numbers in blocks are read as f32.
    pub(crate) fn row_format(&self) -> (DType, usize) {
        let dtype = if self.dtype == KvDtype::Bf16 { DType::BF16 } else { DType::F32 };
        (dtype, self.layers.len() * self.shape.widths().iter().sum::<usize>())
    }

    /// The first rows of a page, `[rows, W]`: for each token and layer its keys, then its values. In sliding-window layers they are
    /// zeros if these have no such page any more.
    pub(crate) fn read_page(&self, page: CachePage, rows: usize) -> Result<Buffer> {
        let first = self.first_rows(page, rows)?;
        let (dtype, width) = self.row_format();
        let mut all = Elements::with_capacity(dtype, rows * width);
        for row in 0..rows {
            for Layer { kind, keys, values } in &self.layers {
                for (elements, width) in [keys, values].into_iter().zip(self.shape.widths()) {
                    let Some(first) = first.of(*kind) else {
                        match dtype {
                            DType::BF16 => all.extend(Data::Bf16(&vec![half::bf16::ZERO; width]))?,
                            _ => all.extend(Data::F32(&vec![0.0; width]))?,
                        }
                        continue;
                    };
                    let row = first + row;
                    match elements.data().slice(row * width..(row + 1) * width) {
                        blocks @ Data::Q8_0(_) => all.extend(Data::F32(&blocks.to_f32()))?,
                        numbers => all.extend(numbers)?,
                    }
                }
            }
        }
        Ok(all.into_message())
    }

    /// Overwrites the first rows of a page with what [`read_page`](Self::read_page) returns.
    pub(crate) fn write_page(&mut self, page: CachePage, rows: &Buffer) -> Result<()> {
        let (dtype, width) = self.row_format();
        let all = of_message(rows, dtype)?;
        let count = all.len() / width.max(1);
        let first = self.first_rows(page, count)?;
        let widths = self.shape.widths();
        let mut at = 0;
        for row in 0..count {
            for Layer { kind, keys, values } in &mut self.layers {
                for (elements, width) in [keys, values].into_iter().zip(widths) {
                    if let Some(first) = first.of(*kind) {
                        elements.write((first + row) * width, all.slice(at..at + width));
                    }
                    at += width;
                }
            }
        }
        Ok(())
    }

    /// The first row of a page that is there and has so many rows, in layers of each kind.
    fn first_rows(&self, page: CachePage, rows: usize) -> Result<PerKind<Option<usize>>> {
        let most = self.page_size;
        let first = |page: u32, kind| {
            let pages = *self.pages.of(kind);
            if self.has(kind) && page as usize >= pages || rows > most {
                return Err(Error::Step(format!("{rows} rows of page {page}; there are {pages} pages of {most} rows")));
            }
            Ok(page as usize * most)
        };
        Ok(PerKind {
            full: Some(first(page.full, LayerKind::Full)?),
            window: page.window.map(|page| first(page, LayerKind::Window)).transpose()?,
        })
    }

    /// Writes keys `[n, G, D]` and values `[n, G, Dv]` to rows of a layer: `pairs` gives the row in `keys` and `values`, and the row
    /// of the cache.
    pub(super) fn write(
        &mut self,
        layer: usize,
        keys: Data,
        values: Data,
        pairs: impl Iterator<Item = (usize, u32)> + Clone,
    ) -> Result<()> {
        let [k_width, v_width] = self.shape.widths();
        let count = self.layers.len();
        let Some(layer) = layer.checked_sub(self.first_layer).and_then(|layer| self.layers.get_mut(layer)) else {
            return Err(Error::Step(format!("layer {layer} of a cache of {count} layers")));
        };
        for (to, from, width) in [(&mut layer.keys, keys, k_width), (&mut layer.values, values, v_width)] {
            for (row, cached) in pairs.clone() {
                to.write(cached as usize * width, from.slice(row * width..(row + 1) * width));
            }
        }
        Ok(())
    }

    /// Keys `[n, G, D]` and values `[n, G, Dv]` of a layer that are in these rows of the cache.
    pub(super) fn views<'a>(&'a self, layer: usize, rows: &'a [u32]) -> Result<(View<'a>, View<'a>)> {
        let Shape { heads, dim, v_dim } = self.shape;
        let layer = self.layer(layer)?;
        let tokens = self.pages.of(layer.kind) * self.page_size;
        let view = |numbers: &'a CacheMemory, dim| {
            let view = View::stored(numbers.data(), tokens, heads, dim)?;
            Some(view.with_rows(rows))
        };
        let both = view(&layer.keys, dim).and_then(|keys| Some((keys, view(&layer.values, v_dim)?)));
        both.ok_or_else(|| Error::Step(format!("{tokens} rows of keys and values, which a layer of the cache has not")))
    }
}

/// Bytes of a token's keys and values in one layer.
fn bytes_per_token(model: &Model, dtype: KvDtype) -> usize {
    let numbers: usize = Shape::of(model).widths().iter().sum();
    dtype.bytes(numbers)
}
