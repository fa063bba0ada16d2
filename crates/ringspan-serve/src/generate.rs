//! Generation of one text, on CPUs or GPUs: all ranks prefill the prompt in parallel, then decode one token after the
//! other. The [engine](crate::engine) generates many texts at a time, on CPUs.

use crate::cache::Cache;
use crate::context::{Decode, Prefill};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::model::Model;
use crate::sampler::{Sampler, Sampling};
use candle_core::{DType, Tensor};
use ringspan::attention::Group;
use ringspan::comm::Buffer;
use ringspan::{Documents, Layout, LayoutKind, StrategyKind};
use ringspan_candle::Context;
use ringspan_candle::cast::cast;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Settings of a generation: its length, and how tokens are drawn.
#[derive(Debug, Clone)]
pub struct Options {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Upper limit of generated tokens.
    pub max_tokens: usize,
    /// Tokens that end the text; they do not become part of it.
    pub stop_tokens: Vec<u32>,
}

/// The reason why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// One of the stop tokens was drawn.
    Token,
    /// The text reached `max_tokens` tokens.
    Length,
    /// The callback `on_token` ended the text.
    Caller,
}

/// The result of a generation on one rank.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The tokens, without the prompt and without a stop token; the same on every rank.
    pub tokens: Vec<u32>,
    /// The reason why there are no more tokens.
    pub stop: Stop,
    /// Number of tokens whose keys and values this rank has cached.
    pub cached: usize,
    /// Bytes of the cached keys and values.
    pub cached_bytes: usize,
    /// Time from the start to the first token.
    pub prefill: Duration,
    /// Time for all further tokens.
    pub decode: Duration,
}

/// Generates from `prompt` on a mesh of ranks; returns one [`Generation`] for each rank of this process.
///
/// `on_token` is called with each new token on rank 0's thread, and may end the text.
///
/// # Errors
/// An empty prompt, tokens outside the vocabulary, options outside their range, and failures of any rank.
pub fn generate(
    model: &Model,
    mesh: &Mesh,
    prompt: &[u32],
    options: &Options,
    on_token: impl FnMut(u32) -> Result<ControlFlow<()>> + Send,
) -> Result<Vec<Generation>> {
    check(model, prompt, options)?;
    let on_token = Mutex::new(on_token);
    mesh.run(|group| {
        generate_on_rank(&group, model, prompt, options, &mut |token| {
            let mut on_token = on_token.lock().unwrap_or_else(PoisonError::into_inner);
            on_token(token)
        })
    })
}

/// Like [`generate`], but for one rank of a group: all of its ranks must call this with the same arguments.
///
/// # Errors
/// As for [`generate`].
pub fn generate_on_rank(
    group: &Arc<Group>,
    model: &Model,
    prompt: &[u32],
    options: &Options,
    on_token: &mut dyn FnMut(u32) -> Result<ControlFlow<()>>,
) -> Result<Generation> {
    check(model, prompt, options)?;
    let began = Instant::now();
    let leads = group.rank() == 0;
    let mut sampler = Sampler::new(options.sampling)?;
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, prompt.len()), group.size())?;
    // The last generated token never passes through the model, so it is not cached.
    let read = options.max_tokens.saturating_sub(1);
    let total = prompt.len().saturating_add(read);
    let mut cache = Cache::generating(model.layers(), layout.tokens(group.rank()), read, group.size());

    let mut tokens: Vec<u32> = Vec::new();
    let mut prefill = Duration::ZERO;
    let mut stop = Stop::Length;
    if options.max_tokens > 0 {
        let mut hidden = prefill_prompt(group, model, prompt, &layout, &mut cache, total)?;
        loop {
            // One rank draws the token and broadcasts it: the others need neither logits nor a random stream.
            let drawn = if leads { Some(sampler.sample(&next_logits(model, group.rank(), &hidden)?)?) } else { None };
            if tokens.is_empty() {
                prefill = began.elapsed();
            }
            let end = match drawn {
                Some(token) if options.stop_tokens.contains(&token) => Some(Stop::Token),
                Some(token) if on_token(token)?.is_break() => Some(Stop::Caller),
                _ => None,
            };
            let (token, end) = agree(group, drawn.map(|token| (token, end)))?;
            if end != Some(Stop::Token) {
                tokens.push(token);
            }
            if let Some(end) = end {
                stop = end;
                break;
            }
            if tokens.len() == options.max_tokens {
                break;
            }
            let position = prompt.len() + tokens.len() - 1;
            let decode = Decode::new(group, &mut cache, position, total);
            hidden = model.hidden(group.rank(), &[token], &decode)?;
        }
    }
    let decode = began.elapsed().saturating_sub(prefill);
    Ok(Generation { tokens, stop, cached: cache.tokens(), cached_bytes: cache.bytes(), prefill, decode })
}

