//! The transformer against diffusers, and any number of ranks against one.

use crate::support::{Pass, distance, fixture, message, on_ranks, reference};
use candle_core::{Device, Result as TensorResult, Tensor};
use ringspan::{Mask, Score};
use ringspan_candle::model::UnitWeights;
use ringspan_candle::model::{Unit, stored};
use ringspan_candle::{Attend, AttentionInputs, Weights};
use ringspan_video::Result;
use ringspan_video::lora::LoraSource;
use ringspan_video::noise::noise;
use ringspan_video::tensor_folder::read_json;
use ringspan_video::transformer::{
    BlockPass, Branch, Prompt, TokenGrid, VideoContext, WanConfig, WanFolder, WanTransformer, WeightType,
};
use serde_json::{Value, json};
use std::collections::HashMap;

const KINDS: [&str; 5] = ["t2v", "i2v", "flf2v", "ti2v", "vace"];

#[test]
fn the_velocity_is_that_of_diffusers() -> Result<()> {
    for kind in KINDS {
        for weights in [WeightType::F32, WeightType::AsStored] {
            let pass = Pass::of(kind, weights)?;
            let got = &pass.velocities((1, 1))?[0];
            let far = distance(got, &pass.inputs["out"]);
            assert!(far < 1e-5, "{kind}, weights {weights}: {far:e}");
        }
    }
    Ok(())
}

#[test]
fn in_bf16_the_velocity_is_close() -> Result<()> {
    for kind in KINDS {
        let pass = Pass::of(kind, WeightType::Bf16)?;
        let far = distance(&pass.velocities((1, 1))?[0], &pass.inputs["out"]);
        assert!(far > 1e-5 && far < 3e-2, "{kind}: {far:e}");
    }
    Ok(())
}

/// All (ring, Ulysses) sizes of up to 8 ranks that have heads for all Ulysses ranks.
fn meshes(heads: usize) -> impl Iterator<Item = (usize, usize)> {
    let all = (1..=8).flat_map(|ring| (1..=8 / ring).map(move |ulysses| (ring, ulysses)));
    all.filter(move |(_, ulysses)| *ulysses <= heads)
}

/// On every mesh, all ranks must have the velocity of one rank, and the same bits.
fn check_meshes(pass: &Pass, name: &str) -> Result<()> {
    let one = &pass.velocities((1, 1))?[0];
    for (ring, ulysses) in meshes(pass.folder.transformer().config().num_attention_heads) {
        let all = pass.velocities((ring, ulysses))?;
        for got in &all {
            let far = distance(got, one);
            assert!(far < 1e-5, "{name} on ring {ring} x ulysses {ulysses}: {far:e}");
            let equal = |a: &Tensor| a.flatten_all().and_then(|all| all.to_vec1::<f32>());
            let (got, first): (TensorResult<_>, _) = (equal(got), equal(&all[0]));
            assert_eq!(got?, first?, "all ranks get the same bits");
        }
    }
    Ok(())
}

#[test]
fn every_mesh_gives_the_velocity_of_one_rank() -> Result<()> {
    KINDS.iter().try_for_each(|kind| check_meshes(&Pass::of(kind, WeightType::F32)?, kind))
}

/// Each rank reads and holds its share alone, and has the bits of a rank that holds everything, in each type and with adapters.
#[test]
fn ranks_that_shard_weights_compute_what_ranks_with_all_weights_compute() -> Result<()> {
    let folders =
        [("t2v", WeightType::F32), ("t2v", WeightType::Bf16), ("vace", WeightType::AsStored), ("i2v", WeightType::F32)];
    for (kind, of) in folders {
        let pass = Pass::of(kind, of)?;
        check_shares(&pass, of, kind)?;
    }
    let lora = LoraSource { path: fixture("../lora/original.safetensors"), scale: 1.0 };
    let adapted = WanFolder::open(&fixture("t2v"))?.with_loras(&[lora])?;
    let pass = Pass { weights: adapted.load(WeightType::F32)?, folder: adapted, inputs: reference("t2v") };
    check_shares(&pass, WeightType::F32, "adapted")
}

