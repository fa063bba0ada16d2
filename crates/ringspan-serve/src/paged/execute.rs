//! The execution of a step on all ranks.

use super::attention::PagedAttention;
use super::cache::PagedCache;
use super::chunks::received;
use super::elements::{Elements, of_tensor};
use super::page_map::PageMap;
use super::step_plan::StepPlan;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::step::Step;
use candle_core::Tensor;
use ringspan::attention::Group;
use ringspan::kernel::Data;
use std::sync::Arc;

/// Executes a step on this rank; all ranks of the group must call this with the same step. Rank 0 gets the hidden states `[n, C]`,
/// before the last norm, of the outputs that the step asks for, in the order of sequences and tokens; the others get `None`, and so
/// does rank 0 if there are no outputs.
///
/// # Errors
/// A step that does not fit the cache or the model, which all ranks refuse alike before they compute; failures of other ranks.
pub fn execute(group: &Arc<Group>, model: &Model, cache: &mut PagedCache, step: &Step) -> Result<Option<Tensor>> {
    let map = PageMap { rank: group.rank(), ranks: group.size(), page: cache.page() };
    cache.check(&map, step)?;
    step.sequences.iter().try_for_each(|sequence| model.check_tokens(&sequence.tokens))?;
    cache.copy(map.rank, &step.copies);
    if step.sequences.is_empty() {
        return Ok(None);
    }
    let plan = StepPlan::new(&map, step)?;
    let hidden = model.hidden(map.rank, &plan.tokens, &PagedAttention::new(group, cache, &plan))?;
    gather(group, &plan.outputs, &hidden)
}

/// Brings rows of the ranks' hidden states `[T, C]` to rank 0, in this order.
fn gather(group: &Group, outputs: &[(usize, usize)], hidden: &Tensor) -> Result<Option<Tensor>> {
    let (_, width) = hidden.dims2()?;
    let (rank, dtype, hidden) = (group.rank(), hidden.dtype(), hidden.contiguous()?);
    let rows_of = |from: usize| outputs.iter().filter(move |(rank, _)| *rank == from).map(|(_, row)| *row);
    if rank != 0 {
        if rows_of(rank).next().is_some() {
            let mut rows = Elements::with_capacity(dtype, rows_of(rank).count() * width);
            of_tensor(&hidden, |all| rows_of(rank).try_for_each(|row| rows.extend(row_of(all, row, width))))?;
            group.cp().send(0, HIDDEN, Arc::new(rows.into_message()))?.wait()?;
        }
        return Ok(None);
    }
    if outputs.is_empty() {
        return Ok(None);
    }
    let mut arrived = Vec::new();
    for from in 1..group.size() {
        let message = match rows_of(from).next() {
            Some(_) => group.cp().receive(from, HIDDEN)?.wait()?,
            None => None,
        };
        arrived.push(message);
    }
    of_tensor(&hidden, |own| {
        let mut sources = vec![own];
        for (message, from) in arrived.iter().zip(1..) {
            let expected = rows_of(from).count() * width;
            sources.push(
                message.as_ref().map_or(Ok(own.slice(0..0)), |message| received(message, dtype, expected, from))?,
            );
        }
        let (mut rows, mut taken) = (Elements::with_capacity(dtype, outputs.len() * width), vec![0; group.size()]);
        for &(from, row) in outputs {
            // Other ranks have sent only the rows that are needed.
            rows.extend(row_of(sources[from], if from == 0 { row } else { taken[from] }, width))?;
            taken[from] += 1;
        }
        let shape = (outputs.len(), width);
        Ok(Some(match rows {
            Elements::F32(rows) => Tensor::from_vec(rows, shape, hidden.device())?,
            Elements::Bf16(rows) => Tensor::from_vec(rows, shape, hidden.device())?,
            Elements::Q8_0(_) => return Err(Error::Step("hidden states are not in blocks".to_owned())),
        }))
    })
}

fn row_of(all: Data<'_>, row: usize, width: usize) -> Data<'_> {
    all.slice(row * width..(row + 1) * width)
}

/// The tag of messages with hidden states.
const HIDDEN: u64 = 1 << 60;
