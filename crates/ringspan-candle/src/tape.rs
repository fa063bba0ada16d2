//! A tape: the recorded operations of one layer, from which gradients are computed in place of candle's autograd graph.
//!
//! Candle's graph holds every tensor that an operation read or wrote until the whole backward pass is over, and adds each
//! gradient to fresh zeros. A tape holds only what each operation's backward pass reads, frees it as soon as that backward
//! pass has run, and uses the first gradient of a tensor without a copy.
//!
//! While a thread records, operations of this crate are appended to its tape, and their outputs are leaf variables for
//! candle. What a model computes from them with candle's own operations is a candle graph that begins at these outputs. Where
//! an operation of this crate takes the end of such a graph as its input, or the recording ends with one, the tape adds an
//! entry by which candle differentiates that graph. So no gradient is lost between the two, and a model is free to use
//! either.
//!
//! The backward pass runs the recorded operations in reverse order. Ranks that recorded the same operations therefore meet in
//! the same collectives, in the same order.

mod operation;
mod recomputed;
#[cfg(test)]
mod test;

use crate::backward_from;
use crate::sum::{add_in_place, sum};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, TensorId, Var, bail};
pub(crate) use operation::Operation;
use recomputed::{Recomputed, SavedValue};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// The values that an operation's backward pass reads besides the gradient of its output. For a value that is not read, the
/// tape holds a tensor of the same shape, type and device without its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    /// The backward pass reads neither inputs nor output.
    Nothing,
    /// The backward pass reads the inputs.
    Inputs,
    /// The backward pass reads the inputs and the output.
    InputsAndOutput,
}

/// The recorded operations of one layer that is to be differentiated.
#[derive(Default)]
pub struct Tape {
    entries: Vec<TapeEntry>,
    /// Tensors at the end of a candle graph that the entries cover already, so that none is differentiated twice.
    graphs: HashSet<TensorId>,
    /// Outputs of [`apply_unused`], which have no values, each mapped to the scalar that it is a broadcast view of.
    unused: HashMap<TensorId, TensorId>,
    /// The outputs of [`apply_recomputable`] that entries hold without their memory; `None` if entries hold all values.
    recomputed: Option<HashMap<TensorId, Rc<Recomputed>>>,
}

enum TapeEntry {
    /// An operation of this crate.
    Operation(Recorded),
    /// The last tensor of a graph of candle's operations.
    Graph(Tensor),
}

struct Recorded {
    output: TensorId,
    /// Tensors that receive a gradient; `None` for an input that needs none.
    inputs: Vec<Option<TensorId>>,
    backward: Backward,
}

/// Computes the gradients of the inputs from the gradient of the output.
type Backward = Box<dyn FnOnce(&Tensor) -> Result<Vec<Option<Tensor>>>>;

