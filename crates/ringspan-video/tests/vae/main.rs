//! The text encoder against transformers, the autoencoder against diffusers, and every mesh and tiling against one rank.

mod text;
mod tiny_decoder;

use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::vae::{Plan, VaeFolder, VideoTensor};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

const MODELS: [&str; 3] = ["tiny", "wide", "residual"];

fn fixture(name: &str) -> PathBuf {
    Path::new("tests/fixtures/vae").join(name)
}

/// A tensor of the reference.
fn reference(model: &str, tensor: &str) -> VideoTensor {
    tensor_of(&fixture(model).join("reference.safetensors"), tensor)
}

fn tensor_of(file: &Path, tensor: &str) -> VideoTensor {
    let bytes = std::fs::read(file).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = file.tensor(tensor).expect("a tensor");
    let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
    VideoTensor::new(view.shape().try_into().expect("five dims"), values).expect("a video")
}

fn ranks(size: usize, threads: usize) -> VideoRanks {
    VideoRanks::start(&VideoMesh { ring: size, threads, ..VideoMesh::single() }).expect("ranks")
}

/// Relative L2 distance.
fn distance(got: &VideoTensor, wanted: &VideoTensor) -> f64 {
    assert_eq!(got.shape(), wanted.shape());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let (mut apart, mut size) = (0.0, 0.0);
    for (got, wanted) in got.values().iter().zip(wanted.values()) {
        apart += square(got - wanted);
        size += square(*wanted);
    }
    (apart / size).sqrt()
}

#[test]
fn frames_equal_those_of_diffusers() {
    for model in MODELS {
        let decoder = VaeFolder::open(&fixture(model)).expect("a folder").decoder().expect("a decoder");
        let (latents, wanted) = (reference(model, "latents"), reference(model, "frames"));
        let plan = decoder.plan(latents.shape(), 1, None).expect("a plan");
        let frames = decoder.decode(&latents, &mut ranks(1, 2), &plan).expect("frames").expect("rank 0");
        let apart = distance(&frames, &wanted);
        assert!(apart < 1e-5, "{model}: {apart:e}");
    }
}

#[test]
fn latents_equal_those_of_diffusers() {
    for model in MODELS {
        let encoder = VaeFolder::open(&fixture(model)).expect("a folder").encoder().expect("an encoder");
        let (frames, wanted) = (reference(model, "frames"), reference(model, "encoded"));
        let plan = encoder.plan(frames.shape(), 1, None).expect("a plan");
        let latents = encoder.encode(&frames, &mut ranks(1, 2), &plan).expect("latents").expect("rank 0");
        let apart = distance(&latents, &wanted);
        assert!(apart < 1e-5, "{model}: {apart:e}");
    }
}

/// Values in [-1, 1] without a pattern.
fn noise(shape: [usize; 5]) -> VideoTensor {
    let values = (0..shape.iter().product()).map(|i: usize| ((i * 7919 + 13) as f32 * 0.377).sin()).collect();
    VideoTensor::new(shape, values).expect("a video")
}

/// Plans with less and less memory, until nothing fits.
fn plans<E>(plan: impl Fn(Option<u64>) -> Result<Plan, E>) -> Vec<Plan> {
    let first = plan(None).ok();
    std::iter::successors(first, |last| plan(Some(last.bytes() - 1)).ok()).collect()
}

#[test]
fn every_mesh_and_tiling_decodes_to_the_same_frames() {
    for model in MODELS {
        let decoder = VaeFolder::open(&fixture(model)).expect("a folder").decoder().expect("a decoder");
        // Ranks have two columns, one or none; rows and frames do not divide by what blocks have.
        let batch = if model == "wide" { 2 } else { 1 };
        let latents = noise([batch, reference(model, "latents").shape()[1], 4, 5, 9]);
        let decode = |count: usize, plan: &Plan| {
            decoder.decode(&latents, &mut ranks(count, 1), plan).expect("frames").expect("rank 0")
        };
        let whole = decode(1, &decoder.plan(latents.shape(), 1, Some(u64::MAX)).expect("a plan"));
        for ranks in 1..=8 {
            let plans = plans(|memory| decoder.plan(latents.shape(), ranks, memory));
            assert!(plans.len() > 1, "{} plans on {ranks} ranks", plans.len());
            // All tilings on a few meshes, and the smallest blocks on each.
            let skip = if [1, 3].contains(&ranks) { 0 } else { plans.len() - 1 };
            for plan in &plans[skip..] {
                let apart = distance(&decode(ranks, plan), &whole);
                assert!(apart < 1e-5, "{model} on {ranks} ranks in {plan}: {apart:e}");
            }
        }
    }
}

