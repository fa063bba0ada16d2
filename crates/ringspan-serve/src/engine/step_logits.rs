//! Reads the logits of a step on rank 0: draws the next tokens of sequences, and takes the log-probabilities that prompts were asked for.

use super::logprobs::Distribution;
use super::request::{Pooling, TokenLogprobs};
use super::scheduler::{ScheduledStep, Scheduler};
use super::sequence::Sequence;
use super::step::{Outputs, StepSequence};
use super::token_sampler::Drawn;
use crate::error::{Error, Result};
use candle_core::{DType, Tensor};
use ringspan_candle::cast::cast;
use ringspan_candle::pool;
use std::collections::HashMap;

/// A row of hidden states whose logits are needed.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogitRow {
    /// Index among the rows that the step outputs.
    pub(super) row: usize,
    arrival: u64,
    purpose: LogitPurpose,
}

#[derive(Debug, Clone, Copy)]
enum LogitPurpose {
    /// The log-probability of the prompt's next token, and of this many most likely ones.
    PromptLogprobs { token: u32, top: usize },
    /// Draw the token after the first `drafts` draft tokens; it counts only if all of these were drawn.
    Draw {
        /// Number of drafts before the token.
        drafts: usize,
    },
    /// Like `Draw`, where that takes the most likely token.
    TakeMostLikely { drafts: usize },
}

impl LogitRow {
    /// Whether no logits are needed, but only which token has the greatest.
    pub(super) fn only_most_likely(&self) -> bool {
        matches!(self.purpose, LogitPurpose::TakeMostLikely { .. })
    }
}

/// The use of a row of logits.
enum LogitTask<'a> {
    PromptLogprobs { arrival: u64, token: u32, top: usize, logits: &'a [f32] },
    Draw(u64, SequenceDraws<'a>),
}

/// The result of a [`LogitTask`].
enum LogitTaskResult {
    PromptLogprobs(u64, TokenLogprobs),
    Drawn(u64, Vec<Result<Drawn, String>>),
}

/// The tokens of a sequence that are drawn in a step.
struct SequenceDraws<'a> {
    sequence: &'a mut Sequence,
    drawn: Vec<Result<Drawn, String>>,
    /// Logits, with the number of drafts before each token.
    rows: Vec<(usize, &'a mut [f32])>,
}

impl SequenceDraws<'_> {
    /// Draws tokens as long as the ones before are the drafts with which the logits were computed.
    fn draw(mut self) -> Vec<Result<Drawn, String>> {
        for (drafts, logits) in self.rows {
            if !are_drawn(self.sequence, drafts, &self.drawn) {
                break;
            }
            self.drawn.push(self.sequence.sampler.draw(logits));
        }
        self.drawn
    }
}

/// Whether the first `drafts` drafts of a sequence were drawn, so that the logits after them are those of its text.
fn are_drawn(sequence: &Sequence, drafts: usize, drawn: &[Result<Drawn, String>]) -> bool {
    let Some(last) = drafts.checked_sub(1) else { return true };
    matches!(
        drawn.get(last),
        Some(Ok(Drawn { token, ends: false, .. }))
            if sequence.drafts.get(last) == Some(token) && !sequence.stop_token_ids.contains(token)
    )
}

/// What was drawn for each sequence, by its arrival: tokens, or why none could be.
pub(super) type DrawnTokens = HashMap<u64, Vec<Result<Drawn, String>>>;

/// The rows whose logits are needed: first those that need only the most likely token, then the others, each group in the order in which
/// the step outputs them.
pub(super) fn logit_rows(scheduler: &mut Scheduler, step: &ScheduledStep) -> Vec<LogitRow> {
    let mut rows = Vec::new();
    for (row, arrival, position) in output_rows(step) {
        let Some(index) = scheduler.find(arrival) else { continue };
        let sequence = &scheduler.running()[index];
        let next = position + 1;
        if next < sequence.prompt_len
            && let Some(top) = sequence.prompt_results.wants_logprobs()
        {
            rows.push(LogitRow {
                row,
                arrival,
                purpose: LogitPurpose::PromptLogprobs { token: sequence.tokens[next], top },
            });
        }
        if let Some(drafts) = next.checked_sub(sequence.tokens.len())
            && next < sequence.max_len
        {
            let purpose = match sequence.sampler.takes_most_likely() {
                true => LogitPurpose::TakeMostLikely { drafts },
                false => LogitPurpose::Draw { drafts },
            };
            rows.push(LogitRow { row, arrival, purpose });
        }
    }
    rows.sort_by_key(|row| !row.only_most_likely());
    rows
}

