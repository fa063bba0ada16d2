//! Streaming detokenizer: it releases whole characters only, and nothing of a stop string.

use crate::error::{Error, Result};

/// Turns tokens into text.
pub trait Detokenize: Sync {
    /// The text of `tokens`; bytes that form no character become U+FFFD.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, or a broken decoder.
    fn text(&self, tokens: &[u32]) -> Result<String>;
}

impl Detokenize for tokenizers::Tokenizer {
    fn text(&self, tokens: &[u32]) -> Result<String> {
        self.decode(tokens, true).map_err(|error| Error::Tokenizer(error.to_string()))
    }
}

/// If the window has more tokens than this, it is cut to its last [`CONTEXT`] tokens, provided that this does not change the text.
const WINDOW: usize = 32;
/// Number of tokens kept before the new ones, because decoders treat the first token of a text differently.
const CONTEXT: usize = 6;
/// A character has at most four bytes, so at most three replacement characters stand for an unfinished one.
const UNFINISHED: usize = 3;

/// The state of a text that is streamed while its tokens are generated.
///
/// ```
/// use ringspan_serve::{Detokenize, Result, TextStream};
///
/// /// A token is a letter.
/// struct Letters;
///
/// impl Detokenize for Letters {
///     fn text(&self, tokens: &[u32]) -> Result<String> {
///         Ok(tokens.iter().filter_map(|token| char::from_u32(*token)).collect())
///     }
/// }
///
/// let mut stream = TextStream::new(&Letters, &[], &["END".to_owned()])?;
/// let released: Vec<String> = "one END two".chars().map(|c| stream.push(c as u32)).collect::<Result<_>>()?;
/// assert_eq!(released.concat(), "one ");
/// assert_eq!(stream.stop_string(), Some("END"));
/// # Ok::<_, ringspan_serve::Error>(())
/// ```
pub struct TextStream<'a> {
    detokenizer: &'a dyn Detokenize,
    stops: Vec<String>,
    /// Tokens whose text may still change, after some that give them context.
    window: Vec<u32>,
    /// Bytes of the window's text that are already in `held` or released.
    taken: usize,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// The stop string that has occurred.
    stopped: Option<String>,
}

impl<'a> TextStream<'a> {
    /// A stream that continues `prompt` and ends before the first of `stops`. Empty stop strings are ignored.
    ///
    /// # Errors
    /// A prompt that the tokenizer cannot decode.
    pub fn new(detokenizer: &'a dyn Detokenize, prompt: &[u32], stops: &[String]) -> Result<Self> {
        let window = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        let taken = whole(&detokenizer.text(&window)?).len();
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Ok(Self { detokenizer, stops, window, taken, held: String::new(), stopped: None })
    }

    /// Whether a stop string has occurred.
    pub fn stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// The stop string that has occurred.
    pub fn stop_string(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// Adds a token and returns the text that became certain by it; it may be empty.
    ///
    /// # Errors
    /// Tokens that the tokenizer cannot decode.
    pub fn push(&mut self, token: u32) -> Result<String> {
        if self.stopped() {
            return Ok(String::new());
        }
        self.window.push(token);
        let text = self.detokenizer.text(&self.window)?;
        let certain = whole(&text);
        if let Some(new) = certain.get(self.taken..) {
            self.held.push_str(new);
            self.taken = certain.len();
        }
        if certain.len() == text.len() && self.window.len() > WINDOW {
            let rest = self.window[self.window.len() - CONTEXT..].to_vec();
            let shorter = self.detokenizer.text(&rest)?;
            // A window that began inside a character would count the character's bytes twice.
            if text.ends_with(&shorter) && !shorter.starts_with('\u{FFFD}') {
                self.taken = shorter.len();
                self.window = rest;
            }
        }
        Ok(self.release())
    }

    /// Ends the stream, and returns the text that was held back.
    ///
    /// # Errors
    /// Tokens that the tokenizer cannot decode.
    pub fn finish(&mut self) -> Result<String> {
        if self.stopped() {
            return Ok(String::new());
        }
        let text = self.detokenizer.text(&self.window)?;
        if let Some(new) = text.get(self.taken..) {
            self.held.push_str(new);
            self.taken = text.len();
        }
        let released = self.release();
        let rest = if self.stopped() { String::new() } else { std::mem::take(&mut self.held) };
        Ok(released + &rest)
    }

    /// Releases the text that cannot be part of a stop string.
    fn release(&mut self) -> String {
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
            self.stopped = Some(stop.clone());
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return text;
        }
        let begun = |at: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]));
        let keep_from = self.held.char_indices().map(|(at, _)| at).find(|&at| begun(at)).unwrap_or(self.held.len());
        let kept = self.held.split_off(keep_from);
        std::mem::replace(&mut self.held, kept)
    }
}

