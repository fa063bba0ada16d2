use super::panels::Panels;
use super::*;
use rayon::ThreadPoolBuilder;
use std::ops::Range;

/// The unit roundoff of f32: half of the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// Rows, columns and terms: odd numbers, one of each, none, a few rows, several steps and blocks of terms.
const SIZES: [(usize, usize, usize); 13] = [
    (1, 1, 1),
    (1, 37, 19),
    (2, 5, 70),
    (3, 150, 33),
    (4, 9, 64),
    (33, 1, 5),
    (65, 131, 67),
    (150, 40, 67),
    (9, 50, 1031),
    (6, 17, 4200),
    (4, 6, 0),
    (0, 3, 2),
    (3, 0, 2),
];

/// Numbers between -1 and 1 that use all their bits; some are zero.
fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if state.is_multiple_of(11) { 0.0 } else { (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0 }
    };
    (0..count).map(|_| next()).collect()
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|x| bf16::from_f32(*x)).collect()
}

/// A matrix in each layout: by rows or by columns, without and with gaps between them.
struct MatrixLayouts<T> {
    rows: usize,
    cols: usize,
    data: [Vec<T>; 4],
}

impl<T: Element + Default> MatrixLayouts<T> {
    fn new(values: &[T], rows: usize, cols: usize) -> Self {
        let lay = |(outer, inner): (usize, usize), stride: usize, at: &dyn Fn(usize, usize) -> usize| {
            let mut to = vec![T::default(); if outer * inner == 0 { 0 } else { (outer - 1) * stride + inner }];
            (0..outer).for_each(|i| (0..inner).for_each(|j| to[i * stride + j] = values[at(i, j)]));
            to
        };
        let (by_row, by_column) = (|i, j| i * cols + j, |j, i| i * cols + j);
        let data = [
            lay((rows, cols), cols, &by_row),
            lay((rows, cols), cols + 3, &by_row),
            lay((cols, rows), rows, &by_column),
            lay((cols, rows), rows + 5, &by_column),
        ];
        Self { rows, cols, data }
    }

    fn all(&self) -> [Matrix<'_, T>; 4] {
        let ([a, b, c, d], rows, cols) = (&self.data, self.rows, self.cols);
        [
            Matrix::new(a, rows, cols),
            Matrix::strided(b, rows, cols, cols + 3),
            Matrix::new(c, cols, rows).t(),
            Matrix::strided(d, cols, rows, rows + 5).t(),
        ]
    }
}

/// Each element of a product in f64, and the sum of the absolute values of its terms.
fn plain<A: Copy + Into<f64>, B: Copy + Into<f64>>(
    a: &[A],
    b: &[B],
    (m, n, k): (usize, usize, usize),
) -> Vec<(f64, f64)> {
    let mut sums = vec![(0.0, 0.0); m * n];
    for (i, sums) in sums.chunks_exact_mut(n.max(1)).enumerate() {
        for t in 0..k {
            let x: f64 = a[i * k + t].into();
            for (sum, y) in sums.iter_mut().zip(&b[t * n..]) {
                let term = x * Into::<f64>::into(*y);
                *sum = (sum.0 + term, sum.1 + term.abs());
            }
        }
    }
    sums
}

/// The allowed error of a sum, given the sum of the absolute values of its terms, which have both signs. Rounding errors
/// grow with that size, not with the number of terms: for any length, the worst of ten thousand sums was wrong by 4 units
/// of it.
fn bound(size: f64) -> f64 {
    6.0 * UNIT * size
}

fn on<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(work)
}

