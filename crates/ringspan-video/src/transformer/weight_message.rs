//! Weights as the bytes of a message between ranks.
//!
//! Each weight is a header and its values: the type, one byte; the number of dims, one byte; the dims, eight bytes each. Integers are
//! little-endian, and values are as they lie in memory.

use crate::error::{Error, Result};
use bytemuck::{cast_slice, pod_collect_to_vec};
use bytes::{Buf, Bytes};
use candle_core::{DType, Device, Tensor};
use half::bf16;
use ringspan_candle::Weight;
use ringspan_candle::quantized::{Format, QuantizedMatrix};

/// The types of tensors. Those of quantized matrices are ggml's numbers, which are smaller.
const F32: u8 = 254;
const BF16: u8 = 255;

/// Bytes of a weight in a message, of which the values alone are `values`.
pub(super) fn encoded_bytes(dims: usize, values: u64) -> u64 {
    2 + 8 * dims as u64 + values
}

/// Appends a weight to a message.
pub(super) fn encode(weight: &Weight, message: &mut Vec<u8>) -> Result<()> {
    let dims = weight.dims();
    let kind = match weight {
        Weight::Quantized(matrix) => match u8::try_from(matrix.format().ggml()) {
            Ok(number) if number < F32 => number,
            _ => return Err(Error::Input(format!("the number of {} does not fit in a message", matrix.format()))),
        },
        Weight::Dense(tensor) if tensor.dtype() == DType::BF16 => BF16,
        Weight::Dense(_) => F32,
        Weight::Stack(stack) => return Err(Error::Input(format!("{stack:?} is not a weight of a video transformer"))),
    };
    message.extend([kind, dims.len() as u8]);
    dims.iter().for_each(|dim| message.extend((*dim as u64).to_le_bytes()));
    match weight {
        Weight::Quantized(matrix) => message.extend_from_slice(matrix.bytes()),
        _ if kind == BF16 => {
            message.extend_from_slice(cast_slice(&weight.tensor()?.flatten_all()?.to_vec1::<bf16>()?));
        }
        _ => message.extend_from_slice(cast_slice(&weight.tensor()?.flatten_all()?.to_vec1::<f32>()?)),
    }
    Ok(())
}

/// Takes the next weight from a message. Quantized matrices share its bytes.
pub(super) fn decode(message: &mut Bytes) -> Result<Weight> {
    let ends = || Error::Mesh("a weight that ends too early".into());
    let mut header = message.try_get_u16_le().map_err(|_| ends())?.to_le_bytes().into_iter();
    let (kind, count) = (header.next().unwrap_or_default(), header.next().unwrap_or_default());
    let dims = (0..count).map(|_| message.try_get_u64_le().map(|dim| dim as usize));
    let dims = dims.collect::<std::result::Result<Vec<usize>, _>>().map_err(|_| ends())?;
    let elements = dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim)).ok_or_else(ends)?;
    let mut values = |bytes: usize| match bytes <= message.len() {
        true => Ok(message.split_to(bytes)),
        false => Err(ends()),
    };
    match kind {
        F32 => {
            let values = pod_collect_to_vec::<u8, f32>(&values(elements.checked_mul(4).ok_or_else(ends)?)?);
            Ok(Tensor::from_vec(values, dims, &Device::Cpu)?.into())
        }
        BF16 => {
            let values = pod_collect_to_vec::<u8, bf16>(&values(elements.checked_mul(2).ok_or_else(ends)?)?);
            Ok(Tensor::from_vec(values, dims, &Device::Cpu)?.into())
        }
        number => {
            let format = Format::from_ggml(number.into());
            let (Some(format), &[rows, columns]) = (format, &dims[..]) else {
                return Err(Error::Mesh(format!("a weight {dims:?} of the unknown type {number}")));
            };
            let bytes = values(format.bytes(rows, columns)?)?;
            Ok(QuantizedMatrix::new(format, rows, columns, bytes)?.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights() -> Vec<Weight> {
        let numbers = |count: usize| Tensor::arange(0f32, count as f32, &Device::Cpu).expect("a tensor");
        let bytes: Vec<u8> = (0..3 * 34).map(|i| (7 * i) as u8).collect();
        vec![
            numbers(6).reshape((1, 2, 3)).expect("six numbers").into(),
            numbers(5).to_dtype(DType::BF16).expect("a tensor").into(),
            QuantizedMatrix::new(Format::Q8_0, 3, 32, bytes.into()).expect("three blocks").into(),
            numbers(0).into(),
        ]
    }

    fn bits(weight: &Weight) -> Vec<u32> {
        let values = weight.to_tensor().and_then(|x| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>());
        values.expect("numbers").into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn weights_arrive_as_they_were_sent() {
        let mut message = Vec::new();
        weights().iter().for_each(|weight| encode(weight, &mut message).expect("a weight"));
        let mut message = Bytes::from(message);
        for weight in weights() {
            let got = decode(&mut message).expect("the next weight");
            assert_eq!(
                (got.dims(), got.format(), got.computed_in()),
                (weight.dims(), weight.format(), weight.computed_in())
            );
            assert_eq!(bits(&got), bits(&weight));
        }
        assert!(message.is_empty());
    }

    #[test]
    fn messages_that_are_cut_off_or_of_an_unknown_type_are_refused() {
        let mut message = Vec::new();
        weights().iter().for_each(|weight| encode(weight, &mut message).expect("a weight"));
        for length in (0..message.len()).step_by(7) {
            let mut cut = Bytes::copy_from_slice(&message[..length]);
            let error = (0..weights().len()).find_map(|_| decode(&mut cut).err()).expect("a message that is too short");
            assert!(error.to_string().contains("ends too early"), "{length}: {error}");
        }
        let error = decode(&mut Bytes::from_static(&[99, 0])).expect_err("an unknown type");
        assert!(error.to_string().contains("unknown type 99"), "{error}");
    }
}
