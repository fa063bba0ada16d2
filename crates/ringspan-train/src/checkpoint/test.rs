use super::*;
use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A disk with this many bytes left. Like a real one, it takes the last of them before it says that it is full.
struct Filling(Arc<AtomicUsize>);
struct FillingFile(fs::File, Arc<AtomicUsize>);

impl Storage for Filling {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Sink>> {
        Ok(Box::new(FillingFile(fs::File::create(path)?, self.0.clone())))
    }
}

impl Write for FillingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.1.load(Ordering::Relaxed);
        let take = left.min(bytes.len());
        if take == 0 && !bytes.is_empty() {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.1.store(left - take, Ordering::Relaxed);
        self.0.write(&bytes[..take])
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Sink for FillingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }
}

fn identity(name: &str) -> Identity {
    Identity { summary: name.into(), fingerprint: name.len() as u64 }
}

fn progress(step: u64) -> Progress {
    let position = PackerPosition { epoch: 1, document: 2, offset: step as usize };
    Progress::new(step, position, 7, 100 * step, identity("a model"), identity("the data"))
}

const RANKS: usize = 2;

/// The slices of a rank: its half of two tensors.
fn slices(step: u64, rank: usize) -> Vec<Slice> {
    let slice = |name: &str, len: usize| Slice {
        name: name.into(),
        columns: None,
        start: rank * len,
        values: Arc::new(values(step, rank * len..(rank + 1) * len)),
    };
    vec![slice("a.weight", 3), slice("exp_avg.a.weight", 2)]
}

fn values(step: u64, elements: std::ops::Range<usize>) -> Vec<f32> {
    elements.map(|i| (i as f32).exp() + step as f32).collect()
}

fn save(checkpoints: &Checkpoints, step: u64) -> Result<PathBuf> {
    let part = checkpoints.begin(step)?;
    for rank in 0..RANKS {
        checkpoints.write(step, rank, RANKS, &slices(step, rank))?;
    }
    checkpoints.commit(part, &progress(step), RANKS)
}

fn contents(checkpoint: &Checkpoint) -> Vec<(String, Vec<f32>)> {
    let tensors = &checkpoint.tensors;
    let read = |name: &str| tensors.read(name, &Region::elements(0..tensors.len(name).unwrap())).unwrap();
    tensors.names().map(|name| (name.to_owned(), read(name))).collect()
}

fn newest(checkpoints: &Checkpoints) -> Result<Checkpoint> {
    checkpoints.newest(&identity("a model"), &identity("the data"))
}

#[test]
fn the_newest_comes_back_bit_for_bit_and_old_ones_go() {
    let out = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(out.path(), 2);
    for step in [5, 10, 15] {
        save(&checkpoints, step).unwrap();
    }
    assert_eq!(checkpoints.steps().unwrap(), [10, 15]);
    let read = newest(&checkpoints).unwrap();
    assert_eq!(read.progress, progress(15));
    let expected = [("a.weight", 6), ("exp_avg.a.weight", 4)].map(|(name, len)| (name.to_owned(), values(15, 0..len)));
    assert_eq!(contents(&read), expected);
}

#[test]
fn a_run_killed_while_it_replaces_a_checkpoint_has_one_of_the_two() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path(), 2);
    let path = save(&checkpoints, 5).unwrap();
    let before = contents(&newest(&checkpoints).unwrap());
    // The run is killed between the two renames.
    fs::rename(&path, checkpoints.replaced(5)).unwrap();
    assert_eq!(contents(&newest(&checkpoints).unwrap()), before);
    save(&checkpoints, 5).unwrap();
    assert!(path.exists() && !checkpoints.replaced(5).exists());
    // The run is killed after the second rename.
    fs::create_dir(checkpoints.replaced(5)).unwrap();
    assert_eq!(contents(&newest(&checkpoints).unwrap()), before);
    save(&checkpoints, 5).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [5]);
    assert!(!checkpoints.replaced(5).exists());
}

#[test]
fn any_elements_are_read_whatever_files_they_lie_in() {
    let out = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(out.path(), 1);
    save(&checkpoints, 5).unwrap();
    let tensors = newest(&checkpoints).unwrap().tensors;
    for start in 0..=6 {
        for end in start..=6 {
            assert_eq!(tensors.read("a.weight", &Region::elements(start..end)).unwrap(), values(5, start..end));
        }
    }
    let message = tensors.read("a.weight", &Region::elements(4..7)).unwrap_err().to_string();
    assert!(message.contains("element 6 of `a.weight`"), "{message}");
    assert!(tensors.read("b.weight", &Region::elements(0..1)).unwrap_err().to_string().contains("`b.weight`"));
}

#[test]
fn a_step_saved_again_replaces_itself_and_the_leftovers_of_a_killed_run_go() {
    let out = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(out.path(), 2);
    save(&checkpoints, 5).unwrap();
    fs::create_dir(out.path().join("checkpoints/.step-000009.part")).unwrap();
    assert_eq!(newest(&checkpoints).unwrap().progress.step, 5, "a part is no checkpoint");
    save(&checkpoints, 5).unwrap();
    let names: Vec<_> = fs::read_dir(out.path().join("checkpoints")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["step-000005"]);
}

