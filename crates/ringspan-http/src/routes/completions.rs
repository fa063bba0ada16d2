//! `POST /v1/completions`: texts and tokens that are continued, or scored by `echo` and `logprobs`.

use super::chat::{stop_reason, streaming};
use crate::app::{App, Target, now};
use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, token_ids};
use crate::generation::{self, OutputStream};
use crate::logprobs::{self, LegacyLogprobs};
use crate::output::{Finish, OutputChunk};
use crate::reply::{StreamUsage, Usage};
use crate::sampling::{MOST_LOGPROBS, Sampling};
use crate::sse;
use crate::vocabulary::Vocabulary;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use ringspan_serve::engine::request::TokenLogprobs;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Tokens of a text, if a request does not say.
const MAX_TOKENS: usize = 16;

/// A prompt: its tokens, and its text as it was sent.
pub(crate) struct Prompt {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// The text, if it was sent as text.
    pub(crate) text: Option<String>,
    /// Number of special tokens that were put before such a text; all others are a part of it.
    added: Option<usize>,
}

/// Reads a string, a list of strings, a list of token ids or a list of such lists. Texts get the special tokens that begin a text.
///
/// # Errors
/// Another form, or an empty list.
pub(crate) fn prompts(app: &App, field: &str, value: Value, special: bool) -> Result<Vec<Prompt>> {
    let wrong =
        || ApiError::field(field, "must be a string, a list of strings, a list of token ids, or a list of such lists");
    let text = |text: String| {
        let tokens = app.encode_prompt(&text)?;
        let own = tokens.len();
        let tokens = if special { app.special.begin(tokens) } else { tokens };
        Ok(Prompt { added: Some(tokens.len() - own), tokens, text: Some(text) })
    };
    let list = match value {
        Value::String(one) => return Ok(vec![text(one)?]),
        Value::Array(list) => list,
        _ => return Err(wrong()),
    };
    match list.first() {
        None => Err(ApiError::field(field, "must contain at least one prompt")),
        Some(Value::Number(_)) => {
            let tokens = token_ids(&list).ok_or_else(wrong)?;
            Ok(vec![Prompt { tokens, text: None, added: None }])
        }
        Some(_) => {
            let each = |value| match value {
                Value::String(one) => text(one),
                Value::Array(ids) => Ok(Prompt { tokens: token_ids(&ids).ok_or_else(wrong)?, text: None, added: None }),
                _ => Err(wrong()),
            };
            list.into_iter().map(each).collect()
        }
    }
}

struct CompletionRequest {
    target: Target,
    prompts: Vec<Prompt>,
    sampling: Sampling,
    echo: bool,
    /// Whether the client asked for `prompt_logprobs`; an echo needs them too, but does not report them.
    prompt_logprobs: bool,
    stream: bool,
    usage: StreamUsage,
}

impl CompletionRequest {
    fn read(app: &App, body: Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(body);
        let target = app.target(&mut fields)?.with_salt(&mut fields)?;
        let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
        let prompt = fields.value("prompt");
        let mut prompts = prompts(app, "prompt", fields.required("prompt", prompt)?, special)?;
        let mut sampling = Sampling::take(&app.defaults, &mut fields, app.vocabulary.size())?;
        sampling.max_tokens = Some(fields.count("max_tokens", 0)?.unwrap_or(MAX_TOKENS));
        sampling.logprobs = fields.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|logprobs| logprobs as usize);
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let prompt_logprobs = sampling.prompt_logprobs.is_some();
        if echo {
            // The prompt's tokens are reported as those of the text.
            sampling.prompt_logprobs = sampling.prompt_logprobs.max(sampling.logprobs);
            for prompt in &mut prompts {
                if prompt.text.is_none() {
                    prompt.text = Some(app.decode(&prompt.tokens, sampling.skip_special_tokens)?);
                }
            }
        }
        fields.only("suffix", &[json!("")], "texts are continued at their end")?;
        fields.only("best_of", &[json!(sampling.n)], "as many texts are computed as are returned; use n")?;
        fields.only("truncate_prompt_tokens", &[], "shorten the prompt yourself")?;
        let (stream, usage) = streaming(&mut fields)?;
        fields.finish()?;
        Ok(Self { target, prompts, sampling, echo, prompt_logprobs, stream, usage })
    }
}

pub(crate) async fn create(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let begin = move |app: &Arc<App>| {
        let request = CompletionRequest::read(app, body)?;
        let prompts: Vec<Vec<u32>> = request.prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
        let texts = generation::start(app, &request.target, &prompts, &request.sampling)?;
        Ok((request, texts))
    };
    let (request, texts) = app.compute(begin).await?;
    let prompt_tokens = request.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let count = request.prompts.len() * request.sampling.n;
    let choices = (0..count).map(|_| Choice::default()).collect();
    let usage = Usage { prompt_tokens, ..Usage::default() };
    let answer = Completion { id: app.id("cmpl-"), created: now(), app, request, choices, usage };
    match answer.request.stream {
        true => Ok(sse::stream(sse::openai_failure, |writer| answer.stream(texts, writer))),
        false => answer.whole(texts).await,
    }
}

struct Completion {
    app: Arc<App>,
    id: String,
    created: u64,
    request: CompletionRequest,
    choices: Vec<Choice>,
    usage: Usage,
}

