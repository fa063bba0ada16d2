//! Tests of the video pipeline against diffusers and against one rank.

mod support;
mod transformer;
