//! The sampling fields of a request, the same for all routes that generate.

use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::grammar::{Grammar, Syntax};
use ringspan_serve::engine::request::SamplingParams;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Upper limit of texts for one prompt.
const MOST_CHOICES: i64 = 128;
/// Most alternatives of a token.
pub(crate) const MOST_LOGPROBS: i64 = 20;

/// How texts are drawn and where they end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sampling {
    /// How tokens are drawn.
    pub(crate) params: SamplingParams,
    /// Number of texts for each prompt.
    pub(crate) n: usize,
    /// Upper limit of generated tokens; without it, a text may fill the model's longest sequence.
    pub(crate) max_tokens: Option<usize>,
    /// Stop tokens cannot be drawn before there are this many tokens.
    pub(crate) min_tokens: usize,
    /// A text ends before the first of these strings.
    pub(crate) stop: Vec<String>,
    /// A text ends at each of these tokens, as at the model's own end tokens.
    pub(crate) stop_token_ids: Vec<u32>,
    /// Whether the model's own end tokens end nothing.
    pub(crate) ignore_eos: bool,
    /// Whether special tokens are left out of texts.
    pub(crate) skip_special_tokens: bool,
    /// Report the log-probabilities of generated tokens, and this many alternatives of each.
    pub(crate) logprobs: Option<usize>,
    /// Report the log-probabilities of the prompt's tokens, and this many alternatives of each.
    pub(crate) prompt_logprobs: Option<usize>,
    /// Report the ids of tokens.
    pub(crate) return_token_ids: bool,
    /// A constraint on the text.
    pub(crate) grammar: Option<Grammar>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            params: SamplingParams::default(),
            n: 1,
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            skip_special_tokens: true,
            logprobs: None,
            prompt_logprobs: None,
            return_token_ids: false,
            grammar: None,
        }
    }
}

impl Sampling {
    /// The values of fields that a request leaves out, from the model's `generation_config.json`: the fields that vLLM takes from
    /// it.
    ///
    /// # Errors
    /// A field of the wrong type or out of range.
    pub(crate) fn defaults(generation_config: Map<String, Value>) -> Result<Self> {
        let mut sampling = Self::default();
        let mut fields = Fields::new(generation_config);
        sampling.take_params(&mut fields)?;
        sampling.max_tokens = fields.count("max_new_tokens", 1)?;
        Ok(sampling)
    }

    fn take_params(&mut self, fields: &mut Fields) -> Result<()> {
        let params = &mut self.params;
        if let Some(temperature) = fields.number("temperature", 0.0..=100.0)? {
            params.temperature = temperature;
        }
        if let Some(top_k) = fields.integer("top_k", -1..=i64::from(u32::MAX))? {
            params.top_k = usize::try_from(top_k).ok().filter(|top_k| *top_k > 0);
        }
        if let Some(top_p) = fields.positive("top_p", 1.0)? {
            params.top_p = Some(top_p).filter(|top_p| *top_p < 1.0);
        }
        if let Some(min_p) = fields.number("min_p", 0.0..=1.0)? {
            params.min_p = Some(min_p).filter(|min_p| *min_p > 0.0);
        }
        // Logits divided by less would not be finite.
        if let Some(penalty) = fields.number("repetition_penalty", 1e-6..=1e6)? {
            params.repetition_penalty = penalty;
        }
        Ok(())
    }

