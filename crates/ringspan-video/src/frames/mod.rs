//! Frames as pictures: folders of PNG files, animated GIFs, and the pixels of both.
//!
//! A color is a number in [-1, 1] in tensors, and one of 256 levels in files: `round((x + 1) / 2 * 255)`, as in diffusers.

mod error;
mod gif;
mod png;
mod resize;
mod rgb;

pub use error::{Error, Result};
pub use gif::encode as gif;
pub use png::{encode_picture, read_picture, read_pictures, write_folder};
pub use resize::{ResizeFilter, resized};
pub(crate) use rgb::from_rgb;
pub use rgb::{RgbFrame, to_rgb};
