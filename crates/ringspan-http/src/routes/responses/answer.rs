//! A response while it is generated: its object, and the event of each step.

use super::request::ResponseRequest;
use crate::app::{App, now};
use crate::error::{ApiError, Result};
use crate::reply::{Reply, ReplyPart, Usage};
use crate::response_store::{NoRoom, ResponseStore, StoredResponse};
use crate::sse;
use crate::tools::Parsed;
use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// The numbered events of a response; without a writer, they are dropped.
#[derive(Default)]
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

pub(super) struct ModelResponse {
    app: Arc<App>,
    id: String,
    created: u64,
    model: String,
    /// The items that the model reads, for the store; `None` unless the finished answer is to be stored.
    stored_input: Option<Arc<str>>,
    /// Fields of the request that the response repeats.
    repeated: Map<String, Value>,
    /// Items that are complete.
    output: Vec<Value>,
    /// The id and the text of the message that is being written.
    message: Option<(String, String)>,
    /// The same of reasoning.
    reasoning: Option<(String, String)>,
    /// Tokens of reasoning so far.
    reasoning_tokens: usize,
}

impl ModelResponse {
    /// The answer to `request`; the conversation is dropped.
    pub(super) fn new(app: Arc<App>, request: ResponseRequest) -> Self {
        let ResponseRequest { target, stored_input, repeated, .. } = request;
        let (id, created, model) = (app.id("resp_"), now(), target.model);
        Self {
            app,
            id,
            created,
            model,
            stored_input,
            repeated,
            output: Vec::new(),
            message: None,
            reasoning: None,
            reasoning_tokens: 0,
        }
    }

