//! Runs of four steps against diffusers, and runs on meshes against one rank.

use crate::support::{distance, fixture, message, reference};
use candle_core::Tensor;
use ringspan_video::Result;
use ringspan_video::denoise::{DenoiseFolder, DenoiseInputs, DenoisePlan, DenoiseSettings, GridCost, denoise};
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::scheduler::SchedulerConfig;
use ringspan_video::transformer::{WanConfig, WeightType};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

/// A pipeline's folder of two transformers, from the fixtures' files.
pub(crate) fn pipeline() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = |from: &Path, to: &str| {
        let to = folder.path().join(to);
        std::fs::create_dir_all(&to).expect("a folder");
        for file in std::fs::read_dir(from).expect("a fixture") {
            let file = file.expect("a file");
            std::fs::copy(file.path(), to.join(file.file_name())).expect("copied");
        }
    };
    copy(&fixture("t2v"), "transformer");
    copy(&fixture("loops/transformer_2"), "transformer_2");
    copy(&fixture("loops/unipc"), "scheduler");
    let index = json!({ "_class_name": "WanPipeline", "boundary_ratio": 0.875 });
    std::fs::write(folder.path().join("model_index.json"), index.to_string()).expect("written");
    folder
}

pub(crate) fn inputs(tensors: &HashMap<String, Tensor>, with_frame: bool) -> DenoiseInputs {
    DenoiseInputs {
        prompt_embeds: tensors["prompt_embeds"].clone(),
        negative_prompt_embeds: Some(tensors["negative_prompt_embeds"].clone()),
        latents: tensors["latents"].clone(),
        image_embeds: None,
        condition: with_frame.then(|| tensors["condition"].clone()),
        control: None,
        control_scale: None,
    }
}

pub(crate) fn settings(scheduler: &str, guidance: [f64; 2]) -> Result<DenoiseSettings> {
    let scheduler = SchedulerConfig::read(&fixture("loops").join(scheduler))?;
    Ok(DenoiseSettings { steps: 4, scheduler, guidance, cache_threshold: 0.0 })
}

fn run(folder: &DenoiseFolder, mesh: &VideoMesh, inputs: &DenoiseInputs, settings: &DenoiseSettings) -> Result<Tensor> {
    Ok(denoise(folder, &mut VideoRanks::start(mesh)?, inputs, settings, |_| Ok(()))?.expect("this process has rank 0"))
}

#[test]
fn four_steps_with_guidance_are_those_of_diffusers() -> Result<()> {
    let tensors = reference("loops");
    let pipeline = pipeline();
    let one = DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?;
    let two = DenoiseFolder::open(pipeline.path(), WeightType::F32)?;
    assert_eq!(two.scheduler(), Some(SchedulerConfig::read(&fixture("loops/unipc"))?));
    for scheduler in ["euler", "unipc"] {
        for (kind, folder, guidance) in
            [("one", &one, [5.0, 5.0]), ("two", &two, [4.0, 3.0]), ("frame", &one, [5.0; 2])]
        {
            let inputs = inputs(&tensors, kind == "frame");
            let steps = &tensors[&format!("{scheduler}.{kind}.steps")];
            let wanted = match kind {
                "frame" => tensors[&format!("{scheduler}.frame.out")].clone(),
                _ => steps.get(3)?,
            };
            let got = run(folder, &VideoMesh::single(), &inputs, &settings(scheduler, guidance)?)?;
            let far = distance(&got, &wanted);
            println!("{scheduler}, {kind}: {far:e}");
            assert!(far < 2e-5, "{scheduler}, {kind}: {far:e}");
        }
    }
    Ok(())
}

