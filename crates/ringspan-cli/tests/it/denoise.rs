//! Tests of `denoise`, on the smallest models of the video crate's fixtures.

use crate::support::video_fixtures::{copy, fixture};
use crate::support::{Bench, Tensor, read, write};
use crate::video::{FLAGS, Video, distance, pipeline};
use std::collections::BTreeMap;

#[test]
fn denoise_is_the_loop_of_diffusers_on_every_mesh() {
    let video = Video::denoise();
    let steps = read(&fixture("transformer/loops/reference.safetensors"))["euler.one.steps"].values();
    let last = &steps[steps.len() / 4 * 3..];
    let flags = "--embeds in.safetensors --steps 4 --scheduler euler";
    let shift = std::fs::read_to_string(fixture("transformer/loops/euler/scheduler_config.json")).expect("a file");
    let shift: serde_json::Value = serde_json::from_str(&shift).expect("JSON");
    for mesh in ["", "--ring 2 --ulysses 1", "--cfg-parallel"] {
        let found = video.results(&format!("{flags} --shift {} {mesh}", shift["shift"]));
        let apart = distance(&found["latents"], last);
        assert!(apart < 2e-5, "{mesh}: {apart:.2e}");
    }
}

/// A distilled adapter: few steps without guidance, and so without a negative prompt.
#[test]
fn denoise_with_an_adapter_is_the_loop_of_diffusers_on_every_mesh() {
    let tensors = read(&fixture("lora/reference.safetensors"));
    let inputs = [("latents", tensors["latents"].clone()), ("prompt_embeds", tensors["encoder_hidden_states"].clone())];
    let video = Video { bench: Bench::new(&inputs), command: "denoise", model: fixture("transformer/t2v") };
    let steps = tensors["steps"].values();
    let last = &steps[steps.len() / 4 * 3..];
    let lora = fixture("lora/original.safetensors");
    let flags = "--embeds in.safetensors --steps 4 --scheduler euler --shift 3 --guidance 1";
    for mesh in ["", "--ring 2 --ulysses 2"] {
        let found = video.results(&format!("{flags} {mesh} --lora {}", lora.display()));
        let apart = distance(&found["latents"], last);
        assert!(apart < 2e-5, "{mesh}: {apart:.2e}");
    }
    let half = video.results(&format!("{flags} --lora {}=0.5", lora.display()));
    assert!(distance(&half["latents"], last) > 1e-3, "the scale changes nothing");
}

#[test]
fn heads_are_exchanged_in_parts_where_ranks_exchange_them() {
    let video = Video::denoise();
    let flags = "--embeds in.safetensors --steps 2 --scheduler euler";
    let at_once = video.results(&format!("{flags} --ulysses 2"));
    assert_eq!(video.results(&format!("{flags} --ulysses 2 --head-chunks 2")), at_once);
    let plan = video.succeeds(&format!("{flags} --ulysses 2 --head-chunks 2 --out out.safetensors"));
    assert!(plan.contains("ulysses 2 (heads in up to 2 parts)"), "{plan}");
    let alone = format!("{flags} --ring 2 --head-chunks 2 --out new.safetensors");
    video.refused(&alone, &["--head-chunks", "2 parts", "have no effect"]);
}

#[test]
fn weights_are_not_sharded_between_threads_that_share_them() {
    let video = Video::denoise();
    let flags = "--embeds in.safetensors --steps 2 --scheduler euler --shard-weights --out new.safetensors";
    for mesh in ["", "--ring 2"] {
        video.refused(&format!("{flags} {mesh}"), &["--shard-weights", "has no effect", "one process"]);
    }
}

