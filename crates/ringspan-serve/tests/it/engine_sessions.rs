//! Tests of sessions: the saved cache of one engine is restored by another, on another mesh and with pages of another size.

use super::engine::{ask, close, greedy, small, start};
use super::engine_parallel::{of_sizes, start_on};
use crate::support::*;
use ringspan_serve::Mesh;
use ringspan_serve::engine::{EngineOptions, KvCacheSize};
use ringspan_serve::paged::KvDtype;
use std::path::Path;
use std::sync::Arc;

/// Two texts with a common beginning, and another one.
fn prompts() -> [Vec<u32>; 3] {
    let beginning = tokens(21, 3);
    [[beginning.clone(), tokens(9, 4)].concat(), [beginning, tokens(14, 5)].concat(), tokens(6, 6)]
}

#[test]
fn a_session_is_restored_on_another_mesh_with_other_pages() {
    for (name, model) in [("qwen3", qwen3()), ("gemma3", gemma3())] {
        let model = Arc::new(model);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("session.safetensors");
        let first = start(&model, 3, &small());
        let texts = prompts().map(|prompt| [prompt.clone(), ask(&first, greedy(&prompt, 12)).tokens].concat());
        let saved = first.client().save_session(&file, name).expect("saved");
        // The last generated token of each text never passed through the model; the common beginning is there once, up to pages.
        let all: usize = texts.iter().map(|text| text.len() - 1).sum();
        assert!(saved.tokens <= all - 20 && saved.tokens >= all - 21, "{saved:?}, {all} tokens");
        // Keys and values of 2 layers with 2 heads of width 8, in f32.
        assert_eq!(saved.bytes, saved.tokens as u64 * 2 * 2 * 2 * 8 * 4);
        first.shutdown(true).expect("ends");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing else is left");

        let cold = start(&model, 1, &EngineOptions { prefix_cache: false, ..small() });
        for (ring, page) in [(3, 4), (1, 16), (2, 3), (4, 7)] {
            let engine = start(&model, ring, &EngineOptions { page_size: page, ..small() });
            let restored = engine.client().restore_session(&file, name).expect("restored");
            // Rows of a common beginning that ends inside a page are there twice; where depends on the pages.
            assert!(restored.tokens >= all - 21 && restored.tokens <= all, "{restored:?} of {saved:?}");
            for text in &texts {
                let longer = [text.as_slice(), &tokens(5, 7)].concat();
                let (answer, expected) = (ask(&engine, greedy(&longer, 9)), ask(&cold, greedy(&longer, 9)));
                let what = format!("{name}, {ring} ranks, pages of {page}");
                assert_eq!((answer.cached, &answer.tokens), (text.len() - 1, &expected.tokens), "{what}");
                close(&answer.logprobs, &expected.logprobs);
            }
            // A second session contains the restored texts and the new ones.
            let again = engine.client().save_session(&file.with_extension("again"), name).expect("saved");
            assert!(again.tokens > saved.tokens);
            engine.shutdown(true).expect("ends");
        }
    }
}

/// A mesh of (pp, ring, tp).
fn of_axes((pp, ring, tp): (usize, usize, usize)) -> Mesh {
    Mesh { pp, ..of_sizes((ring, 1, tp, 1)) }
}

