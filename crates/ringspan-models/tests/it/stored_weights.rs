//! Tests of stored weights: models compute the same with matrices in their stored formats as with the decoded f32 numbers.

use crate::support::{fixture, relative_l2};
use candle_core::{DType, Device, Tensor};
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, StrategyKind};
use ringspan_candle::gradients::{Gradients, loss_and_gradients};
use ringspan_candle::model::stored;
use ringspan_candle::quantized::Format;
use ringspan_candle::{Context, Recompute, StoredWeights, Weight, Weights, loss};
use ringspan_models::{Decoder, Error, Lora, TokenBatch, folder, gguf};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// The families for which `tools/make_gguf_family_fixtures.py` writes files.
const FAMILIES: [&str; 16] = [
    "llama",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "olmo2",
    "glm4",
    "phi3",
    "smollm3",
    "granite",
    "deepseek2",
    "deepseek2-lite",
    "deepseek3",
    "gpt-oss",
];

fn file(name: &str) -> PathBuf {
    fixture("gguf_families").join(name)
}

/// A file's model with stored and with decoded weights, and tokens with the logits that transformers computes for them.
fn family(name: &str) -> (Decoder, StoredWeights, Weights, Vec<u32>, Vec<f32>) {
    let path = file(&format!("{name}.gguf"));
    let (config, weights) = gguf::load_stored(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (_, decoded) = gguf::load(&path).expect("the same file");
    let wanted =
        candle_core::safetensors::load(file(&format!("{name}.safetensors")), &Device::Cpu).expect("the fixture");
    let tokens: Vec<i32> = wanted["tokens"].to_vec1().expect("tokens");
    let tokens = tokens.into_iter().map(|token| token as u32).collect();
    (Decoder::new(config).expect("supported"), weights, decoded, tokens, values(&wanted["logits"]))
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|tensor| tensor.to_vec1()).expect("f32")
}

/// Runs `work` on each of `ranks` ranks with its tokens; the caller puts the results together.
fn on_ranks<T: Send>(
    tokens: &[u32],
    ranks: usize,
    work: impl Fn(usize, &Layout, &Context, &[u32]) -> Result<T, Error> + Sync,
) -> Vec<T> {
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, tokens.len()), ranks).expect("a layout");
    let layout = Arc::new(layout);
    threads::run(ranks, Options::default(), |world| {
        let rank = world.rank();
        let group = Arc::new(Group::new(world, (ranks, 1), Kernel::new(1))?);
        let context = Context::new(group, layout.clone(), StrategyKind::Ring).map_err(said)?;
        let own = layout.shard(rank, tokens, 1)?;
        work(rank, &layout, &context, &own).map_err(said)
    })
    .expect("computes")
}

fn said(error: impl ToString) -> ringspan::Error {
    ringspan::Error::Layout(error.to_string())
}

/// Logits `[S, V]` of all tokens.
fn logits(decoder: &Decoder, weights: &StoredWeights, tokens: &[u32], ranks: usize) -> Vec<f32> {
    let vocabulary = decoder.config().vocab_size;
    let all = Mutex::new(vec![0.0; tokens.len() * vocabulary]);
    on_ranks(tokens, ranks, |rank, layout, context, own| {
        let mut x = decoder.embed(weights, own, context)?;
        for layer in 0..decoder.config().num_hidden_layers {
            x = decoder.layer(weights, layer, &x, context)?;
        }
        let logits = decoder.model().head().logits(&decoder.norm(weights, &x)?, weights)?;
        let mut all = all.lock().expect("no panics");
        layout.unshard(rank, &values(&logits), vocabulary, &mut all).map_err(candle_core::Error::wrap)?;
        Ok(())
    });
    all.into_inner().expect("no panics")
}

#[test]
fn files_of_every_family_compute_what_transformers_computes() {
    for name in FAMILIES {
        let (decoder, weights, decoded, tokens, wanted) = family(name);
        for ranks in [1, 3] {
            for (how, weights) in [("as they are stored", &weights), ("in f32", &stored(decoded.clone()))] {
                let error = relative_l2(&logits(&decoder, weights, &tokens, ranks), &wanted);
                assert!(error < 2e-5, "{name} {how} on {ranks} ranks: logits differ by {error:e}");
            }
        }
    }
}

