//! The folder of `--session-dir`, to which `ringspan serve` saves its cache, and from which it restores it.

use crate::model::ModelArgs;
use crate::output;
use anyhow::{Context, Result};
use ringspan_serve::engine::{Client, SessionSize};
use ringspan_serve::paged::KvDtype;
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// The file of a session, and the model that it is of.
pub(crate) struct Session {
    file: PathBuf,
    model: String,
}

impl Session {
    /// The session in `folder`, which is made if there is none. Sequences may have up to `max_model_len` tokens, whose keys and values
    /// are in `kv_dtype`, or in the model's type.
    pub(crate) fn new(
        folder: &Path,
        model: &ModelArgs,
        max_model_len: usize,
        kv_dtype: Option<KvDtype>,
    ) -> Result<Self> {
        let flag = || format!("--session-dir {}", folder.display());
        std::fs::create_dir_all(folder).with_context(flag)?;
        let mut model = model.fingerprint(max_model_len)?;
        if let Some(dtype) = kv_dtype {
            model += &format!(", cached in {dtype:?}");
        }
        Ok(Self { file: folder.join("session.safetensors"), model })
    }

    /// Restores the session, if there is one; says what it did.
    pub(crate) fn restore(&self, client: &Client) {
        if self.file.exists() {
            self.report("restored", "the server begins without it", client.restore_session(&self.file, &self.model));
        }
    }

    /// Saves the session; says what it did.
    pub(crate) fn save(&self, client: &Client) {
        self.report("saved", "what was cached is lost", client.save_session(&self.file, &self.model));
    }

    fn report(&self, done: &str, otherwise: &str, result: Result<SessionSize, impl Display>) {
        let file = self.file.display();
        match result {
            Ok(SessionSize { tokens, bytes }) => {
                output::note(format!("{done} a session of {tokens} tokens ({:.1} MB): {file}", bytes as f64 / 1e6));
            }
            Err(problem) => output::note(format!("the session in {file} is not {done}, {otherwise}: {problem}")),
        }
    }
}
