//! Conversations: messages and tools become a prompt, and the model's text becomes messages and tool calls.

use crate::app::{App, Target};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, kind};
use crate::generation;
use crate::grammar::{Grammar, Syntax};
use crate::reply::Reply;
use crate::sampling::Sampling;
use crate::tools::{Definitions, ToolFormat, ToolMode, ToolParser, arguments_schema, calls_schema, check_function};
use ringspan_models::chat_template::Conversation as Rendered;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The variable of templates that says how long the model should think. Unlike other variables, it has fields of its own.
const EFFORT: &str = "reasoning_effort";

/// A conversation whose next message is asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conversation {
    /// Messages in OpenAI's form, as templates read them: contents are strings.
    pub(crate) messages: Vec<Value>,
    /// The functions in OpenAI's form; empty for none.
    pub(crate) tools: Vec<Value>,
    /// How the model may use them.
    pub(crate) choice: ToolChoice,
    /// Whether it may call several at once.
    pub(crate) parallel_calls: bool,
    /// Further variables of the template.
    pub(crate) variables: Map<String, Value>,
    /// Where the prompt ends.
    pub(crate) end: PromptEnd,
}

/// Where the prompt of a conversation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum PromptEnd {
    /// After what the template writes before an answer.
    #[default]
    GenerationPrompt,
    /// After the last message.
    Messages,
    /// After the text of the last message, which the answer continues.
    FinalMessage,
}

impl PromptEnd {
    /// Takes `add_generation_prompt` and `continue_final_message` (fields of Hugging Face and vLLM).
    ///
    /// # Errors
    /// Values of the wrong type, and both fields being true.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self> {
        let add = fields.boolean("add_generation_prompt")?;
        match (add, fields.boolean("continue_final_message")?.unwrap_or(false)) {
            (Some(true), true) => Err(ApiError::field(
                "continue_final_message",
                "contradicts add_generation_prompt: true, which begins a new message",
            )),
            (_, true) => Ok(Self::FinalMessage),
            (Some(false), false) => Ok(Self::Messages),
            (_, false) => Ok(Self::GenerationPrompt),
        }
    }
}

/// How the model may use its tools.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ToolChoice {
    /// Not at all.
    None,
    /// As it decides.
    #[default]
    Auto,
    /// It must call at least one.
    Required,
    /// It must call this one.
    Named(String),
}

impl Conversation {
    /// Reads messages in OpenAI's form.
    ///
    /// # Errors
    /// Messages of an unknown form, and contents other than text.
    pub(crate) fn read(messages: Vec<Value>) -> Result<Vec<Value>> {
        if messages.is_empty() {
            return Err(ApiError::field("messages", "must contain at least one message"));
        }
        let each = |(index, message)| {
            message_of(message)
                .map_err(|(field, problem)| ApiError::field(format!("messages[{index}]{field}"), problem))
        };
        messages.into_iter().enumerate().map(each).collect()
    }

    /// The role of the message that the answer is, or continues.
    pub(crate) fn role(&self) -> &str {
        let last = self.messages.last().and_then(|message| message["role"].as_str());
        match self.end {
            PromptEnd::GenerationPrompt => "assistant",
            PromptEnd::Messages | PromptEnd::FinalMessage => last.unwrap_or("assistant"),
        }
    }

    /// The tokens of the prompt.
    ///
    /// # Errors
    /// A model without a template, what the template itself raises, and tools that it does not know.
    pub(crate) fn prompt(&self, app: &App) -> Result<Vec<u32>> {
        app.encode_prompt(&self.text(app)?)
    }

    fn text(&self, app: &App) -> Result<String> {
        let Some(template) = &app.template else {
            return Err(ApiError::invalid(format!(
                "the model `{}` has no chat template, so it is not known how it reads conversations; use /v1/completions",
                app.name
            )));
        };
        if !self.tools.is_empty() && self.choice != ToolChoice::None && !template.mentions("tools") {
            return Err(ApiError::field("tools", "the model's chat template knows none, so it would ignore them"));
        }
        if let Some(name) = self.variables.keys().find(|name| !template.mentions(name)) {
            return Err(unread("chat_template_kwargs", name));
        }
        let tools = match self.tools.is_empty() || self.choice == ToolChoice::None {
            true => Value::Null,
            false => Value::from(self.tools.clone()),
        };
        let render = |messages: &[Value]| {
            let rendered = Rendered {
                messages,
                tools: &tools,
                add_generation_prompt: self.end == PromptEnd::GenerationPrompt,
                variables: &self.variables,
            };
            match self.end {
                PromptEnd::FinalMessage => template.render_unfinished(&rendered),
                PromptEnd::GenerationPrompt | PromptEnd::Messages => template.render(&rendered),
            }
        };
        let mut messages = match app.tool_format {
            Some(format) => format.messages(template.source(), &self.messages, &tools),
            None => self.messages.clone(),
        };
        let text = render(&messages).or_else(|error| match write_arguments(&mut messages) {
            // Some templates join the arguments of earlier calls to other texts, so that they fail on objects.
            true => render(&messages).map_err(|_| error),
            false => Err(error),
        });
        text.map_err(|error| ApiError::field("messages", format!("the chat template says: {error}")))
    }

