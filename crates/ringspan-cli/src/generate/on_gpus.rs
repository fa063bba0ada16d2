//! Generation on GPUs, one text at a time: the engine's paged cache is in the memory of the CPU.

use super::{EndReason, Generated, Printer};
use anyhow::Result;
use ringspan::comm::Buffer;
use ringspan_serve::{Mesh, Model, Options, Stop};
use std::ops::ControlFlow;

/// Continues `prompt`. Returns the text's numbers in the process with rank 0.
pub(super) fn generate(
    model: &Model,
    mesh: &Mesh,
    prompt: &[u32],
    options: &Options,
    printer: &mut Printer,
) -> Result<Option<Generated>> {
    let generations = ringspan_serve::generate(model, mesh, prompt, options, |token| {
        Ok(if printer.push(token)? { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    let cached = generations.iter().map(|rank| Buffer::U64(vec![rank.cached as u64])).collect();
    let (Some(cached), Some(first)) = (mesh.processes.gather(cached)?, generations.first()) else { return Ok(None) };
    let numbers = |buffer: &Buffer| match buffer {
        Buffer::U64(numbers) => numbers.iter().map(|number| *number as usize).collect(),
        _ => Vec::new(),
    };
    Ok(Some(Generated {
        tokens: first.tokens.len(),
        end_reason: match first.stop {
            Stop::Token => EndReason::EndToken,
            Stop::Length => EndReason::MaxTokens,
            Stop::Caller => EndReason::Printer,
        },
        cached: cached.iter().flat_map(|buffer| numbers(buffer)).collect(),
        prefill: first.prefill,
        decode: first.decode,
    }))
}
