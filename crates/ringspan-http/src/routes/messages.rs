//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's interface.

use crate::app::{App, Target};
use crate::body::Body;
use crate::conversation::{Conversation, PromptEnd, ToolChoice, text_content};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::output::Finish;
use crate::reply::{Reply, ReplyPart, Usage};
use crate::routes::begin::{ConversationRequest, begin};
use crate::sampling::{Sampling, refuse_token_reports, stop_strings};
use crate::sse;
use crate::tools::{Parsed, check_parameters};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;

struct MessagesRequest {
    target: Target,
    conversation: Conversation,
    sampling: Sampling,
    stream: bool,
}

/// Takes the fields that say what the conversation is.
fn conversation(app: &App, fields: &mut Fields) -> Result<Conversation> {
    let mut messages = Vec::new();
    if let Some(system) = fields.value("system") {
        let text = text_content(system).map_err(|(at, problem)| ApiError::field(format!("system{at}"), problem))?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let list = fields.list("messages")?;
    for (index, message) in fields.required("messages", list)?.into_iter().enumerate() {
        messages.extend(read_message(message, &format!("messages[{index}]"))?);
    }
    let tools = fields.list("tools")?.unwrap_or_default();
    let tools = tools.into_iter().enumerate().map(tool).collect::<Result<_>>()?;
    let (choice, parallel_calls) = tool_choice(fields.fields("tool_choice")?)?;
    let mut variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(thinking) = fields.fields("thinking")? {
        set_thinking(app, thinking, &mut variables)?;
    }
    let messages = Conversation::read(messages)?;
    // The answer continues a text of the assistant at the end; calls of tools have no text to continue.
    let is_continued = |last: &Value| last["role"] == "assistant" && last["tool_calls"].is_null();
    let end = if messages.last().is_some_and(is_continued) { PromptEnd::FinalMessage } else { PromptEnd::default() };
    Ok(Conversation { messages, end, tools, choice, parallel_calls, variables })
}

/// Sets the variable by which templates switch thinking on and off as `thinking` asks. Where a model decides itself, nothing is set.
fn set_thinking(app: &App, mut thinking: Fields, variables: &mut Map<String, Value>) -> Result<()> {
    const VARIABLE: &str = "enable_thinking";
    let kind = thinking.string("type")?;
    // This is a target and no limit in Anthropic's interface, too; `max_tokens` limits an answer with its thoughts.
    thinking.count("budget_tokens", 1)?;
    let field = thinking.name("type");
    let enabled = match kind.as_deref() {
        None | Some("adaptive") => None,
        Some("enabled") => Some(true),
        Some("disabled") => Some(false),
        Some(other) => {
            return Err(ApiError::field(field, format!("must be enabled, disabled or adaptive, not {other}")));
        }
    };
    thinking.finish()?;
    let is_read = app.template.as_ref().is_some_and(|template| template.mentions(VARIABLE));
    match (enabled, is_read) {
        (Some(enabled), true) => match variables.insert(VARIABLE.into(), enabled.into()) {
            Some(other) if other != enabled => {
                Err(ApiError::field(field, format!("contradicts chat_template_kwargs.{VARIABLE}, which is {other}")))
            }
            _ => Ok(()),
        },
        (Some(true), false) => Err(ApiError::field(
            field,
            format!(
                "the model's chat template does not read `{VARIABLE}`, so it cannot be asked to think; possible are adaptive and disabled"
            ),
        )),
        (Some(false) | None, _) => Ok(()),
    }
}

/// The messages that a message of Anthropic's form stands for: results of tools are messages of their own.
fn read_message(message: Value, path: &str) -> Result<Vec<Value>> {
    let role = message["role"].as_str().unwrap_or_default().to_owned();
    if role != "user" && role != "assistant" {
        return Err(ApiError::field(format!("{path}.role"), "must be user or assistant"));
    }
    let blocks = match &message["content"] {
        Value::Array(blocks) => blocks,
        Value::String(_) => return Ok(vec![json!({"role": role, "content": message["content"]})]),
        _ => return Err(ApiError::field(format!("{path}.content"), "must be a string or a list of blocks")),
    };
    let (mut texts, mut calls, mut results) = (Vec::new(), Vec::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{path}.content[{index}]");
        match block["type"].as_str() {
            Some("text") => match block["text"].as_str() {
                Some(text) => texts.push(text.to_owned()),
                None => return Err(ApiError::field(format!("{at}.text"), "must be a string")),
            },
            Some("tool_use") => calls.push(json!({"id": block["id"], "type": "function",
                "function": {"name": block["name"], "arguments": block["input"]}})),
            Some("tool_result") => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => text_content(content.clone())
                        .map_err(|(field, problem)| ApiError::field(format!("{at}.content{field}"), problem))?,
                };
                results.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}));
            }
            // Reasoning of earlier answers is dropped; only the chat route passes it on to templates.
            Some("thinking" | "redacted_thinking") => {}
            Some(other) => {
                return Err(ApiError::field(
                    format!("{at}.type"),
                    format!("is {other}, but this model reads text alone"),
                ));
            }
            None => return Err(ApiError::field(format!("{at}.type"), "is required")),
        }
    }
    let mut messages = results;
    if !texts.is_empty() || !calls.is_empty() || messages.is_empty() {
        let mut own = json!({"role": role, "content": texts.join("\n")});
        if !calls.is_empty() {
            own["tool_calls"] = calls.into();
        }
        messages.push(own);
    }
    Ok(messages)
}

