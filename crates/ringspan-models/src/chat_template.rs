//! Chat templates: turn conversations into the text that a model reads.

mod json;
mod text;
mod time;

use crate::error::{Error, Result};
use crate::gguf;
use crate::model_source::ModelSource;
use crate::tokenizer_config::{self, TOKENIZER_CONFIG};
use minijinja::{Environment, ErrorKind, Value as TemplateValue};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Markers around the text of a `{% generation %}` block in a text of [`ChatTemplate::render_marked`]; data may not hold them.
pub const GENERATION_MARKERS: [char; 2] = ['\u{10fffe}', '\u{10ffff}'];

/// A marker after a message that is to be continued: it shows where the message ends in the rendered text. The space shows
/// whether the template trims texts.
const UNFINISHED: &str = "CONTINUE_FINAL_MESSAGE ";

/// The file of a template that has one of its own.
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// A model's chat template, as Hugging Face keeps it next to the tokenizer.
///
/// ```
/// use ringspan_models::chat_template::{ChatTemplate, Conversation};
/// use serde_json::{Map, Value, json};
///
/// let source = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}";
/// let template = ChatTemplate::parse(source.to_owned(), Map::new(), "chat_template.jinja".as_ref())?;
/// let conversation = Conversation {
///     messages: &[json!({"role": "user", "content": "Hello"})],
///     tools: &Value::Null,
///     add_generation_prompt: false,
///     variables: &Map::new(),
/// };
/// assert_eq!(template.render(&conversation)?, "<user>Hello");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Special tokens that the template may use, by name.
    tokens: Map<String, Value>,
    source: String,
    has_generation_blocks: bool,
    path: PathBuf,
}

/// The input of a template.
#[derive(Debug, Clone, Copy)]
pub struct Conversation<'a> {
    /// Objects with `role` and `content`.
    pub messages: &'a [Value],
    /// The functions that the assistant may call, in OpenAI's form; null for none.
    pub tools: &'a Value,
    /// Whether the text ends with what the template writes before an answer.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`; they win over special tokens of the same name.
    pub variables: &'a Map<String, Value>,
}

impl ChatTemplate {
    /// The template of a model: from the folder of an adapter or of the model itself, or from the GGUF file. `None` where there
    /// is none.
    ///
    /// # Errors
    /// Files that cannot be read, and a damaged template.
    pub fn of(source: &ModelSource) -> Result<Option<Self>> {
        for folder in source.folders() {
            if let Some(template) = Self::from_model_folder(folder)? {
                return Ok(Some(template));
            }
        }
        source.chat_template()?.map(|template| Self::from_gguf(template, source.base().path())).transpose()
    }

