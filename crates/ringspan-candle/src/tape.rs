//! A tape of a layer's operations, in place of candle's graph.
//!
//! Candle's graph holds every tensor that an operation read or wrote until the whole backward pass is over, and adds each
//! gradient to fresh zeros. A tape holds what an operation's backward pass reads, lets go of it as soon as that has run, and
//! takes the first gradient of a tensor as it is.
//!
//! While a thread records, operations of this crate are written on its tape, and their outputs are variables for candle: what a
//! model makes of them with candle's own operations is a graph that begins at these outputs. Where the next operation of this
//! crate, or the end of the recording, takes the end of such a graph, the tape remembers to differentiate it by candle. So
//! nothing is lost between the two, and a model is free to use either.
//!
//! Ranks that record the same operations come to them again in the opposite order, so that those that exchange tensors meet.

mod operation;
#[cfg(test)]
mod test;

use crate::cotangent;
use crate::residual::{add_in_place, residual};
use candle_core::op::BackpropOp;
use candle_core::{DType, Result, Shape, Storage, Tensor, TensorId, Var, bail};
pub(crate) use operation::Operation;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// The values that an operation's backward pass reads beside the gradient of its output. Where it reads none, only shape, type and
/// device of a tensor are held for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Neither inputs nor output.
    Nothing,
    /// The inputs.
    Inputs,
    /// The inputs and the output.
    InputsAndOutput,
}

/// The operations of a layer that was computed to be differentiated.
#[derive(Default)]
pub struct Tape {
    entries: Vec<Entry>,
    /// The ends of candle's graphs among the entries.
    graphs: HashSet<TensorId>,
    /// The outputs that are not computed, and the number that each of them is a view of.
    unseen: HashMap<TensorId, TensorId>,
}

enum Entry {
    /// An operation of this crate.
    Operation(Recorded),
    /// The end of a graph of candle's.
    Graph(Tensor),
}

struct Recorded {
    output: TensorId,
    /// The inputs that have gradients.
    inputs: Vec<Option<TensorId>>,
    backward: Backward,
}

/// Gradients of inputs, from the gradient of the output.
type Backward = Box<dyn FnOnce(&Tensor) -> Result<Vec<Option<Tensor>>>>;

thread_local! {
    /// The tape on which this thread records.
    static RECORDING: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// Puts the tape of before back, also when a computation panics.
struct Restored(Option<Tape>);

impl Drop for Restored {
    fn drop(&mut self) {
        RECORDING.set(self.0.take());
    }
}

impl Tape {
    /// What `compute` makes, with the tape of the operations that this thread computed for it on the CPU.
    ///
    /// # Errors
    /// What `compute` fails with.
    pub fn record<E>(
        compute: impl FnOnce() -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(Tensor, Self), E> {
        let before = Restored(RECORDING.replace(Some(Self::default())));
        let output = compute()?;
        let mut tape = RECORDING.take().unwrap_or_default();
        drop(before);
        tape.add_graph(&output);
        Ok((output, tape))
    }

    /// Gradients of `sum(dy * output)` in all variables that the output was made of; of an output that [`record`](Self::record)
    /// returned. What was recorded is let go of on the way.
    ///
    /// # Errors
    /// A gradient of another shape than the output, and what the operations fail with.
    pub fn backward(mut self, output: Tensor, dy: Tensor) -> Result<Gradients> {
        if output.shape() != dy.shape() {
            bail!("a gradient of {:?} for {:?}", dy.shape(), output.shape());
        }
        let mut gradients = Gradients::default();
        gradients.0.insert(output.id(), dy.detach());
        drop((output, dy));
        while let Some(entry) = self.entries.pop() {
            match entry {
                Entry::Operation(recorded) => gradients.through(recorded)?,
                Entry::Graph(end) => gradients.through_graph(&end)?,
            }
        }
        if self.unseen.values().any(|number| gradients.0.contains_key(number)) {
            bail!("a model computes with the output of a layer that was told that only the residual stream takes it");
        }
        Ok(gradients)
    }

    /// Remembers that this tensor is made of others by candle's operations, if it is.
    fn add_graph(&mut self, tensor: &Tensor) {
        if tensor.track_op() && !tensor.is_variable() && self.graphs.insert(tensor.id()) {
            self.entries.push(Entry::Graph(tensor.clone()));
        }
    }
}

/// Computes an operation, and writes it on the tape of this thread if there is one; else candle tracks it.
///
/// # Errors
/// What the operation fails with.
pub(crate) fn apply<const N: usize>(op: impl Operation<N>, inputs: [&Tensor; N], reads: Reads) -> Result<Tensor> {
    // The operation may be made of others, which are not written down.
    let Some(mut tape) = (if can_be_taped(inputs) { RECORDING.take() } else { None }) else {
        return op.apply(inputs);
    };
    inputs.iter().for_each(|input| tape.add_graph(input));
    let restored = Restored(Some(tape));
    let (storage, shape) = op.compute(inputs)?;
    drop(restored);
    let output = Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), true);
    push(op, inputs, &output, reads)?;
    Ok(output)
}

