//! Tests that experts stacked in one tensor for each parameter, and heads with sinks, give the results of the CPU.

use crate::ranks::group;
use crate::{assert_within, bound, gpu, random, results, rounding};
use candle_core::{DType, Result, Tensor};
use ringspan::comm::threads;
use ringspan::{Documents, Layout, LayoutKind, Mask, Score, StrategyKind};
use ringspan_candle::activation::ClampedSwiglu;
use ringspan_candle::cast::cast;
use ringspan_candle::experts::{ExpertStack, Local, StackedExpert};
use ringspan_candle::{Attend, AttentionInputs, Context, Expert, Experts, RankDevice, Routing};
use std::sync::Arc;

#[test]
fn experts_of_a_stack() {
    let Some(gpu) = gpu() else { return };
    let (tokens, width, inner, experts, top) = (7, 6, 5, 4, 2);
    // No token is routed to one of the experts.
    let chosen: Vec<u32> = (0..tokens * top).map(|slot| [0, 2, 3, 2][(slot * 3) % 4] as u32).collect();
    let shapes: [&[usize]; 6] = [
        &[tokens, width],
        &[tokens, top],
        &[experts, width, 2 * inner],
        &[experts, 2 * inner],
        &[experts, inner, width],
        &[experts, width],
    ];
    let inputs: Vec<Tensor> = shapes.iter().zip(1..).map(|(shape, seed)| random(shape, seed)).collect();
    // Rounding may move a number across a clamping bound, so in bf16 the bound is too large to be reached.
    for (gpu, limit) in [(gpu.clone(), 0.9), (rounding(&gpu), 30.0)] {
        let mix = |_: &RankDevice, x: &[Tensor]| -> Result<Tensor> {
            let [gate_up, gate_up_bias, down, down_bias] = [2, 3, 4, 5].map(|at: usize| x[at].clone());
            let activation = ClampedSwiglu { alpha: 1.4, limit };
            let (gate_up, down) = (gate_up.into(), down.into());
            let stack = ExpertStack { gate_up, gate_up_bias, down, down_bias, activation, adds_down_bias: true };
            let stack = Arc::new(stack);
            let routing = Routing { chosen: chosen.clone(), weights: cast(&x[1], DType::F32)?, adapter_rows: None };
            Local.mix(0, &x[0], &routing, &|index| Ok(Expert::Stacked(StackedExpert { stack: stack.clone(), index })))
        };
        let wanted = results(&RankDevice::CPU, &inputs, &mix);
        for (index, (got, wanted)) in results(&gpu, &inputs, &mix).iter().zip(&wanted).enumerate() {
            assert_within(bound(&gpu), &format!("a stack in {}, result {index}", gpu.precision()), got, wanted);
        }
    }
}

#[test]
fn heads_with_sinks() {
    let Some(gpu) = gpu() else { return };
    let inputs = [random(&[29, 4, 8], 1), random(&[29, 2, 8], 2), random(&[29, 2, 8], 3), random(&[4], 4)];
    let attend = |device: &RankDevice, x: &[Tensor]| -> Result<Tensor> {
        let run = |comm| -> Result<Tensor> {
            let layout = Layout::new(LayoutKind::Contiguous, &Documents::packed(&[11, 18]), 1);
            let kernel = device.kernel(1).map_err(candle_core::Error::wrap)?;
            let layout = Arc::new(layout.map_err(candle_core::Error::wrap)?);
            let context = Context::new(group(comm, (1, 1), kernel)?, layout, StrategyKind::Ring)?;
            let inputs = AttentionInputs { sinks: Some(&x[3]), ..AttentionInputs::new(&x[0], &x[1], &x[2]) };
            context.layer_attention(0, &inputs, &Mask::causal(), &Score::new(0.3))
        };
        let one = threads::run(1, threads::Options::default(), |comm| {
            run(comm).map_err(|error| ringspan::Error::Layout(error.to_string()))
        });
        Ok(one.map_err(candle_core::Error::wrap)?.remove(0))
    };
    let wanted = results(&RankDevice::CPU, &inputs, &attend);
    for gpu in [gpu.clone(), rounding(&gpu)] {
        for (index, (got, wanted)) in results(&gpu, &inputs, &attend).iter().zip(&wanted).enumerate() {
            assert_within(2.0 * bound(&gpu), &format!("sinks in {}, result {index}", gpu.precision()), got, wanted);
        }
    }
}
