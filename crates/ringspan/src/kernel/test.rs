//! Tests of the buffers that CPU kernels keep between calls, and of messages whose type differs from the tensor's.

use super::*;
use crate::comm::Buffer;

/// Elements of any values: the sizes of buffers do not depend on them.
fn ones(len: usize) -> Vec<f32> {
    vec![1.0; len]
}

#[test]
fn a_call_holds_no_more_than_it_says() {
    let (heads, dim, v_dim) = (4, 24, 40);
    for (queries, keys, kv_heads) in
        [(100, 300, 1), (500, 100, 4), (1, 3000, 2), (1, 3000, 4), (4300, 50, 2), (2, 30_000, 4)]
    {
        let map = HeadMap::grouped(heads, kv_heads).expect("they divide");
        let band = Band { lo: i64::MIN, hi: i64::MAX };
        let tiles = [Tile { q: 0..queries, k: 0..keys, band, position: TilePosition::START }];
        let (q, k, v) = (ones(queries * heads * dim), ones(keys * kv_heads * dim), ones(keys * kv_heads * v_dim));
        for bias_heads in [0, 1, 4] {
            let bias = ones(queries * bias_heads * keys);
            let score = Score::new(0.3);
            let inputs = Inputs {
                q: View::new(&q, queries, heads, dim).expect("its size"),
                k: View::new(&k, keys, kv_heads, dim).expect("its size"),
                v: View::new(&v, keys, kv_heads, v_dim).expect("its size"),
                heads: &map,
                score: &score,
                bias: View::new(&bias, queries, bias_heads, keys).filter(|_| bias_heads > 0),
            };
            for isa in Isa::available() {
                for threads in 1..=3 {
                    let kernel = || Kernel::with_isa(threads, isa).expect("available");
                    let (forward, both) = (kernel(), kernel());
                    let mut partial = OnlineSoftmax::new(queries, heads, v_dim);
                    forward.forward(&inputs, &tiles, &mut partial).expect("no failure");
                    forward_and_backward(&both, &inputs, &tiles);
                    let mut said = forward.forward_workspace(&inputs, &tiles);
                    assert!(0 < forward.held() && forward.held() <= said, "{queries}: {} of {said}", forward.held());
                    if queries == 1 {
                        let decode = kernel();
                        decode.decode(&inputs, &tiles, &mut OnlineSoftmax::new(1, heads, v_dim)).expect("no failure");
                        let of_decode = decode.decode_workspace(&inputs, &tiles);
                        assert!(0 < decode.held() && decode.held() <= of_decode, "{} of {of_decode}", decode.held());
                        said += of_decode;
                    }
                    let said = said + both.backward_workspace(&inputs, &tiles);
                    // A larger buffer replaces one that is too small, so with few queries both passes may hold less.
                    let least = if queries <= 2 { 1 } else { forward.held() + 1 };
                    assert!((least..=said).contains(&both.held()), "{queries}: {} of {said}", both.held());
                }
            }
        }
    }
}

/// With fewer visible keys than a tile has, heads are divided otherwise, and a range may then have more of them.
#[test]
fn a_decoding_step_of_unequal_groups_holds_no_more_than_it_says() {
    let (dim, keys) = (24, 1500);
    let map = HeadMap::new([vec![0, 1], vec![2; 8], vec![3; 8], vec![4, 5]].concat(), 6).expect("in order");
    let (q, k) = (ones(map.heads() * dim), ones(keys * 6 * dim));
    for seen in [1, 128, 129, 300, 700, 1500] {
        let tiles = [Tile { q: 0..1, k: 0..keys, band: Band { lo: 1 - seen, hi: 0 }, position: TilePosition::START }];
        let score = Score::new(0.3);
        let view = View::new(&k, keys, 6, dim).expect("its size");
        let q = View::new(&q, 1, map.heads(), dim).expect("its size");
        let inputs = Inputs { q, k: view, v: view, heads: &map, score: &score, bias: None };
        for threads in 1..=3 {
            let kernel = Kernel::new(threads);
            kernel.decode(&inputs, &tiles, &mut OnlineSoftmax::new(1, map.heads(), dim)).expect("no failure");
            let said = kernel.decode_workspace(&inputs, &tiles);
            assert!(kernel.held() <= said, "{seen} keys, {threads} threads: {} of {said}", kernel.held());
        }
    }
}

/// Both passes, and for a single query a step of decoding between them.
fn forward_and_backward(kernel: &Kernel, inputs: &Inputs, tiles: &[Tile]) {
    let Inputs { q, k, v, bias, .. } = inputs;
    let mut partial = OnlineSoftmax::new(q.tokens, q.heads, v.dim);
    kernel.forward(inputs, tiles, &mut partial).expect("no failure");
    if q.tokens == 1 {
        kernel.decode(inputs, tiles, &mut OnlineSoftmax::new(1, q.heads, v.dim)).expect("no failure");
    }
    let (out, statistics) = partial.finish(q.tokens, q.heads, v.dim, None);
    let out = View::new(&out, q.tokens, q.heads, v.dim).expect("its size");
    let delta = kernel.delta(out, out).expect("no failure");
    let of = |view: &View| ones(view.tokens * view.heads * view.dim);
    let (mut dq, mut dk, mut dv) = (of(q), of(k), of(v));
    let (mut d_table, mut d_bias) = (Vec::new(), bias.as_ref().map_or_else(Vec::new, of));
    let mut sums = Sums {
        dq: (&mut dq).into(),
        dk: (&mut dk).into(),
        dv: (&mut dv).into(),
        d_table: (&mut d_table).into(),
        d_bias: (&mut d_bias).into(),
    };
    let saved = Saved { statistics: statistics.data(), delta: Data::F32(&delta), d_out: out };
    kernel.backward(inputs, tiles, &saved, &mut sums).expect("no failure");
}

#[test]
fn a_rank_without_rows_adds_nothing() {
    let kernel = Kernel::new(1);
    let mut sum = kernel.zeros(0).expect("zeros");
    kernel.add_all(sum.all_mut(), Data::F32(&[])).expect("added");
    let target = RowTarget { rows: std::slice::from_ref(&(0..0)), offset: 0, stride: 8, width: 4 };
    kernel.add(sum.all_mut(), &target, Data::F32(&[])).expect("added");
    assert!(kernel.to_host(sum).expect("copied").is_empty());
}

#[test]
fn numbers_of_another_type_are_no_tensor() {
    assert!(read(&Buffer::U64(vec![1]), DType::F32).is_none());
}
