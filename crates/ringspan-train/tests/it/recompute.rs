//! `--recompute auto` recomputes as little as the free memory allows, and says what that is.

use crate::common::{of_tiny_model, run, text, tiny_config, tiny_model};
use ringspan_candle::Recompute;
use ringspan_train::{Plan, Settings, TrainConfig, plan};
use safetensors::{Dtype, tensor::TensorView};
use std::path::Path;

const TOKENS: usize = 1 << 16;

/// The plan of a narrow model of `layers` layers over a long sequence, whose stored activations take nearly all of its memory.
fn plan_of(root: &Path, layers: usize, recompute: &str) -> Plan {
    let mut json = tiny_config();
    json["num_hidden_layers"] = layers.into();
    json["max_position_embeddings"] = TOKENS.into();
    std::fs::write(root.join("config.json"), json.to_string()).unwrap();
    let settings = Settings {
        model_config: Some(root.join("config.json")),
        tokens: Some(root.join("tokens.safetensors")),
        out: Some(root.join("out")),
        ring: Some(1),
        steps: Some(1),
        recompute: Some(recompute.into()),
        ..Settings::default()
    };
    plan(&TrainConfig::resolve(settings).unwrap()).unwrap()
}

#[test]
fn auto_recomputes_as_little_as_memory_allows() {
    let Some(free) = ringspan::memory::available() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let bytes = vec![0; TOKENS * 4];
    let view = TensorView::new(Dtype::U32, vec![1, TOKENS], &bytes).unwrap();
    safetensors::serialize_to_file([("tokens", view)], None, &root.join("tokens.safetensors")).unwrap();
    let few = plan_of(root, 2, "auto");
    assert_eq!(few.recompute, Recompute::Nothing);
    assert!(few.to_string().contains("--recompute auto is nothing, the least for which there is room"), "{few}");
    for (kept, chosen) in [("nothing", Recompute::KeepAttention), ("keep-attention", Recompute::Full)] {
        // With so many layers, the activations that `kept` stores take a third more than auto may use.
        let of_layer = (plan_of(root, 12, kept).rank_bytes() - plan_of(root, 2, kept).rank_bytes()) / 10;
        let layers = usize::try_from(free * 6 / 5 / of_layer).unwrap();
        let auto = plan_of(root, layers, "auto");
        assert_eq!(auto.recompute, chosen, "{layers} layers, {auto}");
        assert!(auto.refusal.is_none() && !auto.to_string().contains("--recompute auto is nothing"), "{auto}");
    }
}

#[test]
fn auto_trains_like_the_setting_it_chose() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let losses = |recompute: &str| {
        let settings = Settings { recompute: Some(recompute.into()), steps: Some(3), ..of_tiny_model(root, recompute) };
        run(settings).1.losses()
    };
    assert_eq!(losses("auto"), losses("nothing"));
    let settings = Settings { recompute: Some("none".into()), ..of_tiny_model(root, "none") };
    let refused = TrainConfig::resolve(settings).unwrap_err().to_string();
    assert!(refused.contains("none") && refused.contains("auto, full, keep-attention, nothing"), "{refused}");
}
