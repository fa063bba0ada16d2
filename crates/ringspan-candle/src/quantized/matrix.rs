//! A matrix in a quantized format.

use super::blocks::{Block, with_block};
use super::format::Format;
use super::lanes::{Lanes, VectorWork, dispatch};
use crate::activation_dtype::ActivationDType;
use crate::pool;
use crate::precision::Precision;
use bytes::Bytes;
use candle_core::{Device, Result, Tensor, bail};
use ringspan::kernel::product::QuantizedRows;
use std::fmt::{self, Debug, Formatter};
use std::marker::PhantomData;
use std::ops::Range;

/// A frozen matrix of rows x columns in a quantized format. Each row consists of whole blocks, and rows are consecutive.
///
/// Clones and ranges of rows share its bytes, also between the ranks of a process. The bytes may be a part of a mapped file
/// (`Bytes::from_owner(mmap).slice(range)`), at any address.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::quantized::{Format, QuantizedMatrix, linear_quantized};
///
/// // A block of Q8_0 is an f16 factor (here 0.5) and 32 integers.
/// let row: Vec<u8> = [0x00, 0x38].into_iter().chain(0..32).collect();
/// let weight = QuantizedMatrix::new(Format::Q8_0, 1, 32, row.into())?;
/// let ones = Tensor::ones((1, 32), candle_core::DType::F32, &Device::Cpu)?;
/// assert_eq!(linear_quantized(&ones, &weight, None)?.to_vec2::<f32>()?, [[248.0]]);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct QuantizedMatrix {
    format: Format,
    rows: usize,
    columns: usize,
    bytes: Bytes,
    computed_in: Precision,
    activations: ActivationDType,
}

impl QuantizedMatrix {
    /// A matrix of `rows` x `columns` in the layout of ggml, which GGUF files use.
    ///
    /// # Errors
    /// Rows that are not whole blocks, and a number of bytes that does not fit the matrix.
    pub fn new(format: Format, rows: usize, columns: usize, bytes: Bytes) -> Result<Self> {
        let needed = format.bytes(rows, columns)?;
        if bytes.len() != needed {
            bail!("a {format} matrix of {rows} x {columns} takes {needed} bytes, given {}", bytes.len());
        }
        Ok(Self { format, rows, columns, bytes, computed_in: Precision::F32, activations: ActivationDType::F32 })
    }

    /// Sets the type in which rows are looked up. Products with the matrix have the type of the other factor.
    #[must_use]
    pub fn computing_in(self, precision: Precision) -> Self {
        Self { computed_in: precision, ..self }
    }

    /// Sets the type to which activations are rounded in products with the matrix.
    #[must_use]
    pub fn rounding_activations(self, activations: ActivationDType) -> Self {
        Self { activations, ..self }
    }

    /// The type to which activations are rounded in products with the matrix.
    #[must_use]
    pub fn activations(&self) -> ActivationDType {
        self.activations
    }

    /// The type in which rows are looked up; products have the type of the other factor.
    #[must_use]
    pub fn computed_in(&self) -> Precision {
        self.computed_in
    }

    /// The format in which the numbers are stored.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// The numbers of rows and columns.
    #[must_use]
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// The stored bytes.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// A range of rows, which shares the bytes.
    ///
    /// # Errors
    /// A range beyond the rows.
    pub fn rows(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.rows {
            bail!("rows {range:?} of a {} matrix of {} x {}", self.format, self.rows, self.columns);
        }
        let bytes = self.bytes.slice(range.start * self.row_bytes()..range.end * self.row_bytes());
        Ok(Self { rows: range.len(), bytes, ..self.clone() })
    }

