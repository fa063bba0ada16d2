//! Reads a text file in parts, and checks whether a file is text.

use std::io::{self, BufRead, Read};

/// Bytes that are read at once.
const PART: usize = 256 << 10;
/// Git's own test for binary files: a NUL within this many bytes.
const BINARY_PROBE: usize = 8 << 10;

/// The kind of a file, found by reading it to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
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
pub(super) fn look(from: Box<dyn BufRead>) -> io::Result<Look> {
    let (mut parts, mut bytes, mut blank) = (Parts::new(from), 0, true);
    loop {
        match parts.next()? {
            Ok(Some(part)) => {
                let early = BINARY_PROBE.saturating_sub(bytes as usize).min(part.len());
                if part.as_bytes()[..early].contains(&0) {
                    return Ok(Look::Binary);
                }
                bytes += part.len() as u64;
                blank = blank && part.trim().is_empty();
            }
            Ok(None) => return Ok(if blank { Look::Empty } else { Look::Text(bytes) }),
            // An early NUL says more about a file than an invalid byte after it.
            Err(_) if parts.binary => return Ok(Look::Binary),
            Err(at) => return Ok(Look::NotUtf8(at)),
        }
    }
}

/// Whether a file begins like text, without a NUL.
pub(super) fn probe(from: Box<dyn BufRead>) -> io::Result<bool> {
    let mut head = Vec::new();
    from.take(BINARY_PROBE as u64).read_to_end(&mut head)?;
    Ok(!head.contains(&0))
}

/// The parts of a text, none of which ends inside a character.
pub(super) struct Parts {
    from: Box<dyn BufRead>,
    /// The first bytes of a character whose other bytes were not read yet.
    rest: Vec<u8>,
    /// Number of bytes before `rest`.
    done: u64,
    binary: bool,
}

impl Parts {
    pub(super) fn new(from: Box<dyn BufRead>) -> Self {
        Self { from, rest: Vec::new(), done: 0, binary: false }
    }

    /// The next part, none at the end, or the offset of a byte that is no UTF-8.
    pub(super) fn next(&mut self) -> io::Result<Result<Option<String>, u64>> {
        let mut bytes = std::mem::take(&mut self.rest);
        let more = PART - bytes.len();
        let read = self.from.by_ref().take(more as u64).read_to_end(&mut bytes)?;
        let valid = match std::str::from_utf8(&bytes) {
            Ok(_) => bytes.len(),
            // The last character may be completed by the next part.
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                self.binary = self.done == 0 && bytes[..bytes.len().min(BINARY_PROBE)].contains(&0);
                return Ok(Err(self.done + error.valid_up_to() as u64));
            }
        };
        if bytes.is_empty() {
            return Ok(Ok(None));
        }
        self.rest = bytes.split_off(valid);
        self.done += valid as u64;
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
        for text in [String::new(), "short é".into(), "x".repeat(PART), "日本🦀é".repeat(PART / 5)] {
            let (mut parts, mut all) = (Parts::new(from(text.as_bytes())), String::new());
            while let Some(part) = parts.next().unwrap().unwrap() {
                assert!(part.len() <= PART);
                all.push_str(&part);
            }
            assert_eq!(all, text);
        }
    }

    #[test]
    fn a_file_is_text_binary_empty_or_in_another_encoding() {
        let look = |bytes: &[u8]| look(from(bytes)).unwrap();
        assert_eq!(look(b" \n"), Look::Empty);
        assert_eq!(look(b""), Look::Empty);
        assert_eq!(look("caf\u{e9}".as_bytes()), Look::Text(5));
        assert_eq!(look(b"caf\xe9"), Look::NotUtf8(3));
        assert_eq!(look(b"\x89PNG\0\0"), Look::Binary);
        assert_eq!(look(b"a\0b"), Look::Binary);
        let long = [&b"x".repeat(PART)[..], b"\xe9x"].concat();
        assert_eq!(look(&long), Look::NotUtf8(PART as u64));
        assert_eq!(look(&long[..PART + 1]), Look::NotUtf8(PART as u64));
    }
}
