#![doc = include_str!("../README.md")]
//!
//! Each family is one file, which reads from top to bottom: its configuration, its layers by their names in checkpoints, and
//! its forward pass. How layers are sharded, adapted and recomputed is the business of [`ringspan_candle::layers`].
#![deny(missing_docs)]

mod adapted_decoder;
pub mod adapter;
mod base;
pub mod chat_template;
mod config;
mod decoder;
mod deepseek;
mod error;
mod extension;
mod family;
pub mod folder;
mod gemma2;
mod gemma3;
pub mod gguf;
mod glm4;
mod gpt_oss;
mod granite;
mod init;
mod llama;
mod lora;
mod mistral;
mod mixtral;
mod model_source;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod registry;
mod rope;
mod rope_parameters;
mod smollm3;
pub mod special_tokens;
mod stored_model;
mod tensor_file;
mod token_loss;
pub mod tokenizer_config;

pub use base::Base;
pub use config::Config;
pub use decoder::Decoder;
pub use error::{Error, Result};
pub use extension::{ContextOverflow, RopeScaling};
pub use init::NewWeights;
pub use lora::names::{AdaptedLayers, LayerNames, Pattern};
pub use lora::{Lora, ROUTER, TARGETS};
pub use model_source::ModelSource;
pub use stored_model::StoredModel;
pub use tensor_file::TensorFile;
pub use token_loss::TokenBatch;
