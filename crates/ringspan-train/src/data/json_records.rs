//! Reads JSON records one at a time: one per line, in an array, or one after the other.

use super::{Content, SourceDocument, source_document::DocumentSink};
use crate::error::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Deserializer, Value};
use std::{
    fmt,
    io::{BufRead, Read},
    path::Path,
};

/// Passes the record in each line that is not blank to `take`, named by its line's number.
pub(super) fn lines(path: &Path, name: &str, mut from: Box<dyn BufRead>, take: DocumentSink<'_>) -> Result<()> {
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if from.read_until(b'\n', &mut line).map_err(Error::io("read", path))? == 0 {
            break;
        }
        let wrong = |problem: String| Error::Data { path: path.into(), problem: format!("line {number}{problem}") };
        let text = std::str::from_utf8(&line).map_err(|_| wrong(" is not UTF-8".into()))?;
        if text.trim().is_empty() {
            continue;
        }
        let object =
            serde_json::from_str(text).map_err(|e| wrong(format!(": {e}; each line must be a JSON object")))?;
        document(object, format!("{name}:{number}"), take).map_err(|failed| failed.into_error(wrong))?;
    }
    Ok(())
}

/// Passes the records of a file to `take`, named by their number. The file is an array of records, a single one, or several one
/// after the other.
pub(super) fn values(path: &Path, name: &str, mut from: Box<dyn BufRead>, take: DocumentSink<'_>) -> Result<()> {
    let wrong = |problem: String| Error::Data { path: path.into(), problem };
    let mut number = 0;
    let mut failed = None;
    let mut each = |object: Value| {
        number += 1;
        document(object, format!("{name}:{number}"), take).map_err(|why| failed = Some((number, why))).is_ok()
    };
    let read = match first_byte(&mut *from).map_err(Error::io("read", path))? {
        Some(b'[') => {
            let mut json = Deserializer::from_reader(from);
            json.deserialize_seq(Elements(&mut each)).and_then(|()| json.end())
        }
        _ => Deserializer::from_reader(from).into_iter::<Value>().try_for_each(|value| match each(value?) {
            true => Ok(()),
            false => Err(serde::de::Error::custom("a record is refused")),
        }),
    };
    match (failed, read) {
        (Some((number, failed)), _) => Err(failed.into_error(|problem| wrong(format!("record {number}{problem}")))),
        (None, read) => read.map_err(|e| wrong(format!("not JSON: {e}"))),
    }
}

/// The first byte that is no white space; it is not consumed.
fn first_byte(from: &mut dyn BufRead) -> std::io::Result<Option<u8>> {
    loop {
        let bytes = from.fill_buf()?;
        if bytes.is_empty() {
            return Ok(None);
        }
        match bytes.iter().position(|byte| !byte.is_ascii_whitespace()) {
            Some(at) => {
                let first = bytes[at];
                from.consume(at);
                return Ok(Some(first));
            }
            None => {
                let blank = bytes.len();
                from.consume(blank);
            }
        }
    }
}

/// The reason why a record was not taken.
enum RecordError {
    /// The record is in no known form.
    Invalid(String),
    /// `take` failed.
    Sink(Error),
}

impl RecordError {
    fn into_error(self, wrong: impl FnOnce(String) -> Error) -> Error {
        match self {
            Self::Invalid(problem) => wrong(format!(" {problem}")),
            Self::Sink(error) => error,
        }
    }
}

fn document(object: Value, name: String, take: DocumentSink<'_>) -> std::result::Result<(), RecordError> {
    match Content::from_object(object).map_err(RecordError::Invalid)? {
        Some(content) => take(SourceDocument { name, content }).map_err(RecordError::Sink),
        None => Ok(()),
    }
}

/// Visits an array and passes its elements to a function until that refuses one.
struct Elements<'a>(&'a mut dyn FnMut(Value) -> bool);

impl<'de> Visitor<'de> for Elements<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of records")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> std::result::Result<(), A::Error> {
        while let Some(value) = all.next_element()? {
            if !(self.0)(value) {
                return Err(serde::de::Error::custom("a record is refused"));
            }
        }
        Ok(())
    }
}

/// The kind of a JSON file, as its beginning tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JsonKind {
    /// One record per line.
    Lines,
    /// Records in an array, or a single record over several lines.
    Values,
    /// Several objects, of which the first is in no known form.
    Unknown,
    /// A single object in no known form, or something else that is no data: it counts as text.
    Text,
}

/// Looks at the first record of a JSON file. Damage after it is found when the file is read.
pub(super) fn json_kind(from: Box<dyn BufRead>) -> std::io::Result<JsonKind> {
    let mut from = LineCounter { from, lines: 0 };
    let first = first_byte(&mut *from.from)?;
    if first == Some(b'[') {
        from.from.consume(1);
        return Ok(match first_byte(&mut *from.from)? {
            Some(b'{') if has_form(&mut from) == Some(false) => JsonKind::Unknown,
            Some(b'{') => JsonKind::Values,
            _ => JsonKind::Text,
        });
    }
    let known = if first == Some(b'{') { has_form(&mut from) } else { None };
    Ok(match (known, from.lines) {
        (Some(true), 0) => JsonKind::Lines,
        (Some(true), _) => JsonKind::Values,
        (Some(false), _) if first_byte(&mut *from.from)? == Some(b'{') => JsonKind::Unknown,
        _ => JsonKind::Text,
    })
}

