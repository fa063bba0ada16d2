//! Model folders: the decoder, its tokenizer, and the tokens that end a text.

use crate::mesh::{DEADLINE, MeshArgs};
use crate::output;
use anyhow::{Context, Result, anyhow, ensure};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::{ActivationDType, DeviceName, Devices, Precision};
use ringspan_models::{
    Config, Decoder, ModelSource, RopeScaling,
    special_tokens::{GENERATION_CONFIG, SpecialTokens, without_tokenizer},
};
use ringspan_serve::engine::fingerprint as fingerprint_of;
use ringspan_serve::{Mesh, Model};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// Makes the mesh that the flags describe. Call it before anything computes.
pub(crate) fn mesh(args: &MeshArgs, model: &ModelArgs, processes: &ProcessGroup) -> Result<Mesh> {
    mesh_sharing_model(args, ModelAxes { tp: 1, ep: 1, pp: 1, attn_dp: 1 }, model, processes)
}

/// The axes of a mesh over which a model is distributed: layers' width, experts, layers; and the replicas of its attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModelAxes {
    pub(crate) tp: usize,
    pub(crate) ep: usize,
    pub(crate) pp: usize,
    pub(crate) attn_dp: usize,
}

/// Like [`mesh`], where ranks share the model as well.
pub(crate) fn mesh_sharing_model(
    args: &MeshArgs,
    ModelAxes { tp, ep, pp, attn_dp }: ModelAxes,
    model: &ModelArgs,
    processes: &ProcessGroup,
) -> Result<Mesh> {
    let (_, threads) = args.start_with(processes, &[(tp, "--tp"), (attn_dp, "--attn-dp"), (pp, "--pp")])?;
    let devices = Devices::open(model.device, processes.local_rank()).context("--device")?.computing_in(model.dtype);
    let devices = devices.rounding_activations(model.activation_dtype);
    let (ring, ulysses, processes) = (args.ring, args.ulysses, processes.clone());
    Ok(Mesh { ring, ulysses, tp, ep, pp, attn_dp, threads, deadline: DEADLINE, devices, processes })
}

/// Connects the mesh's ranks by NCCL if they are processes, compute on GPUs, and all of them can; prints how their blocks
/// travel. All ranks must call this.
pub(crate) fn connected(mesh: Mesh) -> Result<Mesh> {
    let (processes, blocks) = mesh.devices.connect(&mesh.processes, mesh.deadline)?;
    blocks.iter().for_each(output::note);
    Ok(Mesh { processes, ..mesh })
}

/// The flags that choose a model and how it computes.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A model folder in the layout of Hugging Face (config.json, safetensors, tokenizer.json), an adapter's in that of PEFT,
    /// or a GGUF file
    #[arg(long = "model", value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Scale the model's rotary embedding for longer texts: linear:F, dynamic:F, yarn:F or llama3:F, F times as long; or
    /// theta:BASE, another base
    #[arg(long, value_name = "KIND:F")]
    rope_scaling: Option<RopeScaling>,
    /// Device that computes: cpu, cuda (all GPUs; ranks take them in turn), cuda:N (one of them)
    #[arg(long, default_value_t = DeviceName::Cpu, value_name = "NAME")]
    pub(crate) device: DeviceName,
    /// Type in which the model computes: f32, or bf16, to which f32 weights are rounded. In bf16 are weights, activations, products (with
    /// sums in f32) and cached keys and values; norms, rotations, gates, softmax and routers compute in f32, and logits are f32. Matrices
    /// stay in memory as their file has them, except that bf16 rounds f32; as-stored is another word for f32
    #[arg(long, default_value_t = Precision::F32, value_parser = precision, value_name = "TYPE")]
    pub(crate) dtype: Precision,
    /// Type to which activations are rounded where CPUs multiply them with quantized weights: f32, or int16, which rounds each by
    /// at most 2^-16 of the largest of the 32 around it. With VNNI, prompts and many streams are faster; with AVX2 alone hardly; one
    /// stream is slower on both
    #[arg(long, default_value_t = ActivationDType::F32, value_name = "TYPE")]
    activation_dtype: ActivationDType,
}

/// Reads the type in which a model computes. In f32, matrices stay in memory as their file has them, so `as-stored` means the same.
fn precision(given: &str) -> Result<Precision> {
    match given {
        "as-stored" => Ok(Precision::F32),
        _ => given.parse().context("possible are f32, bf16, as-stored"),
    }
}

impl ModelArgs {
    /// Loads the model, and checks that its heads can be divided among the mesh's ranks.
    pub(crate) fn load(&self, mesh: &Mesh) -> Result<Model> {
        let source = ModelSource::at(&self.path).context("--model")?;
        let json = source.config_json()?;
        let model = match source {
            ModelSource::Model(base) => {
                let stored = base.open()?;
                Model::read(self.decoder(&json, stored.config().clone(), mesh)?, &stored, mesh)
            }
            source @ ModelSource::Adapter(..) => {
                let (config, lora, weights) = source.load_stored()?;
                let decoder = self.decoder(&json, config, mesh)?;
                let decoder = if let Some(lora) = lora { decoder.with_lora(lora)? } else { decoder };
                Model::new(decoder, weights)
            }
        };
        let model = model.with_context(|| format!("the model in {}", self.path.display()))?;
        if self.activation_dtype == ActivationDType::Int16 {
            let on_cpus = mesh.devices.iter().any(|device| device.tensors().is_cpu());
            ensure!(on_cpus, "--activation-dtype int16 has no effect on GPUs, which decode quantized weights");
            ensure!(
                model.has_codes(),
                "--activation-dtype int16 has no effect: the model in {} has no weights in blocks of integers with scales, as in Q8_0",
                self.path.display()
            );
        }
        Ok(model.on(&mesh.devices)?)
    }

