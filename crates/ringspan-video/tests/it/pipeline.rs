//! Whole pipelines, from a prompt to frames, against diffusers and against one rank.

use crate::support::{distance, fixture, message};
use candle_core::{DType, Device, Tensor};
use ringspan_video::Result;
use ringspan_video::denoise::DenoiseSettings;
use ringspan_video::frames::{self, ResizeFilter, RgbFrame};
use ringspan_video::image_encoder::{ImageEncoder, ImagePreprocessing};
use ringspan_video::noise::noise;
use ringspan_video::pipeline::{VideoControl, VideoEvent, VideoPipeline, VideoRequest, VideoStage};
use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::tensor_folder::read_json;
use ringspan_video::transformer::WeightType;
use ringspan_video::vae::{TinyDecoderFile, VideoTensor};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A folder of the fixture `pipeline`.
pub(crate) fn of_pipeline(name: &str) -> PathBuf {
    fixture("../pipeline").join(name)
}

/// A pipeline's folder, from the files of several fixtures.
pub(crate) fn folder(kind: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let vae = if kind == "ti2v" { "residual" } else { "tiny" };
    for (from, to) in [
        (fixture("../text/text_encoder"), "text_encoder"),
        (fixture("../text/tokenizer"), "tokenizer"),
        (fixture("../vae").join(vae), "vae"),
        (of_pipeline(kind), "."),
    ] {
        copy(&from, &folder.path().join(to));
    }
    folder
}

pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a fixture") {
        let path = entry.expect("a file").path();
        let to = to.join(path.file_name().expect("a name"));
        if path.is_dir() { copy(&path, &to) } else { std::fs::copy(&path, &to).map(drop).expect("copied") }
    }
}

fn reference(kind: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(of_pipeline(kind).join("reference.safetensors"), &Device::Cpu).expect("a reference")
}

pub(crate) fn picture(name: &str) -> RgbFrame {
    let video = frames::read_picture(&of_pipeline(name)).expect("a picture");
    frames::to_rgb(&video).expect("one video").next().expect("a picture")
}

/// The pictures of a folder, in the order of their names.
fn pictures(name: &str) -> Vec<RgbFrame> {
    frames::to_rgb(&frames::read_pictures(&of_pipeline(name)).expect("pictures")).expect("one video").collect()
}

/// The request of which the fixture has the frames.
pub(crate) fn request(kind: &str, pipeline: &VideoPipeline) -> VideoRequest {
    let (guidance, image, last_image, size) = match kind {
        "t2v" => ([4.0, 3.0], None, None, [9, 32, 48]),
        "vace" => ([3.5; 2], None, None, [9, 32, 48]),
        "i2v" => ([3.5; 2], Some(picture("image.png")), Some(picture("last.png")), [9, 32, 48]),
        "i2v_2.1" => ([3.5; 2], Some(picture("image.png")), None, [9, 32, 48]),
        "flf2v" => ([3.5; 2], Some(picture("image.png")), Some(picture("upright.png")), [9, 32, 48]),
        _ => ([3.5; 2], Some(picture("image.png")), None, [5, 64, 64]),
    };
    let control = match kind {
        "vace" => VideoControl {
            frames: pictures("vace/control"),
            mask: pictures("vace/mask"),
            references: vec![picture("image.png"), picture("upright.png")],
            scale: Some(0.7),
        },
        _ => VideoControl::default(),
    };
    let scheduler = pipeline.denoiser().scheduler().expect("a scheduler");
    VideoRequest {
        prompt: "a cat and a dog are baking bread".into(),
        negative: Some("rain".into()),
        image,
        last_image,
        control,
        size,
        seed: 7,
        settings: DenoiseSettings { steps: 4, scheduler, guidance, cache_threshold: 0.0 },
        memory: None,
        preview: false,
    }
}

fn run(pipeline: &VideoPipeline, request: &VideoRequest, mesh: &VideoMesh) -> Result<Tensor> {
    let plan = pipeline.plan(request, mesh)?;
    let frames =
        pipeline.run(request, &mut VideoRanks::start(mesh)?, &plan, |_| Ok(()))?.expect("this process has rank 0");
    assert_eq!(frames.shape(), plan.frames());
    Ok(tensor(&frames))
}

fn tensor(video: &VideoTensor) -> Tensor {
    Tensor::from_slice(video.values(), video.shape().as_slice(), &Device::Cpu).expect("a tensor")
}