#[test]
fn a_disk_that_fills_at_any_byte_leaves_the_last_checkpoint_as_it_was() {
    let out = tempfile::tempdir().unwrap();
    save(&Checkpoints::new(out.path(), 1), 5).unwrap();
    let before = newest(&Checkpoints::new(out.path(), 1)).unwrap();
    let whole = contents(&before);
    let size: u64 = fs::read_dir(&before.path).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    let mut files = std::collections::BTreeSet::new();
    for left in (0..size as usize).step_by(7) {
        let checkpoints = Checkpoints::on(out.path(), 1, Arc::new(Filling(Arc::new(AtomicUsize::new(left)))));
        let error = save(&checkpoints, 6).unwrap_err();
        let Error::Io { path, source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(error.to_string().contains(&file) && error.to_string().contains(&source.to_string()));
        files.insert(file);
        assert_eq!(checkpoints.entries().unwrap(), ["step-000005"], "{left} bytes left");
    }
    assert_eq!(files.into_iter().collect::<Vec<_>>(), [file_name(0, RANKS), file_name(1, RANKS), STATE.into()]);
    let after = newest(&Checkpoints::new(out.path(), 1)).unwrap();
    assert_eq!((after.progress.step, contents(&after)), (5, whole));
}

#[test]
fn a_checkpoint_of_another_model_or_of_other_data_is_refused_with_both_named() {
    let out = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(out.path(), 2);
    save(&checkpoints, 5).unwrap();
    let message = checkpoints.newest(&identity("a wide model"), &identity("the data")).unwrap_err().to_string();
    assert!(message.contains("saved with a model; now a wide model"), "{message}");
    let message = checkpoints.newest(&identity("a model"), &identity("new data!")).unwrap_err();
    assert!(matches!(message, Error::Checkpoint { .. }));
    let message = checkpoints.newest(&identity("a model"), &identity("other data")).unwrap_err().to_string();
    assert!(message.contains("saved with the data; now other data"), "{message}");
}

#[test]
fn a_damaged_checkpoint_is_named_and_no_older_one_taken_silently() {
    let out = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(out.path(), 2);
    assert!(newest(&checkpoints).unwrap_err().to_string().contains("no checkpoint"));
    save(&checkpoints, 5).unwrap();
    let path = save(&checkpoints, 6).unwrap();
    for (file, expected) in [(&*file_name(0, 2), "cut short"), (&file_name(1, 2), "cut short"), (STATE, "damaged")] {
        let path = path.join(file);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let message = newest(&checkpoints).unwrap_err().to_string();
        assert!(message.contains(file) && message.contains(expected), "{message}");
        fs::write(&path, whole).unwrap();
    }
    // The file has the right size, but not the content that was written.
    let shard = path.join(file_name(0, 2));
    let whole = fs::read(&shard).unwrap();
    for (from, to) in [("F32", "F64"), ("\"data_offsets\":[0,", "\"data_offsets\":[9,"), ("{", "[")] {
        let text = String::from_utf8_lossy(&whole[8..]).replacen(from, to, 1).into_bytes();
        fs::write(&shard, &[&whole[..8], &text[..]].concat()[..whole.len()]).unwrap();
        let message = newest(&checkpoints).unwrap_err().to_string();
        assert!(message.contains("shard-00001") && message.contains("damaged"), "{from}: {message}");
    }
    // The header is whole, but names an end beyond what any file can have; the file keeps its size.
    let (length, rest) = whole.split_at(8);
    let header = &rest[..u64::from_le_bytes(length.try_into().unwrap()) as usize];
    let header = String::from_utf8_lossy(header).replacen(",12]", &format!(",{}]", u64::MAX - 3), 1);
    let grown = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 99]].concat();
    fs::write(&shard, &grown[..whole.len()]).unwrap();
    let message = newest(&checkpoints).unwrap_err().to_string();
    assert!(message.contains("shard-00001") && message.contains("damaged"), "{message}");
    fs::write(&shard, [&u64::MAX.to_le_bytes(), &whole[8..]].concat()).unwrap();
    assert!(newest(&checkpoints).unwrap_err().to_string().contains("damaged"));
    fs::write(&shard, whole).unwrap();
    let text = fs::read_to_string(path.join(STATE)).unwrap();
    fs::write(path.join(STATE), text.replace("\"format\": 3", "\"format\": 4")).unwrap();
    let message = newest(&checkpoints).unwrap_err().to_string();
    assert!(message.contains("format 4") && message.contains("reads formats 2 to 3"), "{message}");
    fs::remove_file(path.join(STATE)).unwrap();
    assert!(newest(&checkpoints).unwrap_err().to_string().contains(STATE));
}

#[test]
fn a_file_is_replaced_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    write_file(&path, b"one").unwrap();
    write_file(&path, b"two").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"two");
    assert!(write_file(&folder.path().join("no/x.json"), b"x").is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
