//! Sums of two tensors without a graph, computed on the threads of the rank's pool.

use crate::cast::cast;
use crate::number::{Number, with_number};
use crate::pool;
use crate::slices::{elements, elements_mut, elements_of};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor, bail};

/// `x + y`, two tensors of one shape, each f32 or bf16. The sum has the type of x, and is rounded once.
///
/// # Errors
/// Other types and unequal shapes.
pub(crate) fn sum(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if x.shape() != y.shape() {
        bail!("{:?} and {:?} cannot be added: the shapes differ", x.shape(), y.shape());
    }
    if !x.device().is_cpu() {
        return x.detach() + cast(&y.detach(), x.dtype())?;
    }
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    with_number!(x.dtype(), T => {
        let out = with_number!(y.dtype(), U => {
            elements_of(&x, |x: &[T]| elements_of(&y, |y: &[U]| Ok(added(x, y))))?
        });
        Tensor::from_vec(out, x.shape(), x.device())
    })
}

/// Adds y to x in place, two tensors of one shape and type on the CPU; nothing else may refer to the memory of x.
///
/// # Errors
/// Other types and unequal shapes.
pub(crate) fn add_in_place(x: &Tensor, y: &Tensor) -> Result<()> {
    if (x.shape(), x.dtype()) != (y.shape(), y.dtype()) {
        bail!("{:?} and {:?} cannot be added: shapes or types differ", x.shape(), y.shape());
    }
    x.inplace_op2(&y.contiguous()?, &AddInPlace)
}

struct AddInPlace;

impl InplaceOp2 for AddInPlace {
    fn name(&self) -> &'static str {
        "add in place"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, x_at: &Layout, y: &CpuStorage, y_at: &Layout) -> Result<()> {
        with_number!(y.dtype(), T => add(elements_mut::<T>(x, x_at)?, elements::<T>(y, y_at)?));
        Ok(())
    }
}

/// `x + y`, rounded once.
pub(crate) fn added<T: Number, U: Number>(x: &[T], y: &[U]) -> Vec<T> {
    pool::map_copy(x, pool::part(x.len(), 1), |first, sum| add_part(sum, &y[first..first + sum.len()]))
}

/// Adds y to x in place.
fn add<T: Number, U: Number>(x: &mut [T], y: &[U]) {
    let part = pool::part(x.len(), 1);
    pool::map(x.chunks_mut(part).zip(y.chunks(part)).collect(), |(x, y): (&mut [T], &[U])| add_part(x, y));
}

fn add_part<T: Number, U: Number>(x: &mut [T], y: &[U]) {
    pool::vectorized(
        #[inline(always)]
        || x.iter_mut().zip(y).for_each(|(x, y)| *x = T::round_from(x.upcast() + y.upcast())),
    );
}
