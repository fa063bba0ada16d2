//! Generation by the engine that `ringspan serve` runs, with one request.

use super::{EndReason, Generated, Printer};
use anyhow::{Result, anyhow, ensure};
use ringspan_serve::engine::request::{EngineClient, Event, FinishReason, Limits, Request, SamplingParams};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Model, Options, Sampling};
use std::time::{Duration, Instant};

/// Tokens of a page of the cache.
const PAGE: usize = 16;

/// Largest share of the free memory that keys and values take.
const MEMORY: f64 = 0.9;

/// Continues `prompt`. Returns the text's numbers in the process with rank 0.
pub(super) fn generate(
    model: Model,
    mesh: Mesh,
    prompt: &[u32],
    options: &Options,
    num_speculative_tokens: usize,
    printer: &mut Printer,
) -> Result<Option<Generated>> {
    let (leads, axes) = (mesh.processes.lead(), mesh.to_string());
    let asked = prompt.len().saturating_add(options.max_tokens);
    let engine = Engine::start(model, mesh, &engine_options(asked, num_speculative_tokens))?;
    if !leads {
        engine.wait()?;
        return Ok(None);
    }
    let holds = engine.client().limits().max_model_len;
    ensure!(
        holds > prompt.len(),
        "the prompt has {} tokens, but {:.0}% of the free memory hold keys and values of {holds} tokens (mesh {axes})",
        prompt.len(),
        MEMORY * 100.0
    );
    let generated = follow(&engine, prompt, options, printer);
    // The failure of a rank says more than what the request heard of it.
    engine.shutdown(false)?;
    generated.map(Some)
}

/// A cache that holds a text of `longest` tokens, or as much of it as there is memory for.
fn engine_options(longest: usize, num_speculative_tokens: usize) -> EngineOptions {
    EngineOptions {
        page_size: PAGE,
        kv_cache: KvCacheSize::OneSequence(MEMORY),
        max_model_len: Some(longest),
        max_running: 1,
        max_waiting: 1,
        prefix_cache: false,
        num_speculative_tokens,
        ..EngineOptions::default()
    }
}

/// Submits the request, and prints its tokens.
fn follow(engine: &Engine, prompt: &[u32], options: &Options, printer: &mut Printer) -> Result<Generated> {
    let Sampling { temperature, top_k, top_p, seed } = options.sampling;
    let began = Instant::now();
    let client = engine.client();
    let mut events = client.submit(Request {
        sampling: SamplingParams { temperature, top_k, top_p, seed: Some(seed), ..SamplingParams::default() },
        stop_token_ids: options.stop_tokens.clone(),
        ..Request::new(prompt.to_vec(), options.max_tokens)
    })?;
    let (mut tokens, mut prefill) = (0, None);
    let end_reason = loop {
        match events.blocking_recv() {
            Some(Event::Token(token, _)) => {
                prefill.get_or_insert_with(|| began.elapsed());
                tokens += 1;
                if !printer.push(token)? {
                    break EndReason::Printer;
                }
            }
            Some(Event::Finished { reason: FinishReason::Stop { .. }, .. }) => break EndReason::EndToken,
            Some(Event::Finished { .. }) if tokens < options.max_tokens => break EndReason::Memory,
            Some(Event::Finished { .. }) => break EndReason::MaxTokens,
            Some(Event::Failed(problem)) => return Err(anyhow!(problem)),
            Some(Event::Started { .. } | Event::Prompt(_) | Event::Embedding(_)) => {}
            None => return Err(anyhow!("the engine ended without a word about the request")),
        }
    };
    let prefill: Duration = prefill.unwrap_or_else(|| began.elapsed());
    // The last generated token never passes through the model.
    let cached = cached(&client.limits(), prompt.len() + tokens.saturating_sub(1));
    Ok(Generated { tokens, end_reason, cached, prefill, decode: began.elapsed().saturating_sub(prefill) })
}

/// For each rank, its share of a text's first `tokens` tokens.
fn cached(limits: &Limits, tokens: usize) -> Vec<usize> {
    let mut cached = vec![0; limits.ranks];
    for (index, start) in (0..tokens).step_by(limits.page_size).enumerate() {
        cached[index % limits.ranks] += limits.page_size.min(tokens - start);
    }
    cached
}
