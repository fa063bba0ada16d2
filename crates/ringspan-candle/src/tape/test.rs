use super::*;
use crate::linear::linear;
use crate::norm::rms_norm;
use crate::residual::{residual, residual_unused};
use candle_core::{CpuStorage, CustomOp1, Device, Layout};
use std::sync::{Arc, Mutex, Weak};

fn wave(shape: &[usize], pace: f32) -> Result<Tensor> {
    let values = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * pace).sin()).collect();
    Tensor::from_vec::<_, f32>(values, shape, &Device::Cpu)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// Alternates operations of this crate with candle's; x is read three times, and a sum passes its gradient on twice.
fn mixed([x, weight, factor]: [&Tensor; 3]) -> Result<Tensor> {
    let (tokens, width) = x.dims2()?;
    let normed = rms_norm(x, factor, 1e-5)?;
    let made = reshape(&linear(&normed, weight, None)?, (tokens, 2, width / 2))?;
    let made = reshape(&(made * 0.5)?, (tokens, width))?;
    let sum = residual(x, &made)?;
    let halves = [sum.narrow(1, 0, width / 2)?, sum.narrow(1, width / 2, width / 2)?];
    let turned = Tensor::cat(&[&halves[1], &halves[0]], 1)?;
    let again = residual(&linear(&turned, weight, None)?, &sum)?;
    residual(&again, &x.tanh()?)
}

