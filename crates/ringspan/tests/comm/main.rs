//! Tests of the communicators between threads.

#[path = "../contract/mod.rs"]
mod contract;
#[path = "../lane/mod.rs"]
mod lane;
#[path = "../support/mod.rs"]
mod support;

mod agree;
mod direct;
mod failures;
mod numbers;
mod stress;
mod threads;
mod timed;
mod world;
