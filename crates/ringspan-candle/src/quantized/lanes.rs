//! Vectors of 32 bytes and of 16 numbers, for the instruction sets of this machine.
//!
//! The compiler does not vectorise loops that widen bytes to f32 in such blocks, so decoders are written with these
//! operations. All instruction sets give the same bits, except in sums of products.

/// Implements [`Lanes::Codes`] as numbers in their order.
macro_rules! codes_are_numbers {
    () => {
        type Codes = [Self::F; 2];

        #[inline(always)]
        fn codes(self, bytes: Self::B) -> [Self::F; 2] {
            self.widen(bytes)
        }

        #[inline(always)]
        fn numbers(self, codes: [Self::F; 2]) -> [Self::F; 2] {
            codes
        }

        #[inline(always)]
        fn arrange(self, _: &mut [f32; 32]) {}

        #[inline(always)]
        fn add_scaled<const T: usize>(
            self,
            sums: &mut [Self::F; T],
            scale: f32,
            [first, second]: [Self::F; 2],
            x: &[[f32; 32]; T],
        ) {
            // The scale is multiplied with the sum, which takes fewer operations than multiplying it with each code of one x.
            for (sum, x) in sums.iter_mut().zip(x) {
                let x = x.as_chunks().0;
                let products = self.mul_add(second, self.load(&x[1]), self.mul(first, self.load(&x[0])));
                *sum = self.mul_add(self.splat(scale), products, *sum);
            }
        }

        #[inline(always)]
        fn add_scaled_halves<const T: usize>(
            self,
            sums: &mut [Self::F; T],
            scales: [f32; 2],
            [first, second]: [Self::F; 2],
            x: &[[f32; 32]; T],
        ) {
            let (first, second) = (self.mul(self.splat(scales[0]), first), self.mul(self.splat(scales[1]), second));
            for (sum, x) in sums.iter_mut().zip(x) {
                let x = x.as_chunks().0;
                let products = self.mul_add(second, self.load(&x[1]), self.mul(first, self.load(&x[0])));
                *sum = self.add(*sum, products);
            }
        }
    };
}

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use portable::Portable;

/// The operations of an instruction set that the machine has. They are inlined into the function that [`dispatch`] calls.
pub(super) trait Lanes: Copy {
    /// A vector of 16 numbers.
    type F: Copy;
    /// A vector of 32 bytes.
    type B: Copy;
    /// 32 small integers, in the form in which they are multiplied.
    type Codes: Copy;
    /// How many vectors of 16 numbers the registers hold.
    const REGISTERS: usize;
    /// The largest number of tokens with which it is faster to multiply the codes of a weight as they are unpacked, in registers, than to
    /// decode them into the L1 cache first. Products with more are not compiled.
    const TOKENS_IN_REGISTERS: usize;

    fn bytes(self, bytes: &[u8; 32]) -> Self::B;
    fn store_bytes(self, bytes: Self::B, to: &mut [u8; 32]);
    fn splat_bytes(self, byte: u8) -> Self::B;
    fn and(self, a: Self::B, b: Self::B) -> Self::B;
    fn or(self, a: Self::B, b: Self::B) -> Self::B;
    /// Subtracts modulo 256.
    fn sub_bytes(self, a: Self::B, b: Self::B) -> Self::B;
    /// Shifts each byte to the right; bits that leave it are lost.
    fn shift_right(self, a: Self::B, bits: u32) -> Self::B;
    /// Shifts each byte to the left; no set bit may leave its byte.
    fn shift_left(self, a: Self::B, bits: u32) -> Self::B;
    /// Selects entries of a table by bytes below 16.
    fn choose(self, table: &[i8; 16], codes: Self::B) -> Self::B;
    /// The low four bits of each of 16 bytes, then the high four bits of each.
    fn nibbles(self, bytes: &[u8; 16]) -> Self::B;
    /// Turns each of 32 bits into a byte, all ones if the bit is not set, beginning with the lowest bit of the first byte.
    fn spread_unset(self, bits: [u8; 4]) -> Self::B;

