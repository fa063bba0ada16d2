//! Tests of contexts in models of others: sharding, attention and gradients against candle's operations on whole
//! sequences.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::softmax;
use ringspan::attention::Wire;
use ringspan::schedule::{Machine, StrategyChoice};
use ringspan::{Documents, LayoutKind, Mask, Rank, Score, StrategyKind, World};
use ringspan_candle::{AttentionInputs, Context, ContextBuilder, QkvFormat};
use std::collections::HashMap;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

/// Numbers that look random and are equal on every rank.
fn values(dims: &[usize], seed: u64) -> Tensor {
    let count: usize = dims.iter().product();
    let number = |i: u64| {
        let mixed = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed.wrapping_mul(0xD1B5_4A32_D192_ED03));
        ((mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    Tensor::from_vec((0..count as u64).map(number).collect::<Vec<_>>(), dims, &Device::Cpu).expect("a tensor")
}

fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.to_dtype(DType::F64).expect("f64"), b.to_dtype(DType::F64).expect("f64"));
    let norm =
        |x: &Tensor| x.sqr().and_then(|x| x.sum_all()).and_then(|x| x.to_scalar::<f64>()).expect("a norm").sqrt();
    norm(&(&a - &b).expect("equal shapes")) / norm(&b).max(1e-12)
}

/// Attention by candle's operations: `[B, S, H, D]`; `hidden` is `[S, Sk]` with 1 where a query does not see a key.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, hidden: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let heads = |x: &Tensor| -> Result<Tensor> {
        let (b, s, g, d) = x.dims4()?;
        x.unsqueeze(3)?.broadcast_as((b, s, g, HEADS / g, d))?.reshape((b, s, HEADS, d))?.transpose(1, 2)?.contiguous()
    };
    let (q, k, v) = (heads(q)?, heads(k)?, heads(v)?);
    let mut scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? / (DIM as f64).sqrt())?;
    if let Some(bias) = bias {
        scores = scores.broadcast_add(&bias.transpose(1, 2)?)?;
    }
    let scores = scores.broadcast_add(&(hidden.to_dtype(DType::F32)? * -1e30)?)?;
    softmax(&scores, D::Minus1)?.matmul(&v)?.transpose(1, 2)?.contiguous()
}

fn hidden(queries: usize, keys: usize, sees: impl Fn(usize, usize) -> bool) -> Tensor {
    let hides = |i: usize| (0..keys).map(move |j| i * keys + j).collect::<Vec<_>>();
    let marks = (0..queries).flat_map(hides).map(|at| u8::from(!sees(at / keys, at % keys))).collect::<Vec<_>>();
    Tensor::from_vec(marks, (queries, keys), &Device::Cpu).expect("a mask")
}

/// The whole tensors of one case: queries, keys, values and the gradient of the output.
struct Case {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
}

impl Case {
    fn new(batch: usize, queries: usize, keys: usize) -> Self {
        Self {
            q: values(&[batch, queries, HEADS, DIM], 1),
            k: values(&[batch, keys, KV_HEADS, DIM], 2),
            v: values(&[batch, keys, KV_HEADS, DIM], 3),
            d_out: values(&[batch, queries, HEADS, DIM], 4),
        }
    }

    /// Output and gradients of q, k and v by candle's operations.
    fn expected(&self, hidden: &Tensor) -> Vec<Tensor> {
        let vars = [&self.q, &self.k, &self.v].map(|x| Var::from_tensor(x).expect("a variable"));
        let out = plain(&vars[0], &vars[1], &vars[2], hidden, None).expect("attention");
        let gradients = (&out * &self.d_out).and_then(|x| x.sum_all()).and_then(|x| x.backward()).expect("gradients");
        let gradient = |var: &Var| gradients.get(var.as_tensor()).expect("a gradient").clone();
        [out.detach()].into_iter().chain(vars.iter().map(gradient)).collect()
    }

    /// The same on ranks, where each has its tokens only; the results of rank 0, whole.
    fn on_ranks(&self, ranks: usize, build: impl Fn(ContextBuilder) -> ContextBuilder + Sync) -> Vec<Tensor> {
        let mut world = World::threads(ranks).expect("threads");
        let mut results =
            world.run(|rank| self.on_rank(rank, &build)).unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
        results.swap_remove(0)
    }

