//! The layers of the encoder, one after the other.
//!
//! Shape letters: T tokens of this rank, C width.

use super::config::ImageEncoderConfig;
use super::preprocessing::ImagePreprocessing;
use crate::encoder_rank::{self, EncoderRank};
use crate::error::{Error, Result};
use crate::frames::RgbFrame;
use crate::ranks::VideoRanks;
use crate::tensor_folder::{TensorFolder, read_json};
use candle_core::{Device, Tensor};
use ringspan::{Documents, Score};
use ringspan_candle::modulation::{TableRows, layer_norm};
use std::collections::BTreeMap;
use std::path::Path;

/// An image encoder whose weights are on disk.
#[derive(Debug)]
pub struct ImageEncoder {
    config: ImageEncoderConfig,
    preprocessing: ImagePreprocessing,
    tensors: TensorFolder,
    /// What precedes the names of tensors; older files have `vision_model.`.
    prefix: &'static str,
}

const OLD_PREFIX: &str = "vision_model.";

impl ImageEncoder {
    /// Opens the folders `image_encoder` and `image_processor` of a pipeline.
    ///
    /// # Errors
    /// Files that are missing or corrupt, and configurations that are not supported or do not fit each other.
    pub fn open(pipeline: &Path) -> Result<Self> {
        let folder = pipeline.join("image_encoder");
        let path = folder.join("config.json");
        let config: ImageEncoderConfig = read_json(&path)?;
        let format = |path, error: Error| Error::Format { path, problem: error.to_string() };
        config.check().map_err(|error| format(path, error))?;
        let path = pipeline.join("image_processor/preprocessor_config.json");
        let preprocessing: ImagePreprocessing = read_json(&path)?;
        preprocessing.check(config.image_size).map_err(|error| format(path, error))?;
        let tensors = TensorFolder::open(&folder, "model")?;
        let is_old = tensors.shapes().any(|(name, _)| name.starts_with(OLD_PREFIX));
        let encoder = Self { config, preprocessing, tensors, prefix: if is_old { OLD_PREFIX } else { "" } };
        // Positions are numbers from 0, and the projection belongs to the model that compares images with texts.
        let ignored = |name: &str| name.ends_with("embeddings.position_ids") || name == "visual_projection.weight";
        encoder.tensors.check(&encoder.parameters(), ignored)?;
        Ok(encoder)
    }

    /// The names and shapes of all parameters.
    fn parameters(&self) -> BTreeMap<String, Vec<usize>> {
        let ImageEncoderConfig { hidden_size: width, intermediate_size: inner, patch_size, .. } = self.config;
        let norm = |name: String| [(format!("{name}.weight"), vec![width]), (format!("{name}.bias"), vec![width])];
        let linear = |name: String, [outputs, inputs]: [usize; 2]| {
            [(format!("{name}.weight"), vec![outputs, inputs]), (format!("{name}.bias"), vec![outputs])]
        };
        let of_layer = |layer: usize| {
            let at = |part: &str| format!("encoder.layers.{layer}.{part}");
            let norms = ["layer_norm1", "layer_norm2"].into_iter().flat_map(|name| norm(at(name))).collect::<Vec<_>>();
            let attention = ["q", "k", "v", "out"].map(|name| at(&format!("self_attn.{name}_proj")));
            let attention = attention.into_iter().flat_map(|name| linear(name, [width, width]));
            let mlp = [linear(at("mlp.fc1"), [inner, width]), linear(at("mlp.fc2"), [width, inner])];
            norms.into_iter().chain(attention).chain(mlp.into_iter().flatten()).collect::<Vec<_>>()
        };
        let ends = [
            ("embeddings.class_embedding".to_owned(), vec![width]),
            ("embeddings.patch_embedding.weight".to_owned(), vec![width, 3, patch_size, patch_size]),
            ("embeddings.position_embedding.weight".to_owned(), vec![self.config.embeddings(), width]),
        ];
        let norms = ["pre_layrnorm", "post_layernorm"].into_iter().flat_map(|name| norm(name.to_owned()));
        let all = ends.into_iter().chain(norms).chain((0..self.config.num_hidden_layers).flat_map(of_layer));
        all.map(|(name, shape)| (format!("{}{name}", self.prefix), shape)).collect()
    }

    /// The sizes of the model.
    #[must_use]
    pub fn config(&self) -> &ImageEncoderConfig {
        &self.config
    }

    /// Bytes that a rank takes for so many images over so many ranks: the largest matrix, which it reads when it is reached, and
    /// activations of its tokens.
    #[must_use]
    pub fn bytes(&self, images: usize, ranks: usize) -> u64 {
        let ImageEncoderConfig { hidden_size: width, intermediate_size: inner, .. } = self.config;
        // The tensors were looked for when the folder was opened.
        let of = |name: &String| self.tensors.bytes_of(name).unwrap_or(0);
        let matrix = self.parameters().keys().map(of).max().unwrap_or(0);
        // The residual stream and its norm; queries, keys and values as tensors and as the kernel takes them, a block of other ranks, and
        // the output; or the inner width before the activation, and three times in it.
        let of_token = 2 * width + (9 * width).max(4 * inner);
        let pixels = images * 3 * self.config.image_size * self.config.image_size;
        let tokens = (images * self.config.embeddings()).div_ceil(ranks.max(1));
        matrix + 4 * (pixels + tokens * of_token) as u64
    }

