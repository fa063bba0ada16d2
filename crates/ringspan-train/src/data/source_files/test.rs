use super::*;
use crate::data::decompress::tests::{gzip, zstd};

fn write(root: &Path, name: &str, content: &[u8]) {
    let path = root.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, content).unwrap();
}

#[test]
fn a_folder_of_parts_is_one_data_set_and_a_folder_of_text_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write(root, "README.md", b"# What this is");
    write(root, "LICENSE", b"free");
    write(root, "data/b.jsonl", b"{\"text\": \"third\"}\n");
    write(root, "data/a.jsonl", b"{\"text\": \"first\"}\n\n{\"text\": \"second\"}\n");
    let names = |texts: &SourceDocuments| texts.documents.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
    let parts = read(root, &[]).unwrap();
    assert_eq!(names(&parts), ["data/a.jsonl:1", "data/a.jsonl:3", "data/b.jsonl:1"]);
    write(root, "data/b.jsonl", b"{\"text\": 3}\n");
    let message = read(root, &[]).unwrap_err().to_string();
    assert!(message.contains("b.jsonl") && message.contains("line 1"), "{message}");
    write(root, "data/b.jsonl", b"{\"text\": \"third\"}\n");
    write(root, "plot.png", b"\x89PNG\0\0");
    assert_eq!(read(root, &[]).unwrap().documents.len(), 3, "an image is no text");
    write(root, "code.rs", b"fn main() {}");
    for other in ["a.py", "b.txt", "c.txt"] {
        write(root, other, b"text");
    }
    let message = read(root, &[]).unwrap_err().to_string();
    for part in ["data/a.jsonl, data/b.jsonl", "a.py, b.txt, c.txt and 1 more", "--data", ".ignore"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    write(root, ".ignore", b"*.py\n*.txt\n*.rs\n");
    assert_eq!(names(&read(root, &[]).unwrap()), names(&parts));
}

#[test]
fn evaluation_files_are_named_and_can_be_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for name in ["train-0.jsonl", "test-0.jsonl", "Valid/x.jsonl", "contest.jsonl"] {
        write(root, name, b"{\"text\": \"words\"}\n");
    }
    let texts = read(root, &[]).unwrap();
    assert_eq!(texts.evaluation_like_files, ["Valid/x.jsonl", "test-0.jsonl"]);
    assert_eq!(texts.documents.len(), 4);
    let left = read(root, &[root.join("test-0.jsonl"), root.join("Valid")]).unwrap();
    assert!(left.evaluation_like_files.is_empty());
    assert_eq!(left.documents.len(), 2);
}

#[test]
fn the_longest_text_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let long = "a long book. ".repeat(500_000);
    write(folder.path(), "book.txt", long.as_bytes());
    write(folder.path(), "note.txt", b"short");
    let texts = read(folder.path(), &[]).unwrap();
    assert_eq!((texts.documents.len(), texts.skipped), (2, Skipped::default()));
    assert_eq!(texts.documents[0].content, Content::Text(long));
}

#[test]
fn a_folder_yields_its_text_sorted_and_leaves_out_what_is_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write(root, "b.md", b"second");
    write(root, "a/z.rs", b"first");
    write(root, ".hidden", b"no");
    write(root, ".gitignore", b"build/\n");
    write(root, "build/x.txt", b"no");
    write(root, "image.png", b"\x89PNG\0\0");
    write(root, "latin.txt", b"caf\xe9");
    write(root, "blank.txt", b" \n");
    write(root, "model/model.safetensors", b"\0\0");
    write(root, "model/config.json", b"{}");
    write(root, "stopped/train.toml", b"steps = 9");
    write(root, "stopped/metrics.jsonl", b"{\"step\": 1}");
    write(root, "out/notes.txt", b"no");
    let texts = read(root, &[root.join("out")]).unwrap();
    let names: Vec<_> = texts.documents.iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["a/z.rs", "b.md"]);
    assert_eq!(
        texts.skipped.describe().unwrap(),
        "not read: 2 folders of a model or run (model, stopped), 1 empty (blank.txt), 1 binary (image.png), 1 not UTF-8 \
         (latin.txt)"
    );
}

#[test]
fn json_lines_are_documents_and_a_bad_line_is_named_by_its_number() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "d.jsonl", b"{\"text\":\"one\",\"id\":1}\n\n{\"text\":\"two\"}\n");
    let texts = read(&folder.path().join("d.jsonl"), &[]).unwrap();
    assert_eq!(texts.documents.len(), 2);
    assert_eq!(texts.documents[1], SourceDocument { name: "d.jsonl:3".into(), content: Content::Text("two".into()) });

    write(folder.path(), "bad.jsonl", b"{\"text\":\"one\"}\n{\"txt\":\"two\"}\n");
    let message = read(&folder.path().join("bad.jsonl"), &[]).unwrap_err().to_string();
    assert!(message.contains("line 2") && message.contains("`text`"), "{message}");
}

