//! The folder in which tokens are cached.

use super::CachePolicy;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The folder of the token cache, or a temporary one that is removed when this is dropped.
pub(super) struct CacheFolder {
    pub(super) path: PathBuf,
    /// Why the token cache cannot be used, in words; set where `path` is a temporary folder.
    pub(super) warning: Option<String>,
    /// Folders that were created on the way to the token cache, the innermost first.
    created: Vec<PathBuf>,
}

impl Drop for CacheFolder {
    fn drop(&mut self) {
        if self.warning.is_some() {
            // A failure is ignored: the files are in the system's temporary folder.
            let _ = std::fs::remove_dir_all(&self.path);
        }
        // Only empty folders can be removed so: a refused run leaves none behind, and a folder with cached tokens stays.
        self.created.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    }
}

impl CacheFolder {
    pub(super) fn new(path: &Path, cache_policy: CachePolicy) -> Result<Self> {
        let created: Vec<PathBuf> = path.ancestors().take_while(|at| !at.exists()).map(Path::to_path_buf).collect();
        let probe = path.join(format!(".{}.probe", std::process::id()));
        let written = std::fs::create_dir_all(path).map_err(Error::io("create", path));
        let written = written.and_then(|()| std::fs::write(&probe, "").map_err(Error::io("write", &probe)));
        let _ = std::fs::remove_file(&probe);
        match (written, cache_policy) {
            (Ok(()), _) => Ok(Self { path: path.into(), warning: None, created }),
            (Err(error), CachePolicy::Required) => Err(error),
            (Err(error), CachePolicy::TemporaryAllowed) => {
                let path = std::env::temp_dir().join(format!("ringspan-tokens-{}", std::process::id()));
                Ok(Self { path, warning: Some(format!("the tokens are not kept: {error}")), created })
            }
        }
    }
}
