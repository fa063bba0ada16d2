//! Which numbers of a token's keys and values each rank has, where ranks share the heads and the layers of a model.
//!
//! A *row* has the keys and values of a token in all layers, for each layer its keys, then its values, head after head. A rank stores the
//! part of it that belongs to its layers and heads.

use crate::error::{Error, Result};
use crate::model::Model;
use ringspan::comm::Buffer;
use ringspan_candle::tensor_parallel::part;
use std::ops::Range;

/// The numbers that a rank has of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPart {
    /// Where they are in the row, in the order in which the rank stores them; neighbours are one range.
    ranges: Vec<Range<usize>>,
}

impl RowPart {
    /// The numbers of these ranges of a row.
    pub fn new(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        Self { ranges: joined }
    }

    /// Number of elements of a row that belong to this part.
    pub(super) fn width(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// This part of whole rows of `width` numbers.
    pub(super) fn cut(&self, rows: &Buffer, width: usize) -> Option<Buffer> {
        Some(match rows {
            Buffer::F32(values) => Buffer::F32(self.cut_numbers(values, width)),
            Buffer::U16(bits) => Buffer::U16(self.cut_numbers(bits, width)),
            _ => return None,
        })
    }

    fn cut_numbers<T: Copy>(&self, rows: &[T], width: usize) -> Vec<T> {
        let mut own = Vec::with_capacity(rows.len() / width.max(1) * self.width());
        for row in rows.chunks_exact(width.max(1)) {
            self.ranges.iter().for_each(|range| own.extend_from_slice(&row[range.clone()]));
        }
        own
    }

    /// Writes this part of rows into whole rows of `width` numbers; `None` if it has another size or type.
    pub(super) fn paste(&self, part: &Buffer, rows: &mut Buffer, width: usize) -> Option<()> {
        match (part, rows) {
            (Buffer::F32(part), Buffer::F32(rows)) => self.paste_numbers(part, rows, width),
            (Buffer::U16(part), Buffer::U16(rows)) => self.paste_numbers(part, rows, width),
            _ => None,
        }
    }

    /// The same part of rows whose numbers have `size` elements each, such as bytes.
    pub(super) fn scaled(&self, size: usize) -> Self {
        Self { ranges: self.ranges.iter().map(|range| range.start * size..range.end * size).collect() }
    }

    pub(super) fn paste_numbers<T: Copy>(&self, mut part: &[T], rows: &mut [T], width: usize) -> Option<()> {
        if part.len() * width != rows.len() * self.width() {
            return None;
        }
        for row in rows.chunks_exact_mut(width.max(1)) {
            for range in &self.ranges {
                let (numbers, rest) = part.split_at(range.len());
                row[range.clone()].copy_from_slice(numbers);
                part = rest;
            }
        }
        Some(())
    }
}

/// The parts that the ranks of `stages` pipeline stages with `tp` tensor-parallel ranks have of the rows of one page: stage by stage, those
/// of the tensor-parallel ranks. Ranks that share a key-value head have the same part.
///
/// # Errors
/// More ranks than the heads can be distributed over.
pub(super) fn row_parts(model: &Model, stages: usize, tp: usize) -> Result<Vec<RowPart>> {
    let decoder = model.decoder();
    let (heads, [dim, v_dim]) = (decoder.head_counts(), decoder.head_dims());
    let (of_keys, of_layer) = (heads.key_values * dim, heads.key_values * (dim + v_dim));
    let mut parts = Vec::with_capacity(stages * tp);
    for stage in 0..stages {
        let layers = part(decoder.config().num_hidden_layers, stage, stages);
        for rank in 0..tp {
            let own = heads.of_rank((rank, tp)).map_err(|error| Error::Mesh(error.to_string()))?.key_values;
            parts.push(RowPart::new(layers.clone().flat_map(|layer| {
                let (keys, values) = (layer * of_layer, layer * of_layer + of_keys);
                [keys + own.start * dim..keys + own.end * dim, values + own.start * v_dim..values + own.end * v_dim]
            })));
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers with two heads, whose keys have 2 numbers and whose values have 1, on two ranks that share the heads.
    #[test]
    fn rows_are_cut_and_put_together_again() {
        let parts = [RowPart::new([0..2, 4..5, 6..8, 10..11]), RowPart::new([2..4, 5..6, 8..10, 11..12])];
        let rows = Buffer::F32((0..24_u8).map(f32::from).collect());
        let cut: Vec<Buffer> = parts.iter().map(|part| part.cut(&rows, 12).expect("numbers")).collect();
        let first = [0, 1, 4, 6, 7, 10, 12, 13, 16, 18, 19, 22_u8].map(f32::from).to_vec();
        assert_eq!(cut[0], Buffer::F32(first));
        let mut whole = Buffer::F32(vec![-1.0; 24]);
        for (part, numbers) in parts.iter().zip(&cut) {
            part.paste(numbers, &mut whole, 12).expect("fits");
        }
        assert_eq!(whole, rows);
        assert_eq!(parts[0].paste(&Buffer::F32(vec![0.0; 11]), &mut whole, 12), None, "a number too few");
        assert_eq!(parts[0].paste(&Buffer::U16(vec![0; 12]), &mut whole, 12), None, "another type");
        assert_eq!(RowPart::new([0..3, 3..3, 3..7, 9..11]), RowPart { ranges: vec![0..7, 9..11] });
    }
}
