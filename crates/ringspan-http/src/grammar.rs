//! Grammars of answers: JSON schemas, regular expressions, choices and Lark grammars, as constraints of the engine.

use crate::vocabulary::Vocabulary;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use ringspan_serve::engine::request::TokenConstraint;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// White space between the tokens of a JSON text: enough for lines with indentation, and not so much that a model which likes white
/// space would never come to an end.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// A constraint on the text of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Grammar {
    /// A JSON value that a schema accepts.
    JsonSchema(Value),
    /// A text that a regular expression matches from its beginning to its end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a grammar in Lark's language.
    Lark(String),
}

impl Grammar {
    /// Any JSON object.
    pub(crate) fn json_object() -> Self {
        Self::JsonSchema(serde_json::json!({"type": "object"}))
    }

    fn top_level(&self) -> TopLevelGrammar {
        match self {
            Self::JsonSchema(schema) => {
                let mut schema = schema.clone();
                if let Value::Object(map) = &mut schema {
                    map.entry("x-guidance").or_insert_with(|| serde_json::json!({"whitespace_pattern": WHITESPACE}));
                }
                TopLevelGrammar::from_json_schema(schema)
            }
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Choice(choices) => {
                // A JSON string is a string of Lark.
                let choices: Vec<String> = choices.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | ")))
            }
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        }
    }
}

/// Makes constraints for one vocabulary.
pub(crate) struct Grammars {
    factory: ParserFactory,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

impl Grammars {
    /// Reads the vocabulary; `end_tokens` may end a text.
    ///
    /// # Errors
    /// A vocabulary without any of the end tokens, since no grammar could end a text then.
    pub(crate) fn new(vocabulary: &Vocabulary, end_tokens: &[u32]) -> Result<Self, String> {
        let size = vocabulary.size() as u32;
        let ends: Vec<u32> = end_tokens.iter().copied().filter(|token| *token < size).collect();
        let Some(first) = ends.first() else {
            return Err("the model names no token that ends a text, so a grammar could never end one".into());
        };
        let words: Vec<Vec<u8>> = (0..size)
            .map(|token| match vocabulary.is_special(token) || ends.contains(&token) {
                true => [&[TokTrie::SPECIAL_TOKEN_MARKER], vocabulary.bytes(token)].concat(),
                false => vocabulary.bytes(token).to_vec(),
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(size, *first), &words).with_eos_tokens(&ends);
        let environment: TokEnv = Arc::new(Environment { trie });
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &[])
            .map_err(|error| error.to_string())?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory })
    }

    /// The constraint of a grammar.
    ///
    /// # Errors
    /// A grammar that is damaged, impossible, or too large.
    pub(crate) fn constraint(&self, grammar: &Grammar) -> Result<Box<dyn TokenConstraint>, String> {
        let mut matcher = Matcher::new(self.factory.create_parser(grammar.top_level()));
        if let Some(problem) = matcher.get_error() {
            return Err(problem);
        }
        // A schema that nothing satisfies has no first token.
        let first = matcher.compute_mask().map_err(|error| error.to_string())?;
        if first.is_zero() && !matcher.is_accepting().map_err(|error| error.to_string())? {
            return Err("no text satisfies it".into());
        }
        Ok(Box::new(Constraint { matcher }))
    }
}

/// The vocabulary as the grammar library reads it; texts are cut into tokens greedily, since nothing is forced.
struct Environment {
    trie: TokTrie,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

struct Constraint {
    matcher: Matcher,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl TokenConstraint for Constraint {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
        for (token, logit) in logits.iter_mut().enumerate() {
            if token >= allowed.len() || !allowed.get(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<bool, String> {
        self.matcher.consume_token(token).map_err(|error| error.to_string())?;
        Ok(self.matcher.is_stopped())
    }
}
