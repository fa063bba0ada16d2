//! Speed of products with quantized weights, compared with the same product in f32 and with reading the weight's bytes.
//!
//! Run `cargo bench -p ringspan-candle --bench quantized`. Arguments change the settings: `threads=1`, `size=4096` or
//! `rows=262144 columns=640`, `formats=Q4_K,MXFP4`, `rounds=5`, `many=no`, and `tokens=32` for the number of tokens in a product
//! with many tokens, by default 512, and `activations=int16`.
//!
//! The methods are timed in turn, and the shortest times are printed, since other work on the machine only adds to them. With
//! one token, each product uses another copy of the weight, so that its bytes come from memory.

use bytes::Bytes;
use candle_core::{Device, Result, Tensor};
use ringspan_candle::ActivationDType;
use ringspan_candle::linear::linear;
use ringspan_candle::pool;
use ringspan_candle::quantized::{Format, QuantizedMatrix, linear_quantized};
use std::hint::black_box;
use std::time::Instant;

/// Bytes that the copies of a weight take together: more than fits in the caches.
const COPIES: usize = 256 << 20;

struct Settings {
    threads: usize,
    rows: usize,
    columns: usize,
    rounds: usize,
    tokens: usize,
    formats: Vec<Format>,
    many: bool,
    copies: Option<usize>,
    activations: ActivationDType,
}

impl Settings {
    fn read() -> Self {
        let words: Vec<String> = std::env::args().collect();
        let word = |key: &str| words.iter().find_map(|word| word.strip_prefix(&format!("{key}=")).map(str::to_owned));
        let number = |key: &str, default: usize| word(key).and_then(|x| x.parse().ok()).unwrap_or(default);
        let chosen = word("formats");
        let listed =
            |format: &Format| chosen.as_ref().is_none_or(|list| list.split(',').any(|x| x == format.to_string()));
        let size = number("size", 4096);
        Self {
            threads: number("threads", std::thread::available_parallelism().map_or(1, |n| n.get())),
            rows: number("rows", size),
            columns: number("columns", size),
            rounds: number("rounds", 7),
            tokens: number("tokens", 512),
            activations: word("activations").and_then(|x| x.parse().ok()).unwrap_or_default(),
            copies: word("copies").and_then(|x| x.parse().ok()),
            many: word("many").is_none_or(|many| many != "no"),
            formats: Format::ALL.into_iter().filter(listed).collect(),
        }
    }
}

/// Random blocks whose scales are finite numbers.
fn random(format: Format, rows: usize, columns: usize, seed: u64) -> Result<QuantizedMatrix> {
    let mut state = seed;
    let mut bytes = vec![0u8; format.bytes(rows, columns)?];
    for byte in &mut bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = (state >> 56) as u8;
    }
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        let scales: &[usize] = match format {
            Format::F16 | Format::BF16 => &[],
            Format::Q4K | Format::Q5K => &[0, 2],
            Format::Q6K => &[208],
            _ => &[0],
        };
        for scale in scales {
            block[*scale..scale + 2].copy_from_slice(&[0x25, 0x1c]);
        }
        match format {
            Format::F16 | Format::BF16 => block[1] &= 0xbf,
            Format::Mxfp4 => block[0] = 120,
            _ => {}
        }
    }
    QuantizedMatrix::new(format, rows, columns, bytes.into())
}

fn seconds<R>(work: impl FnOnce() -> R) -> f64 {
    let start = Instant::now();
    black_box(work());
    start.elapsed().as_secs_f64()
}

fn least(times: Vec<f64>) -> f64 {
    times.into_iter().fold(f64::INFINITY, f64::min)
}

/// Reads all bytes, on all threads.
fn read(bytes: &Bytes) -> u64 {
    let parts: Vec<&[u8]> = bytes.chunks(bytes.len().div_ceil(8 * pool::threads())).collect();
    // Not compiled for this machine's instruction set: with AVX-512, the compiler makes gathers of such loops, which read a tenth of this.
    let sum = |part: &[u8]| {
        let mut sums = [0u64; 8];
        for words in part.as_chunks::<8>().0.as_chunks::<8>().0 {
            sums.iter_mut().zip(words).for_each(|(sum, word)| *sum ^= u64::from_le_bytes(*word));
        }
        sums.iter().fold(0, |all, sum| all ^ sum)
    };
    pool::map(parts, sum).into_iter().fold(0, |all, sum| all ^ sum)
}

fn table(settings: &Settings) -> Result<()> {
    let Settings { threads, rows, columns, rounds, tokens, .. } = *settings;
    println!(
        "{rows} x {columns}, {threads} threads, activations in {}, the least of {rounds} rounds",
        settings.activations
    );
    println!(
        "{:8}  {:>9} {:>9} {:>7} {:>8} {:>8}  {:>9} {:>8} {:>8}  {:>9}",
        "format",
        "T=1 ms",
        "GB/s",
        "of read",
        "read",
        "of f32",
        format!("T={tokens} ms"),
        "GFLOP/s",
        "of f32",
        "decode ms"
    );
    let x = |tokens: usize| Tensor::rand(-1f32, 1.0, (tokens, columns), &Device::Cpu);
    let (one, many) = (x(1)?, x(tokens)?);
    let dense: Vec<Tensor> = (0..COPIES.div_ceil(4 * rows * columns))
        .map(|_| Tensor::rand(-1f32, 1.0, (rows, columns), &Device::Cpu))
        .collect::<Result<_>>()?;
    for format in &settings.formats {
        let stored = format.bytes(rows, columns)?;
        let weights = (0..settings.copies.unwrap_or(COPIES.div_ceil(stored).min(64)))
            .map(|i| Ok(random(*format, rows, columns, i as u64)?.rounding_activations(settings.activations)));
        let weights: Vec<QuantizedMatrix> = weights.collect::<Result<_>>()?;
        let mut times: [Vec<f64>; 6] = Default::default();
        for round in 0..rounds {
            times[0].extend(weights.iter().map(|w| seconds(|| linear_quantized(&one, w, None))));
            times[1].extend(weights.iter().map(|w| seconds(|| read(w.bytes()))));
            times[2].extend(dense.iter().map(|w| seconds(|| linear(&one, w, None))));
            if !settings.many {
                continue;
            }
            times[3].push(seconds(|| linear_quantized(&many, &weights[round % weights.len()], None)));
            times[4].push(seconds(|| linear(&many, &dense[round % dense.len()], None)));
            times[5].push(seconds(|| weights[round % weights.len()].dequantize()));
        }
        let [fast, bytes, dense_fast, tiled, dense_tiled, decoded] = times.map(least);
        let (rate, of_read) = (stored as f64 / fast / 1e9, stored as f64 / bytes / 1e9);
        let operations = 2.0 * (tokens * rows * columns) as f64;
        println!(
            "{:8}  {:9.3} {rate:9.2} {:7.2} {of_read:8.2} {:8.2}  {:9.2} {:8.1} {:8.3}  {:9.2}",
            format.to_string(),
            1e3 * fast,
            rate / of_read,
            dense_fast / fast,
            1e3 * tiled,
            operations / tiled / 1e9,
            dense_tiled / tiled,
            1e3 * decoded,
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    let settings = Settings::read();
    pool::run(settings.threads, || table(&settings))?
}
