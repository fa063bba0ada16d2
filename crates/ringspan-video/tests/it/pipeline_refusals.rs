//! Pipelines and requests that are refused, with the numbers, before weights are read.

use crate::pipeline::{copy, folder, of_pipeline, picture, request};
use crate::support::{fixture, message};
use ringspan_video::Result;
use ringspan_video::denoise::DenoiseSettings;
use ringspan_video::frames::RgbFrame;
use ringspan_video::pipeline::{VideoControl, VideoPipeline, VideoRequest};
use ringspan_video::ranks::VideoMesh;
use ringspan_video::tensor_folder::read_json;
use ringspan_video::transformer::WeightType;
use std::path::Path;

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
