//! Tool calls in a model's text: each family of models writes them in its own format.

use serde_json::Value;

/// The form in which a model writes calls of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes and Qwen write.
    Hermes,
    /// `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{…}`, as Mistral's models write.
    Mistral,
    /// `{"name": …, "parameters": …}` and nothing else, as Llama 3 writes.
    Llama,
}

impl ToolFormat {
    /// The form that a chat template writes, found by what is in its source.
    pub(crate) fn of(template: &str) -> Option<Self> {
        if !template.contains("tools") {
            None
        } else if template.contains("<tool_call>") && !template.contains("<function=") {
            Some(Self::Hermes)
        } else if template.contains("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if template.contains("<|python_tag|>") || template.contains("\"parameters\": ") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// Whether the marks of calls may be special tokens, which texts otherwise leave out.
    pub(crate) fn has_special_marks(self) -> bool {
        matches!(self, Self::Mistral | Self::Llama)
    }
}

/// How the text of a request may contain tool calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolMode {
    /// The text is not searched for calls.
    None,
    /// The model decides between text and calls.
    Auto(ToolFormat),
    /// The text is a JSON list of calls, by grammar.
    Required,
    /// The text is the arguments of this function, by grammar.
    Named(String),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolCall {
    /// The function.
    pub(crate) name: String,
    /// Its arguments as JSON.
    pub(crate) arguments: String,
}

/// A parsed part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// Text for the user.
    Text(String),
    /// A complete call.
    Call(ToolCall),
}

/// Finds calls in a text that arrives in parts.
#[derive(Debug)]
pub(crate) struct ToolParser {
    mode: ToolMode,
    /// The longest list of calls that is asked for.
    most: usize,
    held: String,
    calls: usize,
}

const HERMES: [&str; 2] = ["<tool_call>", "</tool_call>"];
const MISTRAL: &str = "[TOOL_CALLS]";
const PYTHON_TAG: &str = "<|python_tag|>";

impl ToolParser {
    /// A parser that returns at most `most` calls.
    pub(crate) fn new(mode: ToolMode, most: usize) -> Self {
        Self { mode, most, held: String::new(), calls: 0 }
    }

    /// Adds text; returns what is certain.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Parsed> {
        if self.mode == ToolMode::None {
            return text_of(text.to_owned());
        }
        self.held.push_str(text);
        match &self.mode {
            ToolMode::Auto(ToolFormat::Hermes) => self.hermes(false),
            ToolMode::Auto(ToolFormat::Mistral) => self.text_before(MISTRAL),
            // A text that does not begin as a call is none.
            ToolMode::Auto(ToolFormat::Llama) => {
                let begun = self.held.trim_start();
                let may_be_call = begun.is_empty()
                    || begun.starts_with('{')
                    || begun.starts_with(PYTHON_TAG)
                    || PYTHON_TAG.starts_with(begun);
                if may_be_call {
                    return Vec::new();
                }
                self.mode = ToolMode::None;
                text_of(std::mem::take(&mut self.held))
            }
            _ => Vec::new(),
        }
    }

    /// Ends the text; returns what was held back.
    pub(crate) fn finish(&mut self) -> Vec<Parsed> {
        let mode = self.mode.clone();
        match mode {
            ToolMode::Auto(ToolFormat::Hermes) => self.hermes(true),
            ToolMode::Named(name) => {
                let arguments = std::mem::take(&mut self.held);
                self.admit(vec![ToolCall { name, arguments }])
            }
            ToolMode::None => Vec::new(),
            ToolMode::Required | ToolMode::Auto(_) => {
                let text = std::mem::take(&mut self.held);
                match calls(&text) {
                    Some(calls) if !calls.is_empty() => self.admit(calls),
                    _ => text_of(text),
                }
            }
        }
    }

    fn admit(&mut self, calls: Vec<ToolCall>) -> Vec<Parsed> {
        let left = self.most - self.calls;
        let admitted: Vec<Parsed> = calls.into_iter().take(left).map(Parsed::Call).collect();
        self.calls += admitted.len();
        admitted
    }

    /// Takes complete calls, and the text around them; white space between calls is none of it.
    fn hermes(&mut self, end: bool) -> Vec<Parsed> {
        let [open, close] = HERMES;
        let mut parsed = Vec::new();
        loop {
            let Some(start) = self.held.find(open) else {
                let certain = if end { self.held.len() } else { certain_before(&self.held, open) };
                let text: String = self.held.drain(..certain).collect();
                if self.calls == 0 || !text.trim().is_empty() {
                    parsed.extend(text_of(text));
                }
                return parsed;
            };
            let inner_start = start + open.len();
            let Some(inner_end) = self.held[inner_start..].find(close).map(|at| inner_start + at) else {
                if !end {
                    let text: String = self.held.drain(..start).collect();
                    parsed.extend(text_of(text).into_iter().filter(|_| self.calls == 0));
                    return parsed;
                }
                // A call whose end is missing may be complete nevertheless.
                self.held.push_str(close);
                continue;
            };
            let before: String = self.held[..start].to_owned();
            let call = calls(&self.held[inner_start..inner_end]);
            let whole: String = self.held.drain(..inner_end + close.len()).collect();
            match call {
                Some(calls) => {
                    let before = before.trim_end().to_owned();
                    parsed.extend(text_of(before));
                    parsed.extend(self.admit(calls));
                }
                None => parsed.extend(text_of(whole)),
            }
        }
    }

    /// Releases the text before `mark`; from the mark on, everything is held.
    fn text_before(&mut self, mark: &str) -> Vec<Parsed> {
        let certain = self.held.find(mark).unwrap_or_else(|| certain_before(&self.held, mark));
        text_of(self.held.drain(..certain).collect())
    }
}

