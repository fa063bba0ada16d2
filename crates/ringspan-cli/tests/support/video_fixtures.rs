//! The smallest models of the video crate's fixtures.

use std::path::{Path, PathBuf};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringspan-video/tests/fixtures").join(name)
}

/// Copies a folder with all that is in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a fixture") {
        let path = entry.expect("a file").path();
        let to = to.join(path.file_name().expect("a name"));
        if path.is_dir() { copy(&path, &to) } else { std::fs::copy(&path, &to).map(drop).expect("copied") }
    }
}

/// Puts a whole pipeline for text into a folder.
pub fn write_pipeline(folder: &Path) {
    write_pipeline_of("t2v", folder);
}

/// Puts a whole pipeline of a kind into a folder, from the files of several fixtures.
pub fn write_pipeline_of(kind: &str, folder: &Path) {
    let vae = if kind == "ti2v" { "vae/residual" } else { "vae/tiny" };
    for (from, name) in [
        ("text/text_encoder", "text_encoder"),
        ("text/tokenizer", "tokenizer"),
        (vae, "vae"),
        (&format!("pipeline/{kind}"), "."),
    ] {
        copy(&fixture(from), &folder.join(name));
    }
}
