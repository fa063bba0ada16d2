#![doc = include_str!("../README.md")]
//!
#![doc = include_str!("course.md")]
#![deny(missing_docs)]

pub mod attention;
pub mod comm;
pub mod documents;
pub mod error;
pub mod kernel;
pub mod layout;
pub mod mask;
pub mod memory;
pub mod mesh;
pub mod schedule;
pub mod support;
mod sync;
pub mod world;

pub use attention::Group;
pub use documents::{Document, Documents, Run};
pub use error::{Error, Result};
pub use kernel::{Kernel, Score};
pub use layout::{Layout, LayoutKind};
pub use mask::{Band, Mask};
pub use mesh::Mesh;
pub use schedule::{Schedule, Strategy, StrategyKind};
pub use world::{Rank, World};
