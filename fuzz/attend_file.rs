//! The reader of `ringspan attend` on bytes that libFuzzer finds: `cargo +nightly fuzz run attend_file -- -max_len=4096
//! -rss_limit_mb=2048`, with `cargo install cargo-fuzz`. The same reader meets random files without nightly in
//! `cargo test -p ringspan-cli --test attend_files`.
#![no_main]

#[path = "../crates/ringspan-cli/tests/attend_files/read.rs"]
mod read;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The first byte says whether gradients are asked for; an error is as good as an input.
    if let Some((first, bytes)) = bytes.split_first() {
        let _ = read::read(bytes, first % 2 == 1);
    }
});
