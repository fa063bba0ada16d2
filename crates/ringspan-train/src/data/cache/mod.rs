//! The token cache: tokenized documents in a file, so that the same text is tokenized once, and is in memory only where it is
//! read.
//!
//! A file is a header of sixteen 64-bit words, the tokens in the order in which they were read, the range of each training
//! document among them, then the range of each held-out one, a checksum of each block of tokens, and a description of the source
//! in JSON. Numbers have this machine's byte order: on a machine of another one the magic is not found, and the file is made
//! again.

mod turn;
mod write;

pub(super) use turn::in_turn;
pub(super) use write::Writer;

use super::{About, Corpus, Store, fingerprint::Fingerprint};
use crate::error::{Error, Result};
use memmap2::Mmap;
use std::{
    fs::File,
    io::{BufReader, ErrorKind, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
};

const MAGIC: u64 = u64::from_ne_bytes(*b"ringspan");
/// Version of the file, which grows when the layout changes, or the way in which text is tokenized. Other versions are made
/// again.
const VERSION: u64 = 3;
/// Bytes of the header, before the tokens.
const HEADER: u64 = 128;
/// Bytes of tokens that share a checksum.
const BLOCK: u64 = 1 << 20;
/// Number of blocks whose checksums are compared where not all are.
const SAMPLE: u64 = 64;

/// The header, before the tokens.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Header {
    magic: u64,
    version: u64,
    key: u64,
    /// A hash of the words of all documents.
    fingerprint: u64,
    /// A hash of the bytes of the files that the tokens were made of.
    contents: u64,
    /// Number of training documents, and of held-out ones.
    documents: [u64; 2],
    words: u64,
    /// Number of tokens in each split.
    tokens: [u64; 2],
    /// Number of learned tokens in each split.
    learned: [u64; 2],
    /// The largest token id plus one; 0 where there is no token.
    largest: u64,
    /// Bytes of the source's description.
    about: u64,
    /// A hash of everything after the tokens.
    behind: u64,
    /// A hash of the fields of this header before this one.
    sum: u64,
}

impl Header {
    fn summed(mut self) -> Self {
        let words: &[u64; 16] = bytemuck::cast_ref(&self);
        self.sum = super::fingerprint(words[..15].iter().copied());
        self
    }

    /// The offset at which the tokens end, and the size of the file; none where numbers overflow.
    fn ends(&self) -> Option<(u64, u64)> {
        let tokens = self.words.checked_mul(4)?.checked_add(HEADER)?;
        let documents = self.documents[0].checked_add(self.documents[1])?;
        let ranges = tokens.checked_next_multiple_of(8)?.checked_add(documents.checked_mul(16)?)?;
        let blocks = ranges.checked_add(self.blocks() * 8)?;
        Some((tokens, blocks.checked_add(self.about)?))
    }

    fn blocks(&self) -> u64 {
        (self.words * 4).div_ceil(BLOCK)
    }

    /// Offset at which the ranges of the documents begin.
    fn ranges(&self) -> u64 {
        (HEADER + self.words * 4).next_multiple_of(8)
    }
}

/// The state of a folder's token file for a key.
#[derive(Debug)]
pub(super) enum Found {
    /// The tokens, memory-mapped.
    Tokens(Box<Corpus>),
    /// There is no file.
    Nothing,
    /// The file cannot be used, for this reason.
    Damaged(String),
}

/// The path of the token file for `key` in `folder`.
pub(super) fn path(folder: &Path, key: u64) -> PathBuf {
    folder.join(format!("tokens-{key:016x}.bin"))
}

