//! `ringspan attend` against dense attention in f64.

use crate::support::{Bench, Dense, Sizes, Tensor, compare, dense};

const SIZES: Sizes = Sizes { b: 2, sq: 37, sk: 37, h: 4, g: 2, d: 8, dv: 6 };
const TOLERANCE: f64 = 1e-5;

fn check(s: &Sizes, tensors: &[(&str, Tensor)], flags: &[String], sees: impl Fn(usize, usize, usize) -> bool) -> Dense {
    let expected = dense(s, tensors, 1.0 / (s.d as f64).sqrt(), sees);
    let bench = Bench::new(tensors);
    for flags in flags {
        let results = bench.results(&format!("{flags} --backward"));
        assert_eq!(results.len(), 5, "{flags}");
        assert_eq!(results["out"].shape, s.out());
        assert_eq!(results["lse"].shape, [s.b, s.h, s.sq]);
        compare(flags, &results, &expected, TOLERANCE);
    }
    expected
}

/// `flags` combined with the flags of several meshes.
fn on_meshes(flags: &str) -> Vec<String> {
    let meshes =
        ["", "--ring 3", "--ulysses 4", "--ring 2 --ulysses 2 --strategy all-gather", "--ring 5 --layout striped:3"];
    meshes.iter().map(|mesh| format!("{flags} {mesh}")).collect()
}

#[test]
fn full_attention_on_every_mesh() {
    check(&SIZES, &SIZES.tensors(), &on_meshes(""), |_, _, _| true);
}

#[test]
fn every_instruction_set_of_this_processor_gives_the_same_attention() {
    let isas = ringspan::kernel::Isa::available();
    let flags: Vec<String> = isas.iter().map(|isa| format!("--mask causal --ring 2 --isa {isa}")).collect();
    check(&SIZES, &SIZES.tensors(), &flags, |_, i, j| j <= i);
}

#[test]
fn causal_attention_on_every_mesh_and_layout() {
    let mut flags = on_meshes("--mask causal");
    for layout in ["contiguous", "zigzag", "striped:1", "striped:20", "per-document-zigzag"] {
        flags.push(format!("--mask causal --ring 4 --layout {layout}"));
    }
    check(&SIZES, &SIZES.tensors(), &flags, |_, i, j| j <= i);
}

#[test]
fn windows_count_to_both_sides() {
    check(&SIZES, &SIZES.tensors(), &on_meshes("--window 5,2"), |_, i, j| j + 5 >= i && j <= i + 2);
    check(&SIZES, &SIZES.tensors(), &on_meshes("--window -1,4"), |_, i, j| j <= i + 4);
    check(&SIZES, &SIZES.tensors(), &on_meshes("--mask causal --window 0,-1"), |_, i, j| j == i);
}

#[test]
fn causal_is_aligned_to_the_first_key_and_causal_bottom_right_to_the_last() {
    for (sq, sk) in [(9, 21), (21, 9)] {
        let s = Sizes { sq, sk, ..SIZES };
        check(&s, &s.tensors(), &on_meshes("--mask causal"), |_, i, j| j <= i);
        let end = move |_, i, j| j + sq <= i + sk;
        let rows = check(&s, &s.tensors(), &on_meshes("--mask causal-bottom-right"), end);
        // With more queries than keys, the first see nothing.
        assert_eq!(rows.lse[0].is_finite(), sk >= sq);
        let window = move |_, i: usize, j: usize| j + sq <= i + sk && j + sq + 3 >= i + sk;
        check(&s, &s.tensors(), &on_meshes("--mask causal-bottom-right --window 3,-1"), window);
        let both = move |_, i: usize, j: usize| j + sq <= i + sk + 2 && j + sq + 3 >= i + sk;
        check(&s, &s.tensors(), &on_meshes("--mask full-bottom-right --window 3,2"), both);
    }
}

#[test]
fn packed_documents_never_see_each_other_and_the_rest_is_padding() {
    let s = Sizes { b: 1, ..SIZES };
    let mut tensors = s.tensors();
    let ends = [0usize, 12, 12, 13, 30];
    tensors.push(("cu_seqlens", Tensor::i32(&[5], &[0, 12, 12, 13, 30])));
    let document = move |t: usize| if t < 30 { ends.iter().rposition(|end| *end <= t) } else { None };
    let same = move |_, i, j| document(i).is_some() && document(i) == document(j);
    let mut flags = on_meshes("");
    flags.push("--ring 3 --layout per-document-zigzag".into());
    let full = check(&s, &tensors, &flags, same);
    assert_eq!(full.lse[36], f64::NEG_INFINITY);
    check(&s, &tensors, &on_meshes("--mask causal --window 7,-1"), move |b, i, j| {
        same(b, i, j) && j <= i && j + 7 >= i
    });
}