    /// How the model may call tools in its text, and the grammar that enforces it.
    fn tool_mode(&self, app: &App) -> Result<(ToolMode, Option<Grammar>)> {
        let without_calls = match app.tool_format {
            Some(ToolFormat::Harmony) => ToolMode::Channels,
            _ => ToolMode::None,
        };
        match &self.choice {
            ToolChoice::None => Ok((without_calls, None)),
            _ if self.tools.is_empty() => match &self.choice {
                ToolChoice::Auto => Ok((without_calls, None)),
                _ => Err(ApiError::field("tool_choice", "asks for a tool, but there are no tools")),
            },
            ToolChoice::Auto => match app.tool_format {
                Some(format) => Ok((ToolMode::Auto(format), None)),
                None => Err(ApiError::field(
                    "tool_choice",
                    "it is not known in which form this model's chat template writes calls of tools, so `auto` is impossible; \
                     `required` and named functions work",
                )),
            },
            ToolChoice::Required => {
                let mut schema = calls_schema(&self.tools);
                if !self.parallel_calls {
                    schema["maxItems"] = json!(1);
                }
                Ok((ToolMode::Required, Some(Grammar::new("tools", Syntax::JsonSchema(schema)))))
            }
            ToolChoice::Named(name) => {
                let index = self.tools.iter().position(|tool| tool["function"]["name"] == name.as_str());
                let Some(index) = index else {
                    return Err(ApiError::field("tool_choice", format!("there is no tool `{name}`")));
                };
                let schema = Syntax::JsonSchema(arguments_schema(&self.tools[index]));
                Ok((ToolMode::Named(name.clone()), Some(Grammar::new(format!("tools[{index}]"), schema))))
            }
        }
    }

    /// Begins the answers.
    ///
    /// # Errors
    /// As for [`Conversation::prompt`], and those of [`generation::start`].
    pub(crate) fn start(&self, app: &Arc<App>, target: &Target, sampling: &Sampling) -> Result<Reply> {
        let prompt = self.prompt(app)?;
        let (mut mode, grammar) = self.tool_mode(app)?;
        let mut sampling = sampling.clone();
        if grammar.is_some() {
            if sampling.grammar.is_some() {
                return Err(ApiError::field(
                    "tool_choice",
                    "and response_format both say what the text must look like",
                ));
            }
            sampling.grammar = grammar;
        }
        // Who asks for special tokens without tools wants the text as the model writes it.
        if mode == ToolMode::Channels && !sampling.skip_special_tokens {
            mode = ToolMode::None;
        }
        let marks = match mode {
            ToolMode::Auto(format) => format.marks(),
            ToolMode::Channels => ToolFormat::Harmony.marks(),
            ToolMode::None | ToolMode::Required | ToolMode::Named(_) => &[],
        };
        if marks.iter().any(|mark| app.vocabulary.special_token(mark).is_some()) {
            sampling.skip_special_tokens = false;
        }
        let most = if self.parallel_calls { usize::MAX } else { 1 };
        let tools = Definitions::new(&self.tools);
        let parsers = (0..sampling.n).map(|_| ToolParser::new(mode.clone(), most, &tools)).collect();
        let texts = generation::start(app, target, std::slice::from_ref(&prompt), &sampling)?;
        Ok(Reply::new(prompt, texts, parsers))
    }
}

/// Reads a message for a template; errors have the rest of the field's name, and a sentence.
fn message_of(message: Value) -> std::result::Result<Value, (String, String)> {
    let Value::Object(mut message) = message else {
        return Err((String::new(), format!("must be an object, not {}", kind(&message))));
    };
    let role = match message.get("role") {
        // The name of system messages in newer models of OpenAI.
        Some(Value::String(role)) if role == "developer" => "system".to_owned(),
        Some(Value::String(role)) => role.clone(),
        _ => return Err((".role".into(), "must be a string".into())),
    };
    if !["system", "user", "assistant", "tool"].contains(&role.as_str()) {
        return Err((".role".into(), format!("must be system, developer, user, assistant or tool, not {role}")));
    }
    message.insert("role".into(), role.clone().into());
    let calls = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
    let content = match message.shift_remove("content") {
        None | Some(Value::Null) if role == "assistant" && calls => String::new(),
        None | Some(Value::Null) => return Err((".content".into(), "is required".into())),
        Some(content) => text_content(content).map_err(|(field, problem)| (format!(".content{field}"), problem))?,
    };
    message.insert("content".into(), content.into());
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for (index, call) in calls.iter_mut().enumerate() {
            // Templates read the arguments as an object, where clients send its text.
            let Some(arguments) = call.pointer_mut("/function/arguments") else {
                return Err((format!(".tool_calls[{index}]"), "needs function.name and function.arguments".into()));
            };
            if let Value::String(text) = arguments
                && let Ok(object @ Value::Object(_)) = serde_json::from_str::<Value>(text)
            {
                *arguments = object;
            }
        }
    }
    Ok(Value::Object(message))
}

