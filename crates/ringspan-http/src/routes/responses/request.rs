//! The fields of a request for a response.

use super::items;
use crate::app::{App, Target};
use crate::conversation::{self, Conversation};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::routes::begin::ConversationRequest;
use crate::sampling::{Sampling, refuse_token_reports, response_format};
use crate::tools::check_function;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub(super) struct ResponseRequest {
    pub(super) target: Target,
    pub(super) conversation: Conversation,
    pub(super) sampling: Sampling,
    pub(super) stream: bool,
    /// Whether the client asks for the response later.
    pub(super) background: bool,
    /// The items that the model reads, with those of earlier responses; as JSON; `None` unless the response is stored.
    pub(super) stored_input: Option<Arc<str>>,
    /// Fields of the request that the response repeats.
    pub(super) repeated: Map<String, Value>,
}

impl ConversationRequest for ResponseRequest {
    fn read(app: &App, body: Map<String, Value>) -> Result<Self> {
        let mut repeated = repeated(&body);
        let mut fields = Fields::new(body);
        let target = app.target(&mut fields)?.with_salt(&mut fields)?;
        let instructions = fields.string("instructions")?;
        let input = fields.value("input");
        let mut input = items::parse_input(app, fields.required("input", input)?)?;
        if let Some(previous) = fields.string("previous_response_id")? {
            input.splice(0..0, items::of_previous(app, &previous)?);
        }
        let background = fields.boolean("background")?.unwrap_or(false);
        let store = fields.boolean("store")?;
        let is_stored = store.unwrap_or(true) && app.responses.is_enabled();
        if background && !is_stored {
            return Err(ApiError::field(
                "background",
                match app.responses.is_enabled() {
                    true => "a response in the background must be stored, and store is false",
                    false => {
                        "a response in the background must be stored, and this server stores none (--response-store 0)"
                    }
                },
            ));
        }
        repeated.insert("store".into(), is_stored.into());
        repeated.insert("background".into(), background.into());
        let stored_input = is_stored
            .then(|| serde_json::to_string(&input).map(Arc::from))
            .transpose()
            .map_err(|error| ApiError::failed(format!("the input cannot be stored: {error}")))?;
        let messages = items::messages(instructions, input)?;
        let choice = conversation::tool_choice(fields.value("tool_choice"))?;
        let tools =
            fields.list("tools")?.unwrap_or_default().into_iter().enumerate().map(tool).collect::<Result<_>>()?;
        let parallel_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let grammar = match fields.fields("text")? {
            None => None,
            Some(mut text) => {
                let format = text.fields("format")?;
                let grammar = format.map(|format| response_format(format, "schema")).transpose()?.flatten();
                text.only("verbosity", &[json!("medium")], "texts are as long as the model writes them")?;
                text.finish()?;
                grammar
            }
        };
        let max_tokens = fields.count("max_output_tokens", 1)?;
        let mut variables = conversation::variables(app, &mut fields)?;
        if let Some(mut reasoning) = fields.fields("reasoning")? {
            if let Some(effort) = reasoning.string("effort")? {
                conversation::set_effort(app, &mut variables, &reasoning.name("effort"), effort)?;
            }
            reasoning.only("summary", &[json!("auto")], "no summaries are made")?;
            reasoning.finish()?;
        }
        fields.only("conversation", &[], "use previous_response_id, or send the whole conversation as `input`")?;
        fields.only("truncation", &[json!("disabled")], "a conversation that is too long is an error")?;
        fields.only("include", &[json!([])], "there is nothing further to include")?;
        fields.only("top_logprobs", &[json!(0)], "use /v1/chat/completions for log-probabilities")?;
        fields.only("n", &[json!(1)], "a response has one answer")?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        if stream && background {
            return Err(ApiError::field(
                "stream",
                "a response in the background is not streamed: ask for it by its id",
            ));
        }
        if let Some(mut options) = fields.fields("stream_options")? {
            options.boolean("include_obfuscation")?;
            options.finish()?;
        }
        refuse_token_reports(&mut fields)?;
        let mut sampling = Sampling::take(&app.defaults, &mut fields, app.vocabulary.size())?;
        fields.finish()?;
        sampling.max_tokens = max_tokens.or(sampling.max_tokens);
        sampling.grammar = grammar.or(sampling.grammar);
        let conversation =
            Conversation { messages, tools, choice, parallel_calls, variables, ..Conversation::default() };
        Ok(Self { target, conversation, sampling, stream, background, stored_input, repeated })
    }

    fn prompt(&self) -> (&Target, &Conversation, &Sampling) {
        (&self.target, &self.conversation, &self.sampling)
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
    defaults.into_iter().map(value).collect()
}

/// A tool in the form of chat completions, whose functions are objects of their own.
fn tool((index, tool): (usize, Value)) -> Result<Value> {
    let path = format!("tools[{index}]");
    let Value::Object(mut function) = tool else {
        return Err(ApiError::field(path, "must be an object"));
    };
    let kind = function.shift_remove("type");
    if kind != Some(json!("function")) {
        let message = "must be function; this server has no tools of its own";
        return Err(ApiError::field(format!("{path}.type"), message));
    }
    function.shift_remove("strict");
    let function = Value::Object(function);
    check_function(&path, &function)?;
    Ok(json!({"type": "function", "function": function}))
}
