//! SentencePiece's own file of a Unigram tokenizer (`spiece.model`), as T5 and UMT5 come with it.
//!
//! Source: Kudo and Richardson, 2018 (arXiv:1808.06226); `sentencepiece_model.proto` of SentencePiece, which has the numbers of fields.

use crate::error::{Error, Result};
use prost::Message;
use std::path::Path;
use tokenizers::decoders::metaspace::Metaspace;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{Precompiled, Replace, Strip};
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, NormalizerWrapper, Tokenizer, normalizers};

/// The file: what of it decides the tokens of a text.
#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<SentencePiece>,
    #[prost(message, optional, tag = "2")]
    trainer_spec: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    normalizer_spec: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
struct SentencePiece {
    #[prost(string, tag = "1")]
    piece: String,
    #[prost(float, tag = "2")]
    score: f32,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct TrainerSpec {
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(bool, tag = "24")]
    treat_whitespace_as_suffix: bool,
    #[prost(bool, tag = "35")]
    byte_fallback: bool,
    #[prost(int32, optional, tag = "40")]
    unk_id: Option<i32>,
    #[prost(int32, optional, tag = "42")]
    eos_id: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct NormalizerSpec {
    #[prost(bytes = "vec", tag = "2")]
    precompiled_charsmap: Vec<u8>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    escape_whitespaces: Option<bool>,
}

/// The value of `model_type` for Unigram, which is also the default.
const UNIGRAM: i32 = 1;
/// The kinds of pieces that are found in a text before it is cut: unknown, control, and those of the user.
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Reads a tokenizer that puts the end token behind a text.
///
/// # Errors
/// A file that is missing or corrupt, another kind than Unigram, settings of white space that other tokenizers than T5's have, and a
/// file without pieces for unknown characters or for the end.
pub(super) fn tokenizer(path: &Path) -> Result<Tokenizer> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let broken = |problem: String| Error::Format { path: path.to_owned(), problem };
    let file = ModelProto::decode(&*bytes).map_err(|error| broken(format!("not a file of SentencePiece: {error}")))?;
    let (trainer, normalizer) = (file.trainer_spec.unwrap_or_default(), file.normalizer_spec.unwrap_or_default());
    let model_type = trainer.model_type.unwrap_or(UNIGRAM);
    if model_type != UNIGRAM {
        return Err(broken(format!(
            "its model type is {model_type}; of SentencePiece's files, only those of Unigram ({UNIGRAM}) are read"
        )));
    }
    if trainer.treat_whitespace_as_suffix || normalizer.escape_whitespaces == Some(false) {
        return Err(broken(format!(
            "treat_whitespace_as_suffix is {} and escape_whitespaces {}; only false and true are read",
            trainer.treat_whitespace_as_suffix,
            normalizer.escape_whitespaces.unwrap_or(true)
        )));
    }
    build(&file.pieces, &trainer, &normalizer).map_err(|error| broken(format!("not a tokenizer: {error}")))
}

fn build(
    pieces: &[SentencePiece],
    trainer: &TrainerSpec,
    normalizer: &NormalizerSpec,
) -> tokenizers::Result<Tokenizer> {
    let id = |number: Option<i32>, default: i32| usize::try_from(number.unwrap_or(default)).ok();
    let (unknown, end) = (id(trainer.unk_id, 0), id(trainer.eos_id, 2));
    let end = end.and_then(|end| Some((pieces.get(end)?.piece.clone(), u32::try_from(end).ok()?)));
    let end = end.ok_or("it has no piece for the end of a text (eos_id)")?;
    let vocabulary = pieces.iter().map(|piece| (piece.piece.clone(), f64::from(piece.score))).collect();
    let mut tokenizer = Tokenizer::new(Unigram::from(vocabulary, unknown, trainer.byte_fallback)?);

    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if !normalizer.precompiled_charsmap.is_empty() {
        steps.push(Precompiled::from(&normalizer.precompiled_charsmap)?.into());
    }
    if normalizer.remove_extra_whitespaces.unwrap_or(true) {
        steps.push(Strip::new(false, true).into());
        steps.push(Replace::new(ReplacePattern::Regex(" {2,}".into()), "▁")?.into());
    }
    let prepend = match normalizer.add_dummy_prefix {
        Some(false) => PrependScheme::Never,
        None | Some(true) => PrependScheme::Always,
    };
    tokenizer.with_normalizer(Some(normalizers::Sequence::new(steps)))?;
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', prepend, true)));
    tokenizer.with_decoder(Some(Metaspace::new('▁', prepend, true)));

    let of_kinds = |kinds: &[i32], special: bool| -> Vec<AddedToken> {
        let chosen = pieces.iter().filter(|piece| piece.kind.is_some_and(|kind| kinds.contains(&kind)));
        chosen.map(|piece| AddedToken::from(piece.piece.clone(), special).normalized(false)).collect()
    };
    tokenizer.add_special_tokens(of_kinds(&[CONTROL, UNKNOWN], true))?;
    tokenizer.add_tokens(of_kinds(&[USER_DEFINED], false))?;
    let template = TemplateProcessing::builder()
        .try_single(vec!["$A".to_owned(), end.0.clone()])?
        .special_tokens(vec![end])
        .build()?;
    tokenizer.with_post_processor(Some(template));
    Ok(tokenizer)
}
