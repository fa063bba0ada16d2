//! Views of tensors that are read in place, in their storage type.

use super::DType;
use super::device_array::DeviceSlice;
use super::quantized::QuantizedSlice;
use super::vector::{prefetch, prefetch_far};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::Range;

/// The elements of a tensor in its storage type. Kernels compute in f32, also with narrower types.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16, the upper half of an f32.
    Bf16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// Numbers in blocks of 32 with a common factor. Only CPU kernels read them.
    Q8_0(QuantizedSlice<'a>),
    /// Elements of any of these types in the memory of a device, which the CPU cannot read.
    Device(DeviceSlice<'a>),
}

/// Panics, for a CPU kernel that is given elements on another device; `Kernel` refuses these before.
#[cold]
fn elsewhere() -> ! {
    panic!("the CPU was asked for elements in the memory of another device")
}

impl<'a> Data<'a> {
    /// Number of elements.
    pub fn len(self) -> usize {
        match self {
            Data::F32(data) => data.len(),
            Data::Bf16(data) => data.len(),
            Data::F16(data) => data.len(),
            Data::Q8_0(data) => data.len(),
            Data::Device(data) => data.len(),
        }
    }

    /// The storage type; for numbers in blocks f32, as which they are read and sent.
    pub fn dtype(self) -> DType {
        match self {
            Data::F32(_) | Data::Q8_0(_) => DType::F32,
            Data::Bf16(_) => DType::Bf16,
            Data::F16(_) => DType::F16,
            Data::Device(data) => data.dtype(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The elements in a range.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[inline(always)]
    pub fn slice(self, range: Range<usize>) -> Data<'a> {
        match self {
            Data::F32(data) => Data::F32(&data[range]),
            Data::Bf16(data) => Data::Bf16(&data[range]),
            Data::F16(data) => Data::F16(&data[range]),
            Data::Q8_0(data) => Data::Q8_0(data.slice(range)),
            Data::Device(data) => Data::Device(data.slice(range)),
        }
    }

    /// One element.
    ///
    /// # Panics
    /// If it is out of bounds, or on a device.
    #[inline(always)]
    pub fn get(self, at: usize) -> f32 {
        match self {
            Data::F32(data) => data[at],
            Data::Bf16(data) => data[at].to_f32(),
            Data::F16(data) => data[at].to_f32(),
            Data::Q8_0(data) => data.get(at),
            Data::Device(_) => elsewhere(),
        }
    }

    /// Copies all elements, converted to f32.
    ///
    /// # Panics
    /// If `to` has another length, or the elements are on a device.
    #[inline(always)]
    pub fn copy_to(self, to: &mut [f32]) {
        match self {
            Data::F32(data) => to.copy_from_slice(data),
            Data::Bf16(data) => {
                assert_eq!(data.len(), to.len(), "elements to copy");
                to.iter_mut().zip(data).for_each(|(to, x)| *to = f32::from_bits(u32::from(x.to_bits()) << 16));
            }
            Data::F16(data) => data.convert_to_f32_slice(to),
            Data::Q8_0(data) => data.copy_to(to),
            Data::Device(_) => elsewhere(),
        }
    }

    /// The elements in f32; borrowed if that is their type.
    ///
    /// # Panics
    /// If they are on a device.
    pub fn to_f32(self) -> Cow<'a, [f32]> {
        if let Data::F32(data) = self {
            return Cow::Borrowed(data);
        }
        let mut to = vec![0.0; self.len()];
        self.copy_to(&mut to);
        Cow::Owned(to)
    }

    /// Prefetches elements that are needed later into the L2 cache.
    #[inline(always)]
    pub(super) fn prefetch_far(self) {
        match self {
            Data::F32(data) => prefetch_far(data),
            Data::Bf16(data) => prefetch_far(data),
            Data::F16(data) => prefetch_far(data),
            Data::Q8_0(data) => data.prefetch_far(),
            Data::Device(_) => (),
        }
    }

    /// Prefetches the elements into the cache.
    #[inline(always)]
    pub(super) fn prefetch(self) {
        match self {
            Data::F32(data) => prefetch(data),
            Data::Bf16(data) => prefetch(data),
            Data::F16(data) => prefetch(data),
            Data::Q8_0(data) => data.prefetch(),
            Data::Device(_) => (),
        }
    }

    /// Whether all elements are finite: no NaN, no infinity.
    #[inline(always)]
    pub(super) fn is_finite(self) -> bool {
        // Only NaN and infinity have the greatest exponent. A maximum of integers compiles to vector instructions, a search
        // does not.
        let most = |bits: u16, most: u16| (bits & 0x7FFF).max(most);
        match self {
            Data::F32(data) => {
                data.iter().fold(0, |most, x| (x.to_bits() & 0x7FFF_FFFF).max(most)) < f32::INFINITY.to_bits()
            }
            Data::Bf16(data) => data.iter().fold(0, |m, x| most(x.to_bits(), m)) < bf16::INFINITY.to_bits(),
            Data::F16(data) => data.iter().fold(0, |m, x| most(x.to_bits(), m)) < f16::INFINITY.to_bits(),
            Data::Q8_0(data) => data.is_finite(),
            Data::Device(_) => elsewhere(),
        }
    }
}

/// A tensor `[tokens, heads, dim]` that is read in place, with any strides; the last dim is contiguous.
///
/// Tokens may lie anywhere in `data`, as those of a sequence do whose pages of a KV cache were allocated one by one: then `rows`
/// says where. Only CPU kernels read such a tensor; a [`Backend`](super::Backend) never receives one.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The elements.
    pub data: Data<'a>,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of elements per head.
    pub dim: usize,
    /// Elements from one row of `data` to the next.
    pub token_stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
    /// The row of `data` in which each token is; `None` if token i is in row i.
    pub rows: Option<&'a [u32]>,
    /// Whether the tensor is stored in a wider type and was only sent in this one. Its products are computed in f32, because products in
    /// bf16 would also round the probabilities and their gradients.
    pub computes_in_f32: bool,
}

impl<'a> View<'a> {
    /// A contiguous `[tokens, heads, dim]` tensor in f32; `None` if `data` has another size.
    pub fn new(data: &'a [f32], tokens: usize, heads: usize, dim: usize) -> Option<Self> {
        Self::stored(Data::F32(data), tokens, heads, dim)
    }

    /// A contiguous `[tokens, heads, dim]` tensor in any type; `None` if `data` has another size.
    pub fn stored(data: Data<'a>, tokens: usize, heads: usize, dim: usize) -> Option<Self> {
        let elements = tokens.checked_mul(heads)?.checked_mul(dim)?;
        (data.len() == elements).then_some(Self {
            data,
            tokens,
            heads,
            dim,
            // Saturating, since without tokens the product may overflow, and the stride is not used.
            token_stride: heads.saturating_mul(dim),
            head_stride: dim,
            rows: None,
            computes_in_f32: false,
        })
    }

    /// The tokens that are in these rows of this tensor, in this order; a row may be taken several times.
    ///
    /// # Panics
    /// If this tensor was made by this function already.
    #[must_use]
    pub fn with_rows(self, rows: &'a [u32]) -> Self {
        assert!(self.rows.is_none(), "rows of rows");
        Self { tokens: rows.len(), rows: Some(rows), ..self }
    }

    /// The elements of one token and head, in their storage type.
    #[inline(always)]
    pub fn at(&self, token: usize, head: usize) -> Data<'a> {
        let row = self.rows.map_or(token, |rows| rows[token] as usize);
        let at = row * self.token_stride + head * self.head_stride;
        self.data.slice(at..at + self.dim)
    }

    /// The least length of `data` that contains all rows; `None` if it overflows, or if tokens lack a row.
    pub(crate) fn end(&self) -> Option<usize> {
        if self.tokens == 0 || self.heads == 0 {
            return Some(0);
        }
        let last = match self.rows {
            None => self.tokens - 1,
            // A maximum of integers compiles to vector instructions.
            Some(rows) => rows.get(..self.tokens)?.iter().fold(0, |last, row| last.max(*row)) as usize,
        };
        let token = last.checked_mul(self.token_stride)?;
        let head = (self.heads - 1).checked_mul(self.head_stride)?;
        token.checked_add(head)?.checked_add(self.dim)
    }

    /// The elements of one token and head in f32.
    ///
    /// # Panics
    /// If they are out of bounds, or on a device.
    pub fn row(&self, token: usize, head: usize) -> Cow<'a, [f32]> {
        self.at(token, head).to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_type_and_stride_are_the_same_numbers() {
        let values: Vec<f32> = (0..24).map(|x| x as f32 / 4.0 - 2.0).collect();
        let (b, h): (Vec<bf16>, Vec<f16>) = values.iter().map(|x| (bf16::from_f32(*x), f16::from_f32(*x))).unzip();
        for data in [Data::F32(&values), Data::Bf16(&b), Data::F16(&h)] {
            let view = View::stored(data, 2, 3, 4).expect("its size");
            assert_eq!(*view.row(1, 2), values[20..]);
            let heads_first = View { token_stride: 4, head_stride: 8, ..view };
            assert_eq!(*heads_first.row(1, 2), values[20..24]);
            assert_eq!(*heads_first.row(0, 1), values[8..12]);
            assert_eq!((view.at(0, 1).get(2), view.at(0, 1).is_finite()), (values[6], true));
            assert!(View::stored(data, 2, 3, 5).is_none());
            for (tokens, heads, dim) in [(1 << 63, 2, 64), (2, usize::MAX, usize::MAX), (usize::MAX, 1, 2)] {
                assert!(
                    View::stored(data, tokens, heads, dim).is_none() && View::new(&[], tokens, heads, dim).is_none()
                );
            }
        }
        assert!(!Data::Bf16(&[bf16::ONE, bf16::NEG_INFINITY]).is_finite() && !Data::F16(&[f16::NAN]).is_finite());
        assert!(!Data::F32(&[f32::NAN]).is_finite() && Data::F32(&[f32::MAX]).is_finite());
    }

    #[test]
    fn rows_beyond_the_elements_have_no_end_inside_them() {
        let (values, rows) = (vec![0.0; 40], [3, 9, 0]);
        let view = View::new(&values, 10, 2, 2).expect("its size").with_rows(&rows);
        assert_eq!((view.tokens, view.end()), (3, Some(40)));
        assert!(View::new(&values, 10, 2, 2).expect("its size").with_rows(&[10]).end() > Some(values.len()));
    }
}
