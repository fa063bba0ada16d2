//! Encodes numbers and texts as bytes, for headers and signals. Lengths are checked when they are read.

/// Encodes values, appending them to a message.
#[derive(Debug, Default)]
pub(in crate::comm) struct Writer(pub(in crate::comm) Vec<u8>);

impl Writer {
    pub(in crate::comm) fn number(mut self, number: u64) -> Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(in crate::comm) fn text(self, text: &str) -> Self {
        let mut with_len = self.number(text.len() as u64);
        with_len.0.extend_from_slice(text.as_bytes());
        with_len
    }
}

/// Decodes values from a message; `None` if it ends too early, or if a text is not UTF-8.
#[derive(Debug)]
pub(in crate::comm) struct Reader<'a>(pub(in crate::comm) &'a [u8]);

impl Reader<'_> {
    pub(in crate::comm) fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    pub(in crate::comm) fn index(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    pub(in crate::comm) fn text(&mut self) -> Option<String> {
        let len = self.index()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }

    /// Returns `value` if the message has been read to its end.
    pub(in crate::comm) fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}
