//! Tests of the video commands, on the smallest models of the video crate's fixtures.

use crate::support::video_fixtures::{copy, fixture, write_pipeline, write_pipeline_of};
use crate::support::{Bench, Tensor, message, read, relative_l2};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Output;

/// A folder with the named tensors of a fixture's reference, and the model to run on them.
pub(crate) struct Video {
    pub(crate) bench: Bench,
    pub(crate) command: &'static str,
    pub(crate) model: PathBuf,
}

impl Video {
    pub(crate) fn new(command: &'static str, model: &str, reference: &str, names: &[&str]) -> Self {
        let tensors = read(&fixture(reference).join("reference.safetensors"));
        let inputs: Vec<(&str, Tensor)> = names.iter().map(|name| (*name, tensors[*name].clone())).collect();
        Self { bench: Bench::new(&inputs), command, model: fixture(model) }
    }

    pub(crate) fn denoise() -> Self {
        let names = ["latents", "prompt_embeds", "negative_prompt_embeds"];
        Self::new("denoise", "transformer/t2v", "transformer/loops", &names)
    }

    pub(crate) fn decode() -> Self {
        Self::new("decode-latents", "vae/tiny", "vae/tiny", &["latents"])
    }

    pub(crate) fn run(&self, flags: &str) -> Output {
        let mut run = self.bench.command(self.command);
        run.arg("--model").arg(&self.model).args(["--threads", "1"]).args(flags.split_whitespace());
        run.output().expect("the binary runs")
    }

    /// Runs the command, and returns its standard error.
    pub(crate) fn succeeds(&self, flags: &str) -> String {
        let output = self.run(flags);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{flags}: {said}");
        said
    }

    pub(crate) fn results(&self, flags: &str) -> BTreeMap<String, Tensor> {
        self.succeeds(&format!("{flags} --out out.safetensors"));
        read(&self.bench.path("out.safetensors"))
    }

    /// The run must say this and leave nothing behind.
    pub(crate) fn refused(&self, flags: &str, words: &[&str]) {
        let before = self.bench.files();
        let message = message(&self.run(flags));
        assert!(words.iter().all(|word| message.contains(word)), "{flags}: {message}");
        assert_eq!(self.bench.files(), before, "{flags}");
    }
}

pub(crate) fn distance(a: &Tensor, b: &[f32]) -> f64 {
    relative_l2(&a.values(), &b.iter().copied().map(f64::from).collect::<Vec<_>>())
}