    fn on_rank(
        &self,
        rank: &Rank,
        build: &(impl Fn(ContextBuilder) -> ContextBuilder + Sync),
    ) -> std::result::Result<Vec<Tensor>, Failure> {
        let context = build(Context::builder(rank)).build()?;
        let bhsd = context.qkv_format() == QkvFormat::Bhsd;
        let turned = |x: Tensor| if bhsd { x.transpose(1, 2)?.contiguous() } else { Ok(x) };
        let q = Var::from_tensor(&turned(context.shard(&self.q)?)?)?;
        let k = Var::from_tensor(&turned(context.shard_keys(&self.k)?)?)?;
        let v = Var::from_tensor(&turned(context.shard_keys(&self.v)?)?)?;
        let out = context.attention(&q, &k, &v)?;
        let gradients = (&out * turned(context.shard(&self.d_out)?)?)?.sum_all()?.backward()?;
        let gradient = |var: &Var| gradients.get(var.as_tensor()).expect("a gradient").clone();
        Ok(vec![
            context.unshard(&turned(out.detach())?)?,
            context.unshard(&turned(gradient(&q))?)?,
            context.unshard_keys(&turned(gradient(&k))?)?,
            context.unshard_keys(&turned(gradient(&v))?)?,
        ])
    }
}

fn assert_close(actual: &[Tensor], expected: &[Tensor], most: f64, case: &str) {
    for ((actual, expected), name) in actual.iter().zip(expected).zip(["out", "dq", "dk", "dv", "d_bias"]) {
        assert_eq!(actual.dims(), expected.dims(), "{case}: {name}");
        let distance = distance(actual, expected);
        assert!(distance < most, "{case}: {name} is {distance} away");
    }
}

#[test]
fn attention_and_gradients_of_any_mesh_and_strategy_are_those_of_whole_sequences() {
    let case = Case::new(2, 37, 37);
    let expected = case.expected(&hidden(37, 37, |i, j| j <= i));
    let causal = |builder: ContextBuilder| builder.batch(2, 37).mask(Mask::causal());
    for ranks in 1..=4 {
        assert_close(&case.on_ranks(ranks, causal), &expected, 1e-5, &format!("{ranks} ranks"));
    }
    for strategy in StrategyKind::ALL.map(StrategyChoice::from).into_iter().chain([StrategyChoice::Auto]) {
        let on_ranks = case.on_ranks(3, |builder| causal(builder).strategy(strategy.clone()));
        assert_close(&on_ranks, &expected, 1e-5, &strategy.to_string());
    }
    for kind in ["contiguous", "striped:1", "per-document-zigzag", "balanced:3"] {
        let kind: LayoutKind = kind.parse().expect("a layout");
        assert_close(&case.on_ranks(3, |builder| causal(builder).layout(kind)), &expected, 1e-5, &kind.to_string());
    }
    let ulysses = |builder: ContextBuilder| causal(builder).grid((2, 2)).head_chunks(2).qkv_format(QkvFormat::Bhsd);
    assert_close(&case.on_ranks(4, ulysses), &expected, 1e-5, "2 x 2 ranks, [B, H, S, D]");
    let rounded = case.on_ranks(3, |builder| causal(builder).wire(Wire::Bf16));
    assert_close(&rounded, &expected, 2e-2, "bf16 between ranks");
    assert!(distance(&rounded[0], &expected[0]) > 1e-5, "messages in bf16 are rounded");
}

#[test]
fn queries_attend_to_other_sequences() {
    let case = Case::new(2, 5, 23);
    let expected = case.expected(&hidden(5, 23, |_, _| true));
    for ranks in [1, 2, 3] {
        let on_ranks = case.on_ranks(ranks, |builder| builder.batch(2, 5).key_documents(Documents::batch(2, 23)));
        assert_close(&on_ranks, &expected, 1e-5, &format!("{ranks} ranks"));
    }
}

