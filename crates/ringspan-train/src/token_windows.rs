//! Tokenizes a long text window by window: a tokenizer takes a hundred times the memory of the text it is given at once.
//!
//! Windows overlap. A token depends on little text around it, so after the first words of an overlap both windows have the same
//! tokens at the same positions. There the second window's tokens continue the first one's, and the result is the tokens of the
//! whole text. Where two windows never agree, as on one letter repeated for ever, the second one is tokenized again from the
//! border of a token of the first.

use crate::error::Result;

/// Bytes of a text that are tokenized at once.
const WINDOW_BYTES: usize = 64 << 10;
/// Bytes that neighbouring windows share.
const OVERLAP_BYTES: usize = 4 << 10;
/// Number of consecutive tokens that two windows must agree on.
const MIN_AGREEING_TOKENS: usize = 16;

/// A token and the byte of the text at which it begins.
pub(crate) type PositionedToken = (u32, usize);

/// A window of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) text: String,
    /// Bytes of the text before the window.
    start: usize,
    /// Whether it is the last window of the text.
    pub(crate) last: bool,
}

impl Window {
    /// Whether the window is a whole text.
    pub(crate) fn is_whole(&self) -> bool {
        self.start == 0 && self.last
    }
}

/// Cuts a text that arrives in parts into windows.
#[derive(Debug, Clone)]
pub(crate) struct WindowSplitter {
    text: String,
    start: usize,
    window: usize,
    overlap: usize,
}

impl WindowSplitter {
    pub(crate) fn new() -> Self {
        Self::with_sizes(WINDOW_BYTES, OVERLAP_BYTES)
    }

    fn with_sizes(window: usize, overlap: usize) -> Self {
        Self { text: String::new(), start: 0, window, overlap }
    }

    /// The windows that are complete once `part` is appended to the text; [`finish`](Self::finish) returns the last one.
    pub(crate) fn push(&mut self, part: &str) -> Vec<Window> {
        self.text.push_str(part);
        let mut windows = Vec::new();
        let mut from = 0;
        // Text must remain for the last window.
        while self.text.len() - from > self.window {
            let end = self.text.floor_char_boundary(from + self.window);
            let text = self.text[from..end].to_owned();
            windows.push(Window { text, start: self.start + from, last: false });
            from = self.text.floor_char_boundary(end - self.overlap);
        }
        self.text.drain(..from);
        self.start += from;
        windows
    }

    /// The last window.
    pub(crate) fn finish(self) -> Window {
        Window { text: self.text, start: self.start, last: true }
    }
}

/// Joins the tokens of windows to the tokens of their text.
#[derive(Debug, Clone, Default)]
pub(crate) struct WindowJoiner {
    /// Tokens of the last window that the next one may replace.
    pending: Vec<PositionedToken>,
}

impl WindowJoiner {
    /// Appends to `out` the tokens of the text that are settled once `tokens` (those of `window`, with positions in it) are
    /// known. `encode` tokenizes a part of the window again where the windows do not agree.
    pub(crate) fn push(
        &mut self,
        window: &Window,
        tokens: Vec<PositionedToken>,
        encode: impl Fn(&str) -> Result<Vec<PositionedToken>>,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let shifted = |tokens: Vec<PositionedToken>, from: usize| -> Vec<PositionedToken> {
            tokens.into_iter().map(|(id, at)| (id, from + at)).collect()
        };
        let mut tokens = shifted(tokens, window.start);
        let shared = self.pending.partition_point(|&(_, at)| at < window.start);
        let (settled_count, next) = match join_point(&self.pending[shared..], &tokens) {
            _ if self.pending.is_empty() => (0, 0),
            Some((first_end, second_end)) => (shared + first_end, second_end),
            None => {
                let half = shared + (self.pending.len() - shared) / 2;
                let border = |&at: &usize| {
                    let (byte, rises) = (self.pending[at].1, at == 0 || self.pending[at].1 > self.pending[at - 1].1);
                    rises && byte >= window.start && window.text.is_char_boundary(byte - window.start)
                };
                match (half..self.pending.len()).find(border) {
                    Some(at) => {
                        let byte = self.pending[at].1;
                        tokens = shifted(encode(&window.text[byte - window.start..])?, byte);
                        (at, 0)
                    }
                    // The first window ends with one token that is longer than the overlap.
                    None => (shared, 0),
                }
            }
        };
        out.extend(self.pending[..settled_count].iter().map(|(id, _)| id));
        self.pending = tokens.split_off(next);
        if window.last {
            out.extend(self.pending.drain(..).map(|(id, _)| id));
        }
        Ok(())
    }
}

