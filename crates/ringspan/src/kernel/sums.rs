//! Operations on f32 buffers besides attention: zeros, addition, transposition.

use super::device::Device;
use super::{Data, Floats, FloatsMut, Kernel, RowTarget};
use crate::error::Result;

impl Kernel {
    /// A buffer of zeros on this kernel's device.
    pub(crate) fn zeros(&self, len: usize) -> Result<Floats> {
        match &self.0 {
            Device::Cpu(_) => Ok(Floats::Host(vec![0.0; len])),
            Device::Backend(backend) => Ok(Floats::Device(backend.zeros(len)?)),
        }
    }

    /// Adds consecutive f32 rows to rows of a sum.
    ///
    /// # Panics
    /// If the sum is too short, or `values` has another number of elements than the rows.
    pub(crate) fn add(&self, sum: FloatsMut, place: &RowTarget, values: Data) -> Result<()> {
        assert!(
            place.end() <= sum.len() && place.len() == values.len(),
            "{place:?} of {} and {}",
            sum.len(),
            values.len()
        );
        match (sum, values) {
            (FloatsMut::Host(sum), Data::F32(values)) => {
                let mut values = values;
                for rows in place.rows {
                    // Rows without a gap are added as one.
                    let (runs, width) = match place.stride == place.width {
                        true => (rows.start..rows.start + 1, rows.len() * place.width),
                        false => (rows.clone(), place.width),
                    };
                    for row in runs {
                        let (these, later) = values.split_at(width);
                        let at = place.offset + row * place.stride;
                        sum[at..at + width].iter_mut().zip(these).for_each(|(sum, x)| *sum += x);
                        values = later;
                    }
                }
                Ok(())
            }
            (FloatsMut::Device(sum), Data::Device(values)) if values.dtype() == super::DType::F32 => {
                self.on_device()?.add(sum, place, values)
            }
            (_, values) => Err(self.wrong_device_error(values)),
        }
    }

    /// Adds all elements of `values` to those of `sum`.
    pub(crate) fn add_all(&self, sum: FloatsMut, values: Data) -> Result<()> {
        let len = sum.len();
        self.add(
            sum,
            &RowTarget { rows: std::slice::from_ref(&(0..len.min(1))), offset: 0, stride: len, width: len },
            values,
        )
    }

    /// Transposes an f32 matrix from `[rows, columns]` to `[columns, rows]`.
    pub(crate) fn transpose(&self, values: Data, rows: usize, columns: usize) -> Result<Floats> {
        assert_eq!(values.len(), rows * columns, "elements of a matrix");
        match values {
            Data::F32(values) => {
                let mut out = Vec::with_capacity(values.len());
                for column in 0..columns {
                    out.extend((0..rows).map(|row| values[row * columns + column]));
                }
                Ok(Floats::Host(out))
            }
            Data::Device(values) => Ok(Floats::Device(self.on_device()?.transpose(values, rows, columns)?)),
            _ => Err(self.wrong_device_error(values)),
        }
    }
}
