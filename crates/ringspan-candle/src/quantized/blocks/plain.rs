//! Formats whose blocks are one number.

use super::{ArrangedActivations, Block, DecodeParts};
use crate::quantized::input::Input;
use crate::quantized::lanes::Lanes;
use bytemuck::{Pod, Zeroable};
use ringspan::kernel::{prefetch, prefetch_at};
use std::iter::Zip;
use std::slice;

/// Number of independent sums, so that additions do not wait for each other.
const CHAINS: usize = 2;

/// Defines a format whose blocks are one number: as many as there are lanes are decoded together.
macro_rules! plain {
    ($name:ident, $widen:ident) => {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        pub(in crate::quantized) struct $name([u8; 2]);

        impl Block<1> for $name {
            const CAN_SPLIT_ROWS: bool = false;
            type Parts<'a> = PlainParts<'a, Self>;
            const PART: usize = 32;

            /// Each token has two sums, and numbers need no unpacking, so the L1 cache is faster for fewer tokens than with codes.
            fn tokens_in_registers<L: Lanes>() -> usize {
                if L::REGISTERS >= 32 { 1 } else { L::TOKENS_IN_REGISTERS.min(4) }
            }

            #[inline(always)]
            fn decode<L: Lanes>(l: L, blocks: &[Self], to: &mut [f32]) {
                debug_assert_eq!(blocks.len(), to.len());
                let ((blocks, rest), (to, rest_to)) = (blocks.as_chunks::<16>(), to.as_chunks_mut::<16>());
                for (blocks, to) in blocks.iter().zip(to) {
                    l.store(l.$widen(bytemuck::cast(*blocks)), to);
                }
                if !rest.is_empty() {
                    let mut last = [0.0; 16];
                    l.store(l.$widen(bytemuck::cast(padded(rest))), &mut last);
                    rest_to.copy_from_slice(&last[..rest.len()]);
                }
            }

            #[inline(always)]
            fn parts<'a, L: Lanes>(
                l: L,
                blocks: &'a [Self],
                following: &'a [Self],
                to: &'a mut [f32],
            ) -> PlainParts<'a, Self> {
                let (parts, rest) = blocks.as_chunks();
                let (to, to_rest) = to.split_at_mut(blocks.len() - rest.len());
                if !rest.is_empty() {
                    let (to, zeros) = to_rest.split_at_mut(rest.len());
                    Self::decode(l, rest, to);
                    zeros[..rest.len().next_multiple_of(16) - rest.len()].fill(0.0);
                }
                PlainParts { blocks: parts.iter().zip(to.as_chunks_mut().0), following: following.as_ptr().cast() }
            }

            #[inline(always)]
            fn arranged<L: Lanes>(_: L, x: Input) -> ArrangedActivations {
                ArrangedActivations::in_order(x)
            }

            #[inline(always)]
            fn add_dots<L: Lanes, const T: usize>(
                l: L,
                blocks: &[Self],
                next: &[Self],
                first: usize,
                x: &ArrangedActivations,
                sums: &mut [L::F; T],
            ) {
                debug_assert_eq!(first, 0, "rows are multiplied as a whole");
                let factors = x.factors::<32, T>();
                let (blocks, rest) = blocks.as_chunks::<16>();
                let mut chains = [[l.splat(0.0); T]; CHAINS];
                for (i, (blocks, next)) in blocks.iter().zip(next.as_chunks::<16>().0).enumerate() {
                    prefetch(next);
                    let numbers = l.$widen(bytemuck::cast(*blocks));
                    let (x, half) = (&factors[i / 2], i % 2);
                    for (sum, x) in chains[i % CHAINS].iter_mut().zip(x) {
                        *sum = l.mul_add(numbers, l.load(&x.as_chunks().0[half]), *sum);
                    }
                }
                if !rest.is_empty() {
                    let last = l.$widen(bytemuck::cast(padded(rest)));
                    let (x, half) = (&factors[blocks.len() / 2], blocks.len() % 2);
                    for (sum, x) in chains[0].iter_mut().zip(x) {
                        *sum = l.mul_add(last, l.load(&x.as_chunks().0[half]), *sum);
                    }
                }
                for (t, sum) in sums.iter_mut().enumerate() {
                    *sum = l.add(*sum, l.add(chains[0][t], chains[1][t]));
                }
            }
        }
    };
}

/// Numbers that are decoded in parts.
pub(in crate::quantized) struct PlainParts<'a, B> {
    blocks: Zip<slice::Iter<'a, [B; 32]>, slice::IterMut<'a, [f32; 32]>>,
    following: *const [B; 32],
}

impl<B: Block<1>> DecodeParts for PlainParts<'_, B> {
    #[inline(always)]
    fn decode_next<L: Lanes>(&mut self, l: L) -> bool {
        let Some((blocks, to)) = self.blocks.next() else { return false };
        B::decode(l, blocks, to);
        prefetch_at(self.following);
        self.following = self.following.wrapping_add(1);
        true
    }
}

/// Pads fewer than 16 elements with zeros.
#[inline(always)]
fn padded<T: Zeroable + Copy>(rest: &[T]) -> [T; 16] {
    let mut padded = [T::zeroed(); 16];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

plain!(F16, widen_half);
plain!(BF16, widen_bf16);