/// The index in each list from which both are equal: inside the longest run of tokens that they agree on.
fn join_point(first: &[PositionedToken], second: &[PositionedToken]) -> Option<(usize, usize)> {
    let (mut i, mut j, mut run) = (0, 0, 0);
    let mut longest = (0, 0, 0);
    while i < first.len() && j < second.len() {
        run = if first[i] == second[j] { run + 1 } else { 0 };
        let (a, b) = (first[i].1, second[j].1);
        (i, j) = (i + usize::from(a <= b), j + usize::from(b <= a));
        if run > longest.0 {
            longest = (run, i, j);
        }
    }
    let (run, i, j) = longest;
    let rises = |back: &usize| first[i - back].1 > first[i - back - 1].1;
    let back = (1..=run / 2).rev().find(rises).filter(|_| run >= MIN_AGREEING_TOKENS)?;
    Some((i - back, j - back))
}

/// The tokens of a text of any length; `encode` tokenizes parts of it.
pub(crate) fn encode(text: &str, encode: impl Fn(&str) -> Result<Vec<PositionedToken>>) -> Result<Vec<u32>> {
    encode_with(WindowSplitter::new(), text, encode)
}

fn encode_with(
    mut splitter: WindowSplitter,
    text: &str,
    encode: impl Fn(&str) -> Result<Vec<PositionedToken>>,
) -> Result<Vec<u32>> {
    let (mut joiner, mut out) = (WindowJoiner::default(), Vec::new());
    let mut push = |window: &Window| joiner.push(window, encode(&window.text)?, &encode, &mut out);
    for window in splitter.push(text) {
        push(&window)?;
    }
    push(&splitter.finish())?;
    Ok(out)
}

/// Whether a text is longer than a window.
pub(crate) fn is_long(text: &str) -> bool {
    text.len() > WINDOW_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;
    use proptest::prelude::*;
    use std::path::Path;

    proptest! {
        #[test]
        fn windows_cover_a_text_and_overlap(text in "[aé日🦀 \n]{0,400}", parts in 1usize..40) {
            let mut splitter = WindowSplitter::with_sizes(40, 12);
            let mut windows = Vec::new();
            let boundary = |i: usize| text.floor_char_boundary(text.len() * i / parts);
            for i in 0..parts {
                windows.extend(splitter.push(&text[boundary(i)..boundary(i + 1)]));
            }
            windows.push(splitter.finish());
            prop_assert!(windows.iter().all(|w| text[w.start..].starts_with(&w.text) && w.text.len() <= 40));
            for pair in windows.windows(2) {
                let end = pair[0].start + pair[0].text.len();
                prop_assert!(pair[1].start <= end - 12 && pair[1].start >= end - 15 && pair[1].text.len() > end - pair[1].start);
            }
            let end = windows.last().unwrap();
            prop_assert!(end.last && end.start + end.text.len() == text.len());
        }
    }

    fn encode_whole(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode_part(text).unwrap().into_iter().map(|(id, _)| id).collect()
    }

    /// Words of many kinds, with long runs of white space and of one letter.
    fn sample_text(words: usize) -> String {
        let word = |i: usize| match i * i * 31 % 97 {
            0..4 => "    \n\n\t".to_owned(),
            4..6 => "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".into(),
            6..8 => "日本語 🦀 café".into(),
            n => format!("{} {n}, the quick brown fox; ", i * 7919 % 1013),
        };
        (0..words).map(word).collect()
    }

    #[test]
    fn the_tokens_of_windows_are_those_of_the_whole_text() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat");
        let mut tokenizers = vec![Tokenizer::byte_level(Path::new("bytes")).unwrap()];
        for name in ["turns", "headers", "brackets", "thinking"] {
            tokenizers.push(Tokenizer::read(&fixtures.join(name).join("tokenizer.json")).unwrap());
        }
        let text = sample_text(3000);
        for tokenizer in &tokenizers {
            let expected = encode_whole(tokenizer, &text);
            let windows =
                encode_with(WindowSplitter::with_sizes(2000, 600), &text, |part| tokenizer.encode_part(part)).unwrap();
            assert!(windows == expected, "{} tokens, {} of the whole text", windows.len(), expected.len());
        }
    }

    #[test]
    fn windows_that_never_agree_are_tokenized_again_from_a_token_border() {
        // Groups of seven letters, counted from the beginning of a part, so that windows never agree.
        let sevens = |text: &str| {
            let starts = (0..text.len()).step_by(7);
            Ok(starts.map(|at| ((text.len() - at).min(7) as u32, at)).collect())
        };
        let text = "a".repeat(10_000);
        let tokens = encode_with(WindowSplitter::with_sizes(1000, 300), &text, sevens).unwrap();
        let expected: Vec<PositionedToken> = sevens(&text).unwrap();
        assert_eq!(tokens, expected.into_iter().map(|(id, _)| id).collect::<Vec<_>>());
    }

    #[test]
    fn a_long_text_and_a_short_one_are_tokenized_alike() {
        let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
        for text in [String::new(), "short".into(), "long é ".repeat(30_000)] {
            let tokens = tokenizer.encode(&text).unwrap();
            assert!(tokens == text.bytes().map(u32::from).collect::<Vec<_>>());
        }
    }
}
