//! Gated layers and mixtures of experts equal their definition in f64, forward and backward.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use ringspan_candle::activation::ClampedSwiglu;
use ringspan_candle::experts::{ExpertStack, StackedExpert};
use ringspan_candle::experts::{Local, RouterGradient, SavedExperts, mixed, mixed_saving, with_router_gradient};
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::{Adapter, Expert, Experts, GatedExpert, InputDropout, LayerAdapter, Routing};

pub(crate) fn random(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| ((i * 7919 + seed * 104_729) as f64 * 0.377).sin()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("sizes agree")
}

/// Compares output and all gradients of `fused` in f32 with those of `plain` in f64, for the same output gradient.
pub(crate) fn compare(
    inputs: &[Tensor],
    fused: impl Fn(&[Tensor]) -> Result<Tensor>,
    plain: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let run = |dtype: DType, f: &dyn Fn(&[Tensor]) -> Result<Tensor>| -> Result<Vec<Tensor>> {
        let vars = inputs.iter().map(|x| Var::from_tensor(&x.to_dtype(dtype)?)).collect::<Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let y = f(&tensors)?;
        let d = random(y.dims(), 99).to_dtype(dtype)?;
        let gradients = (&y * d)?.sum_all()?.backward()?;
        let mut all = vec![y.detach()];
        for var in &vars {
            all.push(gradients.get(var).cloned().unwrap_or(var.zeros_like()?));
        }
        Ok(all)
    };
    let (got, wanted) = (run(DType::F32, &fused).expect("fused"), run(DType::F64, &plain).expect("plain"));
    for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        let difference = (got.to_dtype(DType::F64).expect("f64") - wanted).expect("same shapes");
        let norm = |x: &Tensor| x.sqr().and_then(|x| x.sum_all()).and_then(|x| x.to_scalar::<f64>()).expect("a number");
        let (error, size) = (norm(&difference).sqrt(), norm(wanted).sqrt());
        assert!(error <= 1e-6 * size, "result {index} differs by {error:e} of {size:e}");
    }
}

/// The parameters of expert `index` among those of all experts, which are gate, up and down of each in turn.
fn of(parameters: &[Tensor], index: usize) -> Result<GatedExpert> {
    let [gate, up, down] = [0, 1, 2].map(|which| parameters[3 * index + which].clone());
    Ok(GatedExpert::plain(gate, up, down))
}

/// The experts of five tokens, two for each, out of four experts: expert 1 has four tokens, expert 2 none.
const CHOSEN: [u32; 10] = [0, 1, 1, 3, 3, 1, 0, 3, 1, 0];

fn inputs() -> Vec<Tensor> {
    let (width, wide) = (6, 5);
    let mut inputs = vec![random(&[5, width], 1), random(&[5, 2], 2)];
    for index in 0..4 {
        inputs.extend([&[wide, width][..], &[wide, width], &[width, wide]].map(|shape| random(shape, 10 + index)));
    }
    inputs
}

#[test]
fn a_mixture_of_experts_equals_its_definition() {
    let plain = |x: &[Tensor]| {
        let mut rows = Vec::new();
        for token in 0..5 {
            let row = x[0].narrow(0, token, 1)?;
            let mut sum = row.zeros_like()?;
            for slot in 0..2 {
                let index = 2 + 3 * CHOSEN[2 * token + slot] as usize;
                let (gate, up, down) = (&x[index], &x[index + 1], &x[index + 2]);
                let gate = row.matmul(&gate.t()?)?;
                let hidden = ((&gate / ((gate.neg()?.exp()? + 1.0)?))? * row.matmul(&up.t()?)?)?;
                let weight = x[1].narrow(0, token, 1)?.narrow(1, slot, 1)?;
                sum = (sum + hidden.matmul(&down.t()?)?.broadcast_mul(&weight)?)?;
            }
            rows.push(sum);
        }
        Tensor::cat(&rows, 0)
    };
    let fused = |x: &[Tensor]| {
        let routing = Routing { chosen: CHOSEN.to_vec(), weights: x[1].clone(), adapter_rows: None };
        Local.mix(0, &x[0], &routing, &|index| Ok(of(&x[2..], index)?.into()))
    };
    compare(&inputs(), fused, plain);
}

