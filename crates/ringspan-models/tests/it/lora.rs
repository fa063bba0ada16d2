//! Tests of LoRA adapters against PEFT, against the merged model, and on many ranks.

use crate::support::{
    Answer, Batch, TestMesh, adapted, assert_equal, fixture, load, on_mesh, on_one_device, on_ranks, relative_l2,
};
use candle_core::{Device, Tensor};
use ringspan::LayoutKind;
use ringspan_candle::Weights;
use ringspan_models::{Base, Decoder, Error, Lora, ModelSource, ROUTER, TARGETS, adapter, folder};
use serde_json::{Value, json};

/// A model with PEFT's adapter attached, the weights of both, and the values that PEFT computes.
fn peft(model: &str) -> (Decoder, Weights, Batch, Answer) {
    peft_in(model, &format!("{model}_lora"))
}

fn peft_in(model: &str, folder: &str) -> (Decoder, Weights, Batch, Answer) {
    let (decoder, mut weights, batch, _) = load(model);
    let folder = fixture(folder);
    let adapter = adapter::load(&folder).expect("the fixture");
    weights.extend(adapter.weights);
    let wanted = candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu);
    (
        decoder.with_lora(adapter.lora).expect("fits"),
        weights,
        batch,
        crate::support::answer(&wanted.expect("the fixture")),
    )
}

#[test]
fn logits_loss_and_gradients_are_those_of_peft() {
    let (decoder, weights, batch, wanted) = peft("llama");
    assert_equal("one device", &on_one_device(&decoder, &weights, &batch).0, &wanted);
    for mesh in [(2, 1), (1, 2), (3, 2)] {
        let got = on_mesh(&decoder, &weights, &batch, LayoutKind::Zigzag, mesh);
        assert_equal(&format!("{mesh:?}"), &got, &wanted);
    }
}

/// PEFT's `all-linear` attaches an adapter to each expert, and to the router.
#[test]
fn adapters_of_experts_are_those_of_peft() {
    let (decoder, weights, batch, wanted) = peft("qwen3_moe");
    let beside = |target: &str| decoder.adapters().any(|(layer, _)| layer.rsplit('.').next() == Some(target));
    assert!(TARGETS.iter().chain([&ROUTER]).all(|target| beside(target)));
    assert_equal("one device", &on_one_device(&decoder, &weights, &batch).0, &wanted);
    for (ring, tp, ep, moe_tp) in [(2, 1, 2, 1), (2, 1, 1, 2), (2, 2, 2, 2)] {
        let test_mesh = TestMesh { ring, tp, ep, moe_tp, ..TestMesh::default() };
        let got = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh);
        assert_equal(&format!("{test_mesh:?}"), &got, &wanted);
    }
    // `score` and `generate` use the merged model.
    let (config, merged) = ModelSource::at(&fixture("qwen3_moe_lora")).and_then(ModelSource::load).expect("fits");
    let (of_merged, _) = on_one_device(&Decoder::new(config).expect("supported"), &merged, &batch);
    assert!(relative_l2(&of_merged.logits, &wanted.logits) < 1e-5);
}

/// Regular expressions with a lookahead, names of several parts, selected layers only, ranks and alphas by patterns, scales by
/// the root of the rank; and PiSSA's adapter as PEFT converts it. Each is computed on one rank, with tensor parallelism, and
/// merged.
#[test]
fn adapters_that_patterns_describe_are_those_of_peft() {
    for (model, name) in
        [("llama", "regex"), ("gemma3", "layers"), ("llama", "one_layer"), ("llama", "pissa_converted")]
    {
        let folder = format!("adapters/{name}");
        let (decoder, weights, batch, wanted) = peft_in(model, &folder);
        assert_equal(name, &on_one_device(&decoder, &weights, &batch).0, &wanted);
        let test_mesh = TestMesh { ring: 2, tp: 2, ..TestMesh::default() };
        assert_equal(name, &on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh), &wanted);
        let (config, merged) = ModelSource::at(&fixture(&folder)).and_then(ModelSource::load).expect("fits");
        let (of_merged, _) = on_one_device(&Decoder::new(config).expect("supported"), &merged, &batch);
        let off = relative_l2(&of_merged.logits, &wanted.logits);
        assert!(off < 1e-5, "{name}: merged, logits are off by {off:e}");

        let out = tempfile::tempdir().expect("a folder");
        let lora = decoder.lora().expect("adapters");
        adapter::save(out.path(), &fixture(model), lora, &weights).expect("room");
        let read = adapter::load(out.path()).expect("what was saved");
        assert_eq!(&read.lora, lora, "{name}");
        assert_eq!(read.weights.len(), 2 * decoder.adapters().count(), "{name}");
    }
}

