//! Bad input gives a message that names file, tensor and numbers, exit code 1, and no damaged file.

use crate::support::{Bench, Sizes, Tensor, message, random};

const SIZES: Sizes = Sizes { b: 2, sq: 6, sk: 6, h: 4, g: 2, d: 8, dv: 8 };

/// The standard tensors, of which some are replaced or added (`Some`) or left out (`None`).
fn with(s: &Sizes, changes: &[(&'static str, Option<Tensor>)]) -> Vec<(&'static str, Tensor)> {
    let mut tensors = s.tensors();
    for (name, change) in changes {
        tensors.retain(|(n, _)| n != name);
        if let Some(tensor) = change {
            tensors.push((name, tensor.clone()));
        }
    }
    tensors
}

/// Checks that a run is refused with all of these words, and leaves an earlier output as the only file.
fn refused(tensors: &[(&'static str, Tensor)], flags: &str, words: &[&str]) {
    let bench = Bench::new(tensors);
    std::fs::write(bench.path("out.safetensors"), b"good").expect("file");
    let message = bench.refusal(flags);
    for word in words {
        assert!(message.contains(word), "'{word}' is missing: {message}");
    }
    assert_eq!(std::fs::read(bench.path("out.safetensors")).expect("still there"), b"good");
    assert_eq!(bench.files(), ["in.safetensors", "out.safetensors"]);
}

#[test]
fn a_missing_file_is_named() {
    let bench = Bench::new(&[]);
    let output = bench.command("attend").args(["none.safetensors", "--out", "out.safetensors"]).output().expect("runs");
    assert!(message(&output).contains("none.safetensors"));
    assert_eq!(bench.files(), ["in.safetensors"]);
}

#[test]
fn instructions_that_are_unknown_or_not_there_are_named_with_those_that_are() {
    // The argument parser refuses with exit code 2, a check of the processor with 1.
    let bench = Bench::new(&SIZES.tensors());
    let output = bench.attend("--isa sse9");
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("sse9") && message.contains("portable, avx2 and avx512, and auto"), "{message}");
    if !ringspan::kernel::Isa::available().contains(&ringspan::kernel::Isa::Avx512) {
        refused(&SIZES.tensors(), "--isa avx512", &["no avx512", "portable"]);
    }
}

#[test]
fn missing_tensors_are_named_with_what_is_there() {
    refused(&with(&SIZES, &[("k", None)]), "", &["in.safetensors", "`k`", "[B, Sk, G, D]", "d_out, q, v"]);
    refused(&with(&SIZES, &[("d_out", None)]), "--backward", &["`d_out`", "--backward"]);
    refused(&[], "", &["`q`", "nothing"]);
}

#[test]
fn wrong_types_are_named() {
    let ints = Tensor::i32(&SIZES.q(), &vec![1; SIZES.q().iter().product()]);
    refused(&with(&SIZES, &[("q", Some(ints))]), "", &["`q`", "I32", "F32 or BF16 or F16"]);
    let floats = Tensor::f32(&[2], &[1.0, 2.0]);
    refused(&with(&SIZES, &[("kv_lengths", Some(floats))]), "", &["`kv_lengths`", "F32", "I32"]);
}

#[test]
fn shapes_that_do_not_fit_are_named_with_both_numbers() {
    let change = |name, shape: &[usize]| with(&SIZES, &[(name, Some(Tensor::random(shape, 1)))]);
    refused(&change("q", &[2, 6, 4]), "", &["`q`", "[2, 6, 4]", "[B, Sq, H, D]"]);
    refused(&change("k", &[3, 6, 2, 8]), "", &["`k`", "differ in B", "2 and 3"]);
    refused(&change("v", &[2, 7, 2, 8]), "", &["`v`", "differ in Sk", "6 and 7"]);
    refused(&change("k", &[2, 6, 2, 16]), "", &["`q`", "differ in D", "8 and 16"]);
    refused(&change("v", &[2, 6, 1, 8]), "", &["`v`", "differ in G", "2 and 1"]);
    refused(&change("q", &[2, 6, 3, 8]), "", &["3 heads H", "2 heads G"]);
    refused(&change("d_out", &[2, 6, 4, 9]), "--backward", &["`d_out`", "[2, 6, 4, 9]", "[2, 6, 4, 8]"]);
    refused(&with(&Sizes { h: 0, ..SIZES }, &[]), "", &["H = 0"]);
    refused(&with(&Sizes { d: 0, ..SIZES }, &[]), "", &["D = 0"]);
}

#[test]
fn documents_that_do_not_fit_are_named() {
    let s = Sizes { b: 1, ..SIZES };
    let boundaries = |values: &[i32]| with(&s, &[("cu_seqlens", Some(Tensor::i32(&[values.len()], values)))]);
    refused(&boundaries(&[0, 4, 2]), "", &["`cu_seqlens`", "from 4", "to 2"]);
    refused(&boundaries(&[0, 4, 7]), "", &["`cu_seqlens`", "7", "S = 6"]);
    refused(&boundaries(&[1, 4]), "", &["`cu_seqlens`[0] is 1"]);
    refused(&boundaries(&[]), "", &["`cu_seqlens` is empty"]);
    refused(&boundaries(&[0, -1]), "", &["from 0", "to -1"]);
    let packed = ("cu_seqlens", Some(Tensor::i32(&[2], &[0, 6])));
    refused(&with(&SIZES, std::slice::from_ref(&packed)), "", &["B = 1", "B = 2"]);
    let ids = |shape: &[usize], values: &[i32]| ("document_ids", Some(Tensor::i32(shape, values)));
    refused(&with(&s, &[ids(&[1, 5], &[1; 5])]), "", &["`document_ids`", "[1, 5]", "[1, 6]"]);
    refused(&with(&s, &[ids(&[1, 6], &[1, 1, -3, 1, 1, 1])]), "", &["`document_ids`", "-3"]);
    refused(&with(&s, &[ids(&[1, 6], &[1; 6]), packed]), "", &["`cu_seqlens` and `document_ids`"]);
    let lengths = |values: &[i32]| with(&SIZES, &[("kv_lengths", Some(Tensor::i32(&[values.len()], values)))]);
    refused(&lengths(&[6, 7]), "", &["`kv_lengths`[1] is 7", "Sk = 6"]);
    refused(&lengths(&[-1, 6]), "", &["`kv_lengths`[0] is -1"]);
    refused(&lengths(&[6]), "", &["`kv_lengths`", "[1]", "[2]"]);
    let uneven = Sizes { b: 1, sk: 7, ..SIZES };
    refused(&with(&uneven, &[ids(&[1, 6], &[1; 6])]), "", &["Sq = 6", "Sk = 7"]);
}

#[test]
fn meshes_that_do_not_fit_are_refused_with_what_is_possible() {
    refused(&SIZES.tensors(), "--ulysses 5", &["ulysses 5", "4"]);
    refused(&SIZES.tensors(), "--ring 0", &["--ring 0"]);
    refused(&SIZES.tensors(), "--ring 100000 --ulysses 100000", &["4096"]);
    refused(&SIZES.tensors(), "--ring 9223372036854775807 --ulysses 4", &["4096"]);
    refused(&SIZES.tensors(), "--scale nan", &["--scale NaN"]);
}

#[test]
fn corrupt_files_are_refused() {
    let whole = {
        let bench = Bench::new(&SIZES.tensors());
        std::fs::read(bench.path("in.safetensors")).expect("file")
    };
    let mut huge = (u64::MAX / 2).to_le_bytes().to_vec();
    huge.extend([b'{'; 100]);
    let header = br#"{"q":{"dtype":"F32","shape":[4294967296,4294967296,4294967296,4],"data_offsets":[0,0]}}      "#;
    let mut overflow = (header.len() as u64).to_le_bytes().to_vec();
    overflow.extend(header);
    let noise: Vec<u8> = random(300, 5).into_iter().map(|x| (x * 127.0) as i8 as u8).collect();
    for (what, bytes) in [
        ("cut short", whole[..whole.len() - 5].to_vec()),
        ("cut in the header", whole[..20].to_vec()),
        ("empty", Vec::new()),
        ("noise", noise),
        ("a header beyond the file", huge),
        ("sizes that overflow", overflow),
    ] {
        let bench = Bench::new(&[]);
        std::fs::write(bench.path("in.safetensors"), bytes).expect("file");
        let message = bench.refusal("");
        assert!(message.contains("in.safetensors"), "{what}: {message}");
        assert_eq!(bench.files(), ["in.safetensors"], "{what}");
    }
}

#[test]
fn sizes_that_overflow_where_a_dim_is_empty_are_refused() {
    let huge = 1usize << 40;
    let tensors = |sk: usize| {
        let empty =
            |shape: [usize; 4]| Tensor { dtype: safetensors::Dtype::F32, shape: shape.to_vec(), bytes: Vec::new() };
        vec![("q", Tensor::random(&[1, 2, 1, 4], 1)), ("k", empty([1, sk, 1, 4])), ("v", empty([1, sk, 1, huge << 10]))]
    };
    refused(&tensors(0), "", &["more bytes than"]);
}

#[test]
fn outputs_that_cannot_be_are_refused_before_the_work() {
    let bench = Bench::new(&SIZES.tensors());
    let run = |out: &str, more: &[&str]| {
        let mut command = bench.command("attend");
        message(&command.args(["in.safetensors", "--out", out]).args(more).output().expect("runs"))
    };
    assert!(run("no/such/folder.safetensors", &[]).contains("no/such"));
    assert!(run(".", &[]).contains("folder"));
    assert!(run("x", &["--report", "x"]).contains("same file"));
    assert_eq!(bench.files(), ["in.safetensors"]);
}

#[test]
fn flags_that_make_no_sense_are_a_usage_error() {
    let bench = Bench::new(&SIZES.tensors());
    for flags in
        ["--mask diagonal", "--window 3", "--layout zig", "--strategy star", "--repeat 0", "--threads 0", "--unknown 3"]
    {
        let output = bench.attend(flags);
        assert_eq!(output.status.code(), Some(2), "{flags}");
        assert!(!output.stderr.is_empty());
    }
    let message = String::from_utf8(bench.attend("--layout zig").stderr).expect("text");
    assert!(message.contains("contiguous, zigzag, striped:K"), "{message}");
}

#[test]
fn a_causal_mask_with_a_window_ahead_is_refused() {
    for mask in ["causal", "causal-bottom-right"] {
        let flags = format!("--mask {mask} --window 0,9");
        refused(&SIZES.tensors(), &flags, &["9 keys ahead", mask, "RIGHT of 0 or -1"]);
    }
}

#[test]
fn a_prefix_that_opens_nothing_is_refused() {
    let lengths = with(&SIZES, &[("prefix_lengths", Some(Tensor::i32(&[1], &[2])))]);
    refused(&SIZES.tensors(), "--prefix 2", &["prefix", "full", "--mask causal"]);
    refused(&SIZES.tensors(), "--prefix 2 --window 3,-1", &["prefix", "3 back", "--window"]);
    refused(&lengths, "", &["prefix", "full", "--mask causal"]);
    for flags in ["--prefix 2 --mask causal", "--prefix 2 --window 3,1"] {
        assert!(Bench::new(&SIZES.tensors()).attend(flags).status.success(), "{flags}");
    }
    assert!(Bench::new(&lengths).attend("--mask causal-bottom-right").status.success());
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_an_error_and_leaves_the_old_result() {
    // A limit on the size of files stands for a full disk; the signal that comes with it is ignored.
    let bench = Bench::new(&Sizes { sq: 400, sk: 400, ..SIZES }.tensors());
    std::fs::write(bench.path("out.safetensors"), b"good").expect("file");
    let script = format!(
        "trap '' XFSZ; ulimit -f 20; exec '{}' attend in.safetensors --out out.safetensors --threads 1",
        env!("CARGO_BIN_EXE_ringspan")
    );
    let mut command = std::process::Command::new("sh");
    let output = command.current_dir(bench.folder.path()).args(["-c", &script]).output().expect("runs");
    let message = message(&output);
    assert!(message.contains("out.safetensors") && message.contains("bytes"), "{message}");
    assert_eq!(std::fs::read(bench.path("out.safetensors")).expect("still there"), b"good");
    assert_eq!(bench.files(), ["in.safetensors", "out.safetensors"]);
}

/// The message is the same on every mesh, whichever rank has the large number, and even where nothing travels.
#[test]
fn numbers_beyond_the_wire_s_type_are_refused_on_every_mesh() {
    for (name, shape) in [("q", SIZES.q()), ("k", SIZES.k()), ("v", SIZES.v())] {
        let mut values = random(shape.iter().product(), 1);
        // The last token has a number beyond the limit, and the first token another; infinite numbers are allowed.
        let last = values.len() - 1;
        (values[last], values[0], values[1]) = (-70000.0, 66000.0, f32::INFINITY);
        let tensors = with(&SIZES, &[(name, Some(Tensor::f32(&shape, &values)))]);
        for mesh in ["", "--ring 2", "--ring 3 --strategy pass-q", "--ulysses 2", "--ring 2 --ulysses 2"] {
            let flags = format!("--dtype f16 {mesh}");
            refused(&tensors, &flags, &["in.safetensors", &format!("`{name}`"), "-70000.0", "f16", "65504.0"]);
        }
        values[last] = 65504.0;
        values[0] = -65504.0;
        let bench = Bench::new(&with(&SIZES, &[(name, Some(Tensor::f32(&shape, &values)))]));
        bench.results("--dtype f16 --ring 2");
    }
}

#[test]
fn parameters_that_would_overflow_are_refused_with_their_limit() {
    refused(&SIZES.tensors(), "--scale 1e38", &["1e38", "1e30"]);
    refused(&SIZES.tensors(), "--softcap 2.4e38", &["2.4e38", "1e38"]);
    let heads = Tensor::f32(&[4], &[0.0, 3e38, -3e38, 1.0]);
    refused(&with(&SIZES, &[("sinks", Some(heads))]), "", &["sink", "3e38", "1e38"]);
    let mut bias = vec![f32::MIN; 36];
    let tensors = |bias: &[f32]| with(&SIZES, &[("bias", Some(Tensor::f32(&[1, 1, 6, 6], bias)))]);
    Bench::new(&tensors(&bias)).results("");
    bias[7] = 3e38;
    for mesh in ["", "--ring 2"] {
        refused(&tensors(&bias), mesh, &["in.safetensors", "`bias`", "3e38", "1e38"]);
    }
}
