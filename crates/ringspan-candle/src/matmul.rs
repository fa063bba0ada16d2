//! Matrix products on the CPU, on the threads of this rank's pool: of f32 and bf16 in any combination, summed in f32.
//!
//! Attention's micro kernel computes them, except products of two f32 factors whose right factor has contiguous rows (`dy W`,
//! `dy^T x`): for these the `gemm` crate is faster. For `x W^T` it is not: compared with the micro kernel it takes 27 times as long with
//! 2 rows of x, twice as long with 64, and equally long with 1024 (`BENCHMARKS.md`). In a pool for which an instruction set was
//! chosen, the micro kernel computes all products.

use crate::pool;
use gemm::Parallelism;
use ringspan::kernel::product::Arithmetic;
use std::mem::MaybeUninit;

pub(crate) use ringspan::kernel::product::{Element, Matrix, Output};

/// Whether a product overwrites its output or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accumulate {
    /// The product overwrites the output.
    Overwrite,
    /// The product is added to the output.
    Add,
}

impl Accumulate {
    fn output(self, out: &mut [f32]) -> Output<'_> {
        match self {
            Self::Overwrite => Output::Overwrite(out),
            Self::Add => Output::Add(out),
        }
    }
}

/// Writes `a b` to `out`, row by row: a `[m, k]`, b `[k, n]`, out `[m, n]`. Two bf16 factors are multiplied in bf16 where the
/// processor can, which treats denormal numbers as zero; everything else is computed in f32.
///
/// # Panics
/// If the sizes do not fit.
pub(crate) fn product<A: Element, B: Element>(a: Matrix<A>, b: Matrix<B>, out: &mut [f32], into: Accumulate) {
    match (a.as_f32(), b.as_f32()) {
        (Some(a), Some(b)) if is_for_gemm(b) => product_by_gemm(a, b, as_uninit(out), into),
        _ => arithmetic().product(a, b, into.output(out)),
    }
}

/// Whether the `gemm` crate is faster for products with this right factor.
fn is_for_gemm(b: Matrix) -> bool {
    b.strides().0 != 1 && pool::isa().is_none()
}

/// The arithmetic of this thread's pool.
pub(crate) fn arithmetic() -> Arithmetic {
    pool::isa().and_then(|isa| Arithmetic::new(isa, true)).unwrap_or_else(Arithmetic::best)
}

/// `a b`, plus the bias in each row, as a new matrix, whose memory is not filled with zeros before: bias `[n]`.
///
/// # Panics
/// Sizes that do not fit.
pub(crate) fn product_new<A: Element, B: Element>(a: Matrix<A>, b: Matrix<B>, bias: Option<&[f32]>) -> Vec<f32> {
    match (a.as_f32(), b.as_f32()) {
        (Some(a), Some(b)) if is_for_gemm(b) && a.shape().1 > 0 && bias.is_none() => {
            let size = a.shape().0 * b.shape().1;
            let mut out = Vec::with_capacity(size);
            product_by_gemm(a, b, &mut out.spare_capacity_mut()[..size], Accumulate::Overwrite);
            // SAFETY: with terms to sum, the product wrote each of its elements.
            unsafe { out.set_len(size) };
            out
        }
        _ => arithmetic().product_new(a, b, bias),
    }
}

fn as_uninit(out: &mut [f32]) -> &mut [MaybeUninit<f32>] {
    // SAFETY: the layout is the same, and `product_by_gemm`, which gets the slice, writes initialised numbers only.
    unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), out.len()) }
}

/// Rows that the `gemm` crate multiplies at once for each thread. The crate packs as much of a factor as fits the processor's
/// last-level cache, which may be all of it; packing this many rows at a time costs as little, and takes a few megabytes.
const ROWS_OF_THREAD: usize = 1024;

