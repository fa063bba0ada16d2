//! A rank of the engine: it carries out the commands of rank 0.

use super::executor::{Executor, KvRowLayout};
use super::rank_command::{LogitBlock, RankCommand};
use super::row_parts::RowPart;
use super::step::CachePage;
use crate::error::{Error, Result};
use crate::groups::Groups;
use candle_core::{DType, Tensor};
use ringspan::comm::{Buffer, timed::TimedCommunicator};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank, with what computes on it.
pub(super) struct EngineRank<'a> {
    pub(super) groups: &'a Groups,
    timed: &'a TimedCommunicator,
    pub(super) executor: Box<dyn Executor + 'a>,
    /// When rank 0 last gave a command.
    commanded: Instant,
}

/// The tag of messages with pages.
const PAGES: u64 = (1 << 60) + 1;

/// The result of a command.
pub(super) enum Outcome {
    Done,
    /// The hidden states that the step outputs, on rank 0, if there are any.
    Computed(Option<Tensor>),
    /// An adapter was read, or the sentence of the first rank that could not.
    Loaded(Result<(), String>),
    /// For each rank, bytes sent and nanoseconds waited.
    Counted(Vec<[u64; 2]>),
}

impl<'a> EngineRank<'a> {
    pub(super) fn new(groups: &'a Groups, timed: &'a TimedCommunicator, executor: Box<dyn Executor + 'a>) -> Self {
        Self { groups, timed, executor, commanded: Instant::now() }
    }

    /// Time since the last command.
    pub(super) fn since_command(&self) -> Duration {
        self.commanded.elapsed()
    }

    /// The first rows `[rows, W]` of a page of any context-parallel rank, put together from the ranks that share heads and layers; rank 0
    /// calls this.
    pub(super) fn read_page(
        &mut self,
        format: &KvRowLayout,
        cp_rank: usize,
        page: CachePage,
        rows: usize,
    ) -> Result<Buffer> {
        self.command(&RankCommand::ReadPage { cp_rank, page, rows })?;
        let mut whole = match format.dtype {
            DType::BF16 => Buffer::U16(vec![0; rows * format.width]),
            _ => Buffer::F32(vec![0.0; rows * format.width]),
        };
        for (rank, part) in self.holders(format, cp_rank) {
            let own = match rank {
                0 => Arc::new(self.executor.read_page(page, rows)?),
                _ => {
                    let sent = self.groups.world().receive(rank, PAGES)?.wait()?;
                    sent.ok_or_else(|| self.unexpected("a page"))?
                }
            };
            part.paste(&own, &mut whole, format.width).ok_or_else(|| self.unexpected("rows of a page"))?;
        }
        Ok(whole)
    }

    /// Overwrites the first rows of a page of any context-parallel rank with rows `[rows, W]`; rank 0 calls this.
    pub(super) fn write_page(
        &mut self,
        format: &KvRowLayout,
        cp_rank: usize,
        page: CachePage,
        rows: &Buffer,
    ) -> Result<()> {
        self.command(&RankCommand::WritePage { cp_rank, page })?;
        let mut sends = Vec::new();
        for (rank, part) in self.groups.sharing_pages(cp_rank).zip(&format.parts) {
            let own = part.cut(rows, format.width).ok_or_else(|| self.unexpected("rows of a page"))?;
            match rank {
                0 => self.executor.write_page(page, &own)?,
                _ => sends.push(self.groups.world().send(rank, PAGES, Arc::new(own))?),
            }
        }
        sends.into_iter().try_for_each(|send| send.wait().map(|_| ()))?;
        Ok(())
    }