    fn object(&self, status: &str, usage: Option<Usage>) -> Value {
        let usage = usage.map(|usage| {
            // What is not found in the cache is written to it, if there is one.
            let is_written = self.app.engine.limits().prefix_cache;
            let written = if is_written { usage.prompt_tokens.saturating_sub(usage.cached_tokens) } else { 0 };
            json!({"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens}})
        });
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut object = json!({"id": self.id, "object": "response", "created_at": self.created, "status": status,
            "error": null, "incomplete_details": incomplete, "model": self.model, "output": self.output,
            "usage": usage});
        if let Some(object) = object.as_object_mut() {
            object.extend(self.repeated.clone());
        }
        object
    }

    /// Writes the response as a stream of events.
    pub(super) async fn stream(self, reply: Reply, writer: sse::Writer) -> Result<()> {
        self.run(reply, &mut Events { writer: Some(writer), number: 0 }).await.map(|_| ())
    }

    /// The whole response.
    pub(super) async fn whole(self, reply: Reply) -> Result<Value> {
        self.run(reply, &mut Events::default()).await
    }

    /// Computes the response in the background, where its client finds it by its id; returns the unfinished response.
    ///
    /// # Errors
    /// No room among the stored responses; then nothing is computed.
    pub(super) fn in_background(mut self, reply: Reply) -> Result<Value> {
        let begun = self.object("in_progress", None);
        let (app, id) = (self.app.clone(), self.id.clone());
        let input = self.stored_input.take().unwrap_or_default();
        let stored = StoredResponse { input, response: begun.to_string().into() };
        let unwanted = app.responses.begin(&id, stored).map_err(refusal)?;
        tokio::spawn(async move { store_end(&app.responses, &id, unwanted, self.whole(reply)).await });
        Ok(begun)
    }

    /// Stores the response, if that was asked for, or writes into it that there was no room.
    fn store(&mut self, response: &mut Value) {
        let Some(input) = self.stored_input.take() else { return };
        let stored = StoredResponse { input, response: response.to_string().into() };
        if self.app.responses.insert(&self.id, stored).is_err() {
            response["store"] = false.into();
        }
    }

    /// Writes the response, and says each step.
    async fn run(mut self, mut reply: Reply, events: &mut Events) -> Result<Value> {
        events.say("response.created", json!({"response": self.object("in_progress", None)})).await;
        events.say("response.in_progress", json!({"response": self.object("in_progress", None)})).await;
        let (mut status, mut generated) = ("completed", 0);
        while let Some((_, part)) = reply.next().await? {
            match part {
                ReplyPart::Prompt(_) => {}
                ReplyPart::Delta(said, _) => {
                    // Tokens whose text is held back count with the text that comes next. Where reasoning ends, a few may belong to what
                    // follows.
                    if !said.is_empty() {
                        let before = std::mem::replace(&mut generated, reply.generated.first().copied().unwrap_or(0));
                        let is_reasoning = said.iter().any(|part| matches!(part, Parsed::Reasoning(_)));
                        self.reasoning_tokens += if is_reasoning { generated - before } else { 0 };
                    }
                    for part in said {
                        match part {
                            Parsed::Text(text) => {
                                self.end_reasoning("completed", events).await;
                                self.text(text, events).await;
                            }
                            Parsed::Reasoning(text) => {
                                self.end_message("completed", events).await;
                                self.think(&text, events).await;
                            }
                            Parsed::Call(call) => {
                                self.end_reasoning("completed", events).await;
                                self.end_message("completed", events).await;
                                self.call(&call.name, &call.arguments, events).await;
                            }
                        }
                    }
                }
                ReplyPart::Finish(end, _) => {
                    if end.length {
                        status = "incomplete";
                    }
                    self.end_reasoning(status, events).await;
                    if self.output.is_empty() {
                        // An answer has a message, even an empty one.
                        self.text(String::new(), events).await;
                    }
                    self.end_message(status, events).await;
                }
            }
        }
        let mut response = self.object(status, Some(reply.usage));
        // Before the client hears of the end, since it may ask for the response at once.
        self.store(&mut response);
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

    async fn think(&mut self, text: &str, events: &mut Events) {
        let index = self.output.len();
        if self.reasoning.is_none() {
            let id = self.app.id("rs_");
            let item = json!({"id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []});
            events.say("response.output_item.added", json!({"output_index": index, "item": item})).await;
            self.reasoning = Some((id, String::new()));
        }
        if let Some((id, all)) = &mut self.reasoning {
            all.push_str(text);
            let delta = json!({"item_id": id, "output_index": index, "content_index": 0, "delta": text});
            events.say("response.reasoning_text.delta", delta).await;
        }
    }

    async fn end_reasoning(&mut self, status: &str, events: &mut Events) {
        let Some((id, text)) = self.reasoning.take() else { return };
        let index = self.output.len();
        let done = json!({"item_id": id, "output_index": index, "content_index": 0, "text": text});
        events.say("response.reasoning_text.done", done).await;
        let part = json!({"type": "reasoning_text", "text": text});
        let item = json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": [part]});
        events.say("response.output_item.done", json!({"output_index": index, "item": item})).await;
        self.output.push(item);
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

/// Why a response in the background is not begun.
fn refusal(no_room: NoRoom) -> ApiError {
    match no_room {
        NoRoom::TooLarge { .. } => ApiError::field("background", no_room.to_string()),
        NoRoom::Taken { .. } | NoRoom::TooMany { .. } => ApiError {
            code: Some("rate_limit_exceeded"),
            param: Some("background".into()),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, no_room.to_string())
        },
    }
}

/// Computes a response that is in the store as begun, unless it is deleted, and stores its end. A response that fails, panics or
/// finds no room for its answer ends as failed.
async fn store_end(
    store: &ResponseStore,
    id: &str,
    unwanted: oneshot::Receiver<()>,
    whole: impl Future<Output = Result<Value>> + Send + 'static,
) {
    // A task of its own catches panics. Dropping it drops the reply, which ends its requests.
    let mut computed = JoinSet::new();
    computed.spawn(whole);
    let ended = tokio::select! {
        _ = unwanted => return,
        ended = computed.join_next() => ended,
    };
    let problem = match ended {
        Some(Ok(Ok(response))) => match store.end(id, response.to_string()) {
            Ok(()) => return,
            Err(no_room) => no_room.to_string(),
        },
        Some(Ok(Err(error))) => error.message,
        Some(Err(_)) | None => "the server has failed on this response".to_owned(),
    };
    let Some(begun) = store.get(id) else { return };
    let mut failed: Value = serde_json::from_str(&begun.response).unwrap_or_default();
    failed["status"] = "failed".into();
    failed["error"] = json!({"code": "server_error", "message": problem});
    if store.end(id, failed.to_string()).is_err() {
        // The problem is too long for the room that is left.
        failed["error"]["message"] = "the response has failed, and there is no room to say why".into();
        // This message fits into what the store keeps for ends.
        let _ = store.end(id, failed.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The status and the problem that the store has after a response was computed.
    fn stored_end(
        store: &ResponseStore,
        whole: impl Future<Output = Result<Value>> + Send + 'static,
    ) -> (Value, String) {
        let begun = json!({"id": "a", "status": "in_progress", "error": null}).to_string();
        let unwanted = store.begin("a", StoredResponse { input: "[]".into(), response: begun.into() }).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(store_end(store, "a", unwanted, whole));
        let response: Value = serde_json::from_str(&store.get("a").unwrap().response).unwrap();
        assert!(store.delete("a"));
        (response["status"].clone(), response["error"]["message"].as_str().unwrap_or_default().to_owned())
    }

    #[test]
    fn a_response_in_the_background_always_ends() {
        // One at a time: each begins only if the one before has left its place.
        let store = ResponseStore::new(2000, 1);
        let completed = |text: String| async move { Ok(json!({"status": "completed", "text": text})) };
        assert_eq!(stored_end(&store, completed("short".into())), (json!("completed"), String::new()));
        let (status, problem) = stored_end(&store, async { panic!("a bug") });
        assert_eq!(status, "failed");
        assert!(problem.contains("the server has failed"), "{problem}");
        let (status, problem) = stored_end(&store, async { Err(ApiError::failed("rank 1 has died")) });
        assert_eq!((status, problem.as_str()), (json!("failed"), "rank 1 has died"));
        let (status, problem) = stored_end(&store, completed("long".repeat(1000)));
        assert_eq!(status, "failed");
        assert!(problem.contains("2000 bytes"), "{problem}");
        let (status, problem) = stored_end(&store, async { Err(ApiError::failed("long".repeat(1000))) });
        assert_eq!(status, "failed");
        assert!(problem.contains("no room to say why"), "{problem}");
    }
}
