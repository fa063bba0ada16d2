//! The fields of a JSON body: each is taken once, with its type and range, and what is left over is refused by name.

use crate::error::{ApiError, Result};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// Fields of requests that never change a result: names and notes for the operator's own records, hints for caches, and guesses
/// of the answer (`prediction`), by which a server may be faster, but may not write another text.
const WITHOUT_EFFECT: [&str; 9] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "request_id",
];

/// Most bytes of an unknown name that is compared with the known ones, which takes longer the longer it is.
const LONGEST_MISSPELLED: usize = 64;

/// A JSON object that is being read.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Precedes names in messages, such as `stream_options.`.
    path: String,
    /// The names that were asked for, in this order.
    known: Vec<String>,
    /// The names among `known` whose only possible value is the one that changes nothing.
    neutral: Vec<String>,
}

impl Fields {
    /// The fields of a body.
    pub(crate) fn new(map: Map<String, Value>) -> Self {
        Self { map, path: String::new(), known: Vec::new(), neutral: Vec::new() }
    }

    /// The fields of an object at `path`.
    pub(crate) fn at(path: &str, value: Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { path: format!("{path}."), ..Self::new(map) }),
            other => Err(ApiError::field(path, format!("must be an object, not {}", kind(&other)))),
        }
    }

    /// The names of the fields that are left.
    pub(crate) fn names(&self) -> Vec<String> {
        self.map.keys().cloned().collect()
    }

    /// The full name of a field, for messages.
    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// Takes any value; null counts as absent.
    pub(crate) fn value(&mut self, field: &str) -> Option<Value> {
        self.known.push(field.to_owned());
        self.map.shift_remove(field).filter(|value| !value.is_null())
    }

    /// Unwraps the `value` that was taken from `field`, or returns the error that the field is required.
    pub(crate) fn required<T>(&self, field: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| ApiError::field(self.name(field), "is required"))
    }

    fn wrong<T>(&self, field: &str, expected: &str, value: &Value) -> Result<T> {
        Err(ApiError::field(self.name(field), format!("must be {expected}, not {}", shown(value))))
    }

    /// Takes a string.
    pub(crate) fn string(&mut self, field: &str) -> Result<Option<String>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => self.wrong(field, "a string", &other),
        }
    }

    /// Takes a truth value.
    pub(crate) fn boolean(&mut self, field: &str) -> Result<Option<bool>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => self.wrong(field, "true or false", &other),
        }
    }

    /// Takes a list.
    pub(crate) fn list(&mut self, field: &str) -> Result<Option<Vec<Value>>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => self.wrong(field, "a list", &other),
        }
    }

    /// Takes an object.
    pub(crate) fn object(&mut self, field: &str) -> Result<Option<Map<String, Value>>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => self.wrong(field, "an object", &other),
        }
    }

    /// Takes the fields of an object.
    pub(crate) fn fields(&mut self, field: &str) -> Result<Option<Self>> {
        let path = self.name(field);
        self.value(field).map(|value| Self::at(&path, value)).transpose()
    }

    /// Takes an integer within a range; floats without a fraction count, as clients of dynamic languages send them.
    pub(crate) fn integer(&mut self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let Some(whole) = whole(&value) else { return self.wrong(field, "an integer", &value) };
        match i64::try_from(whole) {
            Ok(integer) if range.contains(&integer) => Ok(Some(integer)),
            _ => Err(outside(self.name(field), value, range.start(), range.end())),
        }
    }

    /// Takes a count: an integer of at least `least`.
    pub(crate) fn count(&mut self, field: &str, least: usize) -> Result<Option<usize>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let Some(whole) = whole(&value) else { return self.wrong(field, "an integer", &value) };
        if whole < least as i128 {
            return Err(ApiError::field(self.name(field), format!("must be at least {least}, and is {value}")));
        }
        match usize::try_from(whole) {
            Ok(count) => Ok(Some(count)),
            Err(_) => Err(outside(self.name(field), value, &least, &usize::MAX)),
        }
    }

    /// Takes a finite number within a range.
    pub(crate) fn number(&mut self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f32>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number as f32)),
            Some(number) => Err(outside(self.name(field), number, range.start(), range.end())),
            None => self.wrong(field, "a number", &value),
        }
    }

    /// Takes a number above 0, up to `most`; one that is too small for an f32 becomes the smallest, which is not 0.
    pub(crate) fn positive(&mut self, field: &str, most: f64) -> Result<Option<f32>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number <= most => Ok(Some((number as f32).max(f32::MIN_POSITIVE))),
            Some(number) => Err(ApiError::field(
                self.name(field),
                format!("must be more than 0, and at most {most}, and is {number}"),
            )),
            None => self.wrong(field, "a number", &value),
        }
    }

    /// Takes a string or a list of strings.
    pub(crate) fn strings(&mut self, field: &str) -> Result<Vec<String>> {
        let value = self.value(field);
        let text = |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        };
        let name = self.name(field);
        let wrong = || ApiError::field(name, "must be a string or a list of strings");
        match value {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.into_iter().map(text).collect::<Option<_>>().ok_or_else(wrong),
            Some(value) => text(value).map(|text| vec![text]).ok_or_else(wrong),
        }
    }

    /// Takes a list of token ids.
    pub(crate) fn tokens(&mut self, field: &str) -> Result<Option<Vec<u32>>> {
        let Some(list) = self.list(field)? else { return Ok(None) };
        token_ids(&list).map(Some).ok_or_else(|| ApiError::field(self.name(field), "must be a list of token ids"))
    }

    /// Refuses a field unless it has the value that changes nothing.
    pub(crate) fn only(&mut self, field: &str, neutral: &[Value], reason: &str) -> Result<()> {
        self.neutral.push(field.to_owned());
        match self.value(field) {
            Some(value) if !neutral.contains(&value) => {
                // A long value is left out: "a list is not supported" would read as if another kind of value were.
                let value = short(&value).map(|value| format!("{value} ")).unwrap_or_default();
                Err(ApiError::field(self.name(field), format!("{value}is not supported: {reason}")))
            }
            _ => Ok(()),
        }
    }

    /// Takes the fields of a request for a text that never change it, whatever their values.
    pub(crate) fn ignore_without_effect(&mut self) {
        for field in WITHOUT_EFFECT {
            self.value(field);
        }
    }

    /// Refuses the fields that were not taken, and says which are possible.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { map, path, known, neutral } = self;
        let Some((name, _)) = map.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
        let possible: BTreeSet<&str> =
            known.iter().filter(|name| !neutral.contains(name)).map(String::as_str).collect();
        let neutral: BTreeSet<&str> = neutral.iter().map(String::as_str).collect();
        let mut message = "is not supported here, and might change the result".to_owned();
        if let Some(nearest) = nearest(name, &possible) {
            message = format!("did you mean `{nearest}`? `{name}` {message}");
        }
        for (which, names) in [("possible are ", possible), ("with the value that changes nothing: ", neutral)] {
            if !names.is_empty() {
                let names: Vec<&str> = names.into_iter().collect();
                message.push_str(&format!("; {which}{}", names.join(", ")));
            }
        }
        Err(ApiError { code: Some("unknown_parameter"), ..ApiError::field(format!("{path}{name}"), message) })
    }
}