fn product_by_gemm(a: Matrix, b: Matrix, out: &mut [MaybeUninit<f32>], into: Accumulate) {
    let ((m, k), (rows, n)) = (a.shape(), b.shape());
    assert!(rows == k && out.len() == m * n, "a product of {m} x {k} and {rows} x {n} into {}", out.len());
    let block = ROWS_OF_THREAD * pool::threads();
    for (index, out) in out.chunks_mut((block * n).max(1)).enumerate() {
        rows_by_gemm(a.rows(index * block..m.min((index + 1) * block)), b, out, into);
    }
}

fn rows_by_gemm(a: Matrix, b: Matrix, out: &mut [MaybeUninit<f32>], into: Accumulate) {
    let ((m, k), n) = (a.shape(), b.shape().1);
    let parallelism = match pool::threads() {
        1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    };
    let (alpha, beta) = (if into == Accumulate::Add { 1.0 } else { 0.0 }, 1.0f32);
    let strides = |matrix: Matrix| (matrix.strides().0 as isize, matrix.strides().1 as isize);
    let ((a_row, a_col), (b_row, b_col)) = (strides(a), strides(b));
    // gemm writes whole vectors down the columns of its output, so it is asked for the transpose: b^T a^T.
    // SAFETY: both matrices checked when they were made that their elements lie in their slices, `out` has the m n elements of
    // these rows, nothing else refers to it, and it is read only where it was written before.
    unsafe {
        gemm::gemm(
            n,
            m,
            k,
            out.as_mut_ptr().cast(),
            n as isize,
            1,
            into == Accumulate::Add,
            b.data().as_ptr(),
            b_row,
            b_col,
            a.data().as_ptr(),
            a_row,
            a_col,
            alpha,
            beta,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use ringspan::kernel::Isa;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) as f32 * 0.377).sin()).collect()
    }

    fn rounded(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|x| bf16::from_f32(*x)).collect()
    }

    /// An element of the product, and the sum of the absolute values of its terms.
    fn plain(a: Matrix, b: Matrix, (i, j): (usize, usize)) -> (f64, f64) {
        let element = |m: Matrix, i: usize, j: usize| f64::from(m.data()[i * m.strides().0 + j * m.strides().1]);
        let terms = || (0..a.shape().1).map(|k| element(a, i, k) * element(b, k, j));
        (terms().sum(), terms().map(f64::abs).sum())
    }

    /// Tests every layout of the factors, odd sizes, one row, and an empty sum, on one thread and on three.
    #[test]
    fn products_equal_f64_for_all_strides() {
        for (m, n, k) in
            [(1, 1, 1), (1, 37, 19), (33, 1, 5), (65, 131, 67), (300, 70, 300), (2100, 3, 5), (4, 6, 0), (0, 3, 2)]
        {
            let (stride_a, stride_b) = (k + 3, n + 1);
            let (wide_a, wide_b) = (values(m * stride_a, 1), values(k * stride_b, 2));
            let (a, a_t, b, b_t) = (values(m * k, 3), values(k * m, 4), values(k * n, 5), values(n * k, 6));
            let of_a = [Matrix::new(&a, m, k), Matrix::new(&a_t, k, m).t(), Matrix::strided(&wide_a, m, k, stride_a)];
            let of_b = [Matrix::new(&b, k, n), Matrix::new(&b_t, n, k).t(), Matrix::strided(&wide_b, k, n, stride_b)];
            for (a, b) in of_a.iter().flat_map(|a| of_b.iter().map(move |b| (*a, *b))) {
                for (threads, into) in [(1, Accumulate::Overwrite), (3, Accumulate::Add), (3, Accumulate::Overwrite)] {
                    let mut out = values(m * n, 7);
                    let before = out.clone();
                    pool::run(threads, || product(a, b, &mut out, into)).expect("threads");
                    if into == Accumulate::Overwrite {
                        assert!(
                            pool::run(threads, || product_new(a, b, None)).expect("threads") == out,
                            "{m} x {n} x {k}"
                        );
                    }
                    for (at, got) in out.iter().enumerate() {
                        let added = if into == Accumulate::Add { f64::from(before[at]) } else { 0.0 };
                        let (sum, size) = plain(a, b, (at / n, at % n));
                        let error = (f64::from(*got) - added - sum).abs();
                        assert!(error < 1e-6 * (size + 1.0), "{m} x {n} x {k}, {threads} threads, {at}: {error:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn products_are_close_with_every_instruction_set() {
        let (m, n, k) = (33, 70, 65);
        let (a, b, b_t) = (values(m * k, 1), values(k * n, 2), values(n * k, 3));
        let factors =
            [(Matrix::new(&a, m, k), Matrix::new(&b, k, n)), (Matrix::new(&a, m, k), Matrix::new(&b_t, n, k).t())];
        for (isa, (a, b)) in Isa::available().into_iter().flat_map(|isa| factors.map(|factors| (isa, factors))) {
            let out = pool::run_with_isa(2, Some(isa), || product_new(a, b, None)).expect("threads");
            for (at, got) in out.iter().enumerate() {
                let (sum, size) = plain(a, b, (at / n, at % n));
                assert!((f64::from(*got) - sum).abs() < 1e-6 * (size + 1.0), "{isa}, {at}");
            }
        }
        let first = factors[0];
        let with = |isa| pool::run_with_isa(1, isa, || product_new(first.0, first.1, None)).expect("threads");
        assert_eq!(
            with(Some(Isa::Portable)),
            Arithmetic::new(Isa::Portable, true).expect("everywhere").product_new(first.0, first.1, None)
        );
    }

    /// The three products of a linear layer with bf16 factors equal those of the factors widened to f32.
    #[test]
    fn products_with_a_bf16_factor_equal_those_of_the_widened_factor() {
        let (tokens, ins, outs) = (37, 70, 50);
        let wide = [(tokens, ins, 1), (outs, ins, 2), (tokens, outs, 3)].map(|(m, n, seed)| values(m * n, seed));
        let narrow = wide.each_ref().map(|values| rounded(values));
        let widened = narrow.each_ref().map(|values| values.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
        fn factors<T: Element>([x, w, dy]: &[Vec<T>; 3], (t, i, o): (usize, usize, usize)) -> [[Matrix<'_, T>; 2]; 3] {
            let (x, w, dy) = (Matrix::new(x, t, i), Matrix::new(w, o, i), Matrix::new(dy, t, o));
            [[x, w.t()], [dy, w], [dy.t(), x]]
        }
        let sizes = (tokens, ins, outs);
        for ([a, b], [wide_a, wide_b]) in factors(&narrow, sizes).into_iter().zip(factors(&widened, sizes)) {
            let (m, n) = (a.shape().0, b.shape().1);
            let mut wanted = vec![0.0; m * n];
            product(wide_a, wide_b, &mut wanted, Accumulate::Overwrite);
            let close = |got: &[f32], factor: f32, within: f32| {
                let wrong =
                    |(got, wanted): (&f32, &f32)| (got - factor * wanted).abs() > within * (wanted.abs() + 1e-2);
                assert!(!got.iter().zip(&wanted).any(wrong), "{:?} x {:?} within {within}", a.shape(), b.shape());
            };
            let mut out = vec![0.0; m * n];
            product(a, b, &mut out, Accumulate::Overwrite);
            close(&out, 1.0, 1e-4);
            product(wide_a, b, &mut out, Accumulate::Add);
            close(&out, 2.0, 2e-4);
        }
    }

    #[test]
    fn a_range_of_rows_equals_those_rows_of_the_matrix() {
        let data = values(12, 1);
        let (mut all, mut some) = (vec![0.0; 16], vec![0.0; 8]);
        let (a, b) = (Matrix::new(&data, 4, 3), Matrix::new(&data, 4, 3).t());
        product(a, b, &mut all, Accumulate::Overwrite);
        product(a.rows(1..3), b, &mut some, Accumulate::Overwrite);
        assert_eq!(some, all[4..12]);
    }
}
