//! The types of numbers with which layers on the CPU compute: f32 and bf16.
//!
//! A bf16 number is widened to f32 when it is read, all arithmetic is f32, and a result is rounded once when it is written.
//! Generic loops are compiled for each type; for f32 the conversions do nothing.

use crate::activation_storage::Storage as ActivationStorage;
use crate::matmul::{Accumulate, Element, Matrix, Output, arithmetic, product, product_new};
use crate::pool;
use crate::rounding::{round_to_bf16, rounded, widened};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, WithDType, bail};
use half::bf16;
use half::slice::HalfBitsSliceExt;
use half::vec::HalfFloatVecExt;
use ringspan::comm::Buffer;

/// A type of numbers with which layers compute: f32 or bf16.
pub(crate) trait Number: Element + WithDType {
    /// Zero in this type.
    const ZERO: Self;

    /// The number in f32.
    fn upcast(self) -> f32;

    /// The nearest number of this type, ties to even; a NaN stays a NaN.
    fn round_from(x: f32) -> Self;

    /// Writes `a b`, summed in f32 and rounded once: a `[m, k]`, b `[k, n]`, out `[m, n]`, row by row.
    ///
    /// # Panics
    /// If the sizes do not fit.
    fn product<A: Element, B: Element>(a: Matrix<A>, b: Matrix<B>, out: &mut [Self]) {
        Self::products(&[(a, b)], out);
    }

    /// `a b`, plus the bias in each row, summed in f32 and rounded once, as a new matrix, whose memory is not filled with zeros before:
    /// bias `[n]`.
    ///
    /// # Panics
    /// Sizes that do not fit.
    fn product_new<A: Element, B: Element>(a: Matrix<A>, b: Matrix<B>, bias: Option<&[f32]>) -> Vec<Self>;

    /// The values in the type in which they are stored between two passes; they are copied only if that is another
    /// type.
    fn stored(values: Vec<Self>, storage: ActivationStorage) -> StoredValues;

    /// The values that were stored between two passes, in this type.
    fn restored(stored: StoredValues) -> Vec<Self>;

    /// Mutable access to the numbers of a storage; `None` if it has another type.
    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]>;

    /// A message of these numbers; bf16 is sent as 16-bit words.
    fn into_buffer(values: Vec<Self>) -> Buffer;

    /// The numbers of a message; `None` if it has another type.
    fn of_buffer(buffer: &Buffer) -> Option<&[Self]>;

    /// The f32 numbers in this type: `wide` itself for f32, otherwise rounded into `buffer`.
    fn rounded_or_same<'a>(wide: &'a [f32], buffer: &'a mut Vec<Self>) -> &'a [Self];

    /// The values in this type, rounded to the nearest on the threads of the current pool.
    fn all_rounded(values: Vec<f32>) -> Vec<Self>;

    /// Calls `work` with a buffer for f32 sums, and rounds them once into `out`; for f32 the buffer is `out` itself.
    fn write_sums<R>(out: &mut [Self], work: impl FnOnce(&mut [f32]) -> R) -> R;

    /// Writes the sum of several products, summed in f32 and rounded once.
    ///
    /// # Panics
    /// As for [`product`](Self::product).
    fn products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [Self]);
}

/// Writes the first product to `out` and adds the others.
fn sum_of_products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [f32]) {
    for (index, (a, b)) in factors.iter().enumerate() {
        product(*a, *b, out, if index == 0 { Accumulate::Overwrite } else { Accumulate::Add });
    }
}

impl Number for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn upcast(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round_from(x: f32) -> Self {
        x
    }

    fn into_buffer(values: Vec<Self>) -> Buffer {
        Buffer::F32(values)
    }

    fn of_buffer(buffer: &Buffer) -> Option<&[Self]> {
        match buffer {
            Buffer::F32(values) => Some(values),
            _ => None,
        }
    }

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F32(numbers) = storage { Some(numbers) } else { None }
    }

    fn all_rounded(values: Vec<f32>) -> Vec<Self> {
        values
    }

    fn rounded_or_same<'a>(wide: &'a [f32], _: &'a mut Vec<Self>) -> &'a [Self] {
        wide
    }

    fn write_sums<R>(out: &mut [Self], work: impl FnOnce(&mut [f32]) -> R) -> R {
        work(out)
    }

    fn products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [Self]) {
        sum_of_products(factors, out);
    }

    fn product_new<A: Element, B: Element>(a: Matrix<A>, b: Matrix<B>, bias: Option<&[f32]>) -> Vec<Self> {
        product_new(a, b, bias)
    }

    fn stored(values: Vec<Self>, storage: ActivationStorage) -> StoredValues {
        match storage {
            ActivationStorage::F32 => StoredValues::F32(values),
            ActivationStorage::Bf16 => StoredValues::Bf16(rounded(&values)),
        }
    }

    fn restored(stored: StoredValues) -> Vec<Self> {
        match stored {
            StoredValues::F32(values) => values,
            StoredValues::Bf16(values) => widened(&values),
        }
    }
}