#[test]
fn rows_with_padding_are_one_row_of_tokens_on_each_rank() {
    let lengths = [11, 4];
    let (q, k, v) =
        (values(&[2, 11, HEADS, DIM], 1), values(&[2, 11, KV_HEADS, DIM], 2), values(&[2, 11, KV_HEADS, DIM], 3));
    let whole = World::threads(3).expect("threads").run(|rank| {
        let documents = Documents::padded(&lengths, 11)?;
        let context = Context::builder(rank).documents(documents).mask(Mask::causal()).build()?;
        assert_eq!(context.global_tokens(), 15);
        let (q, k, v) = (context.shard(&q)?, context.shard(&k)?, context.shard(&v)?);
        assert_eq!(context.position_ids(&Device::Cpu)?.dims(), [1, q.dim(1)?]);
        Ok::<_, Failure>(context.unshard(&context.attention(&q, &k, &v)?)?)
    });
    let whole = whole.expect("no failure").swap_remove(0);
    for (row, length) in lengths.into_iter().enumerate() {
        let of = |x: &Tensor| x.narrow(0, row, 1).and_then(|x| x.narrow(1, 0, length)).expect("a row");
        let expected =
            plain(&of(&q), &of(&k), &of(&v), &hidden(length, length, |i, j| j <= i), None).expect("attention");
        assert!(distance(&of(&whole), &expected) < 1e-5, "row {row}");
    }
    let padding = whole.narrow(0, 1, 1).and_then(|x| x.narrow(1, 4, 7)).expect("padding");
    assert_eq!(padding.abs().and_then(|x| x.sum_all()).and_then(|x| x.to_scalar::<f32>()).expect("a sum"), 0.0);
}

#[test]
fn a_bias_and_its_gradient_are_those_of_whole_sequences() {
    let (case, bias) = (Case::new(2, 13, 13), values(&[2, 13, HEADS, 13], 9));
    let sees = |i, j| j <= i;
    let expected = {
        let vars = [&case.q, &case.k, &case.v, &bias].map(|x| Var::from_tensor(x).expect("a variable"));
        let out = plain(&vars[0], &vars[1], &vars[2], &hidden(13, 13, sees), Some(&vars[3])).expect("attention");
        let gradients = (&out * &case.d_out).and_then(|x| x.sum_all()).and_then(|x| x.backward()).expect("gradients");
        [out.detach(), gradients.get(&vars[3]).expect("a gradient").clone()]
    };
    for (ranks, grid) in [(1, (1, 1)), (3, (3, 1)), (4, (2, 2))] {
        let whole = World::threads(ranks).expect("threads").run(|rank| {
            let context = Context::builder(rank).batch(2, 13).grid(grid).build()?;
            let (q, k, v) = (context.shard(&case.q)?, context.shard(&case.k)?, context.shard(&case.v)?);
            let bias = Var::from_tensor(&context.shard(&bias)?)?;
            let inputs = AttentionInputs { bias: Some(&bias), ..AttentionInputs::new(&q, &k, &v) };
            let score = Score::new(1.0 / (DIM as f32).sqrt());
            let out = context.attention_with(&inputs, &Mask::causal(), score)?;
            let gradients = (&out * context.shard(&case.d_out)?)?.sum_all()?.backward()?;
            let d_bias = gradients.get(bias.as_tensor()).expect("a gradient");
            Ok::<_, Failure>([context.unshard(&out)?, context.unshard(d_bias)?])
        });
        let whole = whole.expect("no failure").swap_remove(0);
        for (actual, expected) in whole.iter().zip(&expected) {
            assert!(distance(actual, expected) < 1e-5, "{ranks} ranks: {}", distance(actual, expected));
        }
    }
}

#[test]
fn sharding_and_putting_together_is_the_identity_and_so_is_its_gradient() {
    let x = values(&[3, 10, 5], 7);
    let whole = World::threads(4).expect("threads").run(|rank| {
        let context = Context::builder(rank).batch(3, 10).build()?;
        let var = Var::from_tensor(&x)?;
        let whole = context.unshard(&context.shard(&var)?)?;
        let gradient = whole.sqr()?.sum_all()?.backward()?.get(var.as_tensor()).expect("a gradient").clone();
        let tokens = context.shard(&x)?.dim(1)?;
        let positions = context.position_ids(&Device::Cpu)?.to_vec2::<u32>()?;
        assert!(positions.len() == 3 && positions.iter().all(|row| row.len() == tokens && *row == positions[0]));
        Ok::<_, Failure>((whole.detach(), gradient))
    });
    // Each rank's gradient covers its own tokens, and counts the losses of all four ranks.
    let whole = whole.expect("no failure");
    let sum = whole[1..].iter().fold(whole[0].1.clone(), |sum, (_, gradient)| (sum + gradient).expect("a sum"));
    assert!(whole.iter().all(|(whole, _)| distance(whole, &x) == 0.0));
    assert!(distance(&sum, &(&x * 8.0).expect("a product")) < 1e-6);
}

