//! The vector operations on x86-64, with AVX-512, and with AVX2 and FMA.

use super::{Lanes, VectorWork, f16_to_f32};
use bytemuck::{cast, cast_ref};
use pulp::NullaryFnOnce;
use pulp::x86::{V3, V4};
use std::arch::x86_64::{__m128, __m128i, __m256, __m256i, __m512, __m512i};

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
        type B = __m256i;

        #[inline(always)]
        fn bytes(self, bytes: &[u8; 32]) -> __m256i {
            cast(*bytes)
        }

        #[inline(always)]
        fn store_bytes(self, bytes: __m256i, to: &mut [u8; 32]) {
            *to = cast(bytes);
        }

        #[inline(always)]
        fn splat_bytes(self, byte: u8) -> __m256i {
            self.avx._mm256_set1_epi8(byte as i8)
        }

        #[inline(always)]
        fn and(self, a: __m256i, b: __m256i) -> __m256i {
            self.avx2._mm256_and_si256(a, b)
        }

        #[inline(always)]
        fn or(self, a: __m256i, b: __m256i) -> __m256i {
            self.avx2._mm256_or_si256(a, b)
        }

        #[inline(always)]
        fn sub_bytes(self, a: __m256i, b: __m256i) -> __m256i {
            self.avx2._mm256_sub_epi8(a, b)
        }

        #[inline(always)]
        fn shift_right(self, a: __m256i, bits: u32) -> __m256i {
            // The instruction shifts pairs of bytes, so bits that cross from one byte to the other are masked.
            let shifted = self.avx2._mm256_srl_epi16(a, self.sse2._mm_cvtsi32_si128(bits as i32));
            self.and(shifted, self.splat_bytes(0xff >> bits))
        }

        #[inline(always)]
        fn shift_left(self, a: __m256i, bits: u32) -> __m256i {
            self.avx2._mm256_sll_epi16(a, self.sse2._mm_cvtsi32_si128(bits as i32))
        }

        #[inline(always)]
        fn choose(self, table: &[i8; 16], codes: __m256i) -> __m256i {
            // The instruction selects within each half of a vector, so both halves hold the table.
            self.avx2._mm256_shuffle_epi8(cast([*table; 2]), codes)
        }

        #[inline(always)]
        fn nibbles(self, bytes: &[u8; 16]) -> __m256i {
            let twice = cast([*bytes; 2]);
            self.low(self.avx2._mm256_srlv_epi64(twice, cast([0u64, 0, 4, 4])))
        }

        #[inline(always)]
        fn spread_unset(self, bits: [u8; 4]) -> __m256i {
            // Each lane tests its own bit in the byte that contains it; both halves of the vector have all four bytes.
            let order = cast([[0u8; 8], [1; 8], [2; 8], [3; 8]]);
            let bytes = self.avx2._mm256_shuffle_epi8(self.avx._mm256_set1_epi32(i32::from_le_bytes(bits)), order);
            let own = self.and(bytes, cast([[1u8, 2, 4, 8, 16, 32, 64, 128]; 4]));
            self.avx2._mm256_cmpeq_epi8(own, self.avx._mm256_setzero_si256())
        }

        #[inline(always)]
        fn sums(self, x: [Self::F; 4]) -> [f32; 4] {
            let [a, b, c, d] = [self.folded(x[0]), self.folded(x[1]), self.folded(x[2]), self.folded(x[3])];
            // Sums of neighbours, then of neighbours among these: each half has a part of all four sums.
            let (ab, cd) = (self.avx._mm256_hadd_ps(a, b), self.avx._mm256_hadd_ps(c, d));
            let [low, high]: [__m128; 2] = cast(self.avx._mm256_hadd_ps(ab, cd));
            cast(self.sse._mm_add_ps(low, high))
        }
    };
}

/// The sum of the two halves of a vector of 16 numbers.
trait Folded<F> {
    fn folded(self, x: F) -> __m256;
}

impl Folded<__m512> for V4 {
    #[inline(always)]
    fn folded(self, x: __m512) -> __m256 {
        let [low, high]: [__m256; 2] = cast(x);
        self.avx._mm256_add_ps(low, high)
    }
}

