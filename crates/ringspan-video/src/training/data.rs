//! The samples of a training: files with latents and prompts, and noise and time steps that they have or that are drawn.

use super::settings::files;
use crate::error::{Error, Result};
use crate::noise::{noise, uniform};
use crate::tensor_folder::TensorFolder;
use crate::transformer::{FlowSample, TIMESTEPS, WanTransformer};
use candle_core::Tensor;
use ringspan_train::checkpoint::Identity;
use ringspan_train::fingerprint;
use std::fmt;
use std::path::{Path, PathBuf};

/// Files of samples, which stay on disk. Each has `latents` `[B, C, F, H, W]` and `prompt_embeds` `[B, N, text_dim]`, and
/// optionally `noise` `[B, C, F, H, W]` and `timesteps` `[B]`.
#[derive(Debug)]
pub struct FlowData {
    path: PathBuf,
    files: Vec<TensorFolder>,
}

const NEEDED: [&str; 2] = ["latents", "prompt_embeds"];
const OPTIONAL: [&str; 2] = ["noise", "timesteps"];

impl FlowData {
    /// Opens a safetensors file, or all of a folder.
    ///
    /// # Errors
    /// No such file, a file without latents or prompts, or with a tensor that has no effect.
    pub fn open(path: &Path) -> Result<Self> {
        let open = |file: PathBuf| {
            let (tensors, _) = TensorFolder::open_file(&file)?;
            let refuse = |problem: String| Err(Error::Format { path: file.clone(), problem });
            if let Some(name) = NEEDED.into_iter().find(|name| tensors.shape(name).is_err()) {
                return refuse(format!("tensor `{name}` is missing"));
            }
            let known = |name: &str| NEEDED.contains(&name) || OPTIONAL.contains(&name);
            if let Some((name, _)) = tensors.shapes().find(|(name, _)| !known(name)) {
                let possible = [NEEDED, OPTIONAL].concat().join(", ");
                return refuse(format!("tensor `{name}` has no effect; possible are {possible}"));
            }
            Ok(tensors)
        };
        Ok(Self { path: path.to_owned(), files: files(path)?.into_iter().map(open).collect::<Result<_>>()? })
    }

    /// Checks that a transformer can be trained with the samples.
    ///
    /// # Errors
    /// The first file that does not fit.
    pub fn check(&self, transformer: &WanTransformer) -> Result<()> {
        (0..self.files.len() as u64).try_for_each(|index| {
            let sample = self.sample(0, index)?;
            let checked =
                transformer.check_sample(&sample).and_then(|()| transformer.grid_of(sample.shape()).map(drop));
            checked.map_err(|error| self.in_file(index, &error.to_string()))
        })
    }

    /// The shapes of `latents` and `prompt_embeds` of each file.
    ///
    /// # Errors
    /// None that [`open`](Self::open) has not found.
    pub(super) fn shapes(&self) -> Result<Vec<[Vec<usize>; 2]>> {
        let of_file =
            |file: &TensorFolder| Ok([file.shape("latents")?.to_vec(), file.shape("prompt_embeds")?.to_vec()]);
        self.files.iter().map(of_file).collect()
    }

    /// Sample number `index` of a run, from the files in turn. What its file lacks, noise and time steps, follows from the seed
    /// and the index alone, so every rank and every mesh draws the same.
    ///
    /// # Errors
    /// Failures of the file system, tensors that do not fit each other, numbers that are not finite.
    pub fn sample(&self, seed: u64, index: u64) -> Result<FlowSample> {
        let tensors = &self.files[(index % self.files.len() as u64) as usize];
        let read = |name: &str| -> Result<Tensor> {
            let tensor = tensors.read(name)?;
            match tensor.flatten_all()?.to_vec1::<f32>()?.iter().all(|x| x.is_finite()) {
                true => Ok(tensor),
                false => Err(self.in_file(index, &format!("`{name}` has a number that is not finite"))),
            }
        };
        let [latents, prompt_embeds] = [read("latents")?, read("prompt_embeds")?];
        // Seed and index share a word, and do not meet before one of them fills half of it.
        let seed = seed.rotate_left(32) ^ (2 * index);
        let noise = if tensors.shape("noise").is_ok() { read("noise")? } else { noise(seed, latents.dims())? };
        let timesteps = match tensors.shape("timesteps") {
            Ok(_) => read("timesteps")?.flatten_all()?.to_vec1()?,
            Err(_) => {
                let batch = latents.dims().first().copied().unwrap_or(0);
                uniform(seed ^ 1, batch).into_iter().map(|share| (share * TIMESTEPS) as f32).collect()
            }
        };
        FlowSample::new(&latents, &noise, &timesteps, &prompt_embeds)
            .map_err(|error| self.in_file(index, &error.to_string()))
    }

    fn in_file(&self, index: u64, problem: &str) -> Error {
        let file = &self.files[(index % self.files.len() as u64) as usize];
        Error::Format { path: file.path().to_owned(), problem: problem.to_owned() }
    }

    /// The identity of the data: names, shapes and contents of all files, in their order.
    ///
    /// # Errors
    /// Failures of the file system.
    pub(super) fn identity(&self) -> Result<Identity> {
        let mut words = Vec::new();
        for file in &self.files {
            for (name, shape) in file.shapes() {
                let values = file.read(name)?.flatten_all()?.to_vec1::<f32>()?;
                let of_values = fingerprint(values.into_iter().map(|value| value.to_bits().into()));
                words.extend(
                    name.bytes().map(u64::from).chain(shape.iter().map(|size| *size as u64)).chain([of_values]),
                );
            }
        }
        Ok(Identity { summary: self.to_string(), fingerprint: fingerprint(words) })
    }
}

impl fmt::Display for FlowData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} files", self.path.display(), self.files.len())
    }
}