/// Like [`of`], with adapters of rank 3 for all matrices except the up of expert 3, which drop two fifths of their inputs.
fn adapted(x: &[Tensor], index: usize) -> Result<GatedExpert> {
    let mut expert = of(&x[2..], index)?;
    let adapter = |which: usize| {
        let at = 14 + 6 * index + 2 * which;
        let (a, b) = (x[at].clone(), x[at + 1].clone());
        Adapter { a, b, scale: 0.7, dropout: 0.4, layer: 10 * index + which, first: 8 * which }
    };
    expert.adapters = [0, 1, 2].map(|which| (which != 1 || index != 3).then(|| adapter(which).into()));
    Ok(expert)
}

fn adapted_inputs() -> Vec<Tensor> {
    let (width, wide, rank) = (6, 5, 3);
    let mut inputs = inputs();
    for (which, (from, to)) in (0..4).flat_map(|_| [(width, wide), (width, wide), (wide, width)]).enumerate() {
        inputs.extend([random(&[rank, from], 30 + which), random(&[to, rank], 50 + which)]);
    }
    inputs
}

#[test]
fn a_mixture_of_experts_with_adapters_equals_its_definition() {
    // The numbers of the tokens among all tokens of a step.
    let dropout = InputDropout::new(7, vec![40, 3, 11, 12, 29]);
    let through = |x: &Tensor, token: usize, weight: &Tensor, adapter: &Option<LayerAdapter>| -> Result<Tensor> {
        let y = x.matmul(&weight.t()?)?;
        let Some(LayerAdapter::One(adapter)) = adapter else { return Ok(y) };
        let ones = Tensor::ones(x.shape(), DType::F32, &Device::Cpu)?;
        let mask = dropout.of_rows(&[token as u32]).apply(&ones, adapter.dropout, adapter.layer, adapter.first)?;
        let narrow = (x * mask.to_dtype(DType::F64)?)?.matmul(&adapter.a.t()?)?;
        y + (narrow.matmul(&adapter.b.t()?)? * adapter.scale)?
    };
    let plain = |x: &[Tensor]| {
        let mut rows = Vec::new();
        for token in 0..5 {
            let row = x[0].narrow(0, token, 1)?;
            let mut sum = row.zeros_like()?;
            for slot in 0..2 {
                let GatedExpert { gate, up, down, adapters: [of_gate, of_up, of_down] } =
                    adapted(x, CHOSEN[2 * token + slot] as usize)?;
                let gate = through(&row, token, gate.tensor()?, &of_gate)?;
                let hidden = ((&gate / ((gate.neg()?.exp()? + 1.0)?))? * through(&row, token, up.tensor()?, &of_up)?)?;
                let weight = x[1].narrow(0, token, 1)?.narrow(1, slot, 1)?;
                sum = (sum + through(&hidden, token, down.tensor()?, &of_down)?.broadcast_mul(&weight)?)?;
            }
            rows.push(sum);
        }
        Tensor::cat(&rows, 0)
    };
    let fused = |x: &[Tensor]| {
        let routing =
            Routing { chosen: CHOSEN.to_vec(), weights: x[1].clone(), adapter_rows: Some(dropout.clone().into()) };
        Local.mix(0, &x[0], &routing, &|index| Ok(adapted(x, index)?.into()))
    };
    compare(&adapted_inputs(), fused, plain);
    // The mixture is computed twice, as in a recomputed layer whose products are stored.
    let kept = |x: &[Tensor]| {
        let routing =
            Routing { chosen: CHOSEN.to_vec(), weights: x[1].clone(), adapter_rows: Some(dropout.clone().into()) };
        let mut memory = SavedExperts::default();
        let once = mixed_saving(&x[0], &routing, &|index| Ok(adapted(x, index)?.into()), &mut memory)?.detach();
        once + mixed_saving(&x[0], &routing, &|index| Ok(adapted(x, index)?.into()), &mut memory)?
    };
    compare(&adapted_inputs(), kept, plain);
}

