//! `ringspan draw`: pictures, tables, and refusals with the numbers.

use crate::support::{Bench, message};

fn draw(bench: &Bench, flags: &str) -> std::process::Output {
    bench.command("draw").args(flags.split_whitespace()).output().expect("the binary runs")
}

#[test]
fn a_picture_is_written_and_its_bytes_are_said() {
    let bench = Bench::new(&[]);
    for flags in [
        "--ring 4 --layout zigzag",
        "--ring 8 --strategy halo --layout contiguous --window 40,0 --tokens 1000000",
        "--ring 2 --ulysses 2 --ulysses-outer --layout striped:2 --tokens 37 --mask full --dtype f32",
        "--ring 3 --documents 30,20,14 --layout per-document-zigzag --strategy pass-q --prefix 4 --chunk 10",
    ] {
        let output = draw(&bench, &format!("{flags} --svg out.svg"));
        assert!(output.status.success(), "{flags}: {}", String::from_utf8_lossy(&output.stderr));
        let svg = std::fs::read_to_string(bench.path("out.svg")).expect("the picture");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.len() < 150_000, "{flags}: {}", svg.len());
        assert!(String::from_utf8_lossy(&output.stdout).contains("out.svg: a rank sends up to "), "{flags}");
        assert_eq!(bench.files(), ["in.safetensors", "out.svg"]);
    }
}

#[test]
fn without_a_file_the_schedule_is_printed() {
    let output = draw(&Bench::new(&[]), "--ring 4 --tokens 256 --heads 8 --kv-heads 2 --dim 64");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("ring over ring 4 x ulysses 1, zigzag layout, causal mask"), "{text}");
    // Three blocks of 64 tokens travel, with 2 heads of keys and values of width 64, in 2 bytes per number.
    assert!(text.contains(&format!("up to {} bytes forward", 3 * 64 * 2 * 128 * 2)), "{text}");
}

#[test]
fn the_pictures_of_the_readme_are_what_its_commands_draw() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("the README");
    let commands: Vec<(&str, &str)> =
        readme.lines().filter_map(|line| line.strip_prefix("ringspan draw ")?.split_once(" --svg docs/")).collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    let bench = Bench::new(&[]);
    for (flags, name) in commands {
        let output = draw(&bench, &format!("{flags} --svg out.svg"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let drawn = std::fs::read_to_string(bench.path("out.svg")).expect("the picture");
        let kept = std::fs::read_to_string(root.join("docs").join(name)).expect("the picture in docs/");
        assert!(drawn == kept, "docs/{name} is not what `ringspan draw {flags}` draws; draw it again");
    }
}

#[test]
fn what_cannot_be_drawn_is_refused_with_the_numbers() {
    let refused = |flags: &str, words: &[&str]| {
        let bench = Bench::new(&[]);
        let message = message(&draw(&bench, &format!("{flags} --svg out.svg")));
        assert!(words.iter().all(|word| message.contains(word)), "{flags}: {message}");
        assert_eq!(bench.files(), ["in.safetensors"]);
    };
    refused("--layout striped:1 --tokens 4096", &["8390656 cells", "4096 queries", "20000"]);
    refused("--layout striped:32 --tokens 99999999999", &["striped:32", "3124999999 blocks", "4096"]);
    refused("--mask full --prefix 4", &["--prefix", "full", "--mask causal"]);
    refused("--ring 17", &["17 ring ranks", "16"]);
    refused("--ring 0", &["--ring 0"]);
    refused("--ring 512 --ulysses 4 --heads 32", &["2048 ranks", "1024"]);
    refused("--ring 5000", &["5000", "4096"]);
    refused("--ring 2 --ulysses 64", &["ulysses 64", "there are 32"]);
    refused("--ring 2 --ulysses-outer", &["--ulysses-outer", "--ulysses 1"]);
    refused("--tokens 0", &["0 queries"]);
    refused("--chunk 0", &["--chunk", "0 tokens"]);
    refused("--chunk 1 --tokens 1000000", &["--chunk 1", "1000000 chunks"]);
    refused("--tokens 99999999999999", &["99999999999999 tokens"]);
    refused("--documents 18446744073709551615,1", &["--documents"]);
}