#[test]
fn matrices_stay_as_small_as_they_are_stored() {
    for name in FAMILIES {
        let (decoder, weights, _, _, _) = family(name);
        let as_stored = decoder.stored_matrices();
        let mut formats = BTreeSet::new();
        for (name, weight) in weights.iter().filter(|(name, _)| as_stored.contains(*name)) {
            let elements: usize = weight.dims().iter().product();
            match weight.format() {
                Some(format) => {
                    assert_eq!(weight.bytes(), elements / format.block_len() * format.block_bytes(), "{name}");
                    assert!(weight.bytes() <= 2 * elements, "{name} takes {} bytes", weight.bytes());
                    formats.insert(format.to_string());
                }
                // F32 is the only type in these files that has no format of its own.
                None => assert_eq!(weight.computed_in(), DType::F32, "{name}"),
            }
        }
        assert!(formats.len() > 3, "{name} has only {formats:?}");
    }
}

/// The loss, and the gradients of adapters.
fn learned(
    decoder: &Decoder,
    weights: &StoredWeights,
    tokens: &[u32],
    recompute: Recompute,
) -> (f64, BTreeMap<String, Vec<f32>>) {
    let mut targets = tokens[1..].to_vec();
    targets.push(loss::IGNORE);
    let sums = Mutex::new((0.0, BTreeMap::<String, Vec<f32>>::new()));
    on_ranks(tokens, 2, |rank, layout, context, own| {
        let targets = layout.shard(rank, &targets, 1).map_err(candle_core::Error::wrap)?;
        let mut take = |_, gradients: Gradients| {
            let mut sums = sums.lock().expect("no panics");
            for (name, gradient) in gradients {
                let gradient = values(&gradient);
                let sum = sums.1.entry(name).or_insert_with(|| vec![0.0; gradient.len()]);
                sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x);
            }
            Ok(())
        };
        let batch = TokenBatch { tokens: own, targets: &targets, scale: 0.1 };
        let nll = loss_and_gradients(decoder, weights, &batch, recompute, context, &mut take)?;
        sums.lock().expect("no panics").0 += nll;
        Ok(())
    });
    sums.into_inner().expect("no panics")
}

#[test]
fn adapters_learn_beside_quantized_matrices_what_they_learn_beside_the_decoded_ones() {
    for name in ["qwen3", "gemma2", "phi3", "olmo2", "glm4", "mixtral", "qwen3moe", "deepseek3", "gpt-oss"] {
        let (decoder, mut weights, mut decoded, tokens, _) = family(name);
        let targets: Vec<String> = decoder.linear_layers().map(|layer| layer.name.clone()).collect();
        let targets: BTreeSet<String> =
            targets.iter().filter_map(|name| Some(name.rsplit_once('.')?.1.into())).collect();
        let lora = Lora::new(3, 6.0, targets.into_iter().collect()).expect("possible");
        let decoder = decoder.with_lora(lora).expect("possible");
        for unit in decoder.units() {
            for (at, (name, shape)) in decoder.unit_shapes(unit).into_iter().enumerate() {
                if decoder.trains(&name) {
                    let wave =
                        (0..shape.iter().product::<usize>()).map(|i| ((i * 37 + at * 11) as f32 * 0.71).sin() * 0.1);
                    let matrix =
                        Tensor::from_iter(wave, &Device::Cpu).and_then(|m| m.reshape(shape)).expect("a matrix");
                    weights.insert(name.clone(), matrix.clone().into());
                    decoded.insert(name, matrix);
                }
            }
        }
        let decoded = stored(decoded);
        for recompute in [Recompute::Full, Recompute::KeepAttention, Recompute::Nothing] {
            let got = learned(&decoder, &weights, &tokens, recompute);
            let wanted = learned(&decoder, &decoded, &tokens, recompute);
            assert!((got.0 / wanted.0 - 1.0).abs() < 1e-6, "{name}: {} and {}", got.0, wanted.0);
            assert!(got.1.len() > 8 && got.1.keys().eq(wanted.1.keys()), "{name}");
            for (parameter, wanted) in &wanted.1 {
                let error = relative_l2(&got.1[parameter], wanted);
                assert!(error < 1e-5, "{name}, recompute {recompute}: {parameter} differs by {error:e}");
            }
        }
    }
}

#[test]
fn a_quantized_matrix_that_should_be_trained_is_refused_by_its_name() {
    let (decoder, weights, _, tokens, _) = family("qwen3");
    let errors = on_ranks(&tokens, 1, |_, _, context, own| {
        let mut nothing = |_, _| Ok(());
        let batch = TokenBatch { tokens: own, targets: own, scale: 1.0 };
        let result = loss_and_gradients(&decoder, &weights, &batch, Recompute::Full, context, &mut nothing);
        Ok(result.expect_err("frozen").to_string())
    });
    assert!(errors[0].contains("QuantizedMatrix[96 x 64; Q8_0]"), "{}", errors[0]);
}

