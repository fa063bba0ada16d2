//! The pieces of a weight that are multiplied one after the other.

use crate::quantized::dots::ROWS;

/// Some columns of four rows of a weight.
#[derive(Clone, Copy)]
pub(super) struct WeightPiece<'a, B> {
    /// The blocks of each row; none of rows behind the last one.
    pub(super) rows: [&'a [B]; ROWS],
    pub(super) first_row: usize,
    /// How many pieces of the same rows come before it.
    pub(super) index_in_row: usize,
    pub(super) is_last_in_row: bool,
}

impl<'a, B> WeightPiece<'a, B> {
    /// The rows of a piece if there is one.
    #[inline(always)]
    pub(super) fn rows_of(piece: &Option<Self>) -> [&'a [B]; ROWS] {
        match piece {
            Some(piece) => piece.rows,
            None => [&[]; ROWS],
        }
    }
}

/// The pieces of a weight: some columns of four rows, then the next columns of the same rows.
pub(super) struct WeightPieces<'a, B> {
    blocks: &'a [B],
    blocks_per_row: usize,
    blocks_per_piece: usize,
    /// The first row and the piece of it that are next.
    first_row: usize,
    index_in_row: usize,
}

impl<'a, B> WeightPieces<'a, B> {
    /// Rows of as many blocks, in pieces of `blocks_per_piece`, of which the last one of a row may have fewer.
    pub(super) fn new(blocks: &'a [B], blocks_per_row: usize, blocks_per_piece: usize) -> Self {
        Self { blocks, blocks_per_row, blocks_per_piece, first_row: 0, index_in_row: 0 }
    }
}

impl<'a, B> Iterator for WeightPieces<'a, B> {
    type Item = WeightPiece<'a, B>;

    #[inline(always)]
    fn next(&mut self) -> Option<WeightPiece<'a, B>> {
        let Self { blocks, blocks_per_row, blocks_per_piece, first_row, index_in_row } = *self;
        if first_row * blocks_per_row >= blocks.len() {
            return None;
        }
        let start = index_in_row * blocks_per_piece;
        let end = blocks_per_row.min(start + blocks_per_piece);
        let mut rows = [&[][..]; ROWS];
        for (r, row) in rows.iter_mut().enumerate() {
            let at = (first_row + r) * blocks_per_row;
            *row = blocks.get(at + start..at + end).unwrap_or_default();
        }
        let is_last_in_row = end == blocks_per_row;
        (self.first_row, self.index_in_row) =
            if is_last_in_row { (first_row + ROWS, 0) } else { (first_row, index_in_row + 1) };
        Some(WeightPiece { rows, first_row, index_in_row, is_last_in_row })
    }
}
