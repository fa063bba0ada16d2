//! The fused layers equal candle's own operations in f64, forward and backward.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use ringspan_candle::loss::{self, IGNORE};
use ringspan_candle::norm::rms_norm;
use ringspan_candle::rope::{Rotation, rope};
use ringspan_candle::swiglu::swiglu;

fn random(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| ((i * 7919 + seed * 104_729) as f64 * 0.377).sin()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("sizes agree")
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

/// Rows of a wider tensor: read through strides.
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
    let rotation = Rotation::new(&positions, &frequencies, 1.0);
    compare(&[random(&[4, 2, 6], 1)], |x| rope(&x[0], &rotation), plain);
}

/// 1100 tokens are more than two chunks; some have no target.
#[test]
fn the_loss_and_its_gradients_equal_their_definition_across_chunks() -> Result<()> {
    let (tokens, width, vocabulary, scale) = (1100, 8, 19, 0.25);
    let targets: Vec<u32> =
        (0..tokens).map(|t| if t % 7 == 3 { IGNORE } else { (t * 5 % vocabulary) as u32 }).collect();
    let (hidden, head) = (random(&[tokens, width], 1), (random(&[vocabulary, width], 2) * 2.0)?);
    let (h, w) = (Var::from_tensor(&hidden)?, Var::from_tensor(&head)?);
    let logits = h.matmul(&w.t()?)?;
    let log_sum = logits.exp()?.sum_keepdim(1)?.log()?;
    let log_p = logits.broadcast_sub(&log_sum)?;
    let picked: Vec<u32> = targets.iter().map(|t| if *t == IGNORE { 0 } else { *t }).collect();
    let picked = log_p.gather(&Tensor::from_vec(picked, (tokens, 1), &Device::Cpu)?, 1)?;
    let valid: Vec<f64> = targets.iter().map(|t| f64::from(u8::from(*t != IGNORE))).collect();
    let picked = (picked * Tensor::from_vec(valid, (tokens, 1), &Device::Cpu)?)?;
    let nll = picked.sum_all()?.neg()?;
    let gradients = (&nll * f64::from(scale))?.backward()?;

    let (hidden, head) = (hidden.to_dtype(DType::F32)?, head.to_dtype(DType::F32)?);
    let got = loss::head_loss(&hidden, &head, &targets, scale)?;
    assert!((got.nll_sum / nll.to_scalar::<f64>()? - 1.0).abs() < 1e-6);
    assert!(relative_l2(&got.d_hidden, gradients.get(&h).expect("tracked"))? < 1e-6);
    assert!(relative_l2(&got.d_head, gradients.get(&w).expect("tracked"))? < 1e-6);
    let log_probs = Tensor::from_vec(loss::log_probs(&hidden, &head, &targets)?, (tokens, 1), &Device::Cpu)?;
    assert!(relative_l2(&log_probs, &picked)? < 1e-6);
    assert!(relative_l2(&loss::logits(&hidden, &head)?, &logits)? < 1e-6);
    Ok(())
}

#[test]
fn no_tokens_cost_nothing_and_bad_targets_are_named() -> Result<()> {
    let (none, head) =
        (Tensor::zeros((0, 4), DType::F32, &Device::Cpu)?, Tensor::ones((9, 4), DType::F32, &Device::Cpu)?);
    let loss = loss::head_loss(&none, &head, &[], 1.0)?;
    assert_eq!((loss.nll_sum, loss.d_hidden.dims()), (0.0, &[0, 4][..]));
    let one = Tensor::ones((1, 4), DType::F32, &Device::Cpu)?;
    let error = loss::head_loss(&one, &head, &[9], 1.0).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("target 9") && error.contains("vocabulary of 9"), "{error}");
    Ok(())
}
