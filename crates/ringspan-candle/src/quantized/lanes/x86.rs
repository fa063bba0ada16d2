//! The vector operations on x86-64, with AVX-512, and with AVX2 and FMA.

use super::{Lanes, VectorWork, f16_to_f32};
use bytemuck::cast;
use pulp::NullaryFnOnce;
use pulp::x86::{V3, V4};
use std::arch::x86_64::{__m128, __m128i, __m256, __m512};

/// Work together with the token that proves that the machine has the instructions.
pub(super) struct Compiled<L, W> {
    pub(super) lanes: L,
    pub(super) work: W,
}

impl<L: Lanes, W: VectorWork> NullaryFnOnce for Compiled<L, W> {
    type Output = W::Output;

    #[inline(always)]
    fn call(self) -> W::Output {
        self.work.run(self.lanes)
    }
}

/// Operations on bytes and sums, which are the same for both instruction sets.
macro_rules! shared {
    () => {
        type B = __m128i;

        #[inline(always)]
        fn bytes(self, bytes: [u8; 16]) -> __m128i {
            cast(bytes)
        }

        #[inline(always)]
        fn store_bytes(self, bytes: __m128i) -> [u8; 16] {
            cast(bytes)
        }

        #[inline(always)]
        fn splat_bytes(self, byte: u8) -> __m128i {
            self.sse2._mm_set1_epi8(byte as i8)
        }

        #[inline(always)]
        fn and(self, a: __m128i, b: __m128i) -> __m128i {
            self.sse2._mm_and_si128(a, b)
        }

        #[inline(always)]
        fn or(self, a: __m128i, b: __m128i) -> __m128i {
            self.sse2._mm_or_si128(a, b)
        }

        #[inline(always)]
        fn sub_bytes(self, a: __m128i, b: __m128i) -> __m128i {
            self.sse2._mm_sub_epi8(a, b)
        }

        #[inline(always)]
        fn shift_right(self, a: __m128i, bits: u32) -> __m128i {
            // The instruction shifts pairs of bytes, so bits that cross from one byte to the other are masked.
            let shifted = self.sse2._mm_srl_epi16(a, self.sse2._mm_cvtsi32_si128(bits as i32));
            self.and(shifted, self.splat_bytes(0xff >> bits))
        }

        #[inline(always)]
        fn shift_left(self, a: __m128i, bits: u32) -> __m128i {
            self.sse2._mm_sll_epi16(a, self.sse2._mm_cvtsi32_si128(bits as i32))
        }

        #[inline(always)]
        fn choose(self, table: __m128i, codes: __m128i) -> __m128i {
            self.ssse3._mm_shuffle_epi8(table, codes)
        }

        #[inline(always)]
        fn spread(self, bits: u16) -> __m128i {
            // Each lane tests its own bit in the byte that contains it.
            let bytes = self.choose(self.sse2._mm_set1_epi16(bits as i16), cast([[0u8; 8], [1u8; 8]]));
            let own: __m128i = cast([[1u8, 2, 4, 8, 16, 32, 64, 128]; 2]);
            self.sse2._mm_cmpeq_epi8(self.and(bytes, own), own)
        }

        #[inline(always)]
        fn sums(self, x: [Self::F; 4]) -> [f32; 4] {
            let [a, b, c, d] = [self.halves(x[0]), self.halves(x[1]), self.halves(x[2]), self.halves(x[3])];
            // Sums of neighbours, then of neighbours among these: each half has a part of all four sums.
            let (ab, cd) = (self.avx._mm256_hadd_ps(a, b), self.avx._mm256_hadd_ps(c, d));
            let [low, high]: [__m128; 2] = cast(self.avx._mm256_hadd_ps(ab, cd));
            cast(self.sse._mm_add_ps(low, high))
        }
    };
}

/// The sum of the two halves of a vector of 16 numbers.
trait Halves<F> {
    fn halves(self, x: F) -> __m256;
}

impl Halves<__m512> for V4 {
    #[inline(always)]
    fn halves(self, x: __m512) -> __m256 {
        let [low, high]: [__m256; 2] = cast(x);
        self.avx._mm256_add_ps(low, high)
    }
}

impl Halves<[__m256; 2]> for V3 {
    #[inline(always)]
    fn halves(self, [low, high]: [__m256; 2]) -> __m256 {
        self.avx._mm256_add_ps(low, high)
    }
}

impl Lanes for V4 {
    type F = __m512;
    const REGISTERS: usize = 32;
    shared!();

    #[inline(always)]
    fn widen(self, codes: __m128i) -> __m512 {
        self.avx512f._mm512_cvtepi32_ps(self.avx512f._mm512_cvtepi8_epi32(codes))
    }

    #[inline(always)]
    fn widen_half(self, numbers: [[u8; 2]; 16]) -> __m512 {
        self.avx512f._mm512_cvtph_ps(cast(numbers))
    }

    #[inline(always)]
    fn widen_bf16(self, numbers: [[u8; 2]; 16]) -> __m512 {
        let wide = self.avx512f._mm512_cvtepu16_epi32(cast(numbers));
        cast(self.avx512f._mm512_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> __m512 {
        cast(*from)
    }

    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; 16]) {
        *to = cast(x);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        self.avx512f._mm512_set1_ps(x)
    }