fn check_shares(pass: &Pass, of: WeightType, name: &str) -> Result<()> {
    // A header of each weight has 2 bytes, and 8 for each of at most five dims. No weight is cut.
    let shapes = pass.folder.transformer().shapes();
    let all = pass.folder.bytes(of) + 42 * shapes.len() as u64;
    let largest = shapes.values().map(|shape| 42 + 4 * shape.iter().product::<usize>() as u64).max();
    for mesh in [(2, 1), (1, 2), (3, 1)] {
        let wanted = pass.velocities(mesh)?;
        let ranks = on_ranks(mesh, |group, alone| {
            let share = pass.folder.load_share(of, group.cp().split(0, group.rank())?)?;
            let before = group.cp().bytes_sent();
            // There are fewer layers than parameters; those that do not exist send nothing.
            let layers = (0..pass.folder.transformer().shapes().len()).map(Unit::Layer);
            for unit in [Unit::Embedding, Unit::Head].into_iter().chain(layers) {
                share.prefetch(unit)?;
                share.unit(unit, &[])?;
            }
            let sent = group.cp().bytes_sent() - before;
            assert_eq!(sent, share.bytes() * (group.size() as u64 - 1), "{name} {mesh:?}");
            // What is announced need not be what is taken.
            share.prefetch(Unit::Embedding)?;
            share.unit(Unit::Head, &[])?;
            Ok((share.bytes(), pass.on_rank(&share, group, alone)?))
        })?;
        let share = all / (mesh.0 * mesh.1) as u64;
        for ((bytes, velocity), wanted) in ranks.into_iter().zip(wanted) {
            assert_eq!(
                velocity.flatten_all()?.to_vec1::<f32>()?,
                wanted.flatten_all()?.to_vec1::<f32>()?,
                "{name} {mesh:?}"
            );
            assert!(bytes < share + largest.unwrap_or(0), "{name} {mesh:?}: {bytes} of {all} bytes");
        }
    }
    Ok(())
}

/// Each branch has the bits that it has alone, and the weights of ranks that share them are sent once for both.
#[test]
fn branches_of_guidance_gather_each_block_once() -> Result<()> {
    for kind in ["t2v", "vace"] {
        let pass = Pass::of(kind, WeightType::F32)?;
        on_ranks((3, 1), |group, alone| {
            let share = pass.folder.load_share(WeightType::F32, group.cp().split(0, group.rank())?)?;
            let (comm, others) = (group.cp().clone(), group.size() as u64 - 1);
            pass.with_prompt(&share, group, alone, |latents, conditions, prompt, video| {
                let (transformer, text) = (pass.folder.transformer(), &pass.inputs["encoder_hidden_states"]);
                let negative_text = text.affine(-0.5, 0.1)?;
                let before = comm.bytes_sent();
                let negative = transformer.prompt(&share, &negative_text, None, video)?;
                let of_one = comm.bytes_sent() - before;
                let prompts = transformer.prompts(&share, &[text, &negative_text], None, video)?;
                let of_two = comm.bytes_sent() - before - of_one;
                assert!(of_one > 0, "{kind}");
                assert_eq!(of_two, of_one, "{kind}: both prompts take one pass over the weights");
                let branches = |prompts: &[&Prompt]| -> Result<(Vec<Vec<f32>>, u64)> {
                    let before = comm.bytes_sent();
                    let branches = prompts.iter().map(|prompt| Branch { prompt, blocks: BlockPass::Compute });
                    let branches = branches.collect();
                    let patches = transformer.forward_branches(&share, latents, conditions, branches, video)?;
                    let patches = patches.iter().map(|patches| patches.flatten_all()?.to_vec1());
                    Ok((patches.collect::<TensorResult<_>>()?, comm.bytes_sent() - before))
                };
                let (first, of_first) = branches(&[prompt])?;
                let (second, of_second) = branches(&[&negative])?;
                let (both, of_both) = branches(&[prompt, &negative])?;
                assert_ne!(first, second, "{kind}: the prompts differ");
                assert_eq!(both, [first, second].concat(), "{kind}");
                assert_eq!(branches(&[&prompts[0], &prompts[1]])?.0, both, "{kind}: prompts of one pass");
                assert_eq!(of_first + of_second - of_both, share.bytes() * others, "{kind}");
                Ok(())
            })
        })?;
    }
    Ok(())
}