#[test]
fn all_linear_is_every_linear_layer_but_the_head() {
    let lora = || Lora::new(2, 1.0, vec!["all-linear".into()]).expect("a word");
    for (model, layers) in [("llama", 2 * 7), ("qwen3_moe", 3 * 4 + 3 + 2 * (6 * 3 + 1))] {
        let (decoder, ..) = load(model);
        let decoder = decoder.with_lora(lora()).expect("fits");
        assert_eq!(decoder.adapters().count(), layers, "{model}");
        assert!(decoder.adapters().all(|(layer, size)| layer != "lm_head" && size.rank == 2));
    }
}

#[test]
fn an_adapters_gradients_are_those_of_the_merged_matrix() {
    let (decoder, weights, batch, _) = peft("llama");
    compare_with_merged("llama", (decoder, weights, batch));
    let targets = [&TARGETS[..], &[ROUTER]].concat();
    for name in ["qwen3_moe", "qwen3_moe_balanced"] {
        compare_with_merged(name, adapted(name, &targets, 0.0));
    }
}

fn compare_with_merged(model: &str, (decoder, weights, batch): (Decoder, Weights, Batch)) {
    let (got, _) = on_one_device(&decoder, &weights, &batch);
    let lora = decoder.lora().expect("adapters");
    let merged = lora.merge(weights.clone()).expect("fits");
    let plain = Decoder::new(decoder.config().clone()).expect("supported");
    let (of_merged, _) = on_one_device(&plain, &merged, &batch);
    assert!(relative_l2(&got.logits, &of_merged.logits) < 1e-5, "{model}");
    let mut adapters = 0;
    let flat = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
    for (name, d_weight) in &of_merged.gradients {
        let Some(a) = weights.get(&name.replace(".weight", ".lora_A.weight")) else { continue };
        let b = &weights[&name.replace(".weight", ".lora_B.weight")];
        let d_weight = Tensor::from_slice(d_weight, merged[name].dims(), &Device::Cpu).expect("its size");
        let size = decoder.adapter(name.strip_suffix(".weight").expect("a matrix")).expect("an adapter");
        let d_a = (b.t().and_then(|b| b.matmul(&d_weight)).expect("fits") * size.scale).expect("f32");
        let d_b = (a.t().and_then(|a| d_weight.matmul(&a)).expect("fits") * size.scale).expect("f32");
        for (part, wanted) in [(".lora_A.weight", d_a), (".lora_B.weight", d_b)] {
            let name = name.replace(".weight", part);
            let off = relative_l2(&got.gradients[&name], &flat(&wanted));
            assert!(off < 1e-5, "{model}: {name} is off by {off:e}");
            adapters += 1;
        }
    }
    assert_eq!(adapters, got.gradients.len(), "{model}");
}

#[test]
fn new_adapters_change_nothing_and_are_saved_as_they_are() {
    let (plain, weights, batch, _) = load("llama");
    let lora = Lora::new(4, 8.0, ["k_proj", "gate_proj"].map(str::to_owned).to_vec()).expect("possible");
    let decoder = plain.clone().with_lora(lora.clone()).expect("fits");
    let adapted = decoder.adapted(weights.clone(), 5).expect("small");
    assert_eq!(adapted.len(), weights.len() + 2 * 2 * 2);
    assert_eq!(on_one_device(&decoder, &adapted, &batch).0.logits, on_one_device(&plain, &weights, &batch).0.logits);

    let out = tempfile::tempdir().expect("a folder");
    adapter::save(out.path(), &fixture("llama"), &lora, &adapted).expect("room");
    let read = adapter::load(out.path()).expect("what was saved");
    assert_eq!((&read.base, &read.lora), (&Base::Folder(fixture("llama")), &lora));
    assert_eq!(read.weights.len(), 8);
    for (name, tensor) in &read.weights {
        let flat = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
        assert_eq!(flat(tensor), flat(&adapted[name]), "{name}");
    }
    let (_, merged) = ModelSource::at(out.path()).and_then(ModelSource::load).expect("fits");
    assert!(merged.keys().eq(weights.keys()));
    assert!(folder::load(out.path()).is_err(), "it is no model by itself");
}

