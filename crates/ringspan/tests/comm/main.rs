//! Tests of the communicators between threads.

mod agree;
mod channel;
mod direct;
mod failures;
mod numbers;
mod stress;
mod threads;
mod timed;
mod world;