/// Only trained parameters have gradients: those of a frozen model with adapters would take as much memory as the model.
#[test]
fn frozen_experts_get_no_gradients() -> Result<()> {
    let gradients = |trained: fn(usize) -> bool| -> Result<Vec<Option<Vec<f32>>>> {
        let vars =
            adapted_inputs().iter().map(|x| Var::from_tensor(&x.to_dtype(DType::F32)?)).collect::<Result<Vec<_>>>()?;
        let of =
            |(at, var): (usize, &Var)| if trained(at) { var.as_tensor().clone() } else { var.as_detached_tensor() };
        let x: Vec<Tensor> = vars.iter().enumerate().map(of).collect();
        let routing = Routing { chosen: CHOSEN.to_vec(), weights: x[1].clone(), adapter_rows: None };
        let y = mixed(&x[0], &routing, &|index| Ok(adapted(&x, index)?.into()))?;
        let store = (&y * random(y.dims(), 99).to_dtype(DType::F32)?)?.sum_all()?.backward()?;
        vars.iter().map(|var| store.get(var).map(|d| d.flatten_all()?.to_vec1()).transpose()).collect()
    };
    let (all, some) = (gradients(|_| true)?, gradients(|at| !(2..14).contains(&at))?);
    assert!(some[2..14].iter().all(Option::is_none) && all[2..5].iter().all(Option::is_some));
    assert!(all[..2] == some[..2] && all[14..] == some[14..]);
    Ok(())
}

#[test]
fn dropout_of_another_number_of_tokens_is_refused() {
    let x = inputs();
    let routing = Routing {
        chosen: CHOSEN.to_vec(),
        weights: x[1].clone(),
        adapter_rows: Some(InputDropout::new(1, vec![0; 4]).into()),
    };
    let message =
        mixed(&x[0], &routing, &|index| Ok(of(&x[2..], index)?.into())).expect_err("four of five").to_string();
    assert!(message.contains("4 tokens") && message.contains("fit 5"), "{message}");
}

/// The input may be a view that the previous layer returned, and the routing weights the result of a chain of operations.
#[test]
fn a_mixture_takes_strided_inputs() {
    let fused = |x: &[Tensor]| {
        let (strided, weights) = (x[0].t()?.contiguous()?.t()?, (x[1].t()?.contiguous()?.t()? * 1.0)?);
        mixed(&strided, &Routing { chosen: CHOSEN.to_vec(), weights, adapter_rows: None }, &|index| {
            Ok(of(&x[2..], index)?.into())
        })
    };
    let plain = |x: &[Tensor]| {
        let single = x.iter().map(|x| x.to_dtype(DType::F32)).collect::<Result<Vec<_>>>()?;
        let routing = Routing { chosen: CHOSEN.to_vec(), weights: single[1].clone(), adapter_rows: None };
        mixed(&single[0], &routing, &|index| Ok(of(&single[2..], index)?.into()))?.to_dtype(DType::F64)
    };
    compare(&inputs(), fused, plain);
}