    /// A range of columns, unchanged: a copy of their bytes, unless the range covers all columns.
    ///
    /// # Errors
    /// A range beyond the columns, and one that does not begin and end between blocks.
    pub fn columns(&self, range: Range<usize>) -> Result<Self> {
        let block = self.format.block_len();
        if range.start > range.end || range.end > self.columns {
            bail!("columns {range:?} of a {} matrix of {} x {}", self.format, self.rows, self.columns);
        }
        if !range.start.is_multiple_of(block) || !range.end.is_multiple_of(block) {
            bail!(
                "columns {range:?} of a {} matrix of {} x {}: it can be cut at multiples of {block} columns, between its blocks",
                self.format,
                self.rows,
                self.columns
            );
        }
        if range.len() == self.columns {
            return Ok(self.clone());
        }
        let bytes_in_row = self.bytes_of(&range);
        let mut bytes = Vec::with_capacity(self.rows * bytes_in_row.len());
        for row in 0..self.rows {
            bytes.extend_from_slice(&self.row(row)[bytes_in_row.clone()]);
        }
        Ok(Self { columns: range.len(), bytes: bytes.into(), ..self.clone() })
    }

    /// Matrices of the same format and width, one below the other. This copies bytes.
    ///
    /// # Errors
    /// No matrices, and matrices of different formats or widths.
    pub fn concat_rows(parts: &[Self]) -> Result<Self> {
        let Some(first) = parts.first() else { bail!("a matrix of no parts") };
        let is_alike = |part: &&Self| (part.format, part.columns) == (first.format, first.columns);
        if let Some(other) = parts.iter().find(|part| !is_alike(part)) {
            bail!("{other:?} below {first:?}: both must have the same format and number of columns");
        }
        let bytes = parts.iter().map(|part| &part.bytes[..]).collect::<Vec<_>>().concat();
        Ok(Self { rows: parts.iter().map(|part| part.rows).sum(), bytes: bytes.into(), ..first.clone() })
    }

    /// The same matrix in memory of its own.
    #[must_use]
    pub fn copied(&self) -> Self {
        Self { bytes: Bytes::copy_from_slice(&self.bytes), ..self.clone() }
    }

    /// Selects rows in any order, some of them perhaps twice: row i of the result is row `order[i]`. This copies bytes.
    ///
    /// # Errors
    /// Indices beyond the rows.
    pub fn select_rows(&self, order: &[usize]) -> Result<Self> {
        let mut bytes = Vec::with_capacity(order.len().saturating_mul(self.row_bytes()));
        for row in order {
            if *row >= self.rows {
                bail!("row {row} of a {} matrix of {} x {}", self.format, self.rows, self.columns);
            }
            bytes.extend_from_slice(self.row(*row));
        }
        Ok(Self { rows: order.len(), bytes: bytes.into(), ..self.clone() })
    }

