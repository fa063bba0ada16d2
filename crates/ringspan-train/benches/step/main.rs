//! Times a training step as `ringspan train` takes it: tokens per second, where the time goes, and the memory it needs.
//!
//! `cargo bench -p ringspan-train --bench step [-- S=4096 ranks=1 threads=2 steps=4 recompute=nothing activations=f32 isa=avx2]`. The
//! model is a small Llama (hidden 512, 8 layers, 8 query and 4 key-value heads of 64, MLP 1536, vocabulary 32,000), or
//! `model=DIR`. `json` prints one line for a program: the seconds of every step but the first. Seconds are those of the wall
//! clock and, because machines are shared, those of the processor. Shares are of the processor's time: each component is timed by
//! itself afterwards, forward and backward, on the shapes of one rank; the rest of the step is "other". The last column is the
//! speed relative to a product of 2048 x 2048 x 2048, timed before and after each component; that of "all" is the whole step's. `isa=`
//! chooses an instruction set for attention and products, those of the large product and those of the `gemm` crate included, which
//! this library then computes; norms and other operations without products use the widest vectors still.

mod clock;
mod components;
mod memory;

use ringspan::kernel::Isa;
use ringspan_models::{Config, Decoder, folder};
use ringspan_train::{Observer, Settings, StepMetrics, TrainConfig, train};
use safetensors::tensor::{Dtype, TensorView};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

const ARGUMENTS: &str = "S=, ranks=, threads=, steps=, recompute=, activations=, isa=, model=, json";

/// The case to time, as the arguments give it.
pub(crate) struct Case {
    pub(crate) length: usize,
    pub(crate) ranks: usize,
    pub(crate) threads: usize,
    steps: u64,
    pub(crate) recompute: Option<String>,
    pub(crate) activations: Option<String>,
    pub(crate) isa: Option<Isa>,
    model: Option<PathBuf>,
    json: bool,
}

impl Case {
    fn from_arguments() -> Result<Self> {
        // Run as a test (`cargo test --benches`, which does not pass `--bench`), a few tokens show that it works.
        let quick = !std::env::args().any(|argument| argument == "--bench");
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut case = Self {
            length: 4096,
            ranks: 1,
            threads: cores,
            steps: 4,
            recompute: None,
            activations: None,
            isa: None,
            model: None,
            json: false,
        };
        if quick {
            (case.length, case.steps) = (64, 2);
        }
        for argument in std::env::args().skip(1).filter(|argument| argument != "--bench") {
            match argument.split_once('=') {
                Some(("S", value)) => case.length = value.parse()?,
                Some(("ranks", value)) => case.ranks = value.parse()?,
                Some(("threads", value)) => case.threads = value.parse()?,
                Some(("steps", value)) => case.steps = value.parse()?,
                Some(("recompute", value)) => case.recompute = Some(value.into()),
                Some(("activations", value)) => case.activations = Some(value.into()),
                Some(("isa", value)) => case.isa = Some(value.parse()?),
                Some(("model", value)) => case.model = Some(value.into()),
                None if argument == "json" => case.json = true,
                _ => return Err(format!("unknown argument {argument}; possible are {ARGUMENTS}").into()),
            }
        }
        if case.steps < 2 {
            return Err("steps= must be at least 2: the first is not counted".into());
        }
        Ok(case)
    }
}

/// Records seconds, losses and memory of the steps, of which the first warms up.
struct StepRecorder {
    began: Instant,
    processor: f64,
    seconds: Vec<f64>,
    processor_seconds: Vec<f64>,
    losses: Vec<f64>,
    peak: usize,
}

impl Observer for StepRecorder {
    fn stepped(&mut self, metrics: &StepMetrics) {
        let processor = clock::processor_seconds().unwrap_or(f64::NAN);
        if metrics.step > 1 {
            self.seconds.push(self.began.elapsed().as_secs_f64());
            self.processor_seconds.push(processor - self.processor);
            self.peak = self.peak.max(memory::peak());
        }
        self.losses.push(metrics.loss);
        memory::restart();
        (self.began, self.processor) = (Instant::now(), processor);
    }
}

/// The configuration of the Llama that is timed where no model is given.
fn config(length: usize) -> serde_json::Value {
    serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": length.max(4096), "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "attention_bias": false, "tie_word_embeddings": false,
    })
}

/// Writes tokens that any program can generate: token i is `(7919 i + 13) mod V`.
fn write_tokens(path: &Path, length: usize, vocabulary: usize) -> Result<()> {
    let bytes: Vec<u8> = (0..length).flat_map(|i| (((i * 7919 + 13) % vocabulary) as i64).to_le_bytes()).collect();
    let view = TensorView::new(Dtype::I64, vec![1, length], &bytes)?;
    Ok(safetensors::serialize_to_file([("tokens", view)], None, path)?)
}