/// Experts stacked in one tensor, whose gate and up alternate and are clamped; gradients are those of the whole tensors.
#[test]
fn a_mixture_of_stacked_experts_equals_its_definition() {
    let (experts, width, wide) = (4, 6, 5);
    let activation = ClampedSwiglu { alpha: 1.4, limit: 0.9 };
    let shapes: [&[usize]; 4] =
        [&[experts, width, 2 * wide], &[experts, 2 * wide], &[experts, wide, width], &[experts, width]];
    let mut all = inputs()[..2].to_vec();
    all.extend(shapes.iter().enumerate().map(|(which, shape)| random(shape, 70 + which)));
    let plain = |x: &[Tensor]| {
        let mut rows = Vec::new();
        for token in 0..5 {
            let row = x[0].narrow(0, token, 1)?;
            let mut sum = row.zeros_like()?;
            for slot in 0..2 {
                let index = CHOSEN[2 * token + slot] as usize;
                let both = row.matmul(&x[2].get(index)?)?.broadcast_add(&x[3].get(index)?)?.reshape((wide, 2))?;
                let gate = both.narrow(1, 0, 1)?.reshape((1, wide))?.minimum(0.9)?;
                let up = both.narrow(1, 1, 1)?.reshape((1, wide))?.clamp(-0.9, 0.9)?;
                let opened = (&gate / (((&gate * -1.4)?.exp()? + 1.0)?))?;
                let y = ((up + 1.0)? * opened)?.matmul(&x[4].get(index)?)?.broadcast_add(&x[5].get(index)?)?;
                sum = (sum + y.broadcast_mul(&x[1].narrow(0, token, 1)?.narrow(1, slot, 1)?)?)?;
            }
            rows.push(sum);
        }
        Tensor::cat(&rows, 0)
    };
    let mix = |x: &[Tensor], memory: &mut SavedExperts| {
        let routing = Routing { chosen: CHOSEN.to_vec(), weights: x[1].clone(), adapter_rows: None };
        let [gate_up, gate_up_bias, down, down_bias] = [2, 3, 4, 5].map(|at: usize| x[at].clone());
        let (gate_up, down) = (gate_up.into(), down.into());
        let stack = ExpertStack { gate_up, gate_up_bias, down, down_bias, activation, adds_down_bias: true };
        let stack = std::sync::Arc::new(stack);
        let expert = |index| Ok(Expert::Stacked(StackedExpert { stack: stack.clone(), index }));
        mixed_saving(&x[0], &routing, &expert, memory)
    };
    compare(&all, |x| mix(x, &mut SavedExperts::default()), plain);
    // The mixture is computed twice, as in a recomputed layer whose products are stored.
    let twice = |x: &[Tensor]| {
        let mut memory = SavedExperts::default();
        let once = mix(x, &mut memory)?.detach();
        once + mix(x, &mut memory)?
    };
    compare(&all, twice, plain);
}

#[test]
fn experts_without_tokens_are_not_requested() -> Result<()> {
    let x = inputs().iter().map(|x| x.to_dtype(DType::F32)).collect::<Result<Vec<_>>>()?;
    let asked = std::cell::RefCell::new(Vec::new());
    mixed(&x[0], &Routing { chosen: CHOSEN.to_vec(), weights: x[1].clone(), adapter_rows: None }, &|index| {
        asked.borrow_mut().push(index);
        Ok(of(&x[2..], index)?.into())
    })?;
    assert_eq!(*asked.borrow(), [0, 1, 3]);
    let none =
        Routing { chosen: Vec::new(), weights: Tensor::zeros((0, 2), DType::F32, &Device::Cpu)?, adapter_rows: None };
    let empty = Tensor::zeros((0, 6), DType::F32, &Device::Cpu)?;
    assert_eq!(mixed(&empty, &none, &|_| unreachable!("no token chose"))?.dims(), [0, 6]);
    Ok(())
}

/// Gradients of x, of the routing weights and of all parameters, with a `memory` of the experts' products.
fn gradients_of(memory: &mut SavedExperts) -> Result<(Tensor, Vec<Vec<f32>>)> {
    let vars = inputs().iter().map(|x| Var::from_tensor(&x.to_dtype(DType::F32)?)).collect::<Result<Vec<_>>>()?;
    let x: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let routing = Routing { chosen: CHOSEN.to_vec(), weights: x[1].clone(), adapter_rows: None };
    let y = mixed_saving(&x[0], &routing, &|index| Ok(of(&x[2..], index)?.into()), memory)?;
    let gradients = (&y * random(y.dims(), 99).to_dtype(DType::F32)?)?.sum_all()?.backward()?;
    let of = |var: &Var| match gradients.get(var) {
        Some(gradient) => gradient.flatten_all()?.to_vec1(),
        None => Ok(Vec::new()),
    };
    Ok((y.detach(), vars.iter().map(of).collect::<Result<_>>()?))
}

