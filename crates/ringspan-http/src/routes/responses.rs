//! `POST /v1/responses`: OpenAI's newer interface. Responses are not stored, so each request brings its whole conversation.

use crate::app::{App, Target, now};
use crate::body::Body;
use crate::conversation::{self, Conversation, Reply, ReplyPart, Usage, text_content};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::sampling::{Sampling, response_format};
use crate::sse;
use crate::tools::Parsed;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;

struct Asked {
    target: Target,
    conversation: Conversation,
    sampling: Sampling,
    stream: bool,
    /// Fields of the request that the response repeats.
    repeated: Map<String, Value>,
}

impl Asked {
    fn read(app: &App, body: Map<String, Value>) -> Result<Self> {
        let repeated = repeated(&body);
        let mut fields = Fields::new(body);
        let target = app.target(&mut fields)?;
        let instructions = fields.string("instructions")?;
        let input = fields.value("input");
        let messages = messages(instructions, fields.required("input", input)?)?;
        let choice = conversation::tool_choice(fields.value("tool_choice"))?;
        let tools =
            fields.list("tools")?.unwrap_or_default().into_iter().enumerate().map(tool).collect::<Result<_>>()?;
        let parallel_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let grammar = match fields.fields("text")? {
            None => None,
            Some(mut text) => {
                let grammar = text.fields("format")?.map(response_format).transpose()?.flatten();
                text.only("verbosity", &[json!("medium")], "texts are as long as the model writes them")?;
                text.finish()?;
                grammar
            }
        };
        let max_tokens = fields.count("max_output_tokens", 1)?;
        let mut variables = conversation::variables(&mut fields)?;
        if let Some(mut reasoning) = fields.fields("reasoning")? {
            if let Some(effort) = reasoning.string("effort")? {
                variables.insert("reasoning_effort".into(), effort.into());
            }
            reasoning.only("summary", &[json!("auto")], "no summaries are made")?;
            reasoning.finish()?;
        }
        fields.only("previous_response_id", &[], "responses are not stored; send the whole conversation as `input`")?;
        fields.only("conversation", &[], "conversations are not stored; send the whole conversation as `input`")?;
        fields.only("background", &[json!(false)], "responses are not stored")?;
        fields.only("truncation", &[json!("disabled")], "a conversation that is too long is an error")?;
        fields.only("include", &[json!([])], "there is nothing further to include")?;
        fields.only("top_logprobs", &[json!(0)], "use /v1/chat/completions for log-probabilities")?;
        fields.only("n", &[json!(1)], "a response has one answer")?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        if let Some(mut options) = fields.fields("stream_options")? {
            options.boolean("include_obfuscation")?;
            options.finish()?;
        }
        let mut sampling = Sampling::take(&app.defaults, &mut fields, app.vocabulary.size())?;
        fields.finish()?;
        sampling.max_tokens = max_tokens.or(sampling.max_tokens);
        sampling.grammar = grammar.or(sampling.grammar);
        let conversation = Conversation { messages, tools, choice, parallel_calls, variables };
        Ok(Self { target, conversation, sampling, stream, repeated })
    }
}

/// The fields of a request that its response repeats, with OpenAI's defaults.
fn repeated(body: &Map<String, Value>) -> Map<String, Value> {
    let defaults = [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", Value::Null),
        ("truncation", json!("disabled")),
    ];
    let value = |(name, default): (&str, Value)| {
        let own = body.get(name).filter(|value| !value.is_null()).cloned();
        (name.to_owned(), own.unwrap_or(default))
    };
    let mut repeated: Map<String, Value> = defaults.into_iter().map(value).collect();
    repeated.insert("store".into(), false.into());
    repeated
}

