//! Token documents in a file, so that the same text becomes tokens once.
//!
//! A file is eight words of 64 bits (magic, version, key, fingerprint of the tokens, documents to train on, documents held
//! out, tokens, and a sum over these), then where each document ends, then the tokens. Numbers are those of this machine:
//! on one of another byte order the magic is not found, and the file is made again.

use super::{
    Corpus, fingerprint,
    store::{Store, Words},
};
use crate::{
    checkpoint::{Disk, Storage},
    error::{Error, Result},
};
use memmap2::Mmap;
use std::{
    fs::{self, File},
    io::{BufWriter, ErrorKind, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

const MAGIC: u64 = u64::from_ne_bytes(*b"ringspan");
/// Of the layout of the file, and of the way text becomes words.
const VERSION: u64 = 2;
const HEADER: usize = 64;

/// What a folder has for a key.
#[derive(Debug)]
pub enum Found {
    /// The tokens, mapped.
    Tokens(Corpus),
    /// No file.
    Nothing,
    /// A file that cannot be used, and why.
    Damaged(String),
}

/// The file for `key` in `folder`.
#[must_use]
pub fn path(folder: &Path, key: u64) -> PathBuf {
    folder.join(format!("tokens-{key:016x}.bin"))
}

/// Opens the file for `key`, and reads it once to see that it is whole.
///
/// # Errors
/// [`Error::Io`] when the system refuses to read a file that is there.
pub fn open(folder: &Path, key: u64) -> Result<Found> {
    let path = path(folder, key);
    let file = match File::open(&path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Found::Nothing),
        opened => opened.map_err(Error::io("read", &path))?,
    };
    // SAFETY: the file is never written in place, only replaced by renaming; whoever else shortens it while it is mapped
    // ends this process, as with any program that maps files.
    let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?;
    Ok(read(map, key).map_or_else(Found::Damaged, Found::Tokens))
}

fn read(map: Mmap, key: u64) -> std::result::Result<Corpus, String> {
    let number = |index: usize| map.get(index * 8..index * 8 + 8).map(bytemuck::pod_read_unaligned::<u64>);
    let header: Vec<u64> = (0..8).map_while(number).collect();
    let &[magic, version, for_key, tokens_are, train, held_out, words, sum] = &header[..] else {
        return Err(format!("it has {} bytes, fewer than the {HEADER} of its header", map.len()));
    };
    if magic != MAGIC || version != VERSION {
        return Err(format!("it is no token cache of version {VERSION} of this machine"));
    }
    if sum != fingerprint(header[..7].iter().copied()) || for_key != key {
        return Err("its header is damaged".into());
    }
    let documents = train.checked_add(held_out);
    let bytes =
        documents.and_then(|n| n.checked_mul(8)?.checked_add(words.checked_mul(4)?)?.checked_add(HEADER as u64));
    if bytes != Some(map.len() as u64) {
        return Err(format!("it has {} bytes, but its header announces {bytes:?}", map.len()));
    }
    let documents = (train + held_out) as usize;
    let ends: Vec<usize> = (8..8 + documents).map_while(number).map(|end| end as usize).collect();
    let rising = ends.iter().zip(std::iter::once(&0).chain(&ends)).all(|(end, start)| end > start);
    if !rising || ends.last().map_or(0, |&end| end as u64) != words {
        return Err("the ends of its documents are damaged".into());
    }
    let words = Arc::new(Words::Mapped(map, HEADER + documents * 8));
    let (first, second) = ends.split_at(train as usize);
    let border = first.last().copied().unwrap_or(0);
    let train = Store::of(words.clone(), 0, first.to_vec());
    let corpus = Corpus::of(train, Store::of(words, border, second.to_vec()));
    if corpus.fingerprint != tokens_are {
        return Err("its tokens are damaged".into());
    }
    Ok(corpus)
}

/// Writes the file for `key`, beside its place first. The folder is made where it is missing.
///
/// # Errors
/// [`Error::Io`]; then an old file is as it was.
pub fn save(folder: &Path, key: u64, corpus: &Corpus) -> Result<PathBuf> {
    fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let path = path(folder, key);
    // Two runs may make the same file at once: each writes its own, and the later one takes the place.
    let part = folder.join(format!(".tokens-{key:016x}.{}.part", std::process::id()));
    let written = write(&part, key, corpus).and_then(|()| fs::rename(&part, &path));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written.map_err(Error::io("write", &path))?;
    Ok(path)
}

fn write(part: &Path, key: u64, corpus: &Corpus) -> std::io::Result<()> {
    let words = corpus.train_tokens() + corpus.held_out_tokens();
    let counts = [corpus.train.len() as u64, corpus.held_out.len() as u64, words as u64];
    let header = [&[MAGIC, VERSION, key, corpus.fingerprint][..], &counts].concat();
    let documents = || corpus.train.documents().chain(corpus.held_out.documents());
    let ends = documents().scan(0, |end: &mut u64, document| {
        *end += document.len() as u64;
        Some(*end)
    });
    let sum = fingerprint(header.iter().copied());
    let head: Vec<u64> = header.into_iter().chain([sum]).chain(ends).collect();
    let mut file = BufWriter::new(Disk.create(part)?);
    file.write_all(bytemuck::cast_slice(&head))?;
    for document in documents() {
        file.write_all(bytemuck::cast_slice(document))?;
    }
    file.flush()?;
    file.get_mut().sync()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus() -> Corpus {
        Corpus::of(Store::new(&[vec![1, 2, 3], vec![4 | 1 << 31]]), Store::new(&[vec![5, 6]]))
    }

    #[test]
    fn what_was_saved_is_found_under_its_key_and_under_no_other() {
        let folder = tempfile::tempdir().expect("folder");
        let below = folder.path().join("a/b");
        assert!(matches!(open(&below, 7), Ok(Found::Nothing)));
        save(&below, 7, &corpus()).expect("saved");
        let Ok(Found::Tokens(found)) = open(&below, 7) else { panic!("not found") };
        assert_eq!(found.train.documents().collect::<Vec<_>>(), corpus().train.documents().collect::<Vec<_>>());
        assert_eq!(found.held_out.documents().collect::<Vec<_>>(), [[5, 6]]);
        assert_eq!(found.fingerprint, corpus().fingerprint);
        assert!(matches!(open(&below, 8), Ok(Found::Nothing)));
        let empty = Corpus::of(Store::new(&[vec![1]]), Store::new(&[]));
        save(&below, 8, &empty).expect("saved");
        let Ok(Found::Tokens(found)) = open(&below, 8) else { panic!("not found") };
        assert_eq!((found.train.len(), found.held_out.len()), (1, 0));
        assert_eq!(fs::read_dir(&below).expect("folder").count(), 2, "nothing is left beside");
    }

    #[test]
    fn a_file_with_any_byte_changed_or_missing_is_damaged() {
        let folder = tempfile::tempdir().expect("folder");
        let path = save(folder.path(), 7, &corpus()).expect("saved");
        let good = fs::read(&path).expect("file");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(&path, &bad).expect("file");
            assert!(matches!(open(folder.path(), 7), Ok(Found::Damaged(_))), "byte {at}");
            fs::write(&path, &good[..at]).expect("file");
            assert!(matches!(open(folder.path(), 7), Ok(Found::Damaged(_))), "{at} bytes");
        }
        fs::write(&path, [&good[..], &[0; 4]].concat()).expect("file");
        assert!(matches!(open(folder.path(), 7), Ok(Found::Damaged(_))));
    }
}
