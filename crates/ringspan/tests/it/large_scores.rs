//! Scores of any size, and masks written as large negative numbers, are as exact as a plain softmax in f32.
//!
//! The f64 reference gives the true values. They are compared with our attention and with plain softmax attention in f32,
//! in three passes over each row: our error may be at most twice the plain one, or, if that is small, as large as rounding.

use ringspan::attention::{self, Group, Inputs, Merge, Tokens, Wire, decode};
use ringspan::comm::threads;
use ringspan::kernel::{Isa, Kernel, RelativeBias, View};
use ringspan::mesh::Grid;
use ringspan::{Error, LayoutKind, Mask, Run, StrategyKind};
use ringspan_testing::mesh::{Answer, MeshSetup, Problem, random};

const LEN: usize = 44;

/// The answer of the plain softmax, with the quantities that limit our errors.
struct Plain {
    answer: Answer,
    /// Sums of the absolute values of the terms in each sum.
    sizes: Answer,
    /// Possible effect of rounded products on sums in which keys with huge scores share a weight. Few pairs of keys are
    /// so close, so the plain softmax may be exact by luck, which is not required of ours.
    doubts: Answer,
}

/// Plain softmax attention in f32; its gradients use the weights of the forward pass, without recomputing them.
fn plain(problem: &Problem, inputs: &ringspan_testing::mesh::Inputs) -> Plain {
    let Problem { queries, keys, heads, kv_heads, dim, v_dim, bias_heads, ref mask, ref score, .. } = *problem;
    let zeros = |len: usize| vec![0.0f32; len];
    let empty = || Answer {
        out: zeros(queries * heads * v_dim),
        dq: zeros(inputs.q.len()),
        dk: zeros(inputs.k.len()),
        dv: zeros(inputs.v.len()),
        d_bias: zeros(inputs.bias.len()),
        d_sinks: zeros(score.sinks.as_ref().map_or(0, Vec::len)),
        ..Answer::default()
    };
    let (mut answer, mut sizes, mut doubts) = (empty(), empty(), empty());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum));
    for (i, head) in (0..queries).flat_map(|i| (0..heads).map(move |head| (i, head))) {
        let (row, kv) = (i * heads + head, head * kv_heads / heads);
        let (q, d_out) = (&inputs.q[row * dim..][..dim], &inputs.d_out[row * v_dim..][..v_dim]);
        let seen: Vec<usize> = (0..keys).filter(|&j| mask.sees(0, i, j, queries, keys)).collect();
        let bias_at = |j: usize| (i * bias_heads + head.min(bias_heads.max(1) - 1)) * keys + j;
        let mut slopes = vec![1.0; seen.len()];
        let term = |(n, &j): (usize, &usize)| {
            let mut s = score.scale * dot(q, &inputs.k[(j * kv_heads + kv) * dim..][..dim]);
            if let Some(cap) = score.softcap {
                let t = (s / cap).tanh();
                (s, slopes[n]) = (cap * t, 1.0 - t * t);
            }
            s += score.relative(head, mask.distance(i, j, queries, keys));
            if bias_heads > 0 { s + inputs.bias[bias_at(j)] } else { s }
        };
        let mut p: Vec<f32> = seen.iter().enumerate().map(term).collect();
        let sink = score.sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        let max = p.iter().fold(sink, |max, s| max.max(*s));
        if max == f32::NEG_INFINITY {
            continue;
        }
        p.iter_mut().for_each(|s| *s = (*s - max).exp());
        let sum = p.iter().sum::<f32>() + (sink - max).exp();
        p.iter_mut().for_each(|p| *p /= sum);
        let kept = |j: usize| match score.dropout {
            Some(dropout) => f32::from(u8::from(dropout.keeps(head, i, j))) / (1.0 - dropout.rate),
            None => 1.0,
        };
        let dp: Vec<f32> =
            seen.iter().map(|&j| kept(j) * dot(d_out, &inputs.v[(j * kv_heads + kv) * v_dim..][..v_dim])).collect();
        let mean = dot(&p, &dp);
        if let (Some(d_sinks), Some(size)) = (answer.d_sinks.get_mut(head), sizes.d_sinks.get_mut(head)) {
            *d_sinks -= (sink - max).exp() / sum * mean;
            *size += (sink - max).exp() / sum * mean.abs();
        }
        for (n, &j) in seen.iter().enumerate() {
            let (p, key) = (p[n], j * kv_heads + kv);
            let term = p * (dp[n] - mean);
            let (ds, size) = (term * slopes[n] * score.scale, p * (dp[n].abs() + mean.abs()));
            let ds_size = size * score.scale.abs();
            // The error of a sum of D products is about this large; it does not affect a weight of 0 or 1.
            let products: Vec<f32> = q.iter().zip(&inputs.k[key * dim..]).map(|(q, k)| score.scale * q * k).collect();
            let wrong = f32::EPSILON * (dim as f32 * dot(&products, &products)).sqrt();
            let doubt = if wrong > 3e-3 { (1.0 - p) * wrong } else { 0.0 };
            for (c, d_out) in d_out[..v_dim].iter().enumerate() {
                let v = inputs.v[key * v_dim + c];
                answer.out[row * v_dim + c] += p * kept(j) * v;
                sizes.out[row * v_dim + c] += p * kept(j) * v.abs();
                doubts.out[row * v_dim + c] += doubt * p * kept(j) * v.abs();
                answer.dv[key * v_dim + c] += p * kept(j) * d_out;
                sizes.dv[key * v_dim + c] += p * kept(j) * d_out.abs();
                doubts.dv[key * v_dim + c] += doubt * p * kept(j) * d_out.abs();
            }
            for c in 0..dim {
                let (q, k) = (q[c], inputs.k[key * dim + c]);
                answer.dq[row * dim + c] += ds * k;
                sizes.dq[row * dim + c] += ds_size * k.abs();
                doubts.dq[row * dim + c] += doubt * ds_size * k.abs();
                answer.dk[key * dim + c] += ds * q;
                sizes.dk[key * dim + c] += ds_size * q.abs();
                doubts.dk[key * dim + c] += doubt * ds_size * q.abs();
            }
            if bias_heads > 0 {
                answer.d_bias[bias_at(j)] += term;
                sizes.d_bias[bias_at(j)] += size;
                doubts.d_bias[bias_at(j)] += doubt * size;
            }
        }
    }
    Plain { answer, sizes, doubts }
}