#[test]
fn stored_products_give_the_gradients_of_recomputed_ones() -> Result<()> {
    let (_, wanted) = gradients_of(&mut SavedExperts::default())?;
    for (storage, bound) in [(Storage::F32, 0.0), (Storage::Bf16, 1e-2)] {
        let mut memory = SavedExperts::new(storage);
        let (first, _) = gradients_of(&mut memory)?;
        assert!(!memory.is_empty() && first.abs()?.sum_all()?.to_scalar::<f32>()? > 1.0);
        let (second, got) = gradients_of(&mut memory)?;
        assert!(memory.is_empty(), "what was kept is taken");
        assert_eq!(second.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0, "nothing is computed but the backward");
        for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert_eq!(got.len(), wanted.len());
            let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
            let off = sum(&mut got.iter().zip(wanted).map(|(a, b)| a - b));
            let size = sum(&mut wanted.iter().copied());
            assert!(off <= bound * size, "{storage}: gradient {index} is off by {off:e} of {size:e}");
        }
        let off = |(got, wanted): (&Vec<f32>, &Vec<f32>)| got != wanted;
        assert_eq!(got.iter().zip(&wanted).any(off), storage == Storage::Bf16, "only bf16 is rounded");
    }
    Ok(())
}

#[test]
fn stored_products_of_another_routing_are_refused() -> Result<()> {
    let x = inputs().iter().map(|x| x.to_dtype(DType::F32)).collect::<Result<Vec<_>>>()?;
    let mix = |chosen: [u32; 10], memory: &mut SavedExperts| {
        let routing = Routing { chosen: chosen.to_vec(), weights: x[1].clone(), adapter_rows: None };
        mixed_saving(&x[0], &routing, &|index| Ok(of(&x[2..], index)?.into()), memory)
    };
    let refused = |chosen: [u32; 10], words: [&str; 2]| -> Result<()> {
        let mut memory = SavedExperts::default();
        mix(CHOSEN, &mut memory)?;
        let message = mix(chosen, &mut memory).expect_err("another routing").to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        Ok(())
    };
    refused([0, 1, 1, 2, 3, 1, 0, 3, 1, 0], ["3 experts", "4"])?;
    refused([0, 1, 1, 0, 3, 1, 0, 3, 1, 0], ["[3, 5]", "[4, 5]"])
}

#[test]
fn choices_that_do_not_fit_the_tokens_are_refused() {
    let x = inputs();
    let routing = Routing { chosen: CHOSEN[..9].to_vec(), weights: x[1].clone(), adapter_rows: None };
    let message = mixed(&x[0], &routing, &|index| Ok(of(&x[2..], index)?.into())).expect_err("nine of ten").to_string();
    assert!(message.contains("9 choices") && message.contains("5 tokens"), "{message}");
}

/// The router gradient acts like a term `sum over tokens of p . router_gradient` in the loss.
#[test]
fn router_gradient_is_the_gradient_of_a_term_of_the_loss() {
    let router_gradient = [0.5f32, -1.0, 2.0];
    let p = Var::from_tensor(&random(&[4, 3], 1).to_dtype(DType::F32).expect("f32")).expect("a variable");
    let gradient = |y: Tensor| y.backward().expect("differentiable").remove(&p).expect("a gradient");
    let later = RouterGradient::default();
    let y = with_router_gradient(&p, later.clone()).and_then(|p| p.sqr()?.sum_all()).expect("computes");
    assert!(y.backward().expect_err("too early").to_string().contains("forward pass"));
    later.set(router_gradient.to_vec()).expect("once");
    let got = gradient(y);
    let row = Tensor::new(&router_gradient, &Device::Cpu).expect("a row");
    let term = p.broadcast_mul(&row).and_then(|x| x.sum_all()).expect("computes");
    let wanted = gradient((p.sqr().and_then(|x| x.sum_all()).expect("computes") + term).expect("a sum"));
    let difference = (got - wanted).and_then(|x| x.abs()?.sum(D::Minus1)?.sum_all()?.to_scalar::<f32>());
    assert!(difference.expect("a number") < 1e-5);
    let one = RouterGradient::default();
    one.set(vec![1.0]).expect("once");
    let y = with_router_gradient(&p, one).and_then(|p| p.sum_all()).expect("computes");
    assert!(y.backward().expect_err("three experts").to_string().contains("1 experts"));
}
