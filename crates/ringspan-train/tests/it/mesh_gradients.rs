//! Every parameter's gradient on every mesh equals that on one rank.

use crate::meshes::{meshes, meshes_of_experts};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::Weights;
use ringspan_models::{Config, Decoder};
use ringspan_train::{
    Settings, StepResults, TrainConfig,
    data::{Batch, IGNORE, Sequence},
    single_step,
};

/// Largest difference between a gradient and that of one rank, relative to its norm.
const TOLERANCE: f64 = 1e-5;

/// Rows, of which up to eight ranks have unequal parts, and their tokens.
const ROWS: usize = 9;
const LENGTH: usize = 29;

/// A batch with rows of one document, rows of several, and padded ones.
fn batch(vocabulary: u32) -> Batch {
    let kinds: [&[usize]; 3] = [&[LENGTH], &[11, 1, 17], &[5, 13]];
    let sequence = |row: usize| {
        let segments = kinds[row % kinds.len()].to_vec();
        let len = segments.iter().sum();
        let tokens: Vec<u32> = (0..len).map(|i| (i * i * 7 + i * row * 31 + row) as u32 % vocabulary).collect();
        let mut targets: Vec<u32> = tokens[1..].iter().copied().chain([IGNORE]).collect();
        let mut end = 0;
        for piece in &segments {
            end += piece;
            targets[end - 1] = IGNORE;
        }
        Sequence { tokens, targets, segment_lengths: segments }
    };
    Batch::new(&(0..ROWS).map(sequence).collect::<Vec<_>>(), LENGTH)
}

fn model(change: serde_json::Value) -> (Decoder, Weights) {
    let mut json = crate::common::tiny_config();
    json.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    let decoder = Decoder::new(serde_json::from_value::<Config>(json).unwrap()).unwrap();
    let weights = decoder.init(3).unwrap();
    (decoder, weights)
}

fn step((decoder, weights): &(Decoder, Weights), settings: Settings) -> StepResults {
    // The token file is not read: the batch is in memory.
    let settings = Settings { tokens: Some("none".into()), threads: Some(1), ..settings };
    let config = TrainConfig::resolve(settings).unwrap();
    let batch = batch(decoder.config().vocab_size as u32);
    single_step(&ProcessGroup::single(), &config, (decoder, weights), &batch).unwrap().unwrap()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

fn size(values: &[f32]) -> f64 {
    norm(values.iter().map(|x| f64::from(*x)))
}

/// The step of one rank. Asserts that each gradient can be compared: where large terms cancel to nearly nothing, a sum is as
/// inaccurate as the terms are rounded, whatever its own norm.
fn one_rank(model: &(Decoder, Weights)) -> StepResults {
    let one = step(model, Settings { ring: Some(1), ..Settings::default() });
    let each = |values: &[f32]| size(values) / (values.len() as f64).sqrt();
    let largest = one.gradients.values().map(|values| each(values)).fold(0.0, f64::max);
    for (name, values) in &one.gradients {
        assert!(each(values) > 1e-4 * largest, "{name}: an element is {:e}, beside {largest:e}", each(values));
    }
    assert!(one.gradients.keys().eq(model.1.keys()), "a gradient for each parameter");
    one
}

/// The differences found on all meshes.
#[derive(Default)]
struct Found {
    meshes: usize,
    /// The largest relative difference of all gradients.
    worst: f64,
    wrong: Vec<String>,
}

impl Found {
    fn compare(&mut self, name: &str, mesh: &StepResults, one: &StepResults) {
        let is_off = |by: f64, most: f64| by > most || by.is_nan();
        let off = (mesh.loss - one.loss).abs() / one.loss;
        if is_off(off, 1e-6) {
            self.wrong.push(format!("{name}: loss {} is not {}", mesh.loss, one.loss));
        }
        assert!(mesh.gradients.keys().eq(one.gradients.keys()), "{name}");
        for (parameter, expected) in &one.gradients {
            let actual = &mesh.gradients[parameter];
            assert_eq!(actual.len(), expected.len(), "{name}, {parameter}");
            let apart = norm(actual.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            let off = apart / size(expected);
            self.worst = self.worst.max(off);
            if is_off(off, TOLERANCE) {
                self.wrong.push(format!("{name}: the gradient of {parameter} is {off:.1e} off"));
            }
        }
        self.meshes += 1;
    }

    fn check(&self) {
        println!("{} meshes, gradients at most {:.1e} off", self.meshes, self.worst);
        let shown = &self.wrong[..self.wrong.len().min(30)];
        assert!(shown.is_empty(), "{} differences: {shown:#?}", self.wrong.len());
    }
}

/// The model has norms and biases, query heads that share keys, and an embedding that is also the head.
#[test]
fn each_gradient_is_that_of_one_rank_on_every_mesh() {
    let model = model(serde_json::json!({ "model_type": "qwen3", "attention_bias": true }));
    let one = one_rank(&model);
    let mut found = Found::default();
    for mesh in meshes() {
        let shardings = if mesh.parts == 1 && mesh.ranks() < 5 { vec!["full", "none"] } else { vec!["full"] };
        for sharding in shardings {
            let settings = Settings { sharding: Some(sharding.into()), ..Settings::default() };
            let name = format!("{mesh:?}, sharding {sharding}");
            found.compare(&name, &step(&model, mesh.overriding(settings)), &one);
        }
    }
    found.check();
}

/// Experts are distributed over ranks, cut by their width and copied, and an auxiliary loss balances their load over all ranks.
#[test]
fn each_gradient_of_a_sparse_model_is_that_of_one_rank_on_every_mesh_of_its_experts() {
    let model = model(crate::common::experts());
    let one = one_rank(&model);
    let mut found = Found::default();
    for mesh in meshes_of_experts() {
        found.compare(&format!("{mesh:?}"), &step(&model, mesh.overriding(Settings::default())), &one);
    }
    found.check();
}
