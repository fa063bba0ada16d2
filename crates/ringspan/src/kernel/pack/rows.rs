//! Converts rows to columns and columns to rows, by transposing square blocks of vectors in registers.

use super::super::vector::Simd;
use super::super::view::Data;

/// Maximum number of elements in a vector.
const MAX_LANES: usize = 16;

/// Loads `row[at..][..LANES]`, with zeros after the end of the row.
#[inline(always)]
fn load<S: Simd>(simd: S, row: Data, at: usize) -> S::V {
    let end = row.len().min(at + S::LANES);
    let mut numbers = [0.0; MAX_LANES];
    match row {
        Data::F32(row) if end == at + S::LANES => {
            // SAFETY: the row has LANES elements from `at` on.
            return unsafe { simd.load(row.as_ptr().add(at)) };
        }
        Data::Bf16(row) if end == at + S::LANES => {
            // SAFETY: as above.
            return unsafe { simd.load_bf16(row.as_ptr().add(at)) };
        }
        Data::Q8_0(row) if end == at + S::LANES && row.copy_within_block(at, &mut numbers[..S::LANES]) => (),
        _ if at < end => row.slice(at..end).copy_to(&mut numbers[..end - at]),
        _ => (),
    }
    // SAFETY: no vector has more than MAX_LANES numbers.
    unsafe { simd.load(numbers.as_ptr()) }
}

/// Pointers to the rows, if each has `dim` elements of `pair` numbers in the type that vectors take; else `None`.
#[inline(always)]
pub(in super::super) fn direct(rows: &[Data], pair: usize, dim: usize) -> Option<[*const f32; MAX_LANES]> {
    let mut from = [std::ptr::null(); MAX_LANES];
    for (from, row) in from.iter_mut().zip(rows) {
        *from = match (*row, pair) {
            (Data::F32(row), 1) if row.len() >= dim => row.as_ptr(),
            (Data::Bf16(row), 2) if row.len() >= 2 * dim => row.as_ptr().cast(),
            _ => return None,
        };
    }
    Some(from)
}

/// Loads the elements `at..at + LANES` of a row: numbers, or pairs of neighbours in bf16.
#[inline(always)]
pub(in super::super) fn load_along<S: Simd>(simd: S, row: Data, pair: usize, at: usize) -> S::V {
    match pair {
        1 => load(simd, row, at),
        _ => simd.pair_along(load(simd, row, 2 * at), load(simd, row, 2 * at + S::LANES)),
    }
}

/// Calls `emit(d, first, x)` for each element `d < dim` and every LANES of the `rows` rows; x is element d of rows
/// `first..first + LANES`. An element is `pair` numbers. A row that is `None` counts as zeros.
#[inline(always)]
fn squares<'a, S: Simd>(
    simd: S,
    (dim, pair): (usize, usize),
    rows: usize,
    row: impl Fn(usize) -> Option<Data<'a>>,
    mut emit: impl FnMut(usize, usize, S::V),
) {
    for first in (0..rows).step_by(S::LANES) {
        let mut from = [Data::F32(&[]); MAX_LANES];
        for (i, from) in from.iter_mut().enumerate().take(S::LANES.min(rows - first)) {
            if let Some(row) = row(first + i) {
                *from = row;
            }
        }
        // Rows are far apart, so the hardware prefetcher does not find them.
        for next in first + S::LANES..rows.min(first + 2 * S::LANES) {
            row(next).into_iter().for_each(Data::prefetch);
        }
        let from = &from[..S::LANES];
        let direct = direct(from, pair, dim);
        for d in (0..dim).step_by(S::LANES) {
            // Each case has an array of its own: one that both wrote would stay in memory instead of registers.
            let mut square = match &direct {
                Some(from) if d + S::LANES <= dim => {
                    let mut square = [simd.splat(0.0); MAX_LANES];
                    for i in 0..S::LANES {
                        // SAFETY: the row has LANES elements from d on.
                        square[i] = unsafe { simd.load(from[i].add(d)) };
                    }
                    square
                }
                _ => {
                    let mut square = [simd.splat(0.0); MAX_LANES];
                    for i in 0..S::LANES {
                        square[i] = load_along(simd, from[i], pair, d);
                    }
                    square
                }
            };
            simd.transpose(&mut square);
            // There is only one call of `emit`: a closure that is not inlined is compiled without the vector instructions.
            for (i, x) in square.iter().enumerate().take(S::LANES) {
                if d + i < dim {
                    emit(d + i, first, *x);
                }
            }
        }
    }
}

/// Transposes rows to columns: `to[d][lane] = factor * row(lane)[d]` for `lanes` lanes, whole vectors. A row that is `None`
/// counts as zeros.
#[inline(always)]
pub(in super::super) fn columns<'a, S: Simd>(
    simd: S,
    to: &mut [f32],
    dim: usize,
    lanes: usize,
    factor: f32,
    row: impl Fn(usize) -> Option<Data<'a>>,
) {
    assert!(to.len() >= dim * lanes && lanes.is_multiple_of(S::LANES));
    let (to, factor) = (to.as_mut_ptr(), simd.splat(factor));
    squares(simd, (dim, 1), lanes, row, |d, first, x| {
        // SAFETY: the asserted size; d < dim and first + LANES <= lanes.
        unsafe { simd.store(to.add(d * lanes + first), simd.mul(x, factor)) }
    });
}

