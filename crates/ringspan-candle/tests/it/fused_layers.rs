//! The fused layers equal candle's own operations in f64, forward and backward.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use ringspan_candle::activation::Activation;
use ringspan_candle::linear::linear;
use ringspan_candle::loss::{self, IGNORE};
use ringspan_candle::norm::rms_norm;
use ringspan_candle::rope::{RotaryTable, rope};
use ringspan_candle::swiglu::{geglu, swiglu};
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{backward_from, gated_mlp, pool};

/// Numbers between -1 and 1 without a pattern, so that sums of them do not cancel.
fn random(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let mut state = seed as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    next();
    Tensor::from_vec((0..count).map(|_| next()).collect(), shape, &Device::Cpu).expect("sizes agree")
}

/// Compares output and all gradients of `fused` in f32 with those of `plain` in f64, for the same output gradient.
fn compare(
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
            all.push(gradients.get(var).cloned().expect("every input has a gradient"));
        }
        Ok(all)
    };
    let (got, wanted) = (run(DType::F32, &fused).expect("fused"), run(DType::F64, &plain).expect("plain"));
    for (index, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        let error = relative_l2(got, wanted).expect("same shapes");
        assert!(error < 1e-6, "result {index} differs by {error:e}");
    }
}

fn relative_l2(got: &Tensor, wanted: &Tensor) -> Result<f64> {
    let difference = (got.to_dtype(DType::F64)? - wanted)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
    Ok((difference / wanted.sqr()?.sum_all()?.to_scalar::<f64>()?).sqrt())
}

#[test]
fn rms_norm_equals_its_definition() {
    let plain = |x: &[Tensor]| {
        let mean = x[0].sqr()?.mean_keepdim(D::Minus1)?;
        x[0].broadcast_div(&(mean + 1e-5)?.sqrt()?)?.broadcast_mul(&x[1])
    };
    for shape in [vec![5, 24], vec![3, 4, 7], vec![1, 3]] {
        let width = shape[shape.len() - 1];
        compare(&[random(&shape, 1), random(&[width], 2)], |x| rms_norm(&x[0], &x[1], 1e-5), plain);
    }
}

/// The rows of a wider tensor are read by their strides.
#[test]
fn rms_norm_reads_strided_rows() {
    let fused = |x: &[Tensor]| rms_norm(&x[0].narrow(1, 2, 6)?, &x[1], 1e-5);
    let plain = |x: &[Tensor]| {
        let x0 = x[0].narrow(1, 2, 6)?;
        let mean = x0.sqr()?.mean_keepdim(D::Minus1)?;
        x0.broadcast_div(&(mean + 1e-5)?.sqrt()?)?.broadcast_mul(&x[1])
    };
    compare(&[random(&[4, 9], 1), random(&[6], 2)], fused, plain);
}

#[test]
fn swiglu_equals_its_definition() {
    let plain = |x: &[Tensor]| (&x[0] / ((x[0].neg()?.exp()? + 1.0)?))? * &x[1];
    compare(&[random(&[6, 10], 1), random(&[6, 10], 2)], |x| swiglu(&x[0], &x[1]), plain);
}

