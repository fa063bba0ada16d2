//! Whatever bytes a file holds, the reader of `attend` gives a valid input or an error with a text: it never panics, and
//! never takes memory that has nothing to do with the size of the file.
//!
//! `RINGSPAN_FILES=100000 cargo test -p ringspan-cli --test attend_files` tries as many files of each kind.

mod allocator;
mod generated_files;
mod read;

use generated_files::{Damage, File};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError};
use read::read;

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

/// Upper limit on the bytes that reading a file may take: a constant, plus a multiple of the file's size.
const FLOOR: usize = allocator::LARGEST + (16 << 20);
const TIMES: usize = 256;

fn holds(file: &File) -> Result<(), TestCaseError> {
    let bytes = file.bytes();
    let (result, peak) = allocator::peak(|| read(&bytes, file.backward));
    let most = FLOOR + TIMES * bytes.len();
    prop_assert!(peak <= most, "{} bytes taken for a file of {}", peak, bytes.len());
    match result {
        Err(text) => {
            prop_assert!(text.contains("in.safetensors"), "no file in: {}", text);
            if let (Some(shape), []) = (file.overflow(), &file.damage[..]) {
                prop_assert!(text.contains(&format!("{shape:?}")), "{:?} is not in: {}", shape, text);
            }
        }
        Ok(()) => prop_assert!(file.overflow().is_none() || !file.damage.is_empty()),
    }
    Ok(())
}

fn config() -> Config {
    let cases = std::env::var("RINGSPAN_FILES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(4000);
    // The same files each time, and no folder of failures: a failure is printed, and becomes a case below.
    Config { cases, rng_seed: RngSeed::Fixed(1), failure_persistence: None, ..Config::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn files_with_strange_shapes_types_and_values(file in generated_files::file()) {
        holds(&file)?;
    }

    #[test]
    fn good_files_that_were_damaged(file in generated_files::good(), damage in proptest::collection::vec(generated_files::damage(), 1..4)) {
        holds(&file.damaged(damage))?;
    }

    #[test]
    fn good_files_are_read(file in generated_files::good()) {
        prop_assert_eq!(read(&file.bytes(), file.backward), Ok(()));
    }

    #[test]
    fn noise_with_a_plausible_length(header in proptest::collection::vec(any::<u8>(), 0..200), length in 0u64..220) {
        let bytes = [&length.to_le_bytes()[..], &header].concat();
        let _ = read(&bytes, false);
    }
}

/// A file with this header, followed by `data` zero bytes.
fn raw(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes, false).expect_err("must be refused")
}

#[test]
fn a_shape_that_no_number_can_count_is_named() {
    let text = refusal(&raw(r#"{"q":{"dtype":"F32","shape":[4294967296,4294967296,1,1],"data_offsets":[0,4]}}"#, 4));
    assert!(text.contains("`q`") && text.contains("[4294967296, 4294967296, 1, 1]") && text.contains("F32"), "{text}");
    let text = refusal(&raw(r#"{"q":{"dtype":"F32","shape":[1,2,3,4],"data_offsets":[0,4]}}"#, 4));
    assert!(text.contains("[1, 2, 3, 4]") && text.contains("96") && text.contains("0 to 4"), "{text}");
}

#[test]
fn offsets_whose_sum_overflows_are_refused() {
    // Each size fits into 64 bits, and so does their sum; together with the size of the header it passes 2^64.
    let most = (1u64 << 61) - 1;
    let places: Vec<(u64, u64)> = (0..8).map(|n| (n * most, (n + 1) * most)).chain([(8 * most, u64::MAX)]).collect();
    let tensor = |(n, (start, end)): (usize, &(u64, u64))| {
        format!(r#""t{n}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end - start)
    };
    let header = format!("{{{}}}", places.iter().enumerate().map(tensor).collect::<Vec<_>>().join(","));
    let text = refusal(&raw(&header, 7));
    assert!(text.contains("[2305843009213693951]") && text.contains("in 7 bytes of data"), "{text}");
}

#[test]
fn many_rows_without_elements_are_refused() {
    let header = |b: u64, h: u64| {
        let tensor =
            |name: &str, heads| format!(r#""{name}":{{"dtype":"F32","shape":[{b},0,{heads},1],"data_offsets":[0,0]}}"#);
        raw(&format!("{{{},{},{}}}", tensor("q", h), tensor("k", 1), tensor("v", 1)), 0)
    };
    for (b, h) in [(1 << 20, 1), (1 << 28, 1), (1, 1 << 28), (1 << 62, 1)] {
        let text = refusal(&header(b, h));
        assert!(text.contains(&b.max(h).to_string()), "{text}");
    }
    assert_eq!(read(&header(3, 2), false), Ok(()));
}

#[test]
fn a_header_that_is_not_there_is_told_with_its_length() {
    let good = raw("{}", 0);
    for (bytes, words) in [
        (&good[..5], "5 bytes"),
        (&good[..9], "2 bytes"),
        (&u64::MAX.to_le_bytes()[..], "18446744073709551615 bytes"),
        (&raw("{}", 3)[..], "not a whole"),
    ] {
        let text = refusal(bytes);
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn each_kind_of_damage_changes_the_file_as_it_says() {
    let mut bytes = raw("{}", 2);
    Damage::Cut(0.5).apply(&mut bytes);
    assert_eq!(bytes.len(), 6);
}
