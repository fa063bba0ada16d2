//! `POST /v1/chat/completions`.

use crate::app::{App, Target, now};
use crate::body::Body;
use crate::conversation::{self, Conversation, PromptEnd};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::output::Finish;
use crate::reply::{Reply, ReplyPart, StreamUsage, Usage};
use crate::routes::begin::{ConversationRequest, begin};
use crate::sampling::{MOST_LOGPROBS, Sampling};
use crate::tools::Parsed;
use crate::{logprobs, sse};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use ringspan_serve::engine::request::TokenLogprobs;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The fields of a request.
struct ChatRequest {
    target: Target,
    conversation: Conversation,
    sampling: Sampling,
    stream: bool,
    usage: StreamUsage,
}

impl ConversationRequest for ChatRequest {
    fn read(app: &App, body: Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(body);
        let target = app.target(&mut fields)?.with_salt(&mut fields)?;
        let messages = fields.list("messages")?;
        let messages = Conversation::read(fields.required("messages", messages)?)?;
        let mut sampling = Sampling::take(&app.defaults, &mut fields, app.vocabulary.size())?;
        let (max_tokens, newer) = (fields.count("max_tokens", 1)?, fields.count("max_completion_tokens", 1)?);
        sampling.max_tokens = newer.or(max_tokens).or(sampling.max_tokens);
        let alternatives = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
        sampling.logprobs = match (fields.boolean("logprobs")?, alternatives) {
            (Some(true), alternatives) => Some(alternatives.unwrap_or(0) as usize),
            (_, Some(alternatives)) if alternatives > 0 => {
                return Err(ApiError::field("top_logprobs", "needs logprobs: true"));
            }
            _ => None,
        };
        let conversation = Conversation {
            messages,
            tools: conversation::tools(fields.list("tools")?.unwrap_or_default())?,
            choice: conversation::tool_choice(fields.value("tool_choice"))?,
            parallel_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
            variables: conversation::variables(app, &mut fields)?,
            end: PromptEnd::take(&mut fields)?,
        };
        let (stream, usage) = streaming(&mut fields)?;
        fields.only("echo", &[json!(false)], "it belongs to /v1/completions")?;
        fields.only("add_special_tokens", &[json!(false)], "the template writes them")?;
        fields.only("modalities", &[json!(["text"])], "answers are text: leave it out, or send [\"text\"]")?;
        fields.only("functions", &[json!([])], "use tools")?;
        fields.only("function_call", &[], "use tool_choice")?;
        fields.finish()?;
        Ok(Self { target, conversation, sampling, stream, usage })
    }

    fn prompt(&self) -> (&Target, &Conversation, &Sampling) {
        (&self.target, &self.conversation, &self.sampling)
    }
}

/// Takes `stream` and `stream_options`; returns whether to stream, and when the stream reports the usage.
pub(crate) fn streaming(fields: &mut Fields) -> Result<(bool, StreamUsage)> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(mut options) = fields.fields("stream_options")? else { return Ok((stream, StreamUsage::Never)) };
    if !stream {
        return Err(ApiError::field("stream_options", "needs stream: true"));
    }
    let at_end = options.boolean("include_usage")?.unwrap_or(false);
    let in_each_chunk = options.boolean("continuous_usage_stats")?.unwrap_or(false);
    options.boolean("include_obfuscation")?;
    options.finish()?;
    let usage = match (at_end, in_each_chunk) {
        (true, true) => StreamUsage::InEachChunk,
        (true, false) => StreamUsage::AtEnd,
        (false, false) => StreamUsage::Never,
        (false, true) => {
            return Err(ApiError::field("stream_options.continuous_usage_stats", "needs include_usage: true"));
        }
    };
    Ok((stream, usage))
}

pub(crate) async fn create(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let (request, reply): (ChatRequest, _) = begin(&app, body).await?;
    let answer = ChatCompletion { id: app.id("chatcmpl-"), created: now(), app, request };
    match answer.request.stream {
        true => Ok(sse::stream(sse::openai_failure, |writer| answer.stream(reply, writer))),
        false => answer.whole(reply).await,
    }
}

struct ChatCompletion {
    app: Arc<App>,
    id: String,
    created: u64,
    request: ChatRequest,
}

/// A message as it grows.
#[derive(Debug, Default)]
struct Message {
    content: String,
    reasoning: String,
    calls: Vec<Value>,
    tokens: Vec<(u32, Option<TokenLogprobs>)>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
}