#[test]
fn the_help_of_train_names_what_a_video_transformer_takes() {
    let help = Bench::new(&[]).command("train").arg("--help").output().expect("the binary runs");
    let help = String::from_utf8_lossy(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    for words in
        ["WAN video transformer", "`latents` [B,C,F,H,W] and `prompt_embeds` [B,N,D]", "to_out.0,ffn.net.0.proj"]
    {
        assert!(help.contains(words), "{words} is not in: {help}");
    }
}

#[test]
fn train_makes_an_adapter_that_denoise_takes() {
    let tensors = read(&fixture("training/data.safetensors"));
    let inputs = ["latents", "prompt_embeds"].map(|name| (name, tensors[name].clone()));
    let train = Video { bench: Bench::new(&inputs), command: "train", model: fixture("transformer/t2v") };
    let flags = "--data in.safetensors --lora-rank 2 --steps 3 --lr 0.02 --seed 1";
    train.refused(&format!("{flags} --out new --epochs 1"), &["--epochs"]);
    train.refused(&format!("{flags} --out new --sequence-length 8"), &["--sequence-length has no effect", "lora-rank"]);
    train.refused("--data in.safetensors --out new", &["--lora-rank is missing"]);
    train.refused("--lora-rank 2 --out new", &["--data is missing"]);
    train.refused(
        &flags.replace("in.safetensors", "in.safetensors=0.5"),
        &["--data in.safetensors", "a weight has no effect"],
    );
    let found = message(&train.run(&format!("{flags} --out new --lora-targets q_proj")));
    for name in ["'q_proj'", "attn1.to_q, ", "ffn.net.0.proj, ", "condition_embedder.time_proj, "] {
        assert!(found.contains(name), "{name} is not in: {found}");
    }
    assert!(!found.contains("blocks."), "names are those of every block: {found}");
    let other = train.bench.path("other");
    copy(&fixture("lora/diffusers"), &other);
    let adapter = std::fs::read(other.join("pytorch_lora_weights.safetensors")).expect("an adapter");
    train.refused(&format!("{flags} --out other"), &["pytorch_lora_weights.safetensors", "another training", "--out"]);
    assert_eq!(std::fs::read(other.join("pytorch_lora_weights.safetensors")).expect("it is left"), adapter);
    let before = train.bench.files();
    let planned = train.run(&format!("{flags} --out new --dry-run"));
    let plan = String::from_utf8_lossy(&planned.stdout).into_owned();
    assert!(planned.status.success() && plan.contains("adapters  rank 2, alpha 4: 20 layers"), "{plan}");
    assert_eq!(train.bench.files(), before);
    train.succeeds(&format!("{flags} --out one --ring 1"));
    train.succeeds(&format!("{flags} --out four --ring 2 --ulysses 2"));
    let [one, four] =
        ["one", "four"].map(|folder| read(&train.bench.path(folder).join("pytorch_lora_weights.safetensors")));
    for (name, matrix) in &one {
        assert!(distance(&four[name], &matrix.values()) < 1e-3, "{name}");
    }
    let denoise = Video { command: "denoise", ..train };
    let flags = "--embeds in.safetensors --steps 2 --scheduler euler --guidance 1";
    let [plain, adapted] = ["", "--lora one"].map(|lora| denoise.results(&format!("{flags} {lora}")));
    assert!(distance(&adapted["latents"], &plain["latents"].values()) > 1e-4, "the adapter changes nothing");
}

#[test]
fn decoded_frames_are_the_same_in_all_files_and_on_all_meshes() {
    let video = Video::decode();
    let latents = "--latents in.safetensors";
    let one = video.results(latents);
    let wanted = read(&fixture("vae/tiny/reference.safetensors"));
    assert!(distance(&one["frames"], &wanted["frames"].values()) < 1e-5);
    let two = video.results(&format!("{latents} --ring 2"));
    assert!(distance(&two["frames"], &one["frames"].values()) < 1e-5);
    let said = video.succeeds(&format!("{latents} --ring 4 --ulysses 2 --out eight"));
    assert!(said.contains("8 ranks x 1 threads, 3 latent columns cut over them, 5 ranks idle"), "{said}");
    std::fs::create_dir(video.bench.path("empty")).expect("a folder");
    video.succeeds(&format!("{latents} --out empty"));
    video.succeeds(&format!("{latents} --out a.gif"));
    assert!(std::fs::read(video.bench.path("a.gif")).expect("a GIF").starts_with(b"GIF89a"));
    for index in 0..9 {
        let name = format!("frame_{index:04}.png");
        let bytes = |folder: &str| std::fs::read(video.bench.path(folder).join(&name)).expect("a picture");
        assert_eq!(bytes("eight"), bytes("empty"));
    }
    video.refused(&format!("{latents} --out empty"), &["not empty"]);
    video.refused(&format!("{latents} --out a.mp4"), &["no encoder"]);
    video.refused(&format!("{latents} --out new --memory 1"), &["memory"]);
    video.refused("--latents none.safetensors --out new", &["none.safetensors"]);
}

#[test]
fn encoded_frames_are_those_of_diffusers() {
    let video = Video::new("encode-frames", "vae/tiny", "vae/tiny", &["frames"]);
    let one = video.results("--frames in.safetensors");
    let wanted = read(&fixture("vae/tiny/reference.safetensors"));
    assert!(distance(&one["latents"], &wanted["encoded"].values()) < 1e-5);
    let two = video.results("--frames in.safetensors --ring 2");
    assert!(distance(&two["latents"], &one["latents"].values()) < 1e-5);

    let decode = Video::decode();
    decode.succeeds("--latents in.safetensors --out frames");
    let encode = Video { command: "encode-frames", ..decode };
    assert_eq!(encode.results("--frames frames")["latents"].shape, [1, 16, 3, 4, 3]);
    encode.refused("--frames in.safetensors --out new.safetensors", &["`frames`", "missing"]);

    // A picture is a video of one frame, as a folder with this picture alone is.
    std::fs::create_dir(encode.bench.path("first")).expect("a folder");
    let first = encode.bench.path("frames/frame_0000.png");
    std::fs::copy(&first, encode.bench.path("first/frame_0000.png")).expect("copied");
    let [picture, folder] = ["frames/frame_0000.png", "first"]
        .map(|frames| encode.results(&format!("--frames {frames}"))["latents"].clone());
    assert_eq!((picture.shape.as_slice(), &picture), (&[1, 16, 1, 4, 3][..], &folder));
}

#[test]
fn text_embed_gives_the_same_rows_on_two_ranks() {
    let video = Video::new("text-embed", "text", "text", &["embeds.0"]);
    let one = video.results("--prompt a --negative b");
    assert_eq!(one["prompt_embeds"].shape, [1, 512, 20]);
    let two = video.results("--prompt a --negative b --ring 2");
    for (name, tensor) in &one {
        assert!(distance(&two[name], &tensor.values()) < 1e-5, "{name}");
    }
    assert_ne!(one["prompt_embeds"], one["negative_prompt_embeds"]);
    video.refused("--prompt a --out no/new.safetensors", &["there is no folder"]);
}

/// A folder with a whole pipeline.
pub(crate) fn pipeline() -> Video {
    let video = Video { bench: Bench::new(&[]), command: "video", model: PathBuf::from("model") };
    write_pipeline(&video.bench.path("model"));
    video
}

/// Flags of the video that the fixture has; a prompt is one word, since flags are split at spaces.
pub(crate) const FLAGS: &str =
    "--prompt cat --negative rain --frames 9 --height 32 --width 48 --steps 4 --seed 7 --guidance 4 --guidance-2 3";

#[test]
fn a_video_is_what_its_stages_make_one_by_one() {
    let video = pipeline();
    let said = video.succeeds(&format!("{FLAGS} --preview look.png --out frames --ring 2"));
    for word in
        ["18 tokens a video, 9 a rank", "floating-point operations", "text begins", "step 4/4", "preview: look.png"]
    {
        assert!(said.contains(word), "{word} is not in: {said}");
    }
    assert_eq!(std::fs::read_dir(video.bench.path("frames")).expect("a folder").count(), 9);
    assert!(std::fs::read(video.bench.path("look.png")).expect("a picture").starts_with(b"\x89PNG"));
    let whole = video.results(FLAGS);
    let stage = |command, flags: &str| {
        let video = Video { command, bench: Bench::new(&[]), model: video.bench.path("model") };
        let output = video.bench.path("out.safetensors");
        video.succeeds(&format!("{flags} --out out.safetensors"));
        (video, output)
    };
    let (_text, embeds) = stage("text-embed", "--prompt cat --negative rain");
    let sizes = "--frames 9 --height 32 --width 48 --steps 4 --seed 7 --guidance 4 --guidance-2 3";
    let (_denoise, latents) = stage("denoise", &format!("--embeds {} {sizes}", embeds.display()));
    let (_decode, frames) = stage("decode-latents", &format!("--latents {}", latents.display()));
    assert_eq!(whole["frames"], read(&frames)["frames"]);
    let gif = video.bench.path("a.gif");
    video.succeeds(&format!("{FLAGS} --cfg-parallel --out {}", gif.display()));
    assert!(std::fs::read(gif).expect("a GIF").starts_with(b"GIF89a"));
}

#[test]
fn with_a_tiny_decoder_the_preview_is_the_whole_video() {
    let video = pipeline();
    let [tiny, of_5b] = ["taew2_1", "taew2_2"].map(|name| fixture(&format!("tiny_decoder/{name}.safetensors")));
    let (flags, tiny) = (format!("{FLAGS} --out new.gif"), format!("--tiny-decoder {}", tiny.display()));
    let said = video.succeeds(&format!("{flags} --preview look.gif {tiny} --ring 2"));
    assert!(said.contains("all frames, by the tiny decoder after step 1"), "{said}");
    let gif = std::fs::read(video.bench.path("look.gif")).expect("a GIF");
    // A block of graphics control begins each of the frames.
    let frames = gif.windows(4).filter(|bytes| bytes[..3] == [0x21, 0xf9, 4]).count();
    assert!(gif.starts_with(b"GIF89a") && frames == 9, "{frames} frames");
    let preview = format!("{flags} --preview look2.gif");
    video.refused(&format!("{flags} --preview look2.png {tiny}"), &["look2.png", ".gif"]);
    let ours = format!("{FLAGS} --out new.gif --preview ./new.gif {tiny}");
    video.refused(&ours, &["--preview ./new.gif", "--out is this file"]);
    let without_preview = video.run(&format!("{flags} {tiny}"));
    let said = String::from_utf8_lossy(&without_preview.stderr);
    assert!(without_preview.status.code() == Some(2) && said.contains("--preview <FILE>"), "{said}");
    video.refused(&format!("{preview} --tiny-decoder {}", of_5b.display()), &["4 channels", "16 x 16", "have 16"]);
    video.refused(&format!("{preview} --tiny-decoder none.safetensors"), &["--tiny-decoder none.safetensors"]);
}

#[test]
fn a_dry_run_prints_the_plan_of_the_run_and_writes_nothing() {
    let video = pipeline();
    let denoise = Video::denoise();
    let of_denoise = "--embeds in.safetensors --steps 4 --scheduler euler --out out.safetensors --ring 2";
    let long = "word-".repeat(600);
    let said = video.run(&format!("{} --out frames --dry-run", FLAGS.replace("cat", &long)));
    assert!(String::from_utf8_lossy(&said.stderr).contains("--prompt: the last"), "a dry run names what is cut off");
    let of_video = format!("{FLAGS} --preview look.png --out frames --ring 2");
    for (video, flags) in [(&denoise, of_denoise), (&video, &of_video)] {
        let before = video.bench.files();
        let output = video.run(&format!("{flags} --dry-run"));
        let plan = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && plan.contains("floating-point operations"), "{plan}");
        assert_eq!(video.bench.files(), before);
        // The speed is measured each time.
        let (plan, time) = plan.trim_end().rsplit_once('\n').expect("lines");
        assert!(time.starts_with("time ") && time.contains(" s for all steps") && time.contains(" GFLOP/s"), "{time}");
        assert!(video.succeeds(flags).contains(plan), "{plan}");
    }
}

