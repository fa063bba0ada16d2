//! Ten steps of training equal PyTorch's: data, loss, gradients, clipping, optimiser and learning rate together.
//!
//! The fixture is made by `tools/make_training_fixture.py`.

use crate::common::run;
use ringspan_train::Settings;
use std::path::Path;

#[test]
fn ten_steps_equal_pytorch_on_one_two_and_four_ranks() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ten_steps");
    let text = std::fs::read_to_string(fixture.join("losses.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
    let number = |key: &str| expected[key].as_f64();
    let list =
        |key: &str| -> Vec<f64> { expected[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
    let (losses, norms) = (list("losses"), list("grad_norms"));
    assert_eq!(losses.len(), 10);
    let folder = tempfile::tempdir().unwrap();
    for (ring, ulysses, dp_replicate) in [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)] {
        let name = format!("ring {ring}, ulysses {ulysses}, copies {dp_replicate}");
        let (_, memory) = run(Settings {
            model: Some(fixture.join("model")),
            tokens: Some(fixture.join("tokens.safetensors")),
            out: Some(folder.path().join(&name)),
            ring: Some(ring),
            ulysses: Some(ulysses),
            dp_replicate: Some(dp_replicate),
            steps: expected["steps"].as_u64(),
            warmup: expected["warmup"].as_u64(),
            schedule: Some(expected["schedule"].as_str().unwrap().into()),
            lr: number("lr"),
            weight_decay: number("weight_decay"),
            beta1: number("beta1"),
            beta2: number("beta2"),
            eps: number("eps"),
            grad_clip: number("grad_clip"),
            ..Settings::default()
        });
        assert_eq!(memory.steps.len(), 10);
        for ((m, loss), norm) in memory.steps.iter().zip(&losses).zip(&norms) {
            assert!((m.loss - loss).abs() <= 1e-4, "{name}, step {}: loss {} is not {loss}", m.step, m.loss);
            let off = (m.grad_norm - norm).abs();
            assert!(off <= 1e-3 * norm, "{name}, step {}: gradient norm {} is not {norm}", m.step, m.grad_norm);
        }
    }
}