fn main() -> Result<()> {
    memory::keep();
    let case = Case::from_arguments()?;
    let folder_ = tempfile::tempdir()?;
    let model = match &case.model {
        Some(model) => model.clone(),
        None => {
            let (path, json) = (folder_.path().join("model"), config(case.length));
            folder::save(&path, &json, &Decoder::new(serde_json::from_value::<Config>(json.clone())?)?.init(0)?)?;
            path
        }
    };
    let config: Config = serde_json::from_value(folder::config_json(&model)?)?;
    let tokens = folder_.path().join("tokens.safetensors");
    write_tokens(&tokens, case.length, config.vocab_size)?;
    let settings = Settings {
        model: Some(model),
        tokens: Some(tokens),
        out: Some(folder_.path().join("out")),
        ring: Some(case.ranks),
        threads: Some(case.threads),
        recompute: case.recompute.clone(),
        activations: case.activations.clone(),
        steps: Some(case.steps),
        lr: Some(1e-4),
        weight_decay: Some(0.1),
        warmup: Some(0),
        schedule: Some("constant".into()),
        grad_clip: Some(0.0),
        save_every: Some(0),
        ..Settings::default()
    };
    let mut recorder = StepRecorder {
        began: Instant::now(),
        processor: 0.0,
        seconds: Vec::new(),
        processor_seconds: Vec::new(),
        losses: Vec::new(),
        peak: 0,
    };
    let config_of_run = TrainConfig { isa: case.isa, ..TrainConfig::resolve(settings)? };
    train(&config_of_run, &AtomicBool::new(false), &mut recorder)?;
    let resident = memory::resident_peak();
    if case.json {
        let line = serde_json::json!({
            "seconds": recorder.seconds, "processor_seconds": recorder.processor_seconds, "losses": recorder.losses, "peak_bytes": recorder.peak, "resident_bytes": resident,
        });
        println!("{line}");
        return Ok(());
    }
    report(&case, &config, &mut recorder, resident)
}

fn parameters(config: &Config) -> Result<usize> {
    Ok(Decoder::new(config.clone())?.shapes().values().map(|shape| shape.iter().product::<usize>()).sum())
}

fn report(case: &Case, config: &Config, recorder: &mut StepRecorder, resident: Option<usize>) -> Result<()> {
    recorder.seconds.sort_by(f64::total_cmp);
    recorder.processor_seconds.sort_by(f64::total_cmp);
    let middle = recorder.seconds.len() / 2;
    let (step, processor) = (recorder.seconds[middle], recorder.processor_seconds[middle]);
    let Case { length, ranks, threads, .. } = case;
    println!(
        "S={length} ranks={ranks} threads={threads}: {:.0} tokens/s, median of {} steps of {:.3} to {:.3} s; {:.0} tokens a \
         second of each core's time",
        *length as f64 / step,
        recorder.seconds.len(),
        recorder.seconds[0],
        recorder.seconds[recorder.seconds.len() - 1],
        *length as f64 / processor,
    );
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    // Ranks share parameters, gradients and optimizer state, so they count once.
    let state = parameters(config)? * 16;
    println!(
        "peak {:.0} MiB allocated{}; above weights, gradients and AdamW's state ({:.0} MiB): {:.2} KiB a token and layer",
        mib(recorder.peak),
        resident.map_or(String::new(), |bytes| format!(", {:.0} MiB resident", mib(bytes))),
        mib(state),
        recorder.peak.saturating_sub(state) as f64 / 1024.0 / (length * config.num_hidden_layers) as f64,
    );
    println!("{:>12} {:>10} {:>6} {:>8} {:>9} {:>9}", "component", "seconds", "share", "GFLOP", "GFLOP/s", "of a GEMM");
    let components = components::all(case, config)?;
    let [mut known, mut flops, mut peak] = [0.0; 3];
    for component in &components {
        known += component.seconds;
        flops += component.flops;
        peak += component.peak_seconds;
        line(component.name, component.seconds, processor, component.flops, component.peak_seconds);
    }
    line("other", processor - known, processor, 0.0, 0.0);
    line("all", processor, processor, flops, peak);
    Ok(())
}

/// Prints a line of the table; components without products have no speed.
fn line(name: &str, seconds: f64, of: f64, flops: f64, peak_seconds: f64) {
    print!("{name:>12} {seconds:>8.3} s {:>4.1} %", 100.0 * seconds / of);
    if flops > 0.0 {
        print!(" {:>8.1} {:>9.1} {:>9.2}", flops / 1e9, flops / 1e9 / seconds, peak_seconds / seconds);
    }
    println!();
}
