use super::*;
use std::path::Path;

fn settings(toml: &str) -> Settings {
    toml::from_str(toml).unwrap()
}

#[track_caller]
fn refused(toml: &str, expected: &[&str]) {
    let message = match toml::from_str::<Settings>(toml) {
        Ok(settings) => TrainConfig::resolve(settings).unwrap_err().to_string(),
        Err(e) => e.to_string(),
    };
    for part in expected {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn nothing_given_is_two_ranks_over_the_text_of_this_folder() {
    let config = TrainConfig::resolve(Settings::default()).unwrap();
    assert_eq!((config.ring, config.ulysses, config.dp_replicate, config.ranks()), (2, 1, 1, 2));
    assert_eq!((config.sequence_length, config.batch_size), (8192, 1));
    assert_eq!(config.source, DataSource::Text(vec![TextSource { path: ".".into(), weight: None }]));
    assert_eq!(config.out, Path::new("ringspan-out"));
    assert!(!config.resume && config.threads >= 1);
    // Another axis replaces the default ring.
    assert_eq!(TrainConfig::resolve(settings("ulysses = 2")).unwrap().ranks(), 2);
    assert_eq!(TrainConfig::resolve(settings("dp-replicate = 3")).unwrap().batch_size, 3);
}

#[test]
fn an_unknown_key_is_told_the_possible_ones() {
    refused("sequnce-length = 4096", &["line 1", "unknown field `sequnce-length`", "`sequence-length`", "`grad-clip`"]);
    refused("resume = 'x'", &["unknown field `resume`"]);
    refused("steps = 'many'", &["line 1", "invalid type"]);
    refused("steps = -1", &["line 1"]);
}

#[test]
fn an_unknown_word_is_told_the_possible_ones() {
    refused("optimizer = 'adam'", &["'adam'", "adamw, sgd"]);
    refused("schedule = 'linear'", &["'linear'", "cosine, constant"]);
    refused("strategy = 'star'", &["'star'", "ring"]);
    refused("sharding = 'some'", &["'some'", "full, none"]);
    refused("packing = 'tight'", &["'tight'", "in-order, balanced"]);
    refused("overlong = 'fold'", &["'fold'", "split, truncate, drop"]);
    refused("layout = 'spiral'", &["'spiral'", "zigzag"]);
}

#[test]
fn a_setting_without_effect_is_refused() {
    refused("tokens = 't'\nsequence-length = 8", &["--sequence-length has no effect with --tokens"]);
    refused("tokens = 't'\nbatch-size = 8", &["--batch-size has no effect"]);
    refused("tokens = 't'\neval-every = 8", &["--eval-every has no effect"]);
    refused("tokens = 't'\npacking = 'balanced'", &["--packing has no effect"]);
    refused("tokens = 't'\noverlong = 'drop'", &["--overlong has no effect"]);
    refused("tokens = 't'\nheld-out = 0.1", &["--held-out has no effect"]);
    refused("tokens = 't'\neval-data = 'e'", &["--eval-data has no effect"]);
    refused("eval-data = 'e'\nheld-out = 0.1", &["--held-out has no effect with --eval-data"]);
    refused("held-out = 0.0\neval-every = 5", &["--eval-every has no effect with --held-out 0"]);
    refused("tokens = 't'\ntoken-cache = 'c'", &["--token-cache has no effect"]);
    refused("tokens = 't'\ncheck-data = true", &["--check-data has no effect"]);
    refused("tokens = 't'\nchat-template = 'c'", &["--chat-template has no effect"]);
    refused("packing = 'balanced'", &["--packing balanced has no effect", "--batch-size 1 x --grad-accumulation 1"]);
    refused("spike-steps = 3", &["--spike-steps has no effect without --spike-factor"]);
    refused("tokenizer = 't'", &["--tokenizer has no effect without --model-config"]);
    refused("model = 'm'\ntokenizer = 't'", &["--tokenizer has no effect with --model,"]);
    refused("momentum = 0.9", &["--momentum has no effect with --optimizer adamw", "sgd"]);
    refused("lora-alpha = 8.0", &["--lora-alpha has no effect without --lora-rank"]);
    refused("lora-dropout = 0.1", &["--lora-dropout has no effect without --lora-rank"]);
    refused("lora-merge = true", &["--lora-merge has no effect without --lora-rank"]);
    refused("offload-activations = true", &["--offload-activations has no effect with --device cpu"]);
    refused("optimizer = 'sgd'\nbeta1 = 0.9", &["--beta1 has no effect with --optimizer sgd", "adamw"]);
}

#[test]
fn a_contradiction_or_a_number_out_of_range_is_refused_with_the_numbers() {
    refused("data = 'a'\ntokens = 'b'", &["--data and --tokens"]);
    refused(
        "dp-replicate = 4\nbatch-size = 3",
        &["--batch-size 3 leaves 1 of the 4 parts of a batch (--dp-replicate 4 x --dp-shard 1)"],
    );
    refused("dp-shard = 2\nsharding = 'none'", &["--sharding none", "--dp-shard 2", "--dp-replicate 2"]);
    refused("model = 'm'\nmodel-config = 'c.json'", &["--model and --model-config exclude each other"]);
    refused("model-config = 'c.json'\nlora-rank = 4", &["--lora-rank", "--model"]);
    refused("model-config = 'c.json'\nrope-scaling = 'yarn:2'", &["--rope-scaling has no effect", "config.json"]);
    refused("lora-rank = 4", &["--lora-rank", "--model"]);
    refused("model = 'm'\nlora-rank = 4\nrope-scaling = 'yarn:2'", &["--rope-scaling", "--lora-merge"]);
    refused("model = 'm'\nrope-scaling = 'yarn'", &["--rope-scaling", "yarn:4"]);
    refused("rope-scaling = 'yarn:2'", &["--rope-scaling has no effect", "--model"]);
    refused("model = 'm'\nlora-rank = 0", &["rank is 0"]);
    refused("model = 'm'\nlora-rank = 4\nlora-targets = 'q_proj, q_proj'", &["'q_proj'", "twice"]);
    refused("model = 'm'\nlora-rank = 4\nlora-dropout = 1.0", &["dropout is 1", "below 1"]);
    refused("steps = 5\nwarmup = 5", &["--warmup 5", "--steps 5", "at most 4"]);
    refused("sequence-length = 1", &["is 1", "at least 2"]);
    refused("beta2 = 1.0", &["--beta2 is 1"]);
    refused("held-out = 1.0", &["--held-out is 1", "below 1"]);
    refused("held-out = -0.1", &["--held-out is -0.1"]);
    refused("lr = nan", &["--lr is NaN"]);
    refused("lr = -1.0", &["--lr is -1"]);
    refused("spike-factor = 1.0", &["--spike-factor is 1", "above 1"]);
    refused("spike-factor = nan", &["--spike-factor is NaN"]);
    refused("spike-factor = -2.0", &["--spike-factor is -2", "0 for no limit"]);
    refused("spike-factor = 2.0\nspike-steps = 0", &["--spike-steps is 0"]);
    refused("eps = inf", &["--eps is inf"]);
    refused("deadline = 0.0", &["--deadline is 0"]);
    refused("steps = 3\nepochs = 2.0", &["--steps and --epochs exclude each other"]);
    refused("epochs = 0.0", &["--epochs is 0"]);
    refused("epochs = 1.0\ntokens = 't.safetensors'", &["--epochs has no effect", "--tokens"]);
    for key in ["ring", "ulysses", "dp-replicate", "steps", "threads", "grad-accumulation", "keep", "batch-size"] {
        refused(&format!("{key} = 0"), &[&format!("--{key} is 0")]);
    }
}

#[test]
fn data_is_one_path_or_several_with_weights_for_all_or_for_none() {
    let sources = |toml: &str| match TrainConfig::resolve(settings(toml)).unwrap().source {
        DataSource::Text(sources) => {
            sources.into_iter().map(|s| (s.path.display().to_string(), s.weight)).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(sources("data = 'a'"), [("a".into(), None)]);
    assert_eq!(sources("data = ['a', 'b']"), [("a".into(), None), ("b".into(), None)]);
    assert_eq!(sources("data = ['a=0.25', 'b=x=3']"), [("a".into(), Some(0.25)), ("b=x".into(), Some(3.0))]);
    assert_eq!(sources("data = 'lr=high'"), [("lr=high".into(), None)]);
    for toml in ["data = 'a'", "data = ['a=0.25', 'b=3']"] {
        let text = settings(toml).to_toml().unwrap();
        assert_eq!(text.replace('"', "'").trim(), toml);
    }
    refused("data = ['a=0.3', 'b']", &["--data a=0.3 has a weight", "--data b has none", "PATH=0.3"]);
    refused("data = 'a=0.3'", &["--data a=0.3", "no effect on a lone source"]);
    refused("data = ['a=0', 'b=1']", &["--data a=0", "above 0"]);
    refused("data = ['a=inf', 'b=1']", &["--data a=inf", "finite"]);
    refused("data = []", &["--data names nothing"]);
    refused("data = 3", &["a path, or a list of paths"]);
    // A file may have a name that looks like a path with a weight.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a=0.3");
    std::fs::write(&path, "").unwrap();
    let given = Settings { data: Some(vec![path.clone()]), ..Settings::default() };
    let expected = DataSource::Text(vec![TextSource { path, weight: None }]);
    assert_eq!(TrainConfig::resolve(given).unwrap().source, expected);
}

#[test]
fn flags_override_the_file_and_the_rest_of_it_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    std::fs::write(&path, "steps = 7\nring = 3\nout = 'nowhere-yet'\n").unwrap();
    let flags = Settings { steps: Some(9), ..Settings::default() };
    let config =
        TrainConfig::from_args(&TrainArgs { dry_run: false, config: Some(path.clone()), settings: flags }).unwrap();
    assert_eq!((config.length, config.ring), (TrainingLength::Steps(9), 3));
    let flags = Settings { epochs: Some(1.5), ..Settings::default() };
    let args = TrainArgs { dry_run: false, config: Some(path.clone()), settings: flags };
    assert_eq!(
        TrainConfig::from_args(&args).unwrap().length,
        TrainingLength::Epochs(1.5),
        "instead of the file's steps"
    );
    let text = config.settings.to_toml().unwrap();
    assert_eq!(toml::from_str::<Settings>(&text).unwrap(), config.settings);
    std::fs::write(&path, "stepz = 7").unwrap();
    let message =
        TrainConfig::from_args(&TrainArgs { config: Some(path), ..TrainArgs::default() }).unwrap_err().to_string();
    assert!(message.contains("c.toml") && message.contains("stepz"), "{message}");
}

/// A resumed run has the `spike-steps` of its old limit, and must be able to go on without a limit.
#[test]
fn a_spike_factor_of_0_is_no_limit() {
    let config = TrainConfig::resolve(settings("spike-factor = 0.0\nspike-steps = 3")).unwrap();
    assert_eq!(config.spike_factor, None);
    assert_eq!(TrainConfig::resolve(settings("spike-factor = 2.0")).unwrap().spike_factor, Some(2.0));
}

#[test]
fn a_new_run_never_writes_over_a_run_or_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_path_buf();
    let args =
        TrainArgs { settings: Settings { out: Some(out.clone()), ..Settings::default() }, ..TrainArgs::default() };
    TrainConfig::from_args(&args).unwrap();
    std::fs::write(out.join("config.json"), "{}").unwrap();
    let message = TrainConfig::from_args(&args).unwrap_err().to_string();
    assert!(message.contains("config.json") && message.contains("another --out"), "{message}");
    std::fs::create_dir(out.join("checkpoints")).unwrap();
    let message = TrainConfig::from_args(&args).unwrap_err().to_string();
    assert!(message.contains("--resume"), "{message}");
}

#[test]
fn a_resumed_run_keeps_its_settings_and_changes_only_what_its_checkpoint_does_not_depend_on() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_path_buf();
    let args = |given: Settings| TrainArgs {
        settings: Settings { resume: Some(out.clone()), ..given },
        ..TrainArgs::default()
    };
    let message = TrainConfig::from_args(&args(Settings::default())).unwrap_err().to_string();
    assert!(message.contains("no run in this folder"), "{message}");
    std::fs::write(out.join(RUN_FILE), "seed = 4\nsteps = 10\nout = 'elsewhere'\n").unwrap();
    let more = Settings { steps: Some(20), ring: Some(1), ..Settings::default() };
    let config = TrainConfig::from_args(&args(more)).unwrap();
    assert!(config.resume);
    assert_eq!((config.seed, config.length, config.ring, &config.out), (4, TrainingLength::Steps(20), 1, &out));
    for settings in [
        Settings { model: Some("m".into()), ..Settings::default() },
        Settings { seed: Some(1), ..Settings::default() },
        Settings { sequence_length: Some(64), ..Settings::default() },
        Settings { out: Some("x".into()), ..Settings::default() },
    ] {
        let message = TrainConfig::from_args(&args(settings)).unwrap_err().to_string();
        assert!(message.contains("cannot change when a run is resumed") && message.contains("steps"), "{message}");
    }
}

#[test]
fn every_setting_is_a_flag_of_the_same_name() {
    use clap::Args;
    let command = TrainArgs::augment_args(clap::Command::new("train"));
    let mut flags: Vec<String> = command.get_arguments().filter_map(|a| a.get_long().map(String::from)).collect();
    flags.sort();
    let message = toml::from_str::<Settings>("x = 1").unwrap_err().to_string();
    let mut keys: Vec<String> = message.split('`').skip(3).step_by(2).map(String::from).collect();
    // `resume` and `dry-run` are flags only: a file that resumes would override its own run, and one that never trains is of no
    // use.
    keys.extend(["resume", "dry-run"].map(String::from));
    keys.sort();
    assert_eq!(flags, keys);
}
