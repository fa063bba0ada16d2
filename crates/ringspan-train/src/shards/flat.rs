//! The parameters of a unit laid end to end, and cut into one shard a rank.

use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use ringspan_models::{Weights, gradients::Gradients};
use std::ops::Range;

/// A unit's parameters as one row of numbers. Shards are the same size to within one number: nothing has to divide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Flat {
    /// Name, shape, and place in the row.
    parameters: Vec<(String, Vec<usize>, Range<usize>)>,
    len: usize,
    ranks: usize,
}

/// The part of a parameter that lies in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    /// Elements of the parameter.
    pub(crate) of_parameter: Range<usize>,
    /// The same elements of the shard.
    pub(crate) of_shard: Range<usize>,
}

impl Flat {
    pub(crate) fn new(shapes: Vec<(String, Vec<usize>)>, ranks: usize) -> Self {
        let mut len = 0;
        let place = |(name, shape): (String, Vec<usize>)| {
            let start = len;
            len += shape.iter().product::<usize>();
            (name, shape, start..len)
        };
        let parameters = shapes.into_iter().map(place).collect();
        Self { parameters, len, ranks }
    }

    /// Whether there is nothing to share.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the shard of a rank lies in the row.
    pub(crate) fn shard(&self, rank: usize) -> Range<usize> {
        let at = |rank: usize| (self.len as u128 * rank as u128 / self.ranks as u128) as usize;
        at(rank)..at(rank + 1)
    }

    /// What the shard of a rank holds, in its order.
    pub(crate) fn pieces(&self, rank: usize) -> impl Iterator<Item = Piece<'_>> {
        self.parameters.iter().filter_map(move |(name, shape, place)| {
            let (of_parameter, of_shard) = self.common(place, rank)?;
            Some(Piece { name, shape, of_parameter, of_shard })
        })
    }

    /// What a parameter has in the shard of a rank: counted in the parameter, and in the shard.
    fn common(&self, place: &Range<usize>, rank: usize) -> Option<(Range<usize>, Range<usize>)> {
        let shard = self.shard(rank);
        let (start, end) = (place.start.max(shard.start), place.end.min(shard.end));
        (start < end).then(|| (start - place.start..end - place.start, start - shard.start..end - shard.start))
    }

    /// The parameters, from the shards of all ranks.
    pub(crate) fn whole(&self, shards: &[&[f32]]) -> Result<Weights> {
        for (rank, shard) in shards.iter().enumerate() {
            let expected = self.shard(rank).len();
            if shard.len() != expected {
                return Err(Error::Model(format!("rank {rank} sent {} numbers of a shard of {expected}", shard.len())));
            }
        }
        let tensor = |(name, shape, place): &(String, Vec<usize>, Range<usize>)| {
            let mut values = Vec::with_capacity(place.len());
            for (rank, shard) in shards.iter().enumerate() {
                if let Some((_, of_shard)) = self.common(place, rank) {
                    values.extend_from_slice(&shard[of_shard]);
                }
            }
            Ok((name.clone(), Tensor::from_vec(values, shape.as_slice(), &Device::Cpu)?))
        };
        self.parameters.iter().map(tensor).collect()
    }

    /// The shards of the unit's gradients, one for each rank.
    pub(crate) fn cut(&self, mut gradients: Gradients) -> Result<Vec<Vec<f32>>> {
        let mut shards: Vec<Vec<f32>> =
            (0..self.ranks).map(|rank| Vec::with_capacity(self.shard(rank).len())).collect();
        for (name, shape, place) in &self.parameters {
            let gradient = gradients
                .remove(name)
                .filter(|gradient| gradient.dims() == shape)
                .ok_or_else(|| Error::Model(format!("no gradient of shape {shape:?} came for `{name}`")))?;
            let values: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
            for (rank, shard) in shards.iter_mut().enumerate() {
                if let Some((of_parameter, _)) = self.common(place, rank) {
                    shard.extend_from_slice(&values[of_parameter]);
                }
            }
        }
        match gradients.keys().next() {
            Some(name) => Err(Error::Model(format!("a gradient came for `{name}`, which is no parameter of its unit"))),
            None => Ok(shards),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes() -> Vec<(String, Vec<usize>)> {
        vec![("a".into(), vec![2, 3]), ("b".into(), vec![1]), ("c".into(), vec![4, 2])]
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

    #[test]
    fn what_is_cut_is_whole_again_on_any_number_of_ranks() {
        for ranks in 1..40 {
            let flat = Flat::new(shapes(), ranks);
            let shards = flat.cut(gradients()).expect("all gradients");
            let sizes: Vec<usize> = shards.iter().map(Vec::len).collect();
            assert!(sizes.iter().max().zip(sizes.iter().min()).is_some_and(|(most, least)| most - least <= 1));
            assert_eq!(shards.concat(), (0..15).map(|i| i as f32).collect::<Vec<_>>());
            let shards: Vec<&[f32]> = shards.iter().map(Vec::as_slice).collect();
            for (name, tensor) in flat.whole(&shards).expect("whole shards") {
                let values = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
                assert_eq!((tensor.dims(), values(&tensor)), (gradients()[&name].dims(), values(&gradients()[&name])));
            }
            let pieces: Vec<_> = (0..ranks).flat_map(|rank| flat.pieces(rank)).collect();
            assert_eq!(pieces.iter().map(|piece| piece.of_parameter.len()).sum::<usize>(), 15);
            assert!(pieces.iter().all(|piece| piece.of_parameter.len() == piece.of_shard.len()));
        }
    }

    #[test]
    fn shards_and_gradients_that_do_not_fit_are_refused() {
        let flat = Flat::new(shapes(), 2);
        assert!(
            flat.whole(&[&[0.0; 7], &[0.0; 7]]).expect_err("short").to_string().contains("7 numbers of a shard of 8")
        );
        let mut more = gradients();
        more.insert("d".into(), more["b"].clone());
        assert!(flat.cut(more).expect_err("unknown").to_string().contains("`d`"));
        let mut less = gradients();
        less.remove("b");
        assert!(flat.cut(less).expect_err("missing").to_string().contains("`b`"));
    }
}
