//! Calls of a GPU kernel with tensors of the CPU, which are copied to the GPU, and the results back.

use super::cuda::{Cuda, GpuArray};
use super::{Data, FloatsMut, Inputs, Partial, Saved, Statistics, Sums, Tile, View};
use crate::error::Result;

/// A tensor on the GPU: the given one, or a copy.
enum Staged<'a> {
    There(View<'a>),
    Copy(View<'a>, GpuArray),
}

impl<'a> Staged<'a> {
    fn new(cuda: &Cuda, view: View<'a>) -> Result<Self> {
        match view.data {
            Data::Gpu(_) => Ok(Self::There(view)),
            data => Ok(Self::Copy(view, cuda.upload(data)?)),
        }
    }

    fn view(&self) -> View<'_> {
        match self {
            Self::There(view) => *view,
            Self::Copy(view, array) => View { data: Data::Gpu(array.data()), ..*view },
        }
    }
}

/// The inputs of a call, on the GPU.
struct StagedInputs<'a> {
    given: &'a Inputs<'a>,
    q: Staged<'a>,
    k: Staged<'a>,
    v: Staged<'a>,
    bias: Option<Staged<'a>>,
}

impl<'a> StagedInputs<'a> {
    fn new(cuda: &Cuda, given: &'a Inputs<'a>) -> Result<Self> {
        let stage = |view| Staged::new(cuda, view);
        let bias = given.bias.map(stage).transpose()?;
        Ok(Self { given, q: stage(given.q)?, k: stage(given.k)?, v: stage(given.v)?, bias })
    }

    fn inputs(&self) -> Inputs<'_> {
        let Self { given, q, k, v, bias } = self;
        let Inputs { heads, score, .. } = **given;
        Inputs { q: q.view(), k: k.view(), v: v.view(), heads, score, bias: bias.as_ref().map(Staged::view) }
    }
}

pub(super) fn forward(cuda: &Cuda, inputs: &Inputs, tiles: &[Tile], partial: &mut Partial) -> Result<()> {
    let Partial { out, max, sum } = partial;
    let mut all = [&out[..], max, sum].concat();
    let mut state = cuda.upload(Data::F32(&all))?;
    cuda.forward(&StagedInputs::new(cuda, inputs)?.inputs(), tiles, &mut state)?;
    cuda.download(state.data(), &mut all)?;
    let (from_out, statistics) = all.split_at(out.len());
    let (from_max, from_sum) = statistics.split_at(max.len());
    out.copy_from_slice(from_out);
    max.copy_from_slice(from_max);
    sum.copy_from_slice(from_sum);
    Ok(())
}

pub(super) fn delta(cuda: &Cuda, out: View, d_out: View) -> Result<Vec<f32>> {
    let (out, d_out) = (Staged::new(cuda, out)?, Staged::new(cuda, d_out)?);
    let sums = cuda.delta(&out.view(), &d_out.view())?;
    let mut to = vec![0.0; sums.len()];
    cuda.download(sums.data(), &mut to)?;
    Ok(to)
}

pub(super) fn backward(cuda: &Cuda, inputs: &Inputs, tiles: &[Tile], saved: &Saved, sums: &mut Sums) -> Result<()> {
    let given = [&mut sums.dq, &mut sums.dk, &mut sums.dv, &mut sums.d_table, &mut sums.d_bias];
    if given.iter().all(|sum| sum.is_empty() || matches!(sum, FloatsMut::Gpu(_))) {
        return cuda.backward(inputs, tiles, saved, sums);
    }
    let flat = |data: Data<'_>| -> Result<GpuArray> {
        match data {
            Data::Gpu(data) => cuda.copied(data),
            data => cuda.upload(data),
        }
    };
    let inputs = StagedInputs::new(cuda, inputs)?;
    let (max, sum) = (flat(saved.statistics.max)?, flat(saved.statistics.sum)?);
    let (delta, d_out) = (flat(saved.delta)?, Staged::new(cuda, saved.d_out)?);
    let statistics = Statistics { max: Data::Gpu(max.data()), sum: Data::Gpu(sum.data()) };
    let saved = Saved { statistics, delta: Data::Gpu(delta.data()), d_out: d_out.view() };
    let mut copies = given.iter().map(|sum| flat(sum.data())).collect::<Result<Vec<_>>>()?;
    if let [dq, dk, dv, d_table, d_bias] = &mut copies[..] {
        let [dq, dk, dv, d_table, d_bias] = [dq, dk, dv, d_table, d_bias].map(|sum| FloatsMut::Gpu(sum.all_mut()));
        cuda.backward(&inputs.inputs(), tiles, &saved, &mut Sums { dq, dk, dv, d_table, d_bias })?;
    }
    for (sum, copy) in given.into_iter().zip(&copies) {
        if let FloatsMut::Host(sum) = sum {
            cuda.download(copy.data(), sum)?;
        }
    }
    Ok(())
}