/// Each expert has an adapter of its own, saved by PEFT's names.
#[test]
fn adapters_of_experts_are_saved_by_peft_s_names_and_read_again() {
    let (decoder, weights, batch) = adapted("qwen3_moe", &["gate_proj", "down_proj", ROUTER], 0.0);
    let lora = decoder.lora().expect("adapters").clone();
    let out = tempfile::tempdir().expect("a folder");
    adapter::save(out.path(), &fixture("qwen3_moe"), &lora, &weights).expect("room");
    let file = out.path().join("adapter_model.safetensors");
    let tensors = candle_core::safetensors::load(file, &Device::Cpu).expect("what was saved");
    let (hidden, wide, experts) = (32, 24, 6);
    for (name, shape) in [
        ("model.layers.2.mlp.experts.5.gate_proj.lora_A.weight", [3, hidden]),
        ("model.layers.2.mlp.experts.5.gate_proj.lora_B.weight", [wide, 3]),
        ("model.layers.0.mlp.experts.0.down_proj.lora_A.weight", [3, wide]),
        ("model.layers.0.mlp.experts.0.down_proj.lora_B.weight", [hidden, 3]),
        ("model.layers.0.mlp.gate.lora_B.weight", [experts, 3]),
        ("model.layers.1.mlp.down_proj.lora_B.weight", [hidden, 3]),
    ] {
        assert_eq!(tensors[&format!("base_model.model.{name}")].dims(), shape, "{name}");
    }
    // The model has two sparse layers and a dense one.
    assert_eq!(tensors.len(), 2 * (2 * (2 * experts + 1) + 2));
    let (config, merged) = ModelSource::at(out.path()).and_then(ModelSource::load).expect("fits");
    let (of_adapters, _) = on_one_device(&decoder, &weights, &batch);
    let (of_merged, _) = on_one_device(&Decoder::new(config).expect("supported"), &merged, &batch);
    assert!(relative_l2(&of_merged.logits, &of_adapters.logits) < 1e-5);
}

