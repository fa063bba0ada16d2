//! Which documents are trained on and which are held out, as tokens.

use super::{
    Content, Encoder, Store,
    encode::{GIVEN, named_place},
    files::{Text, Texts},
};
use crate::error::{Error, Result};
use ringspan_candle::pool;
use std::{borrow::Cow, path::Path};

/// What a model is judged by and never learns.
#[derive(Debug, Clone, Copy)]
pub enum HeldOut<'a> {
    /// So much of the documents, at least one; 0 for none.
    Share(f64),
    /// Texts of their own, of this source.
    Texts(&'a Texts, &'a Path),
}

/// Token documents, split.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// What the model learns from; no document is empty.
    pub train: Store,
    /// What it is judged by; never seen in training.
    pub held_out: Store,
    /// Of all words of both parts, in order: two corpora with one fingerprint train alike.
    pub fingerprint: u64,
}

impl Corpus {
    /// Tokenises `texts` of `source`, on the threads of the pool that this is called in. What is held out of them is chosen
    /// by a hash of their names, so that a new document moves no other. At least one is held out and one is kept; of a lone
    /// text the end is held out.
    ///
    /// # Errors
    /// As [`Encoder::encode`], and [`Error::Data`] where a document has nothing to learn or nothing is left to train on.
    pub fn new(texts: &Texts, held_out: &HeldOut<'_>, encoder: &Encoder<'_>, source: &Path) -> Result<Self> {
        let (train, judges, judges_from) = match held_out {
            HeldOut::Share(share) => {
                let (train, held_out) = split(&texts.documents, *share);
                (train, held_out, source)
            }
            HeldOut::Texts(judges, from) => (whole(texts), whole(judges), *from),
        };
        let corpus = Self::of(encode(train, encoder, source)?, encode(judges, encoder, judges_from)?);
        match corpus.train.is_empty() {
            true => Err(Error::Data { path: source.into(), problem: "no token to train on".into() }),
            false => Ok(corpus),
        }
    }

    /// Documents that are split.
    pub(super) fn of(train: Store, held_out: Store) -> Self {
        let fingerprint = fingerprint(train.documents().chain(held_out.documents()).flat_map(|document| {
            // The length keeps documents apart: [1,2],[3] is not [1],[2,3].
            std::iter::once(document.len() as u64).chain(document.iter().map(|&t| u64::from(t)))
        }));
        Self { train, held_out, fingerprint }
    }

    /// Of what [`Self::new`] makes its words from, without making them: names, contents, what is held out, tokenizer,
    /// template.
    ///
    /// # Errors
    /// A tokenizer that cannot be written down.
    pub fn key(texts: &Texts, held_out: &HeldOut<'_>, encoder: &Encoder<'_>) -> Result<u64> {
        let documents = |texts: &Texts| {
            fingerprint(texts.documents.iter().flat_map(|document| {
                let name = fingerprint(document.name.bytes().map(u64::from));
                std::iter::once(name).chain(document.content.words())
            }))
        };
        let held_out = match held_out {
            HeldOut::Share(share) => [0, share.to_bits()],
            HeldOut::Texts(texts, _) => [1, documents(texts)],
        };
        Ok(fingerprint([encoder.fingerprint()?, documents(texts)].into_iter().chain(held_out)))
    }

    /// Tokens to train on.
    #[must_use]
    pub fn train_tokens(&self) -> usize {
        self.train.tokens()
    }

    /// Tokens held out.
    #[must_use]
    pub fn held_out_tokens(&self) -> usize {
        self.held_out.tokens()
    }
}

type Part<'a> = Vec<(&'a str, Cow<'a, Content>)>;

fn whole(texts: &Texts) -> Part<'_> {
    texts.documents.iter().map(|d| (d.name.as_str(), Cow::Borrowed(&d.content))).collect()
}