    /// The template in the folder of a model or of a tokenizer: `chat_template.jinja`, or else `chat_template` in
    /// `tokenizer_config.json`, which also names the special tokens. `None` where there is none.
    ///
    /// # Errors
    /// [`Error::Format`] for a damaged file, [`Error::Io`] when the system refuses.
    pub fn from_model_folder(folder: &Path) -> Result<Option<Self>> {
        let config_path = folder.join(TOKENIZER_CONFIG);
        let config = tokenizer_config::strings(&config_path)?;
        let path = folder.join(CHAT_TEMPLATE);
        if path.exists() {
            return Self::parse(read(&path)?, config, &path).map(Some);
        }
        let source = match config.get("chat_template") {
            Some(Value::String(source)) => source.clone(),
            // Some models have several templates, each with a name.
            Some(Value::Array(all)) => match all.iter().find(|one| one["name"] == "default") {
                Some(one) => one["template"].as_str().unwrap_or_default().to_owned(),
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        Self::parse(source, config, &config_path).map(Some)
    }

    /// The template that a model's own file (GGUF) holds.
    ///
    /// # Errors
    /// [`Error::Format`] for a damaged template.
    pub fn from_gguf(template: gguf::ChatTemplate, path: &Path) -> Result<Self> {
        Self::parse(template.source, template.tokens, path)
    }

    /// The template in a Jinja file; the tokenizer's folder, where there is one, names the special tokens.
    ///
    /// # Errors
    /// As [`Self::from_model_folder`].
    pub fn read(path: &Path, tokenizer: Option<&Path>) -> Result<Self> {
        let tokens = tokenizer.map(|folder| tokenizer_config::strings(&folder.join(TOKENIZER_CONFIG))).transpose()?;
        Self::parse(read(path)?, tokens.unwrap_or_default(), path)
    }

    /// Makes a template of its Jinja source, and of the texts of special tokens by their variables' names (`bos_token`); `path`
    /// is for messages.
    ///
    /// # Errors
    /// [`Error::Format`] for a damaged template.
    pub fn parse(source: String, tokens: Map<String, Value>, path: &Path) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<TemplateValue, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", time::strftime_now);
        environment.add_filter("tojson", json::tojson);
        environment.add_filter("string", |value: TemplateValue| text::text(&value));
        environment.set_formatter(|out, _, value| Ok(out.write_str(&text::text(value))?));
        // Python does not iterate over None, which templates rely on where they look for tools.
        environment.add_test("iterable", |value: TemplateValue| !value.is_none() && value.try_iter().is_ok());
        let (marked_source, has_generation_blocks) = mark_generation(&source);
        let broken = |e: minijinja::Error| Error::Format { path: path.into(), problem: error_text(&e) };
        environment.add_template_owned("chat", marked_source).map_err(broken)?;
        Ok(Self { environment, tokens, source, has_generation_blocks, path: path.into() })
    }

    /// The template's source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template's source has this variable's name.
    #[must_use]
    pub fn mentions(&self, variable: &str) -> bool {
        let of_name = |c: char| c.is_alphanumeric() || c == '_';
        !variable.is_empty()
            && self.source.match_indices(variable).any(|(at, _)| {
                !self.source[..at].ends_with(of_name) && !self.source[at + variable.len()..].starts_with(of_name)
            })
    }

    /// The texts of special tokens, by the template's variables for them.
    #[must_use]
    pub fn tokens(&self) -> &Map<String, Value> {
        &self.tokens
    }

    /// The file that holds the template.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the template itself marks the assistant's words, by `{% generation %}` blocks.
    #[must_use]
    pub fn has_generation_blocks(&self) -> bool {
        self.has_generation_blocks
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// The template's own error, in words.
    pub fn render(&self, conversation: &Conversation<'_>) -> std::result::Result<String, String> {
        let text = self.render_marked(conversation)?;
        Ok(if self.has_generation_blocks { text.replace(GENERATION_MARKERS, "") } else { text })
    }

    /// The text of a conversation up to the end of its last message's content, which an answer goes on from, as `transformers`
    /// writes it with `continue_final_message`. `add_generation_prompt` must be false.
    ///
    /// # Errors
    /// The template's own error, a last message without a text, and a template that does not write it.
    pub fn render_unfinished(&self, conversation: &Conversation<'_>) -> std::result::Result<String, String> {
        let mut messages = conversation.messages.to_vec();
        let content = messages.last_mut().and_then(|last| last.get_mut("content"));
        let Some((content, Value::String(text))) = content.map(|content| (content.clone(), content)) else {
            return Err("the last message has no text that could be continued".into());
        };
        text.push_str(UNFINISHED);
        let rendered = self.render(&Conversation { messages: &messages, ..*conversation })?;
        let said = content.as_str().unwrap_or_default().trim();
        let end = rendered.rfind(UNFINISHED.trim_end()).filter(|_| rendered.contains(said));
        let end =
            end.ok_or("the template does not write the last message's text as it is, so it cannot be continued")?;
        // A template that trims texts would have trimmed this one, too.
        let trims = !rendered[end..].starts_with(UNFINISHED);
        Ok(if trims { rendered[..end].trim_end().to_owned() } else { rendered[..end].to_owned() })
    }

    /// The text of a conversation, with [`GENERATION_MARKERS`] around each generation block.
    ///
    /// # Errors
    /// The template's own error, in words.
    pub fn render_marked(&self, conversation: &Conversation<'_>) -> std::result::Result<String, String> {
        let mut context = self.tokens.clone();
        context.insert("messages".into(), conversation.messages.into());
        context.insert("tools".into(), conversation.tools.clone());
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), conversation.add_generation_prompt.into());
        context.extend(conversation.variables.clone());
        let template = self.environment.get_template("chat").map_err(|e| error_text(&e))?;
        template.render(TemplateValue::from_serialize(&context)).map_err(|e| error_text(&e))
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_owned(), source })
}

/// The message of a template engine's error, with its causes.
fn error_text(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text.replace('\n', " ")
}