    /// The decoder of a configuration, which was read from `json`, with the flags that change it.
    fn decoder(&self, json: &Value, mut config: Config, mesh: &Mesh) -> Result<Decoder> {
        if let Some(scaling) = &self.rope_scaling {
            config = serde_json::from_value(scaling.apply(json, None)?)?;
        }
        let heads = config.num_attention_heads;
        ringspan::schedule::HeadShare::all(heads, config.num_key_value_heads(), (mesh.ring, mesh.ulysses).into())?;
        Ok(Decoder::new(config)?)
    }

    /// A fingerprint of the model and of how it computes keys and values, where sequences may have `max_model_len` tokens.
    pub(crate) fn fingerprint(&self, max_model_len: usize) -> Result<String> {
        let source = ModelSource::at(&self.path).context("--model")?;
        let mut fingerprint = fingerprint_of(source.base().path())?;
        if let ModelSource::Adapter(folder, _) = &source {
            fingerprint += &format!(" with an adapter of {}", fingerprint_of(folder)?);
        }
        fingerprint += &format!(", in {}", self.dtype);
        if self.activation_dtype != ActivationDType::F32 {
            fingerprint += &format!(", activations rounded to {}", self.activation_dtype);
        }
        let mut json = source.config_json()?;
        if let Some(scaling) = &self.rope_scaling {
            json = scaling.apply(&json, None)?;
            fingerprint += &format!(", rotary embedding by {scaling:?}");
        }
        // The rotations of these types depend on the longest sequence.
        let json = json.to_string();
        if ["dynamic", "longrope", "su"].iter().any(|kind| json.contains(&format!("\"{kind}\""))) {
            fingerprint += &format!(", sequences of up to {max_model_len} tokens");
        }
        Ok(fingerprint)
    }
}

/// Prints a warning if a text has more positions than the model is made for.
pub(crate) fn warn_context_overflow(model: &Model, length: usize) {
    if let Some(overflow) = model.decoder().config().context_overflow(length) {
        eprintln!("warning: {overflow}");
    }
}

/// The tokenizer of the model at `path`.
pub(crate) fn tokenizer(path: &Path) -> Result<Tokenizer> {
    let found = ModelSource::at(path).and_then(|source| source.tokenizer()).context("--model")?;
    found.with_context(|| match path.is_file() {
        true => format!("{}: the file has no tokenizer (tokenizer.ggml.model)", path.display()),
        false => format!("{}: {}", path.join("tokenizer.json").display(), without_tokenizer(path)),
    })
}

/// The tokens of `text` after the special tokens that begin a text, as in training. No special token follows them, since a
/// prompt is not the end of its text.
pub(crate) fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoded = SpecialTokens::of(tokenizer).and_then(|around| {
        let encoding = tokenizer.encode_fast(text, false)?;
        Ok(around.begin(encoding.get_ids().to_vec()))
    });
    encoded.map_err(|error| anyhow!("the tokenizer cannot encode the text: {error}"))
}

/// The tokens that end a text: `eos_token_id` of `generation_config.json`, else of `config.json`.
pub(crate) fn end_tokens(path: &Path) -> Result<Vec<u32>> {
    ModelSource::at(path).and_then(|source| source.end_tokens()).with_context(|| format!("--model {}", path.display()))
}

/// The settings for generation that come with the model: `generation_config.json`; empty without one.
pub(crate) fn generation_config(path: &Path) -> Result<Map<String, Value>> {
    let source = ModelSource::at(path).context("--model")?;
    let files = source.folders().into_iter().map(|folder| folder.join(GENERATION_CONFIG));
    let Some(file) = files.into_iter().find(|file| file.exists()) else { return Ok(Map::new()) };
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::encode;
    use ringspan_train::{
        Tokenizer,
        data::{Content, Encoder, NOT_LEARNED},
    };
    use std::path::Path;

    /// If prompts began otherwise than texts in training, the model would continue them otherwise.
    #[test]
    fn a_prompt_begins_as_a_text_does_in_training() {
        let bytes = Tokenizer::byte_level(Path::new("bytes")).and_then(|bytes| bytes.to_json()).expect("JSON");
        let mut json: serde_json::Value = serde_json::from_str(&bytes).expect("JSON");
        for (processor, begins) in [
            (serde_json::Value::Null, 0),
            (
                serde_json::json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>",
                    "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>",
                    "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B",
                    "type_id": 0}}], "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256],
                    "tokens": ["<|endoftext|>"]}}}),
                1,
            ),
        ] {
            json["post_processor"] = processor;
            let inner = tokenizers::Tokenizer::from_bytes(json.to_string()).expect("a tokenizer");
            let prompt = encode(&inner, "hi").expect("tokens");
            assert_eq!(prompt, [&[256][..begins], &[104, 105]].concat());
            // A text that spells the special token has it only once.
            assert_eq!(encode(&inner, "<|endoftext|>hi").expect("tokens"), [256, 104, 105]);
            let trained = Tokenizer::new(inner, Path::new("t")).expect("a tokenizer");
            let encoder = Encoder::new(&trained, None);
            let words = |content| encoder.encode(&content, Path::new("d"), "1").expect("words");
            let bare = |words: Vec<u32>| words.into_iter().map(|word| word & !NOT_LEARNED).collect::<Vec<_>>();
            let whole = [&prompt[..], &[256]].concat();
            assert_eq!(bare(words(Content::Text("hi".into()))), whole, "one token at the end");
            let pair = Content::Completion { prompt: "h".into(), completion: "i".into() };
            assert_eq!(bare(words(pair)), whole);
        }
    }
}