fn tensors(answer: &Answer) -> [(&'static str, &[f32]); 6] {
    let Answer { out, dq, dk, dv, d_bias, d_sinks, .. } = answer;
    [("out", out), ("dq", dq), ("dk", dk), ("dv", dv), ("d_bias", d_bias), ("d_sinks", d_sinks)]
}

/// Sums of squared errors and of the quantities that limit them, over several problems of one kind.
#[derive(Default, Clone, Copy)]
struct Errors {
    plain: f64,
    ours: f64,
    size: f64,
    doubt: f64,
}

impl Errors {
    /// Adds tensor `n` of [`tensors`].
    fn add(&mut self, truth: &Answer, plain: &Plain, ours: &Answer, n: usize) {
        let answers = [truth, &plain.answer, ours, &plain.sizes, &plain.doubts];
        let [truth, plain, ours, sizes, doubts] = answers.map(|answer| tensors(answer)[n].1);
        assert_eq!([truth.len(); 2], [plain.len(), ours.len()]);
        for (at, truth) in truth.iter().enumerate() {
            self.plain += (f64::from(plain[at]) - f64::from(*truth)).powi(2);
            self.ours += (f64::from(ours[at]) - f64::from(*truth)).powi(2);
            self.size += f64::from(sizes[at]).powi(2);
            self.doubt += f64::from(doubts[at]).powi(2);
        }
    }

    /// Checks that our error is at most twice the plain error plus `rounding` of the terms.
    fn check(&self, rounding: f64, what: &str) {
        let [plain, ours, size, doubt] = [self.plain, self.ours, self.size, self.doubt].map(f64::sqrt);
        // The smallest numbers of f32 are not a matter of rounding.
        let bound = 2.0 * plain + rounding * size + doubt + 1e-20;
        assert!(
            ours <= bound,
            "{what}: wrong by {ours:e}, the plain softmax by {plain:e}, of {size:e} with doubts of {doubt:e}"
        );
    }
}

const SEEDS: u64 = 3;

/// Relative rounding error of sums in f32, or of weights in bf16.
fn rounding(isa: Isa, stored: Wire) -> f64 {
    if stored == Wire::Bf16 && isa.multiplies_bf16() { 8e-3 } else { 5e-7 }
}

/// Every instruction set of this machine on one mesh, and the fastest of them on the other meshes.
fn meshes() -> Vec<(Isa, MeshSetup)> {
    let all = Isa::available();
    let one = all.iter().map(|isa| (*isa, MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, (2, 1))));
    let grids = [(1, 1), (3, 1), (1, 2), (2, 2)].map(Grid::from);
    let best = StrategyKind::ALL.into_iter().zip(grids.into_iter().cycle());
    let best = best.map(|(strategy, grid)| (all[0], MeshSetup::new(LayoutKind::Contiguous, strategy, grid)));
    let chunks = MeshSetup { head_chunks: 2, ..MeshSetup::new(LayoutKind::Striped(3), StrategyKind::PassQ, (2, 2)) };
    let one = one.chain(best).chain([(all[0], MeshSetup::new(LayoutKind::Contiguous, StrategyKind::PassQ, (3, 1)))]);
    one.chain([(all[0], chunks)]).collect()
}