fn text_of(text: String) -> Vec<Parsed> {
    if text.is_empty() { Vec::new() } else { vec![Parsed::Text(text)] }
}

/// Bytes of `text` that cannot be the beginning of `mark`.
fn certain_before(text: &str, mark: &str) -> usize {
    text.char_indices().map(|(at, _)| at).find(|at| mark.starts_with(&text[*at..])).unwrap_or(text.len())
}

/// The calls that a text consists of; `None` if it is something else.
fn calls(text: &str) -> Option<Vec<ToolCall>> {
    let text = text.trim();
    let text = text.strip_prefix(MISTRAL).or_else(|| text.strip_prefix(PYTHON_TAG)).unwrap_or(text).trim();
    if let Some(calls) = named_arguments(text) {
        return Some(calls);
    }
    let mut calls = Vec::new();
    // Llama separates calls by semicolons.
    let mut rest = text;
    while !rest.is_empty() {
        let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let value = stream.next()?.ok()?;
        rest = rest[stream.byte_offset()..].trim_start_matches([';', ',']).trim_start();
        match value {
            Value::Array(list) => calls.extend(list.iter().map(call).collect::<Option<Vec<_>>>()?),
            one => calls.push(call(&one)?),
        }
    }
    Some(calls)
}

/// Calls as newer models of Mistral write them: `name[ARGS]{…}`, separated by `[TOOL_CALLS]`.
fn named_arguments(text: &str) -> Option<Vec<ToolCall>> {
    let each = |part: &str| {
        let (name, arguments) = part.split_once("[ARGS]")?;
        serde_json::from_str::<Value>(arguments.trim()).ok()?;
        Some(ToolCall { name: name.trim().to_owned(), arguments: arguments.trim().to_owned() })
    };
    text.split(MISTRAL).map(each).collect()
}

