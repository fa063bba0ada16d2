//! Terms of the score that depend on the distance of query and key: ALiBi, and T5's buckets.

/// A term of the score that depends on the head and on the distance from the key to the query.
#[derive(Debug, Clone, PartialEq)]
pub enum RelativeBias {
    /// `-slopes[head] * |distance|` (ALiBi; Press et al., 2022, arXiv:2108.12409).
    Alibi {
        /// One slope per query head `[H]`.
        slopes: Vec<f32>,
    },
    /// A learned term for each bucket of distances (T5; Raffel et al., 2020, arXiv:1910.10683).
    Buckets(Buckets),
}

/// T5's buckets: one for each small distance, then logarithmically wider, and one for all distances from `max_distance` on.
///
/// ```
/// use ringspan::kernel::Buckets;
///
/// let buckets = Buckets { table: vec![0.0; 32], count: 32, max_distance: 128, bidirectional: false };
/// assert_eq!([0, 15, 16, 64, 1000].map(|distance| buckets.of(distance)), [0, 15, 16, 26, 31]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Buckets {
    /// The terms, `[H, count]`.
    pub table: Vec<f32>,
    /// Number of buckets per head.
    pub count: usize,
    /// Distance from which on all share the last bucket.
    pub max_distance: usize,
    /// Whether keys ahead of the query have their own buckets (encoders); otherwise they count as distance 0.
    pub bidirectional: bool,
}

impl Buckets {
    /// The bucket of a distance (query's position minus the key's).
    pub fn of(&self, distance: i64) -> usize {
        let (count, first) = match (self.bidirectional, distance < 0) {
            (true, ahead) => (self.count / 2, if ahead { self.count / 2 } else { 0 }),
            (false, _) => (self.count, 0),
        };
        let distance = if self.bidirectional { distance.unsigned_abs() } else { distance.max(0) as u64 };
        let exact = self.exact() as u64;
        if distance < exact {
            return first + distance as usize;
        }
        let part = (distance as f64 / exact as f64).ln() / (self.max_distance as f64 / exact as f64).ln();
        first + (exact as usize + (part * (count - exact as usize) as f64) as usize).min(count - 1)
    }

    /// The smallest distance of each bucket in one direction, in order: `[count]`, or `[count / 2]` if keys ahead of the query
    /// have their own buckets. With it a backend finds a bucket by bisection: the bucket of a distance is the last one whose smallest
    /// distance is not greater.
    pub fn smallest_distances(&self) -> Vec<u64> {
        let side = if self.bidirectional { self.count / 2 } else { self.count };
        // Buckets increase with the distance, so bisection finds the smallest distance of each.
        let least = |bucket: usize| {
            let (mut low, mut high) = (0, self.max_distance as i64);
            while low < high {
                let middle = (low + high) / 2;
                if self.of(middle) >= bucket { high = middle } else { low = middle + 1 }
            }
            low as u64
        };
        (0..side).map(least).collect()
    }

    /// Number of distances that have their own bucket.
    pub(super) fn exact(&self) -> usize {
        self.count / if self.bidirectional { 4 } else { 2 }
    }
}

/// A [`RelativeBias`] term in the form that a kernel computes; for buckets also the smallest distance of each.
pub(super) struct RelativeTerms<'a> {
    pub(super) relative: &'a RelativeBias,
    smallest_distances: Vec<u64>,
}

impl<'a> RelativeTerms<'a> {
    pub(super) fn new(relative: &'a RelativeBias) -> Self {
        let smallest_distances = match relative {
            RelativeBias::Alibi { .. } => Vec::new(),
            RelativeBias::Buckets(buckets) => buckets.smallest_distances(),
        };
        Self { relative, smallest_distances }
    }

    /// Like [`Buckets::of`], but without a logarithm.
    #[inline(always)]
    pub(super) fn bucket(&self, buckets: &Buckets, distance: i64) -> usize {
        let smallest = &self.smallest_distances;
        let of = |distance: u64| match smallest.last() {
            Some(last) if distance >= *last => smallest.len() - 1,
            _ => smallest.partition_point(|smallest| *smallest <= distance) - 1,
        };
        match (buckets.bidirectional, distance < 0) {
            (true, ahead) => of(distance.unsigned_abs()) + if ahead { smallest.len() } else { 0 },
            (false, _) => of(distance.max(0) as u64),
        }
    }

    /// The term of `head` for a distance (query's position minus the key's).
    #[inline(always)]
    pub(super) fn term(&self, head: usize, distance: i64) -> f32 {
        match self.relative {
            RelativeBias::Alibi { slopes } => -slopes[head] * distance.unsigned_abs() as f32,
            RelativeBias::Buckets(buckets) => buckets.table[head * buckets.count + self.bucket(buckets, distance)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buckets(count: usize, max_distance: usize, bidirectional: bool) -> Buckets {
        Buckets { table: vec![0.0; count], count, max_distance, bidirectional }
    }

    #[test]
    fn buckets_are_exact_then_logarithmic_then_one() {
        // T5's defaults are 32 buckets and 128: a decoder has 16 exact ones, an encoder 8 in each direction.
        let decoder = buckets(32, 128, false);
        let of: Vec<usize> = [-5, 0, 1, 15, 16, 20, 64, 127, 128, 100_000].map(|d| decoder.of(d)).to_vec();
        assert_eq!(of, [0, 0, 1, 15, 16, 17, 26, 31, 31, 31]);
        let encoder = buckets(32, 128, true);
        let of: Vec<usize> = [0, 7, 8, 127, 5000, -1, -7, -8, -5000].map(|d| encoder.of(d)).to_vec();
        assert_eq!(of, [0, 7, 8, 15, 15, 17, 23, 24, 31]);
    }

    #[test]
    fn buckets_found_by_their_smallest_distances_are_those_of_the_definition() {
        for (count, max_distance, bidirectional) in
            [(32, 128, false), (32, 128, true), (8, 5, false), (320, 161, false)]
        {
            let buckets = Buckets { table: Vec::new(), count, max_distance, bidirectional };
            let relative = RelativeBias::Buckets(buckets.clone());
            let terms = RelativeTerms::new(&relative);
            for distance in (-300..300).chain([i64::MIN, i64::MAX, 1 << 40]) {
                assert_eq!(terms.bucket(&buckets, distance), buckets.of(distance), "{distance}");
            }
        }
    }
}
