//! The preview: a picture, or a moving picture, of an unfinished run.

use crate::files;
use crate::interrupt::Unfinished;
use anyhow::{Context, Result, bail, ensure};
use ringspan_video::frames;
use ringspan_video::vae::VideoTensor;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The file of a preview. It is deleted if the run fails or is interrupted after it was written, unless it took the place of another
/// file.
pub(super) struct Preview {
    path: PathBuf,
    /// Whether it is a GIF of the whole video, not a picture of the first frame.
    moving: bool,
    replaces: bool,
    unfinished: Mutex<Option<Unfinished>>,
}

impl Preview {
    /// Refuses a path that cannot be written, that is one of the pictures that the run reads, or where the video goes.
    pub(super) fn new<'a>(
        path: &Path,
        moving: bool,
        pictures: impl IntoIterator<Item = &'a PathBuf>,
        out: &Path,
    ) -> Result<Self> {
        let (extension, shown) = match moving {
            true => ("gif", "with --tiny-decoder a preview is the whole video"),
            false => ("png", "a preview is one picture"),
        };
        let fits = path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension));
        ensure!(fits, "--preview {}: {shown}, so the name must end in .{extension}", path.display());
        files::check_output("--preview", path)?;
        if same(path, out) {
            bail!("--preview {}: the video of --out is this file", path.display());
        }
        if let Some(picture) = pictures.into_iter().find(|picture| same(path, picture)) {
            bail!("--preview {}: the run reads this picture", picture.display());
        }
        Ok(Self { path: path.to_owned(), moving, replaces: path.exists(), unfinished: Mutex::default() })
    }

    /// Writes a video, or its first frame.
    pub(super) fn write(&self, video: &VideoTensor) -> Result<()> {
        let mut pictures = frames::to_rgb(video)?;
        let picture = match self.moving {
            true => frames::gif(pictures)?,
            false => frames::encode_picture(&self.path, &pictures.next().context("a preview without a frame")?)?,
        };
        if !self.replaces {
            *self.lock() = Some(Unfinished::file(self.path.clone()));
        }
        files::write(&self.path, &picture)
    }

    /// The run has succeeded, so the picture stays.
    pub(super) fn keep(&self) {
        if let Some(unfinished) = self.lock().take() {
            unfinished.keep();
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn lock(&self) -> MutexGuard<'_, Option<Unfinished>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether two paths are of one file, which need not exist.
fn same(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| match path.canonicalize() {
        Ok(path) => Some(path),
        Err(_) => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Some(folder.canonicalize().ok()?.join(path.file_name()?))
        }
    };
    a == b || place(a).is_some_and(|a| Some(a) == place(b))
}
