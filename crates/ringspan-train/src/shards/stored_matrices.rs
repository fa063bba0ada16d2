//! Frozen matrices that stay as their file stores them: shards of their bytes.

use super::ShardSlice;
use crate::error::{Error, Result};
use bytes::Bytes;
use ringspan::comm::Buffer;
use ringspan_candle::quantized::{Format, QuantizedMatrix, QuantizedStack};
use ringspan_candle::{Partition, Weight};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// The formats of the matrices that stay as they are stored, by parameter name.
pub(crate) type StoredFormats = BTreeMap<String, Format>;

/// Reads some rows and columns of a matrix by its name. The matrices `[out, in]` of experts in one parameter count as one matrix,
/// one below the other.
pub(crate) type ReadMatrix<'a> = dyn FnMut(&str, Range<usize>, Range<usize>) -> Result<QuantizedMatrix> + 'a;

/// A unit's partitions of such matrices that have the same replica group, as one row of bytes. Shards have the same size to within a
/// byte.
#[derive(Debug, Clone)]
pub(crate) struct StoredFlat {
    partitions: Vec<StoredPartition>,
    len: usize,
    ranks: usize,
}

#[derive(Debug, Clone)]
struct StoredPartition {
    partition: Partition,
    region: Region,
    format: Format,
    /// Bytes of one row of the partition.
    row: usize,
    /// The partition's range in the row of bytes.
    range: Range<usize>,
}

/// The region of a partition in a stored matrix: rows and columns of one matrix, or the same rows and columns of several experts'
/// matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Region {
    experts: Range<usize>,
    /// Number of rows in the matrix of one expert.
    outputs: usize,
    /// Rows and columns in the matrix of each expert.
    rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl Region {
    /// The region of a partition of a matrix `[out, in]`, or of a parameter `[e, in, out]` of experts, whose matrices are stored as
    /// `[out, in]`.
    pub(super) fn new(partition: &Partition) -> Self {
        let Partition { whole, dim, rows, columns, .. } = partition;
        match (&whole[..], dim) {
            // Ranks cut the outputs of each expert, or do not cut it.
            (&[_, inputs, outputs], 2) => {
                Self { experts: shrunk(rows, inputs), outputs, rows: columns.clone(), columns: 0..inputs }
            }
            (&[_, _, outputs], _) => {
                Self { experts: rows.clone(), outputs, rows: 0..outputs, columns: shrunk(columns, outputs) }
            }
            _ => Self { experts: 0..1, outputs: whole[0], rows: rows.clone(), columns: columns.clone() },
        }
    }

    /// Number of rows of all experts together.
    fn len(&self) -> usize {
        self.experts.len() * self.rows.len()
    }

    /// Reads some of the region's rows as one matrix.
    fn read(&self, name: &str, rows: Range<usize>, read: &mut ReadMatrix) -> Result<QuantizedMatrix> {
        let Self { experts, outputs, rows: of_expert, columns } = self;
        if rows.is_empty() {
            return read(name, 0..0, columns.clone());
        }
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut next = rows.start;
        while next < rows.end {
            let (expert, row) = (next / of_expert.len(), next % of_expert.len());
            let count = (of_expert.len() - row).min(rows.end - next);
            let first = (experts.start + expert) * outputs + of_expert.start + row;
            match ranges.last_mut() {
                Some(before) if before.end == first => before.end += count,
                _ => ranges.push(first..first + count),
            }
            next += count;
        }
        let mut matrices = ranges.into_iter().map(|range| read(name, range, columns.clone()));
        match (matrices.next(), matrices.len()) {
            (Some(matrix), 0) => matrix,
            (first, _) => {
                Ok(QuantizedMatrix::concat_rows(&first.into_iter().chain(matrices).collect::<Result<Vec<_>>>()?)?)
            }
        }
    }
}

/// A range of elements as a range of groups of `each` elements.
fn shrunk(range: &Range<usize>, each: usize) -> Range<usize> {
    range.start / each.max(1)..range.end / each.max(1)
}

