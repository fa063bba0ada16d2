//! Generation by the engine that `ringspan serve` runs, with one request.

use super::{EndReason, Generated, Printer};
use anyhow::{Result, anyhow, ensure};
use ringspan_serve::engine::request::{EngineClient, Event, FinishReason, Limits, Request, SamplingParams};
use ringspan_serve::engine::{Engine, EngineOptions, KvCache};
use ringspan_serve::paged::PagedCache;
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
    let leads = mesh.ranks.lead();
    let engine_options =
        EngineOptions { num_speculative_tokens, ..engine_options(&model, &mesh, prompt.len(), options)? };
    let engine = Engine::start(model, mesh, &engine_options)?;
    if !leads {
        engine.wait()?;
        return Ok(None);
    }
    let generated = follow(&engine, prompt, options, printer);
    // The failure of a rank says more than what the request heard of it.
    engine.shutdown(false)?;
    generated.map(Some)
}

/// A cache that holds the longest possible text, or as much of it as there is memory for.
fn engine_options(model: &Model, mesh: &Mesh, prompt: usize, options: &Options) -> Result<EngineOptions> {
    let longest = prompt.saturating_add(options.max_tokens);
    let ranks = mesh.ring.saturating_mul(mesh.ulysses).max(1);
    let mut pages = longest.div_ceil(PAGE).div_ceil(ranks).min(u32::MAX as usize / PAGE);
    if let Some(free) = ringspan::memory::available() {
        let local = mesh.ranks.local().unwrap_or(ranks).max(1);
        let page_bytes = PagedCache::bytes_per_page(model, PAGE, None)?.max(1);
        pages = pages.min((free as f64 * MEMORY / local as f64) as usize / page_bytes);
    }
    // Each process may see another amount of free memory.
    pages = usize::try_from(mesh.ranks.smallest(pages as u64)?).unwrap_or(usize::MAX);
    let holds = pages.saturating_mul(ranks).saturating_mul(PAGE);
    ensure!(
        holds > prompt,
        "the prompt has {prompt} tokens, but {:.0}% of the free memory hold keys and values of {holds} tokens on {ranks} ranks",
        MEMORY * 100.0
    );
    Ok(EngineOptions {
        page: PAGE,
        kv_cache: KvCache::Pages(pages),
        max_model_len: Some(longest.min(holds)),
        max_running: 1,
        max_waiting: 1,
        prefix_cache: false,
        ..EngineOptions::default()
    })
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
    for (index, start) in (0..tokens).step_by(limits.page).enumerate() {
        cached[index % limits.ranks] += limits.page.min(tokens - start);
    }
    cached
}
