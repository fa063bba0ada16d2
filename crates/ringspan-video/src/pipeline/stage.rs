//! The stages of a run.

use std::fmt;

/// A stage of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VideoStage {
    /// The prompts' embeddings.
    Text,
    /// The embeddings of images.
    Image,
    /// The latents of images.
    Encode,
    /// The steps of the transformers.
    Denoise,
    /// Frames from latents.
    Decode,
}

impl fmt::Display for VideoStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Image => "image",
            Self::Encode => "encode",
            Self::Denoise => "denoise",
            Self::Decode => "decode",
        })
    }
}
