//! Measures the speed of matrix products in f32 and bf16, compared with the `gemm` crate and with the peak of a core in
//! registers.
//!
//! `cargo bench -p ringspan --bench product` prints a table. Clock rates drift and machines are shared, so the columns of a
//! row are timed alternately, and the table has medians of the rounds. Arguments like `case=2048x2048`, `layout=forward`,
//! `threads=1` choose rows; `isa=avx512,avx2` chooses other instruction sets than the fastest, `tokens=37` another number
//! of rows than 1024, and `rounds=9` how often each is timed. `pack=yes` prints the cost of packing a weight instead.

use half::bf16;
use ringspan::kernel::Isa;
use ringspan::kernel::product::{Arithmetic, Matrix, Output};
use std::hint::black_box;
use std::time::Instant;

/// Input and output widths of a linear layer.
const CASES: [(&str, usize, usize); 4] =
    [("512x1536", 512, 1536), ("1536x512", 1536, 512), ("2048x2048", 2048, 2048), ("2048x5632", 2048, 5632)];
/// Names of the `name=value` arguments.
const NAMES: [&str; 7] = ["case", "layout", "threads", "isa", "tokens", "rounds", "pack"];
/// Minimum duration of one timing in seconds.
const LEAST: f64 = 0.1;

/// The product of a linear layer that is timed: `x W^T`, `dy W` or `dy^T x`.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Forward,
    Input,
    Weight,
}

impl Layout {
    const ALL: [(&str, Self); 3] = [("forward", Self::Forward), ("input", Self::Input), ("weight", Self::Weight)];

    /// Both factors, and the number of elements of the output.
    fn factors<'a, T>(self, x: &'a [T], w: &'a [T], dy: &'a [T], of: Shape) -> ([Matrix<'a, T>; 2], usize) {
        let Shape { tokens, ins, outs } = of;
        let (x, w) = (Matrix::new(x, tokens, ins), Matrix::new(w, outs, ins));
        let dy = Matrix::new(dy, tokens, outs);
        match self {
            Self::Forward => ([x, w.t()], tokens * outs),
            Self::Input => ([dy, w], tokens * ins),
            Self::Weight => ([dy.t(), x], outs * ins),
        }
    }
}

#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    ins: usize,
    outs: usize,
}

/// The tensors of a linear layer in one type.
struct LinearTensors<T> {
    x: Vec<T>,
    w: Vec<T>,
    dy: Vec<T>,
}

impl LinearTensors<f32> {
    fn new(Shape { tokens, ins, outs }: Shape) -> Self {
        Self { x: random(tokens * ins, 1), w: random(outs * ins, 2), dy: random(tokens * outs, 3) }
    }

    fn rounded(&self) -> LinearTensors<bf16> {
        let [x, w, dy] = [&self.x, &self.w, &self.dy].map(|x| x.iter().map(|x| bf16::from_f32(*x)).collect());
        LinearTensors { x, w, dy }
    }
}

fn main() {
    // Cargo adds the argument `--bench`.
    for argument in std::env::args().skip(1).filter(|argument| !argument.starts_with("--")) {
        if argument.split_once('=').is_none_or(|(name, _)| !NAMES.contains(&name)) {
            eprintln!("{argument}: possible are name=value with the names {}", NAMES.join(", "));
            std::process::exit(2);
        }
    }
    if given("pack").is_some() { packing() } else { table() }
}