#[test]
fn a_video_of_vace_takes_frames_a_mask_and_references() {
    let video = Video { bench: Bench::new(&[]), command: "video", model: PathBuf::from("model") };
    write_pipeline_of("vace", &video.bench.path("model"));
    let of_fixture = |name: &str| fixture("pipeline").join(name).display().to_string();
    let flags = "--prompt a_cat --frames 9 --height 32 --width 48 --steps 2 --guidance 1 --seed 7";
    let (frames, mask) = (of_fixture("vace/control"), of_fixture("vace/mask"));
    let references =
        ["image.png", "upright.png"].map(|name| format!("--reference-image {}", of_fixture(name))).join(" ");
    let control = format!("--control-video {frames} --control-mask {mask} {references}");
    let [with, half, without] = [&control, &format!("{control} --control-scale 0.5"), ""]
        .map(|more| video.results(&format!("{flags} {more} --ring 2"))["frames"].clone());
    assert_eq!(with.shape, [1, 3, 9, 32, 48]);
    assert!(with != half && with != without && half != without, "everything has an effect");
    std::fs::copy(of_fixture("image.png"), video.bench.path("look.png")).expect("copied");
    let flags = format!("{flags} --out out.safetensors");
    video.refused(&format!("{flags} --control-video look.png"), &["1 control frames", "9 frames"]);
    std::fs::write(video.bench.path("look.txt"), "no frames").expect("written");
    video.refused(&format!("{flags} --control-video look.txt"), &["--control-video: look.txt: neither a folder"]);
    let alone = video.run(&format!("{flags} --control-mask {mask}"));
    assert!(alone.status.code() == Some(2) && String::from_utf8_lossy(&alone.stderr).contains("--control-video"));
    video.refused(&format!("{flags} --reference-image look.png --preview look.png"), &["the run reads this picture"]);
}

