//! One rank's pages of the KV cache.

use super::elements::{Elements, of_message};
use super::kv_dtype::KvDtype;
use super::page_map::PageMap;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::step::{PageCopy, Step, StepSequence};
use candle_core::DType;
use ringspan::comm::Buffer;
use ringspan::kernel::{Data, View};
use std::collections::HashSet;

/// The pages that one rank holds: for each layer, keys `[pages, page, G, D]` and values `[pages, page, G, Dv]`. A page takes memory
/// when it is first written.
#[derive(Debug)]
pub struct PagedCache {
    layers: Vec<Layer>,
    shape: Shape,
    dtype: KvDtype,
    /// The type in which the model computes, and in which ranks send new keys and values.
    computed: DType,
    pages: usize,
    page: usize,
    max_length: Option<usize>,
    /// The model's layer that is the first one of the cache.
    first_layer: usize,
}

#[derive(Debug)]
struct Layer {
    keys: Elements,
    values: Elements,
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
    pub fn new(model: &Model, pages: usize, page: usize) -> Result<Self> {
        Self::with_dtype(model, pages, page, None)
    }

    /// Like [`new`](Self::new), in another type; `None` for that in which the model computes.
    ///
    /// # Errors
    /// As for [`new`](Self::new), and heads that the type does not allow.
    pub fn with_dtype(model: &Model, pages: usize, page: usize, dtype: Option<KvDtype>) -> Result<Self> {
        if let Some(weight) = model.weights(0).values().find(|weight| !weight.device().is_cpu()) {
            return Err(Error::Step(format!(
                "the paged cache is in the memory of the CPU, and the model's weights are on {:?}",
                weight.device()
            )));
        }
        let rows = pages.checked_mul(page).filter(|rows| u32::try_from(*rows).is_ok() && *rows > 0);
        let (shape, dtype) = (Shape::of(model), dtype.map_or_else(|| KvDtype::of(model), Ok)?);
        dtype.check(model)?;
        let [k_width, v_width] = shape.widths();
        let of_token = bytes_per_token(model, dtype);
        let bytes = |rows: usize| rows.checked_mul(of_token).filter(|bytes| isize::try_from(*bytes).is_ok());
        let Some(rows) = rows.filter(|rows| bytes(*rows).is_some()) else {
            return Err(Error::Step(format!(
                "a cache of {pages} pages of {page} tokens: possible is 1 to {} tokens in all, as far as there is memory",
                u32::MAX
            )));
        };
        let zeros = |width: usize| Elements::zeros(dtype, rows * width);
        let layer = |_| Layer { keys: zeros(k_width), values: zeros(v_width) };
        let layers = (0..model.layers()).map(layer).collect();
        let max_length = model.decoder().config().max_position_embeddings;
        let first_layer = model.layer_range().start;
        Ok(Self { layers, shape, dtype, computed: model.computed_in(), pages, page, max_length, first_layer })
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

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Tokens in a page.
    #[must_use]
    pub fn page(&self) -> usize {
        self.page
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let numbers: usize = self.shape.widths().iter().sum();
        self.layers.len() * self.pages * self.page * self.dtype.bytes(numbers)
    }

    /// Bytes of a page of `page` tokens, over all layers, in this type; `None` for that in which the model computes.
    ///
    /// # Errors
    /// Heads that the type does not allow, and a model that computes in a type in which no cache is.
    pub fn bytes_per_page(model: &Model, page: usize, dtype: Option<KvDtype>) -> Result<usize> {
        let dtype = dtype.map_or_else(|| KvDtype::of(model), Ok)?;
        dtype.check(model)?;
        Ok(page.saturating_mul(bytes_per_token(model, dtype)))
    }

    /// The type in which the model computes.
    pub(super) fn computed(&self) -> DType {
        self.computed
    }

    /// Bytes of a number of keys or values that a rank sends to others which attend to it.
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
            let &PageCopy { rank, from, to, rows } = copy;
            if rank >= map.ranks || self.pages <= from.max(to) as usize || rows > self.page {
                let Self { pages, page, .. } = self;
                return Err(Error::Step(format!(
                    "{copy:?}, with {} ranks of {pages} pages of {page} tokens",
                    map.ranks
                )));
            }
        }
        let mut written = HashSet::new();
        for (number, StepSequence { start, tokens, pages, .. }) in step.sequences.iter().enumerate() {
            let wrong = |what: String| Err(Error::Step(format!("sequence {number} of the step {what}")));
            if tokens.is_empty() {
                return wrong("has no new tokens".into());
            }
            let end = start.saturating_add(tokens.len());
            if let Some(most) = self.max_length.filter(|most| end > *most) {
                return wrong(format!("grows to {end} tokens; possible are {most}"));
            }
            if pages.len() != end.div_ceil(self.page) {
                let (given, needed) = (pages.len(), end.div_ceil(self.page));
                return wrong(format!("has {given} pages; {end} tokens need {needed} of {} tokens", self.page));
            }
            if let Some(page) = pages.iter().find(|page| **page as usize >= self.pages) {
                return wrong(format!("has page {page}; a rank has {}", self.pages));
            }
            for (index, page) in pages.iter().enumerate().skip(start / self.page) {
                if !written.insert((index % map.ranks, *page)) {
                    let owner = index % map.ranks;
                    return wrong(format!("writes page {page} of rank {owner}, which is written already"));
                }
            }
        }
        Ok(())
    }

    /// Executes the copies of this rank's pages.
    pub(super) fn copy(&mut self, rank: usize, copies: &[PageCopy]) {
        let widths = self.shape.widths();
        for PageCopy { from, to, rows, .. } in copies.iter().filter(|copy| copy.rank == rank) {
            for Layer { keys, values } in &mut self.layers {
                for (elements, width) in [keys, values].into_iter().zip(widths) {
                    let (from, to) = (*from as usize * self.page * width, *to as usize * self.page * width);
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

    /// The first rows of a page, `[rows, W]`: for each token and layer its keys, then its values.
    pub(crate) fn read_page(&self, page: u32, rows: usize) -> Result<Buffer> {
        let first = self.check_page(page, rows)?;
        let (dtype, width) = self.row_format();
        let mut all = Elements::with_capacity(dtype, rows * width);
        for row in first..first + rows {
            for Layer { keys, values } in &self.layers {
                for (elements, width) in [keys, values].into_iter().zip(self.shape.widths()) {
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
    pub(crate) fn write_page(&mut self, page: u32, rows: &Buffer) -> Result<()> {
        let (dtype, width) = self.row_format();
        let all = of_message(rows, dtype)?;
        let count = all.len() / width.max(1);
        let first = self.check_page(page, count)?;
        let widths = self.shape.widths();
        let mut at = 0;
        for row in first..first + count {
            for Layer { keys, values } in &mut self.layers {
                for (elements, width) in [keys, values].into_iter().zip(widths) {
                    elements.write(row * width, all.slice(at..at + width));
                    at += width;
                }
            }
        }
        Ok(())
    }

    /// The first row of a page that is there and has so many rows.
    fn check_page(&self, page: u32, rows: usize) -> Result<usize> {
        let Self { pages, page: most, .. } = *self;
        if page as usize >= pages || rows > most {
            return Err(Error::Step(format!("{rows} rows of page {page}; there are {pages} pages of {most} rows")));
        }
        Ok(page as usize * most)
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
        let tokens = self.pages * self.page;
        let view = |elements: &'a Elements, dim| {
            let view = View::stored(elements.data(), tokens, heads, dim)?;
            Some(view.with_rows(rows))
        };
        let layer = layer.checked_sub(self.first_layer).and_then(|layer| self.layers.get(layer));
        layer
            .and_then(|layer| Some((view(&layer.keys, dim)?, view(&layer.values, v_dim)?)))
            .ok_or_else(|| Error::Step(format!("a layer beyond the {} of the cache", self.layers.len())))
    }
}

/// Bytes of a token's keys and values in all layers.
fn bytes_per_token(model: &Model, dtype: KvDtype) -> usize {
    let numbers: usize = Shape::of(model).widths().iter().sum();
    model.layers() * dtype.bytes(numbers)
}
