//! Experts with quantized matrices equal their definition in f64, computed from the decoded numbers.

use crate::feed_forward::{compare, random};
use candle_core::{DType, Result, Tensor};
use ringspan_candle::activation::ClampedSwiglu;
use ringspan_candle::experts::{ExpertStack, SavedExperts, StackedExpert, mixed_saving};
use ringspan_candle::quantized::{Format, QuantizedMatrix, QuantizedStack};
use ringspan_candle::{Adapter, Expert, GatedExpert, Routing, Weight};
use std::sync::Arc;

const FORMATS: [Format; 4] = [Format::BF16, Format::F16, Format::Q8_0, Format::Mxfp4];
/// Number of tokens, number of experts, hidden size, and width of an expert.
const SIZES: [usize; 4] = [13, 4, 64, 32];
const TOP: usize = 2;

/// The experts of the tokens, two for each: expert 0 has more tokens than are multiplied block by block, expert 2 has none.
fn chosen() -> Vec<u32> {
    (0..SIZES[0] as u32).flat_map(|token| [0, if token % 3 == 0 { 1 } else { 3 }]).collect()
}

/// A pseudo-random matrix in a format, with small scales, exponents or values.
fn matrix(format: Format, rows: usize, columns: usize, seed: usize) -> QuantizedMatrix {
    let count = format.bytes(rows, columns).expect("whole blocks");
    let drawn = |i: usize| ((i * 7919 + seed * 104_729) as f64 * 0.377).sin();
    let bytes = (0..count).map(|i| match (format, i % format.block_bytes()) {
        (Format::BF16 | Format::F16, byte) => {
            let value = drawn(i / 2) as f32 * 0.3;
            let two = if format == Format::BF16 {
                half::bf16::from_f32(value).to_le_bytes()
            } else {
                half::f16::from_f32(value).to_le_bytes()
            };
            two[byte]
        }
        (Format::Q8_0, byte @ 0..2) => half::f16::from_f32(0.004).to_le_bytes()[byte],
        (Format::Mxfp4, 0) => 123 + (i % 3) as u8,
        _ => (drawn(i) * 128.0) as i8 as u8,
    });
    QuantizedMatrix::new(format, rows, columns, bytes.collect::<Vec<u8>>().into()).expect("as many bytes")
}

fn wide(tensor: Result<Tensor>) -> Result<Tensor> {
    tensor?.to_dtype(DType::F64)
}

/// The weighted sum of the outputs of each token's experts.
fn mixture(x: &[Tensor], output: impl Fn(&Tensor, usize) -> Result<Tensor>) -> Result<Tensor> {
    let mut rows = Vec::new();
    for (token, chosen) in chosen().chunks(TOP).enumerate() {
        let row = x[0].narrow(0, token, 1)?;
        let mut sum = row.zeros_like()?;
        for (slot, expert) in chosen.iter().enumerate() {
            let weight = x[1].narrow(0, token, 1)?.narrow(1, slot, 1)?;
            sum = (sum + output(&row, *expert as usize)?.broadcast_mul(&weight)?)?;
        }
        rows.push(sum);
    }
    Tensor::cat(&rows, 0)
}

/// The tokens and their routing weights, followed by other inputs.
fn inputs(others: impl IntoIterator<Item = Tensor>) -> Vec<Tensor> {
    let [tokens, _, hidden, _] = SIZES;
    [random(&[tokens, hidden], 1), random(&[tokens, TOP], 2)].into_iter().chain(others).collect()
}

/// Compares the mixture computed once, and computed twice as in a recomputed layer whose products are stored.
fn compare_both(
    inputs: &[Tensor],
    mix: impl Fn(&[Tensor], &mut SavedExperts) -> Result<Tensor>,
    plain: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    compare(inputs, |x| mix(x, &mut SavedExperts::default()), &plain);
    let twice = |x: &[Tensor]| {
        let mut memory = SavedExperts::default();
        let once = mix(x, &mut memory)?.detach();
        once + mix(x, &mut memory)?
    };
    compare(inputs, twice, &plain);
}

#[test]
fn experts_with_matrices_of_their_own_learn_adapters_beside_what_is_stored() {
    let [_, experts, hidden, width] = SIZES;
    let rank = 3;
    for format in FORMATS {
        // Gate and up of one expert are f32, since a file may mix formats.
        let weights: Vec<[Weight; 3]> = (0..experts)
            .map(|expert| {
                let [gate, up] = [0, 1].map(|which| matrix(format, width, hidden, 10 * expert + which));
                let down = matrix(format, hidden, width, 10 * expert + 2).into();
                match expert {
                    3 => [gate.dequantize().expect("f32").into(), up.dequantize().expect("f32").into(), down],
                    _ => [gate.into(), up.into(), down],
                }
            })
            .collect();
        let sizes = [(hidden, width), (hidden, width), (width, hidden)];
        let adapters = (0..experts)
            .flat_map(|_| sizes)
            .enumerate()
            .flat_map(|(at, (from, to))| [random(&[rank, from], 30 + at), random(&[to, rank], 60 + at)]);
        let beside = |x: &[Tensor], expert: usize, which: usize| {
            let at = 2 + 2 * (3 * expert + which);
            let (a, b) = (x[at].clone(), x[at + 1].clone());
            // One matrix of each expert has no adapter.
            (which != expert % 3).then_some(Adapter { a, b, scale: 0.2, dropout: 0.0, layer: 0, first: 0 })
        };
        let plain = |x: &[Tensor]| {
            mixture(x, |row, expert| {
                let through = |row: &Tensor, which: usize| -> Result<Tensor> {
                    let y = row.matmul(&wide(weights[expert][which].to_tensor())?.t()?)?;
                    match beside(x, expert, which) {
                        Some(adapter) => y + (row.matmul(&adapter.a.t()?)?.matmul(&adapter.b.t()?)? * adapter.scale)?,
                        None => Ok(y),
                    }
                };
                let gate = through(row, 0)?;
                through(&((&gate / (gate.neg()?.exp()? + 1.0)?)? * through(row, 1)?)?, 2)
            })
        };
        let mix = |x: &[Tensor], memory: &mut SavedExperts| {
            let routing = Routing { chosen: chosen(), weights: x[1].clone(), adapter_rows: None };
            let expert = |index: usize| {
                let [gate, up, down] = weights[index].clone();
                let adapters = [0, 1, 2].map(|which| beside(x, index, which).map(Into::into));
                Ok(Expert::from(GatedExpert { gate, up, down, adapters }))
            };
            mixed_saving(&x[0], &routing, &expert, memory)
        };
        compare_both(&inputs(adapters), mix, plain);
    }
}