/// Opens the file for `key` and compares it with its checksums: a sample of the tokens, or all of them if `whole`.
///
/// # Errors
/// [`Error::Io`] when the system refuses to read a file that is there.
pub(super) fn open(folder: &Path, key: u64, whole: bool) -> Result<Found> {
    let path = path(folder, key);
    let file = match File::open(&path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Found::Nothing),
        opened => opened.map_err(Error::io("read", &path))?,
    };
    let checked = Checked::read(file, key, whole).map_err(Error::io("read", &path))?;
    let Checked { header, about, file } = match checked {
        Ok(checked) => checked,
        Err(why) => return Ok(Found::Damaged(why)),
    };
    // SAFETY: the file is never written in place, only replaced by renaming; whoever else shortens it while it is mapped
    // ends this process, as with any program that maps files.
    let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?);
    if map.len() as u64 != header.ends().map_or(0, |(_, end)| end) {
        return Ok(Found::Damaged("its length has changed while it was read".into()));
    }
    let words = HEADER as usize..(HEADER + header.words * 4) as usize;
    let border = (header.ranges() + header.documents[0] * 16) as usize;
    let end = border + header.documents[1] as usize * 16;
    let [train, held_out] = header.tokens.map(|tokens| tokens as usize);
    Ok(Found::Tokens(Box::new(Corpus {
        train: Store::mapped(map.clone(), words.clone(), header.ranges() as usize..border, train),
        held_out: Store::mapped(map, words, border..end, held_out),
        learned: header.learned,
        largest: header.largest.checked_sub(1).map(|token| token as u32),
        fingerprint: header.fingerprint,
        contents: header.contents,
        about,
    })))
}

/// A file that agrees with its checksums.
struct Checked {
    header: Header,
    about: About,
    file: File,
}

impl Checked {
    /// Reads through a buffer instead of a map: mapped pages that are read count as memory of this process.
    fn read(mut file: File, key: u64, whole: bool) -> std::io::Result<std::result::Result<Self, String>> {
        let length = file.metadata()?.len();
        let mut header = Header::default();
        if length < HEADER {
            return Ok(Err(format!("it has {length} bytes, fewer than the {HEADER} of its header")));
        }
        file.read_exact(bytemuck::bytes_of_mut(&mut header))?;
        if header.magic != MAGIC || header.version != VERSION {
            return Ok(Err(format!("it is no token cache of version {VERSION} of this machine")));
        }
        if header.sum != header.summed().sum || header.key != key {
            return Ok(Err("its header is damaged".into()));
        }
        let Some((tokens_end, _)) = header.ends().filter(|(_, end)| *end == length) else {
            return Ok(Err(format!("it has {length} bytes, and its header announces another number")));
        };
        file.seek(SeekFrom::Start(tokens_end))?;
        let mut behind = Summed { from: BufReader::new(&file), sum: Fingerprint::new() };
        let mut padding = [0; 4];
        behind.read(&mut padding[..(header.ranges() - tokens_end) as usize])?;
        let mut sound = true;
        for _ in 0..header.documents[0] + header.documents[1] {
            let mut range = [0_u64; 2];
            behind.read(bytemuck::cast_slice_mut(&mut range))?;
            sound &= range[0] < range[1] && range[1] <= header.words;
        }
        let mut sums = vec![0_u64; header.blocks() as usize];
        behind.read(bytemuck::cast_slice_mut(&mut sums))?;
        let mut about = vec![0; header.about as usize];
        behind.read(&mut about)?;
        if behind.sum.finish() != header.behind || !sound {
            return Ok(Err("what it says of its documents is damaged".into()));
        }
        let Ok(about) = serde_json::from_slice(&about) else {
            return Ok(Err("what it says of its source is damaged".into()));
        };
        for block in checked_blocks(header.blocks(), whole) {
            let from = HEADER + block * BLOCK;
            let mut bytes = vec![0; (tokens_end - from).min(BLOCK) as usize];
            file.seek(SeekFrom::Start(from))?;
            file.read_exact(&mut bytes)?;
            let mut sum = Fingerprint::new();
            sum.push_bytes(&bytes);
            if sum.finish() != sums[block as usize] {
                return Ok(Err("its tokens are damaged".into()));
            }
        }
        Ok(Ok(Self { header, about, file }))
    }
}

/// The blocks to check: all, or [`SAMPLE`] of them at equal distances, with the first and the last.
fn checked_blocks(blocks: u64, whole: bool) -> Vec<u64> {
    match whole || blocks <= SAMPLE {
        true => (0..blocks).collect(),
        false => {
            (0..SAMPLE).map(|i| (u128::from(blocks - 1) * u128::from(i) / u128::from(SAMPLE - 1)) as u64).collect()
        }
    }
}

/// A reader that hashes what it reads.
struct Summed<R> {
    from: R,
    sum: Fingerprint,
}

impl<R: Read> Summed<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<()> {
        self.from.read_exact(into)?;
        self.sum.push_bytes(into);
        Ok(())
    }
}

#[cfg(test)]
mod test;
