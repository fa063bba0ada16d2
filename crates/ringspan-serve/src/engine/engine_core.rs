//! The loop of the engine on rank 0: it takes requests, schedules steps, and has their tokens sampled and sent to the clients.

use super::fingerprint::fingerprint;
use super::rank::{EngineRank, Outcome};
use super::rank_command::{LogitBlock, RankCommand};
use super::request::{Metrics, RankMetrics};
use super::scheduler::{ScheduledStep, Scheduler};
use super::sequence::Sequence;
use super::session;
use super::shared::{Command, Ending, Shared};
use super::step::{CachePage, Outputs, Step, StepSequence, WindowPages};
use super::step_logits::{DrawnTokens, LogitRow, logit_rows, pool_hidden, read_logits, take_tokens};
use crate::error::Result;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Logits that are in memory at once.
const MOST_LOGITS: usize = 16 << 20;

/// Time between two readings of the ranks' counters of bytes sent and time waited.
const READ_COUNTERS_EVERY: Duration = Duration::from_secs(1);

/// The engine's loop on rank 0, and its state.
pub(super) struct EngineCore<'a> {
    scheduler: &'a mut Scheduler,
    shared: &'a Shared,
    /// Longest time without a command to the other ranks, which wait for it no longer than their deadline.
    heartbeat: Duration,
    /// Number of the next request, in the order in which they come.
    next_arrival: u64,
    next_adapter_slot: u64,
    /// Adapters that are forgotten once no request computes with them.
    unloading: Vec<u64>,
    /// The fingerprints of loaded adapters.
    adapter_fingerprints: BTreeMap<u64, String>,
    /// The names of adapters that requests may still compute with.
    adapter_names: BTreeMap<u64, String>,
    steps: u64,
    /// Bytes that each rank has sent, and nanoseconds that it has waited.
    rank_counters: Vec<[u64; 2]>,
    counters_read_at: Instant,
}

impl<'a> EngineCore<'a> {
    pub(super) fn new(scheduler: &'a mut Scheduler, shared: &'a Shared, heartbeat: Duration) -> Self {
        Self {
            scheduler,
            shared,
            heartbeat,
            next_arrival: 0,
            next_adapter_slot: 0,
            unloading: Vec::new(),
            adapter_fingerprints: BTreeMap::new(),
            adapter_names: BTreeMap::new(),
            steps: 0,
            rank_counters: Vec::new(),
            counters_read_at: Instant::now(),
        }
    }

    /// Serves requests until the engine should end.
    pub(super) fn run(&mut self, ranks: &mut EngineRank) -> Result<()> {
        let mut idle = true;
        loop {
            let wait = self.heartbeat.saturating_sub(ranks.since_command());
            let (commands, ending) = self.shared.commands(idle.then_some(wait));
            if commands > 0 || ending.is_some() {
                // A command may take long.
                self.scheduler.send_events();
            }
            for _ in 0..commands {
                // One at a time: if it fails, the commands after it are still in the queue, and are answered with the reason.
                let Some(command) = self.shared.next_command() else { break };
                self.handle(command, ranks)?;
            }
            self.forget_adapters(ranks)?;
            let ends = match ending {
                Some(Ending::Stop) => true,
                Some(Ending::Drain) => self.scheduler.is_empty(),
                None => false,
            };
            if ends {
                ranks.command(&RankCommand::Shutdown)?;
                return Ok(());
            }
            let Some(scheduled) = self.scheduler.next() else {
                self.scheduler.send_events();
                if !idle {
                    // What the last steps sent would be missing until the next request.
                    self.count(ranks)?;
                }
                self.publish();
                if ranks.since_command() >= self.heartbeat {
                    ranks.command(&RankCommand::Heartbeat)?;
                }
                idle = true;
                continue;
            };
            idle = false;
            let began = Instant::now();
            self.step(&scheduled, ranks)?;
            self.scheduler.record_step_time(began.elapsed());
            if self.counters_read_at.elapsed() >= READ_COUNTERS_EVERY {
                self.count(ranks)?;
            }
            self.publish();
        }
    }

