//! Tests of the numbers in the report of `attend`.

use crate::support::{Bench, Sizes, Tensor};

fn report(bench: &Bench, flags: &str) -> serde_json::Value {
    bench.results(&format!("{flags} --report report.json"));
    serde_json::from_slice(&std::fs::read(bench.path("report.json")).expect("report")).expect("JSON")
}

fn column(report: &serde_json::Value, name: &str) -> Vec<u64> {
    let ranks = report["ranks"].as_array().expect("ranks");
    ranks.iter().map(|rank| rank[name].as_u64().unwrap_or_else(|| panic!("{name} in {rank}"))).collect()
}

#[test]
fn counts_equal_the_formulas() {
    let s = Sizes { b: 1, sq: 40, sk: 40, h: 4, g: 2, d: 8, dv: 8 };
    let bench = Bench::new(&s.tensors());
    let report = report(&bench, "--ring 4 --mask full --backward --repeat 3");
    assert_eq!(column(&report, "tokens"), [10; 4]);
    // Visible pairs x heads x 2 x (D + Dv).
    assert_eq!(column(&report, "flops_forward"), [10 * 40 * 4 * 2 * 16; 4]);
    // Forward, P - 1 blocks of 10 tokens of keys and values travel in f32; backward, as many, and as many blocks of their
    // gradients.
    let block = 10 * s.g as u64 * 16 * 4;
    assert_eq!(column(&report, "bytes_sent_forward"), [3 * block; 4]);
    assert_eq!(column(&report, "bytes_sent_backward"), [6 * block; 4]);
    assert!(column(&report, "peak_bytes").iter().all(|bytes| *bytes > 10 * 4 * 8 * 4), "{report}");
    assert!(report["seconds_forward"].as_f64().is_some_and(|seconds| seconds > 0.0));
    assert!(report["seconds_backward"].as_f64().is_some_and(|seconds| seconds > 0.0));
    assert_eq!(report["run"]["ring"], 4);
    assert_eq!(report["run"]["repeat"], 3);
    assert_eq!(report["run"]["layout"], "contiguous");
    assert_eq!(report["run"]["isa"], ringspan::kernel::Isa::best().to_string());
}

#[test]
fn work_is_counted_once_whatever_the_mesh() {
    let s = Sizes { b: 2, sq: 33, sk: 33, h: 6, g: 3, d: 8, dv: 4 };
    let bench = Bench::new(&s.tensors());
    let pairs = 2 * 33 * 34 / 2;
    for mesh in ["--ring 1", "--ring 3", "--ulysses 4", "--ring 2 --ulysses 3", "--ring 2 --strategy all-gather"] {
        let report = report(&bench, &format!("--mask causal {mesh}"));
        assert_eq!(column(&report, "flops_forward").iter().sum::<u64>(), pairs * 6 * 2 * 12, "{mesh}");
        assert_eq!(column(&report, "tokens").iter().sum::<u64>(), 66, "{mesh}");
        assert!(report["seconds_backward"].is_null());
        assert_eq!(column(&report, "bytes_sent_backward").iter().sum::<u64>(), 0);
        assert_eq!(report["run"]["layout"], "zigzag");
    }
}

#[test]
fn short_types_travel_as_they_are_stored() {
    let s = Sizes { b: 1, sq: 40, sk: 40, h: 4, g: 2, d: 8, dv: 8 };
    let short: Vec<(&str, Tensor)> =
        s.tensors().into_iter().map(|(name, t)| (name, Tensor::bf16(&t.shape, &t.values()))).collect();
    let (long, short) = (Bench::new(&s.tensors()), Bench::new(&short));
    let flags = "--ring 4 --mask full";
    let bytes = |bench: &Bench| column(&report(bench, flags), "bytes_sent_forward");
    let halved: Vec<u64> = bytes(&long).iter().map(|bytes| bytes / 2).collect();
    assert_eq!(bytes(&short), halved);
}