/// Checks a product of two matrices into one kind of output, with b as it is or packed.
fn check<A: Element, B: Element>(
    by: Arithmetic,
    (a, b): (Matrix<A>, Matrix<B>),
    wanted: &[(f64, f64)],
    kind: usize,
    packed: bool,
) {
    let packed = packed.then(|| by.pack(b));
    let compute = |out: Output| match &packed {
        Some(packed) => packed.product(a, out),
        None => by.product(a, b, out),
    };
    let before = values(wanted.len(), 7);
    let (mut wide, mut narrow) = (before.clone(), rounded(&before));
    match kind {
        0 => compute(Output::Overwrite(&mut wide)),
        1 => compute(Output::Add(&mut wide)),
        _ => compute(Output::Rounded(&mut narrow)),
    }
    if packed.is_none() {
        match kind {
            0 => assert!(by.product_new(a, b, None) == wide, "{by}: a new matrix has other numbers"),
            1 => (),
            _ => assert!(by.product_new_rounded(a, b, None) == narrow, "{by}: a new matrix has other numbers"),
        }
    }
    for (at, (sum, size)) in wanted.iter().enumerate() {
        let (got, sum, allowed) = match kind {
            0 => (f64::from(wide[at]), *sum, bound(*size)),
            1 => {
                let sum = sum + f64::from(before[at]);
                (f64::from(wide[at]), sum, bound(*size) + UNIT * sum.abs())
            }
            _ => (narrow[at].to_f64(), *sum, bound(*size) * 1.01 + sum.abs() / 256.0),
        };
        let error = (got - sum).abs();
        assert!(error <= allowed, "{by}, {:?} x {:?}, element {at}: {got}, not {sum}: {error:e}", a.shape(), b.shape());
    }
}

/// Checks every layout of both factors; outputs, packing and threads alternate, so that each occurs with each layout.
fn check_layouts<A: Element + Default + Into<f64>, B: Element + Default + Into<f64>>(
    a: &[A],
    b: &[B],
    sizes: (usize, usize, usize),
) {
    let (m, n, k) = sizes;
    let wanted = plain(a, b, sizes);
    let (a, b) = (MatrixLayouts::new(a, m, k), MatrixLayouts::new(b, k, n));
    for (threads, offset) in [(1, 0), (3, 1)] {
        on(threads, || {
            for (turn, by) in Arithmetic::available().into_iter().enumerate() {
                for (i, a) in a.all().into_iter().enumerate() {
                    for (j, b) in b.all().into_iter().enumerate() {
                        let kind = i + j + turn + offset;
                        check(by, (a, b), &wanted, kind % 3, kind / 3 % 2 == 1);
                    }
                }
            }
        });
    }
}

#[test]
fn products_equal_f64_for_all_strides_and_types() {
    for sizes @ (m, n, k) in SIZES {
        let (a, b) = (values(m * k, 3), values(k * n, 5));
        let (narrow_a, narrow_b) = (rounded(&a), rounded(&b));
        check_layouts(&a, &b, sizes);
        check_layouts(&narrow_a, &narrow_b, sizes);
        check_layouts(&a, &narrow_b, sizes);
        check_layouts(&narrow_a, &b, sizes);
    }
}

/// There are more columns than are packed at once, and more rows than a block has.
#[test]
fn products_of_several_blocks_equal_f64() {
    let sizes @ (m, n, k) = (140, 700, 2100);
    let (a, b) = (rounded(&values(m * k, 1)), rounded(&values(k * n, 2)));
    let wanted = plain(&a, &b, sizes);
    for by in Arithmetic::available() {
        let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
        on(2, || check(by, (a, b), &wanted, 0, false));
    }
}

#[test]
fn results_depend_neither_on_threads_nor_on_packing() {
    let (m, n, k) = (70, 210, 700);
    let (a, b) = (rounded(&values(m * k, 1)), rounded(&values(k * n, 2)));
    let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, n, k).t());
    for by in Arithmetic::available() {
        let mut outs = [(); 4].map(|()| vec![0.0; m * n]);
        let [alone, shared, packed, part] = &mut outs;
        by.product(a, b, Output::Overwrite(alone));
        on(3, || by.product(a, b, Output::Overwrite(shared)));
        by.pack(b).product(a, Output::Overwrite(packed));
        by.product(a.rows(5..m), b, Output::Overwrite(&mut part[5 * n..]));
        assert!(alone == shared && alone == packed && alone[5 * n..] == part[5 * n..], "{by}");
    }
}

