//! Writes a text to standard output while it is generated.

use crate::output;
use anyhow::{Context, Result};
use ringspan_serve::TextStream;
use std::io::IsTerminal;
use tokenizers::Tokenizer;

/// Writes new tokens as text, up to a stop text.
pub(super) struct Printer<'a> {
    stream: TextStream<'a>,
    /// Whether there was a reader when text was last written.
    written: std::io::Result<bool>,
}

impl<'a> Printer<'a> {
    /// Writes what follows `prompt`, until one of the texts in `stop` appears.
    pub(super) fn new(tokenizer: &'a Tokenizer, prompt: &[u32], stop: &[String]) -> Result<Self> {
        Ok(Self { stream: TextStream::new(tokenizer, prompt, stop)?, written: Ok(true) })
    }

    /// Writes the text of a new token; returns whether further ones are wanted.
    pub(super) fn push(&mut self, token: u32) -> ringspan_serve::Result<bool> {
        let text = self.stream.push(token)?;
        self.written = output::write(&text);
        Ok(matches!(self.written, Ok(true)) && !self.stream.stopped())
    }

    /// Writes the rest of the text; returns whether a stop text ended it.
    pub(super) fn finish(mut self) -> Result<bool> {
        if self.written.context("cannot write to standard output")? {
            let rest = self.stream.finish()?;
            let end = if std::io::stdout().is_terminal() { "\n" } else { "" };
            output::write(&(rest + end)).context("cannot write to standard output")?;
        }
        Ok(self.stream.stopped())
    }
}
