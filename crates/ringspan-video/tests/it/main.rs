//! Tests of the video pipeline against diffusers and against one rank.

mod denoise;
mod pipeline;
mod support;
mod transformer;
