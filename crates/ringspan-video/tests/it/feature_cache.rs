//! Steps in which blocks are skipped: which they are, and what is computed in them.

use crate::denoise::{inputs, pipeline, settings};
use crate::support::{distance, fixture, message, on_ranks, reference};
use candle_core::Tensor;
use ringspan_candle::StoredWeights;
use ringspan_candle::model::Unit;
use ringspan_candle::model::UnitWeights;
use ringspan_video::Result;
use ringspan_video::denoise::{DenoiseFolder, DenoiseInputs, DenoisePlan, DenoiseSettings, denoise};
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::scheduler::Scheduler;
use ringspan_video::transformer::{BlockPass, Branch, Conditions, TokenGrid, VideoContext, WanFolder, WeightType};
use std::sync::Mutex;

/// The latents of a run, and for each step whether its blocks were skipped.
fn run(
    folder: &DenoiseFolder,
    mesh: &VideoMesh,
    inputs: &DenoiseInputs,
    settings: &DenoiseSettings,
) -> Result<(Tensor, Vec<bool>)> {
    let skipped = Mutex::new(Vec::new());
    let latents = denoise(folder, &mut VideoRanks::start(mesh)?, inputs, settings, |step| {
        skipped.lock().expect("no panic").push(step.skipped);
        Ok(())
    })?;
    Ok((latents.expect("this process has rank 0"), skipped.into_inner().expect("no panic")))
}

/// The embedding of a time step in f64.
fn embedding(weights: &StoredWeights, time: f32) -> Vec<f64> {
    let linear = |name: &str, x: &[f64]| -> Vec<f64> {
        let of = |part: &str| {
            let name = format!("condition_embedder.time_embedder.{name}.{part}");
            weights[&name].to_tensor().expect("a weight")
        };
        let rows = of("weight").to_vec2::<f32>().expect("a matrix");
        let bias = of("bias").to_vec1::<f32>().expect("a vector");
        let product = |row: &Vec<f32>| row.iter().zip(x).map(|(a, b)| f64::from(*a) * b).sum::<f64>();
        rows.iter().zip(bias).map(|(row, bias)| product(row) + f64::from(bias)).collect()
    };
    let angles: Vec<f64> =
        (0..128).map(|pair| f64::from(time) * (-(1e4f64.ln()) * f64::from(pair) / 128.0).exp()).collect();
    let waves: Vec<f64> = angles.iter().map(|a| a.cos()).chain(angles.iter().map(|a| a.sin())).collect();
    let inner: Vec<f64> = linear("linear_1", &waves).into_iter().map(|x| x / (1.0 + (-x).exp())).collect();
    linear("linear_2", &inner)
}

/// The decisions in plain words: the blocks are skipped while the sum of the relative changes since they were last computed is
/// below the threshold, except in the first step of a transformer and in the last step of all.
fn decisions(folder: &DenoiseFolder, boundary: f32, settings: &DenoiseSettings) -> Result<Vec<bool>> {
    let times = Scheduler::new(&settings.scheduler, settings.steps)?.timesteps().to_vec();
    let mut weights = Vec::new();
    for stage in 0..folder.stages() {
        weights.push(folder.weights(stage)?);
    }
    let stage_of = |time: f32| usize::from(folder.stages() > 1 && time < boundary);
    let mut last: Option<(usize, Vec<f64>)> = None;
    let (mut sum, mut skipped) = (0.0, Vec::new());
    for (step, time) in times.iter().enumerate() {
        let stage = stage_of(*time);
        let now = embedding(&weights[stage], *time);
        let mut skips = false;
        if let Some((_, before)) = last.take().filter(|(of_stage, _)| *of_stage == stage) {
            let apart: f64 = now.iter().zip(&before).map(|(a, b)| (a - b).abs()).sum();
            sum += apart / before.iter().map(|x| x.abs()).sum::<f64>();
            skips = sum < settings.cache_threshold && step + 1 < times.len();
        }
        if !skips {
            sum = 0.0;
        }
        skipped.push(skips);
        last = Some((stage, now));
    }
    Ok(skipped)
}

