//! Writes tokenized documents to a file, one after the other; none of them stays in memory.

use super::{BLOCK, HEADER, Header, MAGIC, VERSION, path};
use crate::{
    checkpoint::sync_folder,
    data::{About, GIVEN, fingerprint::Fingerprint},
    error::{Error, Result},
};
use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// Bit that is set in the end of a held-out document.
const HELD_OUT: u64 = 1 << 63;
/// Number of words that are read at once when the written file is read again.
const CHUNK: usize = 1 << 16;

/// A token file that is being written. It is removed unless it is finished.
pub(in crate::data) struct Writer {
    folder: PathBuf,
    key: u64,
    part: PathBuf,
    words: BufWriter<File>,
    index: PathBuf,
    /// Indices at which documents end, in a file of their own: there may be more of them than fit into memory.
    ends: BufWriter<File>,
    written: u64,
    /// Index of the first word of the current document.
    start: u64,
    documents: u64,
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A failure is ignored: the next process that makes this file removes what is left.
        let _ = fs::remove_file(&self.part);
        let _ = fs::remove_file(&self.index);
    }
}

impl Writer {
    /// Creates a temporary file for `key` in `folder`, which exists.
    pub(in crate::data) fn new(folder: &Path, key: u64) -> Result<Self> {
        let beside = |what: &str| folder.join(format!(".tokens-{key:016x}.{}.{what}", std::process::id()));
        let (part, index) = (beside("part"), beside("index.part"));
        let create = |path: &Path| {
            let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
            file.map(|file| BufWriter::with_capacity(1 << 20, file)).map_err(Error::io("write", path))
        };
        let (words, ends) = (create(&part)?, create(&index)?);
        let mut writer =
            Self { folder: folder.into(), key, part, words, index, ends, written: 0, start: 0, documents: 0 };
        writer.words.write_all(&[0; HEADER as usize]).map_err(Error::io("write", &writer.part))?;
        Ok(writer)
    }

    /// Appends words to the current document.
    pub(in crate::data) fn extend(&mut self, words: &[u32]) -> Result<()> {
        self.written += words.len() as u64;
        self.words.write_all(bytemuck::cast_slice(words)).map_err(Error::io("write", &self.part))
    }

    /// Ends the current document and returns its index; a document without words is dropped, and has none.
    pub(in crate::data) fn end(&mut self, held_out: bool) -> Result<Option<u64>> {
        if self.start == self.written {
            return Ok(None);
        }
        if self.documents == u64::from(u32::MAX) {
            let problem = format!("has more than {} documents; give its parts with a --data each", u32::MAX);
            return Err(Error::Data { path: self.folder.clone(), problem });
        }
        self.start = self.written;
        let end = self.written | if held_out { HELD_OUT } else { 0 };
        self.ends.write_all(&end.to_ne_bytes()).map_err(Error::io("write", &self.index))?;
        self.documents += 1;
        Ok(Some(self.documents - 1))
    }

    /// Completes the file and renames it to its place. The document `other`, if any, changes sides between training and held out.
    pub(in crate::data) fn finish(mut self, other: Option<u64>, contents: u64, about: &About) -> Result<()> {
        let path = path(&self.folder, self.key);
        let about = serde_json::to_vec(about).map_err(|e| Error::io("write", &path)(e.into()))?;
        self.complete(other, contents, &about)
            .and_then(|()| fs::rename(&self.part, &path))
            .map_err(Error::io("write", &path))?;
        sync_folder(&self.folder);
        Ok(())
    }

    fn complete(&mut self, other: Option<u64>, contents: u64, about: &[u8]) -> io::Result<()> {
        self.words.flush()?;
        self.ends.flush()?;
        let looked = self.look_through(other)?;
        let mut behind = Behind { to: &mut self.words, sum: Fingerprint::new() };
        let odd = self.written % 2 == 1;
        behind.write(&[0; 4][..if odd { 4 } else { 0 }])?;
        for side in [false, true] {
            each_document(&self.index, other, |range, held_out| match held_out == side {
                true => behind.write(bytemuck::cast_slice(&range)),
                false => Ok(()),
            })?;
        }
        behind.write(bytemuck::cast_slice(&looked.blocks))?;
        behind.write(about)?;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            key: self.key,
            fingerprint: looked.fingerprint.finish(),
            contents,
            documents: looked.documents,
            words: self.written,
            tokens: looked.tokens,
            learned: looked.learned,
            largest: looked.largest,
            about: about.len() as u64,
            behind: behind.sum.finish(),
            sum: 0,
        };
        self.words.seek(SeekFrom::Start(0))?;
        self.words.write_all(bytemuck::bytes_of(&header.summed()))?;
        self.words.flush()?;
        self.words.get_mut().sync_all()
    }

    /// Reads what was written: the fingerprint of a document begins with its length, which is known only at its end.
    fn look_through(&self, other: Option<u64>) -> io::Result<Looked> {
        let mut from = BufReader::new(File::open(&self.part)?);
        let mut looked = Looked::new();
        let mut buffer = vec![0_u32; CHUNK];
        from.seek(SeekFrom::Start(HEADER))?;
        each_document(&self.index, other, |range, held_out| {
            looked.begin(range, held_out);
            let mut first = true;
            words(&mut from, range, &mut buffer, |words| {
                looked.block(words);
                looked.count(words, held_out, std::mem::take(&mut first));
                if !held_out {
                    words.iter().for_each(|&word| looked.fingerprint.push(word.into()));
                }
            })
        })?;
        looked.end_block();
        // Held-out documents come last in the fingerprint, wherever they lie in the file.
        each_document(&self.index, other, |range, held_out| {
            if !held_out {
                return Ok(());
            }
            looked.fingerprint.push(range[1] - range[0]);
            from.seek(SeekFrom::Start(HEADER + range[0] * 4))?;
            words(&mut from, range, &mut buffer, |words| {
                words.iter().for_each(|&word| looked.fingerprint.push(word.into()));
            })
        })?;
        Ok(looked)
    }
}

