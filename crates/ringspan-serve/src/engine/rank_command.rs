//! Commands of rank 0 to the other ranks, and their encoding as messages of 64-bit words.

use super::step::{CachePage, Outputs, PageCopy, Step, StepSequence, WindowPages};
use ringspan::comm::Buffer;
use std::path::PathBuf;

/// A command, which all ranks carry out together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankCommand {
    /// Do nothing: the engine waits for requests, and the command is a heartbeat.
    Heartbeat,
    /// Compute a step, then the logits of each block.
    Compute { step: Step, blocks: Vec<LogitBlock> },
    /// Read an adapter.
    Load { slot: u64, folder: PathBuf },
    /// Forget an adapter.
    Unload { slot: u64 },
    /// Report how many bytes were sent, and how long the rank waited.
    ReadCounters,
    /// The ranks that have parts of a page of a context-parallel rank send its first rows to rank 0; of ranks with the same part, the
    /// first. Context-parallel ranks are counted over the attention replicas.
    ReadPage { cp_rank: usize, page: CachePage, rows: usize },
    /// Rank 0 sends the ranks that have parts of a page of a context-parallel rank its first rows.
    WritePage { cp_rank: usize, page: CachePage },
    /// End.
    Shutdown,
}

/// Rows whose logits are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LogitBlock {
    pub(super) rows: usize,
    /// Whether rank 0 needs no logits, but only which token has the greatest.
    pub(super) only_most_likely: bool,
}

const HEARTBEAT: u64 = 0;
const COMPUTE: u64 = 1;
const LOAD: u64 = 2;
const UNLOAD: u64 = 3;
const READ_COUNTERS: u64 = 4;
const SHUTDOWN: u64 = 5;
const READ_PAGE: u64 = 6;
const WRITE_PAGE: u64 = 7;

impl RankCommand {
    /// The command as a message.
    pub(super) fn to_buffer(&self) -> Buffer {
        let mut words = WordWriter(Vec::new());
        match self {
            Self::Heartbeat => words.0.push(HEARTBEAT),
            Self::Compute { step, blocks } => {
                words.0.push(COMPUTE);
                words.step(step);
                words.list(blocks, |words, block| {
                    words.0.extend([block.rows as u64, u64::from(block.only_most_likely)])
                });
            }
            Self::Load { slot, folder } => {
                words.0.extend([LOAD, *slot]);
                words.list(folder.as_os_str().as_encoded_bytes(), |words, byte| words.0.push(u64::from(*byte)));
            }
            Self::Unload { slot } => words.0.extend([UNLOAD, *slot]),
            Self::ReadCounters => words.0.push(READ_COUNTERS),
            Self::ReadPage { cp_rank, page, rows } => {
                words.0.extend([READ_PAGE, *cp_rank as u64, *rows as u64]);
                words.page(*page);
            }
            Self::WritePage { cp_rank, page } => {
                words.0.extend([WRITE_PAGE, *cp_rank as u64]);
                words.page(*page);
            }
            Self::Shutdown => words.0.push(SHUTDOWN),
        }
        Buffer::U64(words.0)
    }

    /// The command in a message; `None` for a message that is none.
    pub(super) fn from_buffer(buffer: &Buffer) -> Option<Self> {
        let Buffer::U64(words) = buffer else { return None };
        let mut words = WordReader(words);
        let command = match words.next()? {
            HEARTBEAT => Self::Heartbeat,
            COMPUTE => Self::Compute { step: words.step()?, blocks: words.list(WordReader::block)? },
            LOAD => {
                let slot = words.next()?;
                let bytes = words.list(|words| u8::try_from(words.next()?).ok())?;
                Self::Load { slot, folder: String::from_utf8(bytes).ok()?.into() }
            }
            UNLOAD => Self::Unload { slot: words.next()? },
            READ_COUNTERS => Self::ReadCounters,
            READ_PAGE => {
                let (cp_rank, rows) = (words.size()?, words.size()?);
                Self::ReadPage { cp_rank, page: words.page()?, rows }
            }
            WRITE_PAGE => Self::WritePage { cp_rank: words.size()?, page: words.page()? },
            SHUTDOWN => Self::Shutdown,
            _ => return None,
        };
        words.0.is_empty().then_some(command)
    }
}

struct WordWriter(Vec<u64>);