/// Writes the arguments of earlier calls as JSON text, where they are objects; whether any were.
fn write_arguments(messages: &mut [Value]) -> bool {
    let calls = messages.iter_mut().filter_map(|message| message.get_mut("tool_calls")?.as_array_mut()).flatten();
    let mut were_objects = false;
    for arguments in calls.filter_map(|call| call.pointer_mut("/function/arguments")).filter(|one| one.is_object()) {
        *arguments = arguments.to_string().into();
        were_objects = true;
    }
    were_objects
}

/// The text of a content: a string, or a list of parts of text.
pub(crate) fn text_content(content: Value) -> std::result::Result<String, (String, String)> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err((String::new(), format!("must be a string or a list of parts, not {}", kind(&other)))),
    };
    let each = |(index, part): (usize, Value)| match (part["type"].as_str(), &part["text"]) {
        (Some("text" | "input_text" | "output_text"), Value::String(text)) => Ok(text.clone()),
        (Some("refusal"), _) if part["refusal"].is_string() => Ok(part["refusal"].as_str().unwrap_or_default().into()),
        (Some(other), _) => Err((format!("[{index}].type"), format!("is {other}, but this model reads text alone"))),
        (None, _) => Err((format!("[{index}].type"), "is required".into())),
    };
    let texts: Vec<String> = parts.into_iter().enumerate().map(each).collect::<std::result::Result<_, _>>()?;
    Ok(texts.join("\n"))
}

/// Reads tools in OpenAI's form.
///
/// # Errors
/// Tools that are no functions, and those of [`check_function`].
pub(crate) fn tools(list: Vec<Value>) -> Result<Vec<Value>> {
    for (index, tool) in list.iter().enumerate() {
        let path = format!("tools[{index}]");
        if tool["type"] != "function" {
            return Err(ApiError::field(path, "must have the type `function`; this server has no tools of its own"));
        }
        check_function(&format!("{path}.function"), &tool["function"])?;
    }
    Ok(list)
}

/// Reads `tool_choice` in the forms of OpenAI's two interfaces.
///
/// # Errors
/// Another form.
pub(crate) fn tool_choice(value: Option<Value>) -> Result<ToolChoice> {
    let name = |value: &Value| value.pointer("/function/name").or_else(|| value.get("name")).cloned();
    match value {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) if word == "auto" => Ok(ToolChoice::Auto),
        Some(Value::String(word)) if word == "none" => Ok(ToolChoice::None),
        Some(Value::String(word)) if word == "required" => Ok(ToolChoice::Required),
        Some(value) => match (value["type"].as_str(), name(&value)) {
            (Some("function"), Some(Value::String(name))) => Ok(ToolChoice::Named(name)),
            _ => Err(ApiError::field("tool_choice", "must be none, auto, required, or a function with its name")),
        },
    }
}

/// Takes `chat_template_kwargs`, and `reasoning_effort`, which some templates read.
///
/// # Errors
/// Values of the wrong type, and an effort that the template does not read.
pub(crate) fn variables(app: &App, fields: &mut Fields) -> Result<Map<String, Value>> {
    let mut variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    for own in ["messages", "tools", "add_generation_prompt", "continue_final_message"] {
        if variables.contains_key(own) {
            return Err(ApiError::field("chat_template_kwargs", format!("cannot replace `{own}`")));
        }
    }
    if let Some(effort) = fields.string(EFFORT)? {
        set_effort(app, &mut variables, EFFORT, effort)?;
    }
    Ok(variables)
}

/// Sets the effort that a request has at `field` as a variable of the template.
///
/// # Errors
/// A template that does not read it.
pub(crate) fn set_effort(app: &App, variables: &mut Map<String, Value>, field: &str, effort: String) -> Result<()> {
    if app.template.as_ref().is_some_and(|template| !template.mentions(EFFORT)) {
        return Err(unread(field, EFFORT));
    }
    variables.insert(EFFORT.into(), effort.into());
    Ok(())
}

/// The error of a field with a variable that the model's chat template does not read.
fn unread(field: &str, name: &str) -> ApiError {
    let message = format!("the model's chat template does not read `{name}`, so it would change nothing");
    ApiError::field(field, message)
}
