//! Tests of runs whose length is given as passes over their text (epochs), not in steps.

use crate::common::{Memory, of_tiny_model, text, tiny_model};
use ringspan_train::{Settings, TrainArgs, TrainConfig, train};
use std::{fs, path::Path, sync::atomic::AtomicBool};

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        held_out: Some(0.0),
        batch_size: Some(2),
        ring: Some(1),
        threads: Some(1),
        save_every: Some(0),
        ..of_tiny_model(root, name)
    }
}

/// A run has as many steps as the tokens of the text take, on every mesh, and when it is resumed for longer.
#[test]
fn epochs_are_passes_over_the_text_on_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let epochs = Settings { epochs: Some(1.5), grad_accumulation: Some(2), ..settings(root, "epochs") };
    let plan = ringspan_train::plan(&TrainConfig::resolve(epochs.clone()).unwrap()).unwrap();
    assert_eq!(plan.tokens_per_step, 4 * 64);
    let passes = plan.passes.unwrap();
    // The number of steps is rounded up.
    assert!(
        passes >= 1.5 && passes * (plan.steps - 1) as f64 / (plan.steps as f64) < 1.5,
        "{passes} in {}",
        plan.steps
    );
    assert!(plan.to_string().contains(&format!("{}, {passes:.2} passes over the data", plan.steps)), "{plan}");
    let on_others = Settings { ring: Some(2), dp_shard: Some(2), ..epochs.clone() };
    let on_others = ringspan_train::plan(&TrainConfig::resolve(on_others).unwrap()).unwrap();
    assert_eq!((on_others.steps, on_others.passes), (plan.steps, plan.passes));

    let stop = AtomicBool::new(false);
    let mut memory = Memory::default();
    let outcome = train(&TrainConfig::resolve(epochs).unwrap(), &stop, &mut memory).unwrap();
    assert_eq!(outcome.step, plan.steps);
    let tokens: u64 = plan.steps * plan.tokens_per_step;
    assert_eq!(memory.steps.last().unwrap().tokens, tokens);
    // The run's folder keeps the length in steps, and a resumed run may ask for more steps or more epochs.
    let kept = fs::read_to_string(outcome.out.join("train.toml")).unwrap();
    assert!(kept.contains(&format!("steps = {}", plan.steps)) && !kept.contains("epochs"), "{kept}");
    let more = TrainArgs {
        settings: Settings { resume: Some(outcome.out), epochs: Some(2.0), ..Settings::default() },
        ..TrainArgs::default()
    };
    let outcome = train(&TrainConfig::from_args(&more).unwrap(), &stop, &mut Memory::default()).unwrap();
    assert_eq!(outcome.step, (plan.steps as f64 / passes * 2.0).ceil() as u64);
}