    /// The ranks whose parts make up the pages of a context-parallel rank: of ranks with the same part, the first.
    fn holders<'f>(&self, format: &'f KvRowLayout, cp_rank: usize) -> Vec<(usize, &'f RowPart)> {
        let all = self.groups.sharing_pages(cp_rank).zip(&format.parts).enumerate();
        let is_first = |(at, (_, part)): &(usize, (usize, &RowPart))| !format.parts[..*at].contains(part);
        all.filter(is_first).map(|(_, holder)| holder).collect()
    }

    /// Carries out commands until the one to end.
    pub(super) fn follow(&mut self) -> Result<()> {
        loop {
            let message = self.groups.broadcast(None)?;
            let command = RankCommand::from_buffer(&message).ok_or_else(|| self.unexpected("a command"))?;
            if command == RankCommand::Shutdown {
                return Ok(());
            }
            self.carry_out(&command)?;
            if let RankCommand::Compute { blocks, .. } = command {
                for LogitBlock { rows, only_most_likely } in blocks {
                    if only_most_likely {
                        self.executor.most_likely(rows, None)?;
                    } else {
                        self.executor.logits(rows, None)?;
                    }
                }
            }
        }
    }

    /// Sends a command to all ranks, and carries it out on this one, which is rank 0. The logits of a command to compute are up to
    /// the caller.
    pub(super) fn command(&mut self, command: &RankCommand) -> Result<Outcome> {
        self.announce(command)?;
        self.carry_out(command)
    }

    /// Sends a command to all ranks; rank 0 calls this, and then [`carry_out`](Self::carry_out).
    pub(super) fn announce(&mut self, command: &RankCommand) -> Result<()> {
        self.groups.broadcast(Some(command.to_buffer()))?;
        self.commanded = Instant::now();
        Ok(())
    }

    /// Carries out a command that all ranks have.
    pub(super) fn carry_out(&mut self, command: &RankCommand) -> Result<Outcome> {
        match command {
            RankCommand::Heartbeat | RankCommand::Shutdown => Ok(Outcome::Done),
            // Rank 0 deals with its own pages where it gives these commands.
            RankCommand::ReadPage { cp_rank, page, rows } => {
                let own = self.groups.rank();
                let format = self
                    .executor
                    .row_layout()
                    .ok_or_else(|| self.unexpected("a command of a cache without sessions"))?;
                if own > 0 && self.holders(&format, *cp_rank).iter().any(|(rank, _)| *rank == own) {
                    let rows = self.executor.read_page(*page, *rows)?;
                    self.groups.world().send(0, PAGES, Arc::new(rows))?.wait()?;
                }
                Ok(Outcome::Done)
            }
            RankCommand::WritePage { cp_rank, page } => {
                let own = self.groups.rank();
                if own > 0 && self.groups.sharing_pages(*cp_rank).any(|rank| rank == own) {
                    let rows = self.groups.world().receive(0, PAGES)?.wait()?;
                    let rows = rows.ok_or_else(|| self.unexpected("a page"))?;
                    self.executor.write_page(*page, &rows)?;
                }
                Ok(Outcome::Done)
            }
            RankCommand::Compute { step, .. } => Ok(Outcome::Computed(self.executor.execute(step)?)),
            RankCommand::Load { slot, folder } => {
                let problem = match self.executor.load_adapter(*slot, folder) {
                    Ok(()) => String::new(),
                    Err(error) => format!("rank {}: {error}", self.groups.rank()),
                };
                let problems = self.groups.world().all_gather(Buffer::U8(problem.into_bytes()))?;
                let first = problems.iter().find_map(|problem| match &**problem {
                    Buffer::U8(text) if !text.is_empty() => Some(String::from_utf8_lossy(text).into_owned()),
                    _ => None,
                });
                if first.is_some() {
                    self.executor.unload_adapter(*slot);
                }
                Ok(Outcome::Loaded(first.map_or(Ok(()), Err)))
            }
            RankCommand::Unload { slot } => {
                self.executor.unload_adapter(*slot);
                Ok(Outcome::Done)
            }
            RankCommand::ReadCounters => {
                let waited = u64::try_from(self.timed.waited().as_nanos()).unwrap_or(u64::MAX);
                let own = Buffer::U64(vec![self.groups.world().bytes_sent(), waited]);
                let all = self.groups.world().all_gather(own)?;
                let of_rank = |buffer: &Arc<Buffer>| match &**buffer {
                    Buffer::U64(counts) => <[u64; 2]>::try_from(counts.as_slice()).ok(),
                    _ => None,
                };
                let counts = all.iter().map(of_rank).collect::<Option<_>>();
                Ok(Outcome::Counted(counts.ok_or_else(|| self.unexpected("counters"))?))
            }
        }
    }

    /// The error for a message that is not what this rank waits for.
    pub(super) fn unexpected(&self, what: &str) -> Error {
        let problem = "another kind of message came".to_owned();
        ringspan::Error::Communicator { rank: self.groups.rank(), operation: what.to_owned(), problem }.into()
    }
}
