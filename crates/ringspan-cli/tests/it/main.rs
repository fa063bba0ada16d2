//! All tests that need no process of their own, in one program that is linked once. A new file of tests is a module here.

#[path = "../support/mod.rs"]
mod support;

mod attend;
mod attend_refusals;
mod attend_report;
mod bf16;
mod denoise;
mod draw;
mod dry_run;
mod interrupt;
mod kill;
mod mesh;
mod models;
mod serve;
mod train_memory;
mod video;
