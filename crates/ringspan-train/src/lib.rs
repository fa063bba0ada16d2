#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub mod checkpoint;
mod companion_files;
mod config;
pub mod data;
mod data_loader;
mod dataset;
mod default_model;
mod durable_file;
mod error;
mod events;
mod fingerprint;
mod hidden_states;
mod human_readable;
mod initial_model;
mod initial_parameters;
mod lr_schedule;
mod mesh;
mod metrics;
mod model_folder;
mod model_identity;
mod observer;
mod optimizer;
mod peak_memory;
mod plan;
mod rank;
mod run_file;
mod sample;
mod settings;
mod setup;
mod shards;
mod single_step;
mod spec;
mod token_windows;
mod tokenizer;
mod trainer;
mod training_loop;
mod watchdog;

pub use config::{DataSource, RouterLossScope, Sharding, TextSource, TrainConfig, TrainingLength};
pub use error::{Error, Result};
pub use events::EventFile;
pub use fingerprint::fingerprint;
pub use hidden_states::hidden_states;
pub use lr_schedule::{LrDecay, LrSchedule};
pub use metrics::{EvaluationMetrics, MetricsFile, StepMetrics};
pub use model_folder::{Exported, export};
pub use observer::{Observer, SilentObserver, TerminalObserver};
pub use optimizer::{
    Optimizer, OptimizerConfig, OptimizerKind, OptimizerState, UpdateArguments, clip_scale, sum_of_squares,
};
pub use plan::Plan;
pub use run_file::write as write_run_file;
pub use sample::Sample;
pub use settings::{Settings, TrainArgs};
pub use single_step::{StepResults, single_step};
pub use tokenizer::{EndToken, Tokenizer};
pub use trainer::{Outcome, plan, plan_on, train, train_on};
pub use training_loop::{LoopEnd, StepOutcome, Steps, TrainingRun, run_steps};
