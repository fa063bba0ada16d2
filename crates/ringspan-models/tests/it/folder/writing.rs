//! Tests of writing model folders: shards, types, and saves that fail.

use super::*;

#[test]
fn a_saved_model_is_as_readable_as_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, _) = model(true);
    let mode = |name: &str| fs::metadata(folder.path().join(name)).expect("a file").permissions().mode() & 0o777;
    fs::write(folder.path().join("any"), "").expect("written");
    assert_eq!((mode(SINGLE), mode("config.json")), (mode("any"), mode("any")));
}

#[test]
fn a_model_saved_over_shards_is_read_back() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama");
    let folder = tempfile::tempdir().expect("a folder");
    for file in fs::read_dir(fixture).expect("the fixture") {
        let file = file.expect("a file");
        fs::copy(file.path(), folder.path().join(file.file_name())).expect("copied");
    }
    let (config, _) = folder::load(folder.path()).expect("loads");
    let json = folder::config_json(folder.path()).expect("JSON");
    let weights = Decoder::new(config).expect("supported").init(1).expect("weights");
    folder::save(folder.path(), &json, &weights).expect("saved");
    assert_eq!(bits(&folder::load(folder.path()).expect("loads").1), bits(&weights));
    assert_eq!(folder::config_json(folder.path()).expect("JSON"), json, "already float32");
}

#[test]
fn a_large_model_is_written_in_shards_in_any_order() {
    for (tied, limit) in [(false, 700), (true, 2000)] {
        let (folder, old) = model(tied);
        let decoder = decoder(&config(tied));
        let weights = decoder.init(9).expect("weights");
        assert_ne!(bits(&old), bits(&weights));
        let mut writer =
            Writer::new(folder.path(), &config(tied), &decoder.shapes(), SavedType::F32, limit).expect("begun");
        for (name, tensor) in weights.iter().rev() {
            writer.write(name, tensor).expect("written");
        }
        assert_eq!(bits(&folder::load(folder.path()).expect("still the old one").1), bits(&old));
        writer.finish().expect("named");
        assert_eq!(bits(&folder::load(folder.path()).expect("loads").1), bits(&weights));

        let index: Value = serde_json::from_slice(&fs::read(folder.path().join(INDEX)).expect("bytes")).expect("JSON");
        let map: HashMap<String, String> = serde_json::from_value(index["weight_map"].clone()).expect("names");
        assert!(map.keys().eq(map.keys().filter(|name| weights.contains_key(*name))) && map.len() == weights.len());
        let count: usize = weights.values().map(Tensor::elem_count).sum();
        assert_eq!(index["metadata"]["total_size"], json!(4 * count));
        let files: std::collections::BTreeSet<_> = map.values().collect();
        assert!(files.len() > 2);
        for (n, file) in files.iter().enumerate() {
            assert_eq!(**file, format!("model-{:05}-of-{:05}.safetensors", n + 1, files.len()));
            let tensors = candle_core::safetensors::load(folder.path().join(file), &Device::Cpu).expect("whole");
            let bytes: usize = tensors.values().map(|tensor| 4 * tensor.elem_count()).sum();
            assert!(bytes as u64 <= limit || tensors.len() == 1, "{file} has {bytes} bytes");
            assert!(tensors.keys().all(|name| map[name] == **file));
        }
        assert!(!folder.path().join(SINGLE).exists(), "readers would take it first");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), files.len() + 2, "nothing temporary stays");
    }
}

#[test]
fn a_model_saved_in_bf16_says_so_and_is_rounded_to_even() {
    let (folder, _) = model(false);
    let decoder = decoder(&config(false));
    let weights = decoder.init(9).expect("weights");
    let json = config(false);
    let mut writer = Writer::new(folder.path(), &json, &decoder.shapes(), SavedType::Bf16, u64::MAX).expect("begun");
    weights.iter().try_for_each(|(name, tensor)| writer.write(name, tensor)).expect("written");
    writer.finish().expect("named");
    let saved = folder::config_json(folder.path()).expect("JSON");
    assert_eq!(SavedType::of(&saved), SavedType::Bf16);
    let on_disk = candle_core::safetensors::load(folder.path().join(SINGLE), &Device::Cpu).expect("whole");
    for (name, tensor) in &weights {
        let wanted = tensor.to_dtype(DType::BF16).expect("rounded");
        assert_eq!(on_disk[name].dtype(), DType::BF16);
        let values = |t: &Tensor| t.to_dtype(DType::F32).expect("wide").flatten_all().expect("flat").to_vec1::<f32>();
        assert_eq!(values(&on_disk[name]).expect("values"), values(&wanted).expect("values"), "{name}");
    }
    assert_eq!("f16".parse::<SavedType>().expect_err("unknown").to_string().matches("f32, bf16").count(), 1);
}

#[test]
fn a_writer_takes_each_announced_tensor_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let decoder = decoder(&config(false));
    let weights = decoder.init(9).expect("weights");
    let begin =
        || Writer::new(folder.path(), &config(false), &decoder.shapes(), SavedType::F32, u64::MAX).expect("begun");
    let mut writer = begin();
    writer.write(Q, &weights[Q]).expect("written");
    contains(&writer.write(Q, &weights[Q]).expect_err("twice").to_string(), &[Q]);
    contains(&writer.write("other", &weights[Q]).expect_err("unknown").to_string(), &["other", "[8, 8]"]);
    let norm = "model.norm.weight";
    contains(&writer.write(norm, &weights[Q]).expect_err("shaped").to_string(), &[norm, "[8, 8]", "[8]"]);
    contains(&writer.finish().expect_err("incomplete").to_string(), &["lm_head.weight", "[12, 8]"]);
    drop(begin());
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "nothing is left");
}

#[test]
fn a_failed_save_leaves_the_old_files_and_names_the_place() {
    let (folder, weights) = model(false);
    // Not even root can write a file over a folder.
    fs::remove_file(folder.path().join("config.json")).expect("removed");
    fs::create_dir(folder.path().join("config.json")).expect("made");
    let before = fs::read(folder.path().join(SINGLE)).expect("bytes");
    let other = decoder(&config(false)).init(8).expect("weights");
    let message = folder::save(folder.path(), &config(false), &other).expect_err("a folder is in the way").to_string();
    contains(&message, &["config.json"]);
    assert_eq!(fs::read(folder.path().join(SINGLE)).expect("bytes"), before);
    let left = fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 2, "nothing temporary stays");

    let file = folder.path().join(SINGLE);
    let message = folder::save(&file, &config(false), &weights).expect_err("a file is in the way").to_string();
    contains(&message, &[SINGLE]);
}