impl WordWriter {
    fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) {
        self.0.push(items.len() as u64);
        items.iter().for_each(|item| each(self, item));
    }

    fn page(&mut self, page: CachePage) {
        let window = page.window.map_or([0, 0], |page| [1, u64::from(page)]);
        self.0.extend([u64::from(page.full), window[0], window[1]]);
    }

    fn step(&mut self, step: &Step) {
        self.list(&step.copies, |words, copy| {
            words.0.extend([copy.replica as u64, copy.rank as u64, copy.from.into(), copy.to.into(), copy.rows as u64]);
            words.list(&copy.window.map_or(Vec::new(), Vec::from), |words, page| words.0.push(u64::from(*page)));
        });
        self.list(&step.sequences, |words, sequence| {
            let outputs = match sequence.outputs {
                Outputs::None => 0,
                Outputs::Last => 1,
                Outputs::All => 2,
            };
            let adapter = [u64::from(sequence.adapter.is_some()), sequence.adapter.unwrap_or(0)];
            words.0.extend([sequence.start as u64, outputs, adapter[0], adapter[1], sequence.replica as u64]);
            words.list(&sequence.tokens, |words, token| words.0.push(u64::from(*token)));
            words.list(&sequence.pages, |words, page| words.0.push(u64::from(*page)));
            words.0.push(sequence.window.first as u64);
            words.list(&sequence.window.pages, |words, page| words.0.push(u64::from(*page)));
        });
        self.0.push(u64::from(step.shares_layers));
    }
}

struct WordReader<'a>(&'a [u64]);

impl WordReader<'_> {
    fn next(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn size(&mut self) -> Option<usize> {
        usize::try_from(self.next()?).ok()
    }

    fn number(&mut self) -> Option<u32> {
        u32::try_from(self.next()?).ok()
    }

    fn block(&mut self) -> Option<LogitBlock> {
        Some(LogitBlock { rows: self.size()?, only_most_likely: self.next()? == 1 })
    }

    fn list<T>(&mut self, each: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        (0..self.size()?).map(|_| each(self)).collect()
    }

    fn page(&mut self) -> Option<CachePage> {
        let (full, has_window, window) = (self.number()?, self.next()?, self.number()?);
        Some(CachePage { full, window: (has_window == 1).then_some(window) })
    }

    fn step(&mut self) -> Option<Step> {
        let copies = self.list(|words| {
            let (replica, rank) = (words.size()?, words.size()?);
            let (from, to, rows) = (words.number()?, words.number()?, words.size()?);
            let window = words.list(Self::number)?.try_into().ok();
            Some(PageCopy { replica, rank, from, to, window, rows })
        })?;
        let sequences = self.list(|words| {
            let start = words.size()?;
            let outputs = match words.next()? {
                0 => Outputs::None,
                1 => Outputs::Last,
                2 => Outputs::All,
                _ => return None,
            };
            let (is_adapted, slot) = (words.next()?, words.next()?);
            let adapter = (is_adapted == 1).then_some(slot);
            let replica = words.size()?;
            let (tokens, pages) = (words.list(Self::number)?, words.list(Self::number)?);
            let window = WindowPages { first: words.size()?, pages: words.list(Self::number)? };
            Some(StepSequence { start, tokens, pages, window, outputs, adapter, replica })
        })?;
        Some(Step { copies, sequences, shares_layers: self.next()? == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_arrive_as_they_were_sent() {
        let copies = [None, Some([8, 9])]
            .map(|window| PageCopy { replica: 1, rank: 2, from: 3, to: 4, window, rows: 5 })
            .to_vec();
        let window = WindowPages { first: 1, pages: vec![6] };
        let sequence = |(outputs, adapter)| StepSequence {
            start: 9,
            replica: 4,
            adapter,
            tokens: vec![1, 2, u32::MAX],
            pages: vec![7, 0],
            window: window.clone(),
            outputs,
        };
        let sequences =
            [(Outputs::None, None), (Outputs::Last, Some(3)), (Outputs::All, Some(0))].map(sequence).to_vec();
        let step = Step { copies, sequences, shares_layers: false };
        let shared = Step { shares_layers: true, ..step.clone() };
        let block = |(rows, only_most_likely)| LogitBlock { rows, only_most_likely };
        let blocks = [(64, true), (1, false)].map(block).to_vec();
        for command in [
            RankCommand::Heartbeat,
            RankCommand::Compute { step, blocks },
            RankCommand::Compute { step: shared, blocks: Vec::new() },
            RankCommand::Load { slot: 4, folder: "/tmp/größe".into() },
            RankCommand::Unload { slot: 4 },
            RankCommand::ReadCounters,
            RankCommand::ReadPage { cp_rank: 2, page: CachePage { full: 3, window: Some(5) }, rows: 4 },
            RankCommand::WritePage { cp_rank: 1, page: u32::MAX.into() },
            RankCommand::Shutdown,
        ] {
            let buffer = command.to_buffer();
            assert_eq!(RankCommand::from_buffer(&buffer), Some(command));
            let Buffer::U64(mut words) = buffer else { panic!("words") };
            words.push(1);
            assert_eq!(RankCommand::from_buffer(&Buffer::U64(words)), None, "a word too many");
        }
        assert_eq!(RankCommand::from_buffer(&Buffer::U64(vec![])), None);
        assert_eq!(RankCommand::from_buffer(&Buffer::U64(vec![COMPUTE, 1, 0])), None);
    }
}
