//! Calls that stand between marks in the text.

use super::{CallParser, Definitions, Parsed, ToolCall, certain_before, text_of};

/// The marks around calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    pub(super) open: &'static str,
    /// Without it, all text after the first mark belongs to calls.
    pub(super) close: Option<&'static str>,
}

/// Reads what stands between two marks; `None` if that is no call.
type ReadCall = fn(&str, &Definitions) -> Option<Vec<ToolCall>>;

/// Finds calls between marks. White space next to calls is no text.
#[derive(Debug)]
pub(super) struct MarkedCalls {
    marks: &'static [Mark],
    /// Marks around all calls, which say nothing more.
    ignored: &'static [&'static str],
    read: ReadCall,
    tools: Definitions,
    /// What is not certain yet, from the mark on where one is open.
    held: String,
    open: Option<Mark>,
    /// Bytes of `held` in which the closing mark does not begin.
    searched: usize,
    /// White space that is text only if text follows.
    space: String,
    called: bool,
}

impl MarkedCalls {
    pub(super) fn new(
        marks: &'static [Mark],
        ignored: &'static [&'static str],
        read: ReadCall,
        tools: Definitions,
    ) -> Self {
        let (held, space) = (String::new(), String::new());
        Self { marks, ignored, read, tools, held, open: None, searched: 0, space, called: false }
    }

    fn advance(&mut self, end: bool) -> Vec<Parsed> {
        let mut parsed = Vec::new();
        loop {
            let Some(mark) = self.open else {
                if self.enter(end, &mut parsed) {
                    continue;
                }
                return parsed;
            };
            let from = self.held.floor_char_boundary(self.searched.max(mark.open.len()));
            let close = mark.close.and_then(|close| Some((from + self.held[from..].find(close)?, close.len())));
            let (inner_end, whole_end) = match close {
                Some((at, length)) => (at, at + length),
                // A call whose end is missing may be complete nevertheless.
                None if end => (self.held.len(), self.held.len()),
                None => {
                    self.searched = self.held.len().saturating_sub(mark.close.map_or(0, str::len));
                    return parsed;
                }
            };
            let calls = (self.read)(&self.held[mark.open.len()..inner_end], &self.tools);
            let whole: String = self.held.drain(..whole_end).collect();
            (self.open, self.searched) = (None, 0);
            match calls {
                Some(calls) if !calls.is_empty() => {
                    self.space.clear();
                    self.called = true;
                    parsed.extend(calls.into_iter().map(Parsed::Call));
                }
                _ => self.say(&whole, &mut parsed),
            }
        }
    }

    /// Releases text up to the next mark; whether there is one.
    fn enter(&mut self, end: bool, parsed: &mut Vec<Parsed>) -> bool {
        let opening = self.marks.iter().filter_map(|mark| Some((self.held.find(mark.open)?, mark.open, Some(*mark))));
        let ignored = self.ignored.iter().filter_map(|mark| Some((self.held.find(mark)?, *mark, None)));
        let Some((at, text, mark)) = opening.chain(ignored).min_by_key(|(at, ..)| *at) else {
            let all = self.marks.iter().map(|mark| mark.open).chain(self.ignored.iter().copied());
            let certain = if end { self.held.len() } else { certain_before(&self.held, all) };
            let said: String = self.held.drain(..certain).collect();
            self.say(&said, parsed);
            return false;
        };
        let said: String = self.held.drain(..at).collect();
        self.say(&said, parsed);
        if mark.is_none() {
            self.held.drain(..text.len());
        }
        self.open = mark;
        true
    }

    fn say(&mut self, text: &str, parsed: &mut Vec<Parsed>) {
        self.space.push_str(text);
        let certain = self.space.trim_end().len();
        parsed.extend(text_of(self.space.drain(..certain).collect()));
    }
}

impl CallParser for MarkedCalls {
    fn push(&mut self, text: &str) -> Vec<Parsed> {
        self.held.push_str(text);
        self.advance(false)
    }

    fn finish(&mut self) -> Vec<Parsed> {
        let mut parsed = self.advance(true);
        let space = std::mem::take(&mut self.space);
        if !self.called {
            parsed.extend(text_of(space));
        }
        parsed
    }
}
