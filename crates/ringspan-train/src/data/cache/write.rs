//! Writes tokenized documents to a file, one after the other; none of them stays in memory.

use super::{BLOCK_BYTES, HEADER_BYTES, Header, MAGIC, VERSION, path};
use crate::{
    data::{NOT_LEARNED, SourceSummary},
    durable_file::sync_folder,
    error::{Error, Result},
    fingerprint::Fingerprint,
};
use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// Bit that is set in the end of a held-out document.
const HELD_OUT_BIT: u64 = 1 << 63;
/// Number of masked tokens that are read at once when the written file is read again.
const CHUNK_TOKENS: usize = 1 << 16;

/// A token file that is being written. It is removed unless it is finished.
pub(in crate::data) struct CacheWriter {
    folder: PathBuf,
    key: u64,
    token_path: PathBuf,
    token_writer: BufWriter<File>,
    index_path: PathBuf,
    /// Indices at which documents end, in a file of their own: there may be more of them than fit into memory.
    end_writer: BufWriter<File>,
    written: u64,
    /// Index of the first masked token of the current document.
    start: u64,
    documents: u64,
}

impl Drop for CacheWriter {
    fn drop(&mut self) {
        // A failure is ignored: the next process that makes this file removes what is left.
        let _ = fs::remove_file(&self.token_path);
        let _ = fs::remove_file(&self.index_path);
    }
}

impl CacheWriter {
    /// Creates a temporary file for `key` in `folder`, which exists.
    pub(in crate::data) fn new(folder: &Path, key: u64) -> Result<Self> {
        let temporary_path = |what: &str| folder.join(format!(".tokens-{key:016x}.{}.{what}", std::process::id()));
        let (token_path, index_path) = (temporary_path("part"), temporary_path("index.part"));
        let create = |path: &Path| {
            let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
            file.map(|file| BufWriter::with_capacity(1 << 20, file)).map_err(Error::io("write", path))
        };
        let (token_writer, end_writer) = (create(&token_path)?, create(&index_path)?);
        let mut writer = Self {
            folder: folder.into(),
            key,
            token_path,
            token_writer,
            index_path,
            end_writer,
            written: 0,
            start: 0,
            documents: 0,
        };
        writer.token_writer.write_all(&[0; HEADER_BYTES as usize]).map_err(Error::io("write", &writer.token_path))?;
        Ok(writer)
    }

    /// Appends masked tokens to the current document.
    pub(in crate::data) fn extend(&mut self, masked_tokens: &[u32]) -> Result<()> {
        self.written += masked_tokens.len() as u64;
        self.token_writer.write_all(bytemuck::cast_slice(masked_tokens)).map_err(Error::io("write", &self.token_path))
    }

    /// Ends the current document and returns its index; a document without masked tokens is dropped, and has none.
    pub(in crate::data) fn end(&mut self, held_out: bool) -> Result<Option<u64>> {
        if self.start == self.written {
            return Ok(None);
        }
        if self.documents == u64::from(u32::MAX) {
            let problem = format!("has more than {} documents; give its parts with a --data each", u32::MAX);
            return Err(Error::Data { path: self.folder.clone(), problem });
        }
        self.start = self.written;
        let end = self.written | if held_out { HELD_OUT_BIT } else { 0 };
        self.end_writer.write_all(&end.to_ne_bytes()).map_err(Error::io("write", &self.index_path))?;
        self.documents += 1;
        Ok(Some(self.documents - 1))
    }

    /// Completes the file and renames it to its place. The document `moved_document`, if any, changes sides between training and held out.
    pub(in crate::data) fn finish(
        mut self,
        moved_document: Option<u64>,
        contents: u64,
        summary: &SourceSummary,
    ) -> Result<()> {
        let path = path(&self.folder, self.key);
        let summary = serde_json::to_vec(summary).map_err(|e| Error::io("write", &path)(e.into()))?;
        self.complete(moved_document, contents, &summary)
            .and_then(|()| fs::rename(&self.token_path, &path))
            .map_err(Error::io("write", &path))?;
        sync_folder(&self.folder);
        Ok(())
    }

