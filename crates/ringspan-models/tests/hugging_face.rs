//! Logits, loss and every gradient of each model equal Hugging Face's, on one rank and on many.

use candle_core::Tensor;
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Strategy};
use ringspan_candle::{Context, loss};
use ringspan_models::{Decoder, Error, Weights, folder, gradients};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const MODELS: [&str; 5] = ["llama", "llama_tied", "qwen2", "qwen3", "mistral"];
const MESHES: [(usize, usize); 6] = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 4)];
const LAYOUTS: [LayoutKind; 3] = [LayoutKind::Zigzag, LayoutKind::Contiguous, LayoutKind::Striped(5)];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

struct Reference {
    tokens: Vec<u32>,
    rows: usize,
    len: usize,
    logits: Vec<f32>,
    loss: f64,
    gradients: BTreeMap<String, Vec<f32>>,
}

fn reference(name: &str) -> Reference {
    let tensors = candle_core::safetensors::load(fixture(name).join("reference.safetensors"), &candle_core::Device::Cpu)
        .expect("the fixture");
    let flat = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
    let (rows, len) = tensors["tokens"].dims2().expect("[B, S]");
    let tokens: Vec<i64> = tensors["tokens"].flatten_all().and_then(|t| t.to_vec1()).expect("i64");
    let gradients = tensors.iter().filter_map(|(key, tensor)| Some((key.strip_prefix("grad.")?.to_owned(), flat(tensor))));
    Reference {
        tokens: tokens.into_iter().map(|token| token as u32).collect(),
        rows,
        len,
        logits: flat(&tensors["logits"]),
        loss: f64::from(flat(&tensors["loss"])[0]),
        gradients: gradients.collect(),
    }
}

/// Targets are shifted before anything is cut: the last token of a row has none.
fn targets(reference: &Reference) -> Vec<u32> {
    let Reference { tokens, rows, len, .. } = reference;
    let target = |at: usize| if at % len + 1 == *len { loss::IGNORE } else { tokens[at + 1] };
    (0..rows * len).map(target).collect()
}

struct Answer {
    logits: Vec<f32>,
    loss: f64,
    gradients: BTreeMap<String, Vec<f32>>,
}

fn on_mesh(decoder: &Decoder, weights: &Weights, r: &Reference, kind: LayoutKind, mesh: (usize, usize)) -> Answer {
    let (ring, ulysses) = mesh;
    let layout = Arc::new(Layout::new(kind, &Documents::batch(r.rows, r.len), ring * ulysses).expect("ranks"));
    let targets = targets(r);
    let valid = targets.iter().filter(|target| **target != loss::IGNORE).count();
    let vocabulary = decoder.config().vocab_size;
    let answer = Mutex::new(Answer {
        logits: vec![0.0; r.tokens.len() * vocabulary],
        loss: 0.0,
        gradients: r.gradients.iter().map(|(name, values)| (name.clone(), vec![0.0; values.len()])).collect(),
    });
    threads::run(ring * ulysses, Options::default(), |comm| {
        let rank = comm.rank();
        let run = || -> Result<(), Error> {
            let group = Group::new(comm.clone(), ring, ulysses, Kernel::new(1)).map_err(candle_core::Error::wrap)?;
            let context = Context::new(Arc::new(group), layout.clone(), Strategy::Ring)?;
            let shard = |all: &[u32]| layout.shard(rank, all, 1).map_err(candle_core::Error::wrap);
            let (tokens, targets) = (shard(&r.tokens)?, shard(&targets)?);
            let mut x = decoder.embed(weights, &tokens)?;
            for index in 0..decoder.config().num_hidden_layers {
                x = decoder.layer(weights, index, &x, &context)?;
            }
            let logits = loss::logits(&decoder.norm(weights, &x)?, &decoder.head(weights)?)?;
            let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
            let mut own = BTreeMap::new();
            let scale = 1.0 / valid as f32;
            let nll = gradients::loss_and_gradients(
                decoder, weights, &tokens, &targets, scale, &context,
                &mut |name, gradient| {
                    let values: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
                    assert!(own.insert(name.to_owned(), values).is_none(), "{name} came twice");
                    Ok(())
                },
            )?;
            let mut answer = answer.lock().expect("no panics");
            layout.unshard(rank, &logits, vocabulary, &mut answer.logits).map_err(candle_core::Error::wrap)?;
            answer.loss += nll / valid as f64;
            assert_eq!(own.len(), answer.gradients.len(), "every parameter has a gradient");
            for (name, values) in own {
                let sums = answer.gradients.get_mut(&name).expect("a known name");
                sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
            Ok(())
        };
        run().map_err(|error| ringspan::Error::Layout(error.to_string()))
    })
    .expect("runs");
    answer.into_inner().expect("no panics")
}

fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    let norm: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
    difference.sqrt() / norm.sqrt()
}

#[test]
fn every_model_equals_hugging_face_on_every_mesh() {
    for (turn, name) in MODELS.into_iter().enumerate() {
        let (config, weights) = folder::load(&fixture(name)).expect("the fixture");
        let decoder = Decoder::new(config).expect("supported");
        let reference = reference(name);
        for (index, mesh) in MESHES.into_iter().enumerate() {
            let kind = LAYOUTS[(turn + index) % LAYOUTS.len()];
            let got = on_mesh(&decoder, &weights, &reference, kind, mesh);
            let what = format!("{name}, {kind}, ring {} x ulysses {}", mesh.0, mesh.1);
            let error = relative_l2(&got.logits, &reference.logits);
            assert!(error <= 1e-5, "{what}: logits differ by {error:e}");
            let error = (got.loss / reference.loss - 1.0).abs();
            assert!(error <= 1e-6, "{what}: loss differs by {error:e}");
            for (parameter, wanted) in &reference.gradients {
                let error = relative_l2(&got.gradients[parameter], wanted);
                // Softmax does not see what a key bias adds to all keys alike: those gradients nearly cancel.
                let bound = if parameter.ends_with("k_proj.bias") { 1e-4 } else { 1e-5 };
                assert!(error <= bound, "{what}: gradient of {parameter} differs by {error:e}");
            }
        }
    }
}

/// More ranks than tokens: some hold none, and must still take part.
#[test]
fn ranks_without_tokens_take_part() {
    let (config, weights) = folder::load(&fixture("llama")).expect("the fixture");
    let decoder = Decoder::new(config).expect("supported");
    let whole = reference("llama");
    let short = Reference { tokens: whole.tokens[..3].to_vec(), rows: 1, len: 3, ..whole };
    let one = on_mesh(&decoder, &weights, &short, LayoutKind::Contiguous, (1, 1));
    for mesh in [(5, 1), (3, 2)] {
        let many = on_mesh(&decoder, &weights, &short, LayoutKind::Zigzag, mesh);
        assert!((many.loss / one.loss - 1.0).abs() < 1e-6);
        for (name, wanted) in &one.gradients {
            let error = relative_l2(&many.gradients[name], wanted);
            assert!(error <= 1e-5, "{name} differs by {error:e} on {mesh:?}");
        }
    }
}