    /// Converts signed bytes to numbers.
    fn widen(self, codes: Self::B) -> [Self::F; 2];
    /// Converts 16 signed bytes to numbers.
    fn widen_16(self, codes: &[i8; 16]) -> Self::F;
    /// Converts half-precision numbers.
    fn widen_half(self, numbers: [[u8; 2]; 16]) -> Self::F;
    /// Converts bfloat16 numbers.
    fn widen_bf16(self, numbers: [[u8; 2]; 16]) -> Self::F;
    fn load(self, from: &[f32; 16]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; 16]);
    fn splat(self, x: f32) -> Self::F;
    /// Converts one half-precision number and repeats it 16 times.
    fn splat_half(self, x: [u8; 2]) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// Computes `a * b + c`, rounded once where the machine can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The sum of the 16 numbers of each of four vectors, which together takes less than four times as long as one.
    fn sums(self, x: [Self::F; 4]) -> [f32; 4];
    /// [`sums`](Self::sums) for each of at most four tokens, with the same bits.
    #[inline(always)]
    fn sums_of_tokens<const T: usize>(self, x: [[Self::F; 4]; T]) -> [[f32; 4]; T] {
        let mut sums = [[0.0; 4]; T];
        for t in 0..T {
            sums[t] = self.sums(x[t]);
        }
        sums
    }

    /// Signed bytes as codes.
    fn codes(self, bytes: Self::B) -> Self::Codes;
    /// Converts codes to numbers, in their order.
    fn numbers(self, codes: Self::Codes) -> [Self::F; 2];
    /// Brings the factors of 32 codes into the order and the size that [`add_scaled`](Self::add_scaled) needs.
    fn arrange(self, x: &mut [f32; 32]);
    /// Adds the products of codes and the arranged factors of each x, times a scale, to a vector for each x, whose 16 numbers together
    /// are the sum. It does not depend on the number of x.
    fn add_scaled<const T: usize>(self, sums: &mut [Self::F; T], scale: f32, codes: Self::Codes, x: &[[f32; 32]; T]);
    /// The same where the first and the last 16 codes have a scale each.
    fn add_scaled_halves<const T: usize>(
        self,
        sums: &mut [Self::F; T],
        scales: [f32; 2],
        codes: Self::Codes,
        x: &[[f32; 32]; T],
    );
    /// Subtracts from the vector of each x the products of at most eight minima and the sums of the factors that they apply to; behind
    /// both are zeros.
    #[inline(always)]
    fn subtract_minima<const T: usize>(
        self,
        sums: &mut [Self::F; T],
        minima: &[f32; 16],
        sums_of_factors: &[[f32; 16]; T],
    ) {
        let negative = self.sub(self.splat(0.0), self.load(minima));
        for (sum, factors) in sums.iter_mut().zip(sums_of_factors) {
            *sum = self.mul_add(negative, self.load(factors), *sum);
        }
    }

    /// Adds the products of each x with each row to a vector whose 16 numbers together are the sum. All have equally many vectors.
    #[inline(always)]
    fn add_products<const T: usize, const R: usize>(
        self,
        x: [&[[f32; 16]]; T],
        rows: [&[[f32; 16]]; R],
        sums: &mut [[Self::F; R]; T],
    ) {
        // Loops over indices, which the compiler unrolls so that the sums stay in registers; it did not with iterators.
        let mut tile = *sums;
        for i in 0..rows[0].len() {
            let mut factors = [self.splat(0.0); R];
            for r in 0..R {
                factors[r] = self.load(&rows[r][i]);
            }
            for t in 0..T {
                let x = self.load(&x[t][i]);
                for r in 0..R {
                    tile[t][r] = self.mul_add(factors[r], x, tile[t][r]);
                }
            }
        }
        *sums = tile;
    }

    /// The low four bits of each byte.
    #[inline(always)]
    fn low(self, bytes: Self::B) -> Self::B {
        self.and(bytes, self.splat_bytes(15))
    }

    /// The high four bits of each byte.
    #[inline(always)]
    fn high(self, bytes: Self::B) -> Self::B {
        self.shift_right(bytes, 4)
    }

    /// Signed bytes that are stored, as codes.
    #[inline(always)]
    fn byte_codes(self, bytes: &[u8; 32]) -> Self::Codes {
        self.codes(self.bytes(bytes))
    }

    /// The low four bits of each byte as codes, and the high four bits.
    #[inline(always)]
    fn codes_of_nibbles(self, bytes: &[u8; 32]) -> [Self::Codes; 2] {
        let bytes = self.bytes(bytes);
        [self.codes(self.low(bytes)), self.codes(self.high(bytes))]
    }

    /// The entries of a table that the [`nibbles`](Self::nibbles) of bytes select, as codes.
    #[inline(always)]
    fn chosen(self, table: &[i8; 16], bytes: &[u8; 16]) -> Self::Codes {
        self.codes(self.choose(table, self.nibbles(bytes)))
    }

    /// Integers of five bits, from 0 to 31, less 16. Their low four bits are the [`nibbles`](Self::nibbles) of bytes; their fifth bits
    /// begin with the lowest bit of the first byte.
    #[inline(always)]
    fn five_bits(self, low: &[u8; 16], fifth: [u8; 4]) -> Self::B {
        // Subtracting 16 from a code without the fifth bit sets its four high bits.
        self.or(self.nibbles(low), self.and(self.spread_unset(fifth), self.splat_bytes(0xf0)))
    }

    /// The same [integers](Self::five_bits) as codes.
    #[inline(always)]
    fn five_bit_codes(self, low: &[u8; 16], fifth: [u8; 4]) -> Self::Codes {
        self.codes(self.five_bits(low, fifth))
    }
}

