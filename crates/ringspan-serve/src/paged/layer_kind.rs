//! The two kinds of layers, full attention and sliding windows; each has pages with numbers of their own.

use crate::model::Model;
use crate::step::StepSequence;

/// How much of a sequence a layer's cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerKind {
    /// All of it.
    Full,
    /// The tokens that are still visible in the layer's sliding window or attention chunk.
    Window,
}

impl LayerKind {
    pub(super) const ALL: [Self; 2] = [Self::Full, Self::Window];

    /// The kind of a layer of the whole model.
    pub(super) fn of(model: &Model, layer: usize) -> Self {
        if model.decoder().mask(layer).lookback().is_some() { Self::Window } else { Self::Full }
    }
}

/// The largest number of tokens before its own that a token sees in layers with a window; `None` if no layer has one.
pub fn window_lookback(model: &Model) -> Option<usize> {
    let layers = 0..model.decoder().config().num_hidden_layers;
    layers.filter_map(|layer| model.decoder().mask(layer).lookback()).max()
}

/// One value for full-attention layers, and one for sliding-window layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PerKind<T> {
    /// For full-attention layers.
    pub full: T,
    /// For sliding-window layers.
    pub window: T,
}

impl<T> PerKind<T> {
    pub(super) fn of(&self, kind: LayerKind) -> &T {
        match kind {
            LayerKind::Full => &self.full,
            LayerKind::Window => &self.window,
        }
    }
}

impl<T: Copy> From<T> for PerKind<T> {
    fn from(both: T) -> Self {
        Self { full: both, window: both }
    }
}

/// The pages of a sequence for one kind of layers: page `first + i` is `pages[i]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerPages<'a> {
    pub(super) first: usize,
    pub(super) pages: &'a [u32],
}

impl<'a> LayerPages<'a> {
    pub(super) fn of(sequence: &'a StepSequence, kind: LayerKind) -> Self {
        match kind {
            LayerKind::Full => Self { first: 0, pages: &sequence.pages },
            LayerKind::Window => Self { first: sequence.window.first, pages: &sequence.window.pages },
        }
    }

    /// Index after the last page.
    pub(super) fn end(&self) -> usize {
        self.first.saturating_add(self.pages.len())
    }

    pub(super) fn page(&self, index: usize) -> u32 {
        self.pages[index - self.first]
    }
}
