//! Which documents are trained on and which are held out, as tokens.

use super::files::{Text, Texts};
use crate::{error::Result, tokenizer::Tokenizer};
use std::sync::Arc;

/// One document in this many is held out, on average.
const HELD_OUT: u64 = 20;

/// Token documents, split.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// What the model learns from; no document is empty.
    pub train: Arc<Vec<Vec<u32>>>,
    /// What it is judged by; never seen in training.
    pub held_out: Arc<Vec<Vec<u32>>>,
    /// Of all tokens of both parts, in order: two corpora with one fingerprint train alike.
    pub fingerprint: u64,
}

impl Corpus {
    /// Tokenises `texts` and holds out about a twentieth of the documents, chosen by a hash of their names, so that a new
    /// document moves no other. At least one is held out and one is kept; of a lone document the end is held out.
    ///
    /// # Errors
    /// When the tokenizer fails on a document.
    pub fn new(texts: &Texts, tokenizer: &Tokenizer) -> Result<Self> {
        let (train, held_out) = split(&texts.documents);
        let encode = |part: &[&str]| -> Result<Vec<Vec<u32>>> {
            let mut documents = Vec::with_capacity(part.len());
            for text in part {
                let mut tokens = tokenizer.encode(text)?;
                tokens.extend(tokenizer.end_of_text());
                if !tokens.is_empty() {
                    documents.push(tokens);
                }
            }
            Ok(documents)
        };
        let (train, held_out) = (encode(&train)?, encode(&held_out)?);
        let fingerprint = fingerprint(train.iter().chain(&held_out).flat_map(|document| {
            // The length keeps documents apart: [1,2],[3] is not [1],[2,3].
            std::iter::once(document.len() as u64).chain(document.iter().map(|&t| u64::from(t)))
        }));
        Ok(Self { train: Arc::new(train), held_out: Arc::new(held_out), fingerprint })
    }

    /// Tokens to train on.
    #[must_use]
    pub fn train_tokens(&self) -> usize {
        self.train.iter().map(Vec::len).sum()
    }

    /// Tokens held out.
    #[must_use]
    pub fn held_out_tokens(&self) -> usize {
        self.held_out.iter().map(Vec::len).sum()
    }
}

fn split(documents: &[Text]) -> (Vec<&str>, Vec<&str>) {
    if let [only] = documents {
        let mut cut = only.text.len() - only.text.len() / HELD_OUT as usize;
        while !only.text.is_char_boundary(cut) {
            cut -= 1;
        }
        let (head, tail) = only.text.split_at(cut);
        return (vec![head], if tail.is_empty() { vec![] } else { vec![tail] });
    }
    let hash = |d: &Text| fingerprint(d.name.bytes().map(u64::from));
    let mut chosen: Vec<bool> = documents.iter().map(|d| hash(d) % HELD_OUT == 0).collect();
    let count = chosen.iter().filter(|&&c| c).count();
    // Few documents can all fall on one side: then the one of the smallest hash goes to the other.
    if (count == 0 || count == documents.len())
        && let Some(index) = (0..documents.len()).min_by_key(|&i| hash(&documents[i]))
    {
        chosen[index] = count == 0;
    }
    let part =
        |held: bool| documents.iter().zip(&chosen).filter(|&(_, &c)| c == held).map(|(d, _)| d.text.as_str()).collect();
    (part(false), part(true))
}

/// FNV-1a over 64-bit words, then mixed so that the low bits are as good as the high: equal on every system and version.
#[must_use]
pub fn fingerprint(words: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for word in words {
        hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Skipped;
    use std::path::Path;

    fn texts(names: &[String]) -> Texts {
        let documents = names.iter().map(|n| Text { name: n.clone(), text: format!("text of {n}") }).collect();
        Texts { documents, skipped: Skipped::default() }
    }

    #[test]
    fn about_a_twentieth_is_held_out_and_a_new_document_moves_no_other() {
        let names: Vec<String> = (0..2000).map(|i| format!("src/{i}.rs")).collect();
        let all = texts(&names);
        let (train, held) = split(&all.documents);
        assert_eq!(train.len() + held.len(), 2000);
        assert!((60..140).contains(&held.len()), "{}", held.len());
        let fewer = texts(&names[..1999]);
        let (_, held_before) = split(&fewer.documents);
        assert_eq!(held_before, held.iter().copied().filter(|t| *t != "text of src/1999.rs").collect::<Vec<_>>());
    }

    #[test]
    fn both_parts_get_a_document_however_few_there_are() {
        for count in 2..30 {
            for salt in 0..20 {
                let names: Vec<String> = (0..count).map(|i| format!("{salt}-{i}")).collect();
                let all = texts(&names);
                let (train, held) = split(&all.documents);
                assert!(!train.is_empty() && !held.is_empty(), "{count} documents, salt {salt}");
            }
        }
    }

    #[test]
    fn a_lone_document_gives_its_end() {
        let text = "é".repeat(500);
        let all = Texts { documents: vec![Text { name: "x".into(), text }], skipped: Skipped::default() };
        let corpus = Corpus::new(&all, &Tokenizer::byte_level(Path::new("x")).unwrap()).unwrap();
        assert_eq!(corpus.train.len(), 1);
        // 1000 bytes: 950 + end of text, 50 + end of text.
        assert_eq!((corpus.train_tokens(), corpus.held_out_tokens()), (951, 51));
    }

    #[test]
    fn the_fingerprint_sees_tokens_order_and_borders() {
        let base = fingerprint([2, 1, 2, 1, 3]);
        assert_ne!(base, fingerprint([1, 1, 2, 2, 3]));
        assert_ne!(base, fingerprint([2, 1, 2, 1, 4]));
        assert_eq!(base, fingerprint([2, 1, 2, 1, 3]));
    }
}
