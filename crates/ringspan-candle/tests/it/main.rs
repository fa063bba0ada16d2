//! All tests that need no process of their own, linked into one program. A new file of tests is a module here.

#[path = "../support/mod.rs"]
mod support;

mod bf16;
mod bf16_ranks;
mod collectives;
mod feed_forward;
mod front_door;
mod front_door_refusals;
mod fused_layers;
mod own_models;
mod stored_experts;