/// A tool in OpenAI's form.
fn tool((index, tool): (usize, Value)) -> Result<Value> {
    let path = format!("tools[{index}]");
    if tool.get("type").is_some_and(|kind| kind != "custom") {
        return Err(ApiError::field(
            path,
            format!("has the type {}; this server has no tools of its own", tool["type"]),
        ));
    }
    match (&tool["name"], &tool["input_schema"]) {
        (Value::String(name), schema @ Value::Object(_)) => {
            check_parameters(format!("{path}.input_schema"), schema)?;
            Ok(json!({"type": "function",
                "function": {"name": name, "description": tool["description"], "parameters": schema}}))
        }
        _ => Err(ApiError::field(path, "needs a `name` and an `input_schema`")),
    }
}

fn tool_choice(choice: Option<Fields>) -> Result<(ToolChoice, bool)> {
    let Some(mut fields) = choice else { return Ok((ToolChoice::Auto, true)) };
    let parallel = !fields.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let name = fields.string("name")?;
    let choice = match (fields.string("type")?.as_deref(), name) {
        (Some("auto"), None) => ToolChoice::Auto,
        (Some("any"), None) => ToolChoice::Required,
        (Some("none"), None) => ToolChoice::None,
        (Some("tool"), Some(name)) => ToolChoice::Named(name),
        _ => return Err(ApiError::field("tool_choice", "must be of type auto, any, none, or tool with a name")),
    };
    fields.finish()?;
    Ok((choice, parallel))
}

impl ConversationRequest for MessagesRequest {
    fn read(app: &App, body: Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(body);
        let target = app.target(&mut fields)?.with_salt(&mut fields)?;
        let conversation = conversation(app, &mut fields)?;
        let max_tokens = fields.count("max_tokens", 1)?;
        let max_tokens = fields.required("max_tokens", max_tokens)?;
        let stop = stop_strings(&mut fields, "stop_sequences")?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        fields.only("container", &[], "there are no containers")?;
        fields.only("mcp_servers", &[json!([])], "this server calls no others")?;
        fields.only("n", &[json!(1)], "a message has one answer")?;
        refuse_token_reports(&mut fields)?;
        let mut sampling = Sampling::take(&app.defaults, &mut fields, app.vocabulary.size())?;
        fields.finish()?;
        sampling.max_tokens = Some(max_tokens);
        sampling.stop.extend(stop);
        Ok(Self { target, conversation, sampling, stream })
    }

    fn prompt(&self) -> (&Target, &Conversation, &Sampling) {
        (&self.target, &self.conversation, &self.sampling)
    }
}

pub(crate) async fn create(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let (request, reply): (MessagesRequest, _) = begin(&app, body).await?;
    let stream = request.stream;
    let answer = MessageReply { id: app.id("msg_"), app, request };
    match stream {
        true => Ok(sse::stream(failure, |writer| answer.stream(reply, writer))),
        false => answer.whole(reply).await,
    }
}

pub(crate) async fn count_tokens(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let count = move |app: &Arc<App>| {
        let mut fields = Fields::new(body);
        app.target(&mut fields)?;
        let conversation = conversation(app, &mut fields)?;
        fields.finish()?;
        Ok(conversation.prompt(app)?.len())
    };
    let tokens = app.compute(count).await?;
    Ok(Json(json!({"input_tokens": tokens})).into_response())
}

fn failure(error: &ApiError) -> Vec<(Option<&'static str>, String)> {
    vec![(Some("error"), error.to_anthropic_json().to_string())]
}

struct MessageReply {
    app: Arc<App>,
    id: String,
    request: MessagesRequest,
}

impl MessageReply {
    fn message(&self, content: Vec<Value>, usage: Usage) -> Value {
        json!({"id": self.id, "type": "message", "role": "assistant", "model": self.request.target.model, "content": content,
            "stop_reason": null, "stop_sequence": null, "usage": usage_json(usage)})
    }