fn table() {
    println!("GFLOP/s, medians of interleaved rounds; packed: with the weight packed before");
    println!(
        "{:22} {:>9} thr {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} | {:>8} {:>8} {:>9} {:>9}",
        "tokens in x out",
        "isa",
        "gemm",
        "f32",
        "packed",
        "f32arith",
        "bf16",
        "packed",
        "rounded",
        "f32/gemm",
        "bf16/gemm",
        "f32/peak",
        "bf16/peak"
    );
    let tokens = given("tokens").map_or(1024, |tokens| tokens.parse().expect("tokens=NUMBER"));
    let rounds = given("rounds").map_or(3, |rounds| rounds.parse().expect("rounds=NUMBER"));
    for (name, ins, outs) in CASES.into_iter().filter(|case| chosen("case", case.0)) {
        let shape = Shape { tokens, ins, outs };
        let wide = LinearTensors::<f32>::new(shape);
        let narrow = wide.rounded();
        for (layout_name, layout) in Layout::ALL.into_iter().filter(|layout| chosen("layout", layout.0)) {
            let ([a, b], elements) = layout.factors(&wide.x, &wide.w, &wide.dy, shape);
            let ([c, d], _) = layout.factors(&narrow.x, &narrow.w, &narrow.dy, shape);
            let (mut out, mut narrow_out) = (vec![1.0f32; elements], vec![bf16::ONE; elements]);
            for threads in [1, 2].into_iter().filter(|threads| chosen("threads", &threads.to_string())) {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
                for isa in isas() {
                    let by = Arithmetic::new(isa, true).expect("an instruction set of this machine");
                    let plain = Arithmetic::new(isa, false).expect("as above");
                    let (packed, narrow_packed) = (by.pack::<f32, f32>(b), by.pack::<bf16, bf16>(d));
                    let operations = 2.0 * (tokens * ins * outs) as f64;
                    let mut timed = Vec::new();
                    for _ in 0..rounds {
                        let time = |work: &mut (dyn FnMut() + Send)| pool.install(|| speed(operations, work));
                        timed.push([
                            time(&mut || gemm(a, b, &mut out, threads)),
                            time(&mut || by.product(a, b, Output::Overwrite(&mut out))),
                            time(&mut || packed.product(a, Output::Overwrite(&mut out))),
                            time(&mut || plain.product(c, d, Output::Overwrite(&mut out))),
                            time(&mut || by.product(c, d, Output::Overwrite(&mut out))),
                            time(&mut || narrow_packed.product(c, Output::Overwrite(&mut out))),
                            time(&mut || by.product(c, d, Output::Rounded(&mut narrow_out))),
                            peak_of(isa, false, threads),
                            peak_of(isa, isa.multiplies_bf16(), threads),
                        ]);
                    }
                    let of: [f64; 9] = std::array::from_fn(|i| median(timed.iter().map(|row| row[i]).collect()));
                    let [gemm, wide, _, _, bf16, ..] = of;
                    let row: String = of[..7].iter().map(|speed| format!(" {speed:7.1}")).collect();
                    println!(
                        "{:22} {:>9} {threads:3}{row} | {:8.2} {:8.2} {:9.2} {:9.2}",
                        format!("{tokens} {name} {layout_name}"),
                        by.to_string(),
                        wide / gemm,
                        bf16 / gemm,
                        wide / of[7],
                        bf16 / of[8]
                    );
                }
            }
        }
    }
}

/// Prints the milliseconds that packing a weight takes, also as a share of its product.
fn packing() {
    println!("packing a weight for 1024 tokens: milliseconds, and share of the product with it packed");
    for (name, ins, outs) in CASES.into_iter().filter(|case| chosen("case", case.0)) {
        let shape = Shape { tokens: 1024, ins, outs };
        let wide = LinearTensors::<f32>::new(shape);
        let narrow = wide.rounded();
        for (layout_name, layout) in Layout::ALL.into_iter().filter(|(_, layout)| *layout != Layout::Weight) {
            let ([a, b], elements) = layout.factors(&wide.x, &wide.w, &wide.dy, shape);
            let ([c, d], _) = layout.factors(&narrow.x, &narrow.w, &narrow.dy, shape);
            let mut out = vec![1.0f32; elements];
            for isa in isas() {
                let by = Arithmetic::new(isa, true).expect("an instruction set of this machine");
                let (packed, narrow_packed) = (by.pack::<f32, f32>(b), by.pack::<bf16, bf16>(d));
                let pack = 1e-6 / speed(1.0, || drop(black_box(by.pack::<f32, f32>(b))));
                let product = 1e-6 / speed(1.0, || packed.product(a, Output::Overwrite(&mut out)));
                let narrow_pack = 1e-6 / speed(1.0, || drop(black_box(by.pack::<bf16, bf16>(d))));
                let narrow = 1e-6 / speed(1.0, || narrow_packed.product(c, Output::Overwrite(&mut out)));
                let of = |pack: f64, product: f64| format!("{pack:6.2} ms {:5.1} %", 100.0 * pack / product);
                println!("{name} {layout_name:8} {by:12} f32 {} bf16 {}", of(pack, product), of(narrow_pack, narrow));
            }
        }
    }
}

