//! Checks of tensors in other storage types than f32, and with other strides.

use super::*;

pub fn tensors_of_any_type_are_computed_in_f32(kernels: &dyn Kernels) {
    for storage in [Storage::Bf16, Storage::F16] {
        for (queries, keys) in [(100, 150), (1, 1500)] {
            for dims in [(32, 32), (37, 21), (16, 80)] {
                let mut problem = Problem::new(queries, keys, (4, 2), dims, FULL);
                (problem.storage, problem.bias_heads) = (storage, 1);
                problem.check(kernels, &format!("{storage:?}, {queries} x {keys}, {dims:?}"));
            }
        }
    }
}

pub fn products_of_bf16_have_every_shape_and_term(kernels: &dyn Kernels) {
    for dims in [(64, 64), (128, 128), (33, 7), (24, 40), (256, 192), (576, 512)] {
        let mut problem = Problem::new(131, 290, (4, 2), dims, CAUSAL);
        problem.storage = Storage::Bf16;
        problem.check(kernels, &format!("{dims:?}"));
        if dims.0 % 64 == 0 && dims.0 < 200 {
            problem.d_out_storage = Storage::Bf16;
            problem.check(kernels, &format!("{dims:?}, all of it bf16"));
        }
    }
    // Tensor cores support widths that are multiples of 8.
    for dims in [(32, 20), (32, 24)] {
        for (what, change) in terms::CHANGES {
            let mut problem = Problem::new(130, 300, (6, 2), dims, FULL);
            problem.storage = Storage::Bf16;
            problem.blocks = vec![
                (110..300, vec![tile(5..100, 3..60, FULL), tile(5..130, 60..190, Band { lo: -90, hi: 70 })]),
                (0..110, vec![tile(0..77, 1..110, Band { lo: -20, hi: 60 }), tile(80..130, 40..95, CAUSAL)]),
            ];
            change(&mut problem);
            problem.check(kernels, &format!("{what}, {dims:?}"));
        }
    }
}

pub fn products_of_bf16_go_over_many_blocks(kernels: &dyn Kernels) {
    for dims in [(128, 128), (64, 64), (72, 24), (128, 40)] {
        for band in [FULL, Band { lo: -430, hi: 90 }] {
            let mut problem = Problem::new(200, 700, (2, 1), dims, band);
            problem.storage = Storage::Bf16;
            problem.check(kernels, &format!("{dims:?}, {band:?}"));
        }
    }
}

/// The bound is that of f32, which products of bf16 exceed.
pub fn bf16_that_only_travelled_is_multiplied_in_f32(kernels: &dyn Kernels) {
    for dims in [(64, 64), (128, 128), (33, 7)] {
        let mut problem = Problem::new(131, 290, (4, 2), dims, CAUSAL);
        (problem.storage, problem.computes_in_f32) = (Storage::Bf16, true);
        problem.check(kernels, &format!("{dims:?}"));
    }
}

pub fn rows_may_lie_anywhere(kernels: &dyn Kernels) {
    let problem = Problem::new(70, 90, (4, 2), (16, 24), CAUSAL);
    let values = problem.values();
    // The same tensors with heads first, and with a gap after each row.
    let heads_first = |x: &[f32], tokens: usize, heads: usize, dim: usize| -> Vec<f32> {
        let row = |at: usize| ((at % tokens) * heads + at / tokens) * dim;
        (0..tokens * heads).flat_map(|at| [&x[row(at)..][..dim], &[f32::NAN; 3]].concat()).collect()
    };
    let q = heads_first(&values.q, 70, 4, 16);
    let (k, v) = (heads_first(&values.k, 90, 2, 16), heads_first(&values.v, 90, 2, 24));
    let view = |data, tokens, heads, dim: usize| View {
        data: Data::F32(data),
        tokens,
        heads,
        dim,
        token_stride: dim + 3,
        head_stride: tokens * (dim + 3),
        rows: None,
        computes_in_f32: false,
    };
    let map = HeadMap::grouped(4, 2).expect("they divide");
    let inputs = Inputs {
        q: view(&q, 70, 4, 16),
        k: view(&k, 90, 2, 16),
        v: view(&v, 90, 2, 24),
        heads: &map,
        score: &problem.score,
        bias: None,
    };
    for kernel in kernels.all(&[2]) {
        let wanted = problem.computed(&kernel, &values);
        let mut partial = OnlineSoftmax::new(70, 4, 24);
        kernel.forward(&inputs, &problem.blocks[0].1, &mut partial).expect("no failure");
        let (out, statistics) = partial.finish(70, 4, 24, None);
        assert_eq!((out, statistics.lse()), (wanted.out, wanted.lse), "{kernel:?}");
    }
}
