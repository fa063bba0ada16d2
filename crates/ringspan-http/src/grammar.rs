//! Grammars of answers: JSON schemas, regular expressions, choices and Lark grammars, as constraints of the engine.

use crate::vocabulary::Vocabulary;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use ringspan_serve::engine::request::TokenConstraint;
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;
use toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// White space between the tokens of a JSON text: enough for lines with indentation, and not so much that a model which likes white
/// space would never come to an end.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// The formats of strings that the grammar library knows.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Bytes of the text that is tried with each grammar.
const TRIED_BYTES: usize = 64;

/// The problem of a text that no token can follow, and that cannot end either.
const DEAD_END: &str = "no token can follow";

/// A constraint on the text of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Grammar {
    /// The field of the request that asks for it.
    pub(crate) field: String,
    syntax: Syntax,
}

/// What a text must be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Syntax {
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
    /// The grammar that `field` asks for.
    pub(crate) fn new(field: impl Into<String>, syntax: Syntax) -> Self {
        Self { field: field.into(), syntax }
    }

    /// Any JSON object.
    pub(crate) fn json_object(field: impl Into<String>) -> Self {
        Self::new(field, Syntax::JsonSchema(json!({"type": "object"})))
    }

    fn top_level(&self) -> TopLevelGrammar {
        match &self.syntax {
            Syntax::JsonSchema(schema) => TopLevelGrammar::from_json_schema(library_schema(schema)),
            Syntax::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Syntax::Choice(choices) => TopLevelGrammar::from_lark(one_of(choices)),
            Syntax::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        }
    }
}

/// A schema as the grammar library reads it: with the limit of white space, unless the request has its own, and without formats that
/// the library does not know.
fn library_schema(schema: &Value) -> Value {
    // `true` admits the same values as `{}`, which has a place for options.
    let mut schema = if *schema == Value::Bool(true) { json!({}) } else { schema.clone() };
    drop_unknown_formats(&mut schema);
    if let Value::Object(keywords) = &mut schema
        && let Value::Object(options) = keywords.entry("x-guidance").or_insert_with(|| json!({}))
        && options.get("whitespace_pattern").is_none_or(Value::is_null)
        // With this option there is no white space at all.
        && options.get("whitespace_flexible") != Some(&Value::Bool(false))
    {
        options.insert("whitespace_pattern".into(), WHITESPACE.into());
    }
    schema
}

/// Drops formats that the grammar library would refuse: for JSON Schema they are annotations. They are looked for wherever a reference
/// may point, except in what is data; properties have names of their own, so that `format` may be one of them.
fn drop_unknown_formats(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(drop_unknown_formats),
        Value::Object(keywords) => {
            let format = keywords.get("format").and_then(Value::as_str);
            if format.is_some_and(|format| !FORMATS.contains(&format)) {
                keywords.shift_remove("format");
            }
            for (keyword, value) in keywords.iter_mut() {
                match (keyword.as_str(), value) {
                    ("enum" | "const" | "default" | "examples", _) => {}
                    ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                        schemas.values_mut().for_each(drop_unknown_formats);
                    }
                    (_, value) => drop_unknown_formats(value),
                }
            }
        }
        _ => {}
    }
}

/// The grammar of one of these texts in Lark's language. A terminal is one regular expression, which may be large; as a rule, each
/// text would be an alternative of the parser, which has room for 2,000 at one place.
fn one_of(choices: &[String]) -> String {
    // A JSON string is a string of Lark, but for this character, which Lark wants to be escaped as well.
    let string = |text: &String| Value::from(text.as_str()).to_string().replace('\u{7f}', "\\u007f");
    let strings: Vec<String> = choices.iter().map(string).collect();
    format!("start: CHOICE\nCHOICE: {}", strings.join(" | "))
}

