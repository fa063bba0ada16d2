//! The vision transformer of CLIP, whose embeddings of images WAN 2.1's transformers for images take beside a prompt.
//!
//! Its weights are read layer by layer, like those of the [text encoder](crate::text_encoder), and ranks share the patches of all
//! images.
//!
//! Source: Radford et al., 2021 (arXiv:2103.00020), Dosovitskiy et al., 2020 (arXiv:2010.11929).

mod config;
mod encoder;
mod preprocessing;

pub use config::ImageEncoderConfig;
pub use encoder::ImageEncoder;
pub use preprocessing::ImagePreprocessing;