    async fn whole(self, mut reply: Reply) -> Result<Response> {
        let mut content: Vec<Value> = Vec::new();
        let mut stop = (Value::Null, Value::Null);
        while let Some((_, part)) = reply.next().await? {
            match part {
                ReplyPart::Prompt(_) => {}
                ReplyPart::Delta(said, _) => {
                    for part in said {
                        self.add(&mut content, part);
                    }
                }
                ReplyPart::Finish(end, called) => stop = stop_reason(&end, called),
            }
        }
        let mut message = self.message(content, reply.usage);
        (message["stop_reason"], message["stop_sequence"]) = stop;
        Ok(Json(message).into_response())
    }

    /// Adds a part to a message's blocks.
    fn add(&self, content: &mut Vec<Value>, part: Parsed) {
        match part {
            Parsed::Text(text) => match content.last_mut() {
                Some(Value::Object(block)) if block["type"] == "text" => {
                    let all = format!("{}{text}", block["text"].as_str().unwrap_or_default());
                    block.insert("text".into(), all.into());
                }
                _ => content.push(json!({"type": "text", "text": text})),
            },
            // `thinking` cannot be asked for, so that no client expects blocks of it.
            Parsed::Reasoning(_) => {}
            Parsed::Call(call) => {
                let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
                content
                    .push(json!({"type": "tool_use", "id": self.app.id("toolu_"), "name": call.name, "input": input}));
            }
        }
    }

    async fn stream(self, mut reply: Reply, writer: sse::Writer) -> Result<()> {
        let message = self.message(Vec::new(), reply.usage);
        writer.named("message_start", &json!({"type": "message_start", "message": message})).await;
        let mut blocks = Blocks { writer: &writer, next: 0, text_is_open: false };
        let mut stop = (Value::Null, Value::Null);
        while let Some((_, part)) = reply.next().await? {
            match part {
                ReplyPart::Prompt(_) => {}
                ReplyPart::Delta(said, _) => {
                    for part in said {
                        match part {
                            Parsed::Text(text) => blocks.text(&text).await,
                            Parsed::Reasoning(_) => {}
                            Parsed::Call(call) => {
                                blocks.close().await;
                                let block = json!({"type": "tool_use", "id": self.app.id("toolu_"), "name": call.name,
                                    "input": {}});
                                blocks.open(block).await;
                                blocks.delta(json!({"type": "input_json_delta", "partial_json": call.arguments})).await;
                                blocks.stop().await;
                            }
                        }
                    }
                }
                ReplyPart::Finish(end, called) => stop = stop_reason(&end, called),
            }
        }
        blocks.close().await;
        let delta = json!({"stop_reason": stop.0, "stop_sequence": stop.1});
        let end = json!({"type": "message_delta", "delta": delta, "usage": usage_json(reply.usage)});
        writer.named("message_delta", &end).await;
        writer.named("message_stop", &json!({"type": "message_stop"})).await;
        Ok(())
    }
}

/// The blocks of a streamed message.
struct Blocks<'a> {
    writer: &'a sse::Writer,
    /// Number of blocks that are closed.
    next: usize,
    text_is_open: bool,
}

impl Blocks<'_> {
    async fn open(&self, block: Value) {
        let event = json!({"type": "content_block_start", "index": self.next, "content_block": block});
        self.writer.named("content_block_start", &event).await;
    }

    async fn delta(&self, delta: Value) {
        let event = json!({"type": "content_block_delta", "index": self.next, "delta": delta});
        self.writer.named("content_block_delta", &event).await;
    }

    async fn stop(&mut self) {
        let event = json!({"type": "content_block_stop", "index": self.next});
        self.writer.named("content_block_stop", &event).await;
        self.next += 1;
    }

    async fn text(&mut self, text: &str) {
        if !self.text_is_open {
            self.open(json!({"type": "text", "text": ""})).await;
            self.text_is_open = true;
        }
        self.delta(json!({"type": "text_delta", "text": text})).await;
    }

    async fn close(&mut self) {
        if std::mem::take(&mut self.text_is_open) {
            self.stop().await;
        }
    }
}

/// Tokens in Anthropic's shape, in which cached tokens are no input tokens.
fn usage_json(usage: Usage) -> Value {
    let cached = usage.cached_tokens;
    json!({"input_tokens": usage.prompt_tokens - cached, "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached})
}

fn stop_reason(end: &Finish, called: bool) -> (Value, Value) {
    let reason = match (called, end.length, &end.stop_string) {
        (_, true, _) => "max_tokens",
        (true, ..) => "tool_use",
        (_, _, Some(_)) => "stop_sequence",
        _ => "end_turn",
    };
    (reason.into(), end.stop_string.as_deref().map_or(Value::Null, Value::from))
}
