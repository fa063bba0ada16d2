//! Adapters against what diffusers loads, on one rank and on meshes.

use crate::support::{Pass, distance, fixture, message};
use candle_core::{Device, Tensor};
use ringspan_video::Result;
use ringspan_video::denoise::{DenoiseFolder, DenoiseInputs, DenoiseSettings, denoise};
use ringspan_video::lora::LoraSource;
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::scheduler::{SchedulerConfig, SchedulerKind};
use ringspan_video::transformer::{WanFolder, WeightType};
use std::collections::HashMap;
use std::path::Path;

const FILES: [(&str, &str); 3] =
    [("diffusers", "diffusers"), ("original", "original.safetensors"), ("musubi", "musubi.safetensors")];

fn source(file: &str, scale: f64) -> LoraSource {
    LoraSource { path: fixture("../lora").join(file), scale }
}

fn reference() -> HashMap<String, Tensor> {
    crate::support::reference("../lora")
}

fn pass(sources: &[LoraSource], weights: WeightType) -> Result<Pass> {
    let folder = WanFolder::open(&fixture("t2v"))?.with_loras(sources)?;
    Ok(Pass { weights: folder.load(weights)?, folder, inputs: reference() })
}

/// The file `original` with other tensors, as `change` makes them of its own.
fn changed(change: impl Fn(&mut HashMap<String, Tensor>)) -> Result<(tempfile::TempDir, LoraSource)> {
    let mut tensors = candle_core::safetensors::load(fixture("../lora/original.safetensors"), &Device::Cpu)?;
    change(&mut tensors);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("adapter.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    Ok((folder, LoraSource { path, scale: 1.0 }))
}

#[test]
fn adapters_of_every_form_compute_what_diffusers_loads() -> Result<()> {
    let inputs = reference();
    for weights in [WeightType::F32, WeightType::AsStored] {
        let without = pass(&[], weights)?.velocities((1, 1))?.swap_remove(0);
        for (name, file) in FILES {
            let got = pass(&[source(file, 1.0)], weights)?.velocities((1, 1))?.swap_remove(0);
            let far = distance(&got, &inputs[name]);
            assert!(far < 2e-5, "{name}, weights {weights}: {far:e}");
            assert!(distance(&got, &without) > 1e-2, "{name} changes little");
        }
        let both = [source("diffusers", 0.5), source("original.safetensors", 1.25)];
        let far = distance(&pass(&both, weights)?.velocities((1, 1))?[0], &inputs["both"]);
        assert!(far < 3e-5, "two adapters, weights {weights}: {far:e}");
    }
    Ok(())
}

#[test]
fn adapters_in_bf16_are_close_and_every_mesh_gives_the_velocity_of_one_rank() -> Result<()> {
    let (inputs, sources) = (reference(), [source("original.safetensors", 1.0)]);
    let far = distance(&pass(&sources, WeightType::Bf16)?.velocities((1, 1))?[0], &inputs["original"]);
    assert!(far > 1e-5 && far < 3e-2, "{far:e}");
    let pass = pass(&sources, WeightType::F32)?;
    let one = pass.velocities((1, 1))?.swap_remove(0);
    for mesh in [(2, 1), (1, 2), (3, 1), (2, 2), (5, 1)] {
        for got in pass.velocities(mesh)? {
            let far = distance(&got, &one);
            assert!(far < 1e-5, "{mesh:?}: {far:e}");
        }
    }
    Ok(())
}

/// As distilled adapters are used: few steps, and no negative prompt anywhere.
#[test]
fn a_few_steps_without_guidance_are_those_of_diffusers() -> Result<()> {
    let tensors = reference();
    let inputs = DenoiseInputs {
        prompt_embeds: tensors["encoder_hidden_states"].clone(),
        negative_prompt_embeds: None,
        latents: tensors["latents"].clone(),
        image_embeds: None,
        condition: None,
        control: None,
        control_scale: None,
    };
    let scheduler = SchedulerConfig { shift: 3.0, ..SchedulerConfig::new(SchedulerKind::Euler) };
    let settings = DenoiseSettings { steps: 4, scheduler, guidance: [1.0; 2], cache_threshold: 0.0 };
    let folder = DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?;
    let folder = folder.with_loras(0, &[source("original.safetensors", 1.0)])?;
    for (ring, ulysses) in [(1, 1), (2, 2), (3, 1)] {
        let mesh = VideoMesh { ring, ulysses, ..VideoMesh::single() };
        let got = denoise(&folder, &mut VideoRanks::start(&mesh)?, &inputs, &settings, |_| Ok(()))?
            .expect("this process has rank 0");
        let far = distance(&got, &tensors["steps"].get(3)?);
        println!("{mesh}: {far:e}");
        assert!(far < 2e-5, "{mesh}: {far:e}");
    }
    Ok(())
}

/// Norms and tensors without a linear layer, which diffusers leaves out: here they count. A difference of a norm's weight by 1
/// doubles it where it was 1.
#[test]
fn differences_of_norms_and_of_patch_embeddings_count() -> Result<()> {
    let plain = WanFolder::open(&fixture("t2v"))?.load(WeightType::F32)?;
    let (_folder, source) = changed(|tensors| {
        let ones = |shape: &[usize]| Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu).expect("ones");
        tensors.clear();
        tensors.insert("diffusion_model.blocks.1.norm3.diff".into(), ones(&[24]));
        tensors.insert("diffusion_model.blocks.0.cross_attn.norm_q.diff".into(), ones(&[24]));
        tensors.insert("diffusion_model.blocks.0.modulation.diff".into(), ones(&[1, 6, 24]));
        tensors.insert("diffusion_model.patch_embedding.lora_down.weight".into(), ones(&[2, 4, 1, 2, 2]));
        tensors.insert("diffusion_model.patch_embedding.lora_up.weight".into(), ones(&[24, 2, 1, 1, 1]));
    })?;
    let twice = LoraSource { scale: 0.5, ..source };
    let changed = WanFolder::open(&fixture("t2v"))?.with_loras(&[twice])?.load(WeightType::F32)?;
    let added = |name: &str| -> Result<Vec<f32>> {
        let difference = (changed[name].tensor()? - plain[name].tensor()?)?;
        Ok(difference.flatten_all()?.to_vec1()?)
    };
    for (name, wanted) in [
        ("blocks.1.norm2.weight", 0.5),
        ("blocks.0.attn2.norm_q.weight", 0.5),
        ("blocks.0.scale_shift_table", 0.5),
        ("patch_embedding.weight", 1.0),
        ("blocks.0.norm2.weight", 0.0),
    ] {
        assert!(added(name)?.iter().all(|x| (x - wanted).abs() < 1e-6), "{name}");
    }
    Ok(())
}

