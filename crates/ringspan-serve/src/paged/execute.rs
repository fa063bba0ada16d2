//! The execution of a step on all ranks.

use super::attention::PagedAttention;
use super::cache::PagedCache;
use super::hidden_states::{from_previous_stage, gather, gather_replicas, to_next_stage};
use super::page_map::PageMap;
use super::step_plan::StepPlan;
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::model::Model;
use crate::step::Step;
use candle_core::Tensor;

/// Executes a step on this rank, with its part of the model; all ranks must call this with the same step. The first rank of the last
/// pipeline stage, which is rank 0 if there is one stage, gets the hidden states `[n, C]`, before the last norm, of the outputs that the
/// step asks for, in the order of sequences and tokens; the others get `None`, and so does that rank if there are no outputs.
///
/// # Errors
/// A step that does not fit the cache or the model, which all ranks of a replica refuse alike before they compute; failures of other
/// ranks.
pub fn execute(groups: &Groups, model: &Model, cache: &mut PagedCache, step: &Step) -> Result<Option<Tensor>> {
    let attn_dp = groups.replicas().map_or(1, |(_, replicas)| replicas.size());
    let mut asked = step.sequences.iter().map(|one| one.replica).chain(step.copies.iter().map(|copy| copy.replica));
    if let Some(replica) = asked.find(|replica| *replica >= attn_dp) {
        return Err(Error::Step(format!("a sequence or copy of attention replica {replica}, of {attn_dp}")));
    }
    let Some((replica, replicas)) = groups.replicas() else { return execute_here(groups, model, cache, step) };
    let hidden = execute_here(groups, model, cache, &step.of_replica(replica))?;
    gather_replicas(groups, replicas, step, hidden, (model.decoder().config().hidden_size, cache.computed()))
}

/// Executes a step whose sequences are all in this rank's attention replica; the first rank of the last pipeline stage of the replica
/// gets the outputs.
fn execute_here(groups: &Groups, model: &Model, cache: &mut PagedCache, step: &Step) -> Result<Option<Tensor>> {
    let group = groups.cp();
    let map = PageMap { rank: group.rank(), ranks: group.size(), page_size: cache.page_size() };
    cache.check(&map, step)?;
    step.sequences.iter().try_for_each(|sequence| model.check_tokens(&sequence.tokens))?;
    cache.copy(map.rank, &step.copies);
    // A replica without sequences may have experts to which others send tokens.
    let serves_others = groups.replicas().is_some() && groups.shares_experts() && model.decoder().experts() > 0;
    if step.sequences.is_empty() && !serves_others {
        return Ok(None);
    }
    let plan = StepPlan::new(&map, step, cache.kinds())?;
    let experts = groups.experts(model.decoder().experts())?;
    let rows = groups.tensor().shard_range(plan.tokens.len()).len();
    let before = match groups.stages() {
        Some(stages) => from_previous_stage(&**stages, rows, model, cache)?,
        None => None,
    };
    let attention = PagedAttention::new(groups, &*experts, cache, &plan);
    let hidden = match before {
        None => model.hidden(map.rank, &plan.tokens, &attention)?,
        Some(before) => model.through_layers(map.rank, before, &attention)?,
    };
    if let Some(stages) = groups.stages()
        && to_next_stage(&**stages, &hidden)?
    {
        return Ok(None);
    }
    // Tensor-parallel ranks have the same tokens, and each ends with some of their rows.
    let has_outputs = plan.outputs.iter().any(|(rank, _)| *rank == map.rank);
    let hidden = if has_outputs { groups.tensor().gather(&hidden, plan.tokens.len())? } else { hidden };
    match groups.tensor().rank_and_size().0 {
        0 => gather(group, &plan.outputs, &hidden),
        _ => Ok(None),
    }
}
