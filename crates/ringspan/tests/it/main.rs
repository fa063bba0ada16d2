//! All tests that need no process of their own, in one program that is linked once. Each file of tests is a module here.

#[path = "../matrix/mod.rs"]
mod matrix;
#[path = "../support/mod.rs"]
mod support;

mod attention_bytes;
mod attention_decode;
mod attention_meshes;
mod attention_paged;
mod attention_pairwise;
mod attention_shapes;
mod large_scores;
mod layout_properties;
mod matrix_2d;
mod matrix_p2p_a2a;
mod matrix_ring_and_gather;
mod matrix_varlen;
mod non_finite;
mod support_table;
