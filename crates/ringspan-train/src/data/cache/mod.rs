//! The token cache: tokenized documents in a file, so that the same text is tokenized once, and is in memory only where it is
//! read.
//!
//! A file is a header of sixteen 64-bit words, the tokens in the order in which they were read, the range of each training
//! document among them, then the range of each held-out one, a checksum of each block of tokens, and a description of the source
//! in JSON. Numbers have this machine's byte order: on a machine of another one the magic is not found, and the file is made
//! again.

mod lock;
mod write;

pub(super) use lock::lock_token_file;
pub(super) use write::CacheWriter;

use super::{Corpus, DocumentStore, SourceSummary};
use crate::{
    error::{Error, Result},
    fingerprint::Fingerprint,
};
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
const HEADER_BYTES: u64 = 128;
/// Bytes of tokens that share a checksum.
const BLOCK_BYTES: u64 = 1 << 20;
/// Number of blocks whose checksums are compared where not all are.
const SAMPLED_BLOCKS: u64 = 64;

/// The header, before the tokens.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Header {
    magic: u64,
    version: u64,
    key: u64,
    /// A hash of the masked tokens of all documents.
    fingerprint: u64,
    /// A hash of the bytes of the files that the tokens were made of.
    contents: u64,
    /// Number of training documents, and of held-out ones.
    documents: [u64; 2],
    masked_tokens: u64,
    /// Number of tokens in each split.
    tokens: [u64; 2],
    /// Number of learned tokens in each split.
    learned: [u64; 2],
    /// The largest token id plus one; 0 where there is no token.
    largest: u64,
    /// Bytes of the source's description.
    summary_bytes: u64,
    /// A hash of everything after the tokens.
    index_hash: u64,
    /// A hash of the fields of this header before this one.
    header_hash: u64,
}

impl Header {
    fn with_hash(mut self) -> Self {
        let words: &[u64; 16] = bytemuck::cast_ref(&self);
        self.header_hash = super::fingerprint(words[..15].iter().copied());
        self
    }

    /// The offset at which the tokens end, and the size of the file; none where numbers overflow.
    fn tokens_end_and_size(&self) -> Option<(u64, u64)> {
        let tokens = self.masked_tokens.checked_mul(4)?.checked_add(HEADER_BYTES)?;
        let documents = self.documents[0].checked_add(self.documents[1])?;
        let ranges = tokens.checked_next_multiple_of(8)?.checked_add(documents.checked_mul(16)?)?;
        let blocks = ranges.checked_add(self.blocks() * 8)?;
        Some((tokens, blocks.checked_add(self.summary_bytes)?))
    }

    fn blocks(&self) -> u64 {
        (self.masked_tokens * 4).div_ceil(BLOCK_BYTES)
    }

    /// Offset at which the ranges of the documents begin.
    fn ranges_offset(&self) -> u64 {
        (HEADER_BYTES + self.masked_tokens * 4).next_multiple_of(8)
    }
}

/// The state of a folder's token file for a key.
#[derive(Debug)]
pub(super) enum CacheFile {
    /// The tokens, memory-mapped.
    Tokens(Box<Corpus>),
    /// There is no file.
    Missing,
    /// The file cannot be used, for this reason.
    Damaged(String),
}

/// The path of the token file for `key` in `folder`.
pub(super) fn path(folder: &Path, key: u64) -> PathBuf {
    folder.join(format!("tokens-{key:016x}.bin"))
}

/// Opens the file for `key` and compares it with its checksums: a sample of the tokens, or all of them if `check_all`.
///
/// # Errors
/// [`Error::Io`] when the system refuses to read a file that is there.
pub(super) fn open(folder: &Path, key: u64, check_all: bool) -> Result<CacheFile> {
    let path = path(folder, key);
    let file = match File::open(&path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(CacheFile::Missing),
        opened => opened.map_err(Error::io("read", &path))?,
    };
    let checked = VerifiedFile::read(file, key, check_all).map_err(Error::io("read", &path))?;
    let VerifiedFile { header, summary, file } = match checked {
        Ok(checked) => checked,
        Err(why) => return Ok(CacheFile::Damaged(why)),
    };
    // SAFETY: the file is never written in place, only replaced by renaming; whoever else shortens it while it is mapped
    // ends this process, as with any program that maps files.
    let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?);
    if map.len() as u64 != header.tokens_end_and_size().map_or(0, |(_, end)| end) {
        return Ok(CacheFile::Damaged("its length has changed while it was read".into()));
    }
    let masked_tokens = HEADER_BYTES as usize..(HEADER_BYTES + header.masked_tokens * 4) as usize;
    let border = (header.ranges_offset() + header.documents[0] * 16) as usize;
    let end = border + header.documents[1] as usize * 16;
    let [train, held_out] = header.tokens.map(|tokens| tokens as usize);
    Ok(CacheFile::Tokens(Box::new(Corpus {
        train: DocumentStore::mapped(
            map.clone(),
            masked_tokens.clone(),
            header.ranges_offset() as usize..border,
            train,
        ),
        held_out: DocumentStore::mapped(map, masked_tokens, border..end, held_out),
        learned_tokens: header.learned,
        largest_token: header.largest.checked_sub(1).map(|token| token as u32),
        fingerprint: header.fingerprint,
        contents_hash: header.contents,
        summary,
    })))
}

