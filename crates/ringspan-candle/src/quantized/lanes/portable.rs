//! The vector operations in plain Rust.

use super::{Lanes, f16_to_f32};

/// The operations in plain Rust, for machines without the others.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// Applies a function to each pair.
#[inline(always)]
fn each<T: Copy + Default, const N: usize>(a: [T; N], b: [T; N], of: impl Fn(T, T) -> T) -> [T; N] {
    let mut out = [T::default(); N];
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = of(a, b);
    }
    out
}

impl Lanes for Portable {
    type F = [f32; 16];
    type B = [u8; 32];
    const REGISTERS: usize = 4;
    const TOKENS_IN_REGISTERS: usize = 1;
    codes_are_numbers!();

    #[inline(always)]
    fn bytes(self, bytes: &[u8; 32]) -> [u8; 32] {
        *bytes
    }

    #[inline(always)]
    fn store_bytes(self, bytes: [u8; 32], to: &mut [u8; 32]) {
        *to = bytes;
    }

    #[inline(always)]
    fn splat_bytes(self, byte: u8) -> [u8; 32] {
        [byte; 32]
    }

    #[inline(always)]
    fn and(self, a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        each(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        each(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn sub_bytes(self, a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        each(a, b, u8::wrapping_sub)
    }

    #[inline(always)]
    fn shift_right(self, a: [u8; 32], bits: u32) -> [u8; 32] {
        each(a, a, |a, _| a >> bits)
    }

    #[inline(always)]
    fn shift_left(self, a: [u8; 32], bits: u32) -> [u8; 32] {
        each(a, a, |a, _| a << bits)
    }

    #[inline(always)]
    fn choose(self, table: &[i8; 16], codes: [u8; 32]) -> [u8; 32] {
        each(codes, codes, |code, _| table[usize::from(code & 15)] as u8)
    }

    #[inline(always)]
    fn nibbles(self, bytes: &[u8; 16]) -> [u8; 32] {
        let mut out = [0; 32];
        for (i, byte) in bytes.iter().enumerate() {
            (out[i], out[16 + i]) = (byte & 15, byte >> 4);
        }
        out
    }

    #[inline(always)]
    fn spread_unset(self, bits: [u8; 4]) -> [u8; 32] {
        let bits = u32::from_le_bytes(bits);
        let mut out = [0; 32];
        for (i, out) in out.iter_mut().enumerate() {
            *out = ((bits >> i & 1) as u8).wrapping_sub(1);
        }
        out
    }

    #[inline(always)]
    fn widen(self, codes: [u8; 32]) -> [[f32; 16]; 2] {
        bytemuck::cast(codes.map(|code| f32::from(code as i8)))
    }

    #[inline(always)]
    fn widen_16(self, codes: &[i8; 16]) -> [f32; 16] {
        codes.map(f32::from)
    }

    #[inline(always)]
    fn widen_half(self, numbers: [[u8; 2]; 16]) -> [f32; 16] {
        numbers.map(f16_to_f32)
    }

    #[inline(always)]
    fn widen_bf16(self, numbers: [[u8; 2]; 16]) -> [f32; 16] {
        numbers.map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [f32; 16] {
        *from
    }

    #[inline(always)]
    fn store(self, x: [f32; 16], to: &mut [f32; 16]) {
        *to = x;
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }

    #[inline(always)]
    fn splat_half(self, x: [u8; 2]) -> [f32; 16] {
        self.splat(f16_to_f32(x))
    }

    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        each(self.mul(a, b), c, |ab, c| ab + c)
    }

    #[inline(always)]
    fn sums(self, x: [[f32; 16]; 4]) -> [f32; 4] {
        x.map(|x| x.iter().sum())
    }
}