/// Writes a folder in bf16 or f16, like most published models.
fn narrow_folder(from: &str, dtype: DType, to: &Path) {
    let (_, weights) = folder::load(&fixture(from)).expect("the fixture");
    let narrow = weights.into_iter().map(|(name, tensor)| Ok((name, tensor.to_dtype(dtype)?)));
    let narrow: std::collections::HashMap<_, _> = narrow.collect::<candle_core::Result<_>>().expect("narrow");
    candle_core::safetensors::save(&narrow, to.join("model.safetensors")).expect("written");
    std::fs::copy(fixture(from).join("config.json"), to.join("config.json")).expect("copied");
}

#[test]
fn folders_of_two_bytes_a_number_are_held_so() {
    let tokens: Vec<u32> = (0..24).map(|i| i * i * 31 % 96).collect();
    for (name, dtype, format) in [
        ("llama", DType::BF16, "BF16"),
        ("gemma3", DType::F16, "F16"),
        ("phi3", DType::BF16, "BF16"),
        ("mixtral", DType::BF16, "BF16"),
        ("deepseek_v3", DType::F16, "F16"),
        ("gpt_oss", DType::BF16, "BF16"),
    ] {
        let out = tempfile::tempdir().expect("a folder");
        narrow_folder(name, dtype, out.path());
        let (config, weights) = folder::load_stored(out.path()).expect("loads");
        let (_, wide) = folder::load(out.path()).expect("loads");
        let decoder = Decoder::new(config).expect("supported");
        for name in decoder.stored_matrices() {
            assert_eq!(weights[&name].format().map(|it| it.to_string()).as_deref(), Some(format), "{name}");
        }
        let error = relative_l2(&logits(&decoder, &weights, &tokens, 2), &logits(&decoder, &stored(wide), &tokens, 2));
        assert!(error < 1e-6, "{name}: {error:e}");
    }
}

/// Codes and exponents of experts are kept as they are, in blocks of 17 bytes for 32 numbers.
#[test]
fn experts_of_folders_in_mxfp4_are_held_so() {
    let folder = fixture("gpt_oss_mxfp4");
    let (config, weights) = folder::load_stored(&folder).expect("loads");
    let (_, wide) = folder::load(&folder).expect("loads");
    let decoder = Decoder::new(config).expect("supported");
    let stacks: Vec<_> = weights.iter().filter(|(_, weight)| matches!(weight, Weight::Stack(_))).collect();
    assert_eq!(stacks.len(), 4);
    for (name, weight) in stacks {
        let elements: usize = weight.dims().iter().product();
        assert_eq!((weight.format(), weight.bytes()), (Some(Format::Mxfp4), elements / 32 * 17), "{name}");
        assert_eq!(values(&weight.to_tensor().expect("decodes")), values(&wide[name]), "{name}");
    }
    let tokens: Vec<u32> = (0..24).map(|i| i * i * 31 % 96).collect();
    let error = relative_l2(&logits(&decoder, &weights, &tokens, 2), &logits(&decoder, &stored(wide), &tokens, 2));
    assert!(error < 1e-6, "{error:e}");
}

#[test]
fn sentence_pieces_are_merged_by_their_scores() {
    #[derive(serde::Deserialize)]
    struct ExpectedTokens {
        text: String,
        tokens: Vec<u32>,
    }
    for kind in ["gemma", "llama"] {
        let tokenizer = gguf::tokenizer(&file(&format!("tokenizer-{kind}.gguf"))).expect("a tokenizer");
        let json = std::fs::read(file(&format!("tokenizer-{kind}.json"))).expect("the fixture");
        let wanted: Vec<ExpectedTokens> = serde_json::from_slice(&json).expect("JSON");
        assert!(wanted.len() > 3);
        for ExpectedTokens { text, tokens } in wanted {
            let got = tokenizer.encode(text.as_str(), true).expect("encodes");
            assert_eq!(got.get_ids(), tokens, "{kind}: {text}");
            // A special token is not part of a text, but a piece defined by users is. If texts begin with a space, so does the
            // text after it.
            let said = tokenizer.decode(&tokens, true).expect("decodes");
            let wanted = text.replace("<end>", "");
            match kind {
                "gemma" => assert_eq!(said, wanted),
                _ => assert_eq!(said.replace(' ', ""), wanted.replace(' ', "")),
            }
        }
        let template = gguf::chat_template(&file(&format!("tokenizer-{kind}.gguf"))).expect("read").expect("there");
        assert!(template.source.contains("<turn>"), "{}", template.source);
        assert_eq!((&template.tokens["bos_token"], &template.tokens["eos_token"]), (&"<s>".into(), &"<end>".into()));
    }
}
