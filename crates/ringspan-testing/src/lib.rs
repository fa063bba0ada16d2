#![doc = include_str!("../README.md")]

pub mod comm;
mod counting_allocator;
#[cfg(feature = "gguf")]
pub mod gguf;
pub mod kernel;
pub mod mesh;

pub use counting_allocator::CountingAllocator;

use ringspan::Kernel;

/// The kernels that checks are run with, for example those of one backend.
pub trait Kernels: Sync {
    /// A new kernel, as each rank of a mesh has one; `None` if this machine lacks the device, and then checks do nothing.
    fn one(&self) -> Option<Kernel>;

    /// The kernels that are compared with the reference, by default [`one`](Self::one). A device that computes with threads of the CPU
    /// returns a kernel for each of these numbers of them.
    fn all(&self, threads: &[usize]) -> Vec<Kernel> {
        let _ = threads;
        self.one().into_iter().collect()
    }

    /// Further kernels that multiply bf16 in another way, such as those of other GPUs of the machine.
    fn others_for_bf16(&self) -> Vec<Kernel> {
        Vec::new()
    }
}

/// Makes a test of each check of kernels, for a value that implements [`Kernels`]: attention of tiles, forward and backward, against
/// plain f64 loops, and steps of decoding on meshes.
#[macro_export]
macro_rules! check_kernels {
    ($kernels:ident) => {
        $crate::make_tests! { $kernels;
            kernel::blocks:
                head_widths_need_not_fit_the_vectors,
                lengths_need_not_fit_the_blocks,
                nothing_to_compute_changes_nothing,
                windows_and_shifts_leave_empty_rows_at_zero,
                query_heads_share_keys_in_groups_of_any_size,
                tiles_may_come_in_any_order_and_number,
                key_blocks_accumulate_in_any_order,
                more_queries_than_a_segment,
                more_keys_than_a_segment,
                scores_far_apart_stay_finite,
                keys_that_tie_at_any_score_share_the_weight,
                rows_that_nobody_sees_may_hold_anything,
                one_query_over_a_cache,
                any_bands_and_tiles_give_the_reference,
                where_one_key_has_all_the_weight_its_gradients_are_exactly_zero,
                delta_is_by_head_then_token;
            kernel::faults:
                faults_stay_in_bands,
                faults_stay_in_their_tile,
                faults_stay_in_bands_over_many_blocks,
                faults_stay_in_bands_with_terms,
                one_query_does_not_read_what_it_does_not_see;
            kernel::storage:
                tensors_of_any_type_are_computed_in_f32,
                products_of_bf16_have_every_shape_and_term,
                products_of_bf16_go_over_many_blocks,
                bf16_that_only_travelled_is_multiplied_in_f32,
                rows_may_lie_anywhere;
            kernel::terms:
                each_term_alone,
                terms_in_pairs_over_tiles_and_key_blocks,
                terms_count_in_tokens_of_the_row,
                all_terms_at_once_with_wide_heads,
                a_bias_may_hide_keys_and_whole_queries,
                softcap_bounds_scores_of_any_size;
            mesh::decode:
                one_query_or_a_few_over_a_spread_cache,
                ranks_without_keys_or_without_visible_ones_contribute_nothing,
                scores_of_all_kinds,
                a_bias_too_short_for_the_keys_is_refused,
                the_exchange_is_one_state_a_message;
        }
    };
}

/// Makes a test of each check of a backend, for a value that implements [`Kernels`]: packing, adding, transposing, merging and
/// finishing against plain loops, and refusal of memory that the CPU cannot read.
#[macro_export]
macro_rules! check_backend {
    ($kernels:ident) => {
        $crate::make_tests! { $kernels;
            kernel::moves:
                packing_converts_and_selects_rows,
                sums_are_added_to_their_rows,
                matrices_are_transposed_and_messages_appended,
                states_merge_and_finish,
                nothing_is_added_to_no_rows,
                the_cpu_refuses_what_it_cannot_read;
        }
    };
}

/// Makes a test of each check of meshes, for a value that implements [`Kernels`]: every layout and strategy on up to 8 ranks, forward and
/// backward, against plain f64 loops.
#[macro_export]
macro_rules! check_meshes {
    ($kernels:ident) => {
        $crate::make_tests! { $kernels;
            mesh::meshes:
                lengths_around_the_number_of_ranks,
                lengths_that_divide_by_nothing,
                a_thousand_tokens,
                head_widths,
                values_of_another_width_than_keys,
                one_key_head_for_eight_query_heads_and_more_ulysses_ranks_than_key_heads,
                heads_that_do_not_divide_by_ulysses,
                windows,
                ragged_batches_with_padding,
                packed_documents_whose_borders_fall_on_and_beside_rank_borders,
                documents_with_padding_between_and_after_them,
                documents_in_pieces,
                cross_attention_and_queries_after_a_cache,
                keys_hidden_beyond_their_length,
                rows_that_see_nothing_are_zero_with_lse_minus_infinity,
                the_same_mesh_gives_the_same_bits,
                a_changed_token_is_seen_by_later_tokens_of_its_document_only;
        }
    };
}

/// Makes tests of functions that are given kernels: a module for each list.
#[doc(hidden)]
#[macro_export]
macro_rules! make_tests {
    ($kernels:ident; $($folder:ident::$module:ident: $($check:ident),*;)*) => {
        $(mod $module {
            $(#[test]
            fn $check() {
                $crate::$folder::$module::$check(&super::$kernels);
            })*
        })*
    };
}
