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
fn of_pipeline(name: &str) -> PathBuf {
    fixture("../pipeline").join(name)
}

/// A pipeline's folder, from the files of several fixtures.
fn folder(kind: &str) -> tempfile::TempDir {
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

fn copy(from: &Path, to: &Path) {
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

fn picture(name: &str) -> RgbFrame {
    let video = frames::read_picture(&of_pipeline(name)).expect("a picture");
    frames::to_rgb(&video).expect("one video").next().expect("a picture")
}

/// The pictures of a folder, in the order of their names.
fn pictures(name: &str) -> Vec<RgbFrame> {
    frames::to_rgb(&frames::read_pictures(&of_pipeline(name)).expect("pictures")).expect("one video").collect()
}

/// The request of which the fixture has the frames.
fn request(kind: &str, pipeline: &VideoPipeline) -> VideoRequest {
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
        assert!(far < 1e-4, "{kind}: {far:e}");
        for (ring, ulysses, cfg_parallel) in [(2, 1, false), (1, 2, true), (3, 2, false), (5, 1, false)] {
            let mesh = VideoMesh { ring, ulysses, cfg_parallel, ..VideoMesh::single() };
            let far = distance(&run(&pipeline, &request, &mesh)?, &one);
            assert!(far < 2e-5, "{kind}, {mesh}: {far:e}");
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
    assert!(distance(&tensor(&again), &run(&pipeline, &request, &VideoMesh::single())?) < 2e-5);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers_before_weights_are_read() -> Result<()> {
    let (text, image) = (folder("t2v"), folder("i2v"));
    let open = |folder: &tempfile::TempDir| VideoPipeline::open(folder.path(), WeightType::F32);
    let (of_text, of_image) = (open(&text)?, open(&image)?);
    let (good, single) = (request("t2v", &of_text), VideoMesh::single());
    let with_image = request("i2v", &of_image);
    // The data of all weights is gone, headers and configurations stay.
    for file in ["transformer", "transformer_2", "vae"] {
        truncate(&text.path().join(file).join("diffusion_pytorch_model.safetensors"));
    }
    let refused = |pipeline: &VideoPipeline, request: VideoRequest, mesh: &VideoMesh, words: &[&str]| {
        let found = message(pipeline.plan(&request, mesh).map(drop));
        assert!(words.iter().all(|word| found.contains(word)), "{words:?} are not in: {found}");
    };
    pipeline_plan_is_made(&of_text, &good)?;
    refused(&of_text, VideoRequest { size: [8, 32, 48], ..good.clone() }, &single, &["8 frames", "5", "9"]);
    refused(&of_text, VideoRequest { size: [9, 32, 40], ..good.clone() }, &single, &["width 40", "16"]);
    let wide = VideoMesh { ulysses: 3, ..VideoMesh::single() };
    refused(&of_text, good.clone(), &wide, &["ulysses 3", "there are 2"]);
    refused(&of_text, VideoRequest { image: with_image.image.clone(), ..good.clone() }, &single, &["prompts alone"]);
    let small = VideoRequest { memory: Some(1000), ..good.clone() };
    refused(&of_text, small, &single, &["1000 bytes", "denoising needs", "18 tokens"]);
    let unguided = DenoiseSettings { guidance: [1.0; 2], ..good.settings };
    refused(&of_text, VideoRequest { settings: unguided, ..good.clone() }, &single, &["negative prompt", "guidance 1"]);
    refused(&of_image, VideoRequest { image: None, ..with_image.clone() }, &single, &["last image", "first"]);
    let alone = VideoRequest { image: None, last_image: None, ..with_image };
    refused(&of_image, alone, &single, &["of an image", "none is given"]);
    let (first, both) = (folder("i2v_2.1"), folder("flf2v"));
    let (of_first, of_both) = (open(&first)?, open(&both)?);
    let (with_first, with_both) = (request("i2v_2.1", &of_first), request("flf2v", &of_both));
    pipeline_plan_is_made(&of_both, &with_both)?;
    assert!(of_both.plan(&with_both, &single)?.to_string().contains(", image "), "the plan has the images");
    let last_image = with_both.last_image.clone();
    refused(&of_first, VideoRequest { last_image, ..with_first.clone() }, &single, &["last image has no effect"]);
    refused(&of_first, VideoRequest { image: None, ..with_first }, &single, &["of an image", "none is given"]);
    refused(&of_both, VideoRequest { last_image: None, ..with_both }, &single, &["no last image", "pos_embed_seq_len"]);
    let controlled = folder("vace");
    let of_vace = open(&controlled)?;
    let with_control = request("vace", &of_vace);
    let change = |change: &dyn Fn(&mut VideoControl)| {
        let mut request = with_control.clone();
        change(&mut request.control);
        request
    };
    let (image, control) = (Some(picture("image.png")), with_control.control.clone());
    refused(&of_vace, VideoRequest { image, ..with_control.clone() }, &single, &["a first image has no effect"]);
    refused(&of_vace, change(&|control| control.frames.truncate(8)), &single, &["8 control frames", "9 frames"]);
    refused(&of_vace, change(&|control| control.mask.truncate(1)), &single, &["1 frames of the mask", "9 frames"]);
    refused(&of_vace, change(&|control| control.frames.clear()), &single, &["a mask needs the frames"]);
    refused(&of_vace, change(&|control| control.scale = Some(f32::NAN)), &single, &["NaN", "no finite number"]);
    refused(&of_text, VideoRequest { control, ..good.clone() }, &single, &["no vace_layers"]);
    let thin = RgbFrame { width: 7, height: 90, pixels: vec![0; 3 * 7 * 90] };
    let thin = change(&|control| control.references.push(thin.clone()));
    refused(&of_vace, thin, &single, &["a reference of 7 x 90 pixels", "at least 8"]);
    let plan = of_text.plan(&good, &single)?;
    assert!(plan.check_free(1 << 40).is_ok());
    let found = message(plan.check_free(1000));
    assert!(found.contains("1000 B are free"), "{found}");
    Ok(())
}

fn pipeline_plan_is_made(pipeline: &VideoPipeline, request: &VideoRequest) -> Result<()> {
    let said = pipeline.plan(request, &VideoMesh { ring: 2, ulysses: 2, ..VideoMesh::single() })?.to_string();
    for word in [
        "9 frames of 48 x 32",
        "ring 2 x ulysses 2",
        "18 tokens a video, 4 to 5 a rank",
        "decode",
        "floating-point operations",
    ] {
        assert!(said.contains(word), "{word} is not in: {said}");
    }
    Ok(())
}

/// Cuts the data of a safetensors file off, after its header.
fn truncate(path: &Path) {
    let bytes = std::fs::read(path).expect("a file");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    std::fs::write(path, &bytes[..8 + header]).expect("written");
}

#[test]
fn folders_that_are_no_whole_pipeline_are_refused_by_name() {
    let refused = |change: &dyn Fn(&Path), words: &[&str]| {
        let folder = folder("t2v");
        change(folder.path());
        let found = message(VideoPipeline::open(folder.path(), WeightType::F32));
        assert!(words.iter().all(|word| found.contains(word)), "{words:?} are not in: {found}");
    };
    let remove = |name: &'static str| move |folder: &Path| std::fs::remove_dir_all(folder.join(name)).expect("removed");
    refused(&remove("vae"), &["vae/config.json is missing", "text_encoder/config.json"]);
    refused(&remove("tokenizer"), &["tokenizer/tokenizer.json is missing"]);
    let edit = |file: &'static str, from: &'static str, to: &'static str| {
        move |folder: &Path| {
            let path = folder.join(file);
            let text = std::fs::read_to_string(&path).expect("a file");
            assert!(text.contains(from), "{text}");
            std::fs::write(path, text.replace(from, to)).expect("written");
        }
    };
    let config = "text_encoder/config.json";
    refused(&edit(config, "\"d_ff\": 36", "\"d_ff\": 37"), &["DenseReluDense.wi_0", "[36, 20]", "[37, 20]"]);
    refused(&edit(config, "\"num_layers\": 2", "\"num_layers\": 3"), &["encoder.block.2", "missing"]);
    refused(
        &|folder: &Path| copy(&fixture("../vae/residual"), &folder.join("vae")),
        &["16 channels of latents", "vae 4"],
    );
    refused(
        &|folder: &Path| {
            std::fs::remove_dir_all(folder.join("transformer_2")).expect("removed");
            std::fs::remove_file(folder.join("model_index.json")).expect("removed");
            copy(&fixture("i2v"), &folder.join("transformer"));
        },
        &["image encoder", "image_dim 8", "image_encoder/config.json is missing", "--embeds"],
    );
    let of_images = |more: &str, from: &Path| {
        let images = from.to_owned();
        let more = more.to_owned();
        move |folder: &Path| {
            std::fs::remove_dir_all(folder.join("transformer_2")).expect("removed");
            copy(&of_pipeline("flf2v"), folder);
            copy(&images, &folder.join(&more));
        }
    };
    refused(&of_images("transformer", &fixture("flf2v")), &["17 embeddings an image", "10 positions"]);
    refused(
        &of_images("image_encoder", &fixture("../text/text_encoder")),
        &["image_encoder/config.json", "model_type is umt5"],
    );
    // An autoencoder of three levels, whose latents stand for 4 x 4 pixels.
    let with_smaller_latents = |folder: &Path| {
        std::fs::remove_dir_all(folder.join("transformer_2")).expect("removed");
        copy(&of_pipeline("vace"), folder);
        let path = folder.join("vae/config.json");
        let mut config: serde_json::Value = read_json(&path).expect("a configuration");
        config["dim_mult"] = serde_json::json!([1, 1, 1]);
        config["temperal_downsample"] = serde_json::json!([true, true]);
        std::fs::write(path, config.to_string()).expect("written");
    };
    refused(&with_smaller_latents, &["96 channels (vace_in_channels)", "it has 48"]);
}