/// More heads than ranks, so that none of the meshes is left out: with 5, 7 and 8 Ulysses ranks some have more heads than others. Of 7
/// tokens some ranks have none.
#[test]
fn every_mesh_shares_twelve_heads_and_gives_the_velocity_of_one_rank() -> Result<()> {
    assert_eq!(meshes(12).count(), 20);
    let path = tempfile::tempdir().expect("a folder");
    let config = json!({
        "_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
        "text_dim": 16, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
    });
    std::fs::write(path.path().join("config.json"), config.to_string()).expect("written");
    let mut weights = HashMap::new();
    for (seed, (name, shape)) in WanTransformer::new(WanConfig::read(path.path())?).shapes().into_iter().enumerate() {
        // Matrices keep the size of what they multiply, so that attention has its part in the velocity; gains of norms are near 1.
        let terms = shape.iter().skip(1).product::<usize>().max(1) as f64;
        let numbers = noise(seed as u64, &shape)?;
        let is_gain = name.contains("norm") && name.ends_with("weight");
        let drawn = if is_gain { ((numbers * 0.1)? + 1.0)? } else { (numbers / terms.sqrt())? };
        weights.insert(name, drawn);
    }
    candle_core::safetensors::save(&weights, path.path().join("diffusion_pytorch_model.safetensors"))?;
    for (tokens, [frames, rows, columns]) in [(7, [7, 2, 2]), (45, [5, 6, 6])] {
        let timestep = Tensor::new(&[500f32], &Device::Cpu)?;
        let latents = noise(100, &[1, 4, frames, rows, columns])?;
        let inputs =
            [("hidden_states", latents), ("encoder_hidden_states", noise(101, &[1, 9, 16])?), ("timestep", timestep)];
        let inputs = inputs.map(|(name, tensor)| (name.to_owned(), tensor)).into_iter().collect();
        let folder = WanFolder::open(path.path())?;
        let pass = Pass { weights: folder.load(WeightType::F32)?, folder, inputs };
        assert_eq!(TokenGrid::new([frames, rows, columns], [1, 2, 2])?.tokens(), tokens);
        check_meshes(&pass, &format!("{tokens} tokens"))?;
    }
    Ok(())
}

/// Weights and inputs that are sines, so that anyone can compute the numbers again.
#[test]
fn a_model_of_sines_has_the_numbers_of_diffusers() -> Result<()> {
    let golden: Value = read_json(&fixture("golden.json"))?;
    let wave = |count: usize, f: &dyn Fn(f64) -> f64, shape: &[usize]| {
        let values: Vec<f32> = (0..count).map(|at| f(at as f64) as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)
    };
    let folder = WanFolder::open(&fixture("t2v"))?;
    let mut weights = Weights::new();
    for (n, (name, shape)) in folder.transformer().shapes().into_iter().enumerate() {
        let is_norm = ["norm_q.weight", "norm_k.weight", "norm2.weight"].iter().any(|end| name.ends_with(end));
        let of = |i: f64| 0.1 * (0.7 * i + 1.3 * n as f64).sin() + f64::from(u8::from(is_norm));
        weights.insert(name, wave(shape.iter().product(), &of, &shape)?);
    }
    let parameters: usize = weights.values().map(Tensor::elem_count).sum();
    assert_eq!(golden["parameters"], parameters);
    let x = wave(2048, &|i| (0.11 * i + 0.5).sin(), &[1, 4, 2, 16, 16])?;
    let text = wave(192, &|i| (0.23 * i).cos(), &[1, 12, 16])?;
    let timestep = Tensor::new(&[500f32], &Device::Cpu)?;
    let inputs = [("hidden_states", x), ("encoder_hidden_states", text), ("timestep", timestep)];
    let inputs = inputs.map(|(name, tensor)| (name.to_owned(), tensor)).into_iter().collect::<HashMap<_, _>>();
    let pass = Pass { folder, weights: stored(weights), inputs };
    let out = pass.velocities((1, 1))?[0].flatten_all()?.to_vec1::<f32>()?;
    let near = |got: &[f32], key: &str| {
        for (got, wanted) in got.iter().zip(golden[key].as_array().expect("numbers")) {
            let wanted = wanted.as_f64().expect("a number");
            assert!((f64::from(*got) - wanted).abs() < 1e-6, "{key}: {got}, not {wanted}");
        }
    };
    near(&out[..8], "first");
    near(&out[1000..1004], "from_1000");
    near(&out[out.len() - 8..], "last");
    Ok(())
}