    /// Decodes the whole matrix to an f32 tensor on the CPU, `[rows, columns]`.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn dequantize(&self) -> Result<Tensor> {
        let mut values = vec![0.0; self.rows * self.columns];
        self.decode(0..self.rows, 0..self.columns, &mut values);
        Tensor::from_vec(values, (self.rows, self.columns), &Device::Cpu)
    }

    /// Decodes the rows with these indices, as in an embedding lookup: f32 on the CPU, `[rows.len(), columns]`.
    ///
    /// # Errors
    /// Indices beyond the rows.
    pub fn dequantize_rows(&self, rows: &[u32]) -> Result<Tensor> {
        if let Some(row) = rows.iter().find(|row| **row as usize >= self.rows) {
            bail!("row {row} of a {} matrix of {} x {}", self.format, self.rows, self.columns);
        }
        let mut values = vec![0.0; rows.len() * self.columns];
        if self.columns > 0 {
            let part = pool::part(rows.len(), self.columns);
            let parts = rows.chunks(part).zip(values.chunks_mut(part * self.columns)).collect();
            pool::map(parts, |(rows, to): (&[u32], &mut [f32])| {
                for (row, to) in rows.iter().zip(to.chunks_exact_mut(self.columns)) {
                    let row = *row as usize;
                    with_block!(self.format, decoded(self.row(row), self.row_bytes(), 0..self.row_bytes(), to));
                }
            });
        }
        Tensor::from_vec(values, (rows.len(), self.columns), &Device::Cpu)
    }

    /// Dequantizes a range of rows and columns into `to`, row by row, on the threads of the current pool. The columns must be
    /// whole blocks.
    pub(super) fn decode(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        debug_assert_eq!(to.len(), rows.len() * columns.len());
        if to.is_empty() {
            return;
        }
        let part = pool::part(rows.len(), columns.len());
        let parts = to.chunks_mut(part * columns.len()).enumerate().collect();
        pool::map(parts, |(index, to): (usize, &mut [f32])| {
            let first = rows.start + index * part;
            self.dequantize_part(first..rows.end.min(first + part), columns.clone(), to);
        });
    }

    /// A range of columns, which are whole blocks, of a range of rows.
    pub(super) fn stored(&self, rows: Range<usize>, columns: Range<usize>) -> StoredColumns<'_> {
        StoredColumns { rows: self.bytes_of_rows(rows), row_bytes: self.row_bytes(), part: self.bytes_of(&columns) }
    }

    /// The bytes of a range of rows.
    pub(super) fn bytes_of_rows(&self, rows: Range<usize>) -> &[u8] {
        &self.bytes[rows.start * self.row_bytes()..rows.end * self.row_bytes()]
    }

    fn row(&self, row: usize) -> &[u8] {
        self.bytes_of_rows(row..row + 1)
    }

    /// The range of a row's bytes that holds the blocks of these columns.
    fn bytes_of(&self, columns: &Range<usize>) -> Range<usize> {
        let byte = |column: usize| column / self.format.block_len() * self.format.block_bytes();
        byte(columns.start)..byte(columns.end)
    }

    fn row_bytes(&self) -> usize {
        self.bytes_of(&(0..self.columns)).end
    }
}

/// Some columns of some rows of a matrix, as they are stored.
pub(super) struct StoredColumns<'a> {
    rows: &'a [u8],
    row_bytes: usize,
    /// The range of each row's bytes.
    part: Range<usize>,
}

impl<'a> StoredColumns<'a> {
    /// The bytes of these columns of each row.
    #[inline(always)]
    pub(super) fn rows(&self) -> impl Iterator<Item = &'a [u8]> {
        let part = self.part.clone();
        self.rows.chunks_exact(self.row_bytes).map(
            #[inline(always)]
            move |row| &row[part.clone()],
        )
    }
}

impl QuantizedRows for QuantizedMatrix {
    fn shape(&self) -> (usize, usize) {
        self.dims()
    }

    fn dequantize_part(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        let stored = self.bytes_of_rows(rows);
        with_block!(self.format, decoded(stored, self.row_bytes(), self.bytes_of(&columns), to));
    }
}

impl Debug for QuantizedMatrix {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "QuantizedMatrix[{} x {}; {}]", self.rows, self.columns, self.format)
    }
}

/// Decodes a part of each row into `to`, row by row; `part` is the range of each row's bytes.
fn decoded<B: Block<LEN>, const LEN: usize>(rows: &[u8], row_bytes: usize, part: Range<usize>, to: &mut [f32]) {
    dispatch(Decoding::<B, LEN> { rows, row_bytes, part, to, blocks: PhantomData });
}

struct Decoding<'a, B, const LEN: usize> {
    rows: &'a [u8],
    row_bytes: usize,
    /// The range of each row's bytes that is decoded.
    part: Range<usize>,
    to: &'a mut [f32],
    blocks: PhantomData<B>,
}

impl<B: Block<LEN>, const LEN: usize> VectorWork for Decoding<'_, B, LEN> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let width = self.part.len() / size_of::<B>() * LEN;
        for (row, to) in self.rows.chunks_exact(self.row_bytes).zip(self.to.chunks_exact_mut(width)) {
            B::decode(lanes, bytemuck::cast_slice(&row[self.part.clone()]), to);
        }
    }
}