/// Ranks that share heads and layers have parts of a token's keys and values; more ranks than key-value heads have some of them twice.
#[test]
fn a_session_is_restored_where_other_ranks_share_heads_and_layers() {
    let meshes = [(1, 2, 2), (1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 1, 4), (2, 2, 2), (1, 3, 1)];
    // Keys and values of latent attention have other widths.
    for (name, model) in [("qwen3", qwen3()), ("gemma3", gemma3()), ("deepseek_v3", of_fixture("deepseek_v3"))] {
        let vocabulary = model.vocabulary() as u32;
        let model = Arc::new(model);
        let of_seed = |n, seed| tokens(n, seed).into_iter().map(|token| token % vocabulary).collect::<Vec<u32>>();
        let options = EngineOptions { max_model_len: Some(80), ..small() };
        let cold = start_on(&model, of_axes((1, 1, 1)), &EngineOptions { prefix_cache: false, ..options.clone() });
        let prompt = of_seed(30, 3);
        let text = [prompt.clone(), ask(&cold, greedy(&prompt, 9)).tokens].concat();
        let longer = [text.as_slice(), &of_seed(5, 7)].concat();
        let expected = ask(&cold, greedy(&longer, 9));
        let mut bytes = None;
        for (from, to) in meshes.iter().zip(meshes.iter().cycle().skip(1)) {
            let what = format!("{name}, (pp, ring, tp) {from:?} to {to:?}");
            let folder = tempfile::tempdir().expect("a folder");
            let file = folder.path().join("session.safetensors");
            let first = start_on(&model, of_axes(*from), &options);
            assert_eq!(ask(&first, greedy(&prompt, 9)).tokens, text[prompt.len()..], "{what}");
            let saved = first.client().save_session(&file, name).expect("saved");
            assert_eq!(saved.tokens, text.len() - 1, "{what}");
            // No mesh writes a key or a value twice.
            let size = std::fs::metadata(&file).expect("a file").len();
            assert!(size > saved.bytes && size < saved.bytes + 4096, "{what}: {size} bytes of {saved:?}");
            assert_eq!(*bytes.get_or_insert(saved.bytes), saved.bytes, "{what}");
            first.shutdown(true).expect("ends");

            let engine = start_on(&model, of_axes(*to), &EngineOptions { page_size: 7, ..options.clone() });
            let mut damaged = std::fs::read(&file).expect("a file");
            let middle = damaged.len() / 2;
            damaged[middle] ^= 0x15;
            let other = folder.path().join("damaged");
            std::fs::write(&other, damaged).expect("a file");
            let said = engine.client().restore_session(&other, name).expect_err("refused").to_string();
            assert!(said.contains("damaged"), "{what}: {said}");
            engine.client().restore_session(&file, name).expect("restored");
            let answer = ask(&engine, greedy(&longer, 9));
            assert_eq!((answer.cached, &answer.tokens), (text.len() - 1, &expected.tokens), "{what}");
            close(&answer.logprobs, &expected.logprobs);
            engine.shutdown(true).expect("ends");
        }
    }
}

/// The rows of a session are f32 where the cache has blocks, and a block of rounded numbers has the same bits again.
#[test]
fn a_session_of_a_cache_in_blocks_gives_what_the_cache_gave() {
    let (model, folder) = (Arc::new(wide_heads()), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("session.safetensors");
    let options = |page| EngineOptions { page_size: page, kv_dtype: Some(KvDtype::Q8_0), ..small() };
    let first = start(&model, 2, &options(4));
    let prompt = tokens(30, 3);
    let text = [prompt.clone(), ask(&first, greedy(&prompt, 9)).tokens].concat();
    let longer = [text.as_slice(), &tokens(5, 7)].concat();
    first.client().save_session(&file, "blocks").expect("saved");
    let expected = ask(&first, greedy(&longer, 9));
    for (ring, page) in [(1, 4), (3, 7)] {
        let engine = start(&model, ring, &options(page));
        engine.client().restore_session(&file, "blocks").expect("restored");
        let answer = ask(&engine, greedy(&longer, 9));
        assert_eq!(
            (answer.cached, &answer.tokens),
            (text.len() - 1, &expected.tokens),
            "{ring} ranks, pages of {page}"
        );
        engine.shutdown(true).expect("ends");
    }
    first.shutdown(true).expect("ends");
}

#[test]
fn a_smaller_cache_keeps_the_texts_that_were_used_last() {
    let model = Arc::new(qwen3());
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("session.safetensors");
    let first = start(&model, 2, &small());
    let prompts: Vec<Vec<u32>> = (0..6).map(|seed| tokens(30, 50 + seed)).collect();
    prompts.iter().for_each(|prompt| drop(ask(&first, greedy(prompt, 2))));
    let saved = first.client().save_session(&file, "model").expect("saved");
    first.shutdown(true).expect("ends");
    let options = EngineOptions { kv_cache: KvCacheSize::Pages(16), max_model_len: Some(40), ..small() };
    let engine = start(&model, 1, &options);
    let restored = engine.client().restore_session(&file, "model").expect("restored");
    assert!(saved.tokens > 16 * options.page_size);
    assert_eq!(restored.left_out, saved.tokens - 16 * options.page_size);
    let cached = |prompt: &Vec<u32>| ask(&engine, greedy(prompt, 1)).cached;
    assert_eq!(cached(&prompts[5]), 29);
    assert_eq!(cached(&prompts[0]), 0);
    engine.shutdown(true).expect("ends");
}

/// Damaged and foreign files are refused with the reason, and the engine serves without them.
#[test]
fn files_that_are_no_session_of_this_model_are_refused() {
    let model = Arc::new(qwen3());
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("session.safetensors");
    let engine = start(&model, 2, &small());
    let prompt = tokens(30, 3);
    let expected = ask(&engine, greedy(&prompt, 12));
    engine.client().save_session(&file, "model of 1 files").expect("saved");
    let whole = std::fs::read(&file).expect("a file");
    let refusal = |engine: &ringspan_serve::engine::Engine, file: &Path, model: &str| {
        engine.client().restore_session(file, model).expect_err("must be refused").to_string()
    };
    let said = refusal(&engine, &file, "model of 2 files");
    assert!(said.contains("another model") && said.contains("of 1 files") && said.contains("of 2 files"), "{said}");
    assert!(refusal(&engine, &folder.path().join("nowhere"), "model").contains("cannot be read"));

    let fresh = start(&model, 3, &small());
    let damaged = folder.path().join("damaged");
    // Bytes in the header's length, in the header, among the texts, the rows, and the checksums.
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().expect("8 bytes")) as usize;
    for at in [0, 7, 9, 40, header - 20, header + 3, header + 70, whole.len() / 2, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x15;
        std::fs::write(&damaged, bytes).expect("a file");
        let said = refusal(&fresh, &damaged, "model of 1 files");
        assert!(said.contains("damaged") || said.contains("format"), "byte {at}: {said}");
    }
    for length in [0, 5, 8, 100, header, header + 9, whole.len() - 1] {
        std::fs::write(&damaged, &whole[..length]).expect("a file");
        assert!(refusal(&fresh, &damaged, "model of 1 files").contains("damaged"), "{length} bytes");
    }
    std::fs::write(&damaged, [&whole[..], &[0]].concat()).expect("a file");
    assert!(refusal(&fresh, &damaged, "model of 1 files").contains("damaged"));

    let answer = ask(&fresh, greedy(&prompt, 12));
    assert_eq!(answer.tokens, expected.tokens);
    close(&answer.logprobs, &expected.logprobs);

    let unwritable =
        engine.client().save_session(&folder.path().join("no/such/folder"), "model").expect_err("no folder");
    assert!(unwritable.to_string().contains("cannot be written"), "{unwritable}");
    assert_eq!(ask(&engine, greedy(&prompt, 12)).tokens, expected.tokens, "it goes on");
}

