#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub mod error;
pub mod frames;
pub mod tensor_folder;
pub mod text_encoder;
pub mod vae;