/// The product by the crate that candle uses, with the arguments it needs for row-major output.
fn gemm(a: Matrix<f32>, b: Matrix<f32>, out: &mut [f32], threads: usize) {
    let ((m, k), n) = (a.shape(), b.shape().1);
    let threads = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
    let strides = |m: Matrix<f32>| (m.strides().0 as isize, m.strides().1 as isize);
    let ((a_row, a_col), (b_row, b_col)) = (strides(a), strides(b));
    let (a, b, out) = (a.data().as_ptr(), b.data().as_ptr(), out.as_mut_ptr());
    // SAFETY: the matrices were checked when they were made, and the output has m x n elements.
    unsafe {
        gemm::gemm(
            n, m, k, out, n as isize, 1, false, b, b_row, b_col, a, a_row, a_col, 0.0, 1.0f32, false, false, false,
            threads,
        );
    }
}

/// Does fused multiply-adds, or products of pairs of bf16, in registers: `rounds` of two dozen vectors or fewer. Returns
/// the number of operations in a round.
#[cfg(target_arch = "x86_64")]
fn peak(isa: Isa, pairs: bool, rounds: usize) -> f64 {
    use std::arch::x86_64::*;
    macro_rules! chains {
        ($name:ident, $feature:literal, $vector:ty, $count:literal, $per_lane:literal, $set:ident, $fma:expr) => {
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
                ($per_lane * $count * size_of::<$vector>() / size_of::<f32>()) as f64
            }
        };
    }
    chains!(pairwise, "avx512f,avx512bf16", __m512, 24, 4, _mm512_set1_ps, |a, b, c| {
        // SAFETY: both are 64 bytes of plain numbers.
        let halves = |x: __m512| unsafe { std::mem::transmute::<__m512, __m512bh>(x) };
        _mm512_dpbf16_ps(a, halves(b), halves(c))
    });
    chains!(wide, "avx512f", __m512, 24, 2, _mm512_set1_ps, |a, b, c| _mm512_fmadd_ps(a, b, c));
    chains!(narrow, "avx2,fma", __m256, 12, 2, _mm256_set1_ps, |a, b, c| _mm256_fmadd_ps(a, b, c));
    chains!(portable, "avx", __m256, 12, 2, _mm256_set1_ps, |a, b, c| _mm256_add_ps(_mm256_mul_ps(a, b), c));
    chains!(least, "sse2", __m128, 12, 2, _mm_set1_ps, |a, b, c| _mm_add_ps(_mm_mul_ps(a, b), c));
    match isa {
        // SAFETY: the machine has the instructions of every set that is timed.
        Isa::Avx512 if pairs => unsafe { pairwise(rounds) },
        // SAFETY: as above.
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
fn peak(_: Isa, _: bool, _: usize) -> f64 {
    f64::NAN
}

fn peak_of(isa: Isa, pairs: bool, threads: usize) -> f64 {
    const STEPS: usize = 1_000_000;
    let operations = peak(isa, pairs, 1) * (STEPS * threads) as f64;
    speed(operations, || {
        std::thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(|| peak(isa, pairs, STEPS))));
            peak(isa, pairs, STEPS);
        });
    })
}

/// The instruction sets to be timed: those given by `isa=`, or the fastest one.
fn isas() -> Vec<Isa> {
    let Some(wanted) = given("isa") else { return vec![Isa::best()] };
    let isa = |name: &str| name.parse().unwrap_or_else(|error| panic!("isa={name}: {error}"));
    wanted.split(',').map(isa).collect()
}

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The value of the argument `name=value`.
fn given(name: &str) -> Option<String> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}

fn chosen(name: &str, value: &str) -> bool {
    given(name).is_none_or(|wanted| wanted.split(',').any(|wanted| wanted == value))
}

/// Speed in 10^9 operations per second of `work`, repeated as often as the timing needs.
fn speed(operations: f64, mut work: impl FnMut()) -> f64 {
    work();
    let (start, mut times) = (Instant::now(), 0.0);
    while start.elapsed().as_secs_f64() < LEAST {
        work();
        times += 1.0;
    }
    times * operations / start.elapsed().as_secs_f64() / 1e9
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