fn encode(part: Part<'_>, encoder: &Encoder<'_>, source: &Path) -> Result<Store> {
    let words = |(name, content): (&str, Cow<'_, Content>)| {
        let words = encoder.encode(&content, source, name)?;
        // Nothing predicts the first token.
        let silent = words.iter().skip(1).all(|word| word & GIVEN != 0);
        match silent && !matches!(*content, Content::Text(_)) {
            true => Err(Error::Data {
                path: named_place(source, name),
                problem: "no token of it is learned; its template yields no assistant's words".into(),
            }),
            false => Ok(words),
        }
    };
    let documents: Vec<Vec<u32>> = pool::map(part, words).into_iter().collect::<Result<_>>()?;
    Ok(Store::new(&documents))
}

fn split(documents: &[Text], share: f64) -> (Part<'_>, Part<'_>) {
    if let [Text { name, content: Content::Text(text) }] = documents {
        let mut cut = text.len() - (text.len() as f64 * share) as usize;
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        let (head, tail) = text.split_at(cut);
        let part = |text: &str| vec![(name.as_str(), Cow::Owned(Content::Text(text.into())))];
        return (part(head), if tail.is_empty() { vec![] } else { part(tail) });
    }
    let hash = |d: &Text| fingerprint(d.name.bytes().map(u64::from));
    let mut chosen: Vec<bool> = documents.iter().map(|d| place(hash(d)) < share).collect();
    let count = chosen.iter().filter(|&&c| c).count();
    // Few documents can all fall on one side: then the one of the smallest hash goes to the other. A lone one is learned.
    if documents.len() == 1 {
        chosen[0] = false;
    } else if (count == 0 || count == documents.len())
        && share > 0.0
        && let Some(index) = (0..documents.len()).min_by_key(|&i| hash(&documents[i]))
    {
        chosen[index] = count == 0;
    }
    let part = |held: bool| {
        let here = documents.iter().zip(&chosen).filter(|&(_, &c)| c == held);
        here.map(|(d, _)| (d.name.as_str(), Cow::Borrowed(&d.content))).collect()
    };
    (part(false), part(true))
}

