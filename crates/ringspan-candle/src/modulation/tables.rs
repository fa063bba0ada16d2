//! Distributes tokens over threads, and sums the threads' contributions to the gradients of tables of factors.

use crate::cast::cast;
use crate::number::Number;
use crate::pool;
use candle_core::{Result, Tensor};
use std::ops::Range;

/// Calls `work` with parts of the rows of x and out `[T, width]` on the threads of this rank; the range says which tokens they are.
pub(super) fn by_parts<T: Number, R: Send>(
    x: &[T],
    out: &mut [T],
    width: usize,
    work: impl Fn(Range<usize>, &[T], &mut [T]) -> R + Sync + Send,
) -> Vec<R> {
    let width = width.max(1);
    let part = pool::part(x.len() / width, width);
    let parts = x.chunks(part * width).zip(out.chunks_mut(part * width)).enumerate().collect();
    pool::map(parts, |(index, (x, out)): (usize, (&[T], &mut [T]))| {
        let first = index * part;
        pool::vectorized(
            #[inline(always)]
            || work(first..first + x.len() / width, x, out),
        )
    })
}

/// A copy of x `[T, width]` that `work` changes on the threads of this rank; the range says which tokens it gets.
pub(super) fn copy_by_parts<T: Number>(
    x: &[T],
    width: usize,
    work: impl Fn(Range<usize>, &mut [T]) + Sync + Send,
) -> Vec<T> {
    let width = width.max(1);
    pool::map_copy(x, pool::part(x.len() / width, width) * width, |first, out| {
        let tokens = first / width..(first + out.len()) / width;
        pool::vectorized(
            #[inline(always)]
            || work(tokens, out),
        );
    })
}

/// The sums of the parts' gradients of two tables, in the types of the tables.
pub(super) fn table_gradients<const N: usize>(parts: Vec<[Vec<f32>; N]>, tables: [&Tensor; N]) -> Result<[Tensor; N]> {
    let mut sums = tables.map(|table| vec![0.0f32; table.elem_count()]);
    for part in parts {
        for (sum, part) in sums.iter_mut().zip(part) {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
    }
    let mut gradients = tables.map(Tensor::clone);
    for ((gradient, sum), table) in gradients.iter_mut().zip(sums).zip(tables) {
        *gradient = cast(&Tensor::from_vec(sum, table.shape(), table.device())?, table.dtype())?;
    }
    Ok(gradients)
}
