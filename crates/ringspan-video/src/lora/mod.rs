//! Low-rank adapters (LoRA; Hu et al., 2021, arXiv:2106.09685) of a transformer, from the files of diffusers, of PEFT, and of the
//! trainers that keep the names of the original model.

mod change;
mod file;
mod save;
mod tensor_name;

pub(crate) use change::TransformerChange;
pub(crate) use file::DIFFUSERS;
pub use save::save;

use crate::error::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A file or folder of adapters, and the factor by which their changes are multiplied.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSource {
    /// A safetensors file, or a folder that has one.
    pub path: PathBuf,
    /// The factor of everything that the adapters add.
    pub scale: f64,
}

impl FromStr for LoraSource {
    type Err = Error;

    /// Parses `PATH` or `PATH=SCALE`; a path that exists is taken as a whole.
    fn from_str(given: &str) -> Result<Self> {
        let (path, scale) = match given.rsplit_once('=') {
            Some((path, scale)) if !Path::new(given).exists() => (path, scale),
            _ => (given, "1"),
        };
        match scale.parse() {
            Ok(scale) if f64::is_finite(scale) && scale != 0.0 => Ok(Self { path: path.into(), scale }),
            _ => Err(Error::Input(format!("'{scale}' in '{given}': the scale of an adapter is a number other than 0"))),
        }
    }
}

impl fmt::Display for LoraSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.path.display(), self.scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_path_with_or_without_a_scale() {
        let of = |text: &str| text.parse::<LoraSource>().map(|source| (source.path, source.scale));
        assert_eq!(of("a/b").expect("a path"), ("a/b".into(), 1.0));
        assert_eq!(of("a=b=-0.5").expect("a path"), ("a=b".into(), -0.5));
        for refused in ["a=x", "a=0", "a=inf", "a="] {
            let error = of(refused).expect_err(refused).to_string();
            assert!(error.contains("other than 0"), "{error}");
        }
    }
}
