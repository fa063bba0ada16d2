//! Access to the metadata of a GGUF file.

use super::file::GgufFile;
use crate::error::Result;
use candle_core::quantized::gguf_file::Value;

/// The metadata of a file, most of whose keys begin with the model's architecture, and the tensors in it.
pub(super) struct Metadata<'a> {
    file: &'a GgufFile,
    /// The name of the architecture, with which the model's keys begin.
    pub(super) architecture: &'a str,
}

impl<'a> Metadata<'a> {
    pub(super) fn new(file: &'a GgufFile) -> Self {
        let architecture = file.metadata.get("general.architecture").and_then(|name| name.to_string().ok());
        Self { file, architecture: architecture.map_or("", String::as_str) }
    }

    pub(super) fn file(&self) -> &'a GgufFile {
        self.file
    }

    fn own(&self, key: &str) -> Option<&'a Value> {
        self.file.metadata.get(&format!("{}.{key}", self.architecture))
    }

    /// The number under a key of the architecture, if the key is present.
    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.own(key).and_then(number)
    }

    /// The count (a whole number of at least 0) under a key of the architecture, if the key is present.
    ///
    /// # Errors
    /// A value that is not a count.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>> {
        match (self.own(key), self.number(key).filter(|x| *x >= 0.0 && x.fract() == 0.0)) {
            (None, _) => Ok(None),
            (_, Some(whole)) => Ok(Some(whole as u64)),
            (Some(_), None) => Err(self.file.broken(&format!("{}.{key} is missing or no count", self.architecture))),
        }
    }

    /// Like [`count`](Self::count), for a key that must be present.
    ///
    /// # Errors
    /// A key that is missing, or a value that is not a count.
    pub(super) fn need(&self, key: &str) -> Result<u64> {
        let missing = || self.file.broken(&format!("{}.{key} is missing or no count", self.architecture));
        self.count(key)?.ok_or_else(missing)
    }

    /// The truth value under a key of the architecture, if the key is present.
    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        self.own(key).and_then(|flag| flag.to_bool().ok())
    }

    /// The text under a key of the architecture, if the key is present.
    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        self.own(key).and_then(|text| text.to_string().ok()).map(String::as_str)
    }

    /// The number under a full key, such as `tokenizer.ggml.bos_token_id`, if the key is present.
    pub(super) fn of_file(&self, key: &str) -> Option<f64> {
        self.file.metadata.get(key).and_then(number)
    }

    /// Whether the file has a tensor of this name.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.file.shape(tensor).is_some()
    }
}

fn number(entry: &Value) -> Option<f64> {
    match entry {
        Value::F32(x) => Some(f64::from(*x)),
        Value::F64(x) => Some(*x),
        Value::I8(x) => Some(f64::from(*x)),
        Value::I16(x) => Some(f64::from(*x)),
        Value::I32(x) => Some(f64::from(*x)),
        Value::I64(x) => Some(*x as f64),
        other => other.to_u64().ok().map(|x| x as f64),
    }
}
