//! A plan predicts the memory that a training takes on a GPU, by the driver's count of its pool; and trainings that do not fit
//! are refused. On a GPU, or one emulated on a CPU (`tools/check_cuda.sh`). One training runs at a time, since the count is the
//! process's.
#![cfg(feature = "candle-cuda")]

use crate::support::model::no_gpu;
use ringspan_models::{Config, Decoder, folder};
use ringspan_train::{Observer, Plan, Settings, StepMetrics, TrainConfig, train};
use safetensors::{Dtype, tensor::TensorView};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// A model: layers, hidden size, query heads and key-value heads of width 16, inner width, vocabulary, tied or not.
type Model = (usize, usize, usize, usize, usize, usize, bool);

/// Number of experts, number of experts that a token is routed to, width of an expert.
type Experts = (usize, usize, usize);

fn model(root: &Path, of: Model, experts: Option<Experts>) -> PathBuf {
    let (layers, hidden, heads, kv_heads, wide, vocabulary, tied) = of;
    let path = root.join(format!("{of:?}-{experts:?}").replace([' ', '(', ')', ','], "_"));
    if path.exists() {
        return path;
    }
    let mut json = serde_json::json!({
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": wide,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
        "hidden_act": "silu"
    });
    if let Some((experts, top, wide)) = experts {
        let more = serde_json::json!({
            "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": top, "moe_intermediate_size": wide,
            "norm_topk_prob": true, "mlp_only_layers": []
        });
        json.as_object_mut().expect("keys").extend(more.as_object().cloned().unwrap_or_default());
    }
    let config: Config = serde_json::from_value(json.clone()).expect("a known model");
    let weights = Decoder::new(config).and_then(|decoder| decoder.init(3)).expect("weights");
    folder::save(&path, &json, &weights).expect("saved");
    path
}

fn tokens(root: &Path, rows: usize, len: usize) -> PathBuf {
    let path = root.join(format!("tokens-{rows}-{len}"));
    let bytes: Vec<u8> = (0..rows * len).flat_map(|i| (i as u32 * 7 % 251).to_le_bytes()).collect();
    let view = TensorView::new(Dtype::U32, vec![rows, len], &bytes).expect("sizes");
    safetensors::serialize_to_file([("tokens", view)], None, &path).expect("saved");
    path
}

#[derive(Default)]
struct MemoryObserver {
    plan: Plan,
    of_step: Option<u64>,
}

impl Observer for MemoryObserver {
    fn planned(&mut self, plan: &Plan) {
        self.plan = plan.clone();
    }
    fn stepped(&mut self, metrics: &StepMetrics) {
        self.of_step = metrics.peak_gpu_memory;
    }
}

