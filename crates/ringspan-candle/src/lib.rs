//! Ringspan on candle tensors: differentiable attention over a mesh, and the fused layers around it.
#![deny(missing_docs)]

pub mod activation;
pub mod attend;
pub mod attention;
pub mod cast;
pub mod collective;
pub mod context;
pub mod cotangent;
pub mod decode;
pub mod device;
pub mod dropout;
pub mod expert_parallel;
pub mod experts;
pub mod gated_mlp;
pub mod geglu;
mod gpu;
pub mod kept;
pub mod linear;
mod loan;
pub mod lora;
pub mod loss;
mod matmul;
pub mod norm;
pub mod offload;
pub mod peak;
#[cfg(feature = "cuda")]
mod pinned;
pub mod pool;
pub mod precision;
pub mod residual;
pub mod room;
pub mod rope;
mod slices;
pub mod swiglu;
pub mod tensor_parallel;
pub mod transfers;

pub use attend::Attend;
pub use context::Context;
pub use device::{DeviceName, Devices, RankDevice};
pub use dropout::Drops;
pub use expert_parallel::ExpertParallel;
pub use experts::{Expert, Experts, Load, Routing};
pub use lora::Adapter;
pub use offload::Offload;
pub use precision::Precision;
pub use tensor_parallel::TensorParallel;
pub use transfers::Transfers;