thread_local! {
    /// The tape on which this thread records, if it records.
    static RECORDING: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// Restores the tape that was active before a nested recording, also when a computation panics.
struct Restored(Option<Tape>);

impl Drop for Restored {
    fn drop(&mut self) {
        RECORDING.set(self.0.take());
    }
}

impl Tape {
    /// Runs `compute` and returns its output with the tape of the operations that this thread computed for it on the CPU.
    ///
    /// # Errors
    /// Errors of `compute`.
    pub fn record<E>(
        compute: impl FnOnce() -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(Tensor, Self), E> {
        Self::default().recording(compute)
    }

    /// Like [`record`](Self::record), but the tape does not hold the outputs of norms: where a backward pass reads one, it is
    /// computed again.
    ///
    /// # Errors
    /// Errors of `compute`.
    pub fn record_without_norms<E>(
        compute: impl FnOnce() -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(Tensor, Self), E> {
        Self { recomputed: Some(HashMap::new()), ..Self::default() }.recording(compute)
    }

    fn recording<E>(
        self,
        compute: impl FnOnce() -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(Tensor, Self), E> {
        let before = Restored(RECORDING.replace(Some(self)));
        let output = compute()?;
        let mut tape = RECORDING.take().unwrap_or_default();
        drop(before);
        tape.add_graph(&output);
        // From here on only the entries refer to the recomputed outputs, so the last of them frees it.
        tape.recomputed = None;
        Ok((output, tape))
    }

    /// Gradients of `sum(dy * output)` in all variables from which `output` was computed; `output` is the tensor that
    /// [`record`](Self::record) returned with this tape. Each entry is freed as soon as it has been differentiated.
    ///
    /// # Errors
    /// A `dy` of another shape than the output, a model that read the values of an output that was not computed, and what the
    /// operations fail with.
    pub fn backward(self, output: Tensor, dy: Tensor) -> Result<Gradients> {
        self.backward_from(Gradients::default(), output, dy)
    }

    /// Like [`backward`](Self::backward), and adds the gradients to those of other tapes that recorded the same variables.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward).
    pub fn backward_from(mut self, mut gradients: Gradients, output: Tensor, dy: Tensor) -> Result<Gradients> {
        if output.shape() != dy.shape() {
            bail!("a gradient of {:?} for {:?}", dy.shape(), output.shape());
        }
        gradients.0.insert(output.id(), dy.detach());
        drop((output, dy));
        while let Some(entry) = self.entries.pop() {
            match entry {
                TapeEntry::Operation(recorded) => gradients.through(recorded)?,
                TapeEntry::Graph(end) => gradients.through_graph(&end)?,
            }
        }
        if self.unused.values().any(|number| gradients.0.contains_key(number)) {
            bail!("a model computes with the output of a layer that was told that only the residual stream takes it");
        }
        Ok(gradients)
    }

    /// Adds an entry for the candle graph that ends in this tensor, unless the tensor is a leaf or has an entry already.
    fn add_graph(&mut self, tensor: &Tensor) {
        if tensor.track_op() && !tensor.is_variable() && self.graphs.insert(tensor.id()) {
            self.entries.push(TapeEntry::Graph(tensor.clone()));
        }
    }
}

/// Computes an operation and records it on the tape of this thread; without a tape, or for inputs that tapes do not record,
/// candle tracks it.
///
/// # Errors
/// Errors of the operation.
pub(crate) fn apply<const N: usize>(op: impl Operation<N>, inputs: [&Tensor; N], reads: Reads) -> Result<Tensor> {
    // The tape is taken out while the operation computes, so that operations it is made of are not recorded a second time.
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

/// Like [`apply`], for an operation that costs little and is computed again where a backward pass reads its output, if the
/// tape is one of [`Tape::record_without_norms`]. Its own backward pass must read its inputs.
///
/// # Errors
/// As for [`apply`].
pub(crate) fn apply_recomputable<const N: usize>(
    op: impl Operation<N> + Clone,
    inputs: [&Tensor; N],
    reads: Reads,
) -> Result<Tensor> {
    let output = apply(op.clone(), inputs, reads)?;
    RECORDING.with_borrow_mut(|tape| {
        if let Some(recomputed) = tape.as_mut().and_then(|tape| tape.recomputed.as_mut())
            && can_be_taped(inputs)
        {
            recomputed.insert(output.id(), Rc::new(Recomputed::new(op, inputs)));
        }
    });
    Ok(output)
}

/// Like [`apply`], for an operation whose output values nothing reads: while a tape records, the operation is recorded and
/// not computed. Its output, of this shape and type, has no memory: it can only be the output of the recording, or an input of
/// operations that check [`is_unused`] ([`residual`](crate::residual::residual), [`reshape`], reduce-scatter).
///
/// # Errors
/// As for [`apply`].
pub(crate) fn apply_unused<const N: usize>(
    op: impl Operation<N>,
    inputs: [&Tensor; N],
    reads: Reads,
    (shape, dtype): (impl Into<Shape>, DType),
) -> Result<Tensor> {
    if !is_recording() || !can_be_taped(inputs) {
        return apply(op, inputs, reads);
    }
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape {
            inputs.iter().for_each(|input| tape.add_graph(input));
        }
    });
    let output = unused_output(shape.into(), dtype)?;
    push(op, inputs, &output, reads)?;
    Ok(output)
}

/// The output of an operation that is not computed, which is a tensor without memory of its own.
fn unused_output(shape: Shape, dtype: DType) -> Result<Tensor> {
    let zero = Var::from_tensor(&Tensor::zeros((), dtype, &Device::Cpu)?)?;
    let output = zero.broadcast_as(shape)?;
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape {
            // Candle takes the broadcast for a graph of its own, which must not be differentiated.
            tape.graphs.insert(output.id());
            tape.unused.insert(output.id(), zero.id());
        }
    });
    Ok(output)
}

/// Whether this tensor is an output of [`apply_unused`] on the tape of this thread, so that its values must not be read.
pub(crate) fn is_unused(tensor: &Tensor) -> bool {
    RECORDING.with_borrow(|tape| tape.as_ref().is_some_and(|tape| tape.unused.contains_key(&tensor.id())))
}

/// Whether a tape records on this thread.
pub(crate) fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// Whether tapes record an operation of these inputs: all are on the CPU, and at least one needs a gradient.
fn can_be_taped<const N: usize>(inputs: [&Tensor; N]) -> bool {
    inputs.iter().all(|input| input.device().is_cpu()) && inputs.iter().any(|input| input.track_op())
}

/// Appends an operation to the tape of this thread.
fn push<const N: usize>(op: impl Operation<N>, inputs: [&Tensor; N], output: &Tensor, reads: Reads) -> Result<()> {
    let held = |tensor: &Tensor, is_read: bool| {
        let recomputed = RECORDING.with_borrow(|tape| tape.as_ref()?.recomputed.as_ref()?.get(&tensor.id()).cloned());
        Ok::<_, candle_core::Error>(match recomputed {
            _ if !is_read => SavedValue::Tensor(stand_in(tensor)?),
            Some(recomputed) => SavedValue::Recomputed(recomputed),
            None => SavedValue::Tensor(tensor.clone()),
        })
    };
    let read_inputs =
        inputs.into_iter().map(|input| held(input, reads != Reads::Nothing)).collect::<Result<Vec<_>>>()?;
    let read_output = held(output, reads == Reads::InputsAndOutput)?;
    let recorded = Recorded {
        output: output.id(),
        inputs: inputs.iter().map(|input| input.track_op().then(|| input.id())).collect(),
        backward: Box::new(move |d| {
            let read_inputs = read_inputs.into_iter().map(SavedValue::tensor).collect::<Result<Vec<_>>>()?;
            op.gradients(&read_inputs, &read_output.tensor()?, d)
        }),
    };
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape {
            tape.entries.push(TapeEntry::Operation(recorded));
        }
    });
    Ok(())
}