/// Its autoencoder has 16 pixels to a latent element, and a token has two of these on a side.
#[test]
fn a_video_of_ti2v_has_sides_that_32_divides() {
    let video = Video { bench: Bench::new(&[]), command: "video", model: PathBuf::from("model") };
    write_pipeline_of("ti2v", &video.bench.path("model"));
    let flags = "--prompt cat --frames 5 --steps 1 --guidance 1 --out out.safetensors";
    for (height, width, words) in [
        (48, 64, ["height 48", "multiple of 32"]),
        (64, 80, ["width 80", "multiple of 32"]),
        (64, 72, ["width 72", "multiple of 32"]),
    ] {
        video.refused(&format!("{flags} --height {height} --width {width}"), &words);
    }
    video.succeeds(&format!("{flags} --height 32 --width 64"));
    assert_eq!(read(&video.bench.path("out.safetensors"))["frames"].shape, [1, 3, 5, 32, 64]);
}

#[test]
fn a_video_between_two_images_needs_both() {
    let video = Video { bench: Bench::new(&[]), command: "video", model: PathBuf::from("model") };
    write_pipeline_of("flf2v", &video.bench.path("model"));
    let [first, last] = ["image.png", "upright.png"].map(|name| fixture("pipeline").join(name));
    let flags = "--prompt cat --frames 5 --height 32 --width 48 --steps 3 --guidance 1 --out out.safetensors";
    let both = format!("{flags} --image {} --last-image {}", first.display(), last.display());
    let said = video.succeeds(&format!("{both} --ring 2 --cache-threshold 1e6"));
    for words in ["text begins", "image begins", "encode begins", "blocks were skipped in 1 of 3 steps"] {
        assert!(said.contains(words), "{words} is not in: {said}");
    }
    assert_eq!(read(&video.bench.path("out.safetensors"))["frames"].shape, [1, 3, 5, 32, 48]);
    video.refused(&format!("{flags} --image {}", first.display()), &["no last image"]);
    video.refused(flags, &["videos of an image, and none is given"]);
}