/// What the grammar library says of a problem, without its marks, and in words of the request.
fn explained(problem: impl fmt::Display) -> String {
    let problem = problem.to_string().replace("<non-verbose/>", "");
    let problem = problem.trim();
    if problem == "NoExtensionBias" {
        return DEAD_END.into();
    }
    let items = problem.strip_prefix("Parser Error: Current row has ").and_then(|rest| rest.split_once("; consider"));
    if let Some((items, _)) = items {
        return format!(
            "it has too many alternatives at one place of the text, where an optional property of an object counts as four: {items}"
        );
    }
    if problem.contains("too many expressions constructed") {
        return format!(
            "its regular expressions take too much work, as repetitions of repetitions such as (a{{1,99}}){{1,99}} do: {problem}"
        );
    }
    problem
        .replace(
            "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
            "`oneOf` is supported only if types or constants tell its schemas apart; write \"x-guidance\": {\"coerce_one_of\": true} \
             in the outermost schema to have it read as anyOf",
        )
        .replace("Unimplemented keys:", "these keywords of JSON Schema are not supported:")
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
    pub(crate) fn constraint(&self, grammar: &Grammar) -> Result<Constraint, String> {
        let matcher = self.matcher(grammar).map_err(|problem| format!("{}: {problem}", grammar.field))?;
        Ok(Constraint { matcher })
    }

    fn matcher(&self, grammar: &Grammar) -> Result<Matcher, String> {
        let mut matcher = Matcher::new(self.factory.create_parser(grammar.top_level()));
        if let Some(problem) = matcher.get_error() {
            return Err(explained(problem));
        }
        match matcher.compute_mask().map_err(explained) {
            Ok(first) => self.try_text(matcher.deep_clone(), first)?,
            // A schema that nothing satisfies has no first token.
            Err(problem) if problem == DEAD_END => return Err("no text satisfies it".into()),
            Err(problem) => return Err(problem),
        }
        Ok(matcher)
    }

    /// Follows a grammar through a text that it admits, since the library finds some of its limits exceeded only there, where a client
    /// would take it for a failure of the server. `allowed` are the tokens that may come first.
    fn try_text(&self, mut matcher: Matcher, mut allowed: SimpleVob) -> Result<(), String> {
        let trie = self.factory.tok_env().tok_trie();
        // Long tokens lead deep into a text, but white space leads nowhere.
        let depth = |token: &TokenId| trie.token(*token).trim_ascii().len();
        let mut tried = 0;
        while tried < TRIED_BYTES {
            let within = allowed.iter().filter(|token| !trie.eos_tokens().contains(token));
            let Some(token) = within.max_by_key(depth) else { break };
            matcher.consume_token(token).map_err(explained)?;
            if matcher.is_stopped() {
                break;
            }
            tried += trie.token(token).len().max(1);
            allowed = match matcher.compute_mask().map_err(explained) {
                Ok(allowed) => allowed,
                // Other texts may have an end.
                Err(problem) if problem == DEAD_END => break,
                Err(problem) => return Err(problem),
            };
        }
        Ok(())
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

/// What a grammar allows after the tokens of a text so far. A clone is of a text of its own.
pub(crate) struct Constraint {
    matcher: Matcher,
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        Self { matcher: self.matcher.deep_clone() }
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl TokenConstraint for Constraint {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(explained)?;
        for (token, logit) in logits.iter_mut().enumerate() {
            if token >= allowed.len() || !allowed.get(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<bool, String> {
        self.matcher.consume_token(token).map_err(explained)?;
        Ok(self.matcher.is_stopped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_schema_keep_the_limit_of_white_space() {
        let options = |schema: Value| library_schema(&schema)["x-guidance"].clone();
        let limited = json!({"whitespace_pattern": WHITESPACE});
        for schema in [json!(true), json!({"type": "object"}), json!({"x-guidance": {"whitespace_pattern": null}})] {
            assert_eq!(options(schema), limited);
        }
        let coerced = json!({"x-guidance": {"coerce_one_of": true}});
        assert_eq!(options(coerced), json!({"coerce_one_of": true, "whitespace_pattern": WHITESPACE}));
        for own in [json!({"whitespace_pattern": " "}), json!({"whitespace_flexible": false})] {
            assert_eq!(options(json!({"x-guidance": own})), own);
        }
    }

    #[test]
    fn unknown_formats_are_dropped_where_format_is_a_keyword() {
        let schema = json!({"properties": {"format": {"type": "string", "format": "password"},
                "default": {"format": "path"}, "time": {"format": "date-time"}},
            "items": [{"anyOf": [{"format": "binary"}]}], "components": {"secret": {"format": "password"}},
            "enum": [{"format": "path"}], "const": {"format": "path"}, "default": {"format": "path"},
            "examples": [{"format": "path"}]});
        let mut kept = schema.clone();
        for place in ["/properties/format", "/properties/default", "/items/0/anyOf/0", "/components/secret"] {
            kept.pointer_mut(place).and_then(Value::as_object_mut).unwrap().shift_remove("format");
        }
        let mut read = schema;
        drop_unknown_formats(&mut read);
        assert_eq!(read, kept);
    }
}