    fn handle(&mut self, command: Command, ranks: &mut EngineRank) -> Result<()> {
        match command {
            Command::Submit { request, adapter, queued, events } => {
                let max_model_len = self.shared.limits.max_model_len;
                self.scheduler.add(Sequence::new(self.next_arrival, *request, adapter, max_model_len, queued, events));
                self.next_arrival += 1;
            }
            Command::CheckHealth { reply } => {
                self.compute_one_token(ranks)?;
                self.count(ranks)?;
                self.publish();
                // The client may have disconnected.
                let _ = reply.send(());
            }
            Command::Load { name, folder, reply } => {
                let loaded = if self.shared.adapters().contains_key(&name) {
                    Err(format!("an adapter '{name}' is loaded already; unload it first, or choose another name"))
                } else {
                    let slot = self.next_adapter_slot;
                    self.next_adapter_slot += 1;
                    // If its files cannot be fingerprinted, texts of this adapter are merely left out of saved sessions.
                    let identity = fingerprint(&folder).ok();
                    match ranks.command(&RankCommand::Load { slot, folder })? {
                        Outcome::Loaded(loaded) => loaded.map(|()| {
                            self.adapter_fingerprints.extend(identity.map(|identity| (slot, identity)));
                            self.adapter_names.insert(slot, name.clone());
                            self.shared.add_adapter(name, slot);
                        }),
                        _ => Err("the ranks did not load it".to_owned()),
                    }
                };
                let _ = reply.send(loaded);
            }
            Command::Unload { slot } => self.unloading.push(slot),
            Command::SaveSession { file, model, reply } => {
                let _ = reply.send(session::save(
                    &file,
                    model,
                    self.scheduler.caches(),
                    &self.adapter_fingerprints,
                    ranks,
                )?);
            }
            Command::RestoreSession { file, model, reply } => {
                let vocabulary = self.shared.limits.vocabulary;
                let caches = self.scheduler.caches_mut();
                let _ =
                    reply.send(session::restore(&file, model, vocabulary, caches, &self.adapter_fingerprints, ranks)?);
                self.publish();
            }
        }
        Ok(())
    }

    /// Runs one token through every rank: in each attention replica, in a page that nothing else uses, if there is one.
    fn compute_one_token(&mut self, ranks: &mut EngineRank) -> Result<()> {
        // A replica all of whose pages are in use has requests, whose steps run through its ranks.
        let replicas = 0..self.scheduler.caches().len();
        let pages: Vec<_> =
            replicas.filter_map(|replica| Some((replica, self.scheduler.allocate_probe_page(replica)?))).collect();
        let sequence = |&(replica, page): &(usize, CachePage)| StepSequence {
            start: 0,
            tokens: vec![0],
            pages: vec![page.full],
            window: WindowPages { first: 0, pages: page.window.into_iter().collect() },
            outputs: Outputs::Last,
            adapter: None,
            replica,
        };
        let step = Step { sequences: pages.iter().map(sequence).collect(), ..Step::default() };
        if !pages.is_empty() {
            ranks.command(&RankCommand::Compute { step, blocks: Vec::new() })?;
        }
        pages.into_iter().for_each(|(replica, page)| self.scheduler.free_probe_page(replica, page));
        Ok(())
    }

    fn forget_adapters(&mut self, ranks: &mut EngineRank) -> Result<()> {
        let scheduler = &*self.scheduler;
        let (used, unused) = self.unloading.iter().partition(|slot| scheduler.uses(Some(**slot)));
        self.unloading = used;
        let unused: Vec<u64> = unused;
        for slot in unused {
            ranks.command(&RankCommand::Unload { slot })?;
            self.adapter_fingerprints.remove(&slot);
            self.adapter_names.remove(&slot);
        }
        Ok(())
    }

    fn count(&mut self, ranks: &mut EngineRank) -> Result<()> {
        if let Outcome::Counted(counts) = ranks.command(&RankCommand::ReadCounters)? {
            self.rank_counters = counts;
        }
        self.counters_read_at = Instant::now();
        Ok(())
    }