#[test]
fn experts_in_one_parameter_compute_with_what_is_stored() {
    let [_, experts, hidden, width] = SIZES;
    let activation = ClampedSwiglu { alpha: 1.4, limit: 0.9 };
    for format in FORMATS {
        let stack = |inputs, outputs, seed| {
            QuantizedStack::new(matrix(format, experts * outputs, inputs, seed), outputs).expect("whole experts")
        };
        let (gate_up, down) = (stack(hidden, 2 * width, 1), stack(width, hidden, 2));
        assert_eq!((gate_up.dims(), down.dims()), ([experts, hidden, 2 * width], [experts, width, hidden]));
        let biases = [random(&[experts, 2 * width], 70), random(&[experts, hidden], 71)];
        let of = |stack: &QuantizedStack, expert: usize| wide(stack.dequantize(expert..expert + 1))?.squeeze(0);
        let plain = |x: &[Tensor]| {
            mixture(x, |row, expert| {
                let both = row.matmul(&of(&gate_up, expert)?)?.broadcast_add(&x[2].get(expert)?)?;
                let both = both.reshape((width, 2))?;
                let gate = both.narrow(1, 0, 1)?.reshape((1, width))?.minimum(0.9f32 as f64)?;
                let up = both.narrow(1, 1, 1)?.reshape((1, width))?.clamp(-(0.9f32 as f64), 0.9f32 as f64)?;
                let opened = (&gate / ((&gate * f64::from(-1.4f32))?.exp()? + 1.0)?)?;
                ((up + 1.0)? * opened)?.matmul(&of(&down, expert)?)?.broadcast_add(&x[3].get(expert)?)
            })
        };
        let mix = |x: &[Tensor], memory: &mut SavedExperts| {
            let routing = Routing { chosen: chosen(), weights: x[1].clone(), adapter_rows: None };
            let (gate_up, down) = (gate_up.clone().into(), down.clone().into());
            let [gate_up_bias, down_bias] = [x[2].clone(), x[3].clone()];
            let stack = ExpertStack { gate_up, gate_up_bias, down, down_bias, activation, adds_down_bias: true };
            let stack = Arc::new(stack);
            let expert = |index| Ok(Expert::Stacked(StackedExpert { stack: stack.clone(), index }));
            mixed_saving(&x[0], &routing, &expert, memory)
        };
        compare_both(&inputs(biases), mix, plain);
    }
}

#[test]
fn a_16_bit_stack_equals_the_tensor_it_was_read_from() -> Result<()> {
    let (experts, inputs, outputs) = (3, 37, 70);
    for format in [Format::BF16, Format::F16] {
        let tensor = matrix(format, experts * inputs, outputs, 5);
        let (bytes, mut at) = (tensor.bytes(), 0);
        let stack = QuantizedStack::from_tensor(format, [experts, inputs, outputs], |to| {
            to.copy_from_slice(&bytes[at..at + to.len()]);
            at += to.len();
            Ok::<_, candle_core::Error>(())
        })?;
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let wanted = tensor.dequantize()?.reshape((experts, inputs, outputs))?;
        assert_eq!(values(&stack.dequantize(0..experts)?)?, values(&wanted)?);
        assert_eq!(values(&stack.dequantize(1..2)?)?, values(&wanted.get(1)?)?);
        assert_eq!(values(&stack.get(2)?.dequantize()?.t()?.contiguous()?)?, values(&wanted.get(2)?)?);
        assert_eq!(stack.get(1)?.bytes().as_ptr(), stack.matrix().bytes()[2 * inputs * outputs..].as_ptr());
        assert_eq!(Weight::from(stack.clone()).rows(2..3)?.dims(), [1, inputs, outputs]);
        let message = |result: Result<QuantizedMatrix>| result.expect_err("no such expert").to_string();
        assert!(message(stack.get(3)).contains("expert 3 of QuantizedStack[3 x 37 x 70;"), "{}", message(stack.get(3)));
    }
    let refused = QuantizedStack::new(matrix(Format::BF16, 10, 4, 1), 3).expect_err("a third of an expert").to_string();
    assert!(refused.contains("10 x 4") && refused.contains("3 rows each"), "{refused}");
    let never = |_: &mut [u8]| Ok::<_, candle_core::Error>(());
    let refused = QuantizedStack::from_tensor(Format::Q8_0, [1, 32, 32], never).expect_err("blocks").to_string();
    assert!(refused.contains("Q8_0"), "{refused}");
    Ok(())
}
