#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod backend;
mod backward;
mod connect;
mod cross_stream;
mod cuda;
mod delta;
mod error;
mod forward;
mod gpu;
mod gpu_memory;
mod kernel_params;
mod library;
mod memory;
mod memory_ops;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod nvrtc;
mod options;
mod shared_slice;
mod source;
mod tables;
mod tensor;

pub use gpu::Gpu;
pub use gpu_memory::GpuMemory;
pub use memory::{BorrowedSlice, GpuElement};
pub use shared_slice::SharedSlice;
pub use source::GpuSource;