/// The same for an operation whose values nothing looks at: a tape writes it down and does not compute it. Its output, of this
/// shape and type, has no memory, and can only be an input of [`residual`](crate::residual::residual) or
/// the output of the recording.
///
/// # Errors
/// As for [`apply`].
pub(crate) fn apply_unseen<const N: usize>(
    op: impl Operation<N>,
    inputs: [&Tensor; N],
    reads: Reads,
    (shape, dtype): (impl Into<Shape>, DType),
) -> Result<Tensor> {
    if !is_recording() || !can_be_taped(inputs) {
        return apply(op, inputs, reads);
    }
    let zero = Var::from_tensor(&Tensor::zeros((), dtype, inputs[0].device())?)?;
    let output = zero.broadcast_as(shape)?;
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape {
            inputs.iter().for_each(|input| tape.add_graph(input));
            // Candle takes it for the end of a graph.
            tape.graphs.insert(output.id());
            tape.unseen.insert(output.id(), zero.id());
        }
    });
    push(op, inputs, &output, reads)?;
    Ok(output)
}

/// Whether this is the output of [`apply_unseen`] on the tape of this thread.
pub(crate) fn is_unseen(tensor: &Tensor) -> bool {
    RECORDING.with_borrow(|tape| tape.as_ref().is_some_and(|tape| tape.unseen.contains_key(&tensor.id())))
}

/// Whether this thread records.
pub(crate) fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// Whether an operation of these inputs is one that tapes record: on the CPU, with gradients.
fn can_be_taped<const N: usize>(inputs: [&Tensor; N]) -> bool {
    inputs.iter().all(|input| input.device().is_cpu()) && inputs.iter().any(|input| input.track_op())
}

/// Writes an operation on the tape of this thread.
fn push<const N: usize>(op: impl Operation<N>, inputs: [&Tensor; N], output: &Tensor, reads: Reads) -> Result<()> {
    let held = |tensor: &Tensor, is_read: bool| if is_read { Ok(tensor.clone()) } else { stand_in(tensor) };
    let read_inputs =
        inputs.into_iter().map(|input| held(input, reads != Reads::Nothing)).collect::<Result<Vec<_>>>()?;
    let read_output = held(output, reads == Reads::InputsAndOutput)?;
    let recorded = Recorded {
        output: output.id(),
        inputs: inputs.iter().map(|input| input.track_op().then(|| input.id())).collect(),
        backward: Box::new(move |d| op.gradients(&read_inputs, &read_output, d)),
    };
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape {
            tape.entries.push(Entry::Operation(recorded));
        }
    });
    Ok(())
}

/// x in another shape with as many elements, of a contiguous x without a copy. Candle would add its gradient to zeros of x.
///
/// # Errors
/// A shape of another number of elements.
pub(crate) fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let (before, view) = (x.shape().clone(), x.reshape(shape.into())?);
    if view.track_op() && view.id() != x.id() && x.device().is_cpu() {
        RECORDING.with_borrow_mut(|tape| {
            let Some(tape) = tape else { return };
            tape.add_graph(x);
            // The view is the end of a graph of candle's, too, which leads to x: it is not differentiated a second time.
            tape.graphs.insert(view.id());
            let backward: Backward = Box::new(move |d| Ok(vec![Some(d.reshape(before)?)]));
            let recorded = Recorded { output: view.id(), inputs: vec![Some(x.id())], backward };
            tape.entries.push(Entry::Operation(recorded));
        });
    }
    Ok(view)
}

/// One zero, seen as a tensor of the same shape; tracked if the other is.
fn stand_in(tensor: &Tensor) -> Result<Tensor> {
    let zero = Tensor::zeros((), tensor.dtype(), tensor.device())?;
    let zero = if tensor.track_op() { Var::from_tensor(&zero)?.into_inner() } else { zero };
    zero.broadcast_as(tensor.shape())
}

/// Whether two tensors have the same memory.
fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    std::ptr::eq(&*a, &*b)
}

/// Gradients by what they are of.
#[derive(Default)]
pub struct Gradients(HashMap<TensorId, Tensor>);

impl Gradients {
    /// Takes the gradient of a variable out, if the output depends on it.
    pub fn remove(&mut self, variable: &Tensor) -> Option<Tensor> {
        self.0.remove(&variable.id())
    }

    fn through(&mut self, recorded: Recorded) -> Result<()> {
        let Recorded { output, inputs, backward } = recorded;
        let Some(d_output) = self.0.remove(&output) else { return Ok(()) };
        let gradients: Vec<_> = inputs.into_iter().zip(backward(&d_output)?).collect();
        // A sum hands the gradient of its output on to both summands.
        let owned = |gradient: &Tensor| !share_memory(gradient, &d_output) && gradient.is_contiguous();
        let gradients = gradients.into_iter().filter_map(|(input, gradient)| {
            let (input, gradient) = (input?, gradient?.detach());
            let owned = owned(&gradient);
            Some((input, gradient, owned))
        });
        let gradients: Vec<_> = gradients.collect();
        drop(d_output);
        gradients.into_iter().try_for_each(|(input, gradient, owned)| self.add(input, gradient, owned))
    }

    fn through_graph(&mut self, end: &Tensor) -> Result<()> {
        let Some(d_end) = self.0.remove(&end.id()) else { return Ok(()) };
        let of_graph = cotangent::backward(end, &d_end)?;
        drop(d_end);
        for id in of_graph.get_ids() {
            if let Some(gradient) = of_graph.get_id(*id) {
                self.add(*id, gradient.detach(), false)?;
            }
        }
        Ok(())
    }

    /// Adds a gradient to what is there; nobody else has its memory if it is `owned`.
    fn add(&mut self, id: TensorId, gradient: Tensor, owned: bool) -> Result<()> {
        let sum = match self.0.remove(&id) {
            None => gradient,
            Some(before) if owned && before.dtype() == gradient.dtype() => {
                add_in_place(&gradient, &before)?;
                gradient
            }
            Some(before) => residual(&before, &gradient)?,
        };
        self.0.insert(id, sum);
        Ok(())
    }
}
