//! JSON as Python writes it, for which templates were written.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value as TemplateValue};
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::Formatter;
use std::io::{Result, Write};

/// Most spaces of an indent: a template must not make a server write more than it has memory for.
const WIDEST_INDENT: usize = 64;

/// `tojson` of templates, with the arguments that Hugging Face's has: `indent`, `ensure_ascii`, `separators` and `sort_keys`.
pub(super) fn tojson(value: &TemplateValue, options: Kwargs) -> std::result::Result<TemplateValue, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if let Some(spaces) = indent.filter(|spaces| *spaces > WIDEST_INDENT) {
        let problem = format!("tojson: an indent of {spaces} spaces; at most {WIDEST_INDENT} are possible");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        // With a line for each item, no space follows its comma.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(all) => {
            let problem =
                format!("tojson: separators must be the text between items and the one after keys, not {all:?}");
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    };
    let format = PythonFormat {
        indent,
        item_separator,
        key_separator,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        depth: 0,
        is_empty: true,
    };
    let sorts = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, format);
    if sorts {
        let mut sorted: Value = serde_json::to_value(value).map_err(failed)?;
        sorted.sort_all_objects();
        sorted.serialize(&mut serializer).map_err(failed)?;
    } else {
        value.serialize(&mut serializer).map_err(failed)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned().into())
}

/// The layout of Python's `json.dumps`.
struct PythonFormat {
    /// Spaces before each item, for every level; without it, all is on one line.
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    /// Whether characters beyond ASCII are written as `\uXXXX`.
    ensure_ascii: bool,
    depth: usize,
    /// Whether the list or object that was begun last has no items yet.
    is_empty: bool,
}

impl PythonFormat {
    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> Result<()> {
        self.depth += 1;
        self.is_empty = true;
        writer.write_all(bracket)
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.new_line(writer)?;
        }
        self.is_empty = false;
        writer.write_all(bracket)
    }

    fn begin_item<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        if !first {
            writer.write_all(self.item_separator.as_bytes())?;
        }
        self.is_empty = false;
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        writer.write_all(" ".repeat(indent * self.depth).as_bytes())
    }
}

impl Formatter for PythonFormat {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        self.begin_item(writer, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        self.begin_item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        writer.write_all(self.key_separator.as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            match c {
                ' '..='~' => writer.write_all(&[c as u8])?,
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(writer, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;
    use serde_json::json;

    fn written(options: &str) -> Result<String, String> {
        let mut environment = Environment::new();
        environment.add_filter("tojson", super::tojson);
        let value = json!({"b": [1, {}, []], "a": "é\u{1f600}\n\"", "c": {"z": null, "y": true}});
        environment
            .render_str(&format!("{{{{ v | tojson{options} }}}}"), json!({"v": value}))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        // What Python's json.dumps prints with these arguments and ensure_ascii=False unless said otherwise.
        let plain = "{\"b\": [1, {}, []], \"a\": \"é😀\\n\\\"\", \"c\": {\"z\": null, \"y\": true}}";
        assert_eq!(written("").as_deref(), Ok(plain));
        assert_eq!(written("(indent=none, ensure_ascii=False)").as_deref(), Ok(plain));
        let indented = "{\n  \"b\": [\n    1,\n    {},\n    []\n  ],\n  \"a\": \"é😀\\n\\\"\",\n  \"c\": {\n    \"z\": null,\n    \
                        \"y\": true\n  }\n}";
        assert_eq!(written("(indent=2)").as_deref(), Ok(indented));
        let dense = "{\"b\":[1,{},[]],\"a\":\"é😀\\n\\\"\",\"c\":{\"z\":null,\"y\":true}}";
        assert_eq!(written("(separators=(',', ':'))").as_deref(), Ok(dense));
        let sorted = "{\"a\": \"\\u00e9\\ud83d\\ude00\\n\\\"\", \"b\": [1, {}, []], \"c\": {\"y\": true, \"z\": null}}";
        assert_eq!(written("(sort_keys=true, ensure_ascii=true)").as_deref(), Ok(sorted));
    }

    #[test]
    fn options_that_python_does_not_have_are_refused() {
        assert!(written("(separators=[','])").is_err_and(|error| error.contains("separators")));
        assert!(written("(width=3)").is_err());
        assert!(written("(indent=1000000000000)").is_err_and(|error| error.contains("at most 64")));
    }
}