/// Replaces Hugging Face's `generation` tags by what this engine knows: a marker inside an empty condition, whose two tags keep
/// the trimming of white space on both sides as it was. Also returns whether there was any.
fn mark_generation(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut has_generation_blocks) = (source, false);
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}").map(|end| start + end + 2) else { break };
        let tag = &rest[start..end];
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']);
        let sign = |c: Option<char>| c.filter(|c| "-+".contains(*c)).map_or(String::new(), String::from);
        let (left, right) = (sign(tag[2..].chars().next()), sign(tag[..tag.len() - 2].chars().last()));
        out.push_str(&rest[..start]);
        match inner.trim() {
            "generation" => {
                has_generation_blocks = true;
                out.push_str(&format!("{{%{left} if true %}}{}{{% if true {right}%}}", GENERATION_MARKERS[0]));
            }
            "endgeneration" => {
                out.push_str(&format!("{{%{left} endif %}}{}{{% endif {right}%}}", GENERATION_MARKERS[1]))
            }
            _ => out.push_str(tag),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    (out, has_generation_blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn text(source: &str, variables: Value, add_generation_prompt: bool) -> std::result::Result<String, String> {
        let template = ChatTemplate::parse(source.into(), Map::new(), Path::new("t.jinja")).expect("a template");
        let messages = [json!({"role": "user", "content": "hi"})];
        let Value::Object(variables) = variables else { panic!("no object") };
        template.render(&Conversation {
            messages: &messages,
            tools: &Value::Null,
            add_generation_prompt,
            variables: &variables,
        })
    }

    #[test]
    fn a_caller_sets_variables_and_asks_for_the_beginning_of_an_answer() {
        let source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}\
                      {% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}";
        assert_eq!(text(source, json!({}), true), Ok("hi<a>".into()));
        assert_eq!(text(source, json!({"enable_thinking": false}), false), Ok("hi<think></think>".into()));
    }

    #[test]
    fn an_unfinished_message_has_no_end() {
        let unfinished = |source: &str, text: &str| {
            let template = ChatTemplate::parse(source.into(), Map::new(), Path::new("t.jinja")).expect("a template");
            let messages = [json!({"role": "user", "content": text}), json!({"role": "assistant", "content": text})];
            let (tools, variables) = (Value::Null, Map::new());
            template.render_unfinished(&Conversation {
                messages: &messages,
                tools: &tools,
                add_generation_prompt: false,
                variables: &variables,
            })
        };
        let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}";
        assert_eq!(unfinished(plain, " a\n"), Ok("<user> a\n</s>\n<assistant> a\n".into()));
        assert_eq!(unfinished(plain, ""), Ok("<user></s>\n<assistant>".into()));
        let trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}";
        assert_eq!(unfinished(trims, " a\n"), Ok("<user>a</s>\n<assistant>a".into()));
        let silent = "{% for m in messages %}{{ m.role }}{% endfor %}";
        assert!(unfinished(silent, "a").is_err_and(|error| error.contains("does not write")));
    }

    #[test]
    fn templates_call_what_hugging_face_offers() {
        // Excerpts in the shape of real templates, with what transformers renders of them.
        let today = || text("{{ strftime_now('%Y-%m-%d') }}", json!({}), false);
        let before = today();
        let date = text("{{- \"Current date: \" + strftime_now(\"%Y-%m-%d\") + \"\\n\" }}", json!({}), false);
        let dates = [before, today()].map(|day| day.map(|day| format!("Current date: {day}\n")));
        assert!(dates.contains(&date), "{date:?}: {dates:?}");
        let guarded =
            "{%- if strftime_now is defined %}{{ strftime_now(\"%d %b %Y\") | length }}{%- else %}26{%- endif %}";
        assert_eq!(text(guarded, json!({}), false), Ok("11".into()));
        let wrong = text("{{ strftime_now('%Y-%Q') }}", json!({}), false);
        assert!(wrong.is_err_and(|error| error.contains("%Y-%Q")));

        // Qwen3-Coder asks so for tools that are not there.
        let tools =
            "{%- if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}{{ 'ab' is iterable }}";
        assert_eq!(text(tools, json!({}), false), Ok("noneTrue".into()));
        let strings = "{% set c = '<think> a </think>\n\nb ' %}{{ c.split('</think>')[-1].lstrip('\n') }}|{{ c.strip() }}|\
                       {{ c.startswith('<think>') }}|{{ c.rstrip().endswith('b') }}|{{ c.replace(' ', '') }}";
        assert_eq!(
            text(strings, json!({}), false),
            Ok("b |<think> a </think>\n\nb|True|True|<think>a</think>\n\nb".into())
        );
        let mappings = "{% for k, v in {'a': 1, 'b': 'x'}.items() %}{{ k }}={{ v | tojson }} {% endfor %}{{ {'a': 1}.get('z', 2) }}";
        assert_eq!(text(mappings, json!({}), false), Ok("a=1 b=\"x\" 2".into()));
        let loops = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}";
        assert_eq!(text(loops, json!({}), false), Ok("02".into()));
        let state = "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}";
        assert_eq!(text(state, json!({}), false), Ok("1".into()));
        let raised = text("{{ raise_exception('Roles must alternate!') }}", json!({}), false);
        assert!(raised.is_err_and(|error| error.contains("Roles must alternate!")));
    }

    #[test]
    fn a_part_of_a_name_is_not_the_name() {
        let template =
            ChatTemplate::parse("{{ enable_thinking }}".into(), Map::new(), Path::new("t.jinja")).expect("one");
        assert!(template.mentions("enable_thinking") && !template.mentions("thinking") && !template.mentions(""));
    }

    #[test]
    fn generation_blocks_leave_no_markers() {
        let source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}";
        assert_eq!(text(source, json!({}), false), Ok("hi".into()));
    }
}
