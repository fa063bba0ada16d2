//! Tests of calls that a context refuses, with the numbers that a person needs to fix the call, and of unusual calls
//! that it accepts.

use crate::support::random;
use candle_core::{DType, Device, Tensor};
use ringspan::kernel::{Buckets, RelativeBias};
use ringspan::schedule::{Machine, StrategyChoice};
use ringspan::{Documents, LayoutKind, Mask, Rank, Score, StrategyKind, World};
use ringspan_candle::{AttentionInputs, Context, ContextBuilder};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Changes one setting of a context.
type Setting = fn(ContextBuilder) -> ContextBuilder;

/// Checks that a call on two ranks fails, and that its message has these parts.
#[track_caller]
fn refused(parts: &[&str], call: impl Fn(&Rank) -> Result<(), Failure> + Sync) {
    let error = World::threads(2).expect("threads").run(|rank| call(rank)).expect_err("refused").to_string();
    let missing = parts.iter().find(|part| !error.contains(*part));
    assert!(missing.is_none(), "'{}' is not in: {error}", missing.unwrap_or(&""));
}

/// Attention of 8 tokens with 4 heads of width 8 that share 2 key-value heads, with inputs that `change` may replace.
fn attend(
    rank: &Rank,
    build: impl Fn(ContextBuilder) -> ContextBuilder,
    score: Score,
    change: impl for<'a> Fn(AttentionInputs<'a>, &'a [Tensor]) -> AttentionInputs<'a>,
    others: &[Tensor],
) -> Result<(), Failure> {
    let context = build(Context::builder(rank).batch(1, 8)).build()?;
    let (q, k) = (random(&[1, 4, 4, 8], 1), random(&[1, 4, 2, 8], 2));
    let inputs = change(AttentionInputs::new(&q, &k, &k), others);
    context.attention_with(&inputs, &Mask::full(), score)?;
    Ok(())
}

fn same(builder: ContextBuilder) -> ContextBuilder {
    builder
}

fn buckets() -> Score {
    let buckets = Buckets { table: Vec::new(), count: 8, max_distance: 12, bidirectional: true };
    Score { relative: Some(RelativeBias::Buckets(buckets)), ..Score::new(0.5) }
}

#[test]
fn learned_terms_of_other_sizes_are_refused() {
    let sinks = [random(&[3], 1)];
    refused(&["3 elements", "4 query heads"], |rank| {
        attend(rank, same, Score::new(0.5), |inputs, x| AttentionInputs { sinks: Some(&x[0]), ..inputs }, &sinks)
    });
    let table = [random(&[8, 4], 1)];
    for (score, parts) in [(buckets(), ["[4, 8]", "[8, 4]"]), (Score::new(0.5), ["[8, 4]", "relative buckets"])] {
        refused(&parts, |rank| {
            attend(
                rank,
                same,
                score.clone(),
                |inputs, x| AttentionInputs { bucket_table: Some(&x[0]), ..inputs },
                &table,
            )
        });
    }
    let bias = [random(&[1, 4, 4, 9], 1)];
    refused(&["bias", "8", "9"], |rank| {
        attend(rank, same, Score::new(0.5), |inputs, x| AttentionInputs { bias: Some(&x[0]), ..inputs }, &bias)
    });
}

#[test]
fn heads_that_do_not_fit_are_refused() {
    let five = [random(&[1, 4, 5, 8], 1)];
    refused(&["5", "2"], |rank| {
        attend(rank, same, Score::new(0.5), |inputs, x| AttentionInputs { q: &x[0], ..inputs }, &five)
    });
    let one = [random(&[1, 4, 1, 8], 1)];
    refused(&["2", "1"], |rank| {
        attend(
            rank,
            |builder| builder.grid((1, 2)),
            Score::new(0.5),
            |_, x| AttentionInputs::new(&x[0], &x[0], &x[0]),
            &one,
        )
    });
    let wide = [random(&[1, 4, 2, 16], 1)];
    refused(&["16", "8"], |rank| {
        attend(rank, same, Score::new(0.5), |inputs, x| AttentionInputs { k: &x[0], ..inputs }, &wide)
    });
}

