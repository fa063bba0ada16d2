//! Reads and writes files: errors of safetensors name file, tensor and numbers; outputs are written under a temporary name and
//! renamed.

use crate::header;
use crate::interrupt::Unfinished;
use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The bytes of a safetensors file, all in memory.
pub struct TensorBytes {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl TensorBytes {
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self::new(path, bytes))
    }

    /// The file at `path`, whose bytes have been read already.
    pub fn new(path: &Path, bytes: Vec<u8>) -> Self {
        Self { path: path.to_owned(), bytes }
    }

    pub fn parse(&self) -> Result<Tensors<'_>> {
        let size = self.bytes.len();
        let whole = || format!("{} ({size} bytes) is not a whole safetensors file", self.path.display());
        header::check(&self.bytes).with_context(whole)?;
        let tensors = SafeTensors::deserialize(&self.bytes).with_context(whole)?;
        Ok(Tensors { path: &self.path, tensors })
    }
}

/// The tensors of a file.
pub struct Tensors<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl<'a> Tensors<'a> {
    pub fn path(&self) -> &'a Path {
        self.path
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors.names().into_iter().map(str::to_owned).collect();
        names.sort_unstable();
        names
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    /// The tensor `name`, of one of the types and with as many dims as `shape` names, e.g. `[B, S, H, D]`.
    pub fn get<const N: usize>(&self, name: &str, types: &[Dtype], shape: &str) -> Result<FileTensor<'a, N>> {
        let path = self.path.display();
        let Ok(view) = self.tensors.tensor(name) else {
            let has = self.names().join(", ");
            bail!(
                "{path}: tensor `{name}` {shape} is missing; the file has: {}",
                if has.is_empty() { "nothing" } else { &has }
            );
        };
        ensure!(
            types.contains(&view.dtype()),
            "{path}: tensor `{name}` is {}, expected {}",
            type_name(view.dtype()),
            types.iter().map(|t| type_name(*t)).collect::<Vec<_>>().join(" or ")
        );
        let Ok(dims) = <[usize; N]>::try_from(view.shape()) else {
            bail!(
                "{path}: tensor `{name}` has shape {:?} ({} dims), expected {shape} ({N} dims)",
                view.shape(),
                view.shape().len()
            );
        };
        Ok(FileTensor { dtype: view.dtype(), shape: dims, data: view.data() })
    }
}

/// A tensor in the bytes of its file.
#[derive(Clone, Copy)]
pub struct FileTensor<'a, const N: usize> {
    pub dtype: Dtype,
    pub shape: [usize; N],
    pub data: &'a [u8],
}

impl<const N: usize> FileTensor<'_, N> {
    /// All elements of an integer tensor.
    pub fn integers(&self) -> Vec<i64> {
        match self.dtype {
            Dtype::I64 => self.data.chunks_exact(8).map(bytemuck::pod_read_unaligned::<i64>).collect(),
            Dtype::U32 => {
                self.data.chunks_exact(4).map(|b| i64::from(bytemuck::pod_read_unaligned::<u32>(b))).collect()
            }
            _ => self.data.chunks_exact(4).map(|b| i64::from(bytemuck::pod_read_unaligned::<i32>(b))).collect(),
        }
    }

    /// All elements of a float tensor.
    pub fn floats(&self) -> Vec<f32> {
        self.float_rows(&[0], self.shape.iter().product())
    }

    /// The finite element of a float tensor for which `size` is greatest; 0 if there is none.
    pub fn greatest(&self, size: impl Fn(f32) -> f32) -> f32 {
        let greater = |most: f32, x: f32| if x.is_finite() && size(x) > size(most) { x } else { most };
        let (pairs, fours) = (self.data.chunks_exact(2), self.data.chunks_exact(4));
        match self.dtype {
            Dtype::BF16 => pairs.map(|b| bytemuck::pod_read_unaligned::<half::bf16>(b).to_f32()).fold(0.0, greater),
            Dtype::F16 => pairs.map(|b| bytemuck::pod_read_unaligned::<half::f16>(b).to_f32()).fold(0.0, greater),
            _ => fours.map(bytemuck::pod_read_unaligned::<f32>).fold(0.0, greater),
        }
    }

    /// Rows of `width` elements each of a float tensor, in its type.
    pub fn stored_rows(&self, rows: &[usize], width: usize) -> StoredElements {
        fn read<T: bytemuck::AnyBitPattern>(data: &[u8], rows: &[usize], width: usize) -> Vec<T> {
            let size = size_of::<T>() * width;
            let row = |row: &usize| data[row * size..(row + 1) * size].chunks_exact(size_of::<T>());
            rows.iter().flat_map(row).map(bytemuck::pod_read_unaligned).collect()
        }
        match self.dtype {
            Dtype::BF16 => StoredElements::Bf16(read(self.data, rows, width)),
            Dtype::F16 => StoredElements::F16(read(self.data, rows, width)),
            _ => StoredElements::F32(read(self.data, rows, width)),
        }
    }

    /// Rows of `width` elements each of a float tensor, as f32, which holds every value of the shorter types.
    pub fn float_rows(&self, rows: &[usize], width: usize) -> Vec<f32> {
        let size = self.dtype.bitsize() / 8 * width;
        let mut out = Vec::with_capacity(rows.len() * width);
        for row in rows {
            let bytes = &self.data[row * size..(row + 1) * size];
            match self.dtype {
                Dtype::BF16 => {
                    out.extend(bytes.chunks_exact(2).map(|b| bytemuck::pod_read_unaligned::<half::bf16>(b).to_f32()))
                }
                Dtype::F16 => {
                    out.extend(bytes.chunks_exact(2).map(|b| bytemuck::pod_read_unaligned::<half::f16>(b).to_f32()))
                }
                _ => out.extend(bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>)),
            }
        }
        out
    }
}

