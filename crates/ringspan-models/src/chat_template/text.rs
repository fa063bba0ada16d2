//! Values as Python writes them into texts: templates that print a flag or a list mean `True` and `['a']`.

use minijinja::Value;
use minijinja::value::ValueKind;

/// What Python's `str()` returns.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => repr(value),
    }
}

/// What Python's `repr()` returns.
fn repr(value: &Value) -> String {
    let all = |values: minijinja::value::ValueIter| values.map(|one| repr(&one)).collect::<Vec<_>>().join(", ");
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => value.try_iter().map_or_else(|_| value.to_string(), |values| format!("[{}]", all(values))),
        ValueKind::Map => {
            let Ok(keys) = value.try_iter() else { return value.to_string() };
            let pair = |key: Value| format!("{}: {}", repr(&key), repr(&value.get_item(&key).unwrap_or_default()));
            format!("{{{}}}", keys.map(pair).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// A string in the quotation marks that Python chooses.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_written_as_python_writes_them() {
        // What Python's str() returns.
        for (value, written) in [
            (json!("it's\n"), "it's\n"),
            (json!(true), "True"),
            (json!(false), "False"),
            (json!(null), "None"),
            (json!(-3), "-3"),
            (json!(1.5), "1.5"),
            (json!(2.0), "2.0"),
            (json!([]), "[]"),
            (json!(["it's", "a\n", "\"'", true, null, 1]), "[\"it's\", 'a\\n', '\"\\'', True, None, 1]"),
            (json!({"b": {"x": "é"}, "a": [1]}), "{'b': {'x': 'é'}, 'a': [1]}"),
        ] {
            assert_eq!(text(&Value::from_serialize(&value)), written);
        }
        assert_eq!(text(&Value::UNDEFINED), "");
    }
}
