//! SentencePiece's BPE (Kudo and Richardson, 2018), as in Llama 2, Mistral, Gemma and Phi-3: the pair that makes the piece with
//! the highest score is merged first, and characters that are no piece fall back to bytes.

use super::{GgufFile, flag, id};
use crate::error::Result;
use candle_core::quantized::gguf_file::Value;
use std::collections::HashMap;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges};
use tokenizers::normalizers::{Prepend, Replace};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer, decoders, normalizers};

/// The character that stands for a space in pieces.
const SPACE: &str = "▁";

/// Values of `tokenizer.ggml.token_type`.
mod kind {
    pub(super) const NORMAL: u32 = 1;
    pub(super) const UNKNOWN: u32 = 2;
    pub(super) const CONTROL: u32 = 3;
    pub(super) const USER_DEFINED: u32 = 4;
}

/// The vocabulary of a file: text, score and type of each piece.
struct PieceVocabulary {
    texts: Vec<String>,
    scores: Vec<f32>,
    kinds: Vec<u32>,
}

/// Builds the tokenizer of a file whose kind is `llama`.
pub(super) fn tokenizer(file: &GgufFile) -> Result<Tokenizer> {
    let pieces = PieceVocabulary::read(file).map_err(|problem| file.broken(&problem))?;
    build(file, &pieces).map_err(|error| file.broken(&format!("tokenizer: {error}")))
}

fn build(file: &GgufFile, pieces: &PieceVocabulary) -> tokenizers::Result<Tokenizer> {
    let vocabulary = pieces.texts.iter().enumerate().map(|(id, text)| (text.clone(), id as u32));
    let piece = |number: u32| pieces.texts.get(number as usize).cloned();
    let mut model = BPE::builder()
        .vocab_and_merges(vocabulary.collect::<tokenizers::models::bpe::Vocab>(), pieces.merges())
        .fuse_unk(true)
        .byte_fallback(true);
    if let Some(unknown) = id(file, "tokenizer.ggml.unknown_token_id").and_then(piece) {
        model = model.unk_token(unknown);
    }
    let mut tokenizer = Tokenizer::new(model.build()?);

    let begins_with_space = flag(file, "tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let mut normalizer = vec![Replace::new(" ", SPACE)?.into()];
    let mut decoder = vec![Replace::new(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    if begins_with_space {
        normalizer.insert(0, Prepend::new(SPACE.into()).into());
        decoder.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_normalizer(Some(normalizers::Sequence::new(normalizer)))?;
    tokenizer.with_decoder(Some(decoders::sequence::Sequence::new(decoder)));

    // Tokens of these kinds are found in a text before anything is merged.
    let added = |wanted: &[u32], special: bool| -> Vec<AddedToken> {
        let of_kind = pieces.texts.iter().zip(&pieces.kinds).filter(|(_, kind)| wanted.contains(kind));
        of_kind.map(|(text, _)| AddedToken::from(text.clone(), special).normalized(false)).collect()
    };
    tokenizer.add_special_tokens(added(&[kind::CONTROL, kind::UNKNOWN], true))?;
    tokenizer.add_tokens(added(&[kind::USER_DEFINED], false))?;

    let around = |key: &str, name: &str, default: bool| {
        let number = id(file, &format!("tokenizer.ggml.{name}_token_id"))?;
        flag(file, key).unwrap_or(default).then(|| Some((piece(number)?, number)))?
    };
    let begin = around("tokenizer.ggml.add_bos_token", "bos", true);
    let end = around("tokenizer.ggml.add_eos_token", "eos", false);
    let name = |token: &Option<(String, u32)>| token.iter().map(|(text, _)| text.clone()).collect::<Vec<_>>();
    let single = [name(&begin), vec!["$A".into()], name(&end)].concat();
    let pair = [name(&begin), vec!["$A".into()], name(&end), name(&begin), vec!["$B:1".into()], name(&end)].concat();
    let template = TemplateProcessing::builder()
        .try_single(single)?
        .try_pair(pair)?
        .special_tokens(begin.into_iter().chain(end).collect::<Vec<_>>())
        .build()?;
    tokenizer.with_post_processor(Some(template));
    Ok(tokenizer)
}

impl PieceVocabulary {
    fn read(file: &GgufFile) -> std::result::Result<Self, String> {
        let list = |name: &str| match file.metadata.get(&format!("tokenizer.ggml.{name}")) {
            Some(Value::Array(list)) => Ok(list),
            _ => Err(format!("tokenizer.ggml.{name} is missing or no list")),
        };
        let wrong = |name: &str| format!("tokenizer.ggml.{name} has an entry of another type");
        let texts: Option<Vec<String>> = list("tokens")?.iter().map(|text| text.to_string().ok().cloned()).collect();
        let scores: Option<Vec<f32>> = list("scores")?.iter().map(|score| score.to_f32().ok()).collect();
        let number = |value: &Value| value.to_i32().map_or_else(|_| value.to_u32().ok(), |x| u32::try_from(x).ok());
        let kinds: Option<Vec<u32>> = list("token_type")?.iter().map(number).collect();
        let pieces = Self {
            texts: texts.ok_or_else(|| wrong("tokens"))?,
            scores: scores.ok_or_else(|| wrong("scores"))?,
            kinds: kinds.ok_or_else(|| wrong("token_type"))?,
        };
        let (texts, scores, kinds) = (pieces.texts.len(), pieces.scores.len(), pieces.kinds.len());
        match texts == scores && texts == kinds {
            true => Ok(pieces),
            false => Err(format!("the tokenizer has {texts} tokens, {scores} scores and {kinds} types")),
        }
    }

    /// The merges: all pairs of pieces that make a normal piece, sorted by that piece's score, highest first.
    fn merges(&self) -> Merges {
        let known: HashMap<&str, usize> =
            self.texts.iter().map(String::as_str).enumerate().map(|(i, t)| (t, i)).collect();
        let mut pairs = Vec::new();
        for (merged, text) in self.texts.iter().enumerate().filter(|(i, _)| self.kinds[*i] == kind::NORMAL) {
            for (at, _) in text.char_indices().skip(1) {
                let (left, right) = text.split_at(at);
                if let (Some(left), Some(right)) = (known.get(left), known.get(right)) {
                    pairs.push((merged, *left, *right));
                }
            }
        }
        pairs.sort_by(|a, b| self.scores[b.0].total_cmp(&self.scores[a.0]).then_with(|| a.cmp(b)));
        pairs.into_iter().map(|(_, left, right)| (self.texts[left].clone(), self.texts[right].clone())).collect()
    }
}
