//! Tests of the video pipeline against diffusers and against one rank.

mod denoise;
mod lora;
mod pipeline;
mod support;
mod training;
mod transformer;
