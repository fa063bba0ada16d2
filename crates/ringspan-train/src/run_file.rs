//! The file of a run's settings in its folder, from which `--resume` goes on.

use crate::{
    config::{DataSource, TextSource, TrainConfig},
    durable_file::write_file,
    error::{Error, Result},
    lr_schedule::LrSchedule,
    settings::{RUN_FILE, Settings},
};
use std::path::Path;

/// Writes the settings into the run's folder, with paths that mean the same from any current folder.
///
/// # Errors
/// A path that does not exist, and failures of the file system.
pub fn write(config: &TrainConfig, lr: &LrSchedule) -> Result<()> {
    std::fs::create_dir_all(&config.out).map_err(Error::io("create", &config.out))?;
    let mut settings = config.settings.clone();
    let absolute = |path: &Path| path.canonicalize().map_err(Error::io("read", path));
    settings.out = None;
    // These defaults follow from other settings, which a resumed run may change: it keeps the values it began with.
    (settings.steps, settings.epochs, settings.warmup) = (Some(lr.steps), None, Some(lr.warmup));
    if let DataSource::Text(_) = config.source {
        settings.batch_size = Some(config.batch_size);
    }
    let Settings { model, model_config, tokenizer, chat_template, eval_data, token_cache, tensorboard, .. } =
        &mut settings;
    for path in [model, chat_template, eval_data].into_iter().flatten() {
        *path = absolute(path)?;
    }
    // Symbolic links stay: other files are looked up next to the link, not next to its target. Some of these folders may not
    // exist yet.
    for path in [model_config, tokenizer, token_cache, tensorboard].into_iter().flatten() {
        *path = std::path::absolute(&*path).map_err(Error::io("read", &*path))?;
    }
    match &config.source {
        DataSource::Text(sources) => {
            let with_weight = |source: &TextSource| Ok(source.with_path(absolute(&source.path)?));
            settings.data = Some(sources.iter().map(with_weight).collect::<Result<_>>()?);
        }
        DataSource::Tokens(path) => settings.tokens = Some(absolute(path)?),
    }
    write_file(&config.out.join(RUN_FILE), settings.to_toml()?.as_bytes())
}
