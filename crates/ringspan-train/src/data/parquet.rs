//! Reads documents from a Parquet file.

use super::{Content, SourceDocument, source_document::DocumentSink};
use crate::error::{Error, Result};
use ::parquet::{
    file::reader::{FileReader, SerializedFileReader},
    record::Field,
    schema::types::Type,
};
use std::{fs::File, path::Path};

/// The columns that form documents; others are not read.
const COLUMNS: [&str; 11] = [
    "text",
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "tools",
];

/// Passes one document per row to `take`; columns are read like the keys of a JSON record. Rows are numbered from 1.
///
/// # Errors
/// [`Error::Data`] for a damaged file, missing columns, binary data instead of text, or a row in no known form; [`Error::Io`].
pub(super) fn documents(path: &Path, file: &str, take: DocumentSink<'_>) -> Result<()> {
    let wrong = |problem: String| Error::Data { path: path.into(), problem };
    let damaged = |e: ::parquet::errors::ParquetError| wrong(format!("not a Parquet file that can be read: {e}"));
    let opened = File::open(path).map_err(Error::io("read", path))?;
    let reader = SerializedFileReader::new(opened).map_err(damaged)?;
    let schema = reader.metadata().file_metadata().schema();
    let all = schema.get_fields();
    let fields: Vec<_> = all.iter().filter(|field| COLUMNS.contains(&field.name())).cloned().collect();
    if fields.is_empty() {
        let names: Vec<&str> = all.iter().map(|field| field.name()).collect();
        return Err(wrong(format!("has none of the columns {}; it has: {}", COLUMNS.join(", "), names.join(", "))));
    }
    let projection = Type::group_type_builder(schema.name()).with_fields(fields).build().map_err(damaged)?;
    for (index, row) in reader.get_row_iter(Some(projection)).map_err(damaged)?.enumerate() {
        let row = row.map_err(damaged)?;
        if let Some((name, _)) = row.get_column_iter().find(|(_, field)| matches!(field, Field::Bytes(_))) {
            return Err(wrong(format!("column `{name}` is binary, not text")));
        }
        let content = Content::from_object(row.to_json_value())
            .map_err(|problem| wrong(format!("row {} {problem}", index + 1)))?;
        if let Some(content) = content {
            take(SourceDocument { name: format!("{file}:{}", index + 1), content })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::read;
    use ::parquet::{
        data_type::{ByteArray, ByteArrayType, Int64Type},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };
    use serde_json::json;
    use std::{path::PathBuf, sync::Arc};

    /// A column: its values, and for each its definition level and its repetition level.
    enum Column<'a> {
        Text(&'a [&'a str], Option<(&'a [i16], &'a [i16])>),
        SharedValues(&'a [i64]),
    }

    fn write(folder: &Path, schema: &str, columns: &[Column<'_>]) -> PathBuf {
        let path = folder.join("d.parquet");
        let schema = Arc::new(parse_message_type(schema).expect("a schema"));
        let properties = Arc::new(WriterProperties::builder().build());
        let mut file =
            SerializedFileWriter::new(File::create(&path).expect("file"), schema, properties).expect("writer");
        let mut group = file.next_row_group().expect("a group");
        for column in columns {
            let mut writer = group.next_column().expect("writer").expect("a column");
            match column {
                Column::Text(values, levels) => {
                    let values: Vec<ByteArray> = values.iter().map(|text| ByteArray::from(*text)).collect();
                    let (definition, repetition) = levels.unzip();
                    writer.typed::<ByteArrayType>().write_batch(&values, definition, repetition).expect("written");
                }
                Column::SharedValues(values) => {
                    writer.typed::<Int64Type>().write_batch(values, None, None).expect("written");
                }
            }
            writer.close().expect("closed");
        }
        group.close().expect("closed");
        file.close().expect("closed");
        path
    }

    #[test]
    fn rows_are_documents_and_other_columns_are_left_aside() {
        let folder = tempfile::tempdir().expect("folder");
        let schema = "message d { required int64 id; optional binary text (UTF8); }";
        let levels = (&[1, 0, 1][..], &[0, 0, 0][..]);
        let path = write(
            folder.path(),
            schema,
            &[Column::SharedValues(&[1, 2, 3]), Column::Text(&["one", "drei"], Some(levels))],
        );
        let message = read(&path, &[]).expect_err("row 2 is null").to_string();
        assert!(message.contains("row 2 has none of `text`"), "{message}");
        let schema = "message d { required int64 id; required binary text (UTF8); }";
        let path =
            write(folder.path(), schema, &[Column::SharedValues(&[1, 2, 3]), Column::Text(&["one", "", "drei"], None)]);
        let texts = read(&path, &[]).expect("text");
        let all: Vec<_> = texts.documents.iter().map(|d| (d.name.as_str(), d.content.clone())).collect();
        let text = |text: &str| Content::Text(text.into());
        assert_eq!(all, [("d.parquet:1", text("one")), ("d.parquet:3", text("drei"))]);
    }

    #[test]
    fn lists_of_messages_are_conversations() {
        let folder = tempfile::tempdir().expect("folder");
        let schema = "message d { required group messages (LIST) { repeated group list { required group element {
            required binary role (UTF8); required binary content (UTF8); } } } }";
        let levels = (&[1, 1, 1, 1][..], &[0, 1, 0, 1][..]);
        let column = |values: &'static [&'static str]| Column::Text(values, Some(levels));
        let columns = [column(&["user", "assistant", "user", "assistant"]), column(&["a", "b", "c", "d"])];
        let texts = read(&write(folder.path(), schema, &columns), &[]).expect("conversations");
        let say = |role: &str, content: &str| json!({ "role": role, "content": content });
        let chat = |a, b| Content::Chat { messages: vec![say("user", a), say("assistant", b)], tools: json!(null) };
        let all: Vec<_> = texts.documents.into_iter().map(|d| d.content).collect();
        assert_eq!(all, [chat("a", "b"), chat("c", "d")]);
    }

    #[test]
    fn columns_that_are_no_text_are_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let refused = |path: &Path, part: &str| {
            let message = read(path, &[]).expect_err("refused").to_string();
            assert!(message.contains("d.parquet") && message.contains(part), "{message}");
        };
        let path = write(folder.path(), "message d { required int64 id; }", &[Column::SharedValues(&[1])]);
        refused(&path, "it has: id");
        let binary = write(folder.path(), "message d { required binary text; }", &[Column::Text(&["x"], None)]);
        refused(&binary, "`text` is binary");
        let whole = std::fs::read(&binary).expect("file");
        std::fs::write(&binary, &whole[..whole.len() / 2]).expect("file");
        refused(&binary, "not a Parquet file");
    }
}