/// Elements of a float tensor, in the type of their file.
pub enum StoredElements {
    F32(Vec<f32>),
    Bf16(Vec<half::bf16>),
    F16(Vec<half::f16>),
}

impl StoredElements {
    pub fn data(&self) -> ringspan::kernel::Data<'_> {
        match self {
            Self::F32(values) => ringspan::kernel::Data::F32(values),
            Self::Bf16(values) => ringspan::kernel::Data::Bf16(values),
            Self::F16(values) => ringspan::kernel::Data::F16(values),
        }
    }
}

/// A float tensor for an output file, rounded once to its type.
pub struct OutputTensor {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl OutputTensor {
    pub fn new(name: &'static str, dtype: Dtype, shape: Vec<usize>, values: Vec<f32>) -> Self {
        let bytes = match dtype {
            Dtype::BF16 => values.into_iter().flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F16 => values.into_iter().flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
            _ => values.into_iter().flat_map(f32::to_le_bytes).collect(),
        };
        Self { name, dtype, shape, bytes }
    }
}

/// Writes a safetensors file that replaces `path`.
///
/// ```
/// use ringspan_cli::files::{OutputTensor, TensorBytes, write_tensors};
/// use safetensors::Dtype;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("q.safetensors");
/// write_tensors(&path, &[OutputTensor::new("q", Dtype::F32, vec![1, 2], vec![0.5, 2.0])])?;
/// let file = TensorBytes::read(&path)?;
/// assert_eq!(file.parse()?.names(), ["q"]);
/// # Ok::<_, anyhow::Error>(())
/// ```
pub fn write_tensors(path: &Path, tensors: &[OutputTensor]) -> Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let views = tensors
        .iter()
        .map(|t| Ok((t.name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes)?)))
        .collect::<Result<Vec<_>>>()
        .with_context(cannot)?;
    let bytes = safetensors::serialize(views, None).with_context(cannot)?;
    write(path, &bytes)
}

/// Writes `bytes` under a temporary name and renames the file to `path`, so that no reader ever sees half of it.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    replace(path, bytes).with_context(|| format!("cannot write {} ({} bytes)", path.display(), bytes.len()))
}

fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    // A link stays, and its target is replaced; a device or a pipe is written to directly.
    let target = match path.canonicalize() {
        Ok(real) if real.is_file() => real,
        Ok(device) => return File::create(device)?.write_all(bytes),
        Err(_) => path.to_owned(),
    };
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let beside = target.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let unfinished = Unfinished::file(beside);
    let mut file = BufWriter::new(File::create(unfinished.path())?);
    file.write_all(bytes)?;
    let file = file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    file.sync_all()?;
    drop(file);
    unfinished.keep_as(&target)
}

