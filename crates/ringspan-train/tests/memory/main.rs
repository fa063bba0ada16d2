//! Tests of what a training allocates, by an allocator that counts. The long forms run with `--ignored`.

#[path = "../common/mod.rs"]
mod common;
mod counting;

mod plan;
mod quantized_base;
mod scaling;
mod sharing;
mod streaming;
