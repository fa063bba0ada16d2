//! The routes, one file for each interface.

pub(crate) mod adapters;
mod begin;
pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod operation;
pub(crate) mod responses;
pub(crate) mod tokens;
