//! Checks that the ranks of `attend` fit into memory, before any of them starts.

use super::input::InputSizes;
use super::plan::Plan;
use anyhow::{Result, ensure};
use ringspan::comm::{process_group::ProcessGroup, threads};
use ringspan::mesh::Grid;
use ringspan::schedule::Pass;

/// Bytes that all ranks of a process take together.
struct MemoryNeeds {
    threads: u64,
    lists: u64,
    tensors: u64,
}

/// Refuses ranks that are threads of this process and together take more memory than is free.
pub(super) fn check(plan: &Plan, sizes: &InputSizes, backward: bool, processes: &ProcessGroup) -> Result<()> {
    let Some(free) = ringspan::memory::available().filter(|_| processes.local().is_none()) else { return Ok(()) };
    let ranks = plan.schedule.query().ranks();
    let needs = MemoryNeeds {
        threads: threads::memory(ranks),
        lists: lists(plan, backward),
        tensors: tensors(plan, sizes, backward),
    };
    needs.fit(free, plan.schedule.grid())
}

impl MemoryNeeds {
    fn fit(&self, free: u64, grid: Grid) -> Result<()> {
        let Self { threads, lists, tensors } = *self;
        let needed = threads.saturating_add(lists).saturating_add(tensors);
        let gigabytes = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
        ensure!(
            needed <= free,
            "--ring {} x --ulysses {}: ranks in one process take about {}, and {} are free: {} for their threads, {} for the \
             lists of their plans, {} for tensors and blocks; take fewer ranks, or make each of them a process (--features mpi)",
            grid.ring,
            grid.ulysses,
            gigabytes(needed),
            gigabytes(free),
            gigabytes(threads),
            gigabytes(lists),
            gigabytes(tensors)
        );
        Ok(())
    }
}

/// Bytes of the plans of all ranks, in the pass whose plans are longer; ranks in the middle and at the ends of a ring are
/// measured, and stand for the others.
fn lists(plan: &Plan, backward: bool) -> u64 {
    let schedule = &plan.schedule;
    let ring = schedule.grid().ring;
    let passes = if backward { &[Pass::Forward, Pass::Backward][..] } else { &[Pass::Forward] };
    let of_rank = |rank: usize| passes.iter().map(|&pass| schedule.plan_bytes(pass, rank)).max().unwrap_or(0);
    let most = [0, ring / 2, ring - 1].map(of_rank).into_iter().max().unwrap_or(0);
    most.saturating_mul(schedule.query().ranks() as u64)
}

/// Bytes of tensors in f32: inputs, results, and two blocks of keys and values of other ranks with their gradients.
fn tensors(plan: &Plan, sizes: &InputSizes, backward: bool) -> u64 {
    let InputSizes { heads, kv_heads, dim, v_dim, .. } = *sizes;
    let (query, key) = (plan.schedule.query(), plan.schedule.key());
    let ranks = query.ranks();
    let passes = if backward { 2 } else { 1 };
    let of_query = heads * (dim + v_dim + 2) * passes;
    let of_key = kv_heads * (dim + v_dim) * passes;
    let elements =
        |rank: usize| query.tokens(rank) * of_query + key.tokens(rank) * of_key * if ranks > 1 { 3 } else { 1 };
    4 * (0..ranks).map(|rank| elements(rank) as u64).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_do_not_fit_into_memory_are_refused_with_the_numbers() {
        let needs = MemoryNeeds { threads: 2_000_000_000, lists: 3_000_000_000, tensors: 100_000_000 };
        let grid = Grid::new(512, 2);
        assert!(needs.fit(5_100_000_000, grid).is_ok());
        let message = needs.fit(5_099_999_999, grid).expect_err("a byte too little").to_string();
        for words in
            ["--ring 512 x --ulysses 2", "take about 5.1 GB", "2.0 GB for their threads", "3.0 GB for the lists"]
        {
            assert!(message.contains(words), "'{words}' is missing: {message}");
        }
    }
}
