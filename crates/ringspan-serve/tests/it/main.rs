//! All tests that need no process of their own, in one program that is linked once. A new file of tests is a module here.

#[path = "../support/mod.rs"]
mod support;

mod engine;
mod engine_adapters;
mod engine_failures;
mod engine_lifecycle;
mod engine_metrics;
mod engine_models;
mod engine_parallel;
mod engine_replicas;
mod engine_salts;
mod engine_sessions;
mod engine_speculation;
mod engine_windows;
mod generate;
mod known_failures;
mod kv_dtype;
mod paged;
