//! Vectors of 16 bytes and of 16 numbers, for the instruction sets of this machine.
//!
//! The compiler does not vectorise loops that widen bytes to f32 in such blocks, so decoders are written with these
//! operations. All instruction sets give the same bits, except in sums of products.

#[cfg(target_arch = "x86_64")]
mod x86;

/// The operations of an instruction set that the machine has. They are inlined into the function that [`dispatch`] calls.
pub(super) trait Lanes: Copy {
    /// A vector of 16 numbers.
    type F: Copy;
    /// A vector of 16 bytes.
    type B: Copy;
    /// How many vectors of 16 numbers the registers hold.
    const REGISTERS: usize;

    fn bytes(self, bytes: [u8; 16]) -> Self::B;
    fn store_bytes(self, bytes: Self::B) -> [u8; 16];
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
    fn choose(self, table: Self::B, codes: Self::B) -> Self::B;
    /// Turns each bit into a byte, all ones if the bit is set, beginning with the lowest bit.
    fn spread(self, bits: u16) -> Self::B;
    /// Turns each of 32 bits into a byte, all ones if the bit is not set, beginning with the lowest bit of the first byte.
    #[inline(always)]
    fn spread_unset(self, bits: [u8; 4]) -> [Self::B; 2] {
        let [a, b, c, d] = bits;
        [self.spread(!u16::from_le_bytes([a, b])), self.spread(!u16::from_le_bytes([c, d]))]
    }

    /// Converts signed bytes to numbers.
    fn widen(self, codes: Self::B) -> Self::F;
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

    /// Converts the low and the high halves of bytes to numbers, each with its own function.
    #[inline(always)]
    fn nibbles(
        self,
        bytes: Self::B,
        of_low: impl Fn(Self::B) -> Self::F,
        of_high: impl Fn(Self::B) -> Self::F,
    ) -> [Self::F; 2] {
        [of_low(self.low(bytes)), of_high(self.high(bytes))]
    }

    /// Integers of five bits, from 0 to 31, less 16. Their low four bits are the low halves of bytes, then the high halves; their fifth
    /// bits begin with the lowest bit of the first byte.
    #[inline(always)]
    fn five_bit_codes(self, low: Self::B, fifth: [u8; 4]) -> [Self::B; 2] {
        // Subtracting 16 from a code without the fifth bit sets its four high bits.
        let (less_sixteen, [first, second]) = (self.splat_bytes(0xf0), self.spread_unset(fifth));
        let first = self.or(self.low(low), self.and(first, less_sixteen));
        [first, self.or(self.high(low), self.and(second, less_sixteen))]
    }

    /// Converts the [`five_bit_codes`](Self::five_bit_codes) to numbers.
    #[inline(always)]
    fn five_bits(self, low: Self::B, fifth: [u8; 4]) -> [Self::F; 2] {
        let [first, second] = self.five_bit_codes(low, fifth);
        [self.widen(first), self.widen(second)]
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

/// The operations in plain Rust, for machines without the others.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// Applies a function to each pair.
#[inline(always)]
fn each<T: Copy + Default>(a: [T; 16], b: [T; 16], of: impl Fn(T, T) -> T) -> [T; 16] {
    let mut out = [T::default(); 16];
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = of(a, b);
    }
    out
}

impl Lanes for Portable {
    type F = [f32; 16];
    type B = [u8; 16];
    const REGISTERS: usize = 4;

    #[inline(always)]
    fn bytes(self, bytes: [u8; 16]) -> [u8; 16] {
        bytes
    }

    #[inline(always)]
    fn store_bytes(self, bytes: [u8; 16]) -> [u8; 16] {
        bytes
    }

    #[inline(always)]
    fn splat_bytes(self, byte: u8) -> [u8; 16] {
        [byte; 16]
    }

    #[inline(always)]
    fn and(self, a: [u8; 16], b: [u8; 16]) -> [u8; 16] {
        each(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: [u8; 16], b: [u8; 16]) -> [u8; 16] {
        each(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn sub_bytes(self, a: [u8; 16], b: [u8; 16]) -> [u8; 16] {
        each(a, b, u8::wrapping_sub)
    }

    #[inline(always)]
    fn shift_right(self, a: [u8; 16], bits: u32) -> [u8; 16] {
        each(a, a, |a, _| a >> bits)
    }

    #[inline(always)]
    fn shift_left(self, a: [u8; 16], bits: u32) -> [u8; 16] {
        each(a, a, |a, _| a << bits)
    }

    #[inline(always)]
    fn choose(self, table: [u8; 16], codes: [u8; 16]) -> [u8; 16] {
        each(codes, codes, |code, _| table[usize::from(code & 15)])
    }

    #[inline(always)]
    fn spread(self, bits: u16) -> [u8; 16] {
        let mut out = [0; 16];
        for (i, out) in out.iter_mut().enumerate() {
            *out = 0u8.wrapping_sub((bits >> i & 1) as u8);
        }
        out
    }

    #[inline(always)]
    fn widen(self, codes: [u8; 16]) -> [f32; 16] {
        codes.map(|code| f32::from(code as i8))
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
        type Output = (Vec<[u8; 16]>, Vec<[f32; 16]>, [f32; 4]);

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> Self::Output {
            let a: [u8; 16] = std::array::from_fn(|i| (37 * i + 11) as u8);
            let b: [u8; 16] = std::array::from_fn(|i| (91 * i + 200) as u8);
            let (a, b) = (l.bytes(a), l.bytes(b));
            let small = l.and(a, l.splat_bytes(7));
            let bytes = [
                a,
                l.and(a, b),
                l.or(a, b),
                l.sub_bytes(a, b),
                l.shift_right(a, 3),
                l.shift_left(small, 5),
                l.choose(b, l.low(a)),
                l.high(b),
                l.spread(0b1010_0111_0001_1100),
                l.spread_unset([0b0001_1100, 0b1010_0111, 0b1111_0000, 0b0110_1001])[0],
                l.spread_unset([0b0001_1100, 0b1010_0111, 0b1111_0000, 0b0110_1001])[1],
            ];
            let x: [f32; 16] = std::array::from_fn(|i| i as f32 - 3.5);
            let pairs = |seed: u16| std::array::from_fn(|i| (i as u16 * 4099 + seed).to_le_bytes());
            let (x, y) = (l.load(&x), l.splat(3.0));
            let halves = l.nibbles(a, |codes| l.mul(y, l.widen(codes)), |codes| l.sub(l.widen(codes), y));
            let fives = l.five_bits(a, [0b0001_1100, 0b1010_0111, 0b1111_0000, 0b0110_1001]);
            let numbers = [
                x,
                y,
                l.widen(a),
                l.widen_half(pairs(1)),
                l.widen_half(pairs(900)),
                l.widen_bf16(pairs(1)),
                l.splat_half([0x12, 0x34]),
                l.mul(x, y),
                l.sub(x, y),
                l.add(x, y),
                halves[0],
                halves[1],
                fives[0],
                fives[1],
                l.mul_add(x, y, l.widen(b)),
            ];
            let stored = |x| {
                let mut to = [0.0; 16];
                l.store(x, &mut to);
                to
            };
            // Bytes are compared as numbers, since there is no operation that stores them.
            let bytes = bytes.map(|b| stored(l.widen(b)).map(|x| x as i8 as u8)).to_vec();
            (bytes, numbers.map(stored).to_vec(), l.sums([x, y, l.mul(x, y), l.sub(x, y)]))
        }
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
