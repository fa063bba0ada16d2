//! The keys or the values of a layer, in memory that exists a little before it is needed.

use super::elements::Elements;
use super::kv_dtype::KvDtype;
use ringspan::kernel::Data;
use std::ops::Range;

/// Numbers whose memory is made to exist at once: two megabytes in f32.
const PIECE: usize = 1 << 19;

/// Numbers that are zeros until they are written.
///
/// The operating system provides the memory of zeros when it is first written, two megabytes at a time where it can, which takes
/// milliseconds on virtual machines. All layers reach their next two megabytes in the same step, which took several times as
/// long as the steps before it. So the memory behind what is written is made to exist step by step.
#[derive(Debug)]
pub(super) struct CacheMemory {
    elements: Elements,
    /// For each [`PIECE`], whether its memory exists: some of it has been written, or zeros in each page of memory.
    exist: Vec<bool>,
    /// The pieces that are written next: those behind pieces in which something was written.
    next: Vec<usize>,
    /// Numbers written since a budget last counted them.
    written: usize,
}

impl CacheMemory {
    pub(super) fn zeros(dtype: KvDtype, len: usize) -> Self {
        Self {
            elements: Elements::zeros(dtype, len),
            exist: vec![false; len.div_ceil(PIECE)],
            next: vec![0],
            written: 0,
        }
    }

    pub(super) fn data(&self) -> Data<'_> {
        self.elements.data()
    }

    /// Does [`Elements::write`].
    pub(super) fn write(&mut self, at: usize, from: Data) {
        self.mark_written(at..at + from.len());
        self.elements.write(at, from);
    }

    /// Does [`Elements::copy_within`].
    pub(super) fn copy_within(&mut self, from: Range<usize>, to: usize) {
        self.mark_written(to..to + from.len());
        self.elements.copy_within(from, to);
    }

    fn mark_written(&mut self, numbers: Range<usize>) {
        self.written += numbers.len();
        for piece in numbers.start / PIECE..numbers.end.div_ceil(PIECE) {
            self.exist[piece] = true;
            if self.exist.get(piece + 1) == Some(&false) && !self.next.contains(&(piece + 1)) {
                self.next.push(piece + 1);
            }
        }
    }

    /// Makes the memory of a piece exist that is probably written next. Returns whether there was one.
    pub(super) fn prefault_piece(&mut self) -> bool {
        while let Some(piece) = self.next.pop() {
            if self.exist.get(piece) == Some(&false) {
                let end = self.data().len().min((piece + 1) * PIECE);
                self.elements.prefault(piece * PIECE..end);
                self.exist[piece] = true;
                return true;
            }
        }
        false
    }
}

/// How much memory may be made to exist by now. It follows what is written: after a prompt, the next piece of every layer is missing, but is
/// written only thousands of tokens later, so these pieces come into being one by one while tokens are generated.
#[derive(Debug, Default)]
pub(super) struct PrefaultBudget {
    numbers: usize,
}

impl PrefaultBudget {
    /// Makes as many pieces exist as are due after what was written since the last call: half as much again, so that memory exists before
    /// it is needed. If fewer pieces are missing, the rest of the budget is lost.
    pub(super) fn spend(&mut self, memories: &mut [&mut CacheMemory]) {
        let written: usize = memories.iter_mut().map(|memory| std::mem::take(&mut memory.written)).sum();
        self.numbers += written + written / 2;
        for memory in memories {
            while self.numbers >= PIECE && memory.prefault_piece() {
                self.numbers -= PIECE;
            }
        }
        self.numbers = self.numbers.min(PIECE - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens are written one by one to several layers at once, as they are generated.
    #[test]
    fn memory_comes_into_being_before_it_is_written_and_spread_over_the_steps() {
        let (layers, width, pieces) = (6, 4096, 4);
        let mut memories: Vec<_> = (0..layers).map(|_| CacheMemory::zeros(KvDtype::Bf16, pieces * PIECE)).collect();
        let mut budget = PrefaultBudget::default();
        let existing = |memories: &[CacheMemory]| -> usize {
            memories.iter().map(|memory| memory.exist.iter().filter(|exist| **exist).count()).sum()
        };
        memories.iter_mut().for_each(|memory| assert!(memory.prefault_piece()));
        let (row, mut last): (_, Option<usize>) = (vec![1.0; width], None);
        for token in 0..pieces * PIECE / width {
            let before = existing(&memories);
            for memory in &mut memories {
                assert!(memory.exist[token * width / PIECE], "token {token} waits for memory");
                memory.write(token * width, Data::F32(&row));
            }
            budget.spend(&mut memories.iter_mut().collect::<Vec<_>>());
            match existing(&memories) - before {
                0 => continue,
                // A piece is what 128 tokens write to one of six layers, so one is due after 14 tokens.
                1 => assert!(last.is_none_or(|last| token - last >= 14), "pieces at tokens {last:?} and {token}"),
                new => panic!("token {token} makes {new} pieces exist"),
            }
            last = Some(token);
        }
        assert_eq!(existing(&memories), layers * pieces);
    }

    const WIDTH: usize = 96;

    #[test]
    fn the_piece_behind_what_is_written_exists_and_no_number_changes() {
        for dtype in [KvDtype::F32, KvDtype::Bf16, KvDtype::Q8_0] {
            let rows = 5 * PIECE / WIDTH + 10;
            let mut memory = CacheMemory::zeros(dtype, rows * WIDTH);
            assert!(memory.prefault_piece() && !memory.prefault_piece(), "{dtype:?}: the first piece is enough");
            let numbers: Vec<f32> = (0..WIDTH).map(|i| i as f32 - 20.0).collect();
            // A row crosses from the first piece to the second, others are far behind, and the last piece is not whole.
            let written = [0, PIECE / WIDTH, 3 * PIECE / WIDTH + 7, 2 * PIECE / WIDTH - 5, rows - 1];
            let exist = [
                [true, true, false, false, false, false],
                [true, true, true, false, false, false],
                [true, true, true, true, true, false],
                [true, true, true, true, true, false],
                [true, true, true, true, true, true],
            ];
            for (row, exist) in written.into_iter().zip(exist) {
                memory.write(row * WIDTH, Data::F32(&numbers));
                while memory.prefault_piece() {}
                assert_eq!(memory.exist, exist, "{dtype:?}, row {row}");
            }
            memory.copy_within(0..WIDTH, 2 * WIDTH);
            for (row, got) in memory.data().to_f32().chunks(WIDTH).enumerate() {
                let is_written = written.contains(&row) || row == 2;
                for (got, wanted) in got.iter().zip(&numbers) {
                    let wanted = if is_written { *wanted } else { 0.0 };
                    assert!((got - wanted).abs() < 0.5, "{dtype:?}, row {row}: {got}, not {wanted}");
                }
            }
        }
    }

    #[test]
    fn copies_are_written_too() {
        let mut memory = CacheMemory::zeros(KvDtype::F32, 4 * PIECE);
        memory.write(0, Data::F32(&[1.0; WIDTH]));
        memory.copy_within(0..WIDTH, 2 * PIECE);
        assert_eq!(memory.exist, [true, false, true, false]);
        while memory.prefault_piece() {}
        assert_eq!(memory.exist, [true; 4]);
        assert_eq!(memory.data().to_f32()[2 * PIECE..][..WIDTH], [1.0; WIDTH]);
    }
}
