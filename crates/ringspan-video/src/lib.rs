#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod bytes_text;
pub mod denoise;
mod encoder_rank;
pub mod error;
pub mod frames;
mod gguf_folder;
pub mod image_encoder;
pub mod lora;
pub mod noise;
mod original_names;
pub mod pipeline;
pub mod ranks;
pub mod scheduler;
pub mod tensor_folder;
pub mod text_encoder;
pub mod training;
pub mod transformer;
pub mod vae;

pub use error::{Error, Result};