#[test]
fn every_mesh_makes_the_latents_of_one_rank() -> Result<()> {
    let (tensors, pipeline) = (reference("loops"), pipeline());
    let folder = DenoiseFolder::open(pipeline.path(), WeightType::F32)?;
    let (inputs, settings) = (inputs(&tensors, false), settings("unipc", [4.0, 3.0])?);
    let one = run(&folder, &VideoMesh::single(), &inputs, &settings)?;
    for (ring, ulysses, cfg_parallel) in [(3, 1, false), (2, 2, false), (1, 2, true), (2, 1, true), (5, 1, false)] {
        let mesh = VideoMesh { ring, ulysses, cfg_parallel, ..VideoMesh::single() };
        let far = distance(&run(&folder, &mesh, &inputs, &settings)?, &one);
        println!("{mesh}: {far:e}");
        assert!(far < 1e-5, "{mesh}: {far:e}");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() -> Result<()> {
    let (tensors, folder) = (reference("loops"), DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?);
    let (good, guided, single) = (inputs(&tensors, false), settings("euler", [5.0; 2])?, VideoMesh::single());
    let words = |found: String, words: &[&str]| {
        for word in words {
            assert!(found.contains(word), "'{word}' is not in: {found}");
        }
    };
    words(message(folder.latents_of([80, 64, 64])), &["80 frames", "77", "81"]);
    words(message(folder.latents_of([81, 72, 64])), &["height 72", "16"]);
    assert_eq!(folder.latents_of([81, 480, 512])?, [21, 60, 64]);
    words(message(folder.latents_of([81, 480, 832])), &["[21, 30, 52]", "32 positions"]);
    words(message(folder.latents_of([1, 1 << 40, 1 << 40])), &["too many"]);
    words(message(folder.latents_of([1, 1 << 20, 1_048_576_000_000])), &["32 positions"]);
    let plan = |inputs: &DenoiseInputs, mesh: &VideoMesh, settings: &DenoiseSettings| {
        message(DenoisePlan::new(&folder, mesh, inputs, settings))
    };
    let without = DenoiseInputs { negative_prompt_embeds: None, ..good.clone() };
    words(plan(&without, &single, &guided), &["guidance 5", "negative_prompt_embeds"]);
    let nobody = VideoMesh { ring: 0, ..single.clone() };
    words(message(VideoRanks::start(&nobody)), &["ring 0", "at least 1"]);
    words(plan(&good, &VideoMesh { ulysses: 3, ..single.clone() }, &guided), &["ulysses 3", "there are 2"]);
    let unguided = settings("euler", [1.0; 2])?;
    words(
        plan(&good, &VideoMesh { cfg_parallel: true, ..single.clone() }, &unguided),
        &["in parallel", "there is one"],
    );
    words(plan(&good, &single, &DenoiseSettings { steps: 1001, ..guided }), &["1001 steps", "1000"]);
    let narrow = DenoiseInputs { prompt_embeds: good.prompt_embeds.narrow(2, 0, 15)?, ..good.clone() };
    words(plan(&narrow, &single, &guided), &["prompt_embeds", "15]", "16]"]);
    let negative = DenoiseInputs { negative_prompt_embeds: Some(narrow.prompt_embeds), ..good.clone() };
    words(plan(&negative, &single, &guided), &["negative_prompt_embeds", "15]", "16]"]);
    let image = DenoiseInputs { image_embeds: Some(good.prompt_embeds.clone()), ..good.clone() };
    words(plan(&image, &single, &guided), &["no image_dim"]);
    let odd = DenoiseInputs { latents: good.latents.narrow(3, 0, 7)?, ..good.clone() };
    words(plan(&odd, &single, &guided), &["7 rows"]);
    let controlled = DenoiseInputs { control: Some(good.latents.clone()), ..good.clone() };
    words(plan(&controlled, &single, &guided), &["control", "no vace_layers"]);
    words(message(DenoiseFolder::open(&fixture(""), WeightType::F32)), &["transformer/config.json"]);
    Ok(())
}

/// The formula of docs/video.md, with both types of computation, and with one guided stage of two.
#[test]
fn the_plan_counts_the_bytes_of_the_guide() -> Result<()> {
    let (tensors, pipeline) = (reference("loops"), pipeline());
    let inputs = inputs(&tensors, false);
    let (ring, ulysses) = (2, 2);
    for (weights, e) in [(WeightType::F32, 4), (WeightType::Bf16, 2)] {
        let folder = DenoiseFolder::open(pipeline.path(), weights)?;
        let config = folder.transformer(0).config();
        let (heads, dim) = (config.num_attention_heads, config.attention_head_dim);
        let (batch, _, frames, rows, columns) = inputs.latents.dims5()?;
        let tokens = batch * frames * rows * columns / config.patch();
        assert_eq!((tokens % (ring * ulysses), heads % ulysses), (0, 0));
        let exchanged = heads * (ulysses - 1) / ulysses * (3 * dim * e + 4 * (dim + 2));
        let of_block = tokens / (ring * ulysses) * (exchanged + 2 * heads * dim * e * (ring - 1));
        let mesh = VideoMesh { ring, ulysses, ..VideoMesh::single() };
        for (guidance, branches) in [([1.0, 1.0], 1), ([4.0, 3.0], 2), ([1.0, 3.0], 2)] {
            let plan = DenoisePlan::new(&folder, &mesh, &inputs, &settings("unipc", guidance)?)?;
            assert_eq!(plan.bytes(), (of_block * config.num_layers * branches) as u64, "{weights}, {guidance:?}");
        }
    }
    Ok(())
}

/// Bytes that a real run counts, against the plan and the formula of docs/video.md.
#[test]
fn a_run_sends_the_bytes_of_its_plan() -> Result<()> {
    let (tensors, folder) = (reference("loops"), DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?);
    let inputs = inputs(&tensors, false);
    let (batch, channels, frames, rows, columns) = inputs.latents.dims5()?;
    let config = folder.transformer(0).config();
    let (heads, dim, tokens) = (config.num_attention_heads, config.attention_head_dim, frames * rows * columns / 4);
    for (ring, ulysses, cfg_parallel, guidance) in
        [(2, 2, false, 5.0), (4, 1, false, 1.0), (1, 2, true, 5.0), (2, 2, true, 5.0), (5, 1, false, 5.0)]
    {
        let settings = settings("euler", [guidance; 2])?;
        let mesh = VideoMesh { ring, ulysses, cfg_parallel, ..VideoMesh::single() };
        let plan = DenoisePlan::new(&folder, &mesh, &inputs, &settings)?;
        let mut ranks = VideoRanks::start(&mesh)?;
        let mut run = || -> Result<Vec<u64>> {
            let sent = Mutex::new(Vec::new());
            denoise(&folder, &mut ranks, &inputs, &settings, |step| {
                sent.lock().expect("no panic").push(step.sent);
                Ok(())
            })?;
            Ok(sent.into_inner().expect("no panic"))
        };
        let sent = run()?;
        assert_eq!(run()?, sent, "{mesh}: a second run of the same ranks counts from its beginning");
        // The first step follows the start of the run. In a ring of unequal parts rank 0, which counts, sends less than the busiest.
        let of_steps: Vec<u64> = sent.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(of_steps.iter().all(|bytes| *bytes == of_steps[0]), "{mesh}: {of_steps:?}");
        assert!(
            of_steps[0] <= plan.sent() && of_steps[0] > plan.sent() / 10 * 9,
            "{mesh}: {of_steps:?}, {}",
            plan.sent()
        );
        if tokens % (ring * ulysses) == 0 {
            assert_eq!(of_steps[0], plan.sent(), "{mesh}");
            let each = batch * tokens / (ring * ulysses);
            let exchanged = heads * (ulysses - 1) / ulysses * (3 * dim * 4 + 4 * (dim + 2));
            let of_block = each * (exchanged + 2 * heads * dim * 4 * (ring - 1));
            let branches = if guidance == 1.0 || cfg_parallel { 1 } else { 2 };
            let of_token = 4 * 4 * channels;
            let velocity = branches * each * of_token * (ring * ulysses - 1);
            let across = if cfg_parallel { batch * tokens * of_token } else { 0 };
            let wanted = branches * config.num_layers * of_block + velocity + across;
            assert_eq!(of_steps[0], wanted as u64, "{mesh}: the formula of the guide");
        }
    }
    Ok(())
}

/// The numbers of a video of 4,096 tokens in f32, with heads of 64: `Q` bytes are those of queries, keys and values of a head, which
/// Ulysses sends, with the outputs that come back; `K` bytes are those of keys and values, which a ring sends.
const TOKENS: usize = 4096;
const Q: u64 = 3 * 64 * 4 + 4 * 66;
const K: u64 = 2 * 64 * 4;

fn costs(heads: usize, ranks: usize) -> Result<Vec<GridCost>> {
    let mut config = WanConfig::default();
    (config.num_attention_heads, config.attention_head_dim) = (heads, 64);
    GridCost::all(&config, WeightType::F32, 1, TOKENS, ranks)
}

/// 12 heads on 8 ranks: with 8 Ulysses ranks some have two heads and some one, so that the busiest computes a third more; a ring of 2
/// sends more, and a ring of 8 much more.
#[test]
fn grids_of_as_many_ranks_are_compared_by_the_busiest_rank() -> Result<()> {
    let costs = costs(12, 8)?;
    let grids: Vec<_> = costs.iter().map(|cost| (cost.grid.ring, cost.grid.ulysses)).collect();
    assert_eq!(grids, [(8, 1), (4, 2), (2, 4), (1, 8)]);
    let work: Vec<u64> = costs.iter().map(|cost| cost.work).collect();
    assert_eq!(work, [512 * 12, 1024 * 6, 2048 * 3, 4096 * 2]);
    let bytes: Vec<u64> = costs.iter().map(|cost| cost.bytes).collect();
    // A rank with two heads sends queries, keys and values of the 10 others, and returns two heads of the tokens of 7 ranks.
    let of_1_x_8 = 512 * (10 * 3 * 64 * 4 + 2 * 7 * 4 * 66);
    assert_eq!(bytes, [512 * 12 * 7 * K, 512 * (6 * Q + 12 * 3 * K), 512 * (9 * Q + 12 * K), of_1_x_8]);
    let said = |cost: &GridCost| cost.alternative(&costs).map(|other| other.to_string());
    let as_2_x_4 = "as ring 2 x ulysses 4, the busiest rank would compute";
    // The cheapest grid has least work and of these fewest bytes; 1 x 8 sends fewer, but computes more.
    assert_eq!(said(&costs[2]), None);
    assert!(costs[3].bytes < costs[2].bytes);
    let ratio = |cost: &GridCost| costs[2].bytes as f64 / cost.bytes as f64;
    let of_1_x_8 =
        format!("{as_2_x_4} 0.75 times as much in attention, but send up to {:.2} times as much", ratio(&costs[3]));
    assert_eq!(said(&costs[3]), Some(of_1_x_8));
    let of_8_x_1 = format!("{as_2_x_4} as much in attention, and send up to {:.2} times as much", ratio(&costs[0]));
    assert_eq!(said(&costs[0]), Some(of_8_x_1));
    Ok(())
}

/// Heads that ranks divide, where only bytes differ: a ring that sends several times more is told so, small differences are not.
#[test]
fn a_grid_that_sends_clearly_less_is_named_where_heads_divide_too() -> Result<()> {
    let costs = costs(16, 8)?;
    assert!(
        costs.iter().all(|cost| cost.work == costs[0].work) && costs.is_sorted_by_key(|cost| u64::MAX - cost.bytes)
    );
    let named =
        |cost: &GridCost| cost.alternative(&costs).map(|named| (named.other.grid.ring, named.other.grid.ulysses));
    assert_eq!(costs.iter().map(named).collect::<Vec<_>>(), [Some((1, 8)), Some((1, 8)), None, None]);
    Ok(())
}

#[test]
fn the_plan_names_a_grid_that_sends_less() -> Result<()> {
    let (tensors, folder) = (reference("loops"), DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?);
    let (inputs, settings) = (inputs(&tensors, false), settings("euler", [5.0; 2])?);
    let plan = |ring, ulysses| -> Result<String> {
        let mesh = VideoMesh { ring, ulysses, ..VideoMesh::single() };
        Ok(DenoisePlan::new(&folder, &mesh, &inputs, &settings)?.to_string())
    };
    // Two heads: 4 x 1 could be 2 x 2.
    let said = plan(4, 1)?;
    assert!(
        said.contains("as ring 2 x ulysses 2, the busiest rank would compute as much in attention, and send"),
        "{said}"
    );
    for (ring, ulysses) in [(2, 2), (1, 2), (1, 1), (5, 1)] {
        let said = plan(ring, ulysses)?;
        assert!(!said.contains("would compute"), "{said}");
    }
    Ok(())
}