/// Writes a folder under a temporary name, and renames it to `path` once `fill` has put its files there. A folder that exists
/// already (also behind a link, as a mount point or as `.`) stays, and receives the files.
pub fn write_folder(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let cannot = || format!("cannot write the folder {}", path.display());
    let temporary = |name: &str| format!(".{name}.{}.tmp", std::process::id());
    if path.is_dir() {
        let unfinished = Unfinished::folder(path.join(temporary("frames"))).with_context(cannot)?;
        fill(unfinished.path()).with_context(cannot)?;
        return unfinished.keep_in(path).with_context(cannot);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = Unfinished::folder(path.with_file_name(temporary(&name))).with_context(cannot)?;
    fill(unfinished.path()).with_context(cannot)?;
    unfinished.keep_as(path).with_context(cannot)
}

/// Refuses the path of a folder that cannot be made, or holds files already.
pub fn check_output_folder(flag: &str, path: &Path) -> Result<()> {
    if path.is_dir() {
        let mut files = std::fs::read_dir(path).with_context(|| format!("{flag} {}", path.display()))?;
        ensure!(files.next().is_none(), "{flag} {}: the folder is not empty", path.display());
        return Ok(());
    }
    ensure!(!path.exists(), "{flag} {}: this is a file; give the name of a folder", path.display());
    ensure!(!path.is_symlink(), "{flag} {}: this is a link to a folder that does not exist", path.display());
    check_output(flag, path)
}

/// Refuses a path that cannot be written, before the work rather than after it.
pub fn check_output(flag: &str, path: &Path) -> Result<()> {
    ensure!(!path.is_dir(), "{flag} {}: this is a folder; give the name of a file", path.display());
    ensure!(path.file_name().is_some(), "{flag} '{}' is not the name of a file", path.display());
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    ensure!(folder.is_dir(), "{flag} {}: there is no folder {}", path.display(), folder.display());
    Ok(())
}

/// The name of a type as safetensors writes it.
pub fn type_name(dtype: Dtype) -> String {
    format!("{dtype:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_beside_it() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("out");
        write(&path, b"good").expect("first");
        // A folder has the name of the temporary file, which therefore cannot be created.
        let beside = folder.path().join(format!(".out.{}.tmp", std::process::id()));
        std::fs::create_dir(&beside).expect("folder");
        let message = format!("{:#}", write(&path, b"new").expect_err("must fail"));
        assert!(message.contains("out (3 bytes)"), "{message}");
        assert_eq!(std::fs::read(&path).expect("old file"), b"good");
        std::fs::remove_dir(&beside).expect("still a folder");
        write(&path, b"new").expect("now it works");
        assert_eq!(std::fs::read(&path).expect("new file"), b"new");
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 1);
    }

    #[test]
    fn a_folder_is_there_with_all_its_files_or_not_at_all() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("out");
        let names = || std::fs::read_dir(folder.path()).expect("folder").count();
        let half = write_folder(&path, |inner| {
            std::fs::write(inner.join("a"), "1")?;
            bail!("the disk is full")
        });
        assert!(format!("{:#}", half.expect_err("must fail")).contains("the disk is full"));
        assert_eq!(names(), 0);
        check_output_folder("--out", &path).expect("a new folder");
        write_folder(&path, |inner| Ok(std::fs::write(inner.join("a"), "1")?)).expect("written");
        assert_eq!((names(), std::fs::read(path.join("a")).expect("a file")), (1, b"1".to_vec()));
        let message = check_output_folder("--out", &path).expect_err("must be refused").to_string();
        assert!(message.contains("not empty"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn an_empty_folder_stays_and_receives_the_files() {
        use std::os::unix::fs::{MetadataExt, symlink};
        let folder = tempfile::tempdir().expect("folder");
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        std::fs::create_dir(&real).expect("folder");
        symlink(&real, &link).expect("link");
        let inode = || std::fs::metadata(&real).expect("folder").ino();
        let before = inode();
        for path in [&link, &real.join(".")] {
            check_output_folder("--out", path).expect("an empty folder");
            write_folder(path, |inner| Ok(std::fs::write(inner.join("a"), "1")?)).expect("written");
            let files = std::fs::read_dir(&real).expect("folder").map(|file| file.expect("file").file_name());
            assert_eq!(files.collect::<Vec<_>>(), ["a"]);
            std::fs::remove_file(real.join("a")).expect("a file");
            write_folder(path, |inner| {
                std::fs::write(inner.join("a"), "1")?;
                bail!("the disk is full")
            })
            .expect_err("must fail");
            assert_eq!(std::fs::read_dir(&real).expect("folder").count(), 0);
        }
        assert!(link.is_symlink() && inode() == before);
        std::fs::remove_dir(&real).expect("empty");
        let message = check_output_folder("--out", &link).expect_err("must be refused").to_string();
        assert!(message.contains("does not exist"), "{message}");
    }

    #[test]
    fn a_folder_that_is_not_ours_stays() {
        let folder = tempfile::tempdir().expect("folder");
        let beside = folder.path().join(format!(".out.{}.tmp", std::process::id()));
        std::fs::create_dir(&beside).expect("folder");
        std::fs::write(beside.join("notes"), "mine").expect("file");
        write_folder(&folder.path().join("out"), |_| Ok(())).expect_err("the temporary name is taken");
        write(&folder.path().join("out"), b"new").expect_err("the temporary name is taken");
        assert_eq!(std::fs::read(beside.join("notes")).expect("still there"), b"mine");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().expect("folder");
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        std::fs::write(&real, b"old").expect("file");
        std::os::unix::fs::symlink(&real, &link).expect("link");
        write(&link, b"new").expect("write");
        assert!(link.is_symlink());
        assert_eq!(std::fs::read(&real).expect("file"), b"new");
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let one_and_a_half_steps = 1.0 + 1.5 / 128.0;
        let out = OutputTensor::new("x", Dtype::BF16, vec![1], vec![one_and_a_half_steps]);
        assert_eq!(out.bytes, half::bf16::from_f32(1.0 + 2.0 / 128.0).to_le_bytes());
    }
}