impl ChatCompletion {
    fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.request.target.model,
            "system_fingerprint": null, "choices": choices})
    }

    fn logprobs(&self, tokens: &[(u32, Option<TokenLogprobs>)]) -> Value {
        match self.request.sampling.logprobs {
            None => Value::Null,
            Some(_) => json!({"content": logprobs::chat(&self.app.vocabulary, tokens), "refusal": null}),
        }
    }

    async fn whole(self, mut reply: Reply) -> Result<Response> {
        let mut messages: Vec<Message> = (0..self.request.sampling.n).map(|_| Message::default()).collect();
        let mut prompt_logprobs = Value::Null;
        while let Some((index, part)) = reply.next().await? {
            let message = &mut messages[index];
            match part {
                ReplyPart::Prompt(all) => prompt_logprobs = logprobs::prompt(&self.app.vocabulary, &all),
                ReplyPart::Delta(said, tokens) => {
                    message.tokens.extend(tokens);
                    for part in said {
                        match part {
                            Parsed::Text(text) => message.content.push_str(&text),
                            Parsed::Reasoning(text) => message.reasoning.push_str(&text),
                            Parsed::Call(call) => {
                                message.calls.push(json!({"id": self.app.id("call_"), "type": "function",
                                "function": {"name": call.name, "arguments": call.arguments}}))
                            }
                        }
                    }
                }
                ReplyPart::Finish(end, called) => {
                    message.finish_reason = Some(finish_reason(&end, called));
                    message.stop_reason = stop_reason(&end);
                }
            }
        }
        let choices = messages.into_iter().enumerate().map(|(index, message)| {
            let content = if message.calls.is_empty() || !message.content.is_empty() {
                Value::from(message.content)
            } else {
                Value::Null
            };
            let mut said = json!({"role": self.request.conversation.role(), "content": content, "refusal": null});
            if !message.reasoning.is_empty() {
                said["reasoning_content"] = message.reasoning.into();
            }
            if !message.calls.is_empty() {
                said["tool_calls"] = message.calls.into();
            }
            let mut choice = json!({"index": index, "message": said, "logprobs": self.logprobs(&message.tokens),
                "finish_reason": message.finish_reason, "stop_reason": message.stop_reason});
            if self.request.sampling.return_token_ids {
                choice["token_ids"] = message.tokens.iter().map(|(token, _)| *token).collect();
            }
            choice
        });
        let mut body = self.object("chat.completion", choices.collect());
        body["usage"] = reply.usage.to_json();
        if self.request.sampling.prompt_logprobs.is_some() {
            body["prompt_logprobs"] = prompt_logprobs;
        }
        if self.request.sampling.return_token_ids {
            body["prompt_token_ids"] = reply.prompt.into();
        }
        Ok(Json(body).into_response())
    }

    /// A chunk of the stream; `usage` is that of its choice so far.
    fn chunk(&self, choices: Vec<Value>, usage: Usage) -> Value {
        let mut chunk = self.object("chat.completion.chunk", choices);
        self.request.usage.write(&mut chunk, usage);
        chunk
    }

    fn delta(&self, index: usize, delta: Value, tokens: &[(u32, Option<TokenLogprobs>)], usage: Usage) -> Value {
        let logprobs = if tokens.is_empty() { Value::Null } else { self.logprobs(tokens) };
        let mut choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null});
        if self.request.sampling.return_token_ids {
            choice["token_ids"] = tokens.iter().map(|(token, _)| *token).collect();
        }
        self.chunk(vec![choice], usage)
    }

    async fn stream(self, mut reply: Reply, writer: sse::Writer) -> Result<()> {
        let mut usage = vec![reply.usage; self.request.sampling.n];
        for (index, usage) in usage.iter().enumerate() {
            let role = self.request.conversation.role();
            let mut first = self.delta(index, json!({"role": role, "content": ""}), &[], *usage);
            if self.request.sampling.return_token_ids {
                first["prompt_token_ids"] = reply.prompt.clone().into();
            }
            writer.data(&first).await;
        }
        let mut calls = vec![0; self.request.sampling.n];
        while let Some((index, part)) = reply.next().await? {
            match part {
                ReplyPart::Prompt(all) => {
                    let mut chunk = self.chunk(Vec::new(), usage[index]);
                    chunk["prompt_logprobs"] = logprobs::prompt(&self.app.vocabulary, &all);
                    writer.data(&chunk).await;
                }
                ReplyPart::Delta(said, mut tokens) => {
                    usage[index].completion_tokens = reply.generated[index];
                    if said.is_empty() && !tokens.is_empty() {
                        writer.data(&self.delta(index, json!({}), &tokens, usage[index])).await;
                    }
                    for part in said {
                        let delta = match part {
                            Parsed::Text(text) => json!({"content": text}),
                            Parsed::Reasoning(text) => json!({"reasoning_content": text}),
                            Parsed::Call(call) => {
                                calls[index] += 1;
                                json!({"tool_calls": [{"index": calls[index] - 1, "id": self.app.id("call_"),
                                    "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]})
                            }
                        };
                        writer.data(&self.delta(index, delta, &std::mem::take(&mut tokens), usage[index])).await;
                    }
                }
                ReplyPart::Finish(end, called) => {
                    usage[index].completion_tokens = end.tokens;
                    let mut chunk = self.delta(index, json!({}), &[], usage[index]);
                    chunk["choices"][0]["finish_reason"] = finish_reason(&end, called).into();
                    chunk["choices"][0]["stop_reason"] = stop_reason(&end);
                    writer.data(&chunk).await;
                }
            }
        }
        if self.request.usage != StreamUsage::Never {
            let mut last = self.chunk(Vec::new(), reply.usage);
            last["usage"] = reply.usage.to_json();
            writer.data(&last).await;
        }
        writer.text(sse::DONE).await;
        Ok(())
    }
}

fn finish_reason(end: &Finish, called: bool) -> &'static str {
    match (called, end.length) {
        (_, true) => "length",
        (true, false) => "tool_calls",
        (false, false) => "stop",
    }
}

/// The stop string or token of the request that ended a text (a field of vLLM).
pub(crate) fn stop_reason(end: &Finish) -> Value {
    match (&end.stop_string, end.stop_token) {
        (Some(text), _) => text.as_str().into(),
        (None, Some(token)) => token.into(),
        (None, None) => Value::Null,
    }
}
