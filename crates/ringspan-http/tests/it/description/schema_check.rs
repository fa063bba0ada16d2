//! Compares values with schemas of the description.

use super::Description;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Schemas of what answers repeat of requests, whose forms the tests of requests send.
const REPEATED: [&str; 4] = ["ResponseText", "ResponseReasoning", "Temperature", "TopP"];

/// Fields whose values are open: what requests have sent or a model has written, and the description itself.
pub(super) const OPEN: [&str; 7] = ["metadata", "tools", "tool_choice", "input", "info", "paths", "components"];

/// Follows the place of a field that an answer does not have.
const ABSENT: &str = " is absent";

/// Whether a value is of a type that a schema names.
fn is_of_type(name: &Value, value: &Value) -> bool {
    match name.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        Some("number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => panic!("{name} is no type"),
    }
}

/// Whether one of the values of a list, or its only value, is as wanted; `seen` gets its place.
fn one_of(place: &str, rule: &Value, seen: &mut BTreeSet<String>, wanted: impl Fn(&Value) -> bool) -> bool {
    let list = rule.as_array().map_or(std::slice::from_ref(rule), Vec::as_slice);
    let index = list.iter().position(wanted);
    index.is_some_and(|index| {
        seen.insert(format!("{place}/{index}"));
        true
    })
}

impl Description {
    pub(super) fn at(&self, place: &str) -> &Value {
        self.0.pointer(place).unwrap_or_else(|| panic!("{place} is nowhere"))
    }

    /// Compares a value with the schema at a place; `seen` gets the parts of the schema by which the value is admitted.
    ///
    /// Each keyword of the schema must be known here, so that none is passed over.
    pub(super) fn check(&self, at: &str, value: &Value, seen: &mut BTreeSet<String>) -> Result<(), String> {
        let schema = self.at(at).as_object().unwrap_or_else(|| panic!("{at} is no schema"));
        let properties = schema.get("properties").and_then(Value::as_object);
        for (keyword, rule) in schema {
            let place = format!("{at}/{keyword}");
            let (limit, number) = (rule.as_f64().unwrap_or_default(), value.as_f64());
            let length = value.as_array().map(|list| list.len() as f64);
            let admitted = match keyword.as_str() {
                "description" | "contentMediaType" | "contentEncoding" => true,
                "$ref" => {
                    let target = rule.as_str().unwrap().trim_start_matches('#');
                    seen.insert(target.to_owned());
                    self.check(target, value, seen)?;
                    true
                }
                "anyOf" => {
                    let mut problems = Vec::new();
                    for index in 0..rule.as_array().unwrap().len() {
                        let (one, mut by) = (format!("{place}/{index}"), BTreeSet::new());
                        match self.check(&one, value, &mut by) {
                            Ok(()) => seen.extend(by.into_iter().chain([one])),
                            Err(problem) => problems.push(problem),
                        }
                    }
                    if problems.len() == rule.as_array().unwrap().len() {
                        return Err(format!("{at}: no alternative admits {value}: {}", problems.join("; ")));
                    }
                    true
                }
                "type" => one_of(&place, rule, seen, |name| is_of_type(name, value)),
                "enum" => one_of(&place, rule, seen, |listed| listed == value),
                "const" => rule == value,
                "minimum" => number.is_none_or(|number| number >= limit),
                "exclusiveMinimum" => number.is_none_or(|number| number > limit),
                "maximum" => number.is_none_or(|number| number <= limit),
                "minItems" => length.is_none_or(|length| length >= limit),
                "maxItems" => length.is_none_or(|length| length <= limit),
                "maxLength" => value.as_str().is_none_or(|text| text.chars().count() as f64 <= limit),
                "items" => {
                    for item in value.as_array().into_iter().flatten() {
                        self.check(&place, item, seen)?;
                    }
                    true
                }
                "required" => {
                    let has = |name: &Value| value.get(name.as_str().unwrap()).is_some();
                    !value.is_object() || rule.as_array().unwrap().iter().all(has)
                }
                "properties" => {
                    for name in rule.as_object().unwrap().keys() {
                        let field = format!("{place}/{name}");
                        if let Some(inner) = value.get(name) {
                            self.check(&field, inner, seen)?;
                            seen.insert(field);
                        } else if value.is_object() {
                            seen.insert(field + ABSENT);
                        }
                    }
                    true
                }
                "additionalProperties" => {
                    let is_other =
                        |(name, _): &(&String, &Value)| properties.is_none_or(|own| !own.contains_key(*name));
                    let mut others = value.as_object().into_iter().flatten().filter(is_other);
                    match rule.as_bool() {
                        Some(open) => open || others.next().is_none(),
                        None => {
                            others.try_for_each(|(_, inner)| self.check(&place, inner, seen))?;
                            true
                        }
                    }
                }
                "propertyNames" => {
                    assert_eq!(*rule, json!({"pattern": "^[0-9]+$"}), "{place}");
                    let is_number = |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
                    value.as_object().is_none_or(|map| map.keys().all(is_number))
                }
                "contentSchema" => {
                    let inner: Value = serde_json::from_str(value.as_str().unwrap_or_default())
                        .map_err(|error| format!("{at}: {value} is no JSON: {error}"))?;
                    self.check(&place, &inner, seen)?;
                    true
                }
                unknown => panic!("{at}: this test does not know what {unknown} demands"),
            };
            if !admitted {
                return Err(format!("{at}: {keyword} {rule} does not admit {value}"));
            }
        }
        Ok(())
    }

    /// The parts of a schema that must occur in answers, with those of the schemas that it refers to: fields that are not required
    /// must be absent from some. Objects must say whether they have other fields.
    pub(super) fn parts(&self, at: &str, all: &mut BTreeSet<String>) {
        let schema = self.at(at);
        if schema["type"].to_string().contains("\"object\"") {
            assert!(schema.get("additionalProperties").is_some(), "{at} is an object of any form");
        }
        for (keyword, rule) in schema.as_object().unwrap() {
            let place = format!("{at}/{keyword}");
            match keyword.as_str() {
                "$ref" => {
                    let target = rule.as_str().unwrap().trim_start_matches('#').to_owned();
                    let name = target.rsplit('/').next().unwrap();
                    if all.insert(target.clone()) && !REPEATED.contains(&name) {
                        self.parts(&target, all);
                    }
                }
                "anyOf" | "properties" => {
                    let names = match rule {
                        Value::Object(map) => map.keys().cloned().collect(),
                        list => (0..list.as_array().unwrap().len()).map(|index| index.to_string()).collect::<Vec<_>>(),
                    };
                    for name in names {
                        let part = format!("{place}/{name}");
                        self.parts(&part, all);
                        let required = schema["required"].as_array().is_some_and(|list| list.contains(&json!(name)));
                        if keyword == "properties" && !required {
                            all.insert(part.clone() + ABSENT);
                        }
                        all.insert(part);
                    }
                }
                "type" | "enum" => {
                    let count = rule.as_array().map_or(1, Vec::len);
                    all.extend((0..count).map(|index| format!("{place}/{index}")));
                }
                "items" | "additionalProperties" | "contentSchema" if rule.is_object() => self.parts(&place, all),
                _ => {}
            }
        }
    }
}