/// Reshapes x to as many elements, without a copy if x is contiguous. It is recorded on the tape because candle's own reshape
/// would add its gradient to zeros of the size of x.
///
/// # Errors
/// A shape of another number of elements.
pub(crate) fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let before = x.shape().clone();
    if is_unused(x) {
        let view = unused_output(shape.into(), x.dtype())?;
        if view.elem_count() != before.elem_count() {
            bail!("{before:?} cannot be reshaped to {:?}", view.shape());
        }
        let backward: Backward = Box::new(move |d| Ok(vec![Some(d.reshape(before)?)]));
        let recorded = Recorded { output: view.id(), inputs: vec![Some(x.id())], backward };
        RECORDING.with_borrow_mut(|tape| {
            if let Some(tape) = tape {
                tape.entries.push(TapeEntry::Operation(recorded));
            }
        });
        return Ok(view);
    }
    let view = x.reshape(shape.into())?;
    if view.track_op() && view.id() != x.id() && x.device().is_cpu() {
        RECORDING.with_borrow_mut(|tape| {
            let Some(tape) = tape else { return };
            tape.add_graph(x);
            // To candle the view ends a graph that leads to x; it is marked so that this graph is not differentiated a second
            // time.
            tape.graphs.insert(view.id());
            let backward: Backward = Box::new(move |d| Ok(vec![Some(d.reshape(before)?)]));
            let recorded = Recorded { output: view.id(), inputs: vec![Some(x.id())], backward };
            tape.entries.push(TapeEntry::Operation(recorded));
        });
    }
    Ok(view)
}

/// A tensor of the same shape, type and device that takes the memory of one element; candle tracks it if it tracks `tensor`.
fn stand_in(tensor: &Tensor) -> Result<Tensor> {
    let zero = Tensor::zeros((), tensor.dtype(), tensor.device())?;
    let zero = if tensor.track_op() { Var::from_tensor(&zero)?.into_inner() } else { zero };
    zero.broadcast_as(tensor.shape())
}

/// Whether two tensors are backed by the same memory.
fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    std::ptr::eq(&*a, &*b)
}

/// Gradients by the id of the tensor that each belongs to.
#[derive(Default)]
pub struct Gradients(HashMap<TensorId, Tensor>);

impl Gradients {
    /// Removes and returns the gradient of a variable; `None` if the output does not depend on it.
    pub fn remove(&mut self, variable: &Tensor) -> Option<Tensor> {
        self.0.remove(&variable.id())
    }

    fn through(&mut self, recorded: Recorded) -> Result<()> {
        let Recorded { output, inputs, backward } = recorded;
        let Some(d_output) = self.0.remove(&output) else { return Ok(()) };
        let gradients: Vec<_> = inputs.into_iter().zip(backward(&d_output)?).collect();
        // A sum passes the gradient of its output on to both summands, so the three may share memory that must not be added
        // to in place.
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
        let of_graph = backward_from::backward(end, &d_end)?;
        drop(d_end);
        for id in of_graph.get_ids() {
            if let Some(gradient) = of_graph.get_id(*id) {
                self.add(*id, gradient.detach(), false)?;
            }
        }
        Ok(())
    }

    /// Adds a gradient to the one that this tensor has already; `owned` says that nothing else refers to its memory, so it
    /// may be overwritten.
    fn add(&mut self, id: TensorId, gradient: Tensor, owned: bool) -> Result<()> {
        let sum = match self.0.remove(&id) {
            None => gradient,
            Some(before) if owned && before.dtype() == gradient.dtype() => {
                add_in_place(&gradient, &before)?;
                gradient
            }
            Some(before) => sum(&before, &gradient)?,
        };
        self.0.insert(id, sum);
        Ok(())
    }
}
