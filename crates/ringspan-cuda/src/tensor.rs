//! Tensors as kernels read them: checked addresses, strides, and whether tensor cores can read them.

use crate::cuda::Cuda;
use crate::kernel_params;
use crate::options::TensorCores;
use ringspan::kernel::{Data, View};
use ringspan::{Error, Result};

impl Cuda {
    /// The kernel's view of a tensor.
    pub(crate) fn view(&self, view: &View) -> Result<kernel_params::View> {
        Ok(kernel_params::View::new(view, self.tensor(view)?))
    }

    /// The kernel's view of an optional tensor; null if it is missing.
    pub(crate) fn view_of(&self, view: Option<&View>) -> Result<kernel_params::View> {
        view.map_or(Ok(kernel_params::View::default()), |view| self.view(view))
    }

    /// The GPU's tensor cores, or none if they cannot read these tensors.
    pub(crate) fn tensor_cores(&self, views: &[(&View, &kernel_params::View)]) -> TensorCores {
        let in_eights =
            |(view, at): &(&View, &kernel_params::View)| at.is_in_eights(view.dim, view.data.dtype().width() as u64);
        if views.iter().all(in_eights) { self.gpu.0.tensor_cores } else { TensorCores::None }
    }

    /// The address of a tensor's first element. GPU kernels do not check bounds, so a tensor with rows out of bounds is an
    /// error.
    pub(crate) fn tensor(&self, view: &View) -> Result<u64> {
        let View { tokens, heads, dim, token_stride, head_stride, data, rows, .. } = *view;
        if rows.is_some() {
            return Err(self.wrong(
                "a tensor whose tokens are in a table of rows: kernels of GPUs read only tensors with strides".into(),
            ));
        }
        let last = |count: usize, stride: usize| (count - 1).checked_mul(stride);
        let end = match tokens == 0 || heads == 0 {
            true => Some(0),
            false => last(tokens, token_stride)
                .zip(last(heads, head_stride))
                .and_then(|(token, head)| token.checked_add(head)?.checked_add(dim)),
        };
        if end.is_none_or(|end| end > data.len()) {
            return Err(self.wrong(format!(
                "a tensor [{tokens}, {heads}, {dim}] with strides {token_stride} and {head_stride} leaves its {} elements",
                data.len()
            )));
        }
        self.read_any(data)
    }

    /// Like [`read`](Self::read), for the elements of any tensor; an error if they are in the memory of the CPU.
    pub(crate) fn read_any(&self, data: Data) -> Result<u64> {
        match data {
            Data::Device(data) => self.read(data),
            _ => Err(self.wrong(format!("{} elements are in the memory of the CPU", data.len()))),
        }
    }

    pub(crate) fn wrong(&self, message: String) -> Error {
        Error::Device { device: format!("{:?}", self.gpu), operation: "use a tensor", message }
    }
}
