//! The micro kernel, the loop in which kernels spend most of their time: a small matrix product held in registers.
//!
//! If products take pairs of bf16 (`S::PAIR` is 2), an element of `a` and `b` is a pair, and `depth` counts pairs.

use super::vector::{LeftOperand, RightOperand, Simd};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;

/// `acc[i][v] += sum over t < depth of a[i * a_row + t * a_step] * b[t * b_step + v * LANES ..][..LANES]`
///
/// `R x V` sums must fit into the registers, with V + 1 registers to spare.
///
/// # Safety
/// `a` must be readable at every `i * a_row + t * a_step` with i < R, t < depth, and `b` for `V * LANES` numbers at
/// every `t * b_step`.
#[allow(clippy::too_many_arguments)] // The arguments are two operands and three strides.
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
    let (a, b) = (LeftOperand { data: a, row: a_row, step: a_step }, RightOperand { data: b, step: b_step });
    // SAFETY: the contract of the caller.
    unsafe { simd.multiply::<R, V>(depth, a, b, acc) }
}

/// Like [`multiply`] with `a_row` of 1, but lanes only add the rows `t` with `low <= t < high` (each half of a pair
/// separately): rows that a lane does not see may contain NaN.
///
/// # Safety
/// As for [`multiply`]; `low` and `high` must be readable for `V * LANES` numbers.
#[allow(clippy::too_many_arguments)] // The arguments are those of multiply, and the bounds.
#[inline(always)]
pub(super) unsafe fn multiply_masked<S: Simd, const R: usize, const V: usize>(
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
                        // The other half is masked to 0; the number in b that it multiplies is the lane's own, so nothing
                        // hidden gets in.
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

/// `c[i][..columns] += sum over t < depth of a[i * a_row + t * a_step] * b[t * width ..][..columns]` for i < rows:
/// lanes run along the columns; `columns` is `width`, a multiple of LANES.
///
/// # Safety
/// `rows` must be a multiple of R, `a` readable at every `i * a_row + t * a_step`, `b` for `depth * width` numbers, `c`
/// readable and writable for `rows * width`.
#[allow(clippy::too_many_arguments)] // The arguments are three operands, their shape and strides.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, const R: usize>(
    simd: S,
    (rows, depth, width): (usize, usize, usize),
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    c: *mut f32,
) {
    let mut left = width / S::LANES;
    let mut column = 0;
    while left > 0 {
        // Vectors are distributed evenly over stripes: a stripe of one vector would wait for its own sums.
        let vectors = left.div_ceil(left.div_ceil(S::COLUMNS));
        // SAFETY: the caller's promises, for `vectors` of the columns from `column` on.
        unsafe {
            let (b, c) = (b.add(column), c.add(column));
            match vectors {
                1 => stripe::<S, R, 1>(simd, (rows, depth, width), a, a_row, a_step, b, c),
                2 => stripe::<S, R, 2>(simd, (rows, depth, width), a, a_row, a_step, b, c),
                3 => stripe::<S, R, 3>(simd, (rows, depth, width), a, a_row, a_step, b, c),
                _ => stripe::<S, R, 4>(simd, (rows, depth, width), a, a_row, a_step, b, c),
            }
        }
        left -= vectors;
        column += vectors * S::LANES;
    }
}

/// Does [`accumulate`] for V vectors of columns.
#[allow(clippy::too_many_arguments)] // The arguments are those of accumulate.
#[inline(always)]
unsafe fn stripe<S: Simd, const R: usize, const V: usize>(
    simd: S,
    (rows, depth, width): (usize, usize, usize),
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    c: *mut f32,
) {
    for i in (0..rows).step_by(R) {
        let mut acc = [[simd.splat(0.0); V]; R];
        // SAFETY: the caller's promises; rows i..i + R exist because rows is a multiple of R.
        unsafe {
            let (a, c) = (opaque(a.add(i * a_row).cast_mut()), opaque(c.add(i * width)));
            for (r, acc) in acc.iter_mut().enumerate() {
                for (v, x) in acc.iter_mut().enumerate() {
                    *x = simd.load(c.add(r * width + v * S::LANES));
                }
            }
            acc = multiply::<S, R, V>(simd, depth, a, a_row, a_step, b, width, acc);
            for (r, acc) in acc.iter().enumerate() {
                for (v, x) in acc.iter().enumerate() {
                    simd.store(c.add(r * width + v * S::LANES), *x);
                }
            }
        }
    }
}

/// Returns the same pointer, but hides its origin from the compiler: otherwise that keeps a pointer for each row of a
/// product, more than there are registers, and updates them in memory.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block)] // Nothing is read or written through it.
fn opaque(pointer: *mut f32) -> *mut f32 {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    let mut pointer = pointer;
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: the assembly contains no instruction.
    unsafe {
        asm!("/* {0} */", inout(reg) pointer, options(pure, nomem, nostack, preserves_flags))
    };
    pointer
}