#[test]
fn all_meshes_skip_the_same_steps_and_make_the_same_latents() -> Result<()> {
    let (tensors, pipeline) = (reference("loops"), pipeline());
    let inputs = inputs(&tensors, false);
    let one = DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?;
    let two = DenoiseFolder::open(pipeline.path(), WeightType::F32)?;
    for (folder, scheduler, guidance) in [(&one, "euler", [5.0; 2]), (&two, "unipc", [4.0, 3.0])] {
        let mut counts = Vec::new();
        for threshold in [0.3, 1.5, 4.0] {
            let settings = DenoiseSettings { steps: 12, cache_threshold: threshold, ..settings(scheduler, guidance)? };
            let wanted = decisions(folder, 875.0, &settings)?;
            let (alone, skipped) = run(folder, &VideoMesh::single(), &inputs, &settings)?;
            assert_eq!(skipped, wanted, "{scheduler}, {threshold}");
            counts.push(skipped.iter().filter(|skipped| **skipped).count());
            for (ring, ulysses, cfg_parallel) in [(3, 1, false), (2, 2, true), (1, 2, false), (40, 1, false)] {
                let mesh = VideoMesh { ring, ulysses, cfg_parallel, ..VideoMesh::single() };
                let (latents, skipped) = run(folder, &mesh, &inputs, &settings)?;
                assert_eq!(skipped, wanted, "{scheduler}, {threshold}, {mesh}");
                let far = distance(&latents, &alone);
                assert!(far < 1e-5, "{scheduler}, {threshold}, {mesh}: {far:e}");
            }
        }
        println!("{scheduler}: {counts:?} of 12 steps are skipped");
        assert!(counts.is_sorted() && counts[0] < counts[2] && counts[1] > 0, "{counts:?}");
    }
    Ok(())
}

#[test]
fn a_threshold_that_nothing_reaches_changes_no_bit() -> Result<()> {
    let (tensors, folder) = (reference("loops"), DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?);
    let inputs = inputs(&tensors, false);
    let run_with = |cache_threshold| {
        let settings = DenoiseSettings { cache_threshold, ..settings("unipc", [5.0; 2])? };
        run(&folder, &VideoMesh { ring: 2, ..VideoMesh::single() }, &inputs, &settings)
    };
    let ((without, none), (with, skipped)) = (run_with(0.0)?, run_with(1e-12)?);
    assert_eq!((none, skipped), (vec![false; 4], vec![false; 4]));
    assert_eq!(without.flatten_all()?.to_vec1::<f32>()?, with.flatten_all()?.to_vec1::<f32>()?);
    Ok(())
}

/// The loop in plain words, with a threshold so high that only the first and the last step compute the blocks.
#[test]
fn skipped_blocks_add_what_they_added_in_the_first_step() -> Result<()> {
    let tensors = reference("loops");
    let inputs = inputs(&tensors, false);
    let settings = DenoiseSettings { cache_threshold: 1e6, ..settings("euler", [1.0; 2])? };
    let folder = WanFolder::open(&fixture("t2v"))?;
    let weights = folder.load(WeightType::F32)?;
    let plainly = on_ranks((1, 1), |group, alone| {
        let transformer = folder.transformer();
        let (batch, _, frames, height, width) = inputs.latents.dims5()?;
        let grid = TokenGrid::new([frames, height, width], transformer.config().patch_size)?;
        let video = VideoContext::new(transformer.config(), group, alone, batch, grid)?;
        let prompt = transformer.prompt(&weights, &inputs.prompt_embeds, None, &video)?;
        let mut scheduler = Scheduler::new(&settings.scheduler, 4)?;
        let (mut latents, mut added) = (inputs.latents.clone(), None);
        for (step, time) in scheduler.timesteps().to_vec().into_iter().enumerate() {
            let conditions = Conditions { times: &video.timesteps(&[time])?, control: None };
            let forward = |blocks: BlockPass<'_>| -> Result<Tensor> {
                let branch = vec![Branch { prompt: &prompt, blocks }];
                Ok(transformer.forward_branches(&weights, &latents, conditions, branch, &video)?.remove(0))
            };
            let blocks = match (step, &mut added) {
                (1 | 2, Some(added)) => BlockPass::Skip(added),
                (_, added) => BlockPass::Record(added),
            };
            let patches = forward(blocks)?;
            if let (0, Some(added)) = (step, &added) {
                // With the same input, what was added gives the same patches.
                let skip = BlockPass::Skip(added);
                let again = forward(skip)?;
                assert!(distance(&again, &patches) < 1e-5);
            }
            latents = scheduler.step(&latents, &video.grid().unpatched(&video.gathered(&patches)?)?)?;
        }
        Ok(latents)
    })?;
    let folder = DenoiseFolder::open(&fixture("t2v"), WeightType::F32)?;
    let (latents, skipped) = run(&folder, &VideoMesh::single(), &inputs, &settings)?;
    assert_eq!(skipped, [false, true, true, false]);
    assert!(distance(&latents, &plainly[0]) < 1e-6);
    let all = DenoiseSettings { cache_threshold: 0.0, ..settings };
    let far = distance(&latents, &run(&folder, &VideoMesh::single(), &inputs, &all)?.0);
    assert!(far > 1e-3, "skipping changes the latents by {far}");
    Ok(())
}