/// Whether the object that begins here is in a known form; none where it is damaged.
fn has_form(from: &mut LineCounter) -> Option<bool> {
    let keys = ObjectKeys.deserialize(&mut Deserializer::from_reader(from)).ok()?;
    Some(Content::has_form(&keys))
}

/// A reader that counts line ends.
struct LineCounter {
    from: Box<dyn BufRead>,
    lines: usize,
}

impl Read for LineCounter {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.from.read(into)?;
        self.lines += into[..count].iter().filter(|&&byte| byte == b'\n').count();
        Ok(count)
    }
}

/// Reads the keys of an object and skips its values, which may be large.
struct ObjectKeys;

impl<'de> DeserializeSeed<'de> for ObjectKeys {
    type Value = Vec<String>;

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> std::result::Result<Vec<String>, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ObjectKeys {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Vec<String>, A::Error> {
        let mut keys = Vec::new();
        while let Some((key, IgnoredAny)) = map.next_entry()? {
            keys.push(key);
        }
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn from(text: &str) -> Box<dyn BufRead> {
        Box::new(Cursor::new(text.as_bytes().to_vec()))
    }

    fn read_all(
        read: impl Fn(&Path, &str, Box<dyn BufRead>, DocumentSink<'_>) -> Result<()>,
        text: &str,
    ) -> std::result::Result<Vec<String>, String> {
        let mut all = Vec::new();
        let mut take = |document: SourceDocument| {
            all.push(format!("{} {:?}", document.name, document.content));
            Ok(())
        };
        read(Path::new("d.json"), "d.json", from(text), &mut take).map_err(|error| error.to_string())?;
        Ok(all)
    }

    #[test]
    fn records_in_an_array_alone_or_one_after_the_other_are_the_same() {
        let expected = ["d.json:1 Text(\"a\")", "d.json:2 Text(\"b\")"];
        for text in [
            r#" [{"text": "a"}, {"text": "b"}] "#,
            "{\n\"text\": \"a\"}\n{\"text\":\n\"b\"}\n",
            r#"{"text": "a"} {"text": "b"}"#,
        ] {
            assert_eq!(read_all(values, text).unwrap(), expected, "{text}");
        }
        assert_eq!(read_all(values, r#"{"text": "a"}"#).unwrap(), expected[..1]);
        assert_eq!(read_all(lines, "{\"text\": \"a\"}\r\n\n{\"text\": \"c\"}").unwrap().len(), 2);
        assert!(read_all(values, "[]").unwrap().is_empty());
    }

    #[test]
    fn errors_name_their_record_or_line() {
        for (text, parts) in [
            (r#"[{"text": "a"}, {"txt": "b"}]"#, ["record 2 has none of", "`text`"]),
            (r#"[{"text": "a"}, {"text": "#, ["not JSON", "EOF"]),
            (r#"[{"text": "a"}] more"#, ["not JSON", "trailing"]),
            (r#"{"text": "a"} {"text": 3}"#, ["record 2 has a `text`", "a number"]),
            ("[1, 2]", ["record 1 has none of", "`messages`"]),
        ] {
            let message = read_all(values, text).unwrap_err();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        let message = read_all(lines, "{\"text\": \"a\"}\n[").unwrap_err();
        assert!(message.contains("line 2: ") && message.contains("each line must be a JSON object"), "{message}");
        let stopped = values(Path::new("d"), "d", from(r#"[{"text": "a"}]"#), &mut |_| {
            Err(Error::Settings("the disk is full".into()))
        });
        assert_eq!(stopped.unwrap_err().to_string(), "the disk is full");
    }

    #[test]
    fn a_file_of_json_is_known_by_its_first_record() {
        for (text, expected) in [
            ("{\"text\": \"a\"}\n{\"text\": \"b\"}", JsonKind::Lines),
            ("\n{\"messages\": []}", JsonKind::Lines),
            ("{\n\"text\": \"a\"\n}", JsonKind::Values),
            ("[\n{\"instruction\": \"a\", \"output\": \"b\"}", JsonKind::Values),
            ("[{\"question\": \"a\"}]", JsonKind::Unknown),
            ("{\"question\": \"a\"}\n{\"question\": \"b\"}", JsonKind::Unknown),
            ("{\"name\": \"package\", \"version\": [1]}", JsonKind::Text),
            ("[1, 2]", JsonKind::Text),
            ("[]", JsonKind::Text),
            ("// a comment\n{}", JsonKind::Text),
            ("{ text: 3 }", JsonKind::Text),
            ("", JsonKind::Text),
        ] {
            assert_eq!(json_kind(from(text)).unwrap(), expected, "{text}");
        }
    }
}