    /// Reads the fields that all routes of texts have.
    ///
    /// # Errors
    /// A field of the wrong type or out of range.
    pub(crate) fn take(defaults: &Self, fields: &mut Fields, vocabulary: usize) -> Result<Self> {
        let mut sampling = defaults.clone();
        sampling.take_params(fields)?;
        let params = &mut sampling.params;
        params.presence_penalty = fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0);
        params.frequency_penalty = fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0);
        params.logit_bias = logit_bias(fields, vocabulary)?;
        params.seed = fields.integer("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned);
        sampling.n = fields.integer("n", 1..=MOST_CHOICES)?.map_or(1, |n| n as usize);
        sampling.min_tokens = fields.count("min_tokens", 0)?.unwrap_or(0);
        sampling.stop = stop_strings(fields, "stop")?;
        let stop_token_ids = fields.tokens("stop_token_ids")?.unwrap_or_default();
        if let Some(token) = stop_token_ids.iter().find(|token| **token as usize >= vocabulary) {
            return Err(outside(fields.name("stop_token_ids"), *token, vocabulary));
        }
        sampling.stop_token_ids = stop_token_ids;
        sampling.ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
        sampling.skip_special_tokens = fields.boolean("skip_special_tokens")?.unwrap_or(true);
        sampling.prompt_logprobs =
            fields.integer("prompt_logprobs", 0..=MOST_LOGPROBS)?.map(|logprobs| logprobs as usize);
        sampling.return_token_ids = fields.boolean("return_token_ids")?.unwrap_or(false);
        sampling.grammar = grammar(fields)?;
        neutral(fields)?;
        Ok(sampling)
    }

    /// The parameters of text `index` of `n`: each text has its own seed, derived from the request's.
    pub(crate) fn params_of(&self, index: usize) -> SamplingParams {
        let seed = self.params.seed.map(|seed| seed.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        SamplingParams { seed, ..self.params.clone() }
    }
}

/// Reads stop strings, none of which may be empty.
pub(crate) fn stop_strings(fields: &mut Fields, field: &str) -> Result<Vec<String>> {
    let stop = fields.strings(field)?;
    match stop.iter().any(String::is_empty) {
        true => {
            Err(ApiError::field(fields.name(field), "must not contain an empty string, which would end every text"))
        }
        false => Ok(stop),
    }
}

fn outside(name: String, token: u32, vocabulary: usize) -> ApiError {
    ApiError::field(name, format!("token {token} is outside the vocabulary of {vocabulary}"))
}

fn logit_bias(fields: &mut Fields, vocabulary: usize) -> Result<BTreeMap<u32, f32>> {
    let Some(map) = fields.fields("logit_bias")? else { return Ok(BTreeMap::new()) };
    let mut map = map;
    let tokens = map.names();
    let each = |token: String| {
        let bias = map.number(&token, -100.0..=100.0)?.unwrap_or(0.0);
        let id =
            token.parse::<u32>().map_err(|_| ApiError::field("logit_bias", format!("`{token}` is no token id")))?;
        if id as usize >= vocabulary {
            return Err(outside("logit_bias".into(), id, vocabulary));
        }
        Ok((id, bias))
    };
    tokens.into_iter().map(each).collect()
}

/// Reads `response_format` (OpenAI's) or `structured_outputs` (vLLM's).
fn grammar(fields: &mut Fields) -> Result<Option<Grammar>> {
    let format = fields.fields("response_format")?;
    let format = format.map(|format| response_format(format, "json_schema.schema")).transpose()?.flatten();
    let structured = fields.fields("structured_outputs")?.map(structured_outputs).transpose()?.flatten();
    match (format, structured) {
        (Some(_), Some(_)) => {
            Err(ApiError::field("structured_outputs", "contradicts response_format: give one of them"))
        }
        (format, structured) => Ok(format.or(structured)),
    }
}