/// Few rows and many, one block of terms and several, an empty sum.
#[test]
fn a_bias_is_part_of_the_sums() {
    for (m, n, k) in [(3, 70, 65), (33, 130, 65), (9, 50, 2 * 1536 + 7), (5, 30, 0)] {
        let (a, b, bias) = (values(m * k, 1), values(k * n, 2), values(n, 3));
        let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, n, k).t());
        for by in Arithmetic::available() {
            let plain = by.product_new(a, b, None);
            let sums: Vec<f32> = plain.iter().enumerate().map(|(at, sum)| sum + bias[at % n]).collect();
            let wide = on(3, || by.product_new(a, b, Some(&bias)));
            assert!(
                wide.iter().zip(&sums).all(|(got, sum)| (got - sum).abs() <= 1e-6 * (k + 1) as f32),
                "{by}: {m} {n} {k}"
            );
            assert_eq!(wide == sums, k <= 1536, "the bias is added to the first sums");
            let narrow = by.product_new_rounded(a, b, Some(&bias));
            let far = |(got, sum): (&bf16, &f32)| (got.to_f32() - sum).abs() > sum.abs() / 250.0 + 1e-6 * k as f32;
            assert!(!narrow.iter().zip(&sums).any(far), "{by}: {m} {n} {k}");
        }
    }
}

/// An infinity or NaN affects only the sums that contain it: padding that is packed next to it has no effect.
#[test]
fn infinities_and_nan_spread_as_in_plain_loops() {
    for (m, n, k) in [(13, 21, 9), (3, 21, 9), (40, 130, 300)] {
        let (mut a, mut b) = (rounded(&values(m * k, 1)), rounded(&values(k * n, 2)));
        // They have a NaN, infinities of both signs in one sum, an infinity times zero, a product that overflows.
        a[k - 1] = bf16::NAN;
        (a[2 * k], b[0]) = (bf16::INFINITY, bf16::ZERO);
        b[k * n - 1] = bf16::NEG_INFINITY;
        (a[k], b[1]) = (bf16::from_f32(3e38), bf16::from_f32(2.0));
        let plain = |i: usize, j: usize| {
            (0..k).fold(0.0f32, |sum, t| a[i * k + t].to_f32().mul_add(b[t * n + j].to_f32(), sum))
        };
        let (wide_a, wide_b): (Vec<f32>, Vec<f32>) =
            (a.iter().map(|x| x.to_f32()).collect(), b.iter().map(|x| x.to_f32()).collect());
        let columns = MatrixLayouts::new(&b, k, n);
        for by in Arithmetic::available() {
            let mut outs = vec![];
            for b in columns.all() {
                outs.push(vec![0.0; m * n]);
                by.product(Matrix::new(&a, m, k), b, Output::Overwrite(outs.last_mut().expect("just pushed")));
                let mut narrow = vec![bf16::ZERO; m * n];
                by.product(Matrix::new(&a, m, k), b, Output::Rounded(&mut narrow));
                outs.push(narrow.iter().map(|x| x.to_f32()).collect());
            }
            outs.push(vec![0.0; m * n]);
            let out = outs.last_mut().expect("just pushed");
            by.product(Matrix::new(&wide_a, m, k), Matrix::new(&wide_b, k, n), Output::Overwrite(out));
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let wanted = plain(i, j);
                for out in &outs {
                    let got = out[i * n + j];
                    let alike =
                        got.is_nan() == wanted.is_nan() && (wanted.is_finite() || wanted.is_nan() || got == wanted);
                    assert!(
                        alike && got.is_finite() == wanted.is_finite(),
                        "{by}, {m} x {n} x {k}, {i} {j}: {got}, not {wanted}"
                    );
                }
            }
        }
    }
}

