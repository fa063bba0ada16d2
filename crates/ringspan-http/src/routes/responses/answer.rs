//! A response while it is written: its object, and the events that say each step.

use super::asked::Asked;
use crate::app::{App, now};
use crate::conversation::{Reply, ReplyPart, Usage};
use crate::error::Result;
use crate::response_store::StoredResponse;
use crate::sse;
use crate::tools::Parsed;
use serde_json::{Value, json};
use std::sync::Arc;

/// The numbered events of a response; without a writer, nobody hears them.
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

pub(super) struct Answer {
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
    pub(super) fn new(app: Arc<App>, asked: Asked) -> Self {
        Self { id: app.id("resp_"), created: now(), app, asked, output: Vec::new(), message: None }
    }

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
            "usage": usage});
        if let Some(object) = object.as_object_mut() {
            object.extend(self.asked.repeated.clone());
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

    /// Writes the response beside its client, which finds it by its id; returns what is there now.
    pub(super) fn in_background(self, reply: Reply) -> Value {
        let begun = self.object("in_progress", None);
        let (app, id) = (self.app.clone(), self.id.clone());
        let input = self.asked.stored_input.clone().unwrap_or_default();
        let unwanted = app.responses.begin(&id, StoredResponse { input, response: begun.to_string() });
        let mut failed = begun.clone();
        tokio::spawn(async move {
            let ended = tokio::select! {
                // Dropping the reply ends its requests.
                _ = unwanted => return,
                ended = self.whole(reply) => ended,
            };
            if let Err(error) = ended {
                failed["status"] = "failed".into();
                failed["error"] = json!({"code": "server_error", "message": error.message});
                app.responses.end(&id, failed.to_string());
            }
        });
        begun
    }

    /// Stores the response, if it was asked for.
    fn store(&self, response: &Value) {
        let Some(input) = &self.asked.stored_input else { return };
        let response = response.to_string();
        match self.asked.background {
            true => self.app.responses.end(&self.id, response),
            false => self.app.responses.insert(&self.id, StoredResponse { input: input.clone(), response }),
        }
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
        // Before the client hears of the end, since it may ask for the response at once.
        self.store(&response);
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