#[test]
fn tensors_of_other_ranks_types_and_lengths_are_refused() {
    let flat = [random(&[4, 4, 8], 1)];
    refused(&["[1, 4, heads, width]", "[4, 4, 8]"], |rank| {
        attend(rank, same, Score::new(0.5), |inputs, x| AttentionInputs { q: &x[0], ..inputs }, &flat)
    });
    let vector = [random(&[4], 1)];
    refused(&["[1, heads, 4, width]", "[4]"], |rank| {
        let format = |builder: ContextBuilder| builder.qkv_format(ringspan_candle::QkvFormat::Bhsd);
        attend(rank, format, Score::new(0.5), |inputs, x| AttentionInputs { q: &x[0], ..inputs }, &vector)
    });
    let wide = [random(&[1, 4, 4, 8], 1).to_dtype(DType::F64).expect("f64")];
    refused(&["F32 and BF16", "given F64"], |rank| {
        attend(rank, same, Score::new(0.5), |inputs, x| AttentionInputs { q: &x[0], ..inputs }, &wide)
    });
    let long = [random(&[1, 5, 2, 8], 1)];
    refused(&["values", "[1, 4, heads, width]", "[1, 5, 2, 8]"], |rank| {
        attend(rank, same, Score::new(0.5), |inputs, x| AttentionInputs { v: &x[0], ..inputs }, &long)
    });
}

#[test]
fn ranks_with_other_settings_are_named_with_the_setting() {
    let settings: [(&[&str], Setting); 5] = [
        (&["rank 1", "sequences", "1 documents of 8 tokens", "1 documents of 9 tokens"], |builder| builder.batch(1, 9)),
        (&["rank 1", "mask"], |builder| builder.mask(Mask::causal())),
        (&["rank 1", "strategy", "ring", "halo"], |builder| builder.strategy(StrategyKind::Halo)),
        (&["rank 1", "layout", "zigzag", "contiguous"], |builder| builder.layout(LayoutKind::Contiguous)),
        (&["rank 1", "wire", "Bf16"], |builder| builder.wire(ringspan::attention::Wire::Bf16)),
    ];
    for (parts, other) in settings {
        refused(parts, |rank| {
            let builder = Context::builder(rank).batch(1, 8);
            let builder = if rank.index() == 1 { other(builder) } else { builder };
            Ok(builder.build().map(drop)?)
        });
    }
}

#[test]
fn ranks_that_choose_a_strategy_for_other_machines_are_refused() {
    refused(&["rank 1", "machine", "Machine"], |rank| {
        let machine = Machine::cpu(1 + rank.index());
        let builder = Context::builder(rank).batch(1, 8).strategy(StrategyChoice::Auto).machine(machine);
        Ok(builder.build().map(drop)?)
    });
}

#[test]
fn keys_are_not_balanced() {
    let balanced = LayoutKind::Balanced(None);
    refused(&["key_layout(balanced)", "zigzag"], |rank| {
        Ok(Context::builder(rank).batch(1, 8).key_layout(balanced).build().map(drop)?)
    });
}

#[test]
fn masks_for_other_documents_are_refused() {
    refused(&["2", "3"], |rank| {
        let documents = Documents::packed(&[3, 4, 5]);
        Ok(Context::builder(rank).documents(documents).mask(Mask::causal().prefix_lm([1, 2])).build().map(drop)?)
    });
}

#[test]
fn keys_in_bf16_and_queries_in_f32_attend_to_each_other() {
    let (q, k) = (random(&[1, 8, 4, 8], 1), random(&[1, 8, 2, 8], 2));
    let out = |dtype: DType| {
        let mut all = World::threads(2).expect("threads").run(|rank| {
            let context = Context::builder(rank).batch(1, 8).mask(Mask::causal()).build()?;
            let (q, k) = (context.shard(&q)?, context.shard(&k.to_dtype(dtype)?)?);
            Ok::<_, Failure>(context.unshard(&context.attention(&q, &k, &k)?)?)
        });
        all.as_mut().expect("attention").swap_remove(0)
    };
    // The keys are exact in bf16, and the output has the type of the queries.
    let (wide, narrow) = (out(DType::F32), out(DType::BF16));
    assert_eq!(narrow.dtype(), DType::F32);
    let off = (wide - narrow).and_then(|x| x.abs()?.max_all()?.to_scalar::<f32>()).expect("a number");
    assert!(off < 1e-6, "{off}");
}

#[test]
fn a_context_of_the_keys_alone_holds_the_keys_of_cross_attention() {
    let source = random(&[2, 23, 3], 1);
    let held = World::threads(3).expect("threads").run(|rank| {
        let cross = Context::builder(rank).batch(2, 5).key_documents(Documents::batch(2, 23)).build()?;
        let encoder = Context::builder(rank).batch(2, 23).build()?;
        let (keys, encoded) = (cross.shard_keys(&source)?, encoder.shard(&source)?);
        let positions = [cross.key_position_ids(&Device::Cpu)?, encoder.position_ids(&Device::Cpu)?];
        let [of_keys, of_encoder] = positions.map(|ids| ids.to_vec2::<u32>());
        let equal = keys.dims() == encoded.dims() && of_keys? == of_encoder?;
        Ok::<_, Failure>(equal && (keys - encoded)?.abs()?.sum_all()?.to_scalar::<f32>()? == 0.0)
    });
    assert_eq!(held.expect("no failure"), [true; 3]);
}
