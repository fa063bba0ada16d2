//! The speed of the machine: a matrix product, the FMA peak, and clocks.

use super::arguments::given;
use super::case::random;
use ringspan::kernel::Isa;
use std::hint::black_box;
use std::time::Instant;

/// Width of the square matrix product that represents the speed of the machine.
const PRODUCT: usize = 2048;
/// Minimum duration of one timing in seconds.
const LEAST: f64 = 0.15;

/// The square matrix product for comparison.
pub(crate) struct Product([Vec<f32>; 3]);

impl Product {
    pub(crate) const OPERATIONS: f64 = 2.0 * (PRODUCT * PRODUCT * PRODUCT) as f64;

    pub(crate) fn new() -> Self {
        let n = PRODUCT * PRODUCT;
        Self([random(n, 5), random(n, 6), vec![0.0; n]])
    }

    pub(crate) fn run(&mut self, threads: usize) {
        let [a, b, c] = &mut self.0;
        let (n, row) = (PRODUCT, PRODUCT as isize);
        let threads = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
        let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        // SAFETY: three matrices of n x n elements, rows n apart.
        unsafe {
            gemm::gemm(n, n, n, c, 1, row, false, a, 1, row, b, 1, row, 0.0, 1.0, false, false, false, threads);
        }
    }
}

/// Does fused multiply-adds in registers, the fastest that a core can do with an instruction set: `rounds` of a dozen
/// vectors or more. Returns the number of operations in a round.
#[cfg(target_arch = "x86_64")]
fn peak(isa: Isa, rounds: usize) -> f64 {
    use std::arch::x86_64::*;
    macro_rules! chains {
        ($name:ident, $feature:literal, $vector:ty, $count:literal, $set:ident, $fma:expr) => {
            #[target_feature(enable = $feature)]
            fn $name(rounds: usize) -> f64 {
                let (x, y) = ($set(black_box(0.999)), $set(black_box(1e-3)));
                let mut sums: [$vector; $count] = [x; $count];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = $fma(*sum, x, y);
                    }
                }
                black_box(sums);
                (2 * $count * size_of::<$vector>() / size_of::<f32>()) as f64
            }
        };
    }
    chains!(wide, "avx512f", __m512, 24, _mm512_set1_ps, |a, b, c| _mm512_fmadd_ps(a, b, c));
    chains!(narrow, "avx2,fma", __m256, 12, _mm256_set1_ps, |a, b, c| _mm256_fmadd_ps(a, b, c));
    chains!(portable, "avx", __m256, 12, _mm256_set1_ps, |a, b, c| _mm256_add_ps(_mm256_mul_ps(a, b), c));
    chains!(least, "sse2", __m128, 12, _mm_set1_ps, |a, b, c| _mm_add_ps(_mm_mul_ps(a, b), c));
    match isa {
        // SAFETY: the machine has the instructions of every set that is timed.
        Isa::Avx512 => unsafe { wide(rounds) },
        // SAFETY: as above.
        Isa::Avx2 => unsafe { narrow(rounds) },
        // SAFETY: as above.
        Isa::Portable if is_x86_feature_detected!("avx") => unsafe { portable(rounds) },
        // SAFETY: SSE2 is part of the architecture.
        Isa::Portable => unsafe { least(rounds) },
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn peak(_: Isa, _: usize) -> f64 {
    f64::NAN
}

/// The FMA peak of some threads, in 10^9 operations per second.
pub(crate) fn peak_of(isa: Isa, threads: usize) -> f64 {
    const STEPS: usize = 2_000_000;
    let operations = peak(isa, 1) * (STEPS * threads) as f64;
    speed(operations, || {
        std::thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(|| peak(isa, STEPS))));
            peak(isa, STEPS);
        });
    })
}

/// Speed in 10^9 operations per second of `work`, repeated as often as the timing needs.
pub(crate) fn speed(operations: f64, mut work: impl FnMut()) -> f64 {
    let (start, processor, mut times) = (Instant::now(), processor_seconds(), 0.0);
    while start.elapsed().as_secs_f64() < LEAST {
        work();
        times += 1.0;
    }
    let seconds = match (processor, processor_seconds()) {
        (Some(start), Some(end)) if given("clock").as_deref() == Some("cpu") => end - start,
        _ => start.elapsed().as_secs_f64(),
    };
    times * operations / seconds / 1e9
}

/// Processor time of this thread in seconds, which excludes other threads and processes.
fn processor_seconds() -> Option<f64> {
    let spent = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(spent.split(' ').next()?.parse::<f64>().ok()? / 1e9)
}

/// The processor and its instruction sets, for the heading of the table.
pub(crate) fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split(':').nth(1)).map_or("unknown", str::trim)
    };
    let isas = Isa::available().iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
    let bf16 = if Isa::best().multiplies_bf16() { "products of bf16" } else { "no products of bf16" };
    format!("{}, family {} model {}: {isas}; {bf16}", field("model name"), field("cpu family"), field("model"))
}
