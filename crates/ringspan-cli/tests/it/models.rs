//! `score`, `generate` and `verify` on a small model folder, on one rank and on several.

use crate::support::{Bench, Tensor, message, read, write};
use ringspan_models::{Config, Decoder, RopeScaling, folder};
use std::path::Path;
use std::process::Output;

const VOCABULARY: usize = 257;

/// A folder `model` with random weights and byte-level tokens.
fn bench() -> Bench {
    let bench = Bench::new(&[]);
    let config = serde_json::json!({
        "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "tie_word_embeddings": true, "hidden_act": "silu"
    });
    let parsed: Config = serde_json::from_value(config.clone()).expect("a known model");
    let decoder = Decoder::new(parsed).expect("sizes that fit");
    let weights = decoder.init(3).expect("weights");
    let model = bench.path("model");
    folder::save(&model, &config, &weights).expect("saved");
    let tokenizer = ringspan_train::Tokenizer::byte_level(Path::new("byte-level")).expect("tokenizer");
    std::fs::write(model.join("tokenizer.json"), tokenizer.to_json().expect("JSON")).expect("file");
    bench
}

fn run(bench: &Bench, command: &str, flags: &str) -> Output {
    bench.command(command).args(flags.split_whitespace()).output().expect("the binary runs")
}

