use super::*;
use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A disk with this many bytes left. The last of them are taken before it says it is full, as a real one does.
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
    let position = Position { epoch: 1, document: 2, offset: step as usize };
    Progress::new(step, position, 7, 100 * step, identity("a model"), identity("the data"))
}

fn shapes() -> BTreeMap<String, Vec<usize>> {
    BTreeMap::from([("a.weight".into(), vec![2, 3]), ("b.weight".into(), vec![4])])
}

fn values(step: u64) -> impl FnMut(&str) -> Result<Vec<f32>> {
    move |name| Ok((0..shapes()[name].iter().product()).map(|i| (i as f32).exp() + step as f32).collect())
}

fn optimizer(step: u64) -> State {
    shapes().into_iter().map(|(n, s)| (format!("exp_avg.{n}"), vec![step as f32; s.iter().product()])).collect()
}

fn save(checkpoints: &Checkpoints, step: u64) -> Result<PathBuf> {
    checkpoints.save(&progress(step), &shapes(), values(step), &optimizer(step))
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
    assert_eq!(read.optimizer, optimizer(15));
    let mut expected = values(15);
    for (name, shape) in shapes() {
        assert_eq!(read.parameters[&name], (shape, expected(&name).unwrap()));
    }
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
    let size: u64 = fs::read_dir(&before.path).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    let mut files = std::collections::BTreeSet::new();
    for left in (0..size as usize).step_by(7) {
        let checkpoints = Checkpoints::on(out.path(), 1, Box::new(Filling(Arc::new(AtomicUsize::new(left)))));
        let error = save(&checkpoints, 6).unwrap_err();
        let Error::Io { path, source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(error.to_string().contains(&file) && error.to_string().contains(&source.to_string()));
        files.insert(file);
        assert_eq!(checkpoints.entries().unwrap(), ["step-000005"], "{left} bytes left");
    }
    assert_eq!(files.into_iter().collect::<Vec<_>>(), [MODEL, OPTIMIZER, STATE]);
    assert_eq!(newest(&Checkpoints::new(out.path(), 1)).unwrap(), before);
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
    for (file, expected) in [(MODEL, "cut short"), (OPTIMIZER, "cut short"), (STATE, "damaged")] {
        let path = path.join(file);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let message = newest(&checkpoints).unwrap_err().to_string();
        assert!(message.contains(file) && message.contains(expected), "{message}");
        fs::write(&path, whole).unwrap();
    }
    let text = fs::read_to_string(path.join(STATE)).unwrap();
    fs::write(path.join(STATE), text.replace("\"format\": 1", "\"format\": 2")).unwrap();
    let message = newest(&checkpoints).unwrap_err().to_string();
    assert!(message.contains("format 2") && message.contains("reads format 1"), "{message}");
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