/// The plan that needs least memory, found by halving.
fn least<E>(plan: impl Fn(Option<u64>) -> Result<Plan, E>) -> Plan {
    let mut fits = plan(Some(u64::MAX)).ok().expect("a plan");
    let mut fails = 0;
    while fits.bytes() > fails + 1 {
        let middle = fails + (fits.bytes() - fails) / 2;
        match plan(Some(middle)) {
            Ok(plan) => fits = plan,
            Err(_) => fails = middle,
        }
    }
    fits
}

/// Long videos of few pixels: passes between which the video is whole need more and more, a single pass does not.
#[test]
fn the_least_memory_does_not_grow_with_the_number_of_frames() {
    for model in MODELS {
        let folder = VaeFolder::open(&fixture(model)).expect("a folder");
        let (decoder, encoder) = (folder.decoder().expect("a decoder"), folder.encoder().expect("an encoder"));
        let latents = |frames| [1, folder.config().z_dim, frames, 1, 2];
        let least = |frames: usize| {
            let video = decoder.frames(latents(frames)).expect("frames");
            let of_decoder = least(|memory| decoder.plan(latents(frames), 1, memory));
            [of_decoder, least(|memory| encoder.plan(video, 1, memory))]
        };
        let bytes = |plans: &[Plan; 2]| plans.each_ref().map(Plan::bytes);
        let is_least = |frames: &usize| bytes(&least(*frames)) == bytes(&least(2 * frames));
        let frames = (5..14).map(|power| 1 << power).find(is_least).expect("the least memory still grows");
        let [of_decoder, of_encoder] = least(frames);
        println!("{model}, {frames} latent frames: {of_decoder}; {of_encoder}");
        let [longer, _] = least(2 * frames);
        assert!(longer.bytes_with_frames() > of_decoder.bytes_with_frames(), "{model}: latents and frames come on top");

        // The others compute the same layers, in a longer video.
        if model != "tiny" {
            continue;
        }
        let input = noise(latents(frames));
        let decode = |plan: &Plan| decoder.decode(&input, &mut ranks(1, 1), plan).expect("frames").expect("rank 0");
        let whole = decode(&decoder.plan(input.shape(), 1, Some(u64::MAX)).expect("a plan"));
        let apart = distance(&decode(&of_decoder), &whole);
        assert!(apart < 1e-5, "{model} in {of_decoder}: {apart:e}");
        let encode = |plan: &Plan| encoder.encode(&whole, &mut ranks(1, 1), plan).expect("latents").expect("rank 0");
        let wanted = encode(&encoder.plan(whole.shape(), 1, Some(u64::MAX)).expect("a plan"));
        let apart = distance(&encode(&of_encoder), &wanted);
        assert!(apart < 1e-5, "{model} in {of_encoder}: {apart:e}");
    }
}

