//! Tests which kernels are chosen, and that they compile.

use super::*;
use crate::nvrtc;
use half::{bf16, f16};
use ringspan::kernel::{Buckets, Data, Dropout, HeadMap, Score};
use std::collections::HashSet;

/// Maximum shared memory of a block on Hopper, in bytes.
const HOPPER: usize = 227 * 1024;

/// Even without a GPU this shows that the kernels compile for these architectures, and agree on the size of the params.
#[test]
fn kernels_compile_and_fit_for_every_architecture_since_ampere() {
    if !nvrtc::is_there() {
        println!("skipped: no NVRTC (libnvrtc.so) on this machine");
        return;
    }
    let heads = HeadMap::grouped(1, 1).expect("they divide");
    let plain = Score::new(1.0);
    let buckets = Buckets { table: vec![0.0; 32], count: 32, max_distance: 128, bidirectional: true };
    let all = Score {
        softcap: Some(20.0),
        relative: Some(RelativeBias::Buckets(buckets)),
        dropout: Some(Dropout { rate: 0.1, seed: 0, first_head: 0, first_query: 0 }),
        ..plain.clone()
    };
    let alibi = Score { relative: Some(RelativeBias::Alibi { slopes: vec![0.1] }), ..plain.clone() };
    let types = [DType::F32, DType::Bf16, DType::F16];
    let compile_all = |architecture: &str| {
        for (from, to) in types.into_iter().flat_map(|from| types.map(|to| (from, to))) {
            let binary =
                Options::memory(from, to).source().compile(architecture).unwrap_or_else(|error| panic!("{error}"));
            assert!(!binary.is_empty(), "{from:?} to {to:?}");
        }
        let widest = vec![bf16::ZERO; TENSOR_WIDTHS.forward];
        let view = View::stored(Data::Bf16(&widest), 1, 1, widest.len()).expect("its size");
        let inputs = Inputs { q: view, k: view, v: view, heads: &heads, score: &plain, bias: None };
        let options = Options::forward(&inputs, TensorCores::Warps, SHARED_MEMORY);
        assert!(options.kind == KernelKind::TensorForward && options.shared_bytes() <= SHARED_MEMORY, "{options:?}");
        options.source().compile(architecture).unwrap_or_else(|error| panic!("{error}"));
        for (dim, v_dim) in [(128, 128), (8, 24), (576, 512)] {
            let wide = 2 * dim.max(v_dim);
            let (f, b, h) = (vec![0.0; wide], vec![bf16::ZERO; wide], vec![f16::ZERO; wide]);
            for (score, data, biased) in
                [(&plain, Data::Bf16(&b), false), (&all, Data::F16(&h), true), (&alibi, Data::F32(&f), false)]
            {
                let view = |dim: usize| View::stored(data.slice(0..2 * dim), 2, 1, dim).expect("its size");
                let bias = biased.then(|| view(2));
                let inputs = Inputs { q: view(dim), k: view(dim), v: view(v_dim), heads: &heads, score, bias };
                let passes: HashSet<Options> = HashSet::from([
                    Options::forward(&inputs, TensorCores::None, SHARED_MEMORY),
                    Options::forward(&inputs, TensorCores::Warps, SHARED_MEMORY),
                    Options::backward(&inputs, &view(v_dim), TensorCores::None, SHARED_MEMORY),
                    Options::backward(&inputs, &view(v_dim), TensorCores::Warps, SHARED_MEMORY),
                    Options::delta(&view(v_dim), &view(v_dim)),
                ]);
                for options in passes {
                    assert!(options.shared_bytes() <= SHARED_MEMORY, "{options:?}");
                    let binary = options.source().compile(architecture).unwrap_or_else(|error| panic!("{error}"));
                    assert!(!binary.is_empty(), "{options:?}");
                }
            }
        }
    };
    // Architectures of A100, L40, H100 (also with its specific features), B200, and of workstation GPUs.
    std::thread::scope(|scope| {
        for architecture in ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"] {
            let compile_all = &compile_all;
            scope.spawn(move || compile_all(architecture));
        }
    });
}