/// A hash as a number from 0 to below 1: the twentieths by the remainder, and finer by what is left.
fn place(hash: u64) -> f64 {
    let fine = (hash / 20 % (1 << 32)) as f64 / (1u64 << 32) as f64;
    ((hash % 20) as f64 + fine) / 20.0
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
    use crate::{Tokenizer, data::Skipped};

    fn texts(names: &[String]) -> Texts {
        let documents =
            names.iter().map(|n| Text { name: n.clone(), content: Content::Text(format!("text of {n}")) }).collect();
        Texts { documents, skipped: Skipped::default(), suspects: Vec::new() }
    }

    #[test]
    fn about_a_twentieth_is_held_out_and_a_new_document_moves_no_other() {
        let names: Vec<String> = (0..2000).map(|i| format!("src/{i}.rs")).collect();
        let all = texts(&names);
        let (train, held) = split(&all.documents, 0.05);
        assert_eq!(train.len() + held.len(), 2000);
        assert!((60..140).contains(&held.len()), "{}", held.len());
        let fewer = texts(&names[..1999]);
        let (_, held_before) = split(&fewer.documents, 0.05);
        let held: Vec<_> = held.into_iter().filter(|(name, _)| *name != "src/1999.rs").collect();
        assert_eq!(held_before, held);
    }

    #[test]
    fn a_larger_share_holds_out_what_a_smaller_one_does_and_none_holds_out_nothing() {
        let names: Vec<String> = (0..2000).map(|i| format!("src/{i}.rs")).collect();
        let all = texts(&names);
        let held = |share| split(&all.documents, share).1.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(held(0.0), Vec::<&str>::new());
        for (less, more, about) in [(0.01, 0.05, 100), (0.05, 0.2, 400), (0.2, 0.5, 1000)] {
            let (less, more) = (held(less), held(more));
            assert!(less.iter().all(|name| more.contains(name)) && less.len() < more.len());
            assert!(more.len().abs_diff(about) < about / 5 + 20, "{}", more.len());
        }
        let few = texts(&names[..3]);
        assert_eq!(split(&few.documents, 0.0).1.len(), 0);
        let lone = texts(&names[..1]);
        assert_eq!(split(&lone.documents, 0.0).1.len(), 0);
        assert_eq!(split(&lone.documents, 0.5).1.len(), 1);
    }

    #[test]
    fn texts_of_their_own_are_held_out_whole_and_all_others_are_learned() {
        let [train, judges] = [["a", "b"], ["c", "d"]].map(|names| texts(&names.map(String::from)));
        let tokenizer = Tokenizer::byte_level(Path::new("x")).unwrap();
        let encoder = Encoder::new(&tokenizer, None);
        let held_out = HeldOut::Texts(&judges, Path::new("y"));
        let corpus = Corpus::new(&train, &held_out, &encoder, Path::new("x")).unwrap();
        assert_eq!((corpus.train.len(), corpus.held_out.len()), (2, 2));
        let key = |held_out: &HeldOut<'_>| Corpus::key(&train, held_out, &encoder).unwrap();
        assert_ne!(key(&held_out), key(&HeldOut::Share(0.05)));
        assert_ne!(key(&held_out), key(&HeldOut::Texts(&train, Path::new("y"))));
        assert_ne!(key(&HeldOut::Share(0.1)), key(&HeldOut::Share(0.05)));
    }

    #[test]
    fn threads_make_the_same_tokens() {
        let all = texts(&(0..200).map(|i| format!("{i}")).collect::<Vec<_>>());
        let tokenizer = Tokenizer::byte_level(Path::new("x")).unwrap();
        let make =
            || Corpus::new(&all, &HeldOut::Share(0.05), &Encoder::new(&tokenizer, None), Path::new("x")).unwrap();
        let alone = make();
        let together = pool::run(4, make).unwrap();
        assert_eq!(together.fingerprint, alone.fingerprint);
    }

    #[test]
    fn both_parts_get_a_document_however_few_there_are() {
        for count in 2..30 {
            for salt in 0..20 {
                let names: Vec<String> = (0..count).map(|i| format!("{salt}-{i}")).collect();
                let all = texts(&names);
                let (train, held) = split(&all.documents, 0.05);
                assert!(!train.is_empty() && !held.is_empty(), "{count} documents, salt {salt}");
            }
        }
    }

    #[test]
    fn a_lone_document_gives_its_end() {
        let text = "é".repeat(500);
        let all = Texts {
            documents: vec![Text { name: "x".into(), content: Content::Text(text) }],
            skipped: Skipped::default(),
            suspects: Vec::new(),
        };
        let tokenizer = Tokenizer::byte_level(Path::new("x")).unwrap();
        let corpus = Corpus::new(&all, &HeldOut::Share(0.05), &Encoder::new(&tokenizer, None), Path::new("x")).unwrap();
        assert_eq!(corpus.train.len(), 1);
        // 1000 bytes: 950 + end of text, 50 + end of text.
        assert_eq!((corpus.train_tokens(), corpus.held_out_tokens()), (951, 51));
    }

    #[test]
    fn the_key_changes_with_every_document_and_with_the_template() {
        let names: Vec<String> = (0..3).map(|i| format!("{i}")).collect();
        let tokenizer = Tokenizer::byte_level(Path::new("x")).unwrap();
        let key = |texts: &Texts, template| {
            Corpus::key(texts, &HeldOut::Share(0.05), &Encoder::new(&tokenizer, template)).unwrap()
        };
        let all = texts(&names);
        assert_eq!(key(&all, None), key(&texts(&names), None));
        for i in 0..3 {
            let mut other = texts(&names);
            other.documents[i].name.push('x');
            assert_ne!(key(&other, None), key(&all, None));
            let mut other = texts(&names);
            other.documents[i].content = Content::Text("else".into());
            assert_ne!(key(&other, None), key(&all, None));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.jinja");
        std::fs::write(&path, "{{ messages }}").unwrap();
        assert_ne!(key(&all, Some(&crate::data::Template::read(&path, None).unwrap())), key(&all, None));
    }

    #[test]
    fn the_fingerprint_sees_tokens_order_and_borders() {
        let base = fingerprint([2, 1, 2, 1, 3]);
        assert_ne!(base, fingerprint([1, 1, 2, 2, 3]));
        assert_ne!(base, fingerprint([2, 1, 2, 1, 4]));
        assert_eq!(base, fingerprint([2, 1, 2, 1, 3]));
    }
}
