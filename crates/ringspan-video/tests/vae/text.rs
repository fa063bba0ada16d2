//! The text encoder against transformers.

use ringspan_video::ranks::{VideoMesh, VideoRanks};
use ringspan_video::text_encoder::{PromptTokenizer, TextEncoder};
use safetensors::SafeTensors;
use std::path::Path;

#[derive(serde::Deserialize)]
struct Reference {
    prompts: Vec<String>,
    tokens: Vec<Vec<u32>>,
}

fn folder() -> &'static Path {
    Path::new("tests/fixtures/text")
}

fn reference() -> Reference {
    let text = std::fs::read_to_string(folder().join("reference.json")).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn tokens_equal_those_of_transformers_and_a_long_prompt_keeps_its_end() {
    let (tokenizer, Reference { prompts, tokens }) =
        (PromptTokenizer::open(folder()).expect("a tokenizer"), reference());
    let made: Vec<_> = prompts.iter().map(|prompt| tokenizer.encode(prompt, 512).expect("tokens")).collect();
    assert_eq!(made.iter().map(|made| made.ids.clone()).collect::<Vec<_>>(), tokens);
    assert!(made[3].cut > 0 && made[3].ids.last() == Some(&1) && made[..3].iter().all(|made| made.cut == 0));
}

/// Some texts have characters that the file's rules replace, a piece of the user, and characters that are no piece.
#[test]
fn tokens_of_sentence_pieces_own_file_equal_those_that_it_makes() {
    #[derive(serde::Deserialize)]
    struct Reference {
        texts: Vec<String>,
        tokens: Vec<Vec<u32>>,
    }
    let folder = folder().join("sentence_piece");
    let text = std::fs::read_to_string(folder.join("reference.json")).expect("a fixture");
    let Reference { texts, tokens } = serde_json::from_str(&text).expect("JSON");
    let tokenizer = PromptTokenizer::open(&folder).expect("a tokenizer");
    for (text, tokens) in texts.iter().zip(tokens) {
        assert_eq!(tokenizer.encode(text, usize::MAX).expect("tokens").ids, tokens, "{text:?}");
    }
}

#[test]
fn damaged_files_of_sentence_piece_are_refused_by_their_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("spiece.model");
    let whole = std::fs::read(self::folder().join("sentence_piece/spiece.model")).expect("a fixture");
    // Cut within a piece; no pieces at all; the model type 2, BPE; white space as a suffix; white space that is not escaped.
    for (bytes, wanted) in [
        (&whole[..whole.len() / 2], "not a file of SentencePiece"),
        (&[], "no piece for the end"),
        (&[0x12, 2, 0x18, 2], "model type is 2"),
        (&[0x12, 3, 0xc0, 1, 1], "treat_whitespace_as_suffix is true"),
        (&[0x1a, 2, 0x28, 0], "escape_whitespaces false"),
    ] {
        std::fs::write(&path, bytes).expect("written");
        let message = PromptTokenizer::open(folder.path()).expect_err("must be refused").to_string();
        assert!(message.contains(wanted) && message.contains("spiece.model"), "{message}");
    }
}

#[test]
fn states_equal_those_of_transformers_on_every_mesh() {
    let (encoder, Reference { tokens, .. }) = (TextEncoder::open(folder()).expect("an encoder"), reference());
    let bytes = std::fs::read(folder().join("reference.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    for (ring, ulysses) in [(1, 1), (3, 1), (1, 3), (2, 2), (8, 1)] {
        let mut ranks = VideoRanks::start(&VideoMesh { ring, ulysses, ..VideoMesh::single() }).expect("ranks");
        for (index, tokens) in tokens.iter().enumerate() {
            let states = encoder.encode(tokens, &mut ranks).expect("states").expect("rank 0");
            let wanted = file.tensor(&format!("embeds.{index}")).expect("a tensor");
            let wanted = wanted.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")));
            assert_eq!(states.len(), wanted.len());
            let (mut apart, mut size) = (0.0f64, 0.0f64);
            for (got, wanted) in states.iter().zip(wanted) {
                apart += f64::from(got - wanted).powi(2);
                size += f64::from(wanted).powi(2);
            }
            let apart = (apart / size).sqrt();
            assert!(apart < 1e-5, "prompt {index} on {ring} x {ulysses} ranks: {apart:e}");
        }
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let encoder = TextEncoder::open(folder()).expect("an encoder");
    let mut ranks = VideoRanks::start(&VideoMesh::single()).expect("a rank");
    let message = encoder.encode(&[3, 45], &mut ranks).expect_err("must be refused").to_string();
    assert!(message.contains("token 45") && message.contains("45 tokens"), "{message}");
}

/// Weights in a GGUF file with several types of quantization; ranks read rows and matrices of it at the same time.
#[test]
fn states_of_quantized_weights_equal_those_of_transformers_on_every_mesh() {
    #[derive(serde::Deserialize)]
    struct Quantized {
        tokens: Vec<u32>,
    }
    let folder = folder().join("quantized");
    let text = std::fs::read_to_string(folder.join("reference.json")).expect("a fixture");
    let Quantized { tokens } = serde_json::from_str(&text).expect("JSON");
    let bytes = std::fs::read(folder.join("reference.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let wanted = file.tensor("states").expect("a tensor").data().chunks_exact(4);
    let wanted: Vec<f32> = wanted.map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
    let encoder = TextEncoder::open(&folder).expect("an encoder");
    for (ring, ulysses) in [(1, 1), (3, 1), (2, 2)] {
        let mut ranks = VideoRanks::start(&VideoMesh { ring, ulysses, ..VideoMesh::single() }).expect("ranks");
        let states = encoder.encode(&tokens, &mut ranks).expect("states").expect("rank 0");
        assert_eq!(states.len(), wanted.len());
        let square = |sum: f64, x: f64| sum + x * x;
        let apart = states.iter().zip(&wanted).map(|(a, b)| f64::from(a - b)).fold(0.0, square);
        let far = (apart / wanted.iter().map(|x| f64::from(*x)).fold(0.0, square)).sqrt();
        assert!(far < 1e-4, "ring {ring} x ulysses {ulysses}: {far:e}");
    }
    let other = tempfile::tempdir().expect("a folder");
    std::fs::copy(folder.join("config.json"), other.path().join("config.json")).expect("copied");
    std::fs::copy("tests/fixtures/gguf/wan.gguf", other.path().join("encoder.gguf")).expect("copied");
    let message = TextEncoder::open(other.path()).expect_err("another model").to_string();
    assert!(message.contains("general.architecture is wan") && message.contains("t5encoder"), "{message}");
}