fn check(problem: &Problem, stored: Wire, change: &dyn Fn(&mut ringspan_testing::mesh::Inputs)) {
    check_on(problem, stored, change, &meshes());
}

fn check_on(
    problem: &Problem,
    stored: Wire,
    change: &dyn Fn(&mut ringspan_testing::mesh::Inputs),
    meshes: &[(Isa, MeshSetup)],
) {
    let mut errors = vec![[Errors::default(); 6]; meshes.len()];
    for seed in 0..SEEDS {
        let mut inputs = problem.inputs_of(stored, 10 * seed);
        change(&mut inputs);
        let (truth, plain) = (problem.reference(&inputs), plain(problem, &inputs));
        for (errors, (isa, on)) in errors.iter_mut().zip(meshes) {
            let kernel = || Ok(Kernel::with_isa(1, *isa).expect("available"));
            let on = MeshSetup { stored, wire: stored, ..*on };
            let call: &ringspan_testing::mesh::RankProgram = &|group, schedule, local, d_out| {
                let forward = attention::forward(group, schedule, local)?;
                let gradients = attention::backward(group, schedule, local, &forward, d_out)?;
                Ok((forward, gradients, [0; 2]))
            };
            let got = problem.on_mesh_by(&inputs, on, &kernel, call).expect("runs");
            errors.iter_mut().enumerate().for_each(|(n, errors)| errors.add(&truth, &plain, &got, n));
        }
    }
    for (errors, (isa, on)) in errors.iter().zip(meshes) {
        for (errors, (name, _)) in errors.iter().zip(tensors(&Answer::default())) {
            errors.check(rounding(*isa, stored), &format!("{} {stored:?}, {isa:?}, {on:?}: {name}", problem.name));
        }
    }
}

/// Powers of 2 that give scores of about 1 to 1e9, and are exact in bf16.
const SIZES: [u32; 6] = [2, 6, 12, 19, 26, 32];

fn problem(mask: Mask) -> Problem {
    Problem::new(1, LEN, 4, 2, 16, mask)
}

fn grow(values: &mut [f32], power: u32) {
    values.iter_mut().for_each(|x| *x *= (1u64 << power) as f32);
}