/// Tokens that ranks do not divide, fewer tokens than ranks, and heads that ranks do not divide; exchanged at once and in parts.
#[test]
fn seven_tokens_attend_on_any_mesh_as_in_f64() -> Result<()> {
    let (tokens, heads, dim) = (7, 12, 8);
    let mut config = WanConfig::default();
    (config.num_attention_heads, config.attention_head_dim) = (heads, dim);
    let values = |seed: usize| -> Vec<f32> {
        (0..tokens * heads * dim).map(|i| ((i * 7919 + seed * 104_729) as f32 * 0.377).sin()).collect()
    };
    let all = [1, 2, 3].map(values);
    let wanted = attention_in_f64(&all, tokens, heads, dim);
    for mesh in [(4, 1), (2, 2), (1, 4), (8, 1), (1, 8), (2, 4), (1, 5), (1, 7)] {
        let in_parts = |chunks: usize| {
            on_ranks(mesh, |group, alone| {
                let video = VideoContext::new(&config, group, alone, 1, TokenGrid::new([7, 2, 2], [1, 2, 2])?)?;
                let video = video.with_head_chunks(chunks);
                let own = |values: &Vec<f32>| {
                    let width = heads * dim;
                    let rows = video.rows().iter().flat_map(|row| &values[row * width..(row + 1) * width]);
                    Tensor::from_vec(rows.copied().collect::<Vec<_>>(), (video.rows().len(), heads, dim), &Device::Cpu)
                };
                let [q, k, v] = all.each_ref().map(own);
                let (q, k, v, score) = (q?, k?, v?, Score::new(1.0 / (dim as f32).sqrt()));
                let inputs = AttentionInputs::new(&q, &k, &v);
                let out = video.attention().layer_attention(0, &inputs, &Mask::full(), &score)?;
                video.gathered(&out.flatten_from(1)?)
            })
        };
        let at_once = in_parts(1)?;
        for (out, in_parts) in at_once.into_iter().zip(in_parts(3)?) {
            assert_eq!(in_parts.to_vec3::<f32>()?, out.to_vec3::<f32>()?, "{mesh:?}");
            for (got, wanted) in out.flatten_all()?.to_vec1::<f32>()?.into_iter().zip(&wanted) {
                assert!((f64::from(got) - wanted).abs() < 1e-6, "{mesh:?}: {got}, not {wanted}");
            }
        }
    }
    Ok(())
}

fn attention_in_f64([q, k, v]: &[Vec<f32>; 3], tokens: usize, heads: usize, dim: usize) -> Vec<f64> {
    let at = |x: &[f32], token: usize, head: usize, i: usize| f64::from(x[(token * heads + head) * dim + i]);
    let mut out = vec![0.0; tokens * heads * dim];
    for (token, head) in (0..tokens).flat_map(|token| (0..heads).map(move |head| (token, head))) {
        let score =
            |key| (0..dim).map(|i| at(q, token, head, i) * at(k, key, head, i)).sum::<f64>() / (dim as f64).sqrt();
        let weights: Vec<f64> = (0..tokens).map(|key| score(key).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..dim {
            let weighted = weights.iter().enumerate().map(|(key, weight)| weight * at(v, key, head, i));
            out[(token * heads + head) * dim + i] = weighted.sum::<f64>() / sum;
        }
    }
    out
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_the_numbers() -> Result<()> {
    let refused = |change: &dyn Fn(&mut Pass)| -> Result<String> {
        let mut pass = Pass::of("t2v", WeightType::F32)?;
        change(&mut pass);
        Ok(message(pass.velocities((1, 1))))
    };
    let zeros = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).expect("zeros");
    for (name, shape, words) in [
        ("encoder_hidden_states", &[2, 12, 15][..], "[2, N, 16]"),
        ("encoder_hidden_states", &[1, 12, 16], "[2, N, 16]"),
        ("hidden_states", &[2, 5, 3, 8, 12], "[2, 4, F, H, W]"),
        ("hidden_states", &[2, 4, 3, 7, 12], "7 rows"),
        ("hidden_states", &[2, 4, 3, 8, 66], "32 positions"),
        ("timestep", &[3], "3 time steps"),
        ("encoder_hidden_states_image", &[2, 9, 8], "no image_dim"),
        ("control_hidden_states", &[2, 48, 3, 8, 12], "no vace_layers"),
    ] {
        let found = refused(&|pass| drop(pass.inputs.insert(name.into(), zeros(shape))))?;
        assert!(found.contains(words), "'{words}' is not in: {found}");
    }
    let mut pass = Pass::of("i2v", WeightType::F32)?;
    pass.inputs.remove("encoder_hidden_states_image");
    assert!(message(pass.velocities((1, 1))).contains("needs image_embeds"));
    let found = message(WanFolder::open(&fixture("loops/euler")));
    assert!(found.contains("config.json"), "{found}");
    Ok(())
}