#[test]
fn a_training_takes_of_a_gpu_what_its_plan_predicts() {
    if no_gpu() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = folder.path();
    let deep: Model = (3, 128, 8, 4, 384, 256, true);
    let heads: Model = (2, 64, 16, 8, 64, 256, true);
    let words: Model = (2, 64, 4, 2, 192, 4096, false);
    let tied: Model = (2, 64, 4, 2, 192, 4096, true);
    let sparse: Model = (2, 128, 8, 4, 128, 256, false);
    let eight = Some((8, 2, 128));
    let s = || Settings { ring: Some(1), ..Settings::default() };
    let bf16 = || Settings { dtype: Some("bf16".into()), ..s() };
    let recompute = |what: &str| Settings { recompute: Some(what.into()), ..s() };
    let offloaded = |what: &str| Settings { offload_activations: Some(true), ..recompute(what) };
    let adapted = |settings: Settings| Settings { lora_rank: Some(8), ..settings };
    // Two ranks, on two GPUs if there are two: on one GPU, their peaks need not coincide.
    let shared = |ring, tp| Settings { ring: Some(ring), tp: Some(tp), ..Settings::default() };
    type Run = (&'static str, Model, Option<Experts>, (usize, usize), Settings);
    let mut runs: Vec<Run> = vec![
        ("parameters", deep, None, (1, 16), s()),
        ("tokens", deep, None, (1, 512), s()),
        ("recompute full", deep, None, (1, 512), recompute("full")),
        ("recompute nothing", deep, None, (1, 512), recompute("nothing")),
        ("kept in bf16", deep, None, (1, 512), Settings { activations: Some("bf16".into()), ..s() }),
        ("bf16", deep, None, (1, 256), bf16()),
        ("offloaded", (6, 128, 8, 4, 384, 256, true), None, (1, 512), offloaded("nothing")),
        ("offloaded, everything again", (6, 128, 8, 4, 384, 256, true), None, (1, 512), offloaded("full")),
        ("many heads", heads, None, (1, 512), s()),
        ("words", words, None, (1, 256), s()),
        ("words, several chunks", words, None, (1, 1200), s()),
        ("words, tied, bf16", tied, None, (1, 64), bf16()),
        ("adapters", deep, None, (1, 512), adapted(s())),
        ("adapters, bf16", deep, None, (1, 256), adapted(bf16())),
        ("adapters, dropped", deep, None, (1, 512), Settings { lora_dropout: Some(0.1), ..adapted(s()) }),
        ("experts", sparse, eight, (1, 512), s()),
        ("experts, all tokens to all", sparse, Some((4, 4, 64)), (1, 512), s()),
        ("experts, bf16", sparse, eight, (1, 256), bf16()),
    ];
    if ringspan_cuda::Gpu::count().is_ok_and(|count| count > 1) {
        runs.extend([
            ("ring", deep, None, (1, 1024), shared(2, 1)),
            ("ulysses", deep, None, (1, 1024), Settings { ulysses: Some(2), ..s() }),
            ("tensor parallel", deep, None, (1, 512), shared(1, 2)),
            ("dp-shard", deep, None, (2, 512), Settings { dp_shard: Some(2), ..s() }),
        ]);
    }
    let mut wrong = Vec::new();
    for (name, of, experts, (rows, len), settings) in runs {
        let settings = Settings {
            model: Some(model(root, of, experts)),
            tokens: Some(tokens(root, rows, len)),
            out: Some(root.join("out")),
            device: Some("cuda".into()),
            threads: Some(1),
            steps: Some(1),
            ..settings
        };
        let config = TrainConfig::resolve(settings).expect("possible");
        let mut watch = MemoryObserver::default();
        let outcome = train(&config, &AtomicBool::new(false), &mut watch).expect("a training");
        std::fs::remove_dir_all(&outcome.out).expect("what was written");
        let (predicted, most) = (outcome.predicted_gpu_memory as f64, outcome.peak_gpu_memory.expect("a count") as f64);
        assert!(watch.of_step.is_some_and(|of_step| of_step as f64 <= most && of_step > 0), "{name}: in the metrics");
        assert_eq!(watch.plan.gpu_bytes(), outcome.predicted_gpu_memory, "{name}: a rank on each GPU");
        let parts: Vec<String> =
            watch.plan.gpu_memory.iter().map(|(part, bytes)| format!("{part} {:.1}", *bytes as f64 / 1e6)).collect();
        let ratio = predicted / most;
        let line = format!(
            "{name}: predicted {:.2} MB, measured {:.2} MB, {ratio:.3}; most {}: {}",
            predicted / 1e6,
            most / 1e6,
            watch.plan.gpu_peak_moment,
            parts.join(", ")
        );
        println!("{line}");
        if (ratio - 1.0).abs() > 0.12 {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn what_does_not_fit_on_a_gpu_is_refused_with_the_numbers() {
    if no_gpu() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = folder.path();
    let model = model(root, (3, 128, 8, 4, 384, 257, true), None);
    let text: String = (0..4000).map(|i| format!("line {} of {}\n", i * 7919 % 1009, i % 13)).collect();
    std::fs::write(root.join("text.txt"), text).expect("a file");
    let tokenizer = ringspan_train::Tokenizer::byte_level(Path::new("byte-level")).expect("tokenizer");
    std::fs::write(model.join("tokenizer.json"), tokenizer.to_json().expect("JSON")).expect("a file");
    // An emulated GPU has as much memory as this variable says: enough for one of the ranks, and not for both. A real GPU has
    // enough.
    let run_with = |memory: u64, length: &str, flags: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ringspan"));
        command.current_dir(root).env("CUDA_ON_CPU_MEMORY", memory.to_string());
        command.args(["train", "--model"]).arg(&model).args(["--data", "text.txt", "--device", "cuda:0"]);
        command.args(["--sample-tokens", "0", "--sequence-length", length, "--steps", "1", "--ring", "2"]);
        let output = command.args(flags.split_whitespace()).output().expect("the binary starts");
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.success(), out, err)
    };
    let run = |memory, flags: &str| run_with(memory, "2048", flags);
    let (good, plan, said) = run(8 << 30, "--dry-run");
    assert!(good && said.is_empty(), "{said}");
    for part in ["a rank of the CPU's, most ", "a rank of a GPU's, most ", "is free on GPU 0", "for 2 ranks"] {
        assert!(plan.contains(part), "{part}: {plan}");
    }
    if !plan.contains("(a CPU)") {
        return;
    }
    for flags in ["--dry-run", ""] {
        let (good, _, said) = run(40 << 20, flags);
        assert!(!good, "{said}");
        for part in ["this needs about", "of GPU 0 (a CPU) (2 ranks of up to", "only 40.0 MiB of its 40.0 MiB is free"]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(said.contains("the nearest that fits is --recompute full --sequence-length "), "{said}");
    }
    let (_, _, said) = run(40 << 20, "--dry-run");
    let length = said.split("--sequence-length ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let (good, _, said) = run_with(40 << 20, length.expect("a length"), "--recompute full --dry-run");
    assert!(good, "what is proposed does not fit: {said}");
    let (_, _, said) = run(1 << 20, "--dry-run");
    for part in ["no shorter sequence would", "--tp", "give fewer ranks to a GPU", "--dtype bf16", "--lora-rank"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!root.join("ringspan-out").join("checkpoints").exists(), "refused before any work");
}
