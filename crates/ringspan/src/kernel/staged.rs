//! Calls of a backend with tensors of the CPU, which are copied to its device, and the results back.

use super::backend::Backend;
use super::device_array::DeviceArray;
use super::{Data, DeviceTensor, FloatsMut, Inputs, OnlineSoftmax, Saved, Statistics, Sums, Tile, View};
use crate::error::Result;

/// The inputs of a call, on the device.
struct DeviceInputs<'a> {
    given: &'a Inputs<'a>,
    q: DeviceTensor<'a>,
    k: DeviceTensor<'a>,
    v: DeviceTensor<'a>,
    bias: Option<DeviceTensor<'a>>,
}

impl<'a> DeviceInputs<'a> {
    fn new(backend: &dyn Backend, given: &'a Inputs<'a>) -> Result<Self> {
        let to_device = |view| DeviceTensor::on(backend, view);
        let bias = given.bias.map(to_device).transpose()?;
        Ok(Self { given, q: to_device(given.q)?, k: to_device(given.k)?, v: to_device(given.v)?, bias })
    }

    fn inputs(&self) -> Inputs<'_> {
        let Self { given, q, k, v, bias } = self;
        let Inputs { heads, score, .. } = **given;
        Inputs { q: q.view(), k: k.view(), v: v.view(), heads, score, bias: bias.as_ref().map(DeviceTensor::view) }
    }
}

pub(super) fn forward(
    backend: &dyn Backend,
    inputs: &Inputs,
    tiles: &[Tile],
    partial: &mut OnlineSoftmax,
) -> Result<()> {
    let OnlineSoftmax { out, max, sum } = partial;
    let mut all = [&out[..], max, sum].concat();
    let mut state = backend.upload(Data::F32(&all))?;
    backend.forward(&DeviceInputs::new(backend, inputs)?.inputs(), tiles, &mut state)?;
    backend.download(state.data(), bytemuck::cast_slice_mut(&mut all))?;
    let (from_out, statistics) = all.split_at(out.len());
    let (from_max, from_sum) = statistics.split_at(max.len());
    out.copy_from_slice(from_out);
    max.copy_from_slice(from_max);
    sum.copy_from_slice(from_sum);
    Ok(())
}

pub(super) fn delta(backend: &dyn Backend, out: View, d_out: View) -> Result<Vec<f32>> {
    let (out, d_out) = (DeviceTensor::on(backend, out)?, DeviceTensor::on(backend, d_out)?);
    let sums = backend.delta(&out.view(), &d_out.view())?;
    let mut to = vec![0.0; sums.len()];
    backend.download(sums.data(), bytemuck::cast_slice_mut(&mut to))?;
    Ok(to)
}

pub(super) fn backward(
    backend: &dyn Backend,
    inputs: &Inputs,
    tiles: &[Tile],
    saved: &Saved,
    sums: &mut Sums,
) -> Result<()> {
    let given = [&mut sums.dq, &mut sums.dk, &mut sums.dv, &mut sums.d_table, &mut sums.d_bias];
    if given.iter().all(|sum| sum.is_empty() || matches!(sum, FloatsMut::Device(_))) {
        return backend.backward(inputs, tiles, saved, sums);
    }
    let flat = |data: Data<'_>| -> Result<DeviceArray> {
        match data {
            Data::Device(data) => backend.copy(data),
            data => backend.upload(data),
        }
    };
    let inputs = DeviceInputs::new(backend, inputs)?;
    let (max, sum) = (flat(saved.statistics.max)?, flat(saved.statistics.sum)?);
    let (delta, d_out) = (flat(saved.delta)?, DeviceTensor::on(backend, saved.d_out)?);
    let statistics = Statistics { max: Data::Device(max.data()), sum: Data::Device(sum.data()) };
    let saved = Saved { statistics, delta: Data::Device(delta.data()), d_out: d_out.view() };
    let mut copies = given.iter().map(|sum| flat(sum.data())).collect::<Result<Vec<_>>>()?;
    if let [dq, dk, dv, d_table, d_bias] = &mut copies[..] {
        let [dq, dk, dv, d_table, d_bias] = [dq, dk, dv, d_table, d_bias].map(|sum| FloatsMut::Device(sum.all_mut()));
        backend.backward(&inputs.inputs(), tiles, &saved, &mut Sums { dq, dk, dv, d_table, d_bias })?;
    }
    for (sum, copy) in given.into_iter().zip(&copies) {
        if let FloatsMut::Host(sum) = sum {
            backend.download(copy.data(), bytemuck::cast_slice_mut(sum))?;
        }
    }
    Ok(())
}
