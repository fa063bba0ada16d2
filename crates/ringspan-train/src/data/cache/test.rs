use super::*;
use std::fs;

/// Writes documents, each with whether it is held out, and returns the path of their file.
fn save(folder: &Path, key: u64, documents: &[(Vec<u32>, bool)], moved_document: Option<u64>) -> PathBuf {
    let mut writer = CacheWriter::new(folder, key).unwrap();
    for (masked_tokens, held_out) in documents {
        masked_tokens
            .chunks(masked_tokens.len().div_ceil(2).max(1))
            .for_each(|masked_tokens| writer.extend(masked_tokens).unwrap());
        writer.end(*held_out).unwrap();
    }
    writer.finish(moved_document, 5, &SourceSummary { texts: 3, ..SourceSummary::default() }).unwrap();
    path(folder, key)
}

fn few_documents() -> Vec<(Vec<u32>, bool)> {
    vec![(vec![1, 2, 3], false), (vec![5, 6], true), (vec![], false), (vec![4 | 1 << 31, 7], false)]
}

fn open_valid(folder: &Path, key: u64) -> Corpus {
    match open(folder, key, false).unwrap() {
        CacheFile::Tokens(corpus) => *corpus,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_saved_file_is_found_under_its_key_and_under_no_other() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(open(&folder.path().join("none"), 7, true), Ok(CacheFile::Missing)));
    save(folder.path(), 7, &few_documents(), None);
    let corpus = open_valid(folder.path(), 7);
    assert_eq!(corpus.train.documents().collect::<Vec<_>>(), [&[1, 2, 3][..], &[4 | 1 << 31, 7]]);
    assert_eq!(corpus.held_out.documents().collect::<Vec<_>>(), [[5, 6]]);
    assert_eq!((corpus.train.tokens(), corpus.held_out.tokens()), (5, 2));
    // The first token of a document is never a target.
    assert_eq!((corpus.learned_tokens, corpus.largest_token, corpus.contents_hash), ([3, 1], Some(7), 5));
    assert_eq!(corpus.summary.texts, 3);
    // The fingerprint takes length and masked tokens of each training document, then of each held-out one.
    let masked_tokens = [3, 1, 2, 3, 2, 4 | 1 << 31, 7, 2, 5, 6];
    assert_eq!(corpus.fingerprint, crate::data::fingerprint(masked_tokens));
    assert!(matches!(open(folder.path(), 8, true), Ok(CacheFile::Missing)));
    // The last document changes sides.
    save(folder.path(), 8, &few_documents(), Some(2));
    let corpus = open_valid(folder.path(), 8);
    assert_eq!((corpus.train.len(), corpus.held_out.len()), (1, 2));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside");
    drop(CacheWriter::new(folder.path(), 9).unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nor of what was not finished");
}

#[test]
fn a_file_with_any_byte_changed_or_missing_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), 7, &few_documents(), None);
    let good = fs::read(&path).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(&path, &bad).unwrap();
        assert!(matches!(open(folder.path(), 7, false), Ok(CacheFile::Damaged(_))), "byte {at}");
        fs::write(&path, &good[..at]).unwrap();
        assert!(matches!(open(folder.path(), 7, false), Ok(CacheFile::Damaged(_))), "{at} bytes");
    }
    fs::write(&path, [&good[..], &[0; 4]].concat()).unwrap();
    assert!(matches!(open(folder.path(), 7, false), Ok(CacheFile::Damaged(_))));
}

#[test]
fn a_sample_of_many_blocks_is_compared_and_all_on_request() {
    assert_eq!(blocks_to_check(3, false), [0, 1, 2]);
    let sample = blocks_to_check(1000, false);
    assert_eq!((sample.len(), sample[0], sample[63]), (64, 0, 999));
    assert!(sample.windows(2).all(|pair| pair[1] > pair[0]));
    assert_eq!(blocks_to_check(1000, true).len(), 1000);

    let folder = tempfile::tempdir().unwrap();
    let blocks = (SAMPLED_BLOCKS * 2) as usize;
    let documents: Vec<_> = (0..blocks).map(|i| (vec![i as u32; BLOCK_BYTES as usize / 4], false)).collect();
    let path = save(folder.path(), 7, &documents, None);
    let unsampled = (0..blocks as u64).find(|block| !blocks_to_check(blocks as u64, false).contains(block)).unwrap();
    let mut file = File::options().write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(HEADER_BYTES + unsampled * BLOCK_BYTES + 77)).unwrap();
    std::io::Write::write_all(&mut file, &[9]).unwrap();
    assert!(matches!(open(folder.path(), 7, false), Ok(CacheFile::Tokens(_))));
    assert!(matches!(open(folder.path(), 7, true), Ok(CacheFile::Damaged(_))));
}
