//! Saves checkpoints while training goes on: each rank's shards are written by a thread while the next steps are computed.

use super::{Rank, RankZero};
use crate::{
    checkpoint::{PendingCheckpoint, Progress},
    data::{PackerPosition, SourcePosition},
    error::{Error, Result},
};
use std::{
    sync::Mutex,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Pause between checks whether a checkpoint is written, where nothing else is left to do.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A checkpoint that is being written.
pub(super) struct PendingSave {
    progress: Progress,
    /// The thread that writes this rank's file; none on ranks that write none.
    writer: Option<JoinHandle<Result<()>>>,
    /// The checkpoint's folder, on rank 0; it is removed unless it is committed.
    part: Option<PendingCheckpoint>,
}

impl PendingSave {
    /// Whether this rank has nothing left to write.
    pub(super) fn is_written(&self) -> bool {
        self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Rank<'_> {
    /// Begins to write a checkpoint of the current state; `positions` are the positions in each source at which the next step
    /// begins.
    pub(super) fn start_saving(
        &mut self,
        rank_zero: &Mutex<RankZero<'_>>,
        step: u64,
        tokens: u64,
        positions: Vec<SourcePosition>,
    ) -> Result<()> {
        // The previous checkpoint may still be under way; writing two at once would take the memory of both.
        self.finish_saving(rank_zero)?;
        let part = if self.world.rank() == 0 { Some(self.checkpoints.begin(step)?) } else { None };
        self.world.barrier()?;
        let (model, data) = (self.setup.model.clone(), self.setup.data.clone());
        let progress = Progress::new(step, PackerPosition::default(), self.config.seed, tokens, model, data);
        let progress = progress.with_sources(positions);
        let progress = progress
            .with_losses(self.watchdog.losses())
            .with_config(self.setup.config_json.clone(), self.setup.end_token);
        let own = self.writers.iter().position(|rank| *rank == self.world.rank());
        let writer = own.map(|own| self.writer(step, own)).transpose()?;
        self.saving = Some(PendingSave { progress, writer, part });
        Ok(())
    }

    /// Starts a thread that writes this rank's parameters and optimiser state as they are. They are shared with it, so nothing
    /// may change them before it has [written](Self::written).
    fn writer(&self, step: u64, own: usize) -> Result<JoinHandle<Result<()>>> {
        let mut slices = self.shards.slices();
        for partition_shard in self.shards.kept() {
            // A parameter may have several partitions, each with a state of its own; in the checkpoint they are slices of one
            // tensor.
            let key = partition_shard.partition.key();
            slices.extend(self.optimizer.parameter_state(&key).map(|(name, values)| {
                let kind = name.strip_suffix(&*key).unwrap_or(name);
                partition_shard.slice(format!("{kind}{}", partition_shard.partition.name), values.clone())
            }));
        }
        let (checkpoints, ranks) = (self.checkpoints.clone(), self.writers.len());
        let name = format!("rank-{}-saving", self.world.rank());
        let write = move || checkpoints.write(step, own, ranks, &slices);
        thread::Builder::new()
            .name(name)
            .spawn(write)
            .map_err(|e| Error::Settings(format!("the thread that writes checkpoints did not start: {e}")))
    }

    /// Waits until this rank has nothing left to write. The next step computes its gradients meanwhile, and waits here before its
    /// update: writing from copies would take the memory of all that is saved a second time.
    pub(super) fn written(&self) -> Result<()> {
        let Some(saving) = &self.saving else { return Ok(()) };
        let began = Instant::now();
        while !saving.is_written() {
            if began.elapsed() > self.config.deadline {
                return Err(Error::Settings(format!(
                    "rank {} has not written its part of the checkpoint of step {} after {:?}: the disk does not answer; \
                     --deadline is how long a rank waits",
                    self.world.rank(),
                    saving.progress.step,
                    self.config.deadline
                )));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until all ranks have written, and commits. No rank continues before the commit: one that then failed would end rank
    /// 0 in the middle of it.
    pub(super) fn finish_saving(&mut self, rank_zero: &Mutex<RankZero<'_>>) -> Result<()> {
        self.written()?;
        let Some(PendingSave { progress, writer, part }) = self.saving.take() else { return Ok(()) };
        if let Some(writer) = writer {
            let stopped = |_| Error::Settings("the thread that writes checkpoints panicked".into());
            writer.join().map_err(stopped)??;
        }
        self.world.barrier()?;
        if let Some(part) = part {
            let path = self.checkpoints.commit(part, &progress, self.writers.len())?;
            self.on_rank_zero(rank_zero, |rank_zero| {
                rank_zero.observer.saved(progress.step, &path);
                Ok(())
            })?;
        }
        Ok(self.world.barrier()?)
    }
}