#[test]
fn document_ids_may_have_gaps_and_positions_count_through_them() {
    let s = Sizes { sq: 12, sk: 12, ..SIZES };
    let ids = [1, 1, 2, 1, 0, 2, 2, 1, 0, 3, 3, 1, 0, 5, 5, 5, 5, 1, 1, 5, 1, 1, 0, 0];
    let mut tensors = s.tensors();
    tensors.push(("document_ids", Tensor::i32(&[2, 12], &ids)));
    let same = move |b: usize, i: usize, j: usize| ids[b * 12 + i] != 0 && ids[b * 12 + i] == ids[b * 12 + j];
    check(&s, &tensors, &on_meshes(""), same);
    check(&s, &tensors, &on_meshes("--mask causal"), move |b, i, j| same(b, i, j) && j <= i);
    check(&s, &tensors, &on_meshes("--window 3,1"), move |b, i, j| same(b, i, j) && j + 3 >= i && j <= i + 1);
    check(&s, &tensors, &on_meshes("--mask causal-bottom-right"), move |b, i, j| same(b, i, j) && j <= i);
}

#[test]
fn kv_lengths_hide_keys_but_no_query() {
    let s = Sizes { b: 3, sq: 11, sk: 17, ..SIZES };
    let lengths = [17usize, 5, 0];
    let mut tensors = s.tensors();
    tensors.push(("kv_lengths", Tensor::i32(&[3], &[17, 5, 0])));
    check(&s, &tensors, &on_meshes(""), move |b, _, j| j < lengths[b]);
    // The alignment counts all keys of the tensors, hidden ones included.
    let end = move |b: usize, i: usize, j: usize| j < lengths[b] && j + 11 <= i + 17;
    check(&s, &tensors, &on_meshes("--mask causal-bottom-right"), end);
}

#[test]
fn short_types_are_read_exactly_and_rounded_once() {
    let s = SIZES;
    let types =
        [(Tensor::bf16 as fn(&[usize], &[f32]) -> Tensor, 1.0 / 256.0, 8e-3), (Tensor::f16, 1.0 / 2048.0, 1e-3)];
    for (make, step, bound) in types {
        let tensors: Vec<(&str, Tensor)> =
            s.tensors().into_iter().map(|(name, t)| (name, make(&t.shape, &t.values()))).collect();
        let expected = dense(&s, &tensors, 1.0 / (s.d as f64).sqrt(), |_, i, j| j <= i);
        let bench = Bench::new(&tensors);
        for mesh in ["", "--ring 3", "--ring 2 --ulysses 2"] {
            let results = bench.results(&format!("--mask causal --backward {mesh}"));
            compare(mesh, &results, &expected, bound);
            // Rounding once leaves each element within half a step of its value; f32 work before it adds little. Products
            // of bf16 have weights in bf16 too, so there only the whole tensor is bounded.
            for (name, exact) in
                [("out", &expected.out), ("dq", &expected.dq), ("dk", &expected.dk), ("dv", &expected.dv)]
            {
                assert_eq!(results[name].dtype, tensors[0].1.dtype, "{name}");
                if tensors[0].1.dtype == safetensors::Dtype::BF16 {
                    continue;
                }
                for (a, b) in results[name].values().iter().zip(exact) {
                    let error = (f64::from(*a) - b).abs();
                    assert!(error <= b.abs() * step * 1.01 + 1e-5, "{mesh} {name}: {a} for {b}");
                }
            }
            assert_eq!(results["lse"].dtype, safetensors::Dtype::F32);
            assert!(crate::support::relative_l2(&results["lse"].values(), &expected.lse) <= TOLERANCE);
        }
    }
}

#[test]
fn scale_and_more_ranks_than_tokens() {
    let s = Sizes { b: 1, sq: 3, sk: 3, h: 8, g: 1, d: 4, dv: 4 };
    let tensors = s.tensors();
    let expected = dense(&s, &tensors, -0.75, |_, i, j| j <= i);
    let bench = Bench::new(&tensors);
    for mesh in ["--ring 7", "--ulysses 8", "--ring 2 --ulysses 8"] {
        compare(mesh, &bench.results(&format!("--mask causal --scale -0.75 --backward {mesh}")), &expected, TOLERANCE);
    }
}

#[test]
fn empty_sizes_give_empty_results() {
    for s in
        [Sizes { sq: 0, sk: 0, ..SIZES }, Sizes { b: 0, ..SIZES }, Sizes { sk: 0, ..SIZES }, Sizes { sq: 0, ..SIZES }]
    {
        let tensors = s.tensors();
        let expected = dense(&s, &tensors, 1.0, |_, _, _| true);
        let bench = Bench::new(&tensors);
        for flags in on_meshes("--backward --mask causal") {
            let results = bench.results(&flags);
            assert_eq!(results["out"].shape, s.out());
            assert_eq!(results["dk"].shape, s.k());
            compare(&flags, &results, &expected, TOLERANCE);
        }
    }
}

#[test]
fn the_same_command_gives_the_same_bits() {
    let bench = Bench::new(&SIZES.tensors());
    let flags = "--mask causal --ring 3 --ulysses 2 --backward --repeat 2";
    assert_eq!(bench.results(flags), bench.results(flags));
}
