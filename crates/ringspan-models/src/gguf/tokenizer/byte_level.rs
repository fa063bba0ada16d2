//! Byte-level BPE, as in Llama 3, Qwen, GPT-2 and others, which differ in how text is split into words before pairs are merged.

use super::{GgufFile, text};
use crate::error::Result;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior::Isolated;
use tokenizers::{PreTokenizerWrapper, Tokenizer};

/// A pre-tokenizer: a way to split text into words before pairs are merged.
struct PreTokenizer {
    /// The values of `tokenizer.ggml.pre` that stand for it.
    names: &'static [&'static str],
    /// The name by which candle builds the rest of the tokenizer; candle's `qwen2` normalises text to NFC.
    candle: &'static str,
    /// Whether, unless the file says otherwise, words that are tokens are taken without merging, and texts begin with the BOS
    /// token.
    begins: bool,
    /// The rule that splits text into words.
    words: SplitRule,
}

/// A rule that splits text into words.
enum SplitRule {
    /// The rule that candle has for this name.
    Candle,
    /// Each match of a pattern is a word; the patterns are applied one after the other.
    Patterns(&'static [&'static str]),
    /// The rule of GPT-2.
    Gpt2,
    /// The rule of GPT-2, except that each digit is a word of its own.
    Digits,
}

/// The pattern of GPT-4o's tokenizer.
const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The pattern of Mistral's byte-level tokenizers.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The patterns of DeepSeek-V2's tokenizer: line breaks, letters with a case (as of the Unicode version of its time), symbols,
/// trailing spaces, Chinese and neighbouring scripts, and digits.
const DEEPSEEK_V2: [&str; 6] = [
    r"[\r\n]",
    concat!(
        r"\s?[\p{Lu}\p{Ll}\p{Lt}&&",
        r"[^\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}\x{AB30}-\x{AB69}\x{10570}-\x{105BF}\x{16E40}-\x{1DFFF}]]+"
    ),
    r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
    r"\s+$",
    r"[一-龥\x{800}-一가-\x{D7FF}]+",
    r"\p{N}",
];

/// The patterns of DeepSeek-V3's tokenizer: digits, Chinese and kana, and everything else.
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥\x{3040}-\x{30FF}]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

const CUTS: [PreTokenizer; 9] = [
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        candle: "llama3",
        begins: true,
        words: SplitRule::Candle,
    },
    PreTokenizer {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"],
        candle: "llama3",
        begins: false,
        words: SplitRule::Candle,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2"],
        candle: "qwen2",
        begins: false,
        words: SplitRule::Candle,
    },
    PreTokenizer { names: &["gpt-2", "phi-2", "olmo"], candle: "gpt2", begins: false, words: SplitRule::Gpt2 },
    PreTokenizer { names: &["smollm", "refact", "starcoder"], candle: "gpt2", begins: false, words: SplitRule::Digits },
    PreTokenizer { names: &["gpt-4o"], candle: "llama3", begins: false, words: SplitRule::Patterns(&[O200K]) },
    PreTokenizer {
        names: &["deepseek-llm"],
        candle: "llama3",
        begins: false,
        words: SplitRule::Patterns(&DEEPSEEK_V2),
    },
    PreTokenizer { names: &["deepseek-v3"], candle: "llama3", begins: false, words: SplitRule::Patterns(&DEEPSEEK_V3) },
    PreTokenizer { names: &["tekken"], candle: "llama3", begins: true, words: SplitRule::Patterns(&[TEKKEN]) },
];

/// Builds the tokenizer of a file whose kind is `gpt2`.
pub(super) fn tokenizer(file: GgufFile) -> Result<Tokenizer> {
    let pre = text(&file, "tokenizer.ggml.pre").unwrap_or_default().to_owned();
    let Some(cut) = CUTS.iter().find(|cut| cut.names.contains(&pre.as_str())) else {
        let names = CUTS.iter().flat_map(|cut| cut.names).copied().collect::<Vec<_>>().join(", ");
        return Err(file.broken(&format!("tokenizer.ggml.pre '{pre}' is unknown: possible are {names}")));
    };
    let path = file.path().to_owned();
    let broken = |error: &dyn std::fmt::Display| crate::error::Error::Format {
        path: path.clone(),
        problem: format!("tokenizer: {error}"),
    };
    let mut content = file.into_metadata();
    content.metadata.insert("tokenizer.ggml.pre".into(), Value::String(cut.candle.into()));
    if cut.begins {
        for key in ["tokenizer.ggml.ignore_merges", "tokenizer.ggml.add_bos_token"] {
            content.metadata.entry(key.into()).or_insert(Value::Bool(true));
        }
    }
    let mut tokenizer = Tokenizer::from_gguf(&content).map_err(|error| broken(&error))?;
    if let Some(words) = cut.words.pre_tokenizer().map_err(|error| broken(&error))? {
        tokenizer.with_pre_tokenizer(Some(words));
    }
    Ok(tokenizer)
}

impl SplitRule {
    fn pre_tokenizer(&self) -> tokenizers::Result<Option<PreTokenizerWrapper>> {
        let gpt2 = ByteLevel::new(false, true, true);
        Ok(match self {
            Self::Candle => None,
            Self::Gpt2 => Some(gpt2.into()),
            Self::Digits => Some(Sequence::new(vec![Digits::new(true).into(), gpt2.into()]).into()),
            Self::Patterns(patterns) => {
                let split = |pattern: &&str| Split::new(SplitPattern::Regex((*pattern).into()), Isolated, false);
                let splits = patterns.iter().map(|pattern| Ok(split(pattern)?.into()));
                let mut all = splits.collect::<tokenizers::Result<Vec<PreTokenizerWrapper>>>()?;
                all.push(ByteLevel::new(false, true, false).into());
                Some(Sequence::new(all).into())
            }
        })
    }
}
