//! The KV cache in pages, sharded over the ranks, and the execution of one step of the engine.
//!
//! Page i of a sequence has the positions `i * page` to `(i + 1) * page` and is on rank `i mod P`, in prefill and decode alike, so
//! each rank has `1/P` of the cache, give or take a page. The kernels read pages where they are. Sliding-window layers have pages
//! of their own, of which a sequence has only the last ones.
//!
//! Shape letters: T rows of a step on this rank, H query heads, G key-value heads, D and Dv head widths, C hidden size, P ranks.

mod attention;
mod cache;
mod cache_memory;
mod decode_batch;
mod elements;
mod execute;
mod hidden_states;
mod kv_dtype;
mod layer_kind;
mod page_map;
mod prefill_batch;
mod step_plan;

pub use cache::PagedCache;
pub use execute::execute;
pub(crate) use hidden_states::to_first_stage;
pub use kv_dtype::KvDtype;
pub use layer_kind::{PerKind, window_lookback};
