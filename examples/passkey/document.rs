//! A text with a pass key in its first half and a question about it at its end.

use anyhow::{Context, Result, ensure};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

/// Sentences that say nothing about a key; none has a digit.
const FILLER: [&str; 8] = [
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "Rain falls on the hills.",
    "A bird sings in the tree.",
    "The river runs to the sea.",
];
const QUESTION: &str = " What is the pass key? The pass key is ";
/// Number of digits of a key: a guess is right once in 100,000 times.
pub(crate) const DIGITS: usize = 5;

/// A document of text; a token is a byte.
#[derive(Debug, Clone)]
pub(crate) struct Document {
    /// Filler, needle, filler, question.
    pub(crate) prompt: String,
    /// The answer that the model has to give, in digits.
    pub(crate) key: String,
    /// Place of the needle in the prompt, in bytes.
    pub(crate) needle: Range<usize>,
}

impl Document {
    /// A document of exactly `length` tokens, including the token that ends the text.
    fn new(random: &mut ChaCha8Rng, length: usize) -> Result<Self> {
        let key: String = (0..DIGITS).map(|_| char::from(b'0' + below(random, 10) as u8)).collect();
        let needle = format!(" The pass key is {key}. Remember it. ");
        let room = (length / 2).checked_sub(needle.len() + 1);
        let room = room.filter(|_| length / 2 > QUESTION.len() + DIGITS);
        let room = room.with_context(|| format!("{length} tokens are too few for a needle and a question"))?;
        let before = below(random, room + 1);
        let after = length - before - needle.len() - QUESTION.len() - DIGITS - 1;
        let prompt = [filler(random, before), needle.clone(), filler(random, after), QUESTION.into()].concat();
        Ok(Self { prompt, key, needle: before..before + needle.len() })
    }

    /// Place of the answer among the document's tokens.
    pub(crate) fn answer(&self) -> Range<usize> {
        self.prompt.len()..self.prompt.len() + DIGITS
    }
}

/// `count` documents of `length` tokens each. The same seed gives the same documents.
pub(crate) fn documents(length: usize, count: usize, seed: u64) -> Result<Vec<Document>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| Document::new(&mut random, length)).collect()
}

/// Writes documents as JSON lines of `prompt` and `completion`: the loss is on the completion alone.
pub(crate) fn write(path: &Path, documents: &[Document]) -> Result<()> {
    let mut lines = String::new();
    for Document { prompt, key, .. } in documents {
        ensure!(prompt.is_ascii(), "a byte of a document is no token");
        writeln!(lines, "{}", serde_json::json!({ "prompt": prompt, "completion": key }))?;
    }
    std::fs::write(path, lines).with_context(|| format!("cannot write {}", path.display()))
}

/// Sentences, cut to `len` bytes.
fn filler(random: &mut ChaCha8Rng, len: usize) -> String {
    let mut text = String::with_capacity(len + 32);
    while text.len() < len {
        text += FILLER[below(random, FILLER.len())];
        text.push(' ');
    }
    text.truncate(len);
    text
}

/// A random number below `end`; the bias of a 64-bit product is negligible for such small ranges.
fn below(random: &mut ChaCha8Rng, end: usize) -> usize {
    ((u128::from(random.next_u64()) * end as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_has_its_needle_in_the_first_half_and_its_question_at_the_end() {
        for length in [128, 257, 2048] {
            let all = documents(length, 200, 7).expect("documents");
            for Document { prompt, key, needle } in &all {
                assert_eq!(prompt.len() + key.len() + 1, length);
                assert!(needle.end < length / 2 && prompt.ends_with(QUESTION));
                assert!(prompt[needle.clone()].contains(&format!("key is {key}.")));
                assert_eq!(prompt.bytes().filter(u8::is_ascii_digit).count(), DIGITS, "once, and nowhere else");
            }
            let starts: Vec<usize> = all.iter().map(|d| d.needle.start).collect();
            let (first, last) = (starts.iter().min().expect("some"), starts.iter().max().expect("some"));
            assert!(last - first > length / 8, "needles stand anywhere in it");
        }
        assert!(documents(64, 1, 0).is_err());
    }

    #[test]
    fn a_seed_gives_the_same_documents_again_and_another_seed_others() {
        let keys = |seed| documents(256, 20, seed).expect("documents").into_iter().map(|d| d.key).collect::<Vec<_>>();
        assert_eq!(keys(1), keys(1));
        assert_ne!(keys(1), keys(2));
    }
}