#[test]
fn scores_of_any_size() {
    for stored in [Wire::F32, Wire::Bf16] {
        for power in SIZES {
            // The root of 16 is a power of 2, the root of 24 is not.
            for (mask, dim) in [(Mask::causal(), 16), (Mask::full(), 24)] {
                let problem = Problem::new(1, LEN, 4, 2, dim, mask);
                let problem = Problem { name: format!("2^{power} {}", problem.name), ..problem };
                check(&problem, stored, &|inputs| grow(&mut inputs.q, power));
            }
        }
    }
}

/// Every key occurs twice, also on other ranks: each gets half of the weight for scores of any size.
#[test]
fn keys_that_tie_share_the_weight() {
    for stored in [Wire::F32, Wire::Bf16] {
        for power in SIZES {
            let problem = Problem { name: format!("2^{power} ties"), ..problem(Mask::full()) };
            check(&problem, stored, &|inputs| {
                grow(&mut inputs.q, power);
                let half = inputs.k.len() / 2;
                inputs.k.copy_within(..half, half);
            });
        }
    }
}

#[test]
fn terms_of_any_size() {
    for power in SIZES {
        let size = (1u64 << power) as f32;
        let of = |what: &str| Problem { name: format!("2^{power} {what}"), ..problem(Mask::causal()) };
        let large = |inputs: &mut ringspan_testing::mesh::Inputs| grow(&mut inputs.q, power);
        let sinks = |problem: &Problem| Some(random(problem.heads, 7).iter().map(|x| x * size).collect());
        check(&of("sinks").with_score("", |problem, score| score.sinks = sinks(problem)), Wire::F32, &large);
        check(&of("off by one").with_score("", |_, score| *score = score.clone().off_by_one(4)), Wire::F32, &large);
        check(&of("softcap").with_score("", |_, score| score.softcap = Some(0.5 * size)), Wire::F32, &large);
        check(&of("dropout").with_dropout(), Wire::F32, &large);
        let slopes = |score: &mut ringspan::Score| {
            score.relative = Some(RelativeBias::Alibi { slopes: [0.1, 0.02, 1.0, 0.007].map(|x| x * size).to_vec() });
        };
        check(&of("alibi").with_score("", |_, score| slopes(score)), Wire::F32, &large);
        let table = |score: &mut ringspan::Score| match &mut score.relative {
            Some(RelativeBias::Buckets(buckets)) => grow(&mut buckets.table, power),
            _ => unreachable!("buckets were given"),
        };
        check(&of("buckets").with_buckets().with_score("", |_, score| table(score)), Wire::F32, &large);
        let scale = Problem::with_score(of("scale"), "", |_, score| score.scale *= size);
        check(&scale, Wire::F32, &|_| ());
        check(&scale, Wire::Bf16, &|_| ());
    }
}

/// Masks as other libraries write them: a number is added to whole rows, to some keys of a row, or to none.
#[test]
fn masks_that_are_large_negative_numbers() {
    for value in [-1e4, -65504.0, -1e6, -1e9, -1e30, f32::MIN, f32::NEG_INFINITY] {
        for (stored, heads) in [(Wire::F32, 1), (Wire::F32, 4), (Wire::Bf16, 1)] {
            for small in [true, false] {
                let problem = problem(Mask::causal()).with_bias(heads);
                let problem = Problem { name: format!("{value:e}, {heads} heads, {small}"), ..problem };
                check(&problem, stored, &|inputs| {
                    for (row, bias) in inputs.bias.chunks_exact_mut(LEN).enumerate() {
                        for (key, bias) in bias.iter_mut().enumerate() {
                            *bias *= f32::from(u8::from(small));
                            let masked = match row % 4 {
                                0 => true,
                                1 => key % 3 > 0,
                                2 => key > row / 2,
                                _ => false,
                            };
                            // Like other libraries, this adds the number to the existing bias.
                            *bias = if masked { *bias + value } else { *bias };
                        }
                    }
                });
            }
        }
    }
}