    /// Publishes the metrics of the engine.
    fn publish(&self) {
        let limits = &self.shared.limits;
        let of_rank = |rank: usize| {
            // Tensor-parallel ranks and pipeline stages hold shards of the same pages, so they report the counts of their
            // context-parallel rank.
            let (stage, cp_ranks) = (limits.ranks / limits.pp, limits.attn_dp * limits.cp);
            let (cache, cp) =
                (&self.scheduler.caches()[limits.replica_of(rank)], rank % stage * cp_ranks / stage % limits.cp);
            let (pages, window) = (cache.pages(), cache.window().map(|window| window.pages()));
            let [transfer_bytes, waited] = self.rank_counters.get(rank).copied().unwrap_or_default();
            RankMetrics {
                pages_used: pages.used(cp),
                pages_cached: pages.cached(cp),
                window_pages_used: window.map_or(0, |pages| pages.used(cp)),
                window_pages_cached: window.map_or(0, |pages| pages.cached(cp)),
                transfer_bytes,
                wait_seconds: waited as f64 / 1e9,
            }
        };
        let (counts, (running, waiting)) = (self.scheduler.counts(), self.scheduler.request_counts());
        let [running_adapters, waiting_adapters] = self.scheduler.adapters().map(|slots| {
            let names = slots.iter().filter_map(|slot| self.adapter_names.get(slot));
            names.cloned().collect()
        });
        self.shared.publish(Metrics {
            running,
            waiting,
            prompt_tokens: counts.prompt_tokens,
            generation_tokens: counts.generation_tokens,
            prefix_cache_queries: counts.prefix_queries,
            prefix_cache_hits: counts.prefix_hits,
            preemptions: counts.preemptions,
            spec_decode_drafts: counts.drafts,
            spec_decode_draft_tokens: counts.draft_tokens,
            spec_decode_accepted_tokens: counts.accepted_tokens,
            steps: self.steps,
            running_adapters,
            waiting_adapters,
            histograms: self.scheduler.histograms().clone(),
            ranks: (0..limits.ranks).map(of_rank).collect(),
        });
    }

    /// Computes a step, and sends its results to the clients.
    fn step(&mut self, scheduled: &ScheduledStep, ranks: &mut EngineRank) -> Result<()> {
        let rows = logit_rows(self.scheduler, scheduled);
        let most = (MOST_LOGITS / self.shared.limits.vocabulary.max(1)).max(1);
        let alike = rows.chunk_by(|a, b| a.only_most_likely() == b.only_most_likely());
        let blocks: Vec<&[LogitRow]> = alike.flat_map(|rows| rows.chunks(most)).collect();
        let of_block =
            |rows: &&[LogitRow]| LogitBlock { rows: rows.len(), only_most_likely: rows[0].only_most_likely() };
        let command =
            RankCommand::Compute { step: scheduled.step.clone(), blocks: blocks.iter().map(of_block).collect() };
        ranks.announce(&command)?;
        self.scheduler.send_events();
        let Outcome::Computed(hidden) = ranks.carry_out(&command)? else {
            return Err(ranks.unexpected("hidden states"));
        };
        self.steps += 1;
        self.scheduler.commit_step(scheduled);
        let mut drawn = DrawnTokens::new();
        if let Some(hidden) = &hidden {
            pool_hidden(self.scheduler, scheduled, hidden)?;
            for block in blocks {
                let indices: Vec<u32> = block.iter().map(|row| row.row as u32).collect();
                let of_block = hidden.index_select(&Tensor::new(indices, hidden.device())?, 0)?;
                if block[0].only_most_likely() {
                    let tokens = ranks.executor.most_likely(block.len(), Some(&of_block))?;
                    take_tokens(self.scheduler, block, tokens.ok_or_else(|| ranks.unexpected("tokens"))?, &mut drawn);
                    continue;
                }
                let logits = ranks.executor.logits(block.len(), Some(&of_block))?;
                let mut logits = logits.ok_or_else(|| ranks.unexpected("logits"))?;
                read_logits(self.scheduler, self.shared.limits.vocabulary, block, &mut logits, &mut drawn)?;
            }
        }
        self.advance(scheduled, drawn);
        Ok(())
    }

    /// Adds the tokens that were drawn to their sequences.
    fn advance(&mut self, scheduled: &ScheduledStep, mut drawn: DrawnTokens) {
        for arrival in &scheduled.arrivals {
            let Some(index) = self.scheduler.find(*arrival) else { continue };
            if self.scheduler.running()[index].remaining() > 0 || self.scheduler.finish_prefill(index) {
                continue;
            }
            for token in drawn.remove(arrival).unwrap_or_default() {
                if self.scheduler.append_token(index, token) {
                    break;
                }
            }
        }
    }
}