#[test]
fn parameters_start_equal_and_gradients_are_sums_over_ranks_whatever_the_order_of_names() {
    let gradients = World::threads(3).expect("threads").run(|rank| {
        let context = Context::builder(rank).batch(1, 6).build()?;
        let var = |name: &str, dims: &[usize]| -> Result<(String, Var)> {
            let own = (values(dims, name.len() as u64) + rank.index() as f64)?;
            Ok((name.to_owned(), Var::from_tensor(&own)?))
        };
        // Hash maps return their entries in an order that differs from rank to rank.
        let map: HashMap<String, Var> =
            [var("a", &[2, 3])?, var("unused", &[4])?, var("c.weight", &[5])?].into_iter().collect();
        let parameters: Vec<_> = map.clone().into_iter().collect();
        context.broadcast_parameters(&parameters)?;
        assert_eq!(distance(&map["c.weight"], &values(&[5], 8)), 0.0);
        let factor = (rank.index() + 1) as f64;
        let loss = (map["a"].sum_all()? * factor)?.add(&(map["c.weight"].sqr()?.sum_all()? * factor)?)?;
        let mut gradients = loss.backward()?;
        context.all_reduce_gradients(&mut gradients, &parameters)?;
        let of = |name: &str| gradients.get(map[name].as_tensor()).expect("a gradient").clone();
        Ok::<_, Failure>([of("a"), of("c.weight"), of("unused")])
    });
    for [a, c, unused] in gradients.expect("no failure") {
        assert!(a.flatten_all().and_then(|a| a.to_vec1::<f32>()).expect("values").iter().all(|x| *x == 6.0));
        assert!(distance(&c, &(values(&[5], 8) * 12.0).expect("a product")) < 1e-6);
        assert_eq!(unused.to_vec1::<f32>().expect("values"), [0.0; 4]);
    }
}

#[test]
fn ranks_with_other_parameters_are_named() {
    let error = World::threads(2).expect("threads").run(|rank| {
        let context = Context::builder(rank).batch(1, 6).build()?;
        let parameters = [("w".to_owned(), Var::from_tensor(&values(&[2 + rank.index()], 1))?)];
        context.broadcast_parameters(&parameters).map_err(Failure::from)
    });
    let error = error.expect_err("other shapes").to_string();
    assert!(["rank 1", "w", "[2]", "[3]"].iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn shapes_that_do_not_fit_are_refused_with_the_numbers() {
    let refused = |build: fn(ContextBuilder) -> ContextBuilder, parts: &[&str]| {
        let error = World::threads(2)
            .expect("threads")
            .run(|rank| build(Context::builder(rank)).build().map(drop).map_err(Failure::from));
        let error = error.expect_err("refused").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(|builder| builder, &["batch(rows, tokens)"]);
    refused(|builder| builder.batch(1, 8).grid((3, 1)), &["3", "2"]);
    refused(|builder| builder.batch(1, 8).head_chunks(2), &["head_chunks(2)"]);
    refused(|builder| builder.batch(1, 8).machine(Machine::cpu(1)), &["machine", "ring"]);
    refused(|builder| builder.batch(1, 8).key_documents(Documents::batch(2, 8)), &["1", "2"]);

    let error = World::threads(2).expect("threads").run(|rank| {
        let context = Context::builder(rank).batch(2, 8).build()?;
        assert!(context.shard(&values(&[2, 9, 3], 1)).expect_err("9 tokens").to_string().contains("[2, 8, ..]"));
        let q = values(&[2, 8, HEADS, DIM], 1);
        context.attention(&q, &q, &q).map(drop).map_err(Failure::from)
    });
    let error = error.expect_err("whole sequences").to_string();
    assert!(error.contains("[2, 4, heads, width]") && error.contains("[2, 8, 4, 8]"), "{error}");
}
