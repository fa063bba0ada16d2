//! Reads a text file in parts, and checks whether a file is text.

use std::io::{self, BufRead, Read};

/// Bytes that are read at once.
const PART_BYTES: usize = 256 << 10;
/// Git's own test for binary files: a NUL within this many bytes.
const BINARY_PROBE_BYTES: usize = 8 << 10;

/// The kind of a file, found by reading it to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextKind {
    /// Binary: it has a NUL early on.
    Binary,
    /// Not UTF-8: the first invalid byte is at this offset.
    NotUtf8(u64),
    /// Nothing but white space.
    Empty,
    /// Text of this many bytes.
    Text(u64),
}

/// Reads a file to its end, a part at a time.
pub(super) fn classify_text(from: Box<dyn BufRead>) -> io::Result<TextKind> {
    let (mut parts, mut bytes, mut blank) = (TextParts::new(from), 0, true);
    loop {
        match parts.next()? {
            Ok(Some(part)) => {
                let early = BINARY_PROBE_BYTES.saturating_sub(bytes as usize).min(part.len());
                if part.as_bytes()[..early].contains(&0) {
                    return Ok(TextKind::Binary);
                }
                bytes += part.len() as u64;
                blank = blank && part.trim().is_empty();
            }
            Ok(None) => return Ok(if blank { TextKind::Empty } else { TextKind::Text(bytes) }),
            // An early NUL says more about a file than an invalid byte after it.
            Err(_) if parts.binary => return Ok(TextKind::Binary),
            Err(at) => return Ok(TextKind::NotUtf8(at)),
        }
    }
}

/// Whether a file begins like text, without a NUL.
pub(super) fn looks_like_text(from: Box<dyn BufRead>) -> io::Result<bool> {
    let mut head = Vec::new();
    from.take(BINARY_PROBE_BYTES as u64).read_to_end(&mut head)?;
    Ok(!head.contains(&0))
}

/// The parts of a text, none of which ends inside a character.
pub(super) struct TextParts {
    from: Box<dyn BufRead>,
    /// The first bytes of a character whose other bytes were not read yet.
    rest: Vec<u8>,
    /// Number of bytes before `rest`.
    bytes_done: u64,
    binary: bool,
}

impl TextParts {
    pub(super) fn new(from: Box<dyn BufRead>) -> Self {
        Self { from, rest: Vec::new(), bytes_done: 0, binary: false }
    }

    /// The next part, none at the end, or the offset of a byte that is no UTF-8.
    pub(super) fn next(&mut self) -> io::Result<Result<Option<String>, u64>> {
        let mut bytes = std::mem::take(&mut self.rest);
        let more = PART_BYTES - bytes.len();
        let read = self.from.by_ref().take(more as u64).read_to_end(&mut bytes)?;
        let valid = match std::str::from_utf8(&bytes) {
            Ok(_) => bytes.len(),
            // The last character may be completed by the next part.
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                self.binary = self.bytes_done == 0 && bytes[..bytes.len().min(BINARY_PROBE_BYTES)].contains(&0);
                return Ok(Err(self.bytes_done + error.valid_up_to() as u64));
            }
        };
        if bytes.is_empty() {
            return Ok(Ok(None));
        }
        self.rest = bytes.split_off(valid);
        self.bytes_done += valid as u64;
        // This does not fail: the bytes up to `valid` were just found to be UTF-8.
        Ok(Ok(Some(String::from_utf8(bytes).unwrap_or_default())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn from(bytes: &[u8]) -> Box<dyn BufRead> {
        Box::new(Cursor::new(bytes.to_vec()))
    }

    #[test]
    fn parts_make_up_the_text_and_no_character_is_cut() {
        for text in [String::new(), "short é".into(), "x".repeat(PART_BYTES), "日本🦀é".repeat(PART_BYTES / 5)] {
            let (mut parts, mut all) = (TextParts::new(from(text.as_bytes())), String::new());
            while let Some(part) = parts.next().unwrap().unwrap() {
                assert!(part.len() <= PART_BYTES);
                all.push_str(&part);
            }
            assert_eq!(all, text);
        }
    }

    #[test]
    fn a_file_is_text_binary_empty_or_in_another_encoding() {
        let classify = |bytes: &[u8]| classify_text(from(bytes)).unwrap();
        assert_eq!(classify(b" \n"), TextKind::Empty);
        assert_eq!(classify(b""), TextKind::Empty);
        assert_eq!(classify("caf\u{e9}".as_bytes()), TextKind::Text(5));
        assert_eq!(classify(b"caf\xe9"), TextKind::NotUtf8(3));
        assert_eq!(classify(b"\x89PNG\0\0"), TextKind::Binary);
        assert_eq!(classify(b"a\0b"), TextKind::Binary);
        let long = [&b"x".repeat(PART_BYTES)[..], b"\xe9x"].concat();
        assert_eq!(classify(&long), TextKind::NotUtf8(PART_BYTES as u64));
        assert_eq!(classify(&long[..PART_BYTES + 1]), TextKind::NotUtf8(PART_BYTES as u64));
    }
}
