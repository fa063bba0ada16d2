//! Tests of the video pipeline against diffusers and against one rank.

mod denoise;
mod feature_cache;
mod gguf;
mod lora;
mod pipeline;
mod pipeline_refusals;
mod support;
mod training;
mod transformer;
