//! Checks the header of a safetensors file against the size of the file, before any tensor is read.
//!
//! The safetensors library adds offsets of tensors without looking for an overflow, and its error for a wrong size does not
//! name the tensor.

use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value};

/// Bytes before the header, which give its length.
const LENGTH: usize = 8;

/// Checks that every tensor lies in the file and is as large as its shape implies. A header that is not JSON is left to the
/// library.
pub(crate) fn check(bytes: &[u8]) -> Result<()> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
        bail!("{} bytes are too few for the {LENGTH} bytes that give the length of the header", bytes.len());
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
    let (header, data) =
        header.with_context(|| format!("a header of {length} bytes is announced, but {} bytes follow", rest.len()))?;
    let Ok(tensors) = serde_json::from_slice::<Map<String, Value>>(header) else { return Ok(()) };
    for (name, value) in tensors {
        let Ok(tensor) = serde_json::from_value::<TensorInfo>(value) else { continue };
        fits(&tensor, data.len()).with_context(|| format!("tensor `{name}` {:?} {:?}", tensor.dtype, tensor.shape))?;
    }
    Ok(())
}

fn fits(tensor: &TensorInfo, data: usize) -> Result<()> {
    let elements = tensor.shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim));
    let bits = elements.and_then(|elements| elements.checked_mul(tensor.dtype.bitsize()));
    let bytes = bits.context("more bits than a number can count")?.div_ceil(8);
    let (start, end) = tensor.data_offsets;
    ensure!(
        start <= end && end <= data && end - start == bytes,
        "needs {bytes} bytes, but its offsets are {start} to {end} in {data} bytes of data"
    );
    Ok(())
}