    #[inline(always)]
    fn splat_half(self, x: [u8; 2]) -> __m512 {
        self.widen_half([x; 16])
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        self.avx512f._mm512_mul_ps(a, b)
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        self.avx512f._mm512_add_ps(a, b)
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        self.avx512f._mm512_sub_ps(a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        self.avx512f._mm512_fmadd_ps(a, b, c)
    }

    /// The numbers of all 16 possible codes fill one vector, from which codes select: that is less work than converting each
    /// code.
    #[inline(always)]
    fn nibbles(
        self,
        bytes: __m128i,
        of_low: impl Fn(__m128i) -> __m512,
        of_high: impl Fn(__m128i) -> __m512,
    ) -> [__m512; 2] {
        let codes = cast([0u8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        // The selection uses only the low four bits.
        let low = self.avx512f._mm512_cvtepu8_epi32(bytes);
        let high = self.avx512f._mm512_srli_epi32::<4>(low);
        [
            self.avx512f._mm512_permutexvar_ps(low, of_low(codes)),
            self.avx512f._mm512_permutexvar_ps(high, of_high(codes)),
        ]
    }

    /// The table has 16 subtracted already; it is added again where the fifth bit is set, which takes one instruction.
    #[inline(always)]
    fn five_bits(self, low: __m128i, [a, b, c, d]: [u8; 4]) -> [__m512; 2] {
        let sixteen = self.splat(16.0);
        let without = |codes| self.sub(self.widen(codes), sixteen);
        let [first, second] = self.nibbles(low, without, without);
        [
            self.avx512f._mm512_mask_add_ps(first, u16::from_le_bytes([a, b]), first, sixteen),
            self.avx512f._mm512_mask_add_ps(second, u16::from_le_bytes([c, d]), second, sixteen),
        ]
    }
}

impl Lanes for V3 {
    type F = [__m256; 2];
    const REGISTERS: usize = 8;
    shared!();

    #[inline(always)]
    fn spread_unset(self, bits: [u8; 4]) -> [__m128i; 2] {
        // Each lane tests its own bit in the byte that contains it; both halves of the vector have all four bytes.
        let order = cast([[0u8; 8], [1; 8], [2; 8], [3; 8]]);
        let bytes = self.avx2._mm256_shuffle_epi8(self.avx._mm256_set1_epi32(i32::from_le_bytes(bits)), order);
        let own = self.avx2._mm256_and_si256(bytes, cast([[1u8, 2, 4, 8, 16, 32, 64, 128]; 4]));
        cast(self.avx2._mm256_cmpeq_epi8(own, self.avx._mm256_setzero_si256()))
    }

    #[inline(always)]
    fn widen(self, codes: __m128i) -> [__m256; 2] {
        // Not by a closure, which would not be compiled for the instruction set wherever it is not inlined.
        let high = self.sse2._mm_unpackhi_epi64(codes, codes);
        let (low, high) = (self.avx2._mm256_cvtepi8_epi32(codes), self.avx2._mm256_cvtepi8_epi32(high));
        [self.avx._mm256_cvtepi32_ps(low), self.avx._mm256_cvtepi32_ps(high)]
    }

    #[inline(always)]
    fn widen_half(self, numbers: [[u8; 2]; 16]) -> [__m256; 2] {
        let mut wide = [0.0; 16];
        for (wide, number) in wide.iter_mut().zip(numbers) {
            *wide = f16_to_f32(number);
        }
        cast(wide)
    }

    #[inline(always)]
    fn widen_bf16(self, numbers: [[u8; 2]; 16]) -> [__m256; 2] {
        let [low, high]: [__m128i; 2] = cast(numbers);
        let (low, high) = (self.avx2._mm256_cvtepu16_epi32(low), self.avx2._mm256_cvtepu16_epi32(high));
        [cast(self.avx2._mm256_slli_epi32::<16>(low)), cast(self.avx2._mm256_slli_epi32::<16>(high))]
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [__m256; 2] {
        cast(*from)
    }

    #[inline(always)]
    fn store(self, x: [__m256; 2], to: &mut [f32; 16]) {
        *to = cast(x);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        [self.avx._mm256_set1_ps(x); 2]
    }

    #[inline(always)]
    fn splat_half(self, x: [u8; 2]) -> [__m256; 2] {
        self.splat(f16_to_f32(x))
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        [self.avx._mm256_mul_ps(a[0], b[0]), self.avx._mm256_mul_ps(a[1], b[1])]
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        [self.avx._mm256_add_ps(a[0], b[0]), self.avx._mm256_add_ps(a[1], b[1])]
    }

    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        [self.avx._mm256_sub_ps(a[0], b[0]), self.avx._mm256_sub_ps(a[1], b[1])]
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        [self.fma._mm256_fmadd_ps(a[0], b[0], c[0]), self.fma._mm256_fmadd_ps(a[1], b[1], c[1])]
    }
}
