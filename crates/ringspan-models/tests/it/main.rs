//! All tests that need no process of their own, in one program that is linked once. A new file of tests is a module here.

#[path = "../support/mod.rs"]
mod support;

mod attention_dropout;
mod expert_parallel;
mod folder;
mod gguf;
mod hugging_face;
mod lora;
mod lora_dropout;
mod new_weights;
mod recompute;
mod refusals;
mod sharding;
mod stored_weights;
mod tensor_parallel;