#[test]
fn conversations_without_an_assistant_are_counted_and_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let user = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    let both = r#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yes"}]}"#;
    let none = r#"{"prompt":"p","completion":""}"#;
    write(folder.path(), "c.jsonl", format!("{user}\n{both}\n{none}\n").as_bytes());
    let texts = read(&folder.path().join("c.jsonl"), &[]).unwrap();
    assert_eq!(texts.documents.iter().map(|d| d.name.as_str()).collect::<Vec<_>>(), ["c.jsonl:2"]);
    assert_eq!(texts.skipped.describe().unwrap(), "skipped 2 documents without anything to learn");
    write(folder.path(), "c.jsonl", user.as_bytes());
    let message = read(&folder.path().join("c.jsonl"), &[]).unwrap_err().to_string();
    assert!(message.contains("skipped 1 documents without"), "{message}");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_names_the_feature_that_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "d.parquet", b"PAR1");
    let message = read(&folder.path().join("d.parquet"), &[]).unwrap_err().to_string();
    assert!(message.contains("d.parquet") && message.contains("--features parquet"), "{message}");
}

#[test]
fn a_source_without_text_says_so() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "x.bin", b"\0");
    let message = read(folder.path(), &[]).unwrap_err().to_string();
    assert!(message.contains("1 binary"), "{message}");
    let missing = read(&folder.path().join("nothing"), &[]).unwrap_err().to_string();
    assert!(missing.contains("nothing"), "{missing}");
    write(folder.path(), "latin.txt", b"caf\xe9");
    let message = read(&folder.path().join("latin.txt"), &[]).unwrap_err().to_string();
    assert!(message.contains("byte at 3"), "{message}");
}

#[test]
fn every_kind_of_records_in_a_folder_is_read_and_what_is_not_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let line = |text: &str| format!("{{\"text\": \"{text}\"}}\n").into_bytes();
    write(root, "a.jsonl", &line("one"));
    write(root, "b.json", b"[{\"text\": \"two\"}, {\"text\": \"three\"}]");
    write(root, "c.jsonl.gz", &gzip(&line("four")));
    write(root, "d.json.zst", &zstd(&line("five")));
    write(root, "dataset_infos.json", b"{\"features\": {}}");
    write(root, "other.json", b"[{\"question\": \"x\"}]");
    write(root, "LICENSE", b"free");
    write(root, "README.md", b"# What this is");
    write(root, "plot.png", b"\x89PNG\0\0");
    let texts = read(root, &[]).unwrap();
    let names: Vec<_> = texts.documents.iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["a.jsonl:1", "b.json:1", "b.json:2", "c.jsonl.gz:1", "d.json.zst:1"]);
    assert_eq!(
        texts.skipped.describe().unwrap(),
        "not read: 4 next to the data set (LICENSE, README.md, dataset_infos.json and 1 more), 1 of JSON records in no known \
         form (other.json)"
    );
}

#[test]
fn a_json_file_is_data_where_it_is_alone_and_a_text_or_named_among_others() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let chat = br#"[{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]"#;
    write(root, "train.json", chat);
    write(root, "README.md", b"# What this is");
    let texts = read(root, &[]).unwrap();
    assert!(matches!(&texts.documents[..], [SourceDocument { content: Content::Chat { .. }, .. }]));
    // The folder also holds a program, its settings, and the data of its tests.
    write(root, "main.rs", b"fn main() {}");
    write(root, "package.json", b"{\"name\": \"it\"}");
    write(root, "notes.txt.gz", &gzip(b"packed notes"));
    write(root, "broken.gz", b"no archive");
    let texts = read(root, &[]).unwrap();
    let names: Vec<_> = texts.documents.iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["README.md", "main.rs", "notes.txt.gz", "package.json"]);
    assert_eq!(texts.documents[2].content, Content::Text("packed notes".into()));
    assert_eq!(
        texts.skipped.describe().unwrap(),
        "not read: 1 damaged archives (broken.gz), 1 of JSON records next to other text (train.json)"
    );
    // A file that is named by itself is read as what it is, or refused.
    assert_eq!(read(&root.join("train.json"), &[]).unwrap().documents.len(), 1);
    let message = read(&root.join("package.json"), &[]).unwrap_err().to_string();
    assert!(message.contains("package.json: record 1 has none of `text`"), "{message}");
    let message = read(&root.join("broken.gz"), &[]).unwrap_err().to_string();
    assert!(message.contains("broken.gz"), "{message}");
}

#[test]
fn a_byte_order_mark_belongs_to_no_text() {
    let folder = tempfile::tempdir().unwrap();
    for (name, rest) in
        [("a.txt", "hello"), ("a.jsonl", "{\"text\": \"hello\"}"), ("a.json", "[{\"text\": \"hello\"}]")]
    {
        write(folder.path(), name, format!("\u{feff}{rest}").as_bytes());
        let texts = read(&folder.path().join(name), &[]).unwrap();
        assert_eq!(texts.documents[0].content, Content::Text("hello".into()), "{name}");
    }
}
