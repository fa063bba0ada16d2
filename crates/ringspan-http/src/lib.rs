#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod app;
mod auth;
pub mod bench;
mod body;
mod conversation;
mod error;
mod fields;
mod generation;
mod grammar;
mod logprobs;
mod metrics;
mod output;
mod reply;
mod response_store;
mod routes;
mod sampling;
mod server;
mod sse;
mod tools;
mod vocabulary;

pub use app::{ServeError, ServedModel};
pub use server::{Server, Settings};