impl StoredFlat {
    pub(crate) fn new(partitions: impl Iterator<Item = (Partition, Format)>, ranks: usize) -> Result<Self> {
        let (mut all, mut len) = (Vec::new(), 0);
        for (partition, format) in partitions {
            let region = Region::new(&partition);
            let row = format.bytes(1, region.columns.len())?;
            let start = len;
            len += row * region.len();
            all.push(StoredPartition { partition, region, format, row, range: start..len });
        }
        Ok(Self { partitions: all, len, ranks })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes in the row.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The range of a rank's shard in the row.
    fn shard(&self, rank: usize) -> Range<usize> {
        let at = |rank: usize| (self.len as u128 * rank as u128 / self.ranks as u128) as usize;
        at(rank)..at(rank + 1)
    }

    /// Reads what a rank keeps of these partitions.
    pub(super) fn keep(&self, rank: usize, read: &mut ReadMatrix) -> Result<StoredShard> {
        if self.ranks == 1 {
            let whole = |StoredPartition { partition, region, .. }: &StoredPartition| {
                region.read(&partition.name, 0..region.len(), read)
            };
            return Ok(StoredShard::Whole(self.partitions.iter().map(whole).collect::<Result<_>>()?));
        }
        let shard = self.shard(rank);
        let mut bytes = Vec::with_capacity(shard.len());
        for StoredPartition { partition, region, row, range, .. } in &self.partitions {
            let (start, end) = (range.start.max(shard.start), range.end.min(shard.end));
            if start >= end {
                continue;
            }
            let (start, end) = (start - range.start, end - range.start);
            let rows = start / row..end.div_ceil(*row);
            let matrix = region.read(&partition.name, rows.clone(), read)?;
            bytes.extend_from_slice(&matrix.bytes()[start - rows.start * row..end - rows.start * row]);
        }
        Ok(StoredShard::Part(Arc::new(Buffer::U8(bytes))))
    }

    /// The partitions, in the order of the row.
    pub(super) fn partitions(&self) -> impl Iterator<Item = &Partition> {
        self.partitions.iter().map(|StoredPartition { partition, .. }| partition)
    }

    /// The matrices of the partitions, put together from the shards of all ranks. A partition that lies in one shard shares its
    /// bytes.
    pub(super) fn whole(&self, shards: &[Arc<Buffer>]) -> Result<Vec<QuantizedMatrix>> {
        for (rank, shard) in shards.iter().enumerate() {
            let expected = self.shard(rank).len();
            if bytes_of(shard).len() != expected {
                let sent = bytes_of(shard).len();
                return Err(Error::Model(format!("rank {rank} sent {sent} bytes of a shard of {expected}")));
            }
        }
        let matrix = |StoredPartition { region, format, range, .. }: &StoredPartition| {
            let parts = shards.iter().enumerate().filter_map(|(rank, shard)| {
                let own = self.shard(rank);
                let (start, end) = (range.start.max(own.start), range.end.min(own.end));
                (start < end).then(|| ShardSlice { shard: shard.clone(), range: start - own.start..end - own.start })
            });
            let mut parts: Vec<ShardSlice> = parts.collect();
            let bytes = match parts.pop() {
                Some(alone) if parts.is_empty() => Bytes::from_owner(alone),
                last => parts.iter().chain(&last).map(AsRef::<[u8]>::as_ref).collect::<Vec<_>>().concat().into(),
            };
            QuantizedMatrix::new(*format, region.len(), region.columns.len(), bytes)
        };
        self.partitions.iter().map(|partition| Ok(matrix(partition)?)).collect()
    }
}

/// The part of a replica group's stored matrices that a rank keeps.
pub(super) enum StoredShard {
    /// The whole matrices: ranks of one process share their bytes.
    Whole(Vec<QuantizedMatrix>),
    /// A shard of their bytes.
    Part(Arc<Buffer>),
}

impl StoredShard {
    /// Whether other ranks keep the rest.
    pub(super) fn is_part(&self) -> bool {
        matches!(self, Self::Part(_))
    }
}

/// The weight that layers compute with: the matrix of a partition, or the matrices of its experts.
pub(super) fn weight(partition: &Partition, matrix: QuantizedMatrix) -> Result<Weight> {
    match partition.whole.len() {
        3 => Ok(QuantizedStack::new(matrix, Region::new(partition).rows.len())?.into()),
        _ => Ok(matrix.into()),
    }
}

/// The bytes of a shard; none for a buffer of another type, which its length then reveals.
fn bytes_of(buffer: &Buffer) -> &[u8] {
    match buffer {
        Buffer::U8(bytes) => bytes,
        _ => &[],
    }
}

impl AsRef<[u8]> for ShardSlice {
    fn as_ref(&self) -> &[u8] {
        &bytes_of(&self.shard)[self.range.clone()]
    }
}