/// Texts with a common beginning, most of whose pages have lost the layer that sees a window: a file has no more than the cache has.
#[test]
fn a_session_has_rows_of_window_layers_where_the_cache_has_them() {
    let (model, folder) = (Arc::new(gemma3()), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("session.safetensors");
    // A token takes 128 bytes in each of the two layers, of which one sees a window.
    let scarce = |page| EngineOptions {
        page_size: page,
        kv_cache: KvCacheSize::Bytes(128 * 330),
        max_model_len: Some(120),
        max_running: 2,
        ..small()
    };
    let cold = start(&model, 1, &EngineOptions { prefix_cache: false, ..scarce(4) });
    let first = start(&model, 1, &scarce(4));
    let texts: Vec<Vec<u32>> = (0..3)
        .map(|seed| {
            let prompt = [tokens(60, 8), tokens(10, 40 + seed)].concat();
            [prompt.clone(), ask(&first, greedy(&prompt, 9)).tokens].concat()
        })
        .collect();
    let saved = first.client().save_session(&file, "gemma3").expect("saved");
    let (in_one_layer, in_both) = (saved.tokens as u64 * 128, saved.tokens as u64 * 256);
    assert!(saved.bytes > in_one_layer && saved.bytes < in_both, "{saved:?}");
    let size = std::fs::metadata(&file).expect("a file").len();
    assert!(size > saved.bytes && size < saved.bytes + 4096, "{size} bytes of {saved:?}");
    first.shutdown(true).expect("ends");
    for (ring, options) in [(1, scarce(4)), (2, small()), (3, scarce(4))] {
        let engine = start(&model, ring, &options);
        let restored = engine.client().restore_session(&file, "gemma3").expect("restored");
        // Each page once, however many texts begin with it.
        assert_eq!(restored, saved, "{ring} ranks");
        let mut cached = 0;
        for text in texts.iter().rev() {
            let longer = [text.as_slice(), &tokens(5, 7)].concat();
            let (answer, expected) = (ask(&engine, greedy(&longer, 9)), ask(&cold, greedy(&longer, 9)));
            assert_eq!(answer.tokens, expected.tokens, "{ring} ranks");
            close(&answer.logprobs, &expected.logprobs);
            cached += answer.cached;
        }
        assert!(cached > 0, "{ring} ranks");
        engine.shutdown(true).expect("ends");
    }
}