#[test]
fn frames_are_those_of_diffusers_on_every_mesh() -> Result<()> {
    for kind in ["t2v", "i2v", "i2v_2.1", "flf2v", "ti2v", "vace"] {
        let (folder, reference) = (folder(kind), reference(kind));
        let start = &reference["noise"];
        assert!(distance(&noise(7, start.dims())?, start) < 1e-6, "{kind}: the noise is another");
        let pipeline = VideoPipeline::open(folder.path(), WeightType::F32)?;
        let request = request(kind, &pipeline);
        let one = run(&pipeline, &request, &VideoMesh::single())?;
        let far = distance(&one, &reference["frames"]);
        println!("{kind}: {far:e}");
        // The autoencoder of TI2V amplifies the rounding of its latents. A prompt or a guidance that is mistaken changes more.
        let most = if kind == "ti2v" { 2e-5 } else { 3e-6 };
        assert!(far < most, "{kind}: {far:e}");
        for (ring, ulysses, cfg_parallel) in [(2, 1, false), (1, 2, true), (3, 2, false), (5, 1, false)] {
            let mesh = VideoMesh { ring, ulysses, cfg_parallel, ..VideoMesh::single() };
            let far = distance(&run(&pipeline, &request, &mesh)?, &one);
            println!("{kind}, {mesh}: {far:e}");
            assert!(far < 1e-5, "{kind}, {mesh}: {far:e}");
        }
    }
    Ok(())
}

/// The encoder takes the images as they are given, not as they are resized for the video.
#[test]
fn embeddings_of_images_are_those_of_transformers_on_every_mesh() -> Result<()> {
    for (kind, images) in [("i2v_2.1", &["image.png"][..]), ("flf2v", &["image.png", "upright.png"])] {
        let (folder, reference) = (folder(kind), reference(kind));
        let images: Vec<_> = images.iter().map(|name| picture(name)).collect();
        let path = folder.path().join("image_processor/preprocessor_config.json");
        let preprocessing: ImagePreprocessing = read_json(&path)?;
        for (index, image) in images.iter().enumerate() {
            let pixels = Tensor::from_vec(preprocessing.pixels(image)?, (3, 28, 28), &Device::Cpu)?;
            let apart = (pixels - reference["pixels"].get(index)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
            // Two implementations of the filter may round to neighbouring levels.
            assert!(apart < 1.01 / (255.0 * 0.261), "{kind}, image {index}: {apart}");
        }
        let square = picture(&format!("{kind}/square.png"));
        let encoder = ImageEncoder::open(folder.path())?;
        for (ring, ulysses) in [(1, 1), (3, 1), (1, 2), (4, 2), (40, 1)] {
            let mut ranks = VideoRanks::start(&VideoMesh { ring, ulysses, ..VideoMesh::single() })?;
            for (images, name, most) in
                [(&images[..], "image_embeds", 1e-3), (std::slice::from_ref(&square), "square_embeds", 1e-5)]
            {
                let embeds = encoder.encode(images, &mut ranks)?.expect("this process has rank 0");
                let embeds = Tensor::from_vec(embeds, (images.len(), 17, 8), &Device::Cpu)?;
                let far = distance(&embeds, &reference[name]);
                println!("{kind}, {name}, ring {ring} x ulysses {ulysses}: {far:e}");
                assert!(far < most, "{kind}, {name}, ring {ring} x ulysses {ulysses}: {far:e}");
            }
        }
    }
    Ok(())
}

/// Files that older versions of transformers have written.
#[test]
fn an_image_encoder_with_the_names_of_older_files_is_the_same() -> Result<()> {
    let folder = folder("i2v_2.1");
    let encode = || -> Result<Vec<f32>> {
        let mut ranks = VideoRanks::start(&VideoMesh::single())?;
        let encoder = ImageEncoder::open(folder.path())?;
        Ok(encoder.encode(&[picture("image.png")], &mut ranks)?.expect("this process has rank 0"))
    };
    let (new, file) = (encode()?, folder.path().join("image_encoder/model.safetensors"));
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu)?;
    let mut old: HashMap<_, _> =
        tensors.into_iter().map(|(name, tensor)| (format!("vision_model.{name}"), tensor)).collect();
    old.insert("vision_model.embeddings.position_ids".into(), Tensor::zeros((1, 17), DType::F32, &Device::Cpu)?);
    old.insert("visual_projection.weight".into(), Tensor::zeros((4, 8), DType::F32, &Device::Cpu)?);
    candle_core::safetensors::save(&old, &file)?;
    assert_eq!(encode()?, new);
    old.remove("vision_model.pre_layrnorm.bias");
    candle_core::safetensors::save(&old, &file)?;
    let found = message(VideoPipeline::open(folder.path(), WeightType::F32));
    assert!(found.contains("vision_model.pre_layrnorm.bias [8] is missing"), "{found}");
    Ok(())
}

#[test]
fn a_picture_is_resized_as_by_diffusers() {
    let (found, wanted) = (
        frames::resized(&picture("image.png"), 48, 32, ResizeFilter::Lanczos).expect("resized"),
        picture("resized.png"),
    );
    let apart = found.pixels.iter().zip(&wanted.pixels).map(|(a, b)| a.abs_diff(*b));
    assert_eq!((found.width, found.height), (48, 32));
    assert!(apart.clone().all(|apart| apart <= 1), "{:?}", apart.max());
}

