//! What commands compute on GPUs, and their messages where there is none.

#[path = "../support/mod.rs"]
mod support;

mod attend_device;
mod device;
mod gpu_memory;
mod offload;
