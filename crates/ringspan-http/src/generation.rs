//! Runs requests on the engine, and decodes their tokens to text that no later token can change.

use crate::app::{App, Target};
use crate::error::{ApiError, Result};
use crate::sampling::Sampling;
use crate::vocabulary::Vocabulary;
use ringspan_serve::engine::request::{Event, Events, FinishReason, Pooling, Request, TokenLogprobs};
use ringspan_serve::{Detokenize, TextStream};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;

/// Number of chunks that wait for a client that reads slowly.
const WAITING_CHUNKS: usize = 64;

/// A chunk of a choice's output. They come in this order: the prompt, texts, the finish or a failure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OutputChunk {
    /// Log-probabilities of the prompt's tokens; the first has none.
    Prompt(Vec<Option<TokenLogprobs>>),
    /// Text that is certain, and the tokens that it came from.
    Text {
        /// Whole characters; may be empty.
        text: String,
        /// The tokens, with log-probabilities if they were asked for.
        tokens: Vec<(u32, Option<TokenLogprobs>)>,
        /// The number of tokens generated so far, also of those whose text is held back.
        generated: usize,
    },
    /// The text has ended.
    Finish(Finish),
    /// The engine has failed: a sentence that says why.
    Failed(String),
}

/// How a text ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Finish {
    /// Whether it ended because it was as long as allowed.
    pub(crate) length: bool,
    /// The stop string that ended it.
    pub(crate) stop_string: Option<String>,
    /// The stop token that ended it, if it is not the model's own end token.
    pub(crate) stop_token: Option<u32>,
    /// Number of generated tokens, with the one that ended the text.
    pub(crate) tokens: usize,
    /// Number of the prompt's tokens whose keys and values were cached.
    pub(crate) cached_tokens: usize,
}

/// The output of all choices of a request, as it arrives.
#[derive(Debug)]
pub(crate) struct OutputStream {
    receiver: mpsc::Receiver<(usize, OutputChunk)>,
    /// Number of texts that have not ended.
    open: usize,
}

