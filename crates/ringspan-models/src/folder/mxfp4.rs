//! Matrices in MXFP4 (Open Compute Project, 2023) as files of gpt-oss store them: a parameter has its 4-bit codes in a tensor
//! whose name ends in `_blocks`, and its exponents in one whose name ends in `_scales`.

use super::stored_parameter::StoredParameter;
use crate::error::{Error, Result};
use ringspan_candle::quantized::QuantizedMatrix;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

const CODES: &str = "_blocks";
const EXPONENTS: &str = "_scales";

/// Number of values in a block, and bytes of its codes.
const BLOCK: usize = 32;
const CODE_BYTES: usize = BLOCK / 2;

/// Whether a tensor is one of the two that make up a parameter in MXFP4.
pub(super) fn is_part(name: &str, dtype: Dtype) -> bool {
    dtype == Dtype::U8 && (name.ends_with(CODES) || name.ends_with(EXPONENTS))
}

/// Replaces the two tensors of each parameter by one parameter. Files have a matrix `[out, in]` per expert, and models have
/// `[in, out]`.
///
/// # Errors
/// One tensor without the other, and shapes that do not fit each other.
pub(super) fn joined(mut stored: BTreeMap<String, StoredParameter>) -> Result<BTreeMap<String, StoredParameter>> {
    let names: Vec<String> =
        stored.iter().filter(|(_, of)| of.dtype == Dtype::U8).map(|(name, _)| name.clone()).collect();
    for name in names {
        let Some(codes) = stored.remove(&name) else { continue };
        let refuse = |problem: &str| {
            let problem = format!("tensor {name} {:?} is half of one in MXFP4, and {problem}", codes.shape);
            Err(Error::Format { path: codes.file.clone(), problem })
        };
        let Some(parameter) = name.strip_suffix(CODES) else {
            return refuse("there are no codes (`_blocks`) to its exponents");
        };
        let Some(exponents) = stored.remove(&format!("{parameter}{EXPONENTS}")) else {
            return refuse("there are no exponents (`_scales`) to its codes");
        };
        let (&[experts, outputs, blocks, CODE_BYTES], Dtype::U8) = (&codes.shape[..], exponents.dtype) else {
            return refuse("its shape is not [experts, outputs, blocks, 16]");
        };
        if exponents.shape != [experts, outputs, blocks] {
            return refuse(&format!("exponents {:?} do not fit it", exponents.shape));
        }
        let shape = vec![experts, blocks * BLOCK, outputs];
        stored.insert(parameter.to_owned(), StoredParameter { shape, exponents: Some(Box::new(exponents)), ..codes });
    }
    Ok(stored)
}

/// Some rows of the matrices `[out, in]` of all experts, stacked one below the other, in their stored format.
///
/// # Errors
/// Rows outside the matrices, and failures of the file system.
pub(super) fn rows(
    codes: &StoredParameter,
    exponents: &StoredParameter,
    rows: Range<usize>,
) -> Result<QuantizedMatrix> {
    let &[_, _, blocks] = &exponents.shape[..] else {
        return Err(Error::Format { path: exponents.file.clone(), problem: "exponents of no experts".into() });
    };
    let count = rows.len();
    let codes = bytes(codes, rows.start, blocks * CODE_BYTES, count)?;
    Ok(QuantizedMatrix::from_gpt_oss(count, blocks * BLOCK, &codes, &bytes(exponents, rows.start, blocks, count)?)?)
}

/// The bytes of `rows` rows from row `first` on, each of `len` bytes.
fn bytes(stored: &StoredParameter, first: usize, len: usize, rows: usize) -> Result<Vec<u8>> {
    let io = |source| Error::Io { path: stored.file.clone(), source };
    let mut file = File::open(&stored.file).map_err(io)?;
    file.seek(SeekFrom::Start(stored.start + (first * len) as u64)).map_err(io)?;
    let mut bytes = vec![0; rows * len];
    file.read_exact(&mut bytes).map_err(io)?;
    Ok(bytes)
}
