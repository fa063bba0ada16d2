//! Partitions of a unit's parameters laid end to end, and cut into one shard per rank.

use crate::{
    checkpoint::{Columns, Region, SharedValues, Slice},
    error::{Error, Result},
};
use ringspan_candle::Partition;
use ringspan_candle::transfers::{Download, Parameter};
use std::ops::Range;

/// Partitions of a unit's parameters as one row of elements. Shards have the same size to within one element: nothing has to
/// divide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FlatParameter {
    /// The partitions, each with its range in the row.
    partitions: Vec<(Partition, Range<usize>)>,
    len: usize,
    ranks: usize,
}

/// The part of a partition that lies in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartitionShard<'a> {
    pub(crate) partition: &'a Partition,
    /// Range of the partition shard in the partition.
    pub(crate) in_partition: Range<usize>,
    /// Range of the same elements in the shard.
    pub(crate) in_shard: Range<usize>,
}

/// The partition shard that is all of a partition.
pub(crate) fn whole_partition(partition: &Partition) -> PartitionShard<'_> {
    PartitionShard { partition, in_partition: 0..partition.len(), in_shard: 0..partition.len() }
}

impl PartitionShard<'_> {
    /// The partition shard's elements as a region of the whole parameter.
    pub(crate) fn region(&self) -> Region {
        let Partition { rows, columns, .. } = self.partition;
        let before = rows.start * columns.len();
        let elements = before + self.in_partition.start..before + self.in_partition.end;
        match self.partition.width() {
            width if width == columns.len() => Region { columns: None, elements },
            width => Region { columns: Some(Columns { range: columns.clone(), of: width }), elements },
        }
    }

    /// The contiguous ranges of the partition shard, one per row: its range in the partition shard, and the index of its first element in
    /// the whole parameter.
    fn rows(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let Partition { rows, columns, .. } = self.partition;
        let (wide, width) = (columns.len().max(1), self.partition.width());
        let of = self.in_partition.clone();
        (of.start / wide..of.end.div_ceil(wide)).map(move |row| {
            let (from, to) = (of.start.max(row * wide), of.end.min((row + 1) * wide));
            (from - of.start..to - of.start, (rows.start + row) * width + columns.start + from - row * wide)
        })
    }

    /// Copies the partition shard's values to their elements of the whole parameter.
    pub(crate) fn scatter_into(&self, values: &[f32], whole: &mut [f32]) {
        for (own, at) in self.rows() {
            whole[at..at + own.len()].copy_from_slice(&values[own]);
        }
    }

    /// Picks the partition shard's values from `rows`, which are rows of the whole parameter from row `first` on, at least
    /// [`Self::row_range`].
    pub(crate) fn gather_from(&self, first: usize, rows: &[f32]) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.in_partition.len());
        let before = first * self.partition.whole[1..].iter().product::<usize>();
        for (own, at) in self.rows() {
            let at = at - before;
            values.extend_from_slice(&rows[at..at + own.len()]);
        }
        values
    }

    /// The range of the whole parameter's first dimension in which the partition shard has elements.
    pub(crate) fn row_range(&self) -> Range<usize> {
        let Partition { whole, dim, rows, columns, .. } = self.partition;
        let (wide, in_first) = (columns.len().max(1), whole[1..*dim].iter().product::<usize>().max(1));
        let (from, to) = (self.in_partition.start / wide, self.in_partition.end.div_ceil(wide));
        (rows.start + from) / in_first..(rows.start + to).div_ceil(in_first)
    }

    /// The partition shard's values as a slice of a checkpoint, under a name.
    pub(crate) fn slice(&self, name: String, values: SharedValues) -> Slice {
        let Region { columns, elements } = self.region();
        Slice { name, columns, start: elements.start, values }
    }
}

impl FlatParameter {
    pub(crate) fn new(partitions: Vec<Partition>, ranks: usize) -> Self {
        let mut len = 0;
        let range = |partition: Partition| {
            let start = len;
            len += partition.len();
            (partition, start..len)
        };
        let partitions = partitions.into_iter().map(range).collect();
        Self { partitions, len, ranks }
    }

    /// Whether the row has no elements.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of elements in the row.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The range of a rank's shard in the row.
    pub(crate) fn shard(&self, rank: usize) -> Range<usize> {
        let at = |rank: usize| (self.len as u128 * rank as u128 / self.ranks as u128) as usize;
        at(rank)..at(rank + 1)
    }

