use super::*;
use crate::{
    Tokenizer,
    data::{Content, DocumentStore, NOT_LEARNED, SourceSummary, Template, ignore_progress},
};
use ringspan_candle::pool;
use serde_json::json;
use std::{
    fs,
    io::Write,
    ops::ControlFlow,
    sync::{Mutex, atomic::AtomicUsize, atomic::Ordering},
};

/// Reads a source with the byte-level tokenizer; the token cache lies next to the source.
fn read(source: &Path, held_out: f64) -> Result<Corpus> {
    let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
    with_reader(source, held_out, Encoder::new(&tokenizer, None), |reader| Ok(reader.load_or_tokenize()?.0))
}

fn with_reader<R>(source: &Path, held_out: f64, encoder: Encoder<'_>, then: impl FnOnce(SourceReader<'_>) -> R) -> R {
    let folder = source.with_file_name("tokens");
    let deadline = Duration::from_secs(60);
    let on_progress = &ignore_progress;
    then(SourceReader {
        source,
        exclude: &[],
        held_out,
        encoder,
        cache_folder: &folder,
        check_contents: false,
        deadline,
        on_progress,
    })
}

fn folder_with_files(names: &[String]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("data")).unwrap();
    for name in names {
        fs::write(folder.path().join("data").join(name), format!("text of {name}")).unwrap();
    }
    folder
}

/// The texts of byte-level tokens.
fn texts(store: &DocumentStore) -> Vec<String> {
    let text = |masked_tokens: &[u32]| masked_tokens.iter().filter(|w| **w < 256).map(|&w| w as u8 as char).collect();
    store.documents().map(text).collect()
}

#[test]
fn about_a_twentieth_is_held_out_and_a_new_document_moves_no_other() {
    let names: Vec<String> = (0..1000).map(|i| format!("{i:04}.rs")).collect();
    let folder = folder_with_files(&names);
    let all = read(&folder.path().join("data"), 0.05).unwrap();
    assert_eq!(all.train.len() + all.held_out.len(), 1000);
    assert!((25..80).contains(&all.held_out.len()), "{}", all.held_out.len());
    fs::remove_file(folder.path().join("data").join(&names[999])).unwrap();
    let fewer = read(&folder.path().join("data"), 0.05).unwrap();
    let without =
        |store: &DocumentStore| texts(store).into_iter().filter(|text| !text.ends_with("0999.rs")).collect::<Vec<_>>();
    assert_eq!(without(&all.held_out), texts(&fewer.held_out));
    // A larger share holds out what a smaller one does; a share of 0 holds out nothing.
    let held = |share| texts(&read(&folder.path().join("data"), share).unwrap().held_out);
    assert!(held(0.0).is_empty());
    let (less, more) = (held(0.05), held(0.3));
    assert!(less.iter().all(|text| more.contains(text)) && more.len().abs_diff(300) < 60, "{}", more.len());
}

#[test]
fn both_parts_get_a_document_however_few_there_are() {
    for count in 2..12 {
        let folder = folder_with_files(&(0..count).map(|i| format!("{count}-{i}")).collect::<Vec<_>>());
        for share in [0.01, 0.05, 0.95] {
            let corpus = read(&folder.path().join("data"), share).unwrap();
            assert!(!corpus.train.is_empty() && !corpus.held_out.is_empty(), "{count} documents, share {share}");
            assert_eq!(corpus.train.len() + corpus.held_out.len(), count);
        }
        assert!(read(&folder.path().join("data"), 0.0).unwrap().held_out.is_empty());
    }
}

