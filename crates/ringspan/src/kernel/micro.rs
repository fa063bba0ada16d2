//! The one loop in which the kernels spend their time: a small matrix product held in registers.
//!
//! Where products take pairs of bf16 (`S::PAIR` is 2), an element of `a` and `b` is a pair, and a depth counts pairs.

use super::vector::{Columns, Rows, Simd};
use std::arch::asm;

/// `acc[i][v] += sum over t < depth of a[i * a_row + t * a_step] * b[t * b_step + v * LANES ..][..LANES]`
///
/// `R x V` must fit the registers with V + 1 to spare.
///
/// # Safety
/// `a` must be readable at every `i * a_row + t * a_step` with i < R, t < depth, and `b` for `V * LANES` numbers at
/// every `t * b_step`.
#[allow(clippy::too_many_arguments)] // Two operands, three strides: the shape of the product.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd, const R: usize, const V: usize>(
    simd: S,
    depth: usize,
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    b_step: usize,
    acc: [[S::V; V]; R],
) -> [[S::V; V]; R] {
    let (a, b) = (Rows { data: a, row: a_row, step: a_step }, Columns { data: b, step: b_step });
    // SAFETY: the contract of the caller.
    unsafe { simd.multiply::<R, V>(depth, a, b, acc) }
}

/// [`multiply`] where `a_row` is 1 and a lane takes row `t` only if `low <= t < high` (of a pair, each
/// half for itself): what a lane does not see may be no number.
///
/// # Safety
/// As [`multiply`]; `low` and `high` must be readable for `V * LANES` numbers.
#[allow(clippy::too_many_arguments)] // As multiply, and the bounds.
#[inline(always)]
pub(super) unsafe fn multiply_seen<S: Simd, const R: usize, const V: usize>(
    simd: S,
    depth: usize,
    a: *const f32,
    a_step: usize,
    b: *const f32,
    b_step: usize,
    (low, high): (&[f32], &[f32]),
    mut acc: [[S::V; V]; R],
) -> [[S::V; V]; R] {
    let zero = simd.splat(0.0);
    for t in 0..depth {
        for v in 0..V {
            let at = v * S::LANES;
            // SAFETY: the caller made all of this readable.
            unsafe {
                let (low, high) = (simd.load(low.as_ptr().add(at)), simd.load(high.as_ptr().add(at)));
                let row = simd.load(b.add(t * b_step + at));
                for (i, acc) in acc.iter_mut().enumerate() {
                    let bits = (*a.add(t * a_step + i)).to_bits();
                    for half in 0..S::PAIR {
                        // The other half takes part as 0: where it is seen, what it multiplies belongs to the lane.
                        let bits = if S::PAIR == 1 { bits } else { bits & (0xFFFF << (16 * half)) };
                        let index = simd.splat((t * S::PAIR + half) as f32);
                        let x = simd.within(simd.splat(f32::from_bits(bits)), index, low, high, zero);
                        acc[v] = simd.product(x, row, acc[v]);
                    }
                }
            }
        }
    }
    acc
}

/// `c[i * stride ..][..columns] += sum over t < depth of a[i * a_row + t * a_step] * b[t * stride ..][..columns]` for
/// i < rows: lanes run along the columns, whose number is a multiple of LANES and at most `stride`.
///
/// # Safety
/// `rows` must be a multiple of R, `a` readable at every `i * a_row + t * a_step`, `b` for `depth * stride` numbers, `c`
/// readable and writable for `rows * stride`.
#[allow(clippy::too_many_arguments)] // Three operands, their shape and strides.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, const R: usize>(
    simd: S,
    (rows, depth, columns): (usize, usize, usize),
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    c: *mut f32,
    stride: usize,
) {
    let mut left = columns / S::LANES;
    let mut column = 0;
    while left > 0 {
        // As even as possible: a stripe of one vector would wait for its own sums.
        let vectors = left.div_ceil(left.div_ceil(S::COLUMNS));
        // SAFETY: the caller's promises, for `vectors` of the columns from `column` on.
        unsafe {
            let (b, c) = (b.add(column), c.add(column));
            match vectors {
                1 => stripe::<S, R, 1>(simd, (rows, depth), a, a_row, a_step, b, c, stride),
                2 => stripe::<S, R, 2>(simd, (rows, depth), a, a_row, a_step, b, c, stride),
                3 => stripe::<S, R, 3>(simd, (rows, depth), a, a_row, a_step, b, c, stride),
                _ => stripe::<S, R, 4>(simd, (rows, depth), a, a_row, a_step, b, c, stride),
            }
        }
        left -= vectors;
        column += vectors * S::LANES;
    }
}

/// [`accumulate`] for V vectors of columns.
#[allow(clippy::too_many_arguments)] // As above.
#[inline(always)]
unsafe fn stripe<S: Simd, const R: usize, const V: usize>(
    simd: S,
    (rows, depth): (usize, usize),
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    c: *mut f32,
    stride: usize,
) {
    let mut i = 0;
    // SAFETY: the caller's promises, for rows that exist because `rows` is a multiple of R.
    unsafe {
        if S::SIX_ROWS && R == 4 && V == 2 {
            // None, four or eight rows are left for products of four.
            let fours = rows % 6 * 2 % 6 * 2;
            while i + fours < rows {
                tile::<S, 6, V>(simd, depth, a.add(i * a_row), a_row, a_step, b, c.add(i * stride), stride);
                i += 6;
            }
        }
        while i < rows {
            tile::<S, R, V>(simd, depth, a.add(i * a_row), a_row, a_step, b, c.add(i * stride), stride);
            i += R;
        }
    }
}

/// The same pointer, of which the compiler knows nothing: else it would keep a pointer for each row of a product from one
/// product to the next, in more registers than there are, and updating these in memory took a fifth of the time of
/// [`accumulate`].
#[inline(always)]
fn opaque(pointer: *mut f32) -> *mut f32 {
    let mut pointer = pointer;
    // SAFETY: no instruction.
    unsafe { asm!("/* {0} */", inout(reg) pointer, options(pure, nomem, nostack, preserves_flags)) };
    pointer
}

/// [`accumulate`] for R rows and V vectors of columns.
#[allow(clippy::too_many_arguments)] // As above.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize, const V: usize>(
    simd: S,
    depth: usize,
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    c: *mut f32,
    stride: usize,
) {
    // SAFETY: the caller's promises.
    unsafe {
        let (a, c) = (opaque(a.cast_mut()), opaque(c));
        let mut acc = [[simd.splat(0.0); V]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (v, x) in acc.iter_mut().enumerate() {
                *x = simd.load(c.add(r * stride + v * S::LANES));
            }
        }
        acc = multiply::<S, R, V>(simd, depth, a, a_row, a_step, b, stride, acc);
        for (r, acc) in acc.iter().enumerate() {
            for (v, x) in acc.iter().enumerate() {
                simd.store(c.add(r * stride + v * S::LANES), *x);
            }
        }
    }
}