#[test]
fn adapters_that_cannot_be_are_refused() {
    let lora = |rank, alpha, targets: &[&str]| Lora::new(rank, alpha, targets.iter().map(|t| (*t).into()).collect());
    let says = |result: Result<Lora, Error>, words: &[&str]| {
        let message = result.expect_err("impossible").to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    says(lora(0, 1.0, &["q_proj"]), &["rank is 0"]);
    says(lora(2, f64::NAN, &["q_proj"]), &["alpha is NaN"]);
    says(lora(2, 1.0, &[]), &["no layer", "all-linear"]);
    says(lora(2, 1.0, &["q_proj", "all-linear"]), &["'all-linear'", "alone"]);
    says(lora(2, 1.0, &["q_proj", "q_proj"]), &["twice"]);
    let dropping = |share| lora(2, 1.0, &["q_proj"]).and_then(|lora| lora.with_dropout(share));
    for share in [-0.1, 1.0, f64::NAN, 0.99999999] {
        says(dropping(share), &["dropout is", &share.to_string(), "below 1"]);
    }
    assert!(dropping(0.0).is_ok() && dropping(0.9999999).is_ok());
    for (model, target, possible) in [
        ("qwen3", ROUTER, "up_proj"),
        ("llama", "wq", "q_proj"),
        ("phi3", "q_proj", "qkv_proj"),
        ("mixtral", "up_proj", "w3"),
    ] {
        let (decoder, ..) = load(model);
        let message = decoder.with_lora(lora(2, 1.0, &[target]).expect("possible")).expect_err("no such layer");
        let message = message.to_string();
        assert!(message.contains(&format!("'{target}'")) && message.contains(possible), "{message}");
    }

    let out = tempfile::tempdir().expect("a folder");
    std::fs::copy(
        fixture("llama_lora").join("adapter_model.safetensors"),
        out.path().join("adapter_model.safetensors"),
    )
    .expect("room");
    let config: Value = folder::config_json(&fixture("llama")).expect("JSON");
    assert!(config.is_object());
    let text = std::fs::read_to_string(fixture("llama_lora").join(adapter::CONFIG)).expect("the fixture");
    let given: Value = serde_json::from_str(&text).expect("JSON");
    let base = fixture("llama");
    for (key, value, words) in [
        ("use_dora", json!(true), &["`use_dora` is true", "default, false"][..]),
        ("bias", json!("all"), &["`bias` is \"all\"", "default, \"none\""]),
        ("alora_invocation_tokens", json!([5, 6]), &["`alora_invocation_tokens` is [5,6]", "default, null"]),
        ("layer_replication", json!([[0, 2], [1, 2]]), &["`layer_replication` is [[0,2],[1,2]]", "default, null"]),
        ("use_qalora", json!(true), &["`use_qalora` is true", "default, false"]),
        ("target_parameters", json!(["mlp.experts.down_proj"]), &["`target_parameters` is", "default, null"]),
        ("modules_to_save", json!(["lm_head"]), &["`modules_to_save` is [\"lm_head\"]", "default, null"]),
        ("trainable_token_indices", json!([1]), &["`trainable_token_indices`", "default, null"]),
        ("fan_in_fan_out", json!(true), &["`fan_in_fan_out`", "default, false"]),
        ("lora_bias", json!(true), &["`lora_bias`", "default, false"]),
        ("kasa_config", json!({ "beta": 1 }), &["`kasa_config`", "default, null"]),
        ("a_later_key", json!(3), &["`a_later_key` is 3", "unknown"]),
        ("init_lora_weights", json!("pissa"), &["`init_lora_weights` is \"pissa\"", "path_initial_model", "default"]),
        ("init_lora_weights", json!("pissa_niter_16"), &["pissa_niter_16", "path_initial_model"]),
        ("init_lora_weights", json!("olora"), &["\"olora\"", "path_initial_model"]),
        ("init_lora_weights", json!("corda"), &["\"corda\"", "path_initial_model"]),
        ("init_lora_weights", json!("loftq"), &["\"loftq\"", "path_initial_model"]),
        ("init_lora_weights", json!("lora_ga"), &["\"lora_ga\"", "path_initial_model"]),
        ("init_lora_weights", json!("later"), &["\"later\"", "unknown", "gaussian"]),
        ("peft_type", json!("IA3"), &["peft_type", "LORA"]),
        ("rank_pattern", json!({ "q_proj": 5 }), &["q_proj.lora_A"]),
        ("rank_pattern", json!({ "q_proj": 0 }), &["rank is 0"]),
        ("rank_pattern", json!({ "(q_proj": 3 }), &["'(q_proj'"]),
        ("alpha_pattern", json!({ "q_proj": -1 }), &["alpha is -1"]),
        ("exclude_modules", json!(["q_proj"]), &["q_proj.lora_"]),
        ("layers_to_transform", json!([0]), &["model.layers.1."]),
        ("layers_pattern", json!("layers"), &["`layers_pattern`", "`layers_to_transform`"]),
        ("target_modules", Value::Null, &["`target_modules` is null"]),
        ("target_modules", json!(["q_proj", "lm_head"]), &["'lm_head'", "q_proj, k_proj"]),
        ("target_modules", json!(".*_project"), &["no layer", ".*_project"]),
        ("base_model_name_or_path", json!("nowhere/else"), &["nowhere/else", "hf download nowhere/else"]),
        ("r", json!(5), &["lora_A"]),
        ("target_modules", json!(["q_proj"]), &["lora_"]),
        ("target_modules", json!(["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]), &["k_proj.lora_A"]),
    ] {
        let mut config = given.clone();
        config["base_model_name_or_path"] = base.to_string_lossy().into();
        config[key] = value;
        std::fs::write(out.path().join(adapter::CONFIG), config.to_string()).expect("room");
        let message = ModelSource::at(out.path()).and_then(ModelSource::load).expect_err("not plain").to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{key}: {message}");
    }
    // Keys that change nothing, or give the default in other words, are accepted.
    for (key, value) in [
        ("init_lora_weights", json!("gaussian")),
        ("init_lora_weights", json!("eva")),
        ("init_lora_weights", json!("orthogonal")),
        ("init_lora_weights", json!("mica")),
        ("init_lora_weights", json!(false)),
        ("corda_config", json!({ "corda_method": "kpm" })),
        ("modules_to_save", json!([])),
        ("a_later_key", json!(false)),
        ("layers_to_transform", json!([])),
        ("layers_to_transform", json!([0, 1])),
    ] {
        let mut config = given.clone();
        config["base_model_name_or_path"] = base.to_string_lossy().into();
        config[key] = value.clone();
        std::fs::write(out.path().join(adapter::CONFIG), config.to_string()).expect("room");
        let read = ModelSource::at(out.path()).and_then(ModelSource::load);
        assert!(read.is_ok(), "{key} {value}: {:?}", read.err());
        let frozen = adapter::describe(out.path()).expect("read").frozen;
        assert_eq!(frozen.is_some(), value == "mica", "{key} {value}");
    }
}