/// A step whose blocks are computed sends what is planned, and one whose blocks are skipped the weights of the first and of the last unit
/// alone; the velocity and the decision are sent in both.
#[test]
fn a_step_that_decides_gathers_each_unit_once() -> Result<()> {
    let (tensors, path) = (reference("loops"), fixture("t2v"));
    let (inputs, folder) = (inputs(&tensors, false), DenoiseFolder::open(&path, WeightType::F32)?);
    for (ring, ulysses, cfg_parallel) in [(2, 1, false), (1, 2, false), (2, 2, false), (2, 1, true)] {
        let mesh = VideoMesh { ring, ulysses, cfg_parallel, shard_weights: true, ..VideoMesh::single() };
        let others = mesh.size() as u64 - 1;
        // Bytes of weights that rank 0 sends in a step with all units, and in one with two.
        let of_units = on_ranks((mesh.size(), 1), |group, _| {
            let share = WanFolder::open(&path)?.load_share(WeightType::F32, group.cp().split(0, group.rank())?)?;
            let before = group.cp().bytes_sent();
            share.unit(Unit::Embedding, &[])?;
            share.unit(Unit::Head, &[])?;
            Ok([share.bytes() * others, group.cp().bytes_sent() - before])
        })?;
        let most = of_units.iter().map(|[all, _]| *all).max().unwrap_or(0);
        let [all, two] = of_units[0];
        for (threshold, wanted_skipped) in [(1e-12, [false; 4]), (1e6, [false, true, true, false])] {
            let settings = DenoiseSettings { cache_threshold: threshold, ..settings("euler", [5.0; 2])? };
            let plan = DenoisePlan::new(&folder, &mesh, &inputs, &settings)?;
            let sent = Mutex::new(Vec::new());
            let mut ranks = VideoRanks::start_with(&mesh, |comm| comm)?;
            denoise(&folder, &mut ranks, &inputs, &settings, |step| {
                sent.lock().expect("no panic").push((step.sent, step.skipped));
                Ok(())
            })?;
            let sent = sent.into_inner().expect("no panic");
            assert_eq!(sent.iter().map(|(_, skipped)| *skipped).collect::<Vec<_>>(), wanted_skipped, "{mesh}");
            let of_attention = plan.bytes();
            for (step, pair) in sent.windows(2).enumerate() {
                let of_step = pair[1].0 - pair[0].0;
                // The rank that holds most need not be rank 0, which counts.
                let computed = plan.sent() - most + all;
                let wanted = if pair[1].1 { computed - of_attention - all + two } else { computed };
                assert_eq!(of_step, wanted, "{mesh}, threshold {threshold}, step {}", step + 2);
            }
        }
    }
    Ok(())
}

#[test]
fn a_threshold_that_has_no_effect_is_refused_and_the_plan_says_what_it_has() -> Result<()> {
    let (tensors, pipeline) = (reference("loops"), pipeline());
    let inputs = inputs(&tensors, false);
    let folder = DenoiseFolder::open(pipeline.path(), WeightType::F32)?;
    let plan = |steps, cache_threshold| {
        let settings = DenoiseSettings { steps, cache_threshold, ..settings("unipc", [4.0, 3.0])? };
        DenoisePlan::new(&folder, &VideoMesh::single(), &inputs, &settings)
    };
    for (steps, threshold, words) in [
        (4, f64::NAN, &["cache threshold NaN", "at least 0"][..]),
        (4, -0.5, &["cache threshold -0.5"]),
        (1, 0.1, &["cache threshold 0.1 has no effect", "[1, 0]"]),
        (2, 0.1, &["no effect", "the first of each and the last"]),
    ] {
        let found = message(plan(steps, threshold));
        assert!(words.iter().all(|word| found.contains(word)), "{found}");
    }
    let (without, with) = (plan(12, 0.0)?, plan(12, 0.1)?);
    assert!(!without.to_string().contains("cache") && with.to_string().contains("skipped in up to 9 steps"), "{with}");
    // The tokens of one rank, of a width of 24, for two branches and once for the patches from which it is counted.
    let tokens: usize = inputs.latents.elem_count() / 16;
    assert_eq!(with.activations() - without.activations(), (3 * tokens * 24 * 4) as u64);
    Ok(())
}
