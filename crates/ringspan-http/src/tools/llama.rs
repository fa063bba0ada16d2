//! The form of Llama 3: a text is a list of calls or none at all.

use super::{CallParser, Parsed, calls_or_text, json_calls, text_of};

pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
/// What ends the role of a message.
pub(super) const HEADER_END: &str = "<|end_header_id|>";

/// Finds calls in a text that begins with them.
#[derive(Debug, Default)]
pub(super) struct LlamaCalls {
    held: String,
    /// Whether the text has turned out not to be a call.
    is_text: bool,
}

impl CallParser for LlamaCalls {
    fn push(&mut self, text: &str) -> Vec<Parsed> {
        if self.is_text {
            return text_of(text.to_owned());
        }
        self.held.push_str(text);
        let begun = self.held.trim_start();
        let may_be_call = begun.is_empty()
            || begun.starts_with('{')
            || begun.starts_with(PYTHON_TAG)
            || PYTHON_TAG.starts_with(begun);
        if may_be_call {
            return Vec::new();
        }
        self.is_text = true;
        text_of(std::mem::take(&mut self.held))
    }

    fn finish(&mut self) -> Vec<Parsed> {
        let text = std::mem::take(&mut self.held);
        let inner = text.trim();
        calls_or_text(json_calls::calls(inner.strip_prefix(PYTHON_TAG).unwrap_or(inner)), text)
    }
}
