//! All tests that need no process of their own, linked once as one program. A new file of tests is a module here.

#[path = "../common/mod.rs"]
mod common;
#[path = "../meshes/mod.rs"]
mod meshes;

mod activations;
mod attention_dropout;
mod bf16;
mod chat;
mod documents;
mod epochs;
mod export;
mod known_failures;
mod leak;
mod learning;
mod lora;
mod lora_dropout;
mod lora_gguf;
mod mesh_gradients;
mod mesh_independence;
mod metrics;
mod mixture;
mod new_model;
mod recompute;
mod refusals;
mod resume;
mod sparse_settings;
mod stored_base;
mod ten_steps;
mod token_cache;
mod tokenizer_files;