impl Folded<[__m256; 2]> for V3 {
    #[inline(always)]
    fn folded(self, [low, high]: [__m256; 2]) -> __m256 {
        self.avx._mm256_add_ps(low, high)
    }
}

impl Lanes for V4 {
    type F = __m512;
    const REGISTERS: usize = 32;
    const TOKENS_IN_REGISTERS: usize = 6;
    shared!();
    codes_are_numbers!();

    #[inline(always)]
    fn widen(self, codes: __m256i) -> [__m512; 2] {
        let [low, high]: [__m128i; 2] = cast(codes);
        let (low, high) = (self.avx512f._mm512_cvtepi8_epi32(low), self.avx512f._mm512_cvtepi8_epi32(high));
        [self.avx512f._mm512_cvtepi32_ps(low), self.avx512f._mm512_cvtepi32_ps(high)]
    }

    #[inline(always)]
    fn widen_16(self, codes: &[i8; 16]) -> __m512 {
        self.avx512f._mm512_cvtepi32_ps(self.avx512f._mm512_cvtepi8_epi32(cast(*codes)))
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

    /// Adds in the same order as [`sums`](Lanes::sums), but each instruction adds for several tokens.
    #[inline(always)]
    fn sums_of_tokens<const T: usize>(self, x: [[__m512; 4]; T]) -> [[f32; 4]; T] {
        let f = self.avx512f;
        let mut all = [[self.splat(0.0); 4]; 4];
        all[..T].copy_from_slice(&x);
        let [first, second] = [sums_of_two(self, all[0], all[1]), sums_of_two(self, all[2], all[3])];
        let (low, high) =
            (f._mm512_shuffle_f32x4::<0x88>(first, second), f._mm512_shuffle_f32x4::<0xdd>(first, second));
        let sums: [[f32; 4]; 4] = cast(self.add(low, high));
        *sums.first_chunk().expect("at most four tokens")
    }

    /// Each half is converted as it is loaded.
    #[inline(always)]
    fn byte_codes(self, bytes: &[u8; 32]) -> [__m512; 2] {
        let [first, second]: &[[i8; 16]; 2] = cast_ref(bytes);
        [self.widen_16(first), self.widen_16(second)]
    }

    #[inline(always)]
    fn codes_of_nibbles(self, bytes: &[u8; 32]) -> [[__m512; 2]; 2] {
        let [first, second]: [[u8; 16]; 2] = cast(*bytes);
        let table = self.widen_16(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        let ([low, high], [low_of_second, high_of_second]) =
            (select_by_nibbles(self, table, first), select_by_nibbles(self, table, second));
        [[low, low_of_second], [high, high_of_second]]
    }

    #[inline(always)]
    fn chosen(self, table: &[i8; 16], bytes: &[u8; 16]) -> [__m512; 2] {
        select_by_nibbles(self, self.widen_16(table), *bytes)
    }

    /// The table has 16 subtracted already; it is added again where the fifth bit is set, which takes one instruction.
    #[inline(always)]
    fn five_bit_codes(self, low: &[u8; 16], [a, b, c, d]: [u8; 4]) -> [__m512; 2] {
        let sixteen = self.splat(16.0);
        let [first, second] =
            self.chosen(&[-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1], low);
        [
            self.avx512f._mm512_mask_add_ps(first, u16::from_le_bytes([a, b]), first, sixteen),
            self.avx512f._mm512_mask_add_ps(second, u16::from_le_bytes([c, d]), second, sixteen),
        ]
    }
}

/// Sums the vectors of two tokens up to the last addition: the two parts of the four sums of the first token, then those of the second.
#[inline(always)]
fn sums_of_two(l: V4, a: [__m512; 4], b: [__m512; 4]) -> __m512 {
    let f = l.avx512f;
    let mut folded = a;
    for r in 0..4 {
        let (low, high) = (f._mm512_shuffle_f32x4::<0x44>(a[r], b[r]), f._mm512_shuffle_f32x4::<0xee>(a[r], b[r]));
        folded[r] = l.add(low, high);
    }
    let [first, second] = [sums_of_neighbours(l, folded[0], folded[1]), sums_of_neighbours(l, folded[2], folded[3])];
    sums_of_neighbours(l, first, second)
}

/// In each four numbers, the sums of neighbours of a, then of b.
#[inline(always)]
fn sums_of_neighbours(l: V4, a: __m512, b: __m512) -> __m512 {
    l.add(l.avx512f._mm512_shuffle_ps::<0x88>(a, b), l.avx512f._mm512_shuffle_ps::<0xdd>(a, b))
}

/// The numbers of a table that the low nibbles of bytes select, and those that the high nibbles select. This is less work than converting
/// each code to a number.
#[inline(always)]
fn select_by_nibbles(l: V4, table: __m512, bytes: [u8; 16]) -> [__m512; 2] {
    // The selection uses only the low four bits.
    let low: __m512i = l.avx512f._mm512_cvtepu8_epi32(cast(bytes));
    let high = l.avx512f._mm512_srli_epi32::<4>(low);
    [l.avx512f._mm512_permutexvar_ps(low, table), l.avx512f._mm512_permutexvar_ps(high, table)]
}

/// Where bytes go so that each is the highest byte of an integer of 32 bits: bytes `first` to `first + 3` of each half of a vector.
const fn highest_bytes(first: u8) -> [u8; 32] {
    // The instruction clears bytes whose index has its high bit set.
    let mut order = [0x80; 32];
    let mut i = 0;
    while i < 4 {
        (order[4 * i + 3], order[16 + 4 * i + 3]) = (first + i as u8, first + i as u8);
        i += 1;
    }
    order
}

/// The factor that turns an integer whose highest byte is a code, and whose other bytes are zero, into the code: 2^-24.
const OF_HIGHEST_BYTES: f32 = 1.0 / (1 << 24) as f32;

/// Adds the products of codes and the arranged factors of each x, times the scale of each lane, to the first eight numbers of its sum,
/// so that a sum takes one register. Each half has the products of the same half of the codes.
#[inline(always)]
fn add_products_of_codes<const T: usize>(
    l: V3,
    sums: &mut [[__m256; 2]; T],
    scales: __m256,
    codes: __m256i,
    x: &[[f32; 32]; T],
) {
    // The numbers of the codes stay in four registers. It takes fewer operations to scale the sum of 32 products than to scale the numbers
    // if there are fewer than four x, and with any number of x, one operation instead of four waits for the sum so far.
    let numbers = [
        shifted_numbers(l, codes, const { highest_bytes(0) }),
        shifted_numbers(l, codes, const { highest_bytes(4) }),
        shifted_numbers(l, codes, const { highest_bytes(8) }),
        shifted_numbers(l, codes, const { highest_bytes(12) }),
    ];
    for t in 0..T {
        let products = sum_of_products(l, numbers, &x[t]);
        sums[t][0] = l.fma._mm256_fmadd_ps(scales, products, sums[t][0]);
    }
}

/// Sums the products of 32 numbers, eight in each of four vectors, and of 32 factors.
#[inline(always)]
fn sum_of_products(l: V3, numbers: [__m256; 4], x: &[f32; 32]) -> __m256 {
    let x = x.as_chunks::<8>().0;
    let mut products = l.avx._mm256_mul_ps(numbers[0], cast(x[0]));
    for i in 1..4 {
        products = l.fma._mm256_fmadd_ps(numbers[i], cast(x[i]), products);
    }
    products
}

/// Codes that become [`highest_bytes`], as numbers that are 2^24 times as large.
#[inline(always)]
fn shifted_numbers(l: V3, codes: __m256i, order: [u8; 32]) -> __m256 {
    l.avx._mm256_cvtepi32_ps(l.avx2._mm256_shuffle_epi8(codes, cast(order)))
}

#[inline(always)]
fn widen_16(l: V3, codes: __m128i) -> [__m256; 2] {
    let high = l.sse2._mm_unpackhi_epi64(codes, codes);
    // A closure for both halves would not be compiled for the instruction set wherever it is not inlined.
    let (low, high) = (l.avx2._mm256_cvtepi8_epi32(codes), l.avx2._mm256_cvtepi8_epi32(high));
    [l.avx._mm256_cvtepi32_ps(low), l.avx._mm256_cvtepi32_ps(high)]
}

impl Lanes for V3 {
    type F = [__m256; 2];
    const REGISTERS: usize = 8;
    const TOKENS_IN_REGISTERS: usize = 8;
    shared!();

    /// Bytes, from which products take four numbers of each half: that is less work than to convert the numbers in their order.
    type Codes = __m256i;

    #[inline(always)]
    fn codes(self, bytes: __m256i) -> __m256i {
        bytes
    }

    #[inline(always)]
    fn numbers(self, codes: __m256i) -> [[__m256; 2]; 2] {
        self.widen(codes)
    }

    #[inline(always)]
    fn arrange(self, x: &mut [f32; 32]) {
        let in_order = *x;
        // Each eight are four factors of the first 16 codes, then four of the last 16.
        for (i, x) in x.iter_mut().enumerate() {
            *x = in_order[i / 8 * 4 + i / 4 % 2 * 16 + i % 4] * OF_HIGHEST_BYTES;
        }
    }

    #[inline(always)]
    fn add_scaled<const T: usize>(self, sums: &mut [[__m256; 2]; T], scale: f32, codes: __m256i, x: &[[f32; 32]; T]) {
        add_products_of_codes(self, sums, self.avx._mm256_set1_ps(scale), codes, x);
    }

    #[inline(always)]
    fn add_scaled_halves<const T: usize>(
        self,
        sums: &mut [[__m256; 2]; T],
        scales: [f32; 2],
        codes: __m256i,
        x: &[[f32; 32]; T],
    ) {
        let (first, last) = (self.avx._mm256_set1_ps(scales[0]), self.avx._mm256_set1_ps(scales[1]));
        add_products_of_codes(self, sums, self.avx._mm256_blend_ps::<0xf0>(first, last), codes, x);
    }

    #[inline(always)]
    fn subtract_minima<const T: usize>(
        self,
        sums: &mut [[__m256; 2]; T],
        minima: &[f32; 16],
        sums_of_factors: &[[f32; 16]; T],
    ) {
        let minima = cast(minima.as_chunks::<8>().0[0]);
        for t in 0..T {
            let factors = cast(sums_of_factors[t].as_chunks::<8>().0[0]);
            sums[t][0] = self.fma._mm256_fnmadd_ps(minima, factors, sums[t][0]);
        }
    }

    /// Adds to the first eight numbers of a sum only, so that each sum takes one register: 12 sums of three x and four rows, the three x
    /// and one row fill the 16 registers.
    #[inline(always)]
    fn add_products<const T: usize, const R: usize>(
        self,
        x: [&[[f32; 16]]; T],
        rows: [&[[f32; 16]]; R],
        sums: &mut [[[__m256; 2]; R]; T],
    ) {
        let mut tile = [[self.avx._mm256_setzero_ps(); R]; T];
        for t in 0..T {
            for r in 0..R {
                tile[t][r] = sums[t][r][0];
            }
        }
        for i in 0..rows[0].len() {
            for half in 0..2 {
                let mut factors = [self.avx._mm256_setzero_ps(); T];
                for t in 0..T {
                    factors[t] = cast(x[t][i].as_chunks::<8>().0[half]);
                }
                for r in 0..R {
                    let row = cast(rows[r][i].as_chunks::<8>().0[half]);
                    for t in 0..T {
                        tile[t][r] = self.fma._mm256_fmadd_ps(row, factors[t], tile[t][r]);
                    }
                }
            }
        }
        for t in 0..T {
            for r in 0..R {
                sums[t][r][0] = tile[t][r];
            }
        }
    }

    #[inline(always)]
    fn widen(self, codes: __m256i) -> [[__m256; 2]; 2] {
        let [first, last]: [__m128i; 2] = cast(codes);
        [widen_16(self, first), widen_16(self, last)]
    }

    #[inline(always)]
    fn widen_16(self, codes: &[i8; 16]) -> [__m256; 2] {
        widen_16(self, cast(*codes))
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