/// Masks with several numbers in one row: the smallest hides its keys from a query that sees others.
#[test]
fn masked_keys_keep_their_order() {
    let values = [f32::MIN, -3e38, -2.5e38, -2e38, -1e38, -1e30, f32::NEG_INFINITY];
    for first in 0..values.len() {
        let problem = Problem { name: format!("from {:e}", values[first]), ..problem(Mask::full()).with_bias(1) };
        check(&problem, Wire::F32, &|inputs| {
            for (at, bias) in inputs.bias.iter_mut().enumerate() {
                *bias = values[(first + at % 2 + at / LEN % 2).min(6)];
            }
        });
    }
}

/// A rank with one query computes its gradient from the same scores as its output.
#[test]
fn ranks_of_one_query() {
    for stored in [Wire::F32, Wire::Bf16] {
        for power in SIZES {
            let problem = Problem::cross(1, 3, 64, 4, 2, 64, Mask::full());
            let problem = Problem { name: format!("2^{power} one query"), ..problem };
            let on = |strategy, ranks| MeshSetup::new(LayoutKind::Contiguous, strategy, (ranks, 1));
            let mesh = |isa| {
                [(isa, on(StrategyKind::Ring, 3)), (isa, on(StrategyKind::PassQ, 3)), (isa, on(StrategyKind::Ring, 2))]
            };
            let meshes: Vec<_> = Isa::available().into_iter().flat_map(mesh).collect();
            check_on(&problem, stored, &|inputs| grow(&mut inputs.q, power), &meshes);
        }
    }
}

#[test]
fn decoding() {
    for power in SIZES {
        for queries in [1, 3] {
            let problem = Problem::cross(1, queries, 90, 4, 2, 16, Mask::causal_bottom_right()).with_bias(1);
            let mut errors = [Errors::default(); 2];
            for seed in 0..4 * SEEDS {
                let mut inputs = problem.inputs(10 * seed);
                grow(&mut inputs.q, power);
                inputs.bias.iter_mut().skip(1).step_by(2).for_each(|bias| *bias = f32::MIN);
                let truth = problem.reference(&inputs);
                let plain = plain(&problem, &inputs);
                for (ranks, merge, errors) in
                    [(1, Merge::AllGather), (3, Merge::Tree)].into_iter().zip(&mut errors).map(|((r, m), e)| (r, m, e))
                {
                    for out in decoded(&problem, &inputs, ranks, merge) {
                        errors.add(&truth, &plain, &Answer { out, ..Answer::default() }, 0);
                    }
                }
            }
            for (ranks, errors) in [1, 3].into_iter().zip(errors) {
                errors.check(5e-7, &format!("2^{power}, {queries} queries, {ranks} ranks"));
            }
        }
    }
}

fn decoded(problem: &Problem, inputs: &ringspan_testing::mesh::Inputs, ranks: usize, merge: Merge) -> Vec<Vec<f32>> {
    let Problem { queries, keys, heads, kv_heads, dim, v_dim, .. } = *problem;
    threads::run(ranks, threads::Options::default(), |comm| {
        let rank = comm.rank();
        let group = Group::new(comm, (ranks, 1), Kernel::new(1))?;
        let held = rank * keys / ranks..(rank + 1) * keys / ranks;
        let view = |data, tokens, heads, dim| View::new(data, tokens, heads, dim).expect("its size");
        let of = |all: &'_ [f32], width: usize| all[held.start * width..held.end * width].to_vec();
        let (k, v) = (of(&inputs.k, kv_heads * dim), of(&inputs.v, kv_heads * v_dim));
        let (k, v) = (view(&k, held.len(), kv_heads, dim), view(&v, held.len(), kv_heads, v_dim));
        let local = Inputs::new(view(&inputs.q, queries, heads, dim), k, v, &problem.score);
        let local = local.with_bias(view(&inputs.bias, queries, 1, keys));
        let query = [Run { document: 0, start: 0, len: queries, step: 1 }];
        let key = [Run { document: 0, start: held.start, len: held.len(), step: 1 }];
        let tokens = Tokens { queries: &query, keys: &key, seq_lens: (queries, keys) };
        Ok::<_, Error>(decode(&group, &problem.mask, &tokens, &local, merge)?.0)
    })
    .expect("decodes")
}