#[test]
fn the_end_of_a_single_text_is_held_out_in_every_file_format() {
    let folder = tempfile::tempdir().unwrap();
    let text = "é".repeat(500);
    let cases: [(&str, Vec<u8>); 4] = [
        ("a.txt", text.clone().into_bytes()),
        ("a.txt.gz", super::super::decompress::tests::gzip(text.as_bytes())),
        ("a.jsonl", json!({ "text": text }).to_string().into_bytes()),
        ("a.json", serde_json::to_vec_pretty(&json!([{ "text": text }])).unwrap()),
    ];
    for (name, bytes) in cases {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let corpus = read(&path, 0.05).unwrap();
        // 1000 bytes become 950 and 50, each with an end of text.
        let tokens = (corpus.train.len(), corpus.train.tokens(), corpus.held_out.tokens());
        assert_eq!(tokens, (1, 951, 51), "{name}");
        assert_eq!(
            (corpus.learned_tokens, corpus.largest_token, corpus.summary.documents()),
            ([950, 50], Some(256), 1)
        );
        let corpus = read(&path, 0.0).unwrap();
        assert_eq!((corpus.train.tokens(), corpus.held_out.tokens()), (1001, 0), "{name}");
    }
    // A twentieth of 18 bytes is less than a byte: nothing is held out.
    let path = folder.path().join("b.txt");
    fs::write(&path, "é".repeat(9)).unwrap();
    let corpus = read(&path, 0.05).unwrap();
    assert_eq!((corpus.train.tokens(), corpus.held_out.tokens()), (19, 0));
}

/// The text has several parts and windows; it is read alone and in a folder with others.
#[test]
fn a_long_text_is_one_document_and_its_words_are_its_bytes() {
    let folder = folder_with_files(&["z".into()]);
    let long = (0..90_000).map(|i| format!("{i} é\n")).collect::<String>();
    let path = folder.path().join("data/long.txt");
    fs::write(&path, &long).unwrap();
    let bytes =
        |masked_tokens: &[u32]| masked_tokens.iter().filter(|&&w| w < 256).map(|&w| w as u8).collect::<Vec<_>>();
    let sequential = read(&path, 0.05).unwrap();
    assert_eq!((sequential.train.len(), sequential.held_out.len()), (1, 1));
    let whole = [bytes(sequential.train.document(0)), bytes(sequential.held_out.document(0))];
    assert!(whole.concat() == long.as_bytes());
    assert!(whole[1].len().abs_diff(long.len() / 20) <= 1, "no character is cut");
    let both = read(&folder.path().join("data"), 0.0).unwrap();
    assert!(bytes(both.train.document(0)) == long.as_bytes() && both.train.len() == 2);
}

