//! The preview: a picture of an unfinished run.

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
    replaces: bool,
    unfinished: Mutex<Option<Unfinished>>,
}

impl Preview {
    /// Refuses a path that cannot be written, or that is one of the pictures that the run reads.
    pub(super) fn new<'a>(path: &Path, pictures: impl IntoIterator<Item = &'a PathBuf>) -> Result<Self> {
        let is_png = path.extension().is_some_and(|found| found.eq_ignore_ascii_case("png"));
        ensure!(is_png, "--preview {}: a preview is one picture, so the name must end in .png", path.display());
        files::check_output("--preview", path)?;
        let same = |picture: &&PathBuf| {
            path == picture.as_path() || path.canonicalize().ok() == picture.canonicalize().ok() && path.exists()
        };
        if let Some(picture) = pictures.into_iter().find(same) {
            bail!("--preview {}: the run reads this picture", picture.display());
        }
        Ok(Self { path: path.to_owned(), replaces: path.exists(), unfinished: Mutex::default() })
    }

    /// Writes the first frame of a video.
    pub(super) fn write(&self, video: &VideoTensor) -> Result<()> {
        let pictures = frames::to_rgb(video)?;
        let first = pictures.first().context("a preview without a frame")?;
        let picture = frames::encode_picture(&self.path, first)?;
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