/// Like [`columns`], for operands of products: if PAIR is 2, in pairs along the rows and without the factor.
#[inline(always)]
pub(in super::super) fn operand_columns<'a, S: Simd>(
    simd: S,
    to: &mut [f32],
    dim: usize,
    lanes: usize,
    factor: f32,
    row: impl Fn(usize) -> Option<Data<'a>>,
) {
    assert!(to.len() >= dim.div_ceil(S::PAIR) * lanes);
    // SAFETY: the asserted size.
    unsafe { write_operand_columns(simd, to.as_mut_ptr(), dim, lanes, factor, row) }
}

/// Like [`operand_columns`], into memory that may be uninitialised: all of its elements are written, and none is read.
///
/// # Safety
/// `to` must be writable for `dim / PAIR * lanes` elements, the first rounded up.
#[inline(always)]
pub(in super::super) unsafe fn write_operand_columns<'a, S: Simd>(
    simd: S,
    to: *mut f32,
    dim: usize,
    lanes: usize,
    factor: f32,
    row: impl Fn(usize) -> Option<Data<'a>>,
) {
    assert!(lanes.is_multiple_of(S::LANES));
    let factor = simd.splat(factor);
    squares(simd, (dim.div_ceil(S::PAIR), S::PAIR), lanes, row, |d, first, x| {
        let x = if S::PAIR == 1 { simd.mul(x, factor) } else { x };
        // SAFETY: the contract of the caller; d is less than dim / PAIR, and first + LANES at most `lanes`.
        unsafe { simd.store(to.add(d * lanes + first), x) }
    });
}

/// Packs rows as panels `[rows / R][dim / PAIR][R]` for products; R divides LANES and `rows`. A row that is `None` counts
/// as zeros.
#[inline(always)]
pub(in super::super) fn panels<'a, S: Simd, const R: usize>(
    simd: S,
    to: &mut [f32],
    dim: usize,
    rows: usize,
    row: impl Fn(usize) -> Option<Data<'a>>,
) {
    let depth = dim.div_ceil(S::PAIR);
    assert!(to.len() >= rows * depth && rows.is_multiple_of(R));
    let to = to.as_mut_ptr();
    squares(simd, (depth, S::PAIR), rows, row, |d, first, x| {
        // SAFETY: the asserted size; d < depth, the panel of row `first` exists, and the next one if there are more rows.
        unsafe {
            let panel = to.add(first * depth + d * R);
            store_parts::<S, R>(simd, panel, (first + R < rows).then(|| panel.add(R * depth)), x);
        }
    });
}

/// Packs columns as panels `[rows / R][dim / PAIR][R]` for products: `column(d)` has element d of every row. R divides
/// LANES and `rows`; missing elements, and columns that are `None`, count as zeros.
#[inline(always)]
pub(in super::super) fn panels_across<'a, S: Simd, const R: usize>(
    simd: S,
    to: &mut [f32],
    dim: usize,
    rows: usize,
    column: impl Fn(usize) -> Option<Data<'a>>,
) {
    let depth = dim.div_ceil(S::PAIR);
    assert!(to.len() >= rows * depth && rows.is_multiple_of(R));
    let to = to.as_mut_ptr();
    for d in 0..depth {
        for first in (0..rows).step_by(S::LANES) {
            let x = load_across(simd, d, first, &column);
            // SAFETY: the asserted size; d < depth, the panel of row `first` exists, and the next one if there are more
            // rows.
            unsafe {
                let panel = to.add(first * depth + d * R);
                store_parts::<S, R>(simd, panel, (first + R < rows).then(|| panel.add(R * depth)), x);
            }
        }
    }
}

/// Whether all packed numbers are finite.
#[inline(always)]
pub(in super::super) fn is_finite<S: Simd>(packed: &[f32]) -> bool {
    match S::PAIR {
        1 => Data::F32(packed).is_finite(),
        _ => Data::Bf16(bytemuck::cast_slice(packed)).is_finite(),
    }
}

/// Writes the first R numbers of a vector and, if it has more, the next R.
///
/// # Safety
/// Both must be writable for R numbers; R is all or half of LANES.
#[inline(always)]
pub(super) unsafe fn store_parts<S: Simd, const R: usize>(simd: S, first: *mut f32, second: Option<*mut f32>, x: S::V) {
    // SAFETY: the contract of the caller.
    unsafe {
        if R == S::LANES {
            simd.store(first, x);
        } else {
            let mut other = [0.0; MAX_LANES];
            simd.store_halves(first, second.unwrap_or(other.as_mut_ptr()), x);
        }
    }
}

