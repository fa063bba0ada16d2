//! Tests of the server over real sockets, with an engine whose texts are known.

mod anthropic;
mod bench;
mod chat;
mod client;
mod completions;
mod engine;
mod limits;
mod operation;
mod responses;
mod tools;