    /// The partition shards of partitions that the shard of a rank consists of, in its order.
    pub(crate) fn partition_shards(&self, rank: usize) -> impl Iterator<Item = PartitionShard<'_>> {
        self.partitions.iter().filter_map(move |(partition, range)| {
            let (in_partition, in_shard) = self.common(range, rank)?;
            Some(PartitionShard { partition, in_partition, in_shard })
        })
    }

    /// The elements that a partition at `range` and the shard of a rank share: their range in the partition, and in the shard.
    fn common(&self, range: &Range<usize>, rank: usize) -> Option<(Range<usize>, Range<usize>)> {
        let shard = self.shard(rank);
        let (start, end) = (range.start.max(shard.start), range.end.min(shard.end));
        (start < end).then(|| (start - range.start..end - range.start, start - shard.start..end - shard.start))
    }

    /// The partitions, in the order of the row, put together from the shards of all ranks.
    pub(crate) fn whole<'s>(&self, shards: &[&'s [f32]]) -> Result<Vec<Parameter<'s>>> {
        for (rank, shard) in shards.iter().enumerate() {
            let expected = self.shard(rank).len();
            if shard.len() != expected {
                return Err(Error::Model(format!("rank {rank} sent {} numbers of a shard of {expected}", shard.len())));
            }
        }
        let parameter = |(partition, range): &(Partition, Range<usize>)| {
            let part = |(rank, shard): (usize, &&'s [f32])| Some(&shard[self.common(range, rank)?.1]);
            let parts = shards.iter().enumerate().filter_map(part).collect();
            Parameter { parts, shape: partition.shape().into() }
        };
        Ok(self.partitions.iter().map(parameter).collect())
    }

    /// The partitions, in the order of the row.
    pub(crate) fn partitions(&self) -> impl Iterator<Item = &Partition> {
        self.partitions.iter().map(|(partition, _)| partition)
    }

    /// Number of elements in each partition.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = usize> {
        self.partitions.iter().map(|(partition, _)| partition.len())
    }

    /// Takes the gradients of the partitions and cuts them into shards, one for each rank.
    pub(crate) fn cut(&self, gradients: &mut Download) -> Result<Vec<Vec<f32>>> {
        let mut shards: Vec<Vec<f32>> =
            (0..self.ranks).map(|rank| Vec::with_capacity(self.shard(rank).len())).collect();
        for (partition, range) in &self.partitions {
            let (name, shape) = (partition.key(), partition.shape());
            // Sums over passes and ranks are f32, whatever type a gradient comes in.
            let fits = gradients.take(&name, |dims, values| {
                let fits = dims == shape;
                for (rank, shard) in shards.iter_mut().enumerate().filter(|_| fits) {
                    if let Some((in_partition, _)) = self.common(range, rank) {
                        shard.extend_from_slice(&values[in_partition]);
                    }
                }
                fits
            })?;
            if fits != Some(true) {
                return Err(Error::Model(format!("no gradient of shape {shape:?} came for `{name}`")));
            }
        }
        Ok(shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use ringspan_candle::ReplicaGroup;
    use ringspan_candle::gradients::Gradients;
    use ringspan_candle::transfers::ReservedMemory;
    use ringspan_candle::{RankDevice, Transfers};

    fn shapes() -> Vec<(String, Vec<usize>)> {
        vec![("a".into(), vec![2, 3]), ("b".into(), vec![1]), ("c".into(), vec![4, 2])]
    }

    fn flat(ranks: usize) -> FlatParameter {
        let partition = |(name, whole): (String, Vec<usize>)| {
            let (rows, columns) = (0..whole[0], 0..whole.get(1).copied().unwrap_or(1));
            Partition { name, whole, dim: 1, rows, columns, stacked_at: None, replicas: ReplicaGroup::All }
        };
        FlatParameter::new(shapes().into_iter().map(partition).collect(), ranks)
    }

    fn gradients() -> Gradients {
        let mut first = 0.0;
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|i| first + i as f32).collect();
            first += values.len() as f32;
            (name, Tensor::from_vec(values, shape, &Device::Cpu).expect("its size"))
        };
        shapes().into_iter().map(tensor).collect()
    }

    fn transfers() -> Transfers {
        Transfers::new(&RankDevice::CPU).expect("a CPU")
    }

    fn cut(flat: &FlatParameter, gradients: Gradients) -> Result<Vec<Vec<f32>>> {
        flat.cut(&mut transfers().download(gradients).expect("a CPU"))
    }

    #[test]
    fn what_is_cut_is_whole_again_on_any_number_of_ranks() {
        for ranks in 1..40 {
            let flat = flat(ranks);
            let shards = cut(&flat, gradients()).expect("all gradients");
            let sizes: Vec<usize> = shards.iter().map(Vec::len).collect();
            assert!(sizes.iter().max().zip(sizes.iter().min()).is_some_and(|(most, least)| most - least <= 1));
            assert_eq!(shards.concat(), (0..15).map(|i| i as f32).collect::<Vec<_>>());
            let shards: Vec<&[f32]> = shards.iter().map(Vec::as_slice).collect();
            let parameters = flat.whole(&shards).expect("whole shards");
            assert!(parameters.iter().map(|parameter| parameter.shape.elem_count()).eq(flat.sizes()));
            let tensors = transfers().upload(ReservedMemory::default(), &parameters).expect("a CPU");
            for (partition, tensor) in flat.partitions().zip(tensors) {
                let values = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
                assert_eq!(
                    (tensor.dims(), values(&tensor)),
                    (gradients()[&partition.name].dims(), values(&gradients()[&partition.name]))
                );
            }
            let partition_shards: Vec<_> = (0..ranks).flat_map(|rank| flat.partition_shards(rank)).collect();
            assert_eq!(
                partition_shards.iter().map(|partition_shard| partition_shard.in_partition.len()).sum::<usize>(),
                15
            );
            assert!(
                partition_shards
                    .iter()
                    .all(|partition_shard| partition_shard.in_partition.len() == partition_shard.in_shard.len())
            );
        }
    }

    #[test]
    fn shards_and_gradients_that_do_not_fit_are_refused() {
        let flat = flat(2);
        assert!(
            flat.whole(&[&[0.0; 7], &[0.0; 7]]).is_err_and(|e| e.to_string().contains("7 numbers of a shard of 8"))
        );
        let mut less = gradients();
        less.remove("b");
        assert!(cut(&flat, less).expect_err("missing").to_string().contains("`b`"));
    }
}
