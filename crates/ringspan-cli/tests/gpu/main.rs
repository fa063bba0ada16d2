//! Tests of the commands on GPUs, and of their messages where there is no GPU.

#[path = "../support/mod.rs"]
mod support;

mod attend_device;
mod device;
mod gpu_memory;
mod offload;
