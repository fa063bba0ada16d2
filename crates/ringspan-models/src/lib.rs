//! Decoders on candle tensors: Llama, Qwen, Mistral, Gemma.
//!
//! A model knows no ranks: it computes on the tokens and with the weights at hand, and asks an
//! [`Attend`](ringspan_candle::Attend) for attention and for their positions, its
//! [`Experts`](ringspan_candle::Experts) for mixtures of experts, and its
//! [`TensorParallel`](ringspan_candle::TensorParallel) for what others have of a layer. Which part of its parameters is at
//! hand where layers are shared, [`Portion`] says, beside the model and not in it.
#![deny(missing_docs)]

pub mod adapter;
mod architecture;
mod balance;
mod block;
mod config;
mod decoder;
mod error;
mod extension;
pub mod folder;
pub mod gguf;
pub mod gradients;
mod init;
mod lora;
mod origin;
mod parameters;
mod portion;
mod recompute;
mod rope;
mod shapes;
mod tensor_file;
pub mod texts;

pub use balance::Balanced;
pub use config::Config;
pub use decoder::{Decoder, Weights};
pub use error::{Error, Result};
pub use extension::{Beyond, RopeScaling};
pub use init::NewWeights;
pub use lora::names::{Layers, Names, Pattern};
pub use lora::{Lora, ROUTER, Size, TARGETS};
pub use origin::{Base, Origin};
pub use parameters::{Parameters, Unit};
pub use portion::{Heads, Holders, Place, Portion};
pub use recompute::{Keep, Recompute, constant, on_device};
pub use tensor_file::TensorFile;