#[test]
fn gradients_are_those_of_candles_graph() -> Result<()> {
    for tokens in [0, 1, 5] {
        let variables = [wave(&[tokens, 6], 0.7)?, wave(&[6, 6], 1.3)?, wave(&[6], 0.4)?]
            .map(|tensor| Var::from_tensor(&tensor).map(Var::into_inner));
        let [x, weight, factor] = variables;
        let inputs = [&x?, &weight?, &factor?];
        let dy = wave(&[tokens, 6], 0.9)?;
        let plain = mixed(inputs)?;
        let wanted = backward_from::backward(&plain, &dy)?;
        let mut recorded = vec![];
        for (taped, tape) in [Tape::record(|| mixed(inputs))?, Tape::record_without_norms(|| mixed(inputs))?] {
            assert_eq!(numbers(&taped)?, numbers(&plain)?);
            let mut gradients = tape.backward(taped, dy.clone())?;
            recorded.push(inputs.map(|variable| gradients.remove(variable)));
        }
        let [held, again] = <[_; 2]>::try_from(recorded).expect("two recordings");
        for (held, again) in held.iter().zip(&again) {
            let bits = |gradient: &Option<Tensor>| gradient.as_ref().map(numbers).transpose();
            assert_eq!(bits(held)?, bits(again)?, "a norm that is computed again has the same bits");
        }
        for ((index, variable), got) in inputs.into_iter().enumerate().zip(held) {
            let got = got.map_or_else(|| variable.zeros_like(), Ok)?;
            let wanted = wanted.get(variable).map_or_else(|| variable.zeros_like(), |it| Ok(it.clone()))?;
            for (got, wanted) in numbers(&got)?.into_iter().zip(numbers(&wanted)?) {
                assert!((got - wanted).abs() <= 1e-5 * wanted.abs().max(1.0), "{index} of {tokens}: {got}, {wanted}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_tape_adds_to_the_gradients_of_another() -> Result<()> {
    let [x, weight] = [wave(&[3, 4], 0.7)?, wave(&[4, 4], 1.3)?].map(|it| Var::from_tensor(&it).map(Var::into_inner));
    let (x, weight) = (x?, weight?);
    let dy = wave(&[3, 4], 0.9)?;
    let layer = || linear(&x, &weight, None);
    let (output, tape) = Tape::record(layer)?;
    let mut once = tape.backward(output, dy.clone())?;
    let mut twice = Gradients::default();
    for _ in 0..2 {
        let (output, tape) = Tape::record(layer)?;
        twice = tape.backward_from(twice, output, dy.clone())?;
    }
    for variable in [&x, &weight] {
        let (once, twice) = (once.remove(variable).expect("a gradient"), twice.remove(variable).expect("a gradient"));
        assert_eq!(numbers(&(once * 2.0)?)?, numbers(&twice)?);
    }
    Ok(())
}

#[test]
fn an_output_without_values_can_be_reshaped() -> Result<()> {
    let [x, weight] = [wave(&[3, 4], 0.7)?, wave(&[4, 4], 1.3)?].map(|it| Var::from_tensor(&it).map(Var::into_inner));
    let (x, weight) = (x?, weight?);
    let dy = wave(&[3, 2, 2], 0.9)?;
    let wanted = backward_from::backward(&linear(&x, &weight, None)?.reshape((3, 2, 2))?, &dy)?;
    let (output, tape) = Tape::record(|| {
        let sum = residual_unused(&x, &linear(&x, &weight, None)?)?;
        reshape(&sum, (3, 2, 2))
    })?;
    let mut got = tape.backward(output, dy.clone())?;
    let wanted = (wanted.get(&x).expect("a gradient") + dy.reshape((3, 4))?)?;
    for (got, wanted) in numbers(&got.remove(&x).expect("a gradient"))?.into_iter().zip(numbers(&wanted)?) {
        assert!((got - wanted).abs() <= 1e-6, "{got}, {wanted}");
    }
    let refused = Tape::record(|| reshape(&residual_unused(&x, &linear(&x, &weight, None)?)?, (3, 5)));
    assert!(refused.is_err_and(|error| error.to_string().contains("reshape")));
    Ok(())
}

/// The identity, which notes when its backward pass runs, and how many operations are still held then.
struct RecordsBackward {
    number: usize,
    held: Arc<()>,
    all: Arc<Mutex<Vec<Weak<()>>>>,
    ran: Arc<Mutex<Vec<(usize, usize)>>>,
}

impl CustomOp1 for RecordsBackward {
    fn name(&self) -> &'static str {
        "noted"
    }

    fn cpu_fwd(&self, x: &CpuStorage, at: &Layout) -> Result<(CpuStorage, Shape)> {
        self.all.lock().expect("no panic").push(Arc::downgrade(&self.held));
        Ok((CpuStorage::F32(crate::slices::cpu(x, at)?.to_vec()), at.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        let held = self.all.lock().expect("no panic").iter().filter(|op| op.strong_count() > 0).count();
        self.ran.lock().expect("no panic").push((self.number, held));
        Ok(Some(d.clone()))
    }
}

#[test]
fn operations_run_backward_in_reverse_order_and_are_freed_on_the_way() -> Result<()> {
    let x = Var::from_tensor(&wave(&[3], 0.3)?)?;
    let (all, ran) = (Arc::default(), Arc::<Mutex<Vec<_>>>::default());
    let noted = |number, x: &Tensor| {
        let op = RecordsBackward { number, held: Arc::default(), all: Arc::clone(&all), ran: ran.clone() };
        apply(op, [x], Reads::Inputs)
    };
    let (output, tape) = Tape::record(|| {
        // Two branches, which candle might differentiate in either order.
        let (a, b) = (noted(0, &x)?, noted(1, &x)?);
        let a = noted(2, &a.sqr()?)?;
        residual(&noted(3, &b)?, &a)
    })?;
    let mut gradients = tape.backward(output, Tensor::ones(3, DType::F32, &Device::Cpu)?)?;
    assert_eq!(*ran.lock().expect("no panic"), [(3, 4), (2, 3), (1, 2), (0, 1)]);
    let got = gradients.remove(&x).expect("a gradient");
    let wanted: Vec<f32> = numbers(&x)?.into_iter().map(|x| 1.0 + 2.0 * x).collect();
    assert_eq!(numbers(&got)?, wanted);
    Ok(())
}

/// A sum passes one gradient on to both summands, so adding to one in place would change the other.
#[test]
fn gradients_that_share_memory_are_not_added_to_in_place() -> Result<()> {
    let x = Var::from_tensor(&wave(&[4], 0.3)?)?;
    let y = Var::from_tensor(&wave(&[4], 0.5)?)?;
    let (output, tape) = Tape::record(|| residual(&residual(&x, &y)?, &residual(&x, &x)?))?;
    let mut gradients = tape.backward(output, Tensor::ones(4, DType::F32, &Device::Cpu)?)?;
    let mut of = |variable: &Tensor| numbers(&gradients.remove(variable).expect("a gradient"));
    assert_eq!((of(&x)?, of(&y)?), (vec![3.0; 4], vec![1.0; 4]));
    Ok(())
}

#[test]
fn operations_without_gradients_are_not_recorded() -> Result<()> {
    let (x, factor) = (wave(&[2, 3], 0.3)?, wave(&[3], 0.4)?);
    let (output, tape) = Tape::record(|| rms_norm(&x, &factor, 1e-5))?;
    assert!(tape.entries.is_empty() && !output.track_op());
    Ok(())
}

#[test]
fn a_recording_that_fails_leaves_the_one_around_it_as_it_was() -> Result<()> {
    let x = Var::from_tensor(&wave(&[2, 3], 0.3)?)?;
    let (output, tape) = Tape::record(|| {
        let sum = residual(&x, &x)?;
        let inner = Tape::record(|| residual(&sum, &x.narrow(0, 0, 1)?));
        assert!(inner.is_err(), "the shapes differ");
        residual(&sum, &x)
    })?;
    assert_eq!(tape.entries.len(), 2);
    let mut gradients = tape.backward(output, Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?;
    assert_eq!(numbers(&gradients.remove(&x).expect("a gradient"))?, vec![3.0; 6]);
    assert!(RECORDING.take().is_none());
    Ok(())
}

/// The gradients equal those of a computed sum, and the output takes the memory of one number.
#[test]
fn unused_sums_are_not_computed() -> Result<()> {
    let [x, y] = [0.3, 0.5].map(|pace| wave(&[2, 3], pace).and_then(|tensor| Var::from_tensor(&tensor)));
    let (x, y) = (x?, y?);
    let noted = || RecordsBackward { number: 0, held: Arc::default(), all: Arc::default(), ran: Arc::default() };
    let unused = |y: &Tensor| apply_unused(noted(), [y], Reads::Nothing, ((2, 3), y.dtype()));
    let (output, tape) = Tape::record(|| residual(&x.sqr()?, &unused(&y)?))?;
    assert_eq!((output.dims(), output.stride()), (&[2, 3][..], &[0, 0][..]));
    let mut gradients = tape.backward(output, Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?;
    let wanted: Vec<f32> = numbers(&x)?.into_iter().map(|x| 2.0 * x).collect();
    assert_eq!(numbers(&gradients.remove(&x).expect("a gradient"))?, wanted);
    assert_eq!(numbers(&gradients.remove(&y).expect("a gradient"))?, vec![1.0; 6]);

    let (output, tape) = Tape::record(|| unused(&y)? * 2.0)?;
    let refused = tape.backward(output, Tensor::ones((2, 3), DType::F32, &Device::Cpu)?);
    assert!(refused.is_err_and(|error| error.to_string().contains("residual stream")));
    // Without a tape, the sum is computed.
    assert_eq!(numbers(&unused(&y)?)?, numbers(&y)?);
    Ok(())
}
