//! Text is tokenized once; a token file that is not whole is made again.

use crate::common::{run, text, tiny_model};
use ringspan_train::Settings;
use std::{fs, path::Path};

fn settings(root: &Path, name: &str, kept: Option<&Path>) -> Settings {
    Settings {
        model: Some(root.join("tiny")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(name)),
        token_cache: kept.map(Path::to_path_buf),
        sample_tokens: Some(0),
        sequence_length: Some(64),
        ring: Some(1),
        steps: Some(2),
        ..Settings::default()
    }
}

/// The only file in a folder.
fn only(folder: &Path) -> std::path::PathBuf {
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

#[test]
fn tokens_are_cached_beside_the_run_or_in_the_given_folder_and_reused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    text(root);
    let kept = root.join("kept");
    let (outcome, first) = run(settings(root, "beside", None));
    let (_, second) = run(settings(root, "elsewhere", Some(&kept)));
    assert_eq!(first.losses(), second.losses());
    let (beside, file) = (only(&outcome.out.join("tokens")), only(&kept));
    assert_eq!(beside.file_name(), file.file_name(), "the key is that of the text and the tokenizer");
    assert_eq!(fs::read(&beside).unwrap(), fs::read(&file).unwrap());
    assert!(!root.join("elsewhere/tokens").exists());

    // The text is changed so that neither size, time nor sample differ: the old tokens show that the cache was read.
    let data = root.join("long.txt");
    let write = |word: &str| {
        fs::write(&data, [&"some words; ".repeat(400)[..], word, &"more words; ".repeat(2000)].concat()).unwrap();
        fs::File::options().write(true).open(&data).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    };
    let long = |name: &str, check| {
        let given = Settings { data: Some(vec![data.clone()]), check_data: check, ..settings(root, name, Some(&kept)) };
        let (_, memory) = run(Settings { epochs: Some(1.0), steps: None, ..given });
        (memory.losses(), memory.plan.data)
    };
    write("one thing");
    let (first, _) = long("third", None);
    write("any thing");
    assert_eq!(long("fourth", None).0, first);
    let (checked, plan) = long("fifth", Some(true));
    assert_ne!(checked, first);
    assert!(plan.contains("is made again: it was made of another content"), "{plan}");
}

#[test]
fn a_damaged_cache_is_rebuilt_and_other_texts_and_tokenizers_have_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let model = tiny_model(root);
    let data = text(root);
    let kept = root.join("kept");
    let (_, first) = run(settings(root, "first", Some(&kept)));
    let file = only(&kept);
    let good = fs::read(&file).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    for (index, damaged) in [&bad[..], &good[..good.len() - 3], &[]].into_iter().enumerate() {
        fs::write(&file, damaged).unwrap();
        let (_, again) = run(settings(root, &format!("again {index}"), Some(&kept)));
        assert_eq!(again.losses(), first.losses());
        assert!(again.plan.data.contains("is made again"), "{}", again.plan.data);
        assert_eq!(fs::read(&file).unwrap(), good);
    }

    let lines = fs::read_to_string(&data).unwrap();
    fs::write(&data, lines.replace("word 1 of", "word I of")).unwrap();
    run(settings(root, "other text", Some(&kept)));
    assert_eq!(fs::read_dir(&kept).unwrap().count(), 2);
    fs::write(&data, lines).unwrap();
    let tokenizer = fs::read_to_string(model.join("tokenizer.json")).unwrap();
    fs::write(model.join("tokenizer.json"), tokenizer.replace("\"trim_offsets\": true", "\"trim_offsets\": false"))
        .unwrap();
    run(settings(root, "other tokenizer", Some(&kept)));
    assert_eq!(fs::read_dir(&kept).unwrap().count(), 3);
}