#[test]
fn every_mesh_and_tiling_encodes_to_the_same_latents() {
    for model in MODELS {
        let folder = VaeFolder::open(&fixture(model)).expect("a folder");
        let (encoder, space, time) =
            (folder.encoder().expect("an encoder"), folder.config().space(), folder.config().time());
        let frames = noise([1, 3, 1 + 2 * time, 3 * space, 5 * space]);
        let encode = |count: usize, plan: &Plan| {
            encoder.encode(&frames, &mut ranks(count, 1), plan).expect("latents").expect("rank 0")
        };
        let whole = encode(1, &encoder.plan(frames.shape(), 1, Some(u64::MAX)).expect("a plan"));
        for ranks in 1..=8 {
            let plans = plans(|memory| encoder.plan(frames.shape(), ranks, memory));
            assert!(plans.len() > 1, "{} plans on {ranks} ranks", plans.len());
            let skip = if [1, 3].contains(&ranks) { 0 } else { plans.len() - 1 };
            for plan in &plans[skip..] {
                let apart = distance(&encode(ranks, plan), &whole);
                assert!(apart < 1e-5, "{model} on {ranks} ranks in {plan}: {apart:e}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let folder = VaeFolder::open(&fixture("residual")).expect("a folder");
    let (decoder, encoder) = (folder.decoder().expect("a decoder"), folder.encoder().expect("an encoder"));
    let refused = |result: Result<Plan, ringspan_video::error::Error>, words: &[&str]| {
        let message = result.expect_err("must be refused").to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    refused(decoder.plan([1, 4, 0, 2, 3], 1, None), &["[1, 4, 0, 2, 3]", "empty"]);
    refused(decoder.plan([1, 4, 3, 2, 3], 0, None), &["0 ranks"]);
    refused(encoder.plan([1, 3, 0, 32, 48], 1, None), &["[1, 3, 0, 32, 48]", "empty"]);
    refused(encoder.plan([1, 3, 9, 32, 48], 0, None), &["0 ranks"]);
    refused(decoder.plan([1, 5, 3, 2, 3], 1, None), &["5 channels", "has 4"]);
    refused(decoder.plan([1, 4, 3, 2, 3], 1, Some(1000)), &["1000 bytes", "2 x 3", "need"]);
    refused(encoder.plan([1, 3, 8, 32, 48], 1, None), &["8 frames", "5 and 9"]);
    refused(encoder.plan([1, 3, 9, 32, 40], 1, None), &["width 40", "multiple of 16"]);
    refused(encoder.plan([1, 4, 9, 32, 48], 1, None), &["4 channels"]);
}

#[test]
fn folders_of_other_models_and_damaged_ones_are_refused() {
    let temporary = tempfile::tempdir().expect("a folder");
    let copy = |name: &str, change: &dyn Fn(String) -> String| {
        let folder = temporary.path().join(name);
        std::fs::create_dir(&folder).expect("a folder");
        let config = std::fs::read_to_string(fixture("tiny").join("config.json")).expect("a file");
        std::fs::write(folder.join("config.json"), change(config)).expect("written");
        let weights = "diffusion_pytorch_model.safetensors";
        std::fs::copy(fixture("tiny").join(weights), folder.join(weights)).expect("copied");
        folder
    };
    let refused = |folder: &Path, word: &str| {
        let opened = VaeFolder::open(folder).and_then(|folder| folder.decoder().map(drop));
        let message = opened.expect_err("must be refused").to_string();
        assert!(message.contains(word), "{message}");
    };
    refused(temporary.path(), "config.json");
    refused(&copy("other", &|config| config.replace("AutoencoderKLWan", "AutoencoderKL")), "AutoencoderKL:");
    refused(&copy("wide", &|config| config.replace("\"base_dim\": 3", "\"base_dim\": 4")), "has shape");
    refused(&copy("deep", &|config| config.replace("\"num_res_blocks\": 1", "\"num_res_blocks\": 2")), "resnets.2");
    refused(
        &copy("levels", &|config| config.replace("\"dim_mult\": [", "\"dim_mult\": [\n    1,")),
        "temperal_downsample",
    );
    refused(&copy("mean", &|config| config.replace("-0.7571,", "")), "latents_mean has 15");
    assert!(VaeFolder::open(&copy("same", &|config| config)).is_ok());
}

#[test]
fn weights_are_read_pass_by_pass_and_a_file_that_is_gone_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
        std::fs::copy(fixture("tiny").join(file), folder.path().join(file)).expect("a copy");
    }
    let decoder = VaeFolder::open(folder.path()).expect("a folder").decoder().expect("a decoder");
    let latents = reference("tiny", "latents");
    let plan = decoder.plan(latents.shape(), 2, None).expect("a plan");
    let file = folder.path().join("diffusion_pytorch_model.safetensors");
    // Not all weights are in memory at once.
    assert!(plan.weights() < std::fs::metadata(&file).expect("a file").len() / 2, "{}", plan.weights());
    std::fs::remove_file(&file).expect("removed");
    let error = decoder.decode(&latents, &mut ranks(2, 1), &plan).expect_err("no weights").to_string();
    assert!(error.contains("diffusion_pytorch_model.safetensors"), "{error}");
}
