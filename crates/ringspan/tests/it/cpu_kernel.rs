//! Tests of the CPU's kernels: the checks of any kernel, bits that do not depend on threads, and calls of the progress
//! function.

use ringspan::Kernel;
use ringspan::kernel::Isa;
use ringspan_testing::Kernels;
use ringspan_testing::kernel::blocks::queries_over_a_cache;
use ringspan_testing::kernel::{Answer, FULL, Problem};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// All instruction sets of this machine, and the portable kernel as on a machine without AVX.
struct Cpu;

impl Kernels for Cpu {
    fn one(&self) -> Option<Kernel> {
        Some(Kernel::new(1))
    }

    fn all(&self, threads: &[usize]) -> Vec<Kernel> {
        let of_isa = |isa| threads.iter().map(move |threads| Kernel::with_isa(*threads, isa).expect("available"));
        let narrow = threads.iter().map(|threads| Kernel::without_avx(*threads));
        Isa::available().into_iter().flat_map(of_isa).chain(narrow).collect()
    }
}

ringspan_testing::check_kernels!(Cpu);

#[test]
fn one_query_over_a_cache_has_the_same_bits_with_any_threads() {
    for problem in queries_over_a_cache() {
        let values = problem.values();
        for isa in Isa::available() {
            let computed = |threads| problem.computed(&Kernel::with_isa(threads, isa).expect("available"), &values);
            let results = |answer: Answer| [answer.out, answer.lse, answer.decoded, answer.decoded_lse];
            let wanted = results(computed(1));
            for threads in [2, 3] {
                assert_eq!(wanted, results(computed(threads)), "{isa}, {threads} threads");
            }
        }
    }
}

#[test]
fn progress_is_called_by_the_caller_alone() {
    let caller = std::thread::current().id();
    for (queries, threads) in [(500, 1), (500, 3), (1, 1)] {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let kernel = Kernel::new(threads).with_progress(Arc::new(move || {
            assert_eq!(std::thread::current().id(), caller);
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        let problem = Problem::new(queries, 3000, (4, 2), (16, 16), FULL);
        problem.computed(&kernel.with_pause(Duration::ZERO), &problem.values());
        let calls = calls.load(Ordering::Relaxed);
        assert!(calls > 0 && (threads > 1 || calls > 20), "{calls} calls");
    }
}

#[test]
fn progress_is_called_once_where_the_pause_is_longer_than_the_computation() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let hook = move || {
        counter.fetch_add(1, Ordering::Relaxed);
    };
    let kernel = Kernel::new(1).with_pause(Duration::MAX).with_progress(Arc::new(hook));
    let problem = Problem::new(500, 3000, (4, 2), (16, 16), FULL);
    for computations in 1..=2 {
        problem.computed(&kernel, &problem.values());
        // The forward and the backward pass each call the hook once.
        assert_eq!(calls.load(Ordering::Relaxed), 2 * computations);
    }
}
