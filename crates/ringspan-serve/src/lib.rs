#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod cache;
mod context;
pub mod engine;
mod error;
mod generate;
mod greatest_logit;
mod groups;
mod mesh;
mod model;
mod model_parallel_rank;
pub mod paged;
mod sampler;
mod score;
pub mod step;
mod text;
mod token_weights;

pub use cache::{BLOCK, Cache, owner};
pub use error::{Error, Result};
pub use generate::{Generation, Options, Stop, generate, generate_on_rank};
pub use groups::Groups;
pub use mesh::Mesh;
pub use model::Model;
pub use sampler::{Sampler, Sampling};
pub use score::{Batch, Scores, score};
pub use text::{Detokenize, TextStream};