#[test]
fn stages_follow_each_other_and_the_preview_is_near_the_first_frame() -> Result<()> {
    let folder = folder("t2v");
    let pipeline = VideoPipeline::open(folder.path(), WeightType::F32)?;
    let request = VideoRequest { preview: true, ..request("t2v", &pipeline) };
    let mut ranks = VideoRanks::start(&VideoMesh { ring: 2, ..VideoMesh::single() })?;
    let plan = pipeline.plan(&request, ranks.mesh())?;
    let (said, preview) = (Mutex::new(Vec::new()), Mutex::new(None));
    let frames = pipeline.run(&request, &mut ranks, &plan, |event| {
        said.lock().expect("no panic").push(match event {
            VideoEvent::Began(stage) => stage.to_string(),
            VideoEvent::Stepped(step) => step.to_string(),
            VideoEvent::Skipped(step) => format!("skipped {step}"),
            VideoEvent::Preview(frame) => {
                *preview.lock().expect("no panic") = Some(frame);
                "preview".into()
            }
        });
        Ok(())
    })?;
    let said = said.into_inner().expect("no panic");
    assert_eq!(said, ["text", "denoise", "1", "preview", "2", "3", "4", "decode"]);
    let preview = preview.into_inner().expect("no panic").expect("a preview");
    assert_eq!(preview.shape(), [1, 3, 1, 32, 48]);
    let first = tensor(&frames.expect("rank 0")).narrow(2, 0, 1)?;
    let far = distance(&tensor(&preview), &first);
    assert!(far > 1e-3 && far < 2.0, "{far}: a frame of an unfinished video");
    // With a single step, the prediction is the final video.
    let last = VideoRequest { settings: DenoiseSettings { steps: 1, ..request.settings }, ..request };
    let plan = pipeline.plan(&last, ranks.mesh())?;
    let preview = Mutex::new(None);
    let frames = pipeline.run(&last, &mut ranks, &plan, |event| {
        if let VideoEvent::Preview(frame) = event {
            *preview.lock().expect("no panic") = Some(frame);
        }
        Ok(())
    })?;
    let first = tensor(&frames.expect("rank 0")).narrow(2, 0, 1)?;
    let preview = preview.into_inner().expect("no panic").expect("a preview");
    let far = distance(&tensor(&preview), &first);
    assert!(far < 1e-5, "after the last step the prediction is the video: {far:e}");
    Ok(())
}

#[test]
fn a_preview_of_the_whole_video_begins_with_the_image_that_is_given() -> Result<()> {
    let folder = folder("ti2v");
    let tiny = TinyDecoderFile::open(&fixture("../tiny_decoder/taew2_2.safetensors"))?;
    let pipeline = VideoPipeline::open(folder.path(), WeightType::F32)?.with_tiny_decoder(tiny)?;
    let request = |seed| VideoRequest { preview: true, seed, ..request("ti2v", &pipeline) };
    let mesh = VideoMesh { ring: 2, ..VideoMesh::single() };
    let frames = |seed| -> Result<[Tensor; 2]> {
        let (request, preview) = (request(seed), Mutex::new(None));
        let plan = pipeline.plan(&request, &mesh)?;
        pipeline.run(&request, &mut VideoRanks::start(&mesh)?, &plan, |event| {
            if let VideoEvent::Preview(frames) = event {
                *preview.lock().expect("no panic") = Some(frames);
            }
            Ok(())
        })?;
        let preview = preview.into_inner().expect("no panic").expect("a preview");
        assert_eq!(preview.shape(), [1, 3, 5, 64, 64]);
        let preview = tensor(&preview);
        Ok([preview.narrow(2, 0, 1)?, preview.narrow(2, 1, 4)?])
    };
    // The first frame depends on the first latents alone, which are the image's; noise makes the others.
    let ([first, rest], [same, others]) = (frames(7)?, frames(8)?);
    assert!(distance(&first, &same) == 0.0 && distance(&rest, &others) > 0.01);
    let short = VideoRequest { size: [1, 64, 64], ..request(7) };
    let said = message(pipeline.plan(&short, &mesh));
    assert!(said.contains("nothing new"), "{said}");
    Ok(())
}

#[test]
fn an_error_of_the_caller_ends_the_run_on_all_ranks() -> Result<()> {
    let folder = folder("t2v");
    let pipeline = VideoPipeline::open(folder.path(), WeightType::F32)?;
    let (request, mesh) = (request("t2v", &pipeline), VideoMesh { ring: 3, ..VideoMesh::single() });
    let plan = pipeline.plan(&request, &mesh)?;
    let mut ranks = VideoRanks::start(&mesh)?;
    let failed = pipeline.run(&request, &mut ranks, &plan, |event| match event {
        VideoEvent::Stepped(2) => Err(ringspan_video::Error::Caller("the disk is full".into())),
        VideoEvent::Began(VideoStage::Decode) => panic!("nothing is decoded"),
        _ => Ok(()),
    });
    let message = message(failed);
    assert!(message.contains("the disk is full"), "{message}");
    // The ranks can be used again.
    let again = pipeline.run(&request, &mut ranks, &plan, |_| Ok(()))?.expect("rank 0");
    assert!(distance(&tensor(&again), &run(&pipeline, &request, &VideoMesh::single())?) < 1e-5);
    Ok(())
}