/// Loads the elements `at..at + LANES` of rows `PAIR * i..` for products across rows: if PAIR is 2, an element has a number
/// of each of two rows.
#[inline(always)]
pub(in super::super) fn load_across<'a, S: Simd>(
    simd: S,
    i: usize,
    at: usize,
    row: impl Fn(usize) -> Option<Data<'a>>,
) -> S::V {
    let number = |i: usize| load(simd, row(i).unwrap_or(Data::F32(&[])), at);
    if S::PAIR == 1 {
        return number(i);
    }
    match (row(2 * i), row(2 * i + 1)) {
        (Some(Data::Bf16(first)), Some(Data::Bf16(second))) if first.len().min(second.len()) >= at + S::LANES => {
            // SAFETY: both have LANES numbers from `at` on.
            unsafe { simd.load_pairs(first.as_ptr().add(at), second.as_ptr().add(at)) }
        }
        _ => simd.pair(number(2 * i), number(2 * i + 1)),
    }
}

/// Transposes columns to rows: `row(lane)[d] = from[d][lane]` for each lane that has a row of `dim` elements.
#[inline(always)]
pub(in super::super) fn rows<'a, S: Simd>(
    simd: S,
    from: &[f32],
    dim: usize,
    lanes: usize,
    mut row: impl FnMut(usize) -> Option<&'a mut [f32]>,
) {
    assert!(from.len() >= dim * lanes && lanes.is_multiple_of(S::LANES));
    for first in (0..lanes).step_by(S::LANES) {
        let mut to: [&mut [f32]; MAX_LANES] = std::array::from_fn(|_| &mut [][..]);
        for (i, to) in to.iter_mut().enumerate().take(S::LANES) {
            if let Some(row) = row(first + i) {
                *to = row;
            }
        }
        for d in (0..dim).step_by(S::LANES) {
            let mut square = [simd.splat(0.0); MAX_LANES];
            let here = S::LANES.min(dim - d);
            for (i, x) in square.iter_mut().enumerate().take(S::LANES) {
                // SAFETY: the asserted size; beyond the end, the last row is read again.
                *x = unsafe { simd.load(from.as_ptr().add((d + i.min(here - 1)) * lanes + first)) };
            }
            simd.transpose(&mut square);
            for i in 0..S::LANES {
                let mut numbers = [0.0; MAX_LANES];
                match to[i].get_mut(d..d + here) {
                    // SAFETY: the slice has LANES elements.
                    Some(to) if here == S::LANES => unsafe { simd.store(to.as_mut_ptr(), square[i]) },
                    Some(to) => {
                        // SAFETY: no vector has more than MAX_LANES numbers.
                        unsafe { simd.store(numbers.as_mut_ptr(), square[i]) };
                        to.copy_from_slice(&numbers[..here]);
                    }
                    None => (),
                }
            }
        }
    }
}

/// Copies rows in order for products across them, each padded with zeros to `width`: `to[i][..width] = factor * row(i)`; if
/// PAIR is 2, in pairs of rows and without the factor.
#[inline(always)]
pub(in super::super) fn copy<'a, S: Simd>(
    simd: S,
    to: &mut [f32],
    width: usize,
    factor: f32,
    row: impl Fn(usize) -> Option<Data<'a>>,
) {
    let factor = simd.splat(factor);
    for (i, to) in to.chunks_exact_mut(width).enumerate() {
        if S::PAIR == 1 {
            copy_row(simd, to, factor, row(i).unwrap_or(Data::F32(&[])));
            continue;
        }
        for (at, to) in to.chunks_exact_mut(S::LANES).enumerate() {
            let x = load_across(simd, i, at * S::LANES, &row);
            // SAFETY: the chunk has LANES elements.
            unsafe { simd.store(to.as_mut_ptr(), x) };
        }
    }
}

/// Copies a row, padded with zeros: `to = factor * row`. The type of the row is found out once, not for each vector.
#[inline(always)]
fn copy_row<S: Simd>(simd: S, to: &mut [f32], factor: S::V, row: Data) {
    let (vectors, padded) = to.split_at_mut(row.len().min(to.len()) / S::LANES * S::LANES);
    let first_padded = vectors.len();
    let vectors = vectors.chunks_exact_mut(S::LANES);
    match row {
        Data::F32(row) => {
            for (to, x) in vectors.zip(row.chunks_exact(S::LANES)) {
                store(simd, to, simd.mul(load(simd, Data::F32(x), 0), factor));
            }
        }
        Data::Bf16(row) => {
            for (to, x) in vectors.zip(row.chunks_exact(S::LANES)) {
                store(simd, to, simd.mul(load(simd, Data::Bf16(x), 0), factor));
            }
        }
        row => {
            for (i, to) in vectors.enumerate() {
                store(simd, to, simd.mul(load(simd, row, i * S::LANES), factor));
            }
        }
    }
    for (i, to) in padded.chunks_exact_mut(S::LANES).enumerate() {
        store(simd, to, simd.mul(load(simd, row, first_padded + i * S::LANES), factor));
    }
}

/// Stores a vector in LANES elements.
#[inline(always)]
fn store<S: Simd>(simd: S, to: &mut [f32], x: S::V) {
    assert_eq!(to.len(), S::LANES);
    // SAFETY: the slice has LANES elements.
    unsafe { simd.store(to.as_mut_ptr(), x) };
}
