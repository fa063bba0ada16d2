//! The types of numbers that layers on the CPU compute with: f32, and bf16.
//!
//! A number in bf16 is widened to f32 when it is read, all arithmetic is f32, and a result is rounded once when it is written.
//! Loops over a type of numbers are compiled for each, and of f32 they are what they would be without the other.

use crate::kept::{nearest, rounded};
use crate::matmul::{Arithmetic, Element, Into, Matrix, Output, product};
use crate::pool;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, WithDType, bail};
use half::bf16;

/// f32 or bf16.
pub(crate) trait Number: Element + WithDType {
    /// 0.
    const ZERO: Self;

    /// The same number in f32.
    fn wide(self) -> f32;

    /// The nearest number of this type, of two equally near the even one; a NaN stays one.
    fn nearest(x: f32) -> Self;

    /// Writes `a b`, summed in f32 and rounded once: a `[m, k]`, b `[k, n]`, out `[m, n]`, row after row.
    ///
    /// # Panics
    /// Sizes that do not fit.
    fn product<A: Element, B: Element>(a: Matrix<A>, b: Matrix<B>, out: &mut [Self]) {
        Self::products(&[(a, b)], out);
    }

    /// The numbers of a storage of this type, to be changed.
    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]>;

    /// Numbers in f32 as this type: `wide` itself, or what is written to `buffer`.
    fn beside<'a>(wide: &'a [f32], buffer: &'a mut Vec<Self>) -> &'a [Self];

    /// All of them, rounded to the nearest on the threads of this pool.
    fn all_nearest(values: Vec<f32>) -> Vec<Self>;

    /// Lets `work` write sums in f32, which are rounded once into `out`.
    fn write_sums<R>(out: &mut [Self], work: impl FnOnce(&mut [f32]) -> R) -> R;

    /// Writes the sum of such products, summed in f32 and rounded once.
    ///
    /// # Panics
    /// As for [`product`](Self::product).
    fn products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [Self]);
}

/// Writes the first product, and adds the others.
fn sum_of_products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [f32]) {
    for (index, (a, b)) in factors.iter().enumerate() {
        product(*a, *b, out, if index == 0 { Into::Fresh } else { Into::Sum });
    }
}

impl Number for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }

    #[inline(always)]
    fn nearest(x: f32) -> Self {
        x
    }

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F32(numbers) = storage { Some(numbers) } else { None }
    }

    fn all_nearest(values: Vec<f32>) -> Vec<Self> {
        values
    }

    fn beside<'a>(wide: &'a [f32], _: &'a mut Vec<Self>) -> &'a [Self] {
        wide
    }

    fn write_sums<R>(out: &mut [Self], work: impl FnOnce(&mut [f32]) -> R) -> R {
        work(out)
    }

    fn products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [Self]) {
        sum_of_products(factors, out);
    }
}

impl Number for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn nearest(x: f32) -> Self {
        nearest(x)
    }

    fn products<A: Element, B: Element>(factors: &[(Matrix<A>, Matrix<B>)], out: &mut [Self]) {
        if let &[(a, b)] = factors {
            return Arithmetic::best().product(a, b, Output::Rounded(out));
        }
        Self::write_sums(out, |sums| sum_of_products(factors, sums));
    }

    fn of_storage(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::BF16(numbers) = storage { Some(numbers) } else { None }
    }

    fn all_nearest(values: Vec<f32>) -> Vec<Self> {
        rounded(&values)
    }

    fn beside<'a>(wide: &'a [f32], buffer: &'a mut Vec<Self>) -> &'a [Self] {
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

/// Evaluates an expression in which a name stands for the type of the numbers of a `DType`.
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

/// Numbers in f32 as an operation returns them in another type.
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

/// From one type to the other, rounded to the nearest, on the threads of this pool.
pub(crate) fn convert<T: Number, U: Number>(values: &[T], out: &mut [U]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [U], &[T])| {
        pool::vectorized(|| out.iter_mut().zip(values).for_each(|(out, x)| *out = U::nearest(x.wide())));
    });
}

/// Numbers in f32 as a tensor of this type, in the shape and on the device of another: rounded once.
///
/// # Errors
/// Other types than f32 and bf16, and another number of numbers.
pub(crate) fn tensor(values: Vec<f32>, dtype: DType, like: &Tensor) -> Result<Tensor> {
    if values.len() != like.elem_count() {
        bail!("{} numbers for a tensor of {:?}", values.len(), like.shape());
    }
    let storage = Storage::Cpu(storage(values, dtype)?);
    Ok(Tensor::from_storage(storage, like.shape(), BackpropOp::none(), false))
}