fn check(model: &Model, prompt: &[u32], options: &Options) -> Result<()> {
    options.sampling.check()?;
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    model.check_tokens(prompt)
}

/// Runs the prompt through the model, fills the cache, and returns the hidden state `[1, C]` of the last token on every rank.
fn prefill_prompt(
    group: &Arc<Group>,
    model: &Model,
    prompt: &[u32],
    layout: &Layout,
    cache: &mut Cache,
    total: usize,
) -> Result<Tensor> {
    let rank = group.rank();
    let context = Context::new(group.clone(), Arc::new(layout.clone()), StrategyKind::Ring)?.with_max_length(total);
    let own = layout.shard(rank, prompt, 1)?;
    let hidden = model.hidden(rank, &own, &Prefill::new(&context, cache))?;
    // Only the rank that holds the prompt's last token has that token's hidden state; it broadcasts it.
    let last = prompt.len() - 1;
    let mut holder = None;
    for owner in 0..group.size() {
        if let Some(row) = layout.rows(owner).into_iter().position(|row| row == last) {
            holder = Some((owner, row));
        }
    }
    let Some((owner, row)) = holder else {
        return Err(ringspan::Error::Layout(format!("no rank holds token {last} of the prompt")).into());
    };
    let state = || cast(&hidden.get(row)?, DType::F32)?.to_vec1();
    let own = if owner == rank { Some(Buffer::F32(state()?)) } else { None };
    match &*group.cp().broadcast(owner, own)? {
        // Casting back loses nothing: the state had this type before it was widened to f32 for the broadcast.
        Buffer::F32(state) => Ok(cast(&Tensor::from_slice(state, (1, state.len()), hidden.device())?, hidden.dtype())?),
        _ => Err(unexpected(group, "the last hidden state", owner)),
    }
}

/// Logits `[V]` of the token that follows the token with hidden state `[1, C]`.
fn next_logits(model: &Model, rank: usize, hidden: &Tensor) -> Result<Vec<f32>> {
    let normed = model.decoder().norm(model.weights(rank), hidden)?;
    let logits = model.decoder().model().head().logits(&normed, model.weights(rank))?;
    Ok(logits.flatten_all()?.to_vec1()?)
}

/// Broadcasts rank 0's token, and whether it ends the text, to every rank.
fn agree(group: &Group, drawn: Option<(u32, Option<Stop>)>) -> Result<(u32, Option<Stop>)> {
    let code = |end| match end {
        None => 0u64,
        Some(Stop::Token) => 1,
        Some(Stop::Length) => 2,
        Some(Stop::Caller) => 3,
    };
    let own = drawn.map(|(token, end)| Buffer::U64(vec![u64::from(token), code(end)]));
    match &*group.cp().broadcast(0, own)? {
        Buffer::U64(message) if message.len() == 2 => {
            let end = match message[1] {
                0 => None,
                1 => Some(Stop::Token),
                2 => Some(Stop::Length),
                _ => Some(Stop::Caller),
            };
            Ok((message[0] as u32, end))
        }
        _ => Err(unexpected(group, "the next token", 0)),
    }
}

fn unexpected(group: &Group, what: &str, from: usize) -> Error {
    let problem = format!("rank {from} sent another kind of message");
    ringspan::Error::Communicator { rank: group.rank(), operation: what.to_owned(), problem }.into()
}