#[test]
fn what_has_no_effect_or_does_not_fit_is_refused_by_name() -> Result<()> {
    let ones = |shape: &[usize]| Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu).expect("ones");
    let insert = |name: &'static str, shape: &'static [usize]| {
        move |tensors: &mut HashMap<String, Tensor>| drop(tensors.insert(name.into(), ones(shape)))
    };
    let refused = |change: &dyn Fn(&mut HashMap<String, Tensor>), words: &[&str]| -> Result<()> {
        let (_folder, source) = changed(change)?;
        let found = message(WanFolder::open(&fixture("t2v"))?.with_loras(&[source]));
        for word in words {
            assert!(found.contains(word), "'{word}' is not in: {found}");
        }
        Ok(())
    };
    let q = "diffusion_model.blocks.0.self_attn.q";
    refused(
        &insert("diffusion_model.blocks.7.self_attn.q.diff_b", &[24]),
        &["blocks.7.self_attn.q.diff_b", "no such"],
    )?;
    refused(&insert("diffusion_model.blocks.0.cross_attn.k_img.diff_b", &[24]), &["k_img", "no such module"])?;
    refused(&insert("diffusion_model.blocks.0.self_attn.q.dora_scale", &[24]), &["dora_scale", "no tensor of a LoRA"])?;
    refused(&insert("lora_te_text_model_encoder.lora_down.weight", &[4, 24]), &["lora_te", "no such module"])?;
    refused(&insert("diffusion_model.blocks.0.norm3.alpha", &[]), &["norm3.alpha", "no product"])?;
    refused(&insert("transformer.blocks.0.attn1.to_q.lora_A.weight", &[4, 24]), &["to_q.lora_A", "same part"])?;
    refused(&insert("diffusion_model.blocks.0.self_attn.norm_q.diff_b", &[24]), &["norm_q.diff_b", "no bias"])?;
    refused(&|tensors| drop(tensors.remove(&format!("{q}.lora_up.weight"))), &["q.lora_down", "other matrix"])?;
    refused(&|tensors| drop(tensors.insert(format!("{q}.lora_up.weight"), ones(&[24, 3]))), &["[24, 3]", "[4, 24]"])?;
    refused(&|tensors| drop(tensors.insert(format!("{q}.diff_b"), ones(&[23]))), &["[23]", "[24]"])?;
    refused(&|tensors| drop(tensors.insert(format!("{q}.alpha"), ones(&[2]))), &["alpha", "one finite number"])?;
    let of = |path: &Path| {
        let folder = WanFolder::open(&fixture("t2v")).expect("a fixture");
        message(folder.with_loras(&[LoraSource { path: path.into(), scale: 1.0 }]))
    };
    let several = of(&fixture("../lora"));
    assert!(several.contains("pytorch_lora_weights.safetensors") && several.contains("this has 3"), "{several}");
    assert!(of(Path::new("none.safetensors")).contains("none.safetensors"));
    let folder = DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?;
    let second = message(folder.with_loras(1, &[source("original.safetensors", 1.0)]));
    assert!(second.contains("transformer_2") && second.contains("original.safetensors"), "{second}");
    Ok(())
}
