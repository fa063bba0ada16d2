//! The pieces of a weight that are multiplied one after the other.

use crate::quantized::dots::ROWS;

/// Some columns of four rows of a weight.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a, B> {
    /// The blocks of each row; none of rows behind the last one.
    pub(super) rows: [&'a [B]; ROWS],
    pub(super) first_row: usize,
    /// Which piece of its rows it is.
    pub(super) of_row: usize,
    pub(super) is_last_of_row: bool,
}

impl<'a, B> Piece<'a, B> {
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
pub(super) struct Pieces<'a, B> {
    blocks: &'a [B],
    blocks_per_row: usize,
    blocks_per_piece: usize,
    /// The first row and the piece of it that are next.
    first_row: usize,
    of_row: usize,
}

impl<'a, B> Pieces<'a, B> {
    /// Rows of as many blocks, in pieces of `blocks_per_piece`, of which the last one of a row may have fewer.
    pub(super) fn new(blocks: &'a [B], blocks_per_row: usize, blocks_per_piece: usize) -> Self {
        Self { blocks, blocks_per_row, blocks_per_piece, first_row: 0, of_row: 0 }
    }
}

impl<'a, B> Iterator for Pieces<'a, B> {
    type Item = Piece<'a, B>;

    #[inline(always)]
    fn next(&mut self) -> Option<Piece<'a, B>> {
        let Self { blocks, blocks_per_row, blocks_per_piece, first_row, of_row } = *self;
        if first_row * blocks_per_row >= blocks.len() {
            return None;
        }
        let start = of_row * blocks_per_piece;
        let end = blocks_per_row.min(start + blocks_per_piece);
        let mut rows = [&[][..]; ROWS];
        for (r, row) in rows.iter_mut().enumerate() {
            let at = (first_row + r) * blocks_per_row;
            *row = blocks.get(at + start..at + end).unwrap_or_default();
        }
        let is_last_of_row = end == blocks_per_row;
        (self.first_row, self.of_row) = if is_last_of_row { (first_row + ROWS, 0) } else { (first_row, of_row + 1) };
        Some(Piece { rows, first_row, of_row, is_last_of_row })
    }
}