/// The text without the replacement characters at its end that further tokens may still turn into a character.
fn whole(text: &str) -> &str {
    let mut text = text;
    for _ in 0..UNFINISHED {
        match text.strip_suffix('\u{FFFD}') {
            Some(shorter) => text = shorter,
            None => break,
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A detokenizer for which each token is a byte.
    struct Bytes;

    impl Detokenize for Bytes {
        fn text(&self, tokens: &[u32]) -> Result<String> {
            let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        }
    }

    /// Streams bytes as tokens; returns the text that each released, and whether a stop string ended it.
    fn streamed(text: &[u8], stops: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut stream = TextStream::new(&Bytes, b"prompt".map(u32::from).as_slice(), &stops).expect("prompt");
        let mut out: Vec<String> = text.iter().map(|b| stream.push(u32::from(*b)).expect("bytes")).collect();
        out.push(stream.finish().expect("bytes"));
        (out, stream.stopped())
    }

    proptest! {
        #[test]
        fn streamed_parts_join_to_the_text(text in "[a-zä€😀]{0,120}") {
            let (out, stopped) = streamed(text.as_bytes(), &[]);
            prop_assert_eq!(out.concat(), text);
            prop_assert!(!stopped);
        }

        #[test]
        fn text_ends_before_the_first_stop_string(text in "[ab]{0,80}", stops in proptest::collection::vec("[ab]{1,5}", 0..3)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let end = stops.iter().filter_map(|stop| {
                // The stop string that is complete first ends the text.
                text.find(stop).map(|at| (at + stop.len(), at))
            }).min();
            let (out, stopped) = streamed(text.as_bytes(), &stops);
            prop_assert_eq!(stopped, end.is_some());
            match end {
                None => prop_assert_eq!(out.concat(), text),
                Some((complete, _)) => {
                    let at = stops.iter().filter(|s| text[..complete].ends_with(*s)).map(|s| complete - s.len()).min();
                    prop_assert_eq!(Some(out.concat().len()), at);
                }
            }
        }

        #[test]
        fn any_bytes_give_what_decoding_all_at_once_gives(bytes in proptest::collection::vec(any::<u8>(), 0..90)) {
            let (out, _) = streamed(&bytes, &[]);
            prop_assert_eq!(out.concat(), String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn incomplete_characters_are_not_released() {
        let (out, _) = streamed("a€b".as_bytes(), &[]);
        assert_eq!(out, ["a", "", "", "€", "b", ""]);
        let (out, _) = streamed(&"😀".as_bytes()[..2], &[]);
        assert_eq!(out, ["", "", "\u{FFFD}"]);
    }

    #[test]
    fn the_beginning_of_a_stop_string_waits() {
        let (out, stopped) = streamed(b"xEN", &["END"]);
        assert_eq!((out, stopped), (["x", "", "", "EN"].map(String::from).to_vec(), false));
        let (out, stopped) = streamed(b"xENDy", &["END"]);
        assert_eq!((out.concat(), stopped), ("x".to_owned(), true));
    }
}