#[test]
fn a_video_that_cannot_be_made_is_refused_and_leaves_nothing() {
    let video = pipeline();
    let flags = format!("{FLAGS} --out new.gif");
    video.refused(&flags.replace("--frames 9", "--frames 8"), &["8 frames", "5 and 9"]);
    video.refused(&flags.replace("--height 32", "--height 40"), &["height 40", "multiple of 16"]);
    video.refused(&format!("{flags} --ulysses 3"), &["ulysses 3", "there are 2"]);
    video.refused(&format!("{flags} --memory 1000"), &["1000 bytes of memory a rank", "18 tokens"]);
    video.refused(&format!("{flags} --preview look.gif"), &["--preview look.gif", ".png"]);
    video.refused(&format!("{flags} --image a.png --preview a.png"), &["--preview a.png", "reads this picture"]);
    video.refused(&format!("{flags} --image none.png"), &["--image", "none.png"]);
    video.refused(&format!("{FLAGS} --out a.mp4"), &["no encoder"]);
    video.refused(&format!("{FLAGS} --out no/a.gif"), &["there is no folder"]);
    std::fs::write(video.bench.path("notes.txt"), "not a picture").expect("written");
    video.refused(&format!("{flags} --image notes.txt"), &["--image", "not a PNG"]);
    // The second transformer's weights are no numbers, so the run fails after a preview was written.
    let weights = video.bench.path("model/transformer_2/diffusion_pytorch_model.safetensors");
    let good = std::fs::read(&weights).expect("weights");
    let mut bad = good.clone();
    let half = bad.len() / 2;
    bad[half..].fill(0x7f);
    std::fs::write(&weights, bad).expect("written");
    let before = video.bench.files();
    let output = video.run(&format!("{flags} --preview look.png"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("preview: look.png") && said.contains("not finite"), "{said}");
    assert_eq!(video.bench.files(), before, "the preview of a run that failed is left");
    std::fs::write(&weights, good).expect("written");
    std::fs::remove_file(video.bench.path("model/tokenizer/tokenizer.json")).expect("removed");
    video.refused(&flags, &["tokenizer/tokenizer.json is missing"]);
}