#[test]
fn threads_make_the_same_tokens_and_so_does_a_second_start() {
    let folder = folder_with_files(&(0..200).map(|i| format!("{i}")).collect::<Vec<_>>());
    let data = folder.path().join("data");
    let sequential = read(&data, 0.05).unwrap();
    let cache_folder = folder.path().join("tokens");
    let file = |()| fs::read_dir(&cache_folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let [one] = &file(())[..] else { panic!("one file") };
    let modified = fs::metadata(one).unwrap().modified().unwrap();
    assert_eq!(read(&data, 0.05).unwrap().fingerprint, sequential.fingerprint);
    assert_eq!(fs::metadata(one).unwrap().modified().unwrap(), modified, "it was read, not made");
    fs::remove_file(one).unwrap();
    let parallel = pool::run(4, || read(&data, 0.05).unwrap()).unwrap();
    assert_eq!(parallel.fingerprint, sequential.fingerprint);
    assert_eq!(texts(&parallel.held_out), texts(&sequential.held_out));
}

#[test]
fn processes_that_want_the_same_tokens_make_them_once() {
    let folder = folder_with_files(&(0..300).map(|i| format!("{i}")).collect::<Vec<_>>());
    let data = folder.path().join("data");
    let all: Vec<u64> = std::thread::scope(|scope| {
        let each: Vec<_> = (0..4).map(|_| scope.spawn(|| read(&data, 0.05).unwrap().fingerprint)).collect();
        each.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(all.iter().all(|one| *one == all[0]));
    assert_eq!(fs::read_dir(folder.path().join("tokens")).unwrap().count(), 1);
}

/// The changes are such that no size, no time and no sample shows them.
#[test]
fn a_full_check_finds_another_content_and_damaged_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.txt");
    let mut bytes = b"a word of many; ".repeat(4000);
    let write = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    };
    write(&bytes);
    let first = read(&path, 0.05).unwrap();
    bytes[20_000] = b'!';
    write(&bytes);
    assert_eq!(read(&path, 0.05).unwrap().fingerprint, first.fingerprint);
    let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
    let checked = || {
        let encoder = Encoder::new(&tokenizer, None);
        with_reader(&path, 0.05, encoder, |reader| {
            SourceReader { check_contents: true, ..reader }.load_or_tokenize().unwrap()
        })
    };
    let (now, remarks) = checked();
    assert_ne!(now.fingerprint, first.fingerprint);
    assert!(remarks[0].contains("is made again: it was made of another content"), "{remarks:?}");
    assert!(checked().1.is_empty());
    assert_eq!(read(&path, 0.05).unwrap().fingerprint, now.fingerprint);
}

#[test]
fn another_tokenizer_template_share_or_text_has_a_file_of_its_own() {
    let folder = folder_with_files(&["a".into(), "b".into()]);
    let data = folder.path().join("data");
    let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
    let path = folder.path().join("t.jinja");
    fs::write(&path, "{{ messages }}").unwrap();
    let template = Template::read(&path, None).unwrap();
    let count = || fs::read_dir(folder.path().join("tokens")).unwrap().count();
    let make = |share, template| {
        with_reader(&data, share, Encoder::new(&tokenizer, template), |reader| reader.load_or_tokenize().map(drop))
            .unwrap();
        count()
    };
    assert_eq!((make(0.05, None), make(0.05, None)), (1, 1));
    assert_eq!((make(0.1, None), make(0.1, Some(&template))), (2, 3));
    fs::write(data.join("a"), "else").unwrap();
    assert_eq!(make(0.05, None), 4);
}

#[test]
fn every_form_in_every_packing_is_learned_as_it_is_meant() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let template = root.join("t.jinja");
    let source = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}\
                  {% if add_generation_prompt %}a:{% endif %}";
    fs::write(&template, source).unwrap();
    let template = Template::read(&template, None).unwrap();
    let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
    let parts = json!([{"type": "text", "text": "q"}]);
    let records = [
        (json!({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]}), "yes$"),
        (json!({"prompt": "2+2=", "completion": "4"}), "4$"),
        (json!({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "no"}]}), "no$"),
        (json!({"instruction": "add", "input": "1", "output": "2"}), "2$"),
        (json!({"text": "all of it"}), "all of it$"),
        (
            json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "not", "weight": 0},
                {"role": "user", "content": "r"}, {"role": "assistant", "content": "this"}]}),
            "this$",
        ),
    ];
    let expected: Vec<&str> = records.iter().map(|(_, learned)| *learned).collect();
    let objects: Vec<&serde_json::Value> = records.iter().map(|(object, _)| object).collect();
    let lines = objects.iter().map(|object| format!("{object}\n")).collect::<String>();
    let array = serde_json::to_string_pretty(&objects).unwrap();
    let (gzip, zstd) = (super::super::decompress::tests::gzip, super::super::decompress::tests::zstd);
    let mark = |text: &str| [b"\xef\xbb\xbf", text.as_bytes()].concat();
    let files = [
        ("a.jsonl", lines.clone().into_bytes()),
        ("b.json", lines.clone().into_bytes()),
        ("c.json", array.clone().into_bytes()),
        ("d.jsonl.gz", gzip(lines.as_bytes())),
        ("e.json.zst", zstd(array.as_bytes())),
        ("f.jsonl", mark(&lines)),
        ("g.json", mark(&array)),
        ("h.ndjson.zst", zstd(&mark(&lines))),
    ];
    for (name, bytes) in files {
        let path = root.join(name);
        fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
        let encoder = Encoder::new(&tokenizer, Some(&template));
        let corpus = with_reader(&path, 0.0, encoder, |reader| reader.load_or_tokenize()).unwrap().0;
        let learned = |masked_tokens: &[u32]| {
            let learned = masked_tokens.iter().filter(|&&token| token & NOT_LEARNED == 0);
            learned.map(|&token| if token == 256 { '$' } else { token as u8 as char }).collect::<String>()
        };
        assert_eq!(corpus.train.documents().map(learned).collect::<Vec<_>>(), expected, "{name}");
        let SourceSummary { texts, completions, chats, .. } = corpus.summary;
        assert_eq!((texts, completions, chats), (1, 1, 4));
        assert!(corpus.summary.must_stay_whole());
    }
    assert_eq!(
        crate::data::read(&root.join("c.json"), &[]).unwrap().documents[1].content,
        Content::Completion { prompt: "2+2=".into(), completion: "4".into() }
    );
}

