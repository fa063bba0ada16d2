//! Tests of the communicators between threads.

mod agree;
mod direct;
mod failures;
mod lane;
mod numbers;
mod stress;
mod threads;
mod timed;
mod world;