/// Work that is compiled for each instruction set. `run` must be inlined.
pub(super) trait VectorWork {
    type Output;
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs work with the widest vectors of this machine.
pub(super) fn dispatch<W: VectorWork>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    match pulp::Arch::new() {
        pulp::Arch::V4(lanes) => return lanes.vectorize(x86::Compiled { lanes, work }),
        pulp::Arch::V3(lanes) => return lanes.vectorize(x86::Compiled { lanes, work }),
        _ => {}
    }
    work.run(Portable)
}

/// The results of work with each instruction set of this machine, those of plain Rust first.
#[cfg(test)]
pub(super) fn on_each<W: VectorWork + Copy>(work: W) -> Vec<W::Output> {
    let mut outputs = vec![work.run(Portable)];
    #[cfg(target_arch = "x86_64")]
    {
        outputs.extend(pulp::x86::V3::try_new().map(|lanes| lanes.vectorize(x86::Compiled { lanes, work })));
        outputs.extend(pulp::x86::V4::try_new().map(|lanes| lanes.vectorize(x86::Compiled { lanes, work })));
    }
    outputs
}

/// Converts a half-precision number to f32. It avoids the processor's instruction for it, around which loops do not
/// vectorise.
#[inline(always)]
pub(super) fn f16_to_f32(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    // Nearly all scales are normal numbers, so the processor predicts this branch: the exponent is neither 0 nor 31.
    if (bits + 0x400) & 0x7800 != 0 {
        // The mantissa has 13 bits fewer than that of f32, and the exponent has a bias of 15 instead of 127. The shifted number still has
        // the sign, above copies of it.
        let moved = (i32::from(i16::from_le_bytes(bytes)) << 13) as u32 & 0x8fff_ffff;
        return f32::from_bits(moved + (112 << 23));
    }
    let (sign, size) = (bits << 16 & 0x8000_0000, bits & 0x7fff);
    let moved = size << 13;
    let size = if size < 0x400 {
        // Read as if it were normal with the smallest exponent, a subnormal number is too large by 2^-14.
        (f32::from_bits(moved + (113 << 23)) - f32::from_bits(113 << 23)).to_bits()
    } else {
        moved | 0x7f80_0000
    };
    f32::from_bits(sign | size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation, on inputs that differ in each lane.
    #[derive(Clone, Copy)]
    struct All;

    impl VectorWork for All {
        type Output = (Vec<[u8; 32]>, Vec<[f32; 16]>, [[f32; 4]; 2]);

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> Self::Output {
            let sixteen: [u8; 16] = std::array::from_fn(|i| (37 * i + 11) as u8);
            let a: [u8; 32] = std::array::from_fn(|i| (37 * i + 11) as u8);
            let b: [u8; 32] = std::array::from_fn(|i| (91 * i + 200) as u8);
            let table: [i8; 16] = std::array::from_fn(|i| (91 * i + 200) as i8);
            let fifth = [0b0001_1100, 0b1010_0111, 0b1111_0000, 0b0110_1001];
            let (in_order, a, b) = (&a, l.bytes(&a), l.bytes(&b));
            let small = l.and(a, l.splat_bytes(7));
            let bytes = [
                a,
                l.and(a, b),
                l.or(a, b),
                l.sub_bytes(a, b),
                l.shift_right(a, 3),
                l.shift_left(small, 5),
                l.choose(&table, l.low(a)),
                l.high(b),
                l.nibbles(&sixteen),
                l.spread_unset(fifth),
                l.five_bits(&sixteen, fifth),
            ];
            let bytes = bytes.map(|bytes| {
                let mut stored = [0; 32];
                l.store_bytes(bytes, &mut stored);
                stored
            });
            let x: [f32; 16] = std::array::from_fn(|i| i as f32 - 3.5);
            let pairs = |seed: u16| std::array::from_fn(|i| (i as u16 * 4099 + seed).to_le_bytes());
            let (x, y) = (l.load(&x), l.splat(3.0));
            let [low, high] = l.codes_of_nibbles(in_order);
            let (chosen, fives) = (l.chosen(&table, &sixteen), l.five_bit_codes(&sixteen, fifth));
            let mut numbers = vec![
                x,
                y,
                l.widen_16(&table),
                l.widen_half(pairs(1)),
                l.widen_half(pairs(900)),
                l.widen_bf16(pairs(1)),
                l.splat_half([0x12, 0x34]),
                l.mul(x, y),
                l.sub(x, y),
                l.add(x, y),
                l.mul_add(x, y, l.widen_16(&table)),
            ];
            numbers.extend(l.widen(a));
            let stored = l.byte_codes(in_order);
            numbers
                .extend([l.codes(b), stored, low, high, chosen, fives].into_iter().flat_map(|codes| l.numbers(codes)));
            let stored = |x| {
                let mut to = [0.0; 16];
                l.store(x, &mut to);
                to
            };
            let added = |add: &dyn Fn(&mut [L::F; 1]), sum: L::F| {
                let mut sums = [sum];
                add(&mut sums);
                sums[0]
            };
            // Sums of these products are exact in any order.
            let mut factors: [f32; 32] = std::array::from_fn(|i| i as f32 - 8.0);
            l.arrange(&mut factors);
            let factors = [factors];
            let first_eight: [f32; 16] = std::array::from_fn(|i| if i < 8 { i as f32 - 2.5 } else { 0.0 });
            let products = [
                added(&|sums| l.add_scaled(sums, 0.5, l.codes(a), &factors), x),
                added(&|sums| l.add_scaled(sums, -2.0, fives, &factors), l.sub(x, x)),
                added(&|sums| l.add_scaled_halves(sums, [0.5, 4.0], l.codes(b), &factors), y),
                added(&|sums| l.add_scaled_halves(sums, [-1.0, 0.25], chosen, &factors), l.sub(x, x)),
            ];
            let others = [added(&|sums| l.subtract_minima(sums, &first_eight, &[first_eight]), y), x, y, l.sub(x, y)];
            let sums = [l.sums(products), l.sums(others)];
            (bytes.to_vec(), numbers.into_iter().map(stored).collect(), sums)
        }
    }

    /// The sums of each of T tokens, together and one after the other.
    #[derive(Clone, Copy)]
    struct SumsOfTokens<const T: usize>;

    impl<const T: usize> VectorWork for SumsOfTokens<T> {
        type Output = [[[f32; 4]; T]; 2];

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> Self::Output {
            let mut vectors = [[l.splat(0.0); 4]; T];
            for (i, vector) in vectors.iter_mut().flatten().enumerate() {
                *vector = l.load(&std::array::from_fn(|lane| (0.37 * (16 * i + lane) as f32).sin()));
            }
            [l.sums_of_tokens(vectors), vectors.map(|vectors| l.sums(vectors))]
        }
    }

    #[test]
    fn sums_of_several_tokens_have_the_bits_of_each_alone() {
        fn check<const T: usize>() {
            for [together, alone] in on_each(SumsOfTokens::<T>) {
                assert_eq!(together, alone, "{T} tokens");
            }
        }
        check::<1>();
        check::<2>();
        check::<3>();
        check::<4>();
    }

    #[test]
    fn every_instruction_set_of_this_machine_computes_alike() {
        let bits = |numbers: &[[f32; 16]]| numbers.iter().map(|x| bytemuck::cast(*x)).collect::<Vec<[u32; 16]>>();
        let outputs = on_each(All);
        let wanted = &outputs[0];
        for got in outputs.iter().chain([&dispatch(All)]) {
            assert_eq!((&got.0, bits(&got.1), got.2), (&wanted.0, bits(&wanted.1), wanted.2));
        }
        assert_eq!(wanted.0[6][..3], [177, 200, 143], "entries 11, 0 and 5 of the table");
    }
}