/// Denormal numbers are kept, except by products of bf16 in the processor: these treat denormal factors and sums as zero.
#[test]
fn denormal_numbers_are_kept_but_by_products_of_bf16() {
    let power = |exponent: i32| bf16::from_f64(f64::from(exponent).exp2());
    for m in [1, 9] {
        for (x, y) in [(-130, 10), (10, -130), (-70, -70)] {
            let (a, b) = (vec![power(x); 2 * m], vec![power(y); 20]);
            let sum = f64::from(x + y + 1).exp2() as f32;
            for by in Arithmetic::available() {
                let mut out = vec![1.0; 10 * m];
                for b in [Matrix::new(&b, 2, 10), Matrix::new(&b, 10, 2).t()] {
                    by.product(Matrix::new(&a, m, 2), b, Output::Overwrite(&mut out));
                    let wanted = if by.bf16 { 0.0 } else { sum };
                    assert!(out.iter().all(|got| *got == wanted), "{by}: 2^{x} times 2^{y}: {out:?}");
                }
                let wide: Vec<f32> = b.iter().map(|x| x.to_f32()).collect();
                by.product(Matrix::new(&a, m, 2), Matrix::new(&wide, 2, 10), Output::Overwrite(&mut out));
                assert!(out.iter().all(|got| *got == sum), "{by}: 2^{x} times 2^{y} in f32: {out:?}");
            }
        }
    }
}

#[test]
fn sums_are_rounded_once_to_the_nearest_and_to_even() {
    // The exact sums are halfway between two neighbours, or slightly off.
    for (parts, wanted) in
        [([1.0, 1.0 / 256.0], 1.0), ([1.0, 3.0 / 256.0], 1.015_625), ([1.0, 1.25 / 256.0], 1.007_812_5)]
    {
        let a: Vec<bf16> = rounded(&parts).into_iter().cycle().take(2 * 9).collect();
        let b = vec![bf16::ONE; 2 * 20];
        for by in Arithmetic::available() {
            let mut out = vec![bf16::ZERO; 9 * 20];
            by.product(Matrix::new(&a, 9, 2), Matrix::new(&b, 2, 20), Output::Rounded(&mut out));
            assert!(out.iter().all(|got| got.to_f64() == wanted), "{by}: {}, not {wanted}", out[0]);
        }
    }
}

#[test]
fn instructions_that_a_machine_lacks_are_not_given() {
    for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
        assert_eq!(Arithmetic::new(isa, true).is_some(), Isa::available().contains(&isa));
    }
    assert_eq!(Some(&Arithmetic::best()), Arithmetic::available().first());
    let names: Vec<_> = Arithmetic::available().iter().map(Arithmetic::to_string).collect();
    assert!(names.contains(&"portable".to_owned()) && !names.contains(&"portable+bf16".to_owned()), "{names:?}");
}

#[test]
#[should_panic(expected = "a product of 2 x 3 and 4 x 5 into 10")]
fn factors_that_do_not_fit_are_refused() {
    let (a, b) = ([0.0f32; 6], [0.0f32; 20]);
    Arithmetic::best().product(Matrix::new(&a, 2, 3), Matrix::new(&b, 4, 5), Output::Overwrite(&mut [0.0; 10]));
}

#[test]
#[should_panic(expected = "a product of 2 x 3 and 3 x 5 with a bias of 4")]
fn a_bias_that_does_not_fit_is_refused() {
    let (a, b) = ([0.0f32; 6], [0.0f32; 15]);
    Arithmetic::best().product_new(Matrix::new(&a, 2, 3), Matrix::new(&b, 3, 5), Some(&[0.0; 4]));
}

#[test]
fn rows_where_they_are_and_packed_rows_give_the_same_bits() {
    let (few, many, terms) = (33, 500, 333);
    let b = values(terms * many, 2);
    for arithmetic in Arithmetic::available() {
        let panels = |columns: usize| Panels::new(arithmetic.features::<f32, f32>(), columns).count();
        assert!(panels(few) <= run::FEW_COLUMNS && panels(many) > run::FEW_COLUMNS, "{arithmetic}");
        // All numbers of rows behind the last whole panel.
        for rows in 5..=21 {
            let a = values(rows * terms, 1);
            let a = Matrix::new(&a, rows, terms);
            let packed = arithmetic.product_new(a, Matrix::new(&b, terms, many), None);
            let in_place = arithmetic.product_new(a, Matrix::strided(&b, terms, few, many), None);
            for (packed, in_place) in packed.chunks_exact(many).zip(in_place.chunks_exact(few)) {
                assert_eq!(packed[..few], *in_place, "{rows} rows, {arithmetic}");
            }
        }
    }
}