/// Adds the hidden states of prompts to what their clients asked for.
pub(super) fn pool_hidden(scheduler: &mut Scheduler, step: &ScheduledStep, hidden: &Tensor) -> Result<()> {
    for (row, arrival, position) in output_rows(step) {
        let Some(index) = scheduler.find(arrival) else { continue };
        let wanted = match scheduler.running()[index].prompt_results.wants_hidden() {
            Some(Pooling::Mean) => true,
            Some(Pooling::Last) => position + 1 == scheduler.running()[index].prompt_len,
            None => false,
        };
        if wanted {
            let state: Vec<f32> = cast(&hidden.get(row)?, DType::F32)?.to_vec1()?;
            scheduler.running()[index].prompt_results.add_hidden(&state);
        }
    }
    Ok(())
}

/// Takes the most likely tokens after a block of rows.
pub(super) fn take_tokens(
    scheduler: &mut Scheduler,
    block: &[LogitRow],
    tokens: Vec<Result<u32>>,
    drawn: &mut DrawnTokens,
) {
    for (LogitRow { arrival, purpose, .. }, token) in block.iter().zip(tokens) {
        let LogitPurpose::TakeMostLikely { drafts } = *purpose else { continue };
        let Some(index) = scheduler.find(*arrival) else { continue };
        let sequence = &mut scheduler.running()[index];
        let drawn = drawn.entry(*arrival).or_default();
        if are_drawn(sequence, drafts, drawn) {
            drawn.push(token.map(|token| sequence.sampler.take(token)).map_err(|error| error.to_string()));
        }
    }
}

/// Reads the logits of a block of rows, on all threads of the rank.
pub(super) fn read_logits(
    scheduler: &mut Scheduler,
    vocabulary: usize,
    block: &[LogitRow],
    logits: &mut [f32],
    drawn: &mut DrawnTokens,
) -> Result<()> {
    if logits.len() != block.len() * vocabulary {
        let problem = format!("{} logits for {} rows of {vocabulary}", logits.len(), block.len());
        return Err(Error::Logits { vocabulary, problem });
    }
    let running = scheduler.running();
    let mut sequences: HashMap<u64, &mut Sequence> =
        running.iter_mut().map(|sequence| (sequence.arrival, sequence)).collect();
    let mut tasks: Vec<LogitTask> = Vec::with_capacity(block.len());
    for (LogitRow { arrival, purpose, .. }, logits) in block.iter().zip(logits.chunks_exact_mut(vocabulary)) {
        let arrival = *arrival;
        match (*purpose, tasks.last_mut()) {
            (LogitPurpose::PromptLogprobs { token, top }, _) => {
                tasks.push(LogitTask::PromptLogprobs { arrival, token, top, logits })
            }
            (LogitPurpose::Draw { drafts }, Some(LogitTask::Draw(last, draws))) if *last == arrival => {
                draws.rows.push((drafts, logits));
            }
            (LogitPurpose::TakeMostLikely { .. }, _) => {}
            (LogitPurpose::Draw { drafts }, _) => {
                let Some(sequence) = sequences.remove(&arrival) else { continue };
                // A block may end between the drafts of a sequence.
                let drawn = drawn.remove(&arrival).unwrap_or_default();
                tasks.push(LogitTask::Draw(arrival, SequenceDraws { sequence, drawn, rows: vec![(drafts, logits)] }));
            }
        }
    }
    let read = pool::map(tasks, |task| match task {
        LogitTask::PromptLogprobs { arrival, token, top, logits } => {
            LogitTaskResult::PromptLogprobs(arrival, Distribution::new(logits).of(token, top))
        }
        LogitTask::Draw(arrival, draws) => LogitTaskResult::Drawn(arrival, draws.draw()),
    });
    for read in read {
        match read {
            LogitTaskResult::PromptLogprobs(arrival, logprobs) => {
                if let Some(index) = scheduler.find(arrival) {
                    scheduler.running()[index].prompt_results.add_logprobs(logprobs);
                }
            }
            LogitTaskResult::Drawn(arrival, tokens) => {
                drawn.insert(arrival, tokens);
            }
        }
    }
    Ok(())
}

/// The rows that a step outputs, in their order: the index of the row, the arrival of its sequence, and the position of its token.
fn output_rows(step: &ScheduledStep) -> impl Iterator<Item = (usize, u64, usize)> + '_ {
    let of_sequence = |(arrival, sequence): (u64, &StepSequence)| {
        let end = sequence.start + sequence.tokens.len();
        let positions = match sequence.outputs {
            Outputs::None => end..end,
            Outputs::Last => end - 1..end,
            Outputs::All => sequence.start..end,
        };
        positions.map(move |position| (arrival, position))
    };
    step.sequences().flat_map(of_sequence).enumerate().map(|(row, (arrival, position))| (row, arrival, position))
}
