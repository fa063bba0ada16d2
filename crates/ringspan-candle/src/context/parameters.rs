//! Parameters that every rank holds whole: they are made equal before training, and their gradients are summed in each
//! step.

use super::Context;
use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use ringspan::comm::Buffer;
use ringspan::comm::agree::agree;

impl Context {
    /// Sets parameters to their values on rank 0. All ranks must call this, each with parameters of its own of the same names
    /// and shapes; `VarMap::data` of candle-nn has them.
    ///
    /// # Errors
    /// Ranks with other names, shapes or types: the first one that differs from rank 0; failures of other ranks.
    pub fn broadcast_parameters(&self, parameters: &[(String, Var)]) -> Result<()> {
        let parameters = self.in_common_order(parameters)?;
        let comm = self.group.cp();
        let values = match comm.rank() {
            0 => Some(Buffer::F32(flat(parameters.iter().map(|(_, var)| var.as_tensor()))?)),
            _ => None,
        };
        let values = comm.broadcast(0, values).map_err(candle_core::Error::wrap)?;
        let mut values = values.f32().map_err(candle_core::Error::wrap)?;
        for (_, var) in parameters {
            let (own, rest) = values.split_at(var.elem_count().min(values.len()));
            var.set(&like(own, var)?)?;
            values = rest;
        }
        Ok(())
    }

    /// Sums the gradients of these parameters over the ranks, in rank order and in f32, so that all ranks get the same bits.
    /// A parameter without a gradient on this rank, which may hold no tokens, has the gradient zero. All ranks must call
    /// this, with the same names and shapes.
    ///
    /// If each rank's loss is its part of the sum over all tokens, the results are the gradients of that sum.
    ///
    /// # Errors
    /// Ranks with other names, shapes or types: the first one that differs from rank 0; failures of other ranks.
    pub fn all_reduce_gradients(&self, gradients: &mut GradStore, parameters: &[(String, Var)]) -> Result<()> {
        let parameters = self.in_common_order(parameters)?;
        let mut sums = Vec::new();
        for (_, var) in &parameters {
            match gradients.get(var.as_tensor()) {
                Some(gradient) => sums.extend(flat([gradient])?),
                None => sums.resize(sums.len() + var.elem_count(), 0.0),
            }
        }
        self.group.cp().all_reduce(&mut sums).map_err(candle_core::Error::wrap)?;
        let mut rest = sums.as_slice();
        for (_, var) in parameters {
            let (own, others) = rest.split_at(var.elem_count());
            gradients.insert(var.as_tensor(), like(own, var)?);
            rest = others;
        }
        Ok(())
    }

    /// Sums a number over the ranks, such as the ranks' parts of a loss.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn all_reduce_sum(&self, value: f32) -> Result<f32> {
        let mut sum = [value];
        self.group.cp().all_reduce(&mut sum).map_err(candle_core::Error::wrap)?;
        Ok(sum[0])
    }

    /// The parameters in the order of their names, which is the same on all ranks: a hash map has another on each.
    fn in_common_order<'a>(&self, parameters: &'a [(String, Var)]) -> Result<Vec<&'a (String, Var)>> {
        let mut parameters: Vec<_> = parameters.iter().collect();
        parameters.sort_by(|a, b| a.0.cmp(&b.0));
        let shape = |(name, var): &&(String, Var)| (name.clone(), format!("{:?} {:?}", var.dtype(), var.dims()));
        agree(&**self.group.cp(), &parameters.iter().map(shape).collect::<Vec<_>>())
            .map_err(candle_core::Error::wrap)?;
        Ok(parameters)
    }
}

/// The elements of tensors, one after the other.
fn flat<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<Vec<f32>> {
    let mut elements = Vec::new();
    for tensor in tensors {
        elements.extend(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?);
    }
    Ok(elements)
}

/// Elements as a tensor of the shape, type and device of a parameter.
fn like(elements: &[f32], var: &Var) -> Result<Tensor> {
    Tensor::from_slice(elements, var.shape(), &candle_core::Device::Cpu)?.to_device(var.device())?.to_dtype(var.dtype())
}
