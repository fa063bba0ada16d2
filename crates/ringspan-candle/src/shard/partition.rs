//! The part of a parameter that a rank computes with.

use super::rank::ReplicaGroup;
use std::borrow::Cow;
use std::ops::Range;

/// The part of a parameter that a rank computes with, as Megatron calls it: rows or columns of a matrix with tensor parallelism,
/// some experts with expert parallelism, otherwise the whole parameter. FSDP cuts it further, into shards. It is a rectangle of
/// a matrix or a range of a vector; a tensor of more dims is viewed as a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The name of the parameter.
    pub name: String,
    /// The shape of the whole parameter.
    pub whole: Vec<usize>,
    /// The dim at which columns begin: the parameter is viewed as a matrix, whose rows are the dims before this one and whose
    /// columns are this dim and those after it.
    pub dim: usize,
    /// The range of rows of the matrix, or of elements of a vector.
    pub rows: Range<usize>,
    /// The range of columns of the matrix; one column for a vector.
    pub columns: Range<usize>,
    /// The first row of this partition in the rank's tensor, if that concatenates several partitions.
    pub stacked_at: Option<usize>,
    /// The ranks that hold the same partition.
    pub replicas: ReplicaGroup,
}

impl Partition {
    /// The shape of the partition.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.whole.clone();
        let in_row = self.whole[1..self.dim].iter().product::<usize>().max(1);
        shape[0] = self.rows.len() / in_row;
        if let [_, trailing @ ..] = &self.whole[self.dim..] {
            shape[self.dim] = self.columns.len() / trailing.iter().product::<usize>().max(1);
        }
        shape
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A key that is different for each partition of a parameter.
    pub fn key(&self) -> Cow<'_, str> {
        match self.stacked_at {
            None => Cow::Borrowed(&self.name),
            Some(row) => Cow::Owned(format!("{} from row {row}", self.name)),
        }
    }

    /// The number of columns of the whole parameter, viewed as a matrix.
    pub fn width(&self) -> usize {
        self.whole[self.dim..].iter().product()
    }
}