#[test]
fn denoise_says_how_many_steps_were_skipped() {
    let video = Video::denoise();
    let flags = "--embeds in.safetensors --steps 9 --scheduler euler";
    let run = |more: &str| {
        let said = video.succeeds(&format!("{flags} {more} --out out.safetensors"));
        (said, read(&video.bench.path("out.safetensors")))
    };
    let (said, all) = run("");
    assert!(!said.contains("cache"), "{said}");
    let (_, zero) = run("--cache-threshold 0");
    assert_eq!(zero, all);
    let (said, some) = run("--cache-threshold 1e6 --ring 2");
    for words in ["blocks are skipped in up to 7 steps", "blocks were skipped in 7 of 9 steps (threshold 1000000)"] {
        assert!(said.contains(words), "{said}");
    }
    assert!(distance(&some["latents"], &all["latents"].values()) > 1e-3);
    let flags = "--embeds in.safetensors --out new.safetensors --scheduler euler";
    video.refused(&format!("{flags} --steps 2 --cache-threshold 0.1"), &["cache threshold 0.1 has no effect", "[2]"]);
    video.refused(&format!("{flags} --steps 4 --cache-threshold=-1"), &["cache threshold -1", "at least 0"]);
}

#[test]
fn denoise_takes_a_gguf_file_whose_matrices_stay_quantized() {
    let tensors = read(&fixture("gguf/reference.safetensors"));
    let inputs = [("latents", "hidden_states"), ("prompt_embeds", "encoder_hidden_states")];
    let inputs = inputs.map(|(name, of)| (name, tensors[of].clone()));
    let video = Video { bench: Bench::new(&inputs), command: "denoise", model: fixture("gguf/wan.gguf") };
    let flags = "--embeds in.safetensors --steps 2 --scheduler euler --guidance 1";
    let said = video.succeeds(&format!("{flags} --out out.safetensors"));
    let stored = read(&video.bench.path("out.safetensors"));
    let bytes = |said: &str| -> u64 {
        let line = said.lines().find_map(|line| line.strip_prefix("weights   ")).expect("a line about weights");
        line.split(' ').next().and_then(|bytes| bytes.parse().ok()).expect("a number")
    };
    let decoded = video.succeeds(&format!("{flags} --dtype f32 --out f32.safetensors"));
    assert!(bytes(&said) * 3 < bytes(&decoded), "{said}{decoded}");
    let f32 = read(&video.bench.path("f32.safetensors"));
    assert!(distance(&f32["latents"], &stored["latents"].values()) < 1e-4);
    let two = video.results(&format!("{flags} --ring 2"));
    assert!(distance(&two["latents"], &stored["latents"].values()) < 1e-5);
    std::fs::write(video.bench.path("bad.gguf"), "GGUF").expect("written");
    let bad = Video { model: video.bench.path("bad.gguf"), ..video };
    bad.refused(&format!("{flags} --out new.safetensors"), &["--model", "bad.gguf", "not a whole GGUF file"]);
}

#[test]
fn denoise_refuses_what_it_cannot_do_and_leaves_nothing() {
    let video = Video::denoise();
    let flags = "--embeds in.safetensors --out new.safetensors --steps 1";
    video.refused(flags, &["--scheduler is needed"]);
    let flags = format!("{flags} --scheduler euler");
    video.refused(
        &format!("{flags} --cfg-parallel --ring 0"),
        &["--ring 0 x --ulysses 1 x branches of --cfg-parallel 2"],
    );
    video.refused(&format!("{flags} --guidance-2 3"), &["--guidance-2 has no effect"]);
    video.refused(&format!("{flags} --frames 9 --height 64 --width 64"), &["--frames", "no effect"]);
    video.refused(&format!("{flags} --guidance 1 --cfg-parallel"), &["guidance"]);
    video.refused(&format!("{flags} --lora-2 a.safetensors"), &["--lora-2 has no effect"]);
    video.refused(&format!("{flags} --lora none.safetensors"), &["--lora", "none.safetensors"]);
    video.refused("--embeds none.safetensors --out new.safetensors --steps 1 --scheduler euler", &["none.safetensors"]);
    // An adapter that does not fit is named by its own flag, also if there are several.
    let [good, other] = ["lora/original.safetensors", "vae/tiny/reference.safetensors"].map(fixture);
    let both = format!("--lora {} --lora {}", good.display(), other.display());
    video.refused(&format!("{flags} {both}"), &["--lora: ", "vae/tiny/reference.safetensors", "has no effect"]);
    let pipeline = pipeline();
    let flags = format!("{FLAGS} --out new.gif --lora-2 {}", other.display());
    pipeline.refused(&flags, &["--lora-2: ", "vae/tiny/reference.safetensors", "has no effect"]);
}

