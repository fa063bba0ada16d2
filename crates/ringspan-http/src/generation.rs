//! Runs requests on the engine.

use crate::app::{App, Target};
use crate::error::{ApiError, Result};
use crate::output::{DetokenizedOutput, Finish, OutputChunk};
use crate::sampling::Sampling;
use axum::http::StatusCode;
use ringspan_serve::engine::request::{Event, Events, FinishReason, Pooling, Request, TokenConstraint};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;

/// Number of chunks that wait for a client that reads slowly.
const WAITING_CHUNKS: usize = 64;

/// The output of all choices of a request, as it arrives.
#[derive(Debug)]
pub(crate) struct OutputStream {
    app: Arc<App>,
    receiver: mpsc::Receiver<(usize, OutputChunk)>,
    /// Number of texts that have not ended.
    open: usize,
    /// For each prompt, the number of its texts that have not ended, and the tokens of the longest that has.
    prompts: Vec<(usize, usize)>,
    /// Texts of each prompt.
    n: usize,
}

impl OutputStream {
    /// The next chunk, with the index of its choice; `None` once all choices have finished.
    ///
    /// # Errors
    /// A failure of the engine, or the end of the server.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, OutputChunk)>> {
        if self.open == 0 {
            return Ok(None);
        }
        match self.receiver.recv().await {
            Some((_, OutputChunk::Failed(error))) => Err(error),
            Some((index, OutputChunk::Finish(end))) => {
                self.open -= 1;
                let (open, longest) = &mut self.prompts[index / self.n];
                *open -= 1;
                *longest = end.tokens.max(*longest);
                if *open == 0 {
                    self.app.metrics.prompt_ended(self.n, *longest);
                }
                Ok(Some((index, OutputChunk::Finish(end))))
            }
            Some(part) => Ok(Some(part)),
            None => Err(ApiError::failed("the engine ended without an answer")),
        }
    }
}

/// Queues `n` texts for each prompt, and returns them: text `i * n + j` is the j-th text of prompt i.
///
/// # Errors
/// A prompt that is too long, more texts than may wait, a grammar that is impossible, a refusal of the engine; then no text is computed.
pub(crate) fn start(
    app: &Arc<App>,
    target: &Target,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
) -> Result<OutputStream> {
    let max_tokens: Vec<usize> =
        prompts.iter().map(|prompt| max_tokens(app, prompt, sampling)).collect::<Result<_>>()?;
    let (texts, most) = (prompts.len().saturating_mul(sampling.n), app.engine.limits().max_waiting);
    if texts > most {
        // They would be refused as too many at any time, so it would not help to try again.
        return Err(ApiError::invalid(format!(
            "the request asks for {texts} texts ({} prompts with n = {}), but at most {most} may wait for the engine",
            prompts.len(),
            sampling.n
        )));
    }
    let constraint = sampling.grammar.as_ref().map(|grammar| app.constraint(grammar)).transpose()?;
    let mut queued = Vec::new();
    for (prompt, &max_tokens) in prompts.iter().zip(&max_tokens) {
        for choice in 0..sampling.n {
            let request = Request {
                prompt: prompt.clone(),
                sampling: sampling.params_of(choice),
                max_tokens,
                min_tokens: sampling.min_tokens,
                stop_token_ids: stop_tokens(app, sampling),
                logprobs: sampling.logprobs,
                prompt_logprobs: sampling.prompt_logprobs,
                adapter: target.adapter.clone(),
                cache_salt: target.cache_salt.clone(),
                constraint: constraint.clone().map(|constraint| Box::new(constraint) as Box<dyn TokenConstraint>),
                embedding: None,
            };
            queued.push((prompt.clone(), app.engine.submit(request)?));
        }
    }
    let (sender, receiver) = mpsc::channel(WAITING_CHUNKS);
    let open = queued.len();
    for (index, (prompt, events)) in queued.into_iter().enumerate() {
        let text =
            RunningChoice { app: app.clone(), target: target.clone(), sampling: sampling.clone(), prompt, index };
        let sender = sender.clone();
        app.metrics.max_tokens(max_tokens[index / sampling.n]);
        tokio::spawn(async move {
            if let Err(error) = text.run(events, &sender).await {
                text.app.metrics.finished("error", text.target.arrived);
                // A client that has left needs no answer.
                let _ = sender.send((index, OutputChunk::Failed(error))).await;
            }
        });
    }
    let prompts = vec![(sampling.n, 0); prompts.len()];
    Ok(OutputStream { app: app.clone(), receiver, open, prompts, n: sampling.n })
}

/// The vector of a prompt, not normalized.
///
/// # Errors
/// A prompt that is too long, a refusal or a failure of the engine.
pub(crate) async fn embed(app: &Arc<App>, target: &Target, prompt: Vec<u32>, pooling: Pooling) -> Result<Vec<f32>> {
    max_tokens(app, &prompt, &Sampling { max_tokens: Some(0), ..Sampling::default() })?;
    let request = Request {
        adapter: target.adapter.clone(),
        cache_salt: target.cache_salt.clone(),
        embedding: Some(pooling),
        ..Request::new(prompt, 0)
    };
    let mut events = app.engine.submit(request)?;
    let mut vector = None;
    loop {
        let event = tokio::select! {
            () = app.requests_aborted() => return Err(aborted()),
            event = events.recv() => event,
        };
        let Some(event) = event else { break };
        match event {
            Event::Embedding(values) => vector = Some(values),
            Event::Finished { .. } => break,
            Event::Failed(message) => return Err(ApiError::failed(message)),
            Event::Started { .. } | Event::Prompt(_) | Event::Token(..) => {}
        }
    }
    vector.ok_or_else(|| ApiError::failed("the engine ended without a vector"))
}

