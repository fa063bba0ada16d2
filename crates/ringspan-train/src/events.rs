//! Event files as TensorBoard reads them: numbers by name and step.
//!
//! A file is a row of records: the length of the data (u64), a checksum of these eight bytes, the data, a checksum of the
//! data. Checksums are CRC-32C, rotated and shifted by a constant, so that a checksum over data that holds checksums stays
//! a good one. The data is a protocol buffer `Event`; the four fields used here are written out by hand.

use crate::error::{Error, Result};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// Numbers of the fields of `Event`.
const WALL_TIME: u8 = 1;
const STEP: u8 = 2;
const FILE_VERSION: u8 = 3;
const SUMMARY: u8 = 5;
const SESSION_LOG: u8 = 7;
/// Wire types, by which a field is written: a varint, eight bytes, a length and bytes, four bytes.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// An open event file.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates a file in `folder` for a run that has done `step` steps. TensorBoard then drops what older files in the folder say
    /// of later steps.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(folder: &Path, step: u64) -> Result<Self> {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // TensorBoard reads the files of a folder in the order of their names.
        let name = format!("events.out.tfevents.{}.{:09}.ringspan", now.as_secs(), now.subsec_nanos());
        let path = folder.join(name);
        let file = File::create_new(&path).map_err(Error::io("create", &path))?;
        let mut events = Self { path, file };
        events.event(0, FILE_VERSION, b"brain.Event:2")?;
        // A session that starts at the first step that will follow makes TensorBoard drop older events from that step on.
        events.event(step + 1, SESSION_LOG, &[tag(1, VARINT), 1])?;
        Ok(events)
    }

    /// Adds named numbers (scalars) of a step. They are handed to the operating system at once.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append<'a>(&mut self, step: u64, numbers: impl IntoIterator<Item = (&'a str, f64)>) -> Result<()> {
        let mut summary = Vec::new();
        for (name, number) in numbers {
            let mut value = Vec::new();
            bytes(&mut value, 1, name.as_bytes());
            value.push(tag(2, FIXED32));
            value.extend((number as f32).to_le_bytes());
            bytes(&mut summary, 1, &value);
        }
        self.event(step, SUMMARY, &summary)
    }

    fn event(&mut self, step: u64, field: u8, content: &[u8]) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut event = vec![tag(WALL_TIME, FIXED64)];
        event.extend(now.as_secs_f64().to_le_bytes());
        event.push(tag(STEP, VARINT));
        varint(&mut event, step);
        bytes(&mut event, field, content);
        let length = (event.len() as u64).to_le_bytes();
        let record = [&length[..], &masked_crc(&length), &event, &masked_crc(&event)].concat();
        self.file.write_all(&record).map_err(Error::io("write", &self.path))
    }
}

fn tag(field: u8, kind: u8) -> u8 {
    field << 3 | kind
}

fn bytes(out: &mut Vec<u8>, field: u8, content: &[u8]) {
    out.push(tag(field, BYTES));
    varint(out, content.len() as u64);
    out.extend_from_slice(content);
}

/// Writes a protocol buffer varint: seven bits per byte, the lowest first; a byte's highest bit says that more bytes follow.
fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn masked_crc(data: &[u8]) -> [u8; 4] {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// The cyclic redundancy check of Castagnoli's polynomial, bits reversed.
fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in data {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_published_examples() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    fn number(data: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (&byte, rest) = data.split_first().expect("a byte");
            *data = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }

    /// The fields of a message: field number, and the value as a varint or as bytes.
    fn fields(mut data: &[u8]) -> Vec<(u64, u64, Vec<u8>)> {
        let mut all = Vec::new();
        while !data.is_empty() {
            let key = number(&mut data);
            let (value, len) = match key & 7 {
                0 => (number(&mut data), 0),
                1 => (0, 8),
                2 => (0, number(&mut data) as usize),
                5 => (0, 4),
                other => panic!("kind {other}"),
            };
            let (content, rest) = data.split_at(len);
            data = rest;
            all.push((key >> 3, value, content.to_vec()));
        }
        all
    }

    /// The data of all records; asserts that their checksums hold.
    fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let check = |data: &[u8], masked: &[u8]| {
            let masked = u32::from_le_bytes(masked.try_into().expect("four bytes"));
            assert_eq!(masked.wrapping_sub(0xa282_ead8).rotate_left(15), crc32c(data));
        };
        while !file.is_empty() {
            let len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
            check(&file[..8], &file[8..12]);
            check(&file[12..12 + len], &file[12 + len..16 + len]);
            all.push(file[12..12 + len].to_vec());
            file = &file[16 + len..];
        }
        all
    }

    #[test]
    fn records_are_read_back_as_written() {
        let folder = tempfile::tempdir().expect("folder");
        let mut events = EventFile::create(&folder.path().join("a/b"), 299).expect("file");
        events.append(300, [("loss", 1.5), ("lr", 1e-3)]).expect("written");
        let read: Vec<_> = records(&fs::read(&events.path).expect("file")).iter().map(|data| fields(data)).collect();
        let name = events.path.file_name().expect("a name").to_string_lossy();
        assert!(name.starts_with("events.out.tfevents."), "{name}");
        assert_eq!(read.len(), 3);
        for event in &read {
            assert_eq!((event[0].0, event[1].0), (1, 2));
            let time = f64::from_le_bytes(event[0].2[..].try_into().expect("eight bytes"));
            assert!(time > 1.7e9, "{time}");
        }
        assert_eq!(read[0][2], (3, 0, b"brain.Event:2".to_vec()));
        assert_eq!((read[1][1].1, fields(&read[1][2].2)), (300, vec![(1, 1, vec![])]));
        assert_eq!((read[2][1].1, read[2][2].0), (300, 5));
        let values: Vec<_> = fields(&read[2][2].2).iter().map(|(_, _, value)| fields(value)).collect();
        let pair = |value: &[(u64, u64, Vec<u8>)]| {
            let number = f32::from_le_bytes(value[1].2[..].try_into().expect("four bytes"));
            (String::from_utf8_lossy(&value[0].2).into_owned(), number)
        };
        assert_eq!(values.iter().map(|v| pair(v)).collect::<Vec<_>>(), [("loss".into(), 1.5), ("lr".into(), 1e-3)]);
    }
}
