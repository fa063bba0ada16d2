#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub mod denoise;
pub mod error;
pub mod noise;
pub mod scheduler;
pub mod tensor_folder;
pub mod transformer;

pub use error::{Error, Result};
