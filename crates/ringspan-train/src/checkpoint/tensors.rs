//! f32 tensors to and from safetensors, one at a time, so that saving needs no second copy of a model.

use super::{Parameters, storage::Storage};
use crate::error::{Error, Result};
use safetensors::{Dtype, SafeTensors};
use std::{
    collections::BTreeMap,
    io::{BufWriter, Write},
    path::Path,
};

/// Shapes of tensors by name.
pub(crate) type Shapes = BTreeMap<String, Vec<usize>>;

/// Writes the tensors of `shapes` in name order; `values` yields each when its turn comes.
pub(crate) fn write(
    storage: &dyn Storage,
    path: &Path,
    shapes: &Shapes,
    mut values: impl FnMut(&str) -> Result<Vec<f32>>,
) -> Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in shapes {
        let start = end;
        end += shape.iter().product::<usize>() * 4;
        header.insert(name.clone(), serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    // The format wants the data aligned to 8 bytes and allows spaces behind the header.
    header.resize(header.len().next_multiple_of(8), b' ');

    let failed = || Error::io("write", path);
    let mut out = BufWriter::with_capacity(1 << 20, storage.create(path).map_err(failed())?);
    out.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| out.write_all(&header)).map_err(failed())?;
    for (name, shape) in shapes {
        let values = values(name)?;
        let expected: usize = shape.iter().product();
        if values.len() != expected {
            return Err(Error::Checkpoint {
                path: path.into(),
                problem: format!("`{name}` has {} elements, its shape {shape:?} {expected}", values.len()),
            });
        }
        out.write_all(bytemuck::cast_slice(&values)).map_err(failed())?;
    }
    // By hand rather than by drop: an error here is the last chance to hear of a full disk.
    out.flush().map_err(failed())?;
    out.get_mut().sync().map_err(failed())
}

/// Reads all tensors of a file; every one must be f32.
pub(crate) fn read(path: &Path) -> Result<Parameters> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let damaged = |problem: String| Error::Checkpoint { path: path.into(), problem };
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|e| damaged(format!("damaged or cut short ({} bytes on disk): {e}", bytes.len())))?;
    let mut tensors = Parameters::new();
    for (name, view) in file.iter() {
        if view.dtype() != Dtype::F32 {
            return Err(damaged(format!("`{name}` is {:?}, expected F32", view.dtype())));
        }
        let values = view.data().chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        tensors.insert(name.to_string(), (view.shape().to_vec(), values));
    }
    Ok(tensors)
}
