//! Opens data files and unpacks them as they are read, whatever they are compressed with.

use super::progress::ByteCounter;
use crate::error::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};
use std::{
    cell::Cell,
    fs::File,
    io::{self, BufRead, BufReader, Cursor, Read},
    path::Path,
    rc::Rc,
};

/// The byte-order mark that editors of some systems put before a text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The largest window of a .zst file, as of `zstd --long=27`: that much of the file may be in memory.
const ZSTD_WINDOW: u64 = 1 << 27;

/// How a file is compressed, as the end of its name says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// The compression that a file's name says, and the name without its ending.
    pub(super) fn of(name: &str) -> (Self, &str) {
        let lower = name.to_ascii_lowercase();
        let stem = |end: &str| &name[..name.len() - end.len()];
        match () {
            () if lower.ends_with(".gz") => (Self::Gzip, stem(".gz")),
            () if lower.ends_with(".zst") => (Self::Zstd, stem(".zst")),
            () => (Self::None, name),
        }
    }
}

/// Opens a file, unpacked as it is read, without a byte-order mark.
///
/// # Errors
/// [`Error::Io`] when the system refuses, or the file is not compressed as its name says.
pub(super) fn open(path: &Path, compression: Compression) -> Result<Box<dyn BufRead>> {
    open_counted(path, compression, Rc::default())
}

/// Like [`open`]; `count` grows by the bytes of the file that are read.
pub(super) fn open_counted(path: &Path, compression: Compression, count: Rc<Cell<u64>>) -> Result<Box<dyn BufRead>> {
    let from = File::open(path).map_err(Error::io("read", path))?;
    let file = BufReader::with_capacity(1 << 16, ByteCounter { from, count });
    let mut unpacked: Box<dyn BufRead> = match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(file))),
        Compression::Zstd => Box::new(BufReader::with_capacity(1 << 16, ZstdFrames::new(file))),
    };
    let mut head = Vec::new();
    unpacked.by_ref().take(BYTE_ORDER_MARK.len() as u64).read_to_end(&mut head).map_err(Error::io("read", path))?;
    if head == BYTE_ORDER_MARK {
        return Ok(unpacked);
    }
    Ok(Box::new(Cursor::new(head).chain(unpacked)))
}

/// The frames of a .zst file, one after the other, without those that hold no data.
struct ZstdFrames<R: BufRead> {
    source: R,
    decoder: FrameDecoder,
    /// Whether the decoder is inside a frame.
    in_frame: bool,
}

impl<R: BufRead> ZstdFrames<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(ZSTD_WINDOW);
        Self { source, decoder, in_frame: false }
    }

    /// Begins the next frame that holds data; false at the end of the file.
    fn begin_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }

    /// Compares the data of a frame with the checksum that it may carry.
    fn check_frame(&mut self) -> io::Result<()> {
        match self.decoder.get_checksum_from_data() {
            Some(sum) if self.decoder.get_calculated_checksum() != Some(sum) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "damaged: its checksum is another one"))
            }
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame {
                self.in_frame = self.begin_frame()?;
                if !self.in_frame {
                    return Ok(0);
                }
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one).map_err(io::Error::other)?;
            }
            match self.decoder.read(into)? {
                0 => {
                    self.check_frame()?;
                    self.in_frame = false;
                }
                bytes => return Ok(bytes),
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::Write;

    pub(in crate::data) fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap()
    }

    pub(in crate::data) fn zstd(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn text(name: &str, bytes: &[u8]) -> std::result::Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let mut text = String::new();
        let mut opened = open(&path, Compression::of(name).0).map_err(|error| error.to_string())?;
        opened.read_to_string(&mut text).map_err(|error| error.to_string())?;
        Ok(text)
    }

    #[test]
    fn files_compressed_in_one_part_or_several_are_read_whole() {
        let long = "line of text\n".repeat(20_000);
        for (name, pack) in [("a.txt.gz", gzip as fn(&[u8]) -> Vec<u8>), ("a.txt.ZST", zstd)] {
            assert_eq!(text(name, &pack(long.as_bytes())).unwrap(), long);
            let two = [pack(b"one "), pack(b"two")].concat();
            assert_eq!(text(name, &two).unwrap(), "one two");
            assert_eq!(text(name, &pack(b"")).unwrap(), "");
            let packed = pack(long.as_bytes());
            assert!(text(name, &packed[..packed.len() / 2]).is_err(), "half of {name}");
            assert!(text(name, b"no archive").is_err());
        }
        // A frame without data, as pzstd writes it, lies between two with data.
        let skipped = [&0x184d_2a50_u32.to_le_bytes()[..], &3_u32.to_le_bytes(), b"abc"].concat();
        assert_eq!(text("a.zst", &[zstd(b"one "), skipped, zstd(b"two")].concat()).unwrap(), "one two");
    }

    #[test]
    fn a_byte_order_mark_is_no_text_and_what_only_begins_like_one_is() {
        assert_eq!(text("a.txt", b"\xef\xbb\xbfhello").unwrap(), "hello");
        assert_eq!(text("a.gz", &gzip(b"\xef\xbb\xbfhello")).unwrap(), "hello");
        for short in ["", "a", "ab", "\u{fec0}x"] {
            assert_eq!(text("a.txt", short.as_bytes()).unwrap(), short);
        }
    }
}