impl OutputStream {
    /// The next chunk, with the index of its choice; `None` once all choices have finished.
    ///
    /// # Errors
    /// A failure of the engine.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, OutputChunk)>> {
        if self.open == 0 {
            return Ok(None);
        }
        match self.receiver.recv().await {
            Some((_, OutputChunk::Failed(message))) => Err(ApiError::failed(message)),
            Some((index, OutputChunk::Finish(end))) => {
                self.open -= 1;
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
/// A prompt that is too long, a grammar that is impossible, a refusal of the engine; then no text is computed.
pub(crate) fn start(
    app: &Arc<App>,
    target: &Target,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
) -> Result<OutputStream> {
    let max_tokens: Vec<usize> =
        prompts.iter().map(|prompt| max_tokens(app, prompt, sampling)).collect::<Result<_>>()?;
    let mut queued = Vec::new();
    for (prompt, max_tokens) in prompts.iter().zip(max_tokens) {
        for choice in 0..sampling.n {
            let constraint = sampling.grammar.as_ref().map(|grammar| app.constraint(grammar)).transpose()?;
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
                constraint,
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
        tokio::spawn(async move {
            if let Err(error) = text.run(events, &sender).await {
                text.app.metrics.finished("error", text.target.arrived);
                // A client that has left needs no answer.
                let _ = sender.send((index, OutputChunk::Failed(error))).await;
            }
        });
    }
    Ok(OutputStream { receiver, open })
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
    while let Some(event) = events.recv().await {
        match event {
            Event::Embedding(values) => vector = Some(values),
            Event::Finished { .. } => break,
            Event::Failed(message) => return Err(ApiError::failed(message)),
            Event::Started { .. } | Event::Prompt(_) | Event::Token(..) => {}
        }
    }
    vector.ok_or_else(|| ApiError::failed("the engine ended without a vector"))
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
        Some(asked) if asked > left => return Err(too_long(asked)),
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
    async fn run(
        &self,
        mut events: Events,
        sender: &mpsc::Sender<(usize, OutputChunk)>,
    ) -> std::result::Result<(), String> {
        let vocabulary = &self.app.vocabulary;
        let decoder = vocabulary.decoder(self.sampling.skip_special_tokens);
        let mut stream = DetokenizedOutput::new(self, vocabulary, &decoder)?;
        let mut clock = TokenClock { app: &self.app, arrived: self.target.arrived, last: None };
        let mut cached_tokens = 0;
        loop {
            let event = tokio::select! {
                // Dropping the events ends the request.
                () = sender.closed() => {
                    self.app.metrics.finished("abort", self.target.arrived);
                    return Ok(());
                }
                event = events.recv() => event.ok_or("the engine ended without an answer")?,
            };
            let part = match event {
                Event::Prompt(logprobs) => OutputChunk::Prompt(logprobs),
                Event::Started { cached_tokens: cached } => {
                    cached_tokens = cached;
                    continue;
                }
                Event::Embedding(_) => continue,
                Event::Failed(message) => return Err(message),
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
                self.app.metrics.finished("abort", self.target.arrived);
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

    async fn send_end(
        &self,
        sender: &mpsc::Sender<(usize, OutputChunk)>,
        rest: OutputChunk,
        end: Finish,
    ) -> std::result::Result<(), String> {
        self.app.metrics.finished(if end.length { "length" } else { "stop" }, self.target.arrived);
        // A client that has left needs no answer.
        let _ = sender.send((self.index, rest)).await;
        let _ = sender.send((self.index, OutputChunk::Finish(end))).await;
        Ok(())
    }
}

/// Text that is certain, with the tokens whose text has been released.
struct DetokenizedOutput<'a> {
    stream: TextStream<'a>,
    vocabulary: &'a Vocabulary,
    skip_special: bool,
    /// Whether the client asked for tokens.
    reports_tokens: bool,
    /// Tokens whose text is held back, with the byte of the text at which each begins.
    held: VecDeque<(usize, (u32, Option<TokenLogprobs>))>,
    /// Bytes of all tokens so far.
    bytes: usize,
    /// Bytes of the text that was released.
    released: usize,
    tokens: usize,
}

impl<'a> DetokenizedOutput<'a> {
    fn new(
        text: &'a RunningChoice,
        vocabulary: &'a Vocabulary,
        decoder: &'a dyn Detokenize,
    ) -> std::result::Result<Self, String> {
        let sampling = &text.sampling;
        let stream = TextStream::new(decoder, &text.prompt, &sampling.stop).map_err(|error| error.to_string())?;
        Ok(Self {
            stream,
            vocabulary,
            skip_special: sampling.skip_special_tokens,
            reports_tokens: sampling.logprobs.is_some() || sampling.return_token_ids,
            held: VecDeque::new(),
            bytes: 0,
            released: 0,
            tokens: 0,
        })
    }

    fn stopped(&self) -> bool {
        self.stream.stopped()
    }

    fn stop_string(&self) -> Option<String> {
        self.stream.stop_string().map(str::to_owned)
    }

    /// Adds a token; returns what became certain by it, if anything did.
    fn push(&mut self, token: u32, logprob: Option<TokenLogprobs>) -> std::result::Result<Option<OutputChunk>, String> {
        self.tokens += 1;
        if self.reports_tokens {
            self.held.push_back((self.bytes, (token, logprob)));
        }
        if !(self.skip_special && self.vocabulary.is_special(token)) {
            self.bytes += self.vocabulary.bytes(token).len();
        }
        let text = self.stream.push(token).map_err(|error| error.to_string())?;
        self.released += text.len();
        let tokens = self.release();
        Ok((!text.is_empty() || !tokens.is_empty()).then_some(OutputChunk::Text {
            text,
            tokens,
            generated: self.tokens,
        }))
    }

    /// Ends the text; returns what was held back.
    fn finish(&mut self) -> std::result::Result<OutputChunk, String> {
        let text = self.stream.finish().map_err(|error| error.to_string())?;
        self.released += text.len();
        let tokens = match self.stopped() {
            true => self.release(),
            false => self.held.drain(..).map(|(_, token)| token).collect(),
        };
        Ok(OutputChunk::Text { text, tokens, generated: self.tokens })
    }

    /// The tokens that begin in the released text. Those of a stop string begin after it.
    fn release(&mut self) -> Vec<(u32, Option<TokenLogprobs>)> {
        let begun = self.held.iter().take_while(|(start, _)| *start < self.released).count();
        self.held.drain(..begun).map(|(_, token)| token).collect()
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