/// The grammar of a format, which has its schema at `schema_field`.
pub(crate) fn response_format(mut format: Fields, schema_field: &str) -> Result<Option<Grammar>> {
    let kind = format.string("type")?;
    let grammar = match format.required("type", kind)?.as_str() {
        "text" => None,
        "json_object" => Some(Grammar::json_object(format.name("type"))),
        "json_schema" => {
            let schema_field = format.name(schema_field);
            let mut schema = match format.fields("json_schema")? {
                Some(inner) => inner,
                // The Responses API has the schema's fields in the same object as the type.
                None => std::mem::replace(&mut format, Fields::new(Map::new())),
            };
            let value = schema.value("schema");
            for note in ["name", "description"] {
                schema.string(note)?;
            }
            schema.boolean("strict")?;
            let value = value.ok_or_else(|| ApiError::field(&schema_field, "is required"))?;
            schema.finish()?;
            Some(Grammar::new(schema_field, Syntax::JsonSchema(value)))
        }
        other => {
            let message = format!("must be text, json_object or json_schema, not {other}");
            return Err(ApiError::field(format.name("type"), message));
        }
    };
    format.finish()?;
    Ok(grammar)
}

fn structured_outputs(mut fields: Fields) -> Result<Option<Grammar>> {
    let mut all = Vec::new();
    if let Some(schema) = fields.value("json") {
        // vLLM takes a schema as an object, or as its text.
        let parsed = match &schema {
            Value::String(text) => serde_json::from_str(text)
                .map_err(|error| ApiError::field(fields.name("json"), format!("is no JSON: {error}")))?,
            _ => schema,
        };
        all.push(Grammar::new(fields.name("json"), Syntax::JsonSchema(parsed)));
    }
    if let Some(regex) = fields.string("regex")? {
        all.push(Grammar::new(fields.name("regex"), Syntax::Regex(regex)));
    }
    let choice = fields.strings("choice")?;
    if !choice.is_empty() {
        all.push(Grammar::new(fields.name("choice"), Syntax::Choice(choice)));
    }
    if let Some(grammar) = fields.string("grammar")? {
        all.push(Grammar::new(fields.name("grammar"), Syntax::Lark(grammar)));
    }
    if fields.boolean("json_object")? == Some(true) {
        all.push(Grammar::json_object(fields.name("json_object")));
    }
    fields.finish()?;
    match all.len() {
        0 => Err(ApiError::field("structured_outputs", "needs one of json, regex, choice, grammar, json_object")),
        1 => Ok(all.pop()),
        _ => Err(ApiError::field("structured_outputs", "has several grammars, and a text can follow one")),
    }
}

/// Accepts fields of other servers that have the value by which nothing changes, and refuses other values.
fn neutral(fields: &mut Fields) -> Result<()> {
    let here = "this server has no such option";
    fields.only("use_beam_search", &[json!(false)], here)?;
    fields.only("length_penalty", &[json!(1), json!(1.0)], here)?;
    fields.only("spaces_between_special_tokens", &[json!(true)], here)?;
    fields.only("include_stop_str_in_output", &[json!(false)], "texts end before their stop string")?;
    fields.only("bad_words", &[json!([])], "use logit_bias")?;
    fields.only("allowed_token_ids", &[], "use structured_outputs")?;
    refuse_priority(fields)?;
    fields.ignore_without_effect();
    Ok(())
}

/// Accepts only priority 0, since requests are computed in the order in which they come.
pub(crate) fn refuse_priority(fields: &mut Fields) -> Result<()> {
    let first_come = "requests are computed in the order in which they come";
    fields.only("priority", &[json!(0), json!(0.0)], first_come)
}

