#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod beside;
pub mod checkpoint;
mod config;
pub mod data;
mod dataset;
mod default_model;
mod error;
mod events;
mod feed;
mod given;
mod hidden;
mod lr_schedule;
mod memory;
mod mesh;
mod metrics;
mod model_folder;
mod observer;
mod optimizer;
mod plan;
mod rank;
mod sample;
mod settings;
mod setup;
mod shards;
mod start;
mod tokenizer;
mod trainer;
mod trial;
mod watchdog;
mod windows;

pub use config::{Length, RouterLossOver, Sharding, Source, TextSource, TrainConfig};
pub use error::{Error, Result};
pub use events::EventFile;
pub use hidden::hidden;
pub use lr_schedule::{Decay, LrSchedule};
pub use metrics::{EvaluationMetrics, MetricsFile, StepMetrics};
pub use model_folder::{Exported, export};
pub use observer::{Observer, Silent, Terminal};
pub use optimizer::{Method, Optimizer, OptimizerKind, State, Update, clip_scale, sum_of_squares};
pub use plan::Plan;
pub use sample::Sample;
pub use settings::{Settings, TrainArgs};
pub use tokenizer::{End, Tokenizer};
pub use trainer::{Outcome, plan, plan_on, train, train_on};
pub use trial::{Trial, trial};