#[test]
fn rope_equals_its_definition() {
    let (positions, frequencies) = ([0usize, 3, 1000, 7], [1.0, 0.1, 0.003]);
    let plain = |x: &[Tensor]| {
        let angles: Vec<f64> = positions.iter().flat_map(|p| frequencies.map(|f| *p as f64 * f)).collect();
        let angles = Tensor::from_vec(angles, (4, 1, 3), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let (a, b) = (x[0].narrow(2, 0, 3)?, x[0].narrow(2, 3, 3)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 2)
    };
    let rotation = RotaryTable::new(&positions, &frequencies, 1.0);
    compare(&[random(&[4, 2, 6], 1)], |x| rope(&x[0], &rotation), plain);
}

/// 1100 tokens are more than two chunks; some of them have no target.
#[test]
fn the_loss_and_its_gradients_equal_their_definition_across_chunks() -> Result<()> {
    [None, Some(0.3), Some(1.5), Some(30.0)].into_iter().try_for_each(equal_across_chunks)
}

fn equal_across_chunks(softcap: Option<f32>) -> Result<()> {
    let (tokens, width, vocabulary, scale) = (1100, 8, 19, 0.25);
    let targets: Vec<u32> =
        (0..tokens).map(|t| if t % 7 == 3 { IGNORE } else { (t * 5 % vocabulary) as u32 }).collect();
    let (hidden, head) = (random(&[tokens, width], 1), (random(&[vocabulary, width], 2) * 2.0)?);
    let (h, w) = (Var::from_tensor(&hidden)?, Var::from_tensor(&head)?);
    let mut logits = h.matmul(&w.t()?)?;
    if let Some(cap) = softcap.map(f64::from) {
        logits = ((logits / cap)?.tanh()? * cap)?;
    }
    let log_sum = logits.exp()?.sum_keepdim(1)?.log()?;
    let log_p = logits.broadcast_sub(&log_sum)?;
    let picked: Vec<u32> = targets.iter().map(|t| if *t == IGNORE { 0 } else { *t }).collect();
    let picked = log_p.gather(&Tensor::from_vec(picked, (tokens, 1), &Device::Cpu)?, 1)?;
    let valid: Vec<f64> = targets.iter().map(|t| f64::from(u8::from(*t != IGNORE))).collect();
    let picked = (picked * Tensor::from_vec(valid, (tokens, 1), &Device::Cpu)?)?;
    let nll = picked.sum_all()?.neg()?;
    let gradients = (&nll * f64::from(scale))?.backward()?;

    let (hidden, head) = (hidden.to_dtype(DType::F32)?, head.to_dtype(DType::F32)?);
    let head = loss::OutputHead { weight: head.into(), softcap };
    let got = loss::head_loss(&hidden, head.clone(), &targets, scale, true, &NO_TENSOR_PARALLEL)?;
    assert!((got.nll_sum / nll.to_scalar::<f64>()? - 1.0).abs() < 1e-6);
    assert!(relative_l2(&got.d_hidden, gradients.get(&h).expect("tracked"))? < 1e-6);
    let d_head = got.d_head.expect("trained");
    assert!(relative_l2(&d_head, gradients.get(&w).expect("tracked"))? < 1e-6);
    let frozen = loss::head_loss(&hidden, head.clone(), &targets, scale, false, &NO_TENSOR_PARALLEL)?;
    assert!(frozen.d_head.is_none() && frozen.nll_sum == got.nll_sum);
    assert_eq!(frozen.d_hidden.to_vec2::<f32>()?, got.d_hidden.to_vec2::<f32>()?);
    // The hidden state of a token without a target is not read.
    let mut rows = hidden.to_vec2::<f32>()?;
    rows.iter_mut().zip(&targets).filter(|(_, target)| **target == IGNORE).for_each(|(row, _)| row.fill(f32::NAN));
    let unseen =
        loss::head_loss(&Tensor::new(rows, &Device::Cpu)?, head.clone(), &targets, scale, true, &NO_TENSOR_PARALLEL)?;
    assert_eq!(unseen.d_hidden.to_vec2::<f32>()?, got.d_hidden.to_vec2::<f32>()?);
    assert_eq!(unseen.d_head.expect("trained").to_vec2::<f32>()?, d_head.to_vec2::<f32>()?);
    let log_probs = Tensor::from_vec(
        loss::log_probs(&hidden, head.clone(), &targets, &NO_TENSOR_PARALLEL)?,
        (tokens, 1),
        &Device::Cpu,
    )?;
    assert!(relative_l2(&log_probs, &picked)? < 1e-6);
    assert!(relative_l2(&loss::logits(&hidden, head)?, &logits)? < 1e-6);
    Ok(())
}

#[test]
fn no_tokens_cost_nothing_and_bad_targets_are_named() -> Result<()> {
    let (none, head) =
        (Tensor::zeros((0, 4), DType::F32, &Device::Cpu)?, Tensor::ones((9, 4), DType::F32, &Device::Cpu)?);
    let loss = loss::head_loss(&none, &head, &[], 1.0, true, &NO_TENSOR_PARALLEL)?;
    assert_eq!((loss.nll_sum, loss.d_hidden.dims()), (0.0, &[0, 4][..]));
    let one = Tensor::ones((1, 4), DType::F32, &Device::Cpu)?;
    let error = loss::head_loss(&one, &head, &[9], 1.0, true, &NO_TENSOR_PARALLEL)
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default();
    assert!(error.contains("target 9") && error.contains("vocabulary of 9"), "{error}");
    Ok(())
}

/// Tests odd sizes, one row, rows of a wider tensor, and columns of a transposed one.
#[test]
fn linear_equals_its_definition_for_all_strides() {
    let plain = |x: &[Tensor]| x[0].matmul(&x[1].t()?);
    for (tokens, from, to) in [(1, 1, 1), (1, 9, 5), (33, 1, 4), (37, 19, 130)] {
        let inputs = [random(&[tokens, from], 1), random(&[to, from], 2), random(&[to], 3)];
        compare(&inputs[..2], |x| linear(&x[0], &x[1], None), plain);
        compare(&inputs, |x| linear(&x[0], &x[1], Some(&x[2])), |x| plain(x)?.broadcast_add(&x[2]));
    }
    let inputs = [random(&[6, 11], 1), random(&[4, 7], 2)];
    let part = |x: &[Tensor]| Ok::<_, candle_core::Error>([x[0].narrow(1, 3, 7)?, x[1].clone()]);
    compare(&inputs, |x| linear(&part(x)?[0], &x[1], None), |x| plain(&part(x)?));
    let inputs = [random(&[7, 6], 1), random(&[7, 4], 2)];
    let turned = |x: &[Tensor]| Ok::<_, candle_core::Error>([x[0].t()?, x[1].t()?]);
    compare(&inputs, |x| linear(&turned(x)?[0], &turned(x)?[1], None), |x| plain(&turned(x)?));
}

fn plain_activation(x: &Tensor, activation: Activation) -> Result<Tensor> {
    match activation {
        Activation::Silu => x / (x.neg()?.exp()? + 1.0)?,
        Activation::GeluTanh => {
            let u = ((x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            (x * 0.5)? * (u.tanh()? + 1.0)?
        }
    }
}

/// Tests one token, a few, and more than two tiles, also as rows of a transposed tensor, on one thread and on three.
#[test]
fn the_gated_layer_equals_its_definition_across_tiles() {
    let tokens = 2 * gated_mlp::TILE + 77;
    for (tokens, hidden, wide, threads) in [(1, 1, 1, 1), (5, 6, 11, 1), (tokens, 5, 7, 1), (tokens, 5, 7, 3)] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let plain = |x: &[Tensor]| {
                let gate = plain_activation(&x[0].matmul(&x[1].t()?)?, activation)?;
                (gate * x[0].matmul(&x[2].t()?)?)?.matmul(&x[3].t()?)
            };
            let fused = |x: &[Tensor]| gated_mlp::gated_mlp(&x[0], &x[1], &x[2], &x[3], activation);
            let inputs = [
                random(&[tokens, hidden], 1),
                random(&[wide, hidden], 2),
                random(&[wide, hidden], 3),
                random(&[hidden, wide], 4),
            ];
            let turned = |x: &[Tensor]| fused(&[x[0].t()?, x[1].clone(), x[2].clone(), x[3].t()?]);
            let turned_plain = |x: &[Tensor]| plain(&[x[0].t()?, x[1].clone(), x[2].clone(), x[3].t()?]);
            pool::run(threads, || {
                compare(&inputs, fused, plain);
                let mut inputs = inputs.clone();
                inputs[0] = random(&[hidden, tokens], 1);
                inputs[3] = random(&[wide, hidden], 4);
                compare(&inputs, turned, turned_plain);
            })
            .expect("threads");
        }
    }
}

#[test]
fn geglu_equals_its_definition() {
    let plain = |x: &[Tensor]| plain_activation(&x[0], Activation::GeluTanh)? * &x[1];
    let gate = (random(&[7, 13], 1) * 4.0).expect("a product");
    compare(&[gate, random(&[7, 13], 2)], |x| geglu(&x[0], &x[1]), plain);
}

#[test]
fn layers_of_no_tokens_have_no_tokens_and_gradients_of_zero() -> Result<()> {
    let var = |shape: &[usize]| Var::from_tensor(&random(shape, 1).to_dtype(DType::F32)?);
    let (none, square, bias) = (var(&[0, 4])?, var(&[4, 4])?, var(&[4])?);
    let x = none.as_tensor();
    for y in [
        linear(x, &square, None)?,
        linear(x, &square, Some(&bias))?,
        gated_mlp::gated_mlp(x, &square, &square, &square, Activation::Silu)?,
        rms_norm(x, &bias, 1e-5)?,
        swiglu(x, x)?,
    ] {
        assert_eq!(y.dims(), [0, 4]);
        let gradients = backward_from::backward(&y, &y.zeros_like()?)?;
        for weight in [&square, &bias].into_iter().filter_map(|weight| gradients.get(weight)) {
            assert_eq!(weight.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
        }
    }
    Ok(())
}

/// Rows are distributed over threads, which compute the same values for each row.
#[test]
fn layers_compute_alike_on_any_number_of_threads() -> Result<()> {
    let tokens = 3000;
    let positions: Vec<usize> = (0..tokens).collect();
    let x = random(&[tokens, 24], 1).to_dtype(DType::F32)?;
    let w = random(&[24], 2).to_dtype(DType::F32)?;
    let run = |threads: usize| -> Result<Vec<Tensor>> {
        pool::run(threads, || {
            let rotation = RotaryTable::new(&positions, &[1.0, 0.1, 0.003], 1.0);
            let (x, w) = (Var::from_tensor(&x)?, Var::from_tensor(&w)?);
            let y = swiglu(
                &rms_norm(&x, &w, 1e-5)?,
                &rope(&x.reshape((tokens, 4, 6))?, &rotation)?.reshape((tokens, 24))?,
            )?;
            let gradients = backward_from::backward(&y, &x.sin()?)?;
            let of = |var: &Var| gradients.get(var).cloned().expect("tracked");
            Ok(vec![y.detach(), of(&x), of(&w)])
        })?
    };
    let one = run(1)?;
    for threads in [2, 5] {
        for (index, (got, wanted)) in run(threads)?.iter().zip(&one).enumerate() {
            let error = relative_l2(got, &wanted.to_dtype(DType::F64)?)?;
            // The weight's gradient is a sum over all tokens, whose order differs.
            let most = if index == 2 { 5e-6 } else { 0.0 };
            assert!(error <= most, "result {index} on {threads} threads differs by {error:e}");
        }
    }
    Ok(())
}

#[test]
fn a_backward_from_a_given_gradient_equals_that_of_the_product() -> Result<()> {
    let (x, dy) = (Var::from_tensor(&random(&[3, 4], 1))?, random(&[3, 4], 2));
    let y = x.sin()?;
    let wanted = (&y * &dy)?.sum_all()?.backward()?;
    let got = backward_from::backward(&y, &dy)?;
    let of = |gradients: &candle_core::backprop::GradStore| gradients.get(&x).cloned().expect("tracked");
    assert!(relative_l2(&of(&got), &of(&wanted))? < 1e-15);
    assert!(backward_from::backward(&y, &dy.t()?).is_err());
    Ok(())
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let message = |result: Result<Tensor>| result.err().map(|error| error.to_string()).unwrap_or_default();
    let [x, w] = [[2, 3], [4, 5]].map(|shape| random(&shape, 1));
    let linear = message(linear(&x, &w, None));
    assert!(linear.contains("[2, 3]") && linear.contains("[4, 5]"), "{linear}");
    let gated = message(gated_mlp::gated_mlp(&x, &w, &w, &w, Activation::Silu));
    assert!(gated.contains("[2, 3]") && gated.contains("[4, 5]"), "{gated}");
}