#[test]
fn a_conversation_that_teaches_nothing_stops_the_run_and_a_damaged_template_is_named_where_it_matters() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.jsonl");
    let chat = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]});
    fs::write(&path, format!("{{\"text\": \"a\"}}\n{chat}\n")).unwrap();
    let template = folder.path().join("t.jinja");
    fs::write(&template, "{{ messages[0].content }}").unwrap();
    let template = Template::read(&template, None).unwrap();
    let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
    let failed = |encoder: Encoder<'_>| {
        with_reader(&path, 0.05, encoder, |reader| reader.load_or_tokenize()).unwrap_err().to_string()
    };
    let message = failed(Encoder::new(&tokenizer, Some(&template)));
    assert!(message.contains("c.jsonl:2") && message.contains("no token of it is learned"), "{message}");
    let message = failed(Encoder::new(&tokenizer, None).without_template("the template is damaged"));
    assert!(message.contains("c.jsonl:2: holds a conversation, but the template is damaged"), "{message}");
    assert_eq!(fs::read_dir(folder.path().join("tokens")).unwrap().count(), 0, "nothing unfinished is left");
}

/// A folder of text, records and an archive, of some megabytes.
fn megabytes() -> tempfile::TempDir {
    let folder = folder_with_files(&[]);
    let data = folder.path().join("data");
    let line = format!("{{\"text\": \"{}\"}}\n", "some words ".repeat(400));
    fs::write(data.join("a.jsonl"), line.repeat(300)).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(line.repeat(200).as_bytes()).unwrap();
    fs::write(data.join("b.jsonl.gz"), packed.finish().unwrap()).unwrap();
    folder
}

#[test]
fn progress_counts_all_bytes_of_the_files_as_they_are_stored() {
    let folder = megabytes();
    let data = folder.path().join("data");
    let stored: u64 = fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    let reports = Mutex::new(Vec::new());
    let on_progress = |done: u64, bytes: u64| {
        reports.lock().unwrap().push((done, bytes));
        ControlFlow::Continue(())
    };
    let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
    let corpus = with_reader(&data, 0.05, Encoder::new(&tokenizer, None), |reader| {
        SourceReader { on_progress: &on_progress, ..reader }.load_or_tokenize()
    });
    assert_eq!(corpus.unwrap().0.summary.texts, 500);
    let reports = reports.into_inner().unwrap();
    assert!(reports.iter().all(|(done, bytes)| done <= bytes && *bytes == stored), "{reports:?}");
    assert!(reports.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{reports:?}");
    assert!(
        reports.iter().any(|(done, _)| (stored / 4..3 * stored / 4).contains(done))
            && reports.last().unwrap().0 == stored
    );
}

#[test]
fn tokenization_may_be_stopped_at_any_time_and_leaves_nothing() {
    let folder = megabytes();
    let data = folder.path().join("data");
    let tokenizer = Tokenizer::byte_level(Path::new("bytes")).unwrap();
    for allowed in [0, 1, 3, 6] {
        let asked = AtomicUsize::new(0);
        let on_progress = |_, _| match asked.fetch_add(1, Ordering::SeqCst) < allowed {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        };
        let corpus = with_reader(&data, 0.05, Encoder::new(&tokenizer, None), |reader| {
            SourceReader { on_progress: &on_progress, ..reader }.load_or_tokenize()
        });
        assert!(matches!(corpus, Err(Error::Interrupted { .. })), "{corpus:?}");
        assert_eq!(asked.into_inner(), allowed + 1);
        assert_eq!(fs::read_dir(folder.path().join("tokens")).unwrap().count(), 0, "after {allowed}");
    }
}