/// A folder with a transformer and Euler's method over so many time steps: with one step, the latents lose the velocity at this time step.
fn with_time_steps(kind: &str, time_steps: usize) -> Video {
    let tensors = read(&fixture(&format!("transformer/{kind}/reference.safetensors")));
    let x = &tensors["hidden_states"];
    let channel: usize = x.shape[2..].iter().product();
    let channels = |values: &[f32]| Tensor::f32(&[&[1, values.len() / channel], &x.shape[2..]].concat(), values);
    // The condition follows the 4 channels of the latents.
    let (values, prompt) = (x.values(), tensors["encoder_hidden_states"].clone());
    let (latents, condition) = values.split_at(4 * channel);
    let mut inputs = vec![("latents", channels(latents)), ("prompt_embeds", prompt)];
    if !condition.is_empty() {
        inputs.push(("condition", channels(condition)));
    }
    for (name, of_fixture) in [
        ("image_embeds", "encoder_hidden_states_image"),
        ("control", "control_hidden_states"),
        ("control_scale", "control_hidden_states_scale"),
    ] {
        if let Some(tensor) = tensors.get(of_fixture) {
            inputs.push((name, tensor.clone()));
        }
    }
    let video = Video { bench: Bench::new(&inputs), command: "denoise", model: "model".into() };
    copy(&fixture(&format!("transformer/{kind}")), &video.bench.path("model/transformer"));
    std::fs::create_dir(video.bench.path("model/scheduler")).expect("a folder");
    let scheduler = serde_json::json!({
        "_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0, "num_train_timesteps": time_steps,
    });
    std::fs::write(video.bench.path("model/scheduler/scheduler_config.json"), scheduler.to_string()).expect("written");
    video
}

/// The fixtures have velocities of diffusers at one time step, which is the first of a run with so many time steps. One tensor of the file
/// is changed after the other, which must change the latents.
#[test]
fn denoise_takes_the_conditions_of_its_file_as_diffusers_does() {
    let flags = "--embeds in.safetensors --steps 1 --guidance 1";
    for (kind, time_steps, conditions) in [
        ("i2v", 500, &["image_embeds", "condition"][..]),
        ("flf2v", 500, &["image_embeds", "condition"]),
        ("vace", 250, &["control", "control_scale"]),
    ] {
        let video = with_time_steps(kind, time_steps);
        let velocity = read(&fixture(&format!("transformer/{kind}/reference.safetensors")))["out"].values();
        let inputs = read(&video.bench.path("in.safetensors"));
        let wanted: Vec<f32> = inputs["latents"].values().iter().zip(&velocity).map(|(x, v)| x - v).collect();
        for mesh in ["", "--ring 2 --ulysses 2"] {
            let apart = distance(&video.results(&format!("{flags} {mesh}"))["latents"], &wanted);
            assert!(apart < 1e-5, "{kind} {mesh}: {apart:.2e}");
        }
        for name in conditions {
            // Not a multiple, of which a norm would make the same.
            let reversed: Vec<f32> = inputs[*name].values().into_iter().rev().collect();
            let changed: Vec<(&str, Tensor)> = inputs
                .iter()
                .map(|(of, tensor)| {
                    (of.as_str(), if of == name { Tensor::f32(&tensor.shape, &reversed) } else { tensor.clone() })
                })
                .collect();
            write(&video.bench.path("in.safetensors"), &changed);
            let apart = distance(&video.results(flags)["latents"], &wanted);
            println!("{kind}: `{name}` changes the latents by {apart:.2e}");
            assert!(apart > 1e-4, "{kind}: `{name}` changes the latents by {apart:.2e}");
        }
    }
}

/// A pipeline's folder of the two transformers of the fixture `loops`.
fn two_transformers() -> Video {
    let video = Video { model: "model".into(), ..Video::denoise() };
    for (from, to) in [("t2v", "transformer"), ("loops/transformer_2", "transformer_2"), ("loops/unipc", "scheduler")] {
        copy(&fixture(&format!("transformer/{from}")), &video.bench.path("model").join(to));
    }
    let index = serde_json::json!({ "_class_name": "WanPipeline", "boundary_ratio": 0.875 });
    std::fs::write(video.bench.path("model/model_index.json"), index.to_string()).expect("written");
    video
}