/// The token ids of a list of numbers, if all are.
pub(crate) fn token_ids(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

/// A number without a fraction, which may be too large for an integer of the machine.
fn whole(value: &Value) -> Option<i128> {
    let float = value.as_f64().filter(|x| x.fract() == 0.0).map(|x| x as i128);
    value.as_i64().map(i128::from).or(value.as_u64().map(i128::from)).or(float)
}

/// The one of `names` that `name` is probably a misspelling of: a third of its characters may differ.
fn nearest<'a>(name: &str, names: &BTreeSet<&'a str>) -> Option<&'a str> {
    if name.len() > LONGEST_MISSPELLED {
        return None;
    }
    let name = name.to_ascii_lowercase();
    let (distance, nearest) = names.iter().map(|known| (strsim::osa_distance(&name, known), *known)).min()?;
    (distance <= name.chars().count() / 3).then_some(nearest)
}

fn outside<T: Display>(name: String, value: impl Display, least: &T, most: &T) -> ApiError {
    ApiError::field(name, format!("must be between {least} and {most}, and is {value}"))
}

/// The kind of a JSON value, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value for a message: itself where it is short.
fn shown(value: &Value) -> String {
    short(value).unwrap_or_else(|| kind(value).to_owned())
}

/// A value as it is written, where that is short.
fn short(value: &Value) -> Option<String> {
    match value {
        Value::Array(_) | Value::Object(_) => None,
        Value::String(text) if text.chars().count() > 40 => None,
        short => Some(short.to_string()),
    }
}
