//! Reads a batch of ready tokens from a safetensors file.

use super::{Batch, IGNORE, Segment};
use crate::error::{Error, Result};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::path::Path;

/// Reads `tokens` (i64 or u32, [B, S]) and, where given, `lengths` (i32, `[B]`) as one batch: row b is a document of `lengths[b]`
/// tokens; the rest of the row is padding.
///
/// # Errors
/// [`Error::Data`] for a damaged file, a wrong type or shape, a length above S, a token outside `vocabulary`.
pub fn read_tokens(path: &Path, vocabulary: usize) -> Result<Batch> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let wrong = |problem: String| Error::Data { path: path.into(), problem };
    let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(format!("not a safetensors file: {e}")))?;
    let names = file.names().join(", ");
    let tensor = file.tensor("tokens").map_err(|_| wrong(format!("has no tensor `tokens`; it has: {names}")))?;
    let &[rows, length] = tensor.shape() else {
        return Err(wrong(format!("`tokens` has shape {:?}, expected [B, S]", tensor.shape())));
    };
    let values = integers(&tensor, &[Dtype::I64, Dtype::U32]).map_err(|e| wrong(format!("`tokens` {e}")))?;
    let lengths = match file.tensor("lengths") {
        Err(_) => vec![length as i64; rows],
        Ok(tensor) => {
            if tensor.shape() != [rows] {
                return Err(wrong(format!("`lengths` has shape {:?}, expected [{rows}], one per row", tensor.shape())));
            }
            integers(&tensor, &[Dtype::I32]).map_err(|e| wrong(format!("`lengths` {e}")))?
        }
    };
    let mut batch =
        Batch { rows, length, tokens: vec![0; rows * length], targets: vec![IGNORE; rows * length], segments: vec![] };
    for (row, &len) in lengths.iter().enumerate() {
        let len = usize::try_from(len)
            .ok()
            .filter(|&l| l <= length)
            .ok_or_else(|| wrong(format!("`lengths`[{row}] is {len}, but a row of `tokens` has {length} tokens")))?;
        for column in 0..len {
            let (at, value) = (row * length + column, values[row * length + column]);
            let token = u32::try_from(value).ok().filter(|&t| (t as usize) < vocabulary).ok_or_else(|| {
                wrong(format!(
                    "`tokens`[{row}, {column}] is {value}, but the model has tokens 0 to {}",
                    vocabulary.saturating_sub(1)
                ))
            })?;
            batch.tokens[at] = token;
            if column > 0 {
                batch.targets[at - 1] = token;
            }
        }
        if len > 0 {
            batch.segments.push(Segment { row, start: 0, len });
        }
    }
    if batch.valid_targets() == 0 {
        return Err(wrong(format!("`tokens` [{rows}, {length}] has no token that follows another: nothing to learn")));
    }
    Ok(batch)
}

fn integers(tensor: &TensorView<'_>, allowed: &[Dtype]) -> std::result::Result<Vec<i64>, String> {
    if !allowed.contains(&tensor.dtype()) {
        let names = allowed.iter().map(|d| format!("{d:?}")).collect::<Vec<_>>().join(" or ");
        return Err(format!("is {:?}, expected {names}", tensor.dtype()));
    }
    let data = tensor.data();
    Ok(match tensor.dtype() {
        Dtype::I64 => data.chunks_exact(8).map(bytemuck::pod_read_unaligned::<i64>).collect(),
        Dtype::U32 => data.chunks_exact(4).map(|b| i64::from(bytemuck::pod_read_unaligned::<u32>(b))).collect(),
        _ => data.chunks_exact(4).map(|b| i64::from(bytemuck::pod_read_unaligned::<i32>(b))).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn file(folder: &Path, tensors: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)>) -> PathBuf {
        let path = folder.join("t.safetensors");
        let views: Vec<_> =
            tensors.iter().map(|(n, d, s, b)| ((*n).to_string(), TensorView::new(*d, s.clone(), b).unwrap())).collect();
        safetensors::serialize_to_file(views, None, &path).unwrap();
        path
    }

    fn bytes<T: bytemuck::Pod>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }

    #[test]
    fn rows_end_at_their_lengths_and_padding_is_in_no_segment() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = ("tokens", Dtype::I64, vec![3, 3], bytes(&[1i64, 2, 3, 4, 5, -7, 9, 9, 9]));
        let path = file(folder.path(), vec![tokens, ("lengths", Dtype::I32, vec![3], bytes(&[3i32, 2, 0]))]);
        let batch = read_tokens(&path, 6).unwrap();
        assert_eq!(batch.targets, [2, 3, IGNORE, 5, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]);
        assert_eq!(batch.segments, [Segment { row: 0, start: 0, len: 3 }, Segment { row: 1, start: 0, len: 2 }]);
        assert_eq!(batch.valid_targets(), 3);
        let path = file(folder.path(), vec![("tokens", Dtype::U32, vec![1, 2], bytes(&[1u32, 2]))]);
        assert_eq!(read_tokens(&path, 6).unwrap().tokens, [1, 2]);
    }

    #[test]
    fn each_wrong_file_is_told_what_is_wrong_with_the_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let good = || ("tokens", Dtype::U32, vec![1, 2], bytes(&[1u32, 2]));
        let lengths = |d, s: &[usize], b| ("lengths", d, s.to_vec(), b);
        type Tensors<'a> = Vec<(&'a str, Dtype, Vec<usize>, Vec<u8>)>;
        let cases: Vec<(Tensors<'_>, &str)> = vec![
            (vec![("ids", Dtype::U32, vec![1, 2], bytes(&[1u32, 2]))], "it has: ids"),
            (vec![("tokens", Dtype::U32, vec![2], bytes(&[1u32, 2]))], "shape [2], expected [B, S]"),
            (vec![("tokens", Dtype::F32, vec![1, 2], bytes(&[1f32, 2.]))], "is F32, expected I64 or U32"),
            (
                vec![("tokens", Dtype::U32, vec![1, 2], bytes(&[1u32, 9]))],
                "`tokens`[0, 1] is 9, but the model has tokens 0 to 7",
            ),
            (vec![("tokens", Dtype::I64, vec![1, 2], bytes(&[-1i64, 2]))], "[0, 0] is -1"),
            (vec![good(), lengths(Dtype::I32, &[1], bytes(&[3i32]))], "`lengths`[0] is 3, but a row of `tokens` has 2"),
            (vec![good(), lengths(Dtype::I32, &[2], bytes(&[1i32, 1]))], "shape [2], expected [1]"),
            (vec![good(), lengths(Dtype::I64, &[1], bytes(&[1i64]))], "is I64, expected I32"),
            (vec![good(), lengths(Dtype::I32, &[1], bytes(&[1i32]))], "nothing to learn"),
        ];
        for (tensors, expected) in cases {
            let message = read_tokens(&file(folder.path(), tensors), 8).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("t.safetensors"), "{message}");
        }
        let path = folder.path().join("broken.safetensors");
        std::fs::write(&path, b"not one").unwrap();
        assert!(read_tokens(&path, 8).unwrap_err().to_string().contains("not a safetensors file"));
    }
}