/// An adapter of the second transformer alone, and a second transformer into which the same product has been added.
#[test]
fn an_adapter_of_the_second_transformer_is_what_its_merged_weights_are() {
    let video = two_transformers();
    let flags = "--embeds in.safetensors --steps 4 --guidance 4 --guidance-2 3";
    let run = |more: &str| video.results(&format!("{flags} {more}"))["latents"].clone();
    let [a, b] = [Tensor::random(&[2, 24], 1), Tensor::random(&[24, 2], 2)];
    let name = "transformer.blocks.1.attn1.to_q";
    let tensors = [(format!("{name}.lora_A.weight"), a.clone()), (format!("{name}.lora_B.weight"), b.clone())];
    let tensors: Vec<(&str, Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    write(&video.bench.path("adapter.safetensors"), &tensors);
    let (plain, second, first) = (run(""), run("--lora-2 adapter.safetensors"), run("--lora adapter.safetensors"));
    let both = run("--lora adapter.safetensors --lora-2 adapter.safetensors");
    let far = |a: &Tensor, b: &Tensor| distance(a, &b.values());
    for (name, apart) in [
        ("the second", far(&second, &plain)),
        ("the first", far(&first, &plain)),
        ("the second instead of the first", far(&second, &first)),
        ("the second beside the first", far(&both, &first)),
    ] {
        assert!(apart > 1e-4, "{name} changes the latents by {apart:.2e}");
    }

    let file = video.bench.path("model/transformer_2/diffusion_pytorch_model.safetensors");
    let mut weights: BTreeMap<String, Tensor> = read(&file);
    let (matrix, a, b) = (&weights["blocks.1.attn1.to_q.weight"], a.values(), b.values());
    let product = |row: usize, column: usize| b[2 * row] * a[column] + b[2 * row + 1] * a[24 + column];
    let sums = matrix.values().iter().enumerate().map(|(at, x)| x + product(at / 24, at % 24)).collect::<Vec<f32>>();
    weights.insert("blocks.1.attn1.to_q.weight".into(), Tensor::f32(&[24, 24], &sums));
    let weights: Vec<(&str, Tensor)> = weights.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    write(&file, &weights);
    let apart = far(&run(""), &second);
    assert!(apart < 1e-5, "merged: {apart:.2e}");
}

#[test]
fn in_bf16_latents_and_frames_are_close_to_those_of_f32() {
    let denoise = Video::denoise();
    let of_denoise = "--embeds in.safetensors --steps 4 --scheduler euler";
    for (video, flags, name) in [(&denoise, of_denoise, "latents"), (&pipeline(), FLAGS, "frames")] {
        let [f32, bf16] = ["f32", "bf16"].map(|dtype| video.results(&format!("{flags} --dtype {dtype}"))[name].clone());
        let apart = distance(&bf16, &f32.values());
        println!("{name}: {apart:.2e}");
        assert!(apart > 1e-5 && apart < 3e-2, "{name}: {apart:.2e}");
    }
}

#[test]
fn lines_of_progress_tell_the_time_that_is_left() {
    let video = Video::denoise();
    let said = video.succeeds("--embeds in.safetensors --steps 4 --scheduler euler --out out.safetensors");
    let left = |step: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(&format!("step {step}/4, ")));
        line.unwrap_or_else(|| panic!("no line of step {step}: {said}"))
            .split_once(" left, ")
            .expect("the time that is left")
    };
    let (seconds, rate) = left("1");
    assert!(seconds.strip_suffix(" s").is_some_and(|seconds| seconds.parse::<u32>().is_ok()), "{said}");
    assert!(
        rate.strip_suffix(" GFLOP/s").is_some_and(|rate| rate.parse::<f64>().is_ok_and(|rate| rate > 0.0)),
        "{said}"
    );
    assert_eq!(left("4").0, "0 s", "{said}");
}
