//! Conversion of slices between f32 and bf16, on the threads of the current pool.

use crate::pool;
use half::bf16;

/// Copies values on the threads of the current pool.
pub(crate) fn copy(values: &[f32], out: &mut [f32]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [f32], &[f32])| {
        out.copy_from_slice(values);
    });
}

/// Returns the values rounded to the nearest bf16, computed on the threads of the current pool.
pub(crate) fn rounded(values: &[f32]) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; values.len()];
    round(values, &mut out);
    out
}

/// Rounds values to the nearest bf16, ties to even, on the threads of the current pool.
pub(crate) fn round(values: &[f32], out: &mut [bf16]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [bf16], &[f32])| {
        pool::vectorized(
            #[inline(always)]
            || out.iter_mut().zip(values).for_each(|(out, x)| *out = round_to_bf16(*x)),
        );
    });
}

/// Returns the values in f32, computed on the threads of the current pool.
pub(crate) fn widened(values: &[bf16]) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    widen(values, &mut out);
    out
}

/// Converts values to f32 on the threads of the current pool.
pub(crate) fn widen(values: &[bf16], out: &mut [f32]) {
    let part = pool::part(values.len(), 1);
    pool::map(out.chunks_mut(part).zip(values.chunks(part)).collect(), |(out, values): (&mut [f32], &[bf16])| {
        pool::vectorized(
            #[inline(always)]
            || {
                out.iter_mut().zip(values).for_each(|(out, x)| *out = widened_one(*x));
            },
        );
    });
}

/// The nearest bf16, ties to even; a NaN stays a NaN. It is integer arithmetic without branches, so that loops over it
/// vectorise.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { nan as u16 } else { up as u16 })
}

/// The number in f32: a shift of its bits, so that loops over it vectorise.
#[inline(always)]
fn widened_one(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_and_keeps_nan() {
        let mut bits = 1u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            let (got, wanted) = (round_to_bf16(x), bf16::from_f32(x));
            assert!(got == wanted || got.is_nan() && wanted.is_nan(), "{x} ({bits:x}) became {got}, not {wanted}");
        }
        for x in [0.0, -0.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE] {
            assert_eq!(round_to_bf16(x).to_bits() & 0x7fbf, bf16::from_f32(x).to_bits() & 0x7fbf, "{x}");
        }
    }
}