    fn complete(&mut self, moved_document: Option<u64>, contents: u64, summary: &[u8]) -> io::Result<()> {
        self.token_writer.flush()?;
        self.end_writer.flush()?;
        let totals = self.compute_totals(moved_document)?;
        let mut writer = HashingWriter { to: &mut self.token_writer, sum: Fingerprint::new() };
        let odd = self.written % 2 == 1;
        writer.write(&[0; 4][..if odd { 4 } else { 0 }])?;
        for split in [false, true] {
            each_document(&self.index_path, moved_document, |range, held_out| match held_out == split {
                true => writer.write(bytemuck::cast_slice(&range)),
                false => Ok(()),
            })?;
        }
        writer.write(bytemuck::cast_slice(&totals.blocks))?;
        writer.write(summary)?;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            key: self.key,
            fingerprint: totals.fingerprint.finish(),
            contents,
            documents: totals.documents,
            masked_tokens: self.written,
            tokens: totals.tokens,
            learned: totals.learned,
            largest: totals.largest,
            summary_bytes: summary.len() as u64,
            index_hash: writer.sum.finish(),
            header_hash: 0,
        };
        self.token_writer.seek(SeekFrom::Start(0))?;
        self.token_writer.write_all(bytemuck::bytes_of(&header.with_hash()))?;
        self.token_writer.flush()?;
        self.token_writer.get_mut().sync_all()
    }

    /// Reads what was written: the fingerprint of a document begins with its length, which is known only at its end.
    fn compute_totals(&self, moved_document: Option<u64>) -> io::Result<Totals> {
        let mut from = BufReader::new(File::open(&self.token_path)?);
        let mut totals = Totals::new();
        let mut buffer = vec![0_u32; CHUNK_TOKENS];
        from.seek(SeekFrom::Start(HEADER_BYTES))?;
        each_document(&self.index_path, moved_document, |range, held_out| {
            totals.begin_document(range, held_out);
            let mut first = true;
            read_masked_tokens(&mut from, range, &mut buffer, |masked_tokens| {
                totals.add_to_block(masked_tokens);
                totals.count_masked_tokens(masked_tokens, held_out, std::mem::take(&mut first));
                if !held_out {
                    masked_tokens.iter().for_each(|&token| totals.fingerprint.push(token.into()));
                }
            })
        })?;
        totals.end_block();
        // Held-out documents come last in the fingerprint, wherever they lie in the file.
        each_document(&self.index_path, moved_document, |range, held_out| {
            if !held_out {
                return Ok(());
            }
            totals.fingerprint.push(range[1] - range[0]);
            from.seek(SeekFrom::Start(HEADER_BYTES + range[0] * 4))?;
            read_masked_tokens(&mut from, range, &mut buffer, |masked_tokens| {
                masked_tokens.iter().for_each(|&token| totals.fingerprint.push(token.into()));
            })
        })?;
        Ok(totals)
    }
}

/// Sums over all documents, made once they are written.
struct Totals {
    fingerprint: Fingerprint,
    documents: [u64; 2],
    tokens: [u64; 2],
    learned: [u64; 2],
    largest: u64,
    blocks: Vec<u64>,
    /// The masked tokens of the last block, which is not full yet.
    block: Vec<u32>,
}

impl Totals {
    fn new() -> Self {
        Self {
            fingerprint: Fingerprint::new(),
            documents: [0; 2],
            tokens: [0; 2],
            learned: [0; 2],
            largest: 0,
            blocks: Vec::new(),
            block: Vec::with_capacity((BLOCK_BYTES / 4) as usize),
        }
    }

    fn begin_document(&mut self, [start, end]: [u64; 2], held_out: bool) {
        let split = usize::from(held_out);
        self.documents[split] += 1;
        self.tokens[split] += end - start;
        if !held_out {
            // The length keeps documents apart: [1,2],[3] and [1],[2,3] have different fingerprints.
            self.fingerprint.push(end - start);
        }
    }

    fn count_masked_tokens(&mut self, masked_tokens: &[u32], held_out: bool, first: bool) {
        // The first token of a document is never a target.
        let learned = masked_tokens.iter().skip(usize::from(first)).filter(|&&token| token & NOT_LEARNED == 0);
        self.learned[usize::from(held_out)] += learned.count() as u64;
        let largest = masked_tokens.iter().map(|token| u64::from(token & !NOT_LEARNED) + 1).max();
        self.largest = self.largest.max(largest.unwrap_or(0));
    }

    fn add_to_block(&mut self, mut masked_tokens: &[u32]) {
        while !masked_tokens.is_empty() {
            let (head, rest) =
                masked_tokens.split_at(masked_tokens.len().min((BLOCK_BYTES / 4) as usize - self.block.len()));
            self.block.extend_from_slice(head);
            masked_tokens = rest;
            if self.block.len() as u64 * 4 == BLOCK_BYTES {
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

/// Calls `visit` with the range of masked tokens of each document of an index, and whether it is held out, in the order in which they were
/// written; `moved_document` changes sides.
fn each_document(
    index_path: &Path,
    moved_document: Option<u64>,
    mut visit: impl FnMut([u64; 2], bool) -> io::Result<()>,
) -> io::Result<()> {
    let mut from = BufReader::new(File::open(index_path)?);
    let (mut start, mut word) = (0, [0; 8]);
    let count = from.get_ref().metadata()?.len() / 8;
    for document in 0..count {
        from.read_exact(&mut word)?;
        let end_and_split = u64::from_ne_bytes(word);
        let (end, held_out) = (end_and_split & !HELD_OUT_BIT, end_and_split & HELD_OUT_BIT != 0);
        visit([start, end], held_out != (moved_document == Some(document)))?;
        start = end;
    }
    Ok(())
}

/// Reads the masked tokens of a document from the position of `from`, and passes them to `visit` in chunks.
fn read_masked_tokens(
    from: &mut impl Read,
    [start, end]: [u64; 2],
    buffer: &mut [u32],
    mut visit: impl FnMut(&[u32]),
) -> io::Result<()> {
    let mut left = end - start;
    while left > 0 {
        let count = left.min(buffer.len() as u64) as usize;
        from.read_exact(bytemuck::cast_slice_mut(&mut buffer[..count]))?;
        visit(&buffer[..count]);
        left -= count as u64;
    }
    Ok(())
}

/// A writer that hashes what it writes, as [`HashingReader`](super::HashingReader) does on reading.
struct HashingWriter<'a, W> {
    to: &'a mut W,
    sum: Fingerprint,
}

impl<W: Write> HashingWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.push_bytes(bytes);
        self.to.write_all(bytes)
    }
}
