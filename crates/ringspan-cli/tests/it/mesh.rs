//! `ringspan mesh`: groups and coordinates for programs and people, and refusals with the numbers.

use crate::support::{Bench, message};
use serde_json::{Value, json};

fn mesh(flags: &str) -> std::process::Output {
    Bench::new(&[]).command("mesh").args(flags.split_whitespace()).output().expect("the binary runs")
}

fn listing(flags: &str) -> Value {
    let output = mesh(&format!("{flags} --json"));
    assert!(output.status.success(), "{flags}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn the_serving_form_lists_groups_and_coordinates() {
    let found = listing("--serving --tp 8 --pp 2 --attn-dp 1 --attn-cp 2 --ep 4 --moe-dp 1 --dcp 4");
    assert_eq!(found["world"], 16);
    let names: Vec<&String> = found["groups"].as_object().expect("groups").keys().collect();
    assert_eq!(names, ["attn_cp", "attn_dp", "attn_tp", "dcp", "moe_dp", "moe_ep", "moe_tp", "pp", "tp"]);
    let cp = json!([[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]);
    assert_eq!(found["groups"]["attn_cp"], cp);
    assert_eq!(found["groups"]["moe_dp"], cp, "ranks that share a prompt gather its tokens before the experts");
    assert_eq!(found["groups"]["moe_ep"][3], json!([9, 11, 13, 15]));
    assert_eq!(found["groups"]["dcp"][3], json!([12, 13, 14, 15]));
    let at = json!({"tp": 6, "pp": 1, "attn_dp": 0, "attn_cp": 1, "attn_tp": 2, "moe_dp": 0, "moe_ep": 3, "moe_tp": 0, "dcp": 2});
    assert_eq!(found["ranks"][14], at);
    assert_eq!(found["ranks"].as_array().map(Vec::len), Some(16));
    assert!(listing("--serving --tp 8")["groups"].get("dcp").is_none());
}

#[test]
fn the_training_form_lists_groups_and_coordinates() {
    let flags = "--pp 2 --dp-replicate 2 --dp-shard 2 --cp 4 --ulysses 2 --tp 2 --ep 4 --moe-dp 2";
    let found = listing(flags);
    assert_eq!(found["world"], 64);
    let names: Vec<&String> = found["groups"].as_object().expect("groups").keys().collect();
    let dense = ["cp", "dp", "dp_cp", "dp_replicate", "dp_shard", "dp_shard_cp"];
    assert_eq!(names, [&dense[..], &["moe_dp", "moe_ep", "moe_tp", "pp", "ring", "tp", "ulysses"]].concat());
    assert_eq!(found["groups"]["cp"][1], json!([1, 3, 5, 7]));
    assert_eq!(found["groups"]["dp"][0], json!([0, 8, 16, 24]));
    assert_eq!(found["groups"]["pp"][5], json!([5, 37]));
    assert_eq!(found["groups"]["moe_ep"][0], json!([0, 4, 8, 12]));
    assert_eq!(found["ranks"][63]["moe_tp"], 3);
    assert!(listing("--dp-shard 2 --cp 2")["groups"].get("moe_ep").is_none());
    assert_eq!(listing("")["world"], 1);
}

#[test]
fn without_json_people_get_tables() {
    let output = mesh("--dp-shard 32 --cp 4 --tp 2");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    for part in
        ["dp_shard 32 x ring 4 x ulysses 1 x tp 2 = 256 ranks", "and 16 more rows", "dp_shard_cp   0,2..254  1,3..255"]
    {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    assert!(text.lines().all(|line| line.len() < 120), "{text}");
    assert!(String::from_utf8_lossy(&mesh("--dp-replicate 256 --tp 256").stdout).contains("too wide to draw"));
}

#[test]
fn sizes_that_do_not_divide_and_flags_without_effect_are_refused() {
    let refused = |flags: &str, words: &[&str]| {
        let message = message(&mesh(flags));
        assert!(words.iter().all(|word| message.contains(word)), "{flags}: {message}");
    };
    refused("--serving --tp 8 --attn-dp 3", &["8, do not divide by attn_dp 3 x attn_cp 1 = 3", "attn_tp"]);
    refused("--serving --tp 8 --pp 2 --ep 3 --moe-dp 2", &["8, do not divide by ep 3 x moe_dp 2 = 6", "moe_tp"]);
    refused("--serving --tp 64 --attn-dp 4 --dcp 32", &["replica", "16, do not divide by dcp 32"]);
    refused("--serving --tp 8 --cp 2", &["--cp has no effect with --serving", "--attn-cp"]);
    refused("--serving --dp-shard 2", &["--dp-shard has no effect"]);
    refused("--cp 2 --attn-cp 2", &["--attn-cp has no effect without --serving"]);
    refused("--cp 2 --dcp 2", &["--dcp has no effect"]);
    refused("--cp 2 --moe-dp 2", &["--moe-dp has no effect without --ep"]);
    refused("--cp 6 --ulysses 4", &["--cp 6", "--ulysses 4"]);
    refused("--cp 6 --ulysses 0", &["--ulysses 0"]);
    refused("--dp-shard 3 --tp 2 --ep 4", &["6, do not divide by ep 4 x moe_dp 1 = 4"]);
    refused("--tp 0", &["tp has size 0"]);
    refused("--dp-shard 100000", &["= 100000 ranks", "65536"]);
    refused("--dp-shard 18446744073709551615 --tp 2", &["machine word"]);
}
