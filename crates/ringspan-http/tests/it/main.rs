//! Tests of the server over real sockets, with an engine whose texts are known.

mod anthropic;
mod bench;
mod chat;
mod client;
mod completions;
mod description;
mod engine;
mod limits;
mod operation;
mod responses;
mod salts;
mod special_tokens;
mod tool_forms;
mod tools;
