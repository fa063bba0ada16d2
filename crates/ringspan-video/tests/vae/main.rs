//! The autoencoder against diffusers, and every mesh and tiling against one rank.

use ringspan::comm::ranks::Ranks;
use ringspan_video::vae::{Mesh, VaeFolder, VideoTensor};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::time::Duration;

const MODELS: [&str; 3] = ["tiny", "wide", "residual"];

fn fixture(name: &str) -> PathBuf {
    Path::new("tests/fixtures/vae").join(name)
}

/// A tensor of the reference.
fn reference(model: &str, tensor: &str) -> VideoTensor {
    let bytes = std::fs::read(fixture(model).join("reference.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = file.tensor(tensor).expect("a tensor");
    let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
    VideoTensor::new(view.shape().try_into().expect("five dims"), values).expect("a video")
}

fn mesh(size: usize, threads: usize) -> Mesh {
    Mesh { ranks: Ranks::threads(), size, threads, deadline: Duration::from_secs(60) }
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
        let frames = decoder.decode(&latents, &mesh(1, 2), &plan).expect("frames").expect("rank 0");
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
        let latents = encoder.encode(&frames, &mesh(1, 2), &plan).expect("latents").expect("rank 0");
        let apart = distance(&latents, &wanted);
        assert!(apart < 1e-5, "{model}: {apart:e}");
    }
}