#[test]
fn errors_hardly_grow_with_the_number_of_terms() {
    let (rows, columns) = (8, 16);
    for terms in [64, 4096] {
        let (a, b) = (vec![0.7f32; rows * terms], values(terms * columns, 3));
        // Sums that grow: without short sums on registers, the error of the longer ones is 1e-6.
        let b: Vec<f32> = b.iter().map(|x| x.abs()).collect();
        let out = Arithmetic::best().product_new(Matrix::new(&a, rows, terms), Matrix::new(&b, terms, columns), None);
        let error = |column: usize| {
            let wanted: f64 = (0..terms).map(|term| f64::from(0.7f32) * f64::from(b[term * columns + column])).sum();
            (f64::from(out[column]) / wanted - 1.0).powi(2)
        };
        let error = ((0..columns).map(error).sum::<f64>() / columns as f64).sqrt();
        assert!(error < 4e-7, "{terms} terms: {error:e}");
    }
}

/// Rows of integers with one factor, in blocks of 256.
struct Integers {
    columns: usize,
    integers: Vec<i8>,
}

impl Integers {
    const FACTOR: f32 = 0.37;

    fn numbers(&self) -> Vec<f32> {
        self.integers.iter().map(|x| f32::from(*x) * Self::FACTOR).collect()
    }
}

impl QuantizedRows for Integers {
    fn shape(&self) -> (usize, usize) {
        (self.integers.len() / self.columns, self.columns)
    }

    fn dequantize_part(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        assert!(columns.start.is_multiple_of(256), "columns {columns:?} begin within a block");
        assert!(
            columns.end.is_multiple_of(256) || columns.end == self.columns,
            "columns {columns:?} end within a block"
        );
        assert_eq!(to.len(), rows.len() * columns.len());
        for (row, to) in rows.zip(to.chunks_exact_mut(columns.len())) {
            let from = &self.integers[row * self.columns..][columns.clone()];
            to.iter_mut().zip(from).for_each(|(to, x)| *to = f32::from(*x) * Self::FACTOR);
        }
    }
}

#[test]
fn quantized_rows_multiply_like_their_numbers() {
    let sizes =
        [(1, 3, 40), (4, 33, 300), (5, 1, 1), (9, 70, 1031), (7, 130, 4200), (6, 1500, 1600), (33, 50, 256), (0, 3, 2)];
    for (m, n, k) in sizes {
        let integers = values(n * k, 3).iter().map(|x| (127.0 * x) as i8).collect();
        let (a, b) = (values(m * k, 5), Integers { columns: k, integers });
        let (bias, old, numbers) = (values(n, 7), values(m * n, 9), b.numbers());
        let a = Matrix::new(&a, m, k);
        for by in Arithmetic::available() {
            for threads in [1, 3] {
                let (product, sum) = on(threads, || {
                    let mut sum = old.clone();
                    by.product_quantized_t(a, &b, Output::Add(&mut sum));
                    (by.product_new_quantized_t(a, &b, Some(&bias)), sum)
                });
                // Another kernel computes products of f32 numbers with at most four rows.
                let dense = Matrix::new(&numbers, n, k).t();
                let mut wanted = [by.product_new(a, dense, Some(&bias)), old.clone()];
                by.product(a, dense, Output::Add(&mut wanted[1]));
                for (got, wanted) in [product, sum].iter().zip(&wanted) {
                    for (got, wanted) in got.iter().zip(wanted) {
                        let most = if m > 4 { 0.0 } else { 1e-5 * k as f32 };
                        assert!((got - wanted).abs() <= most, "{got} instead of {wanted}: {m} x {n} x {k}, {by}");
                    }
                }
            }
        }
    }
}