/// A text that is not reported yet.
#[derive(Debug, Default)]
struct Choice {
    text: String,
    logprobs: LegacyLogprobs,
    tokens: Vec<u32>,
    prompt_logprobs: Value,
    end: Option<Finish>,
    /// Generated tokens so far, those that are reported already included.
    generated: usize,
    /// Whether the echo of the prompt is in the text.
    echoed: bool,
    /// Whether the prompt's tokens are reported already: a stream has them once.
    prompt_reported: bool,
}

impl Completion {
    /// Adds a part of a text to its choice; returns whether there is something to report.
    fn add(&mut self, index: usize, part: OutputChunk) -> Result<bool> {
        let prompt = &self.request.prompts[index / self.request.sampling.n];
        let choice = &mut self.choices[index];
        let vocabulary = &self.app.vocabulary;
        let with_logprobs = self.request.sampling.logprobs.is_some();
        let shows_special = !self.request.sampling.skip_special_tokens;
        if self.request.echo && !choice.echoed {
            choice.echoed = true;
            choice.text.push_str(prompt.text.as_deref().unwrap_or_default());
        }
        match part {
            OutputChunk::Prompt(all) => {
                if self.request.echo && with_logprobs {
                    for (index, (token, logprobs)) in prompt.tokens.iter().zip(&all).enumerate() {
                        // A text is repeated as it was sent, and tokens as they are decoded.
                        let decoded = shows_special || !vocabulary.is_special(*token);
                        let shown = prompt.added.map_or(decoded, |added| index >= added);
                        choice.logprobs.push(vocabulary, (*token, shown), logprobs.as_ref());
                    }
                }
                choice.prompt_logprobs = logprobs::prompt(vocabulary, &all);
                Ok(self.request.echo)
            }
            OutputChunk::Text { text, tokens, generated } => {
                choice.text.push_str(&text);
                choice.generated = generated;
                for (token, logprobs) in &tokens {
                    let shown = shows_special || !vocabulary.is_special(*token);
                    choice.push(vocabulary, (*token, shown), logprobs.as_ref());
                }
                Ok(!text.is_empty() || !tokens.is_empty())
            }
            OutputChunk::Finish(end) => {
                self.usage.add(&end);
                choice.generated = end.tokens;
                choice.end = Some(end);
                Ok(true)
            }
            OutputChunk::Failed(error) => Err(error),
        }
    }

    /// The text and tokens of a choice that are not reported yet.
    fn take(&mut self, index: usize) -> Value {
        let request = &self.request;
        let choice = &mut self.choices[index];
        let logprobs = match request.sampling.logprobs {
            Some(_) => choice.logprobs.take(),
            None => Value::Null,
        };
        let finish_reason = choice.end.as_ref().map(|end| if end.length { "length" } else { "stop" });
        let mut value = json!({"index": index, "text": std::mem::take(&mut choice.text), "logprobs": logprobs,
            "finish_reason": finish_reason, "stop_reason": choice.end.as_ref().map_or(Value::Null, stop_reason)});
        if request.prompt_logprobs {
            value["prompt_logprobs"] = choice.prompt_logprobs.take();
        }
        if request.sampling.return_token_ids {
            value["token_ids"] = std::mem::take(&mut choice.tokens).into();
            if !std::mem::replace(&mut choice.prompt_reported, true) {
                value["prompt_token_ids"] = request.prompts[index / request.sampling.n].tokens.clone().into();
            }
        }
        value
    }

    /// The usage of a choice so far.
    fn usage_of(&self, index: usize) -> Usage {
        let (prompt, choice) = (&self.request.prompts[index / self.request.sampling.n], &self.choices[index]);
        Usage { prompt_tokens: prompt.tokens.len(), completion_tokens: choice.generated, ..Usage::default() }
    }

    fn object(&self, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": "text_completion", "created": self.created, "model": self.request.target.model,
            "choices": choices})
    }

    async fn whole(mut self, mut texts: OutputStream) -> Result<Response> {
        while let Some((index, part)) = texts.next().await? {
            self.add(index, part)?;
        }
        let choices = (0..self.choices.len()).map(|index| self.take(index)).collect();
        let mut body = self.object(choices);
        body["usage"] = self.usage.to_json();
        Ok(Json(body).into_response())
    }

    async fn stream(mut self, mut texts: OutputStream, writer: sse::Writer) -> Result<()> {
        while let Some((index, part)) = texts.next().await? {
            if self.add(index, part)? {
                let choice = self.take(index);
                let mut chunk = self.object(vec![choice]);
                self.request.usage.write(&mut chunk, self.usage_of(index));
                writer.data(&chunk).await;
            }
        }
        if self.request.usage != StreamUsage::Never {
            let mut last = self.object(Vec::new());
            last["usage"] = self.usage.to_json();
            writer.data(&last).await;
        }
        writer.text(sse::DONE).await;
        Ok(())
    }
}

impl Choice {
    fn push(&mut self, vocabulary: &Vocabulary, (token, shown): (u32, bool), logprobs: Option<&TokenLogprobs>) {
        self.tokens.push(token);
        if logprobs.is_some() {
            self.logprobs.push(vocabulary, (token, shown), logprobs);
        }
    }
}