/// Sums over all documents, made once they are written.
struct Looked {
    fingerprint: Fingerprint,
    documents: [u64; 2],
    tokens: [u64; 2],
    learned: [u64; 2],
    largest: u64,
    blocks: Vec<u64>,
    /// The words of the last block, which is not full yet.
    block: Vec<u32>,
}

impl Looked {
    fn new() -> Self {
        Self {
            fingerprint: Fingerprint::new(),
            documents: [0; 2],
            tokens: [0; 2],
            learned: [0; 2],
            largest: 0,
            blocks: Vec::new(),
            block: Vec::with_capacity((BLOCK / 4) as usize),
        }
    }

    fn begin(&mut self, [start, end]: [u64; 2], held_out: bool) {
        let side = usize::from(held_out);
        self.documents[side] += 1;
        self.tokens[side] += end - start;
        if !held_out {
            // The length keeps documents apart: [1,2],[3] and [1],[2,3] have different fingerprints.
            self.fingerprint.push(end - start);
        }
    }

    fn count(&mut self, words: &[u32], held_out: bool, first: bool) {
        // The first token of a document is never a target.
        let learned = words.iter().skip(usize::from(first)).filter(|&&word| word & GIVEN == 0);
        self.learned[usize::from(held_out)] += learned.count() as u64;
        let largest = words.iter().map(|word| u64::from(word & !GIVEN) + 1).max();
        self.largest = self.largest.max(largest.unwrap_or(0));
    }

    fn block(&mut self, mut words: &[u32]) {
        while !words.is_empty() {
            let (head, rest) = words.split_at(words.len().min((BLOCK / 4) as usize - self.block.len()));
            self.block.extend_from_slice(head);
            words = rest;
            if self.block.len() as u64 * 4 == BLOCK {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        if !self.block.is_empty() {
            let mut sum = Fingerprint::new();
            sum.push_bytes(bytemuck::cast_slice(&self.block));
            self.blocks.push(sum.finish());
            self.block.clear();
        }
    }
}

/// Calls `see` with the range of words of each document of an index, and whether it is held out, in the order in which they were
/// written; `other` changes sides.
fn each_document(
    index: &Path,
    other: Option<u64>,
    mut see: impl FnMut([u64; 2], bool) -> io::Result<()>,
) -> io::Result<()> {
    let mut from = BufReader::new(File::open(index)?);
    let (mut start, mut word) = (0, [0; 8]);
    let count = from.get_ref().metadata()?.len() / 8;
    for document in 0..count {
        from.read_exact(&mut word)?;
        let said = u64::from_ne_bytes(word);
        let (end, held_out) = (said & !HELD_OUT, said & HELD_OUT != 0);
        see([start, end], held_out != (other == Some(document)))?;
        start = end;
    }
    Ok(())
}

/// Reads the words of a document from the position of `from`, and passes them to `see` in chunks.
fn words(
    from: &mut impl Read,
    [start, end]: [u64; 2],
    buffer: &mut [u32],
    mut see: impl FnMut(&[u32]),
) -> io::Result<()> {
    let mut left = end - start;
    while left > 0 {
        let count = left.min(buffer.len() as u64) as usize;
        from.read_exact(bytemuck::cast_slice_mut(&mut buffer[..count]))?;
        see(&buffer[..count]);
        left -= count as u64;
    }
    Ok(())
}

/// A writer that hashes what it writes, as [`Summed`](super::Summed) does on reading.
struct Behind<'a, W> {
    to: &'a mut W,
    sum: Fingerprint,
}

impl<W: Write> Behind<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.push_bytes(bytes);
        self.to.write_all(bytes)
    }
}