fn call(value: &Value) -> Option<ToolCall> {
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = value.get("arguments").or_else(|| value.get("parameters"));
    let arguments = match arguments {
        None => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => return None,
    };
    Some(ToolCall { name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes a text character by character, and joins the parts of text.
    fn parse(mode: ToolMode, text: &str) -> Vec<Parsed> {
        let mut parser = ToolParser::new(mode, usize::MAX);
        let mut all: Vec<Parsed> = Vec::new();
        let parts: Vec<Parsed> = text.chars().flat_map(|c| parser.push(&c.to_string())).collect();
        for part in parts.into_iter().chain(parser.finish()) {
            match (all.last_mut(), part) {
                (Some(Parsed::Text(text)), Parsed::Text(more)) => text.push_str(&more),
                (_, part) => all.push(part),
            }
        }
        all
    }

    fn called(name: &str, arguments: &str) -> Parsed {
        Parsed::Call(ToolCall { name: name.into(), arguments: arguments.into() })
    }

    #[test]
    fn hermes_calls_stand_between_tags() {
        let mode = || ToolMode::Auto(ToolFormat::Hermes);
        let two = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>\n\
                   {\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
        let said = parse(mode(), two);
        assert_eq!(said[0], Parsed::Text("Let me see.\n".into()));
        assert_eq!(said[1..], [called("f", "{\"x\":1}"), called("g", "{}")]);
        assert_eq!(parse(mode(), "a < b <tool"), [Parsed::Text("a < b <tool".into())]);
        let broken = "<tool_call>{\"name\": </tool_call>";
        assert_eq!(parse(mode(), broken), [Parsed::Text(broken.into())]);
        assert_eq!(parse(mode(), "<tool_call>{\"name\": \"f\"}"), [called("f", "{}")], "the end is missing");
    }

    #[test]
    fn mistral_writes_lists_or_names_with_arguments() {
        let mode = || ToolMode::Auto(ToolFormat::Mistral);
        let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": [1]}}, {\"name\": \"g\", \"arguments\": {}}]";
        assert_eq!(parse(mode(), list), [called("f", "{\"x\":[1]}"), called("g", "{}")]);
        let named = "hm[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[ARGS]{}";
        assert_eq!(parse(mode(), named), [Parsed::Text("hm".into()), called("f", "{\"x\": 1}"), called("g", "{}")]);
        assert_eq!(parse(mode(), "[TOOL] box"), [Parsed::Text("[TOOL] box".into())]);
    }

    #[test]
    fn llama_writes_a_call_or_a_text() {
        let mode = || ToolMode::Auto(ToolFormat::Llama);
        let call =
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": \"y\"}}; {\"name\": \"g\", \"parameters\": {}}";
        assert_eq!(parse(mode(), call), [called("f", "{\"x\":\"y\"}"), called("g", "{}")]);
        assert_eq!(parse(mode(), "{\"x\": 1}"), [Parsed::Text("{\"x\": 1}".into())]);
        assert_eq!(parse(mode(), "Hi {"), [Parsed::Text("Hi {".into())]);
    }

    #[test]
    fn grammars_make_calls_of_whole_texts() {
        assert_eq!(parse(ToolMode::Named("f".into()), "{\"x\":1}"), [called("f", "{\"x\":1}")]);
        let list = "[{\"name\": \"f\", \"parameters\": {}}]";
        assert_eq!(parse(ToolMode::Required, list), [called("f", "{}")]);
        assert_eq!(parse(ToolMode::None, "<tool_call>"), [Parsed::Text("<tool_call>".into())]);
    }

    #[test]
    fn calls_beyond_the_number_asked_for_are_dropped() {
        let mut parser = ToolParser::new(ToolMode::Required, 1);
        parser.push("[{\"name\": \"f\"}, {\"name\": \"g\"}]");
        assert_eq!(parser.finish(), [called("f", "{}")]);
    }

    #[test]
    fn templates_tell_their_form() {
        assert_eq!(ToolFormat::of("{{ tools }}<tool_call>"), Some(ToolFormat::Hermes));
        assert_eq!(ToolFormat::of("{{ tools }}[TOOL_CALLS]"), Some(ToolFormat::Mistral));
        assert_eq!(ToolFormat::of("{{ tools }}<|python_tag|>"), Some(ToolFormat::Llama));
        assert_eq!(ToolFormat::of("{{ messages }}"), None);
    }
}