    /// Checks that an image can be prepared for the encoder, without computing anything.
    ///
    /// # Errors
    /// An image that would become too large.
    pub fn check(&self, image: &RgbFrame) -> Result<()> {
        self.preprocessing.resized_sides(image).map(drop)
    }

    /// The hidden states `[images, embeddings, C]` before the last layer, on all ranks. Returns `None` in a process without rank 0.
    ///
    /// # Errors
    /// Images that cannot be resized, tensors that are missing or do not fit, failures of any rank.
    pub fn encode(&self, images: &[RgbFrame], ranks: &mut VideoRanks) -> Result<Option<Vec<f32>>> {
        let pixels = images.iter().map(|image| self.preprocessing.pixels(image)).collect::<Result<Vec<_>>>()?;
        let documents = Documents::batch(images.len(), self.config.embeddings());
        encoder_rank::encode(ranks, &documents, self.config.hidden_size, |rank| self.hidden(&pixels, rank))
    }

    /// The hidden states of this rank's tokens before the last layer.
    fn hidden(&self, images: &[Vec<f32>], rank: &EncoderRank) -> Result<Vec<f32>> {
        let mut x = self.norm("pre_layrnorm", &self.embedded(images, &rank.rows)?)?;
        for layer in 0..self.config.num_hidden_layers - 1 {
            x = (&x + self.attend(layer, &x, rank)?)?;
            x = (&x + self.feed_forward(layer, &x)?)?;
        }
        Ok(x.flatten_all()?.to_vec1()?)
    }

    /// The embeddings `[T, C]` of tokens, which are rows of all images' tokens: that of the whole image, then those of its patches.
    fn embedded(&self, images: &[Vec<f32>], rows: &[usize]) -> Result<Tensor> {
        let ImageEncoderConfig { hidden_size: width, image_size, patch_size, .. } = self.config;
        let of_image = self.config.embeddings();
        let mut patches = Vec::with_capacity(rows.len() * 3 * patch_size * patch_size);
        for row in rows {
            match (row % of_image).checked_sub(1) {
                // The token of the whole image has no pixels.
                None => patches.extend(std::iter::repeat_n(0.0, 3 * patch_size * patch_size)),
                Some(patch) => {
                    let [top, left] =
                        [patch / self.config.side(), patch % self.config.side()].map(|at| at * patch_size);
                    for line in (0..3).flat_map(|color| (0..patch_size).map(move |y| color * image_size + top + y)) {
                        patches.extend_from_slice(&images[row / of_image][line * image_size + left..][..patch_size]);
                    }
                }
            }
        }
        let of_patch = 3 * patch_size * patch_size;
        let patches = Tensor::from_vec(patches, (rows.len(), of_patch), &Device::Cpu)?;
        let weight = self.read("embeddings.patch_embedding.weight")?.reshape((width, of_patch))?;
        let embedded = patches.matmul(&weight.t()?)?;
        let class: Vec<f32> = rows.iter().map(|row| if row % of_image == 0 { 1.0 } else { 0.0 }).collect();
        let class = Tensor::from_vec(class, (rows.len(), 1), &Device::Cpu)?;
        let embedded = (embedded + class.matmul(&self.read("embeddings.class_embedding")?.reshape((1, width))?)?)?;
        let positions: Vec<u32> = rows.iter().map(|row| (row % of_image) as u32).collect();
        let name = format!("{}embeddings.position_embedding.weight", self.prefix);
        Ok((embedded + self.tensors.read_rows(&name, &positions)?)?)
    }

    fn attend(&self, layer: usize, x: &Tensor, rank: &EncoderRank) -> Result<Tensor> {
        let at = |part: &str| format!("encoder.layers.{layer}.{part}");
        let n = self.norm(&at("layer_norm1"), x)?;
        let project = |name: &str, x: &Tensor| self.linear(&at(&format!("self_attn.{name}_proj")), x);
        let (q, k, v) = (project("q", &n)?, project("k", &n)?, project("v", &n)?);
        let heads = self.config.num_attention_heads;
        let score = Score::new(1.0 / ((self.config.hidden_size / heads) as f32).sqrt());
        project("out", &rank.attend([&q, &k, &v], heads, &score)?)
    }

    fn feed_forward(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let at = |part: &str| format!("encoder.layers.{layer}.{part}");
        let inner = self.linear(&at("mlp.fc1"), &self.norm(&at("layer_norm2"), x)?)?;
        let active = match self.config.hidden_act.as_str() {
            // x / (1 + e^(-1.702 x)), an approximation of GELU.
            "quick_gelu" => (&inner / ((&inner * -1.702)?.exp()? + 1.0)?)?,
            _ => inner.gelu_erf()?,
        };
        self.linear(&at("mlp.fc2"), &active)
    }

    fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let weight = self.tensors.read_stored(&format!("{}{name}.weight", self.prefix))?;
        Ok(weight.linear(x, Some(&self.read(&format!("{name}.bias"))?))?)
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let row = |part: &str| -> Result<Tensor> { Ok(self.read(&format!("{name}.{part}"))?.unsqueeze(0)?) };
        Ok(layer_norm(x, &row("weight")?, &row("bias")?, &TableRows::one(), self.config.layer_norm_eps)?)
    }

    fn read(&self, name: &str) -> Result<Tensor> {
        self.tensors.read(&format!("{}{name}", self.prefix))
    }
}