/// Refuses `prompt_logprobs` and `return_token_ids` on routes whose response format has no field for them.
pub(crate) fn refuse_token_reports(fields: &mut Fields) -> Result<()> {
    let there = "answers of this route have no place for it; use /v1/chat/completions or /v1/completions";
    fields.only("prompt_logprobs", &[], there)?;
    fields.only("return_token_ids", &[json!(false)], there)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(body: Value) -> Result<Sampling> {
        let Value::Object(map) = body else { panic!("no object") };
        let mut fields = Fields::new(map);
        let sampling = Sampling::take(&Sampling::default(), &mut fields, 100)?;
        fields.finish()?;
        Ok(sampling)
    }

    fn message(body: Value) -> String {
        take(body).expect_err("refused").message
    }

    #[test]
    fn values_that_switch_off_are_none() {
        let sampling =
            take(json!({"top_k": -1, "top_p": 1, "min_p": 0, "stop": "x", "seed": -1, "user": "me"})).unwrap();
        assert_eq!((sampling.params.top_k, sampling.params.top_p, sampling.params.min_p), (None, None, None));
        assert_eq!((sampling.stop, sampling.params.seed), (vec!["x".to_owned()], Some(u64::MAX)));
    }

    #[test]
    fn a_top_p_that_no_f32_is_small_enough_for_keeps_the_most_likely_token() {
        assert_eq!(take(json!({"top_p": 1e-50})).unwrap().params.top_p, Some(f32::MIN_POSITIVE));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_range() {
        assert_eq!(message(json!({"temperature": -1})), "temperature: must be between 0 and 100, and is -1");
        assert_eq!(message(json!({"top_p": "x"})), "top_p: must be a number, not \"x\"");
        assert_eq!(message(json!({"n": 0})), "n: must be between 1 and 128, and is 0");
        assert_eq!(message(json!({"stop": [1]})), "stop: must be a string or a list of strings");
        assert_eq!(
            message(json!({"stop": [""]})),
            "stop: must not contain an empty string, which would end every text"
        );
        assert_eq!(
            message(json!({"logit_bias": {"100": 1}})),
            "logit_bias: token 100 is outside the vocabulary of 100"
        );
        assert!(message(json!({"typo": 1})).starts_with("typo: is not supported here, and might change the result"));
        assert!(message(json!({"typo": 1})).contains("possible are frequency_penalty, ignore_eos,"));
        for (typo, meant) in [("temprature", "temperature"), ("topP", "top_p"), ("stops", "stop")] {
            let start = format!("{typo}: did you mean `{meant}`? `{typo}` is not supported here, and might");
            assert!(message(json!({typo: 1})).starts_with(&start), "{}", message(json!({typo: 1})));
        }
        assert_eq!(
            message(json!({"seed": 9_223_372_036_854_775_808u64})),
            "seed: must be between -9223372036854775808 and 9223372036854775807, and is 9223372036854775808"
        );
        assert_eq!(message(json!({"seed": 1.5})), "seed: must be an integer, not 1.5");
        assert_eq!(message(json!({"min_tokens": -1})), "min_tokens: must be at least 0, and is -1");
        assert!(message(json!({"min_tokens": 1e30})).starts_with("min_tokens: must be between 0 and "));
        assert_eq!(message(json!({"bad_words": ["x"]})), "bad_words: is not supported: use logit_bias");
        assert!(message(json!({"top_p": 0})).starts_with("top_p: must be more than 0"));
        assert!(message(json!({"priority": 1})).starts_with("priority: 1 is not supported"));
        assert!(message(json!({"use_beam_search": true})).starts_with("use_beam_search: true is not supported"));
        assert!(message(json!({"response_format": {"type": "xml"}})).starts_with("response_format.type: must be"));
    }

    #[test]
    fn generation_configs_set_what_requests_leave_out() {
        let config =
            json!({"temperature": 0.6, "top_k": 20, "eos_token_id": [1], "max_new_tokens": 7, "do_sample": true});
        let Value::Object(config) = config else { panic!("no object") };
        let defaults = Sampling::defaults(config).unwrap();
        let sampling = Sampling::take(&defaults, &mut Fields::new(Map::new()), 100).unwrap();
        assert_eq!((sampling.params.temperature, sampling.params.top_k, sampling.max_tokens), (0.6, Some(20), Some(7)));
    }

    #[test]
    fn each_text_has_its_seed() {
        let sampling = take(json!({"seed": 5, "n": 2})).unwrap();
        assert_eq!(sampling.params_of(0).seed, Some(5));
        assert_ne!(sampling.params_of(1).seed, Some(5));
    }
}