fn succeed(bench: &Bench, command: &str, flags: &str) -> (String, String) {
    let output = run(bench, command, flags);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("whole characters");
    assert!(output.status.success(), "{flags}: {}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

const MESHES: [&str; 4] = ["--ring 1", "--ring 3", "--ulysses 4", "--ring 2 --ulysses 2"];

#[test]
fn greedy_text_is_the_same_on_every_mesh_and_alone_on_standard_output() {
    let bench = bench();
    let flags = "--model model --prompt hello --max-tokens 20 --temperature 0";
    let texts: Vec<(String, String)> =
        MESHES.iter().map(|mesh| succeed(&bench, "generate", &format!("{flags} {mesh}"))).collect();
    assert!(!texts[0].0.is_empty());
    for (text, status) in &texts {
        assert_eq!(text, &texts[0].0);
        assert!(status.contains("tokens/s") && status.contains("cached tokens per rank"), "{status}");
    }
}

#[test]
fn the_seed_fixes_a_drawn_text() {
    let bench = bench();
    let text = |seed: u32, mesh: &str| {
        let flags = "--model model --prompt hello --max-tokens 30 --temperature 1.5 --top-k 90 --top-p 0.99";
        succeed(&bench, "generate", &format!("{flags} --seed {seed} {mesh}")).0
    };
    assert_eq!(text(1, MESHES[0]), text(1, MESHES[0]));
    assert_ne!(text(1, MESHES[0]), text(2, MESHES[0]));
}

#[test]
fn generate_refuses_what_makes_no_sense() {
    let bench = bench();
    let refusal = |flags: &str| message(&run(&bench, "generate", flags));
    assert!(refusal("--model model --prompt x --temperature 0 --top-k 3").contains("top-k 3"));
    assert!(refusal("--model model --prompt x --temperature -1").contains("temperature -1"));
    assert!(refusal("--model model --prompt x --top-p 2").contains("top-p 2"));
    assert!(refusal("--model model --prompt x --ulysses 5").contains("ulysses 5"));
    assert!(refusal("--model nowhere --prompt x").contains("nowhere"));
    assert!(
        refusal("--model Qwen/Qwen3-0.6B --prompt x").contains("`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`")
    );
    assert!(refusal("--model model --prompt-file nofile").contains("nofile"));
    assert!(refusal("--model model --prompt=").contains("empty"));
    assert_eq!(run(&bench, "generate", "--model model").status.code(), Some(2));
    assert_eq!(run(&bench, "generate", "--model model --prompt a --prompt-file b").status.code(), Some(2));
    std::fs::remove_file(bench.path("model/tokenizer.json")).expect("it was there");
    std::fs::write(bench.path("model/tokenizer.model"), "\n").expect("file");
    let said = refusal("--model model --prompt x");
    assert!(said.contains("model/tokenizer.json: is missing, and tokenizer.model next to it"), "{said}");
    std::fs::write(bench.path("model/tokenizer.json"), "{").expect("file");
    assert!(refusal("--model model --prompt x").contains("tokenizer.json"));
}

#[test]
fn scores_are_those_of_the_logits_and_the_same_on_every_mesh() {
    let bench = bench();
    let (rows, len, lengths) = (3, 19, [19i32, 7, 0]);
    let tokens: Vec<i64> = (0..rows * len).map(|i| (i * i * 31 % VOCABULARY) as i64).collect();
    write(
        &bench.path("tokens.safetensors"),
        &[("tokens", Tensor::i64(&[rows, len], &tokens)), ("lengths", Tensor::i32(&[rows], &lengths))],
    );
    let flags = "--model model --tokens tokens.safetensors --out scores.safetensors --logits";
    let mut first: Option<Vec<f32>> = None;
    for mesh in MESHES {
        for layout in ["zigzag", "striped:2", "contiguous"] {
            let (said, _) = succeed(&bench, "score", &format!("{flags} {mesh} --layout {layout}"));
            assert!(said.contains("24 predicted of 26 tokens"), "{said}");
            let scores = read(&bench.path("scores.safetensors"));
            assert_eq!(scores["logprobs"].shape, [rows, len - 1]);
            assert_eq!(scores["logits"].shape, [rows, len, VOCABULARY]);
            let (log_probs, logits) = (scores["logprobs"].values(), scores["logits"].values());
            for row in 0..rows {
                for t in 0..len - 1 {
                    let got = log_probs[row * (len - 1) + t];
                    if t + 1 >= lengths[row] as usize {
                        assert_eq!(got, 0.0, "{mesh} {layout} [{row}, {t}]");
                        continue;
                    }
                    let logits = &logits[(row * len + t) * VOCABULARY..][..VOCABULARY];
                    let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
                    let exact = f64::from(logits[tokens[row * len + t + 1] as usize]) - sum.ln();
                    assert!((f64::from(got) - exact).abs() < 1e-4, "{mesh} {layout} [{row}, {t}]: {got} for {exact}");
                }
            }
            let expected = first.get_or_insert_with(|| log_probs.clone());
            let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
            assert!(crate::support::relative_l2(&log_probs, &expected) < 1e-5, "{mesh} {layout}");
        }
    }
}

/// A flag scales the rotary embedding as the configuration would: the same model gives other scores, and no warning.
#[test]
fn a_model_is_scaled_by_a_flag_as_by_its_configuration() {
    let bench = bench();
    let tokens: Vec<i64> = (0..5000).map(|i| i * i * 31 % VOCABULARY as i64).collect();
    write(&bench.path("tokens.safetensors"), &[("tokens", Tensor::i64(&[1, 5000], &tokens))]);
    let score = |model: &str, flags: &str| {
        let flags = format!("--model {model} --tokens tokens.safetensors --out s.safetensors --ring 2 {flags}");
        let (_, warning) = succeed(&bench, "score", &flags);
        (read(&bench.path("s.safetensors"))["logprobs"].values(), warning)
    };
    let (plain, warning) = score("model", "");
    for word in ["5000 tokens", "4096 positions", "yarn:2"] {
        assert!(warning.contains(word), "{warning}");
    }
    for by in ["yarn:2", "linear:4", "dynamic:2", "llama3:2"] {
        let (by_flag, warning) = score("model", &format!("--rope-scaling {by}"));
        assert!(!warning.contains("warning"), "{warning}");
        assert_ne!(by_flag, plain, "{by}");
        let scaling: RopeScaling = by.parse().expect("a scaling");
        let json = scaling.apply(&folder::config_json(&bench.path("model")).expect("JSON"), None).expect("scaled");
        let (_, weights) = folder::load(&bench.path("model")).expect("loads");
        folder::save(&bench.path("scaled"), &json, &weights).expect("saved");
        assert_eq!(score("scaled", "").0, by_flag, "{by}");
        let another = if by == "yarn:2" { "linear:2" } else { "yarn:2" };
        let flags = format!("--model scaled --rope-scaling {another} --tokens tokens.safetensors --out x");
        let twice = run(&bench, "score", &flags);
        assert!(message(&twice).contains("already scaled"), "{}", message(&twice));
    }
    let unknown = run(&bench, "generate", "--model model --prompt x --rope-scaling su:2");
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("linear, dynamic, yarn"), "{unknown:?}");
}

#[test]
fn a_gguf_file_is_scored_as_the_folder_it_was_made_from() {
    let bench = bench();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringspan-models/tests/fixtures");
    let tokens: Vec<i64> = (0..40).map(|i| i * i * 31 % 96).collect();
    write(&bench.path("tokens.safetensors"), &[("tokens", Tensor::i64(&[2, 20], &tokens))]);
    let flags = |model: &str, more: &str| {
        let model = fixtures.join(model);
        format!("--model {} --tokens tokens.safetensors --out s.safetensors --ring 2 {more}", model.display())
    };
    let score = |model: &str, more: &str| {
        succeed(&bench, "score", &flags(model, more));
        read(&bench.path("s.safetensors"))["logprobs"].values()
    };
    assert_eq!(score("gguf/llama_tied.gguf", ""), score("llama_tied", ""));
    let quantized = "gguf_families/qwen3.gguf";
    let [default, rounded, exact] =
        ["", "--activation-dtype int16", "--activation-dtype f32"].map(|dtype| score(quantized, dtype));
    assert_eq!(default, exact);
    assert!(rounded.iter().zip(&exact).all(|(a, b)| (a - b).abs() < 1e-3) && rounded != exact);
    let dense = message(&run(&bench, "score", &flags("gguf/llama_tied.gguf", "--activation-dtype int16")));
    assert!(dense.contains("--activation-dtype int16 has no effect") && dense.contains("Q8_0"), "{dense}");
    let unknown = run(&bench, "score", &flags(quantized, "--activation-dtype int8"));
    let unknown = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(unknown.contains("int8") && unknown.contains("f32, int16"), "{unknown}");
    // This file has no tokenizer, which a prompt needs.
    let model = fixtures.join("gguf/llama_tied.gguf");
    let refused = run(&bench, "generate", &format!("--model {} --prompt x", model.display()));
    assert!(message(&refused).contains("tokenizer.ggml.model"), "{}", message(&refused));
}

#[test]
fn a_text_is_scored_as_one_document() {
    let bench = bench();
    std::fs::write(bench.path("text.txt"), "a text of 25 bytes, right").expect("file");
    let (said, _) = succeed(&bench, "score", "--model model --text text.txt --out s.safetensors --ring 2");
    assert!(said.contains("perplexity") && said.contains("24 predicted of 25 tokens"), "{said}");
    assert_eq!(read(&bench.path("s.safetensors"))["logprobs"].shape, [1, 24]);
}

#[test]
fn score_refuses_tokens_that_do_not_fit_and_leaves_the_old_result() {
    let bench = bench();
    let file = bench.path("tokens.safetensors");
    std::fs::write(bench.path("out.safetensors"), "good").expect("file");
    let refusal = |tensors: &[(&str, Tensor)]| {
        write(&file, tensors);
        let message = message(&run(&bench, "score", "--model model --tokens tokens.safetensors --out out.safetensors"));
        assert!(message.contains("tokens.safetensors"), "{message}");
        assert_eq!(std::fs::read(bench.path("out.safetensors")).expect("still there"), b"good");
        message
    };
    let good = || ("tokens", Tensor::i64(&[1, 2], &[1, 2]));
    assert!(refusal(&[("tokens", Tensor::i64(&[1, 2], &[1, 257]))]).contains("[0, 1] is 257"));
    assert!(refusal(&[("tokens", Tensor::i64(&[1, 2], &[-1, 2]))]).contains("[0, 0] is -1"));
    assert!(refusal(&[("tokens", Tensor::f32(&[1, 2], &[1.0, 2.0]))]).contains("F32"));
    assert!(refusal(&[("tokens", Tensor::i64(&[2], &[1, 2]))]).contains("[B, S]"));
    assert!(refusal(&[("ids", Tensor::i64(&[1, 2], &[1, 2]))]).contains("ids"));
    assert!(refusal(&[good(), ("lengths", Tensor::i32(&[1], &[3]))]).contains("`lengths`[0] is 3"));
    assert!(refusal(&[good(), ("lengths", Tensor::i32(&[2], &[1, 1]))]).contains("[2]"));
}

/// The partitions of fused matrices (Phi-3's `qkv_proj` and `gate_up_proj`) are gathered, updated and joined correctly.
#[test]
fn verify_passes_where_matrices_are_stored_as_one() {
    let bench = bench();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../ringspan-models/tests/fixtures/phi3");
    for mesh in ["--ring 2 --tp 2", "--tp 3", "--dp-shard 2 --tp 4"] {
        let (said, _) = succeed(&bench, "verify", &format!("--model {model} {mesh} --sequence-length 21"));
        assert!(said.contains("PASS"), "{mesh}: {said}");
    }
}

/// Values narrower than keys, sinks, and experts in one tensor: on whole models, with adapters, and with experts distributed over
/// ranks.
#[test]
fn verify_passes_for_families_whose_layers_are_of_their_own() {
    let bench = bench();
    for name in ["deepseek_v2", "deepseek_v3", "gpt_oss", "gpt_oss_mxfp4"] {
        let model = format!("{}/../ringspan-models/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
        for flags in [
            "--ring 2 --tp 2",
            "--dp-shard 2 --ring 2 --tp 2 --ep 2",
            "--ring 2 --tp 2 --lora-rank 4 --lora-dropout 0.2",
        ] {
            let (said, _) = succeed(&bench, "verify", &format!("--model {model} {flags} --sequence-length 21"));
            assert!(said.contains("PASS") && !said.contains("FAIL"), "{name}, {flags}: {said}");
        }
    }
}

#[test]
fn verify_passes_on_every_mesh() {
    let bench = bench();
    for flags in [
        "--tiny --ring 3",
        "--tiny --ring 2 --ulysses 2 --layout striped:3",
        "--model model --ulysses 4",
        "--tiny --dp-replicate 2 --dp-shard 2 --tp 2",
        "--tiny --ring 2 --tp 4 --sharding none --recompute full",
        "--tiny --ring 2 --tp 2 --ep 2",
        "--tiny --dp-shard 2 --ring 2 --ep 4 --strategy halo",
    ] {
        let (said, _) = succeed(&bench, "verify", &format!("{flags} --sequence-length 61"));
        for quantity in ["loss", "logits", "d model.embed_tokens", "updated model.embed_tokens", "PASS"] {
            assert!(said.contains(quantity), "{flags}: {said}");
        }
        assert!(!said.contains("FAIL"), "{said}");
    }
    let adapters = "--lora-rank 4 --lora-dropout 0.2";
    for flags in ["--tiny --ring 2 --tp 2", "--tiny --ring 2 --ep 2", "--tiny --ring 2 --tp 2 --ep 2"] {
        let (said, _) = succeed(&bench, "verify", &format!("{flags} {adapters} --sequence-length 61"));
        assert!(said.contains("PASS") && said.contains("lora_A") && !said.contains("\nd model.embed_tokens"), "{said}");
        assert_eq!(said.contains("d model.layers.1.mlp.experts.7.down_proj.lora_B"), flags.contains("ep"), "{said}");
    }
    assert!(message(&run(&bench, "verify", "--tiny --ulysses 9")).contains("ulysses 9"));
    assert!(message(&run(&bench, "verify", "--tiny --lora-dropout 0.1")).contains("--lora-rank"));
}
