//! The sources of training data, as the settings name them.

use crate::{
    error::{Error, Result},
    settings::Settings,
};
use std::path::{Path, PathBuf};

/// The source of training tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum DataSource {
    /// Text of one or several sources, packed into sequences.
    Text(Vec<TextSource>),
    /// A file of tokens, of which each step takes all rows.
    Tokens(PathBuf),
}

/// A folder or file of text.
#[derive(Debug, Clone, PartialEq)]
pub struct TextSource {
    /// Path of the folder or file.
    pub path: PathBuf,
    /// Weight of the source among others; none where each counts by its number of tokens.
    pub weight: Option<f64>,
}

impl DataSource {
    pub(super) fn new(s: &Settings) -> Result<Self> {
        let paths = match (&s.data, &s.tokens) {
            (Some(_), Some(_)) => {
                return Err(Error::Settings("--data and --tokens exclude each other: text or ready tokens".into()));
            }
            (None, Some(tokens)) => return Ok(Self::Tokens(tokens.clone())),
            (None, None) => vec![PathBuf::from(".")],
            (Some(paths), None) => paths.clone(),
        };
        let sources = paths.iter().map(|path| TextSource::new(path)).collect::<Result<Vec<_>>>()?;
        let weighted: Vec<&TextSource> = sources.iter().filter(|source| source.weight.is_some()).collect();
        match (&sources[..], &weighted[..]) {
            ([], _) => Err(Error::Settings("--data names nothing: give a folder or file of text".into())),
            ([one], [_]) => Err(Error::Settings(format!(
                "--data {}: a weight has no effect on a lone source; leave it out",
                one.to_setting().display()
            ))),
            (all, some) if !some.is_empty() && some.len() < all.len() => {
                let without = all.iter().find(|source| source.weight.is_none()).map(|source| source.path.display());
                Err(Error::Settings(format!(
                    "--data {} has a weight and --data {} has none: give one to each (PATH=0.3), or to none, and then each \
                     counts by its size",
                    some[0].to_setting().display(),
                    without.map(|path| path.to_string()).unwrap_or_default()
                )))
            }
            _ => Ok(Self::Text(sources)),
        }
    }
}

impl TextSource {
    /// Parses `PATH`, or `PATH=WEIGHT` unless there is a file of that name.
    fn new(path_or_weighted: &Path) -> Result<Self> {
        let without_weight = Self { path: path_or_weighted.into(), weight: None };
        let Some((path, weight)) = path_or_weighted.to_str().and_then(|text| text.rsplit_once('=')) else {
            return Ok(without_weight);
        };
        let Ok(weight) = weight.parse::<f64>() else { return Ok(without_weight) };
        if path_or_weighted.exists() {
            return Ok(without_weight);
        }
        if !(weight > 0.0 && weight.is_finite()) {
            return Err(Error::Settings(format!(
                "--data {}: the weight is {weight}, but must be above 0 and finite",
                path_or_weighted.display()
            )));
        }
        Ok(Self { path: path.into(), weight: Some(weight) })
    }

    /// The source as the settings spell it.
    pub(crate) fn to_setting(&self) -> PathBuf {
        let Some(weight) = self.weight else { return self.path.clone() };
        let mut spelled = self.path.clone().into_os_string();
        spelled.push(format!("={weight}"));
        spelled.into()
    }

    /// The source with another path, as the settings spell it.
    pub(crate) fn with_path(&self, path: PathBuf) -> PathBuf {
        Self { path, weight: self.weight }.to_setting()
    }
}