impl Number for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn upcast(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn round_from(x: f32) -> Self {
        round_to_bf16(x)
    }

    fn products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [Self]) {
        if let &[(a, b)] = factors {
            return arithmetic().product(a, b, Output::Rounded(out));
        }
        Self::write_sums(out, |sums| sum_of_products(factors, sums));
    }

    fn product_new<A: Element, B: Element>(a: Matrix<A>, b: Matrix<B>, bias: Option<&[f32]>) -> Vec<Self> {
        arithmetic().product_new_rounded(a, b, bias)
    }

    fn stored(values: Vec<Self>, _: ActivationStorage) -> StoredValues {
        StoredValues::Bf16(values)
    }

    fn restored(stored: StoredValues) -> Vec<Self> {
        match stored {
            StoredValues::F32(values) => rounded(&values),
            StoredValues::Bf16(values) => values,
        }
    }

    fn into_buffer(values: Vec<Self>) -> Buffer {
        Buffer::U16(values.reinterpret_into())
    }

    fn of_buffer(buffer: &Buffer) -> Option<&[Self]> {
        match buffer {
            Buffer::U16(words) => Some(words.reinterpret_cast()),
            _ => None,
        }
    }

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::BF16(numbers) = storage { Some(numbers) } else { None }
    }

    fn all_rounded(values: Vec<f32>) -> Vec<Self> {
        rounded(&values)
    }

    fn rounded_or_same<'a>(wide: &'a [f32], buffer: &'a mut Vec<Self>) -> &'a [Self] {
        buffer.resize(wide.len(), Self::ZERO);
        convert(wide, buffer);
        buffer
    }

    fn write_sums<R>(out: &mut [Self], work: impl FnOnce(&mut [f32]) -> R) -> R {
        let mut sums = vec![0.0; out.len()];
        let result = work(&mut sums);
        convert(&sums, out);
        result
    }
}

/// Numbers that are stored between two passes, in the type in which they are stored.
#[derive(Debug, Clone)]
pub(crate) enum StoredValues {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl StoredValues {
    /// Number of stored values.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }
}

/// Evaluates an expression in which the given name is the number type (f32 or bf16) of a `DType`.
macro_rules! with_number {
    ($dtype:expr, $number:ident => $work:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $number = f32;
                $work
            }
            candle_core::DType::BF16 => {
                type $number = half::bf16;
                $work
            }
            other => candle_core::bail!("layers on the CPU compute in F32 and BF16, given {other:?}"),
        }
    };
}
pub(crate) use with_number;

/// Converts f32 numbers to a storage of type `dtype`, rounded once.
///
/// # Errors
/// Other types than f32 and bf16.
pub(crate) fn storage(values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    match dtype {
        DType::F32 => Ok(CpuStorage::F32(values)),
        DType::BF16 => Ok(CpuStorage::BF16(rounded(&values))),
        other => bail!("layers on the CPU compute in F32 and BF16, given {other:?}"),
    }
}

/// Converts numbers to another type, rounded to the nearest, on the threads of the current pool.
pub(crate) fn convert<T: Number, U: Number>(values: &[T], out: &mut [U]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [U], &[T])| {
        pool::vectorized(
            #[inline(always)]
            || out.iter_mut().zip(values).for_each(|(out, x)| *out = U::round_from(x.upcast())),
        );
    });
}

/// Makes a tensor of type `dtype` from f32 numbers, rounded once, in the shape and on the device of `like`.
///
/// # Errors
/// Types other than f32 and bf16, and a number of values that differs from that of `like`.
pub(crate) fn tensor(values: Vec<f32>, dtype: DType, like: &Tensor) -> Result<Tensor> {
    if values.len() != like.elem_count() {
        bail!("{} numbers for a tensor of {:?}", values.len(), like.shape());
    }
    let storage = Storage::Cpu(storage(values, dtype)?);
    Ok(Tensor::from_storage(storage, like.shape(), BackpropOp::none(), false))
}