/// The messages of `instructions` and `input`, which is a text or a list of items.
fn messages(instructions: Option<String>, input: Value) -> Result<Vec<Value>> {
    let mut messages: Vec<Value> =
        instructions.into_iter().map(|text| json!({"role": "system", "content": text})).collect();
    let items = match input {
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(items) => items,
        _ => return Err(ApiError::field("input", "must be a string or a list of items")),
    };
    for (index, item) in items.into_iter().enumerate() {
        let path = format!("input[{index}]");
        match item["type"].as_str() {
            None | Some("message") => {
                messages.push(json!({"role": item["role"], "content": item["content"]}));
            }
            Some("function_call") => {
                let call = json!({"id": item["call_id"], "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]}});
                // Calls that were made at once are one message.
                match messages.last_mut().and_then(|last| last.get_mut("tool_calls")).and_then(Value::as_array_mut) {
                    Some(calls) => calls.push(call),
                    None => messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
                }
            }
            Some("function_call_output") => {
                let output = text_content(item["output"].clone())
                    .map_err(|(field, problem)| ApiError::field(format!("{path}.output{field}"), problem))?;
                messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
            }
            // The thoughts of earlier answers are no part of what templates write.
            Some("reasoning") => {}
            Some(other) => {
                return Err(ApiError::field(format!("{path}.type"), format!("is {other}, which is not supported")));
            }
        }
    }
    Conversation::read(messages).map_err(|error| ApiError {
        param: Some("input".into()),
        message: error.message.replace("messages", "input"),
        ..error
    })
}

/// A tool in the form of chat completions, whose functions are objects of their own.
fn tool((index, tool): (usize, Value)) -> Result<Value> {
    let Value::Object(mut function) = tool else {
        return Err(ApiError::field(format!("tools[{index}]"), "must be an object"));
    };
    let kind = function.shift_remove("type");
    if kind != Some(json!("function")) {
        let message = "must be function; this server has no tools of its own";
        return Err(ApiError::field(format!("tools[{index}].type"), message));
    }
    function.shift_remove("strict");
    let tool = json!({"type": "function", "function": function});
    conversation::tools(vec![tool]).map(|mut tools| tools.remove(0))
}

pub(crate) async fn create(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let begin = move |app: &Arc<App>| {
        let asked = Asked::read(app, body)?;
        let reply = asked.conversation.start(app, &asked.target, &asked.sampling)?;
        Ok((asked, reply))
    };
    let (asked, reply) = app.work(begin).await?;
    let stream = asked.stream;
    let answer = Answer { id: app.id("resp_"), created: now(), app, asked, output: Vec::new(), message: None };
    match stream {
        true => Ok(sse::stream(failure, |writer| answer.stream(reply, Events { writer: Some(writer), number: 0 }))),
        false => Ok(Json(answer.run(reply, &mut Events { writer: None, number: 0 }).await?).into_response()),
    }
}

fn failure(error: &ApiError) -> Vec<(Option<&'static str>, String)> {
    let event = json!({"type": "error", "code": error.code.unwrap_or("server_error"), "message": error.message,
        "param": error.param, "sequence_number": 0});
    vec![(Some("error"), event.to_string())]
}

/// The numbered events of a response; without a writer, nobody hears them.
struct Events {
    writer: Option<sse::Writer>,
    number: usize,
}

impl Events {
    async fn say(&mut self, name: &str, mut event: Value) {
        let Some(writer) = &self.writer else { return };
        event["type"] = name.into();
        event["sequence_number"] = self.number.into();
        self.number += 1;
        writer.named(name, &event).await;
    }
}

struct Answer {
    app: Arc<App>,
    id: String,
    created: u64,
    asked: Asked,
    /// Items that are complete.
    output: Vec<Value>,
    /// The id and the text of the message that is being written.
    message: Option<(String, String)>,
}

impl Answer {
    fn object(&self, status: &str, usage: Option<Usage>) -> Value {
        let usage = usage.map(|usage| {
            json!({"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens_details": {"reasoning_tokens": 0}})
        });
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut object = json!({"id": self.id, "object": "response", "created_at": self.created, "status": status,
            "error": null, "incomplete_details": incomplete, "model": self.asked.target.model, "output": self.output,
            "usage": usage, "background": false});
        if let Some(object) = object.as_object_mut() {
            object.extend(self.asked.repeated.clone());
        }
        object
    }

    async fn stream(self, reply: Reply, mut events: Events) -> Result<()> {
        self.run(reply, &mut events).await.map(|_| ())
    }

    /// Writes the response, and says each step.
    async fn run(mut self, mut reply: Reply, events: &mut Events) -> Result<Value> {
        events.say("response.created", json!({"response": self.object("in_progress", None)})).await;
        events.say("response.in_progress", json!({"response": self.object("in_progress", None)})).await;
        let mut status = "completed";
        while let Some((_, part)) = reply.next().await? {
            match part {
                ReplyPart::Prompt(_) => {}
                ReplyPart::Said(said, _) => {
                    for part in said {
                        match part {
                            Parsed::Text(text) => self.text(text, events).await,
                            Parsed::Call(call) => {
                                self.end_message("completed", events).await;
                                self.call(&call.name, &call.arguments, events).await;
                            }
                        }
                    }
                }
                ReplyPart::End(end, _) => {
                    if end.length {
                        status = "incomplete";
                    }
                    if self.output.is_empty() {
                        // An answer has a message, even an empty one.
                        self.text(String::new(), events).await;
                    }
                    self.end_message(status, events).await;
                }
            }
        }
        let response = self.object(status, Some(reply.usage));
        let name = if status == "completed" { "response.completed" } else { "response.incomplete" };
        events.say(name, json!({"response": response})).await;
        Ok(response)
    }

    async fn text(&mut self, text: String, events: &mut Events) {
        let index = self.output.len();
        if self.message.is_none() {
            let id = self.app.id("msg_");
            let item =
                json!({"id": id, "type": "message", "role": "assistant", "status": "in_progress", "content": []});
            events.say("response.output_item.added", json!({"output_index": index, "item": item})).await;
            let part = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
            let added = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            events.say("response.content_part.added", added).await;
            self.message = Some((id, String::new()));
        }
        if let Some((id, all)) = &mut self.message
            && !text.is_empty()
        {
            all.push_str(&text);
            let delta =
                json!({"item_id": id, "output_index": index, "content_index": 0, "delta": text, "logprobs": []});
            events.say("response.output_text.delta", delta).await;
        }
    }

    async fn end_message(&mut self, status: &str, events: &mut Events) {
        let Some((id, text)) = self.message.take() else { return };
        let index = self.output.len();
        let at = json!({"item_id": id, "output_index": index, "content_index": 0, "logprobs": []});
        let mut done = at.clone();
        done["text"] = text.as_str().into();
        events.say("response.output_text.done", done).await;
        let part = json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
        let mut done = at;
        done["part"] = part.clone();
        events.say("response.content_part.done", done).await;
        let item = json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": [part]});
        events.say("response.output_item.done", json!({"output_index": index, "item": item})).await;
        self.output.push(item);
    }

    async fn call(&mut self, name: &str, arguments: &str, events: &mut Events) {
        let (id, call, index) = (self.app.id("fc_"), self.app.id("call_"), self.output.len());
        let item = |arguments: &str, status: &str| {
            json!({"id": id, "type": "function_call", "call_id": call, "name": name, "arguments": arguments,
                "status": status})
        };
        let added = json!({"output_index": index, "item": item("", "in_progress")});
        events.say("response.output_item.added", added).await;
        let delta = json!({"item_id": id, "output_index": index, "delta": arguments});
        events.say("response.function_call_arguments.delta", delta).await;
        let done = json!({"item_id": id, "output_index": index, "name": name, "arguments": arguments});
        events.say("response.function_call_arguments.done", done).await;
        let item = item(arguments, "completed");
        events.say("response.output_item.done", json!({"output_index": index, "item": item})).await;
        self.output.push(item);
    }
}
