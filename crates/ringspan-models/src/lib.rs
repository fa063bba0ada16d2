//! The Llama family on candle tensors.
//!
//! A [`Decoder`] never mentions a rank: it computes on the tokens at hand, and asks an
//! [`Attend`](ringspan_candle::Attend) for attention and for their positions.
#![deny(missing_docs)]

mod config;
mod decoder;
mod error;
pub mod folder;
pub mod gradients;
mod init;
mod recompute;
mod rope;

pub use config::Config;
pub use decoder::{Decoder, Weights};
pub use error::{Error, Result};
pub use recompute::Recompute;