#[test]
fn kernels_compile_for_tensor_cores_whose_sums_stay_in_registers() {
    if !nvrtc::is_there() {
        println!("skipped: no NVRTC (libnvrtc.so) on this machine");
        return;
    }
    let heads = HeadMap::grouped(1, 1).expect("they divide");
    let plain = Score::new(1.0);
    let capped = Score { softcap: Some(20.0), ..plain.clone() };
    let data = vec![bf16::ZERO; 100 * 256];
    for (dim, v_dim, score) in
        [(64, 64, &plain), (128, 128, &plain), (128, 64, &plain), (72, 24, &capped), (256, 256, &plain)]
    {
        let view = |dim: usize| View::stored(Data::Bf16(&data[..100 * dim]), 100, 1, dim).expect("its size");
        let inputs = Inputs { q: view(dim), k: view(dim), v: view(v_dim), heads: &heads, score, bias: None };
        let d_out = view(v_dim);
        let passes = [TensorCores::Warps, TensorCores::Warpgroups].map(|tensor| {
            [Options::forward(&inputs, tensor, HOPPER), Options::backward(&inputs, &d_out, tensor, HOPPER)]
        });
        let passes: HashSet<Options> = passes.into_iter().flatten().collect();
        let narrow = dim <= TENSOR_WIDTHS.backward.min(TENSOR_WIDTHS.by_warpgroups);
        assert_eq!(passes.len(), if narrow { 4 } else { 2 }, "{passes:?}");
        for options in passes.iter().filter(|options| options.kind != KernelKind::Backward) {
            assert!(options.shared_bytes() <= HOPPER, "{options:?}");
            let (binary, said) = options
                .source()
                .compile_with("sm_90", Some("--ptxas-options=-v"))
                .unwrap_or_else(|error| panic!("{error}"));
            assert!(!binary.is_empty(), "{options:?}");
            if said.is_empty() {
                println!("skipped: this compiler says nothing about registers");
                return;
            }
            let spills: Vec<&str> = said.lines().filter(|line| line.contains("bytes spill stores")).collect();
            let none = |line: &&str| line.contains(" 0 bytes spill stores, 0 bytes spill loads");
            assert!(!spills.is_empty() && spills.iter().all(none), "{options:?}: {said}");
            // Products that the compiler serializes are half as fast.
            assert!(!said.contains("serialized"), "{options:?}: {said}");
        }
    }
}

#[test]
fn tensor_cores_take_bf16_of_their_widths() {
    let heads = HeadMap::grouped(1, 1).expect("they divide");
    let (plain, flat) = (Score::new(1.0), Score::new(0.0));
    let buckets = Buckets { table: vec![0.0; 4], count: 4, max_distance: 8, bidirectional: false };
    let buckets = Score { relative: Some(RelativeBias::Buckets(buckets)), ..plain.clone() };
    let (f, b) = (vec![0.0; 512], vec![bf16::ZERO; 512]);
    let (floats, halves) = (Data::F32(&f), Data::Bf16(&b));
    let kinds = |data: Data, dim: usize, score: &Score, tensor: TensorCores| {
        let view = View::stored(data.slice(0..dim), 1, 1, dim).expect("its size");
        let inputs = Inputs { q: view, k: view, v: view, heads: &heads, score, bias: None };
        let forward = Options::forward(&inputs, tensor, SHARED_MEMORY).kind;
        (forward, Options::backward(&inputs, &view, tensor, SHARED_MEMORY).kind)
    };
    use KernelKind::{Backward, Forward, TensorBackward, TensorForward};
    // A single query is too few for a warpgroup.
    for tensor in [TensorCores::Warps, TensorCores::Warpgroups] {
        assert_eq!(kinds(halves, 128, &plain, tensor), (TensorForward, TensorBackward));
        assert_eq!(kinds(halves, 256, &plain, tensor), (TensorForward, Backward));
        assert_eq!(kinds(halves, 64, &buckets, tensor), (TensorForward, Backward));
        assert_eq!(kinds(halves, 264, &plain, tensor), (Forward, Backward));
        assert_eq!(kinds(halves, 128, &flat, tensor), (Forward, Backward));
        assert_eq!(kinds(floats, 128, &plain, tensor), (Forward, Backward));
    }
    assert_eq!(kinds(halves, 128, &plain, TensorCores::None), (Forward, Backward));
}

#[test]
fn warpgroups_take_many_queries_of_their_widths() {
    let heads = HeadMap::grouped(1, 1).expect("they divide");
    let (score, data) = (Score::new(1.0), vec![bf16::ZERO; 65 * 136]);
    let kinds = |capability: (i32, i32), queries: usize, dim: usize, shared: usize| {
        let view = |tokens| View::stored(Data::Bf16(&data[..tokens * dim]), tokens, 1, dim).expect("its size");
        let (q, k) = (view(queries), view(1));
        let inputs = Inputs { q, k, v: k, heads: &heads, score: &score, bias: None };
        let tensor = TensorCores::of(capability);
        (Options::forward(&inputs, tensor, shared).kind, Options::backward(&inputs, &q, tensor, shared).kind)
    };
    let (by_warpgroups, by_warps) = (
        (KernelKind::WarpgroupForward, KernelKind::WarpgroupBackward),
        (KernelKind::TensorForward, KernelKind::TensorBackward),
    );
    let all = 227 * 1024;
    assert_eq!(kinds((9, 0), 65, 128, all), by_warpgroups);
    assert_eq!(kinds((9, 0), 64, 128, all), by_warps);
    assert_eq!(kinds((9, 0), 65, 136, all), (KernelKind::TensorForward, KernelKind::Backward));
    assert_eq!(kinds((9, 0), 65, 128, SHARED_MEMORY), by_warps);
    assert_eq!(kinds((10, 0), 65, 128, all), by_warps);
    assert_eq!(kinds((8, 0), 65, 128, all), by_warps);
    assert_eq!(kinds((7, 5), 65, 128, all), (KernelKind::Forward, KernelKind::Backward));
}
