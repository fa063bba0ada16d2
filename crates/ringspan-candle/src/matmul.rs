//! Products of matrices in f32, on the threads of this rank's pool.

use crate::pool;
use gemm::Parallelism;
use std::ops::Range;

/// A matrix in a slice, by its strides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Row after row.
    ///
    /// # Panics
    /// A slice of another length.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix of {rows} x {cols}");
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// Rows that begin `stride` elements apart, of which the last may end with its elements.
    ///
    /// # Panics
    /// A slice that is too short.
    pub(crate) fn strided(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        let needed = if rows * cols == 0 { 0 } else { (rows - 1) * stride + cols };
        assert!(data.len() >= needed, "{rows} rows of {cols}, {stride} apart, in {} elements", data.len());
        Self { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose: no element moves.
    pub(crate) fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// Rows that are not there.
    pub(crate) fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let start = (range.start * self.row_stride).min(self.data.len());
        Self { data: &self.data[start..], rows: range.len(), ..self }
    }
}

/// What a product does with what is in its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Into {
    /// Writes over it.
    Fresh,
    /// Adds to it.
    Sum,
}

/// `a b` into `out`, row after row: a `[m, k]`, b `[k, n]`, out `[m, n]`.
///
/// # Panics
/// Sizes that do not fit.
pub(crate) fn product(a: Matrix, b: Matrix, out: &mut [f32], into: Into) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert!(b.rows == k && out.len() == m * n, "a product of {m} x {k} and {} x {n} into {}", b.rows, out.len());
    let parallelism = match pool::threads() {
        1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    };
    let (alpha, beta) = (if into == Into::Sum { 1.0 } else { 0.0 }, 1.0f32);
    // gemm writes whole vectors down the columns of its output, so it is asked for the transpose: b^T a^T.
    // SAFETY: both matrices checked when they were made that their elements lie in their slices, `out` has m n elements
    // above, and nothing else refers to it.
    unsafe {
        gemm::gemm(
            n,
            m,
            k,
            out.as_mut_ptr(),
            n as isize,
            1,
            into == Into::Sum,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.col_stride as isize,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.col_stride as isize,
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

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) as f32 * 0.377).sin()).collect()
    }

    /// An element of the product, and the sum of the sizes of its terms.
    fn plain(a: Matrix, b: Matrix, (i, j): (usize, usize)) -> (f64, f64) {
        let element = |m: Matrix, i: usize, j: usize| f64::from(m.data[i * m.row_stride + j * m.col_stride]);
        let terms = || (0..a.cols).map(|k| element(a, i, k) * element(b, k, j));
        (terms().sum(), terms().map(f64::abs).sum())
    }

    /// Every way to lay out the factors, odd sizes, one row, nothing to sum, on one thread and on three.
    #[test]
    fn products_equal_f64_however_their_factors_lie() {
        for (m, n, k) in [(1, 1, 1), (1, 37, 19), (33, 1, 5), (65, 131, 67), (300, 70, 300), (4, 6, 0), (0, 3, 2)] {
            let (stride_a, stride_b) = (k + 3, n + 1);
            let (wide_a, wide_b) = (values(m * stride_a, 1), values(k * stride_b, 2));
            let (a, a_t, b, b_t) = (values(m * k, 3), values(k * m, 4), values(k * n, 5), values(n * k, 6));
            let of_a = [Matrix::new(&a, m, k), Matrix::new(&a_t, k, m).t(), Matrix::strided(&wide_a, m, k, stride_a)];
            let of_b = [Matrix::new(&b, k, n), Matrix::new(&b_t, n, k).t(), Matrix::strided(&wide_b, k, n, stride_b)];
            for (a, b) in of_a.iter().flat_map(|a| of_b.iter().map(move |b| (*a, *b))) {
                for (threads, into) in [(1, Into::Fresh), (3, Into::Sum), (3, Into::Fresh)] {
                    let mut out = values(m * n, 7);
                    let before = out.clone();
                    pool::run(threads, || product(a, b, &mut out, into)).expect("threads");
                    for (at, got) in out.iter().enumerate() {
                        let added = if into == Into::Sum { f64::from(before[at]) } else { 0.0 };
                        let (sum, size) = plain(a, b, (at / n, at % n));
                        let error = (f64::from(*got) - added - sum).abs();
                        assert!(error < 1e-6 * (size + 1.0), "{m} x {n} x {k}, {threads} threads, {at}: {error:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn some_rows_are_those_of_the_matrix() {
        let data = values(12, 1);
        let (mut all, mut some) = (vec![0.0; 16], vec![0.0; 8]);
        let (a, b) = (Matrix::new(&data, 4, 3), Matrix::new(&data, 4, 3).t());
        product(a, b, &mut all, Into::Fresh);
        product(a.rows(1..3), b, &mut some, Into::Fresh);
        assert_eq!(some, all[4..12]);
    }
}
