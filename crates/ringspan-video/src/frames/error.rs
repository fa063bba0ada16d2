//! Errors of pictures.

use std::path::PathBuf;

/// The result of reading or writing pictures.
pub type Result<T> = std::result::Result<T, Error>;

/// The ways in which pictures cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file is no PNG, or one that cannot be read.
    #[error("{path}: not a PNG that can be read: {problem}")]
    Png {
        /// The file.
        path: PathBuf,
        /// The decoder's error.
        problem: String,
    },
    /// A PNG cannot be made.
    #[error("{path}: cannot be written as PNG: {problem}")]
    Encode {
        /// The file.
        path: PathBuf,
        /// The encoder's error.
        problem: String,
    },
    /// A folder without pictures.
    #[error("{path}: there is no file that ends in .png")]
    Empty {
        /// The folder.
        path: PathBuf,
    },
    /// Pictures of a video that differ in size.
    #[error("{path}: {width} x {height} pixels, but the pictures before it have {expected_width} x {expected_height}")]
    Sizes {
        /// The first picture with another size.
        path: PathBuf,
        /// Its width.
        width: usize,
        /// Its height.
        height: usize,
        /// The width of the pictures before.
        expected_width: usize,
        /// The height of the pictures before.
        expected_height: usize,
    },
    /// A picture cannot be resized.
    #[error("a picture of {width} x {height} pixels cannot be resized to {wanted_width} x {wanted_height}: {problem}")]
    Resize {
        /// The picture's width.
        width: usize,
        /// The picture's height.
        height: usize,
        /// The width that was asked for.
        wanted_width: usize,
        /// The height that was asked for.
        wanted_height: usize,
        /// The error of the library that resizes.
        problem: String,
    },
    /// A GIF cannot be made.
    #[error("{frames} frames of {width} x {height} as GIF: {problem}")]
    Gif {
        /// Number of frames.
        frames: usize,
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// Says what is wrong.
        problem: String,
    },
    /// A tensor that is not one video.
    #[error(
        "frames have shape {shape:?} [B,C,F,H,W]: pictures show one video (B = 1) of 3 colors; a .safetensors file holds any number"
    )]
    Shape {
        /// The tensor's shape.
        shape: [usize; 5],
    },
}