/// A file that agrees with its checksums.
struct VerifiedFile {
    header: Header,
    summary: SourceSummary,
    file: File,
}

impl VerifiedFile {
    /// Reads through a buffer instead of a map: mapped pages that are read count as memory of this process.
    fn read(mut file: File, key: u64, check_all: bool) -> std::io::Result<std::result::Result<Self, String>> {
        let length = file.metadata()?.len();
        let mut header = Header::default();
        if length < HEADER_BYTES {
            return Ok(Err(format!("it has {length} bytes, fewer than the {HEADER_BYTES} of its header")));
        }
        file.read_exact(bytemuck::bytes_of_mut(&mut header))?;
        if header.magic != MAGIC || header.version != VERSION {
            return Ok(Err(format!("it is no token cache of version {VERSION} of this machine")));
        }
        if header.header_hash != header.with_hash().header_hash || header.key != key {
            return Ok(Err("its header is damaged".into()));
        }
        let Some((tokens_end, _)) = header.tokens_end_and_size().filter(|(_, end)| *end == length) else {
            return Ok(Err(format!("it has {length} bytes, and its header announces another number")));
        };
        file.seek(SeekFrom::Start(tokens_end))?;
        let mut reader = HashingReader { from: BufReader::new(&file), sum: Fingerprint::new() };
        let mut padding = [0; 4];
        reader.read(&mut padding[..(header.ranges_offset() - tokens_end) as usize])?;
        let mut ranges_are_valid = true;
        for _ in 0..header.documents[0] + header.documents[1] {
            let mut range = [0_u64; 2];
            reader.read(bytemuck::cast_slice_mut(&mut range))?;
            ranges_are_valid &= range[0] < range[1] && range[1] <= header.masked_tokens;
        }
        let mut sums = vec![0_u64; header.blocks() as usize];
        reader.read(bytemuck::cast_slice_mut(&mut sums))?;
        let mut summary = vec![0; header.summary_bytes as usize];
        reader.read(&mut summary)?;
        if reader.sum.finish() != header.index_hash || !ranges_are_valid {
            return Ok(Err("what it says of its documents is damaged".into()));
        }
        let Ok(summary) = serde_json::from_slice(&summary) else {
            return Ok(Err("what it says of its source is damaged".into()));
        };
        for block in blocks_to_check(header.blocks(), check_all) {
            let from = HEADER_BYTES + block * BLOCK_BYTES;
            let mut bytes = vec![0; (tokens_end - from).min(BLOCK_BYTES) as usize];
            file.seek(SeekFrom::Start(from))?;
            file.read_exact(&mut bytes)?;
            let mut sum = Fingerprint::new();
            sum.push_bytes(&bytes);
            if sum.finish() != sums[block as usize] {
                return Ok(Err("its tokens are damaged".into()));
            }
        }
        Ok(Ok(Self { header, summary, file }))
    }
}

/// The blocks to check: all, or [`SAMPLED_BLOCKS`] of them at equal distances, with the first and the last.
fn blocks_to_check(blocks: u64, check_all: bool) -> Vec<u64> {
    match check_all || blocks <= SAMPLED_BLOCKS {
        true => (0..blocks).collect(),
        false => (0..SAMPLED_BLOCKS)
            .map(|i| (u128::from(blocks - 1) * u128::from(i) / u128::from(SAMPLED_BLOCKS - 1)) as u64)
            .collect(),
    }
}

/// A reader that hashes what it reads.
struct HashingReader<R> {
    from: R,
    sum: Fingerprint,
}

impl<R: Read> HashingReader<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<()> {
        self.from.read_exact(into)?;
        self.sum.push_bytes(into);
        Ok(())
    }
}

#[cfg(test)]
mod test;