/// The error of requests that run longer than an ending server waits.
fn aborted() -> ApiError {
    let message = "the server ends, and the time that requests had to finish is over";
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
}

/// The number of tokens that a text may have.
fn max_tokens(app: &App, prompt: &[u32], sampling: &Sampling) -> Result<usize> {
    let limits = app.engine.limits();
    let longest = limits.max_model_len;
    if prompt.is_empty() {
        return Err(ApiError::invalid("the prompt has no token; give at least one character to go on from"));
    }
    if let Some(token) = prompt.iter().find(|token| **token as usize >= limits.vocabulary) {
        return Err(ApiError::invalid(format!(
            "token {token} of the prompt is outside the vocabulary of {}",
            limits.vocabulary
        )));
    }
    let left = longest.saturating_sub(prompt.len());
    let too_long = |asked: usize| ApiError {
        code: Some("context_length_exceeded"),
        ..ApiError::invalid(format!(
            "the prompt has {} tokens and {asked} more may be generated, but the longest sequence has {longest} tokens",
            prompt.len()
        ))
    };
    let max_tokens = match sampling.max_tokens {
        Some(asked) if asked > left || prompt.len() > longest => return Err(too_long(asked)),
        Some(asked) => asked,
        None if left == 0 => return Err(too_long(1)),
        None => left,
    };
    if sampling.min_tokens > max_tokens {
        return Err(ApiError::field(
            "min_tokens",
            format!("is {}, which is more than the {max_tokens} tokens that a text may have", sampling.min_tokens),
        ));
    }
    Ok(max_tokens)
}

fn stop_tokens(app: &App, sampling: &Sampling) -> Vec<u32> {
    let own = if sampling.ignore_eos { &[][..] } else { &app.end_tokens[..] };
    own.iter().chain(&sampling.stop_token_ids).copied().collect()
}

/// One text that is being generated.
struct RunningChoice {
    app: Arc<App>,
    target: Target,
    sampling: Sampling,
    prompt: Vec<u32>,
    index: usize,
}

impl RunningChoice {
    /// Sends the parts of the text until it has ended or the client has disconnected.
    async fn run(&self, mut events: Events, sender: &mpsc::Sender<(usize, OutputChunk)>) -> Result<()> {
        let vocabulary = &self.app.vocabulary;
        let decoder = vocabulary.decoder(self.sampling.skip_special_tokens);
        let mut stream = DetokenizedOutput::new(&self.prompt, &self.sampling, vocabulary, &decoder)?;
        let mut clock = TokenClock { app: &self.app, arrived: self.target.arrived, last: None };
        let mut cached_tokens = 0;
        loop {
            let event = tokio::select! {
                // Dropping the events ends the request.
                () = sender.closed() => {
                    self.record_end("abort", stream.tokens);
                    return Ok(());
                }
                () = self.app.requests_aborted() => return Err(aborted()),
                event = events.recv() => event.ok_or_else(|| ApiError::failed("the engine ended without an answer"))?,
            };
            let part = match event {
                Event::Prompt(logprobs) => OutputChunk::Prompt(logprobs),
                Event::Started { cached_tokens: cached } => {
                    cached_tokens = cached;
                    continue;
                }
                Event::Embedding(_) => continue,
                Event::Failed(message) => return Err(ApiError::failed(message)),
                Event::Token(token, logprob) => {
                    clock.token();
                    match stream.push(token, logprob)? {
                        Some(part) => part,
                        None if !stream.stopped() => continue,
                        None => OutputChunk::Text { text: String::new(), tokens: Vec::new(), generated: stream.tokens },
                    }
                }
                Event::Finished { reason } => {
                    let rest = stream.finish()?;
                    let end = self.end(&stream, Some(reason), cached_tokens);
                    return self.send_end(sender, rest, end).await;
                }
            };
            if stream.stopped() {
                let end = self.end(&stream, None, cached_tokens);
                return self.send_end(sender, part, end).await;
            }
            if sender.send((self.index, part)).await.is_err() {
                self.record_end("abort", stream.tokens);
                return Ok(());
            }
        }
    }

    fn end(&self, stream: &DetokenizedOutput<'_>, engine: Option<FinishReason>, cached_tokens: usize) -> Finish {
        let stop_string = stream.stop_string();
        let (token, length) = match engine {
            Some(FinishReason::Stop { token }) => (token, false),
            Some(FinishReason::Length) => (None, stop_string.is_none()),
            None => (None, false),
        };
        Finish {
            length,
            stop_string,
            stop_token: token.filter(|token| !self.app.end_tokens.contains(token)),
            tokens: stream.tokens + usize::from(token.is_some()),
            cached_tokens,
        }
    }

    fn record_end(&self, reason: &'static str, generated: usize) {
        self.app.metrics.finished(reason, self.target.arrived);
        self.app.metrics.sizes(self.prompt.len(), generated);
    }

    async fn send_end(
        &self,
        sender: &mpsc::Sender<(usize, OutputChunk)>,
        rest: OutputChunk,
        end: Finish,
    ) -> Result<()> {
        self.record_end(if end.length { "length" } else { "stop" }, end.tokens);
        // A client that has left needs no answer.
        let _ = sender.send((self.index, rest)).await;
        let _ = sender.send((self.index, OutputChunk::Finish(end))).await;
        Ok(())
    }
}

/// Measures the time to the first token and between tokens.
struct TokenClock<'a> {
    app: &'a App,
    arrived: Instant,
    last: Option<Instant>,
}

impl TokenClock<'_> {
    fn token(&mut self) {
        let now = Instant::now();
        match self.last {
            None => self.app.metrics.first_token(now - self.arrived),
            Some(last) => self.app.metrics.next_token(now - last),
        }
        self.last = Some(now);
    }
}
