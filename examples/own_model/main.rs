//! A transformer written with candle-nn alone, trained on text whose sequences are distributed over ranks.
//!
//! `cargo run --release -p ringspan-candle --example own_model [RANKS [STEPS [FILE]]]` trains on RANKS threads (4 by default)
//! and on one, and prints both losses: they are equal but for rounding. The model (`model.rs`) knows of ranks in one line, in
//! which its attention calls the context.

mod model;

use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap, ops::log_softmax};
use model::Model;
use ringspan::schedule::StrategyChoice;
use ringspan::{Mask, World};
use ringspan_candle::Context;
use std::time::Instant;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Bytes of a sequence; odd, since no number of ranks has to divide it.
const TOKENS: usize = 1023;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let ranks = arguments.next().map_or(Ok(4), |ranks| ranks.parse())?;
    let steps = arguments.next().map_or(Ok(60), |steps| steps.parse())?;
    let text = match arguments.next() {
        Some(file) => std::fs::read(file)?,
        None => include_bytes!("../../LICENSE-APACHE").to_vec(),
    };
    println!("{ranks} ranks, then one; {steps} steps of {TOKENS} bytes of a text of {} bytes", text.len());
    let [many, one] = [ranks, 1].map(|ranks| {
        let start = Instant::now();
        let losses = train(&text, ranks, steps, TOKENS)?;
        println!("{ranks} ranks: {:.1} s", start.elapsed().as_secs_f64());
        Ok::<_, Error>(losses)
    });
    let (many, one) = (many?, one?);
    println!("{:>6} {:>14} {:>14}", "step", format!("{ranks} ranks"), "1 rank");
    for step in (0..steps).filter(|step| step % 10 == 0 || step + 1 == steps) {
        println!("{step:>6} {:>14.5} {:>14.5}", many[step], one[step]);
    }
    Ok(())
}

/// Trains a new model, and returns the loss of each step.
fn train(text: &[u8], ranks: usize, steps: usize, tokens: usize) -> Result<Vec<f32>, Error> {
    if text.len() <= tokens {
        return Err(format!("the text has {} bytes; a sequence and its targets need {}", text.len(), tokens + 1).into());
    }
    let mut losses = World::threads(ranks)?.run(|rank| {
        let context = Context::builder(rank).batch(1, tokens).mask(Mask::causal()).strategy(StrategyChoice::Auto);
        let context = context.build()?;
        let map = VarMap::new();
        let model = Model::new(tokens, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
        let parameters = map.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let parameters: Vec<_> = parameters.into_iter().collect();
        model::initialize(&parameters)?;
        context.broadcast_parameters(&parameters)?;
        let mut optimizer = AdamW::new_lr(map.all_vars(), 3e-3)?;

        let mut losses = Vec::new();
        for step in 0..steps {
            let start = step * 7919 % (text.len() - tokens);
            let ids: Vec<u32> = text[start..=start + tokens].iter().map(|byte| u32::from(*byte)).collect();
            let ids = Tensor::from_vec(ids, (1, tokens + 1), &Device::Cpu)?;
            let inputs = context.shard(&ids.narrow(1, 0, tokens)?)?;
            let targets = context.shard(&ids.narrow(1, 1, tokens)?)?;
            let log_p = log_softmax(&model.forward(&inputs, &context)?, 2)?;
            let sum = log_p.gather(&targets.unsqueeze(2)?, 2)?.sum_all()?.neg()?;
            // Each rank has its part of the mean over all tokens.
            let loss = (sum / context.global_tokens() as f64)?;
            let mut gradients = loss.backward()?;
            context.all_reduce_gradients(&mut gradients, &parameters)?;
            optimizer.step(&gradients)?;
            losses.push(context.all_reduce_sum(loss.to_scalar()?)?);
        }
        Ok::<_, Error>(losses)
    })?;
    Ok(losses.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_do_not_depend_on_the_number_of_ranks_and_fall() {
        let text = include_bytes!("../../LICENSE-APACHE");
        let one = train(text, 1, 12, 61).expect("a training");
        for ranks in [2, 3] {
            let many = train(text, ranks, 12, 61).expect("a training");
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-3 * b;
            assert!(many.len() == 12 && many.iter().zip(&one).all(close), "{ranks} ranks: {many:?}, one: {one:?}");
        }
        assert!(one[11] < 0.9 * one[0], "{one:?}");
    }

    #[test]
    fn a_text_that_is_too_short_is_refused_with_the_numbers() {
        let error = train(b"short", 1, 1, 61).expect_err("5 bytes").to_string();
        assert!(error.contains('5') && error.contains("62"), "{error}");
    }
}
