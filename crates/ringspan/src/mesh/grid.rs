//! The two axes of context parallelism, ring and Ulysses.

/// P = R x U ranks of a context-parallel group: R ring ranks of U Ulysses ranks each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Number of ring ranks R; blocks of tokens move between them.
    pub ring: usize,
    /// Number of Ulysses ranks U in each ring rank; heads are exchanged for tokens between them.
    pub ulysses: usize,
    /// Whether Ulysses is the outer axis. Usually the ring is, because an all-to-all needs the faster links of neighbours.
    pub ulysses_outer: bool,
}

impl Grid {
    /// R ring ranks of U consecutive ranks each.
    pub const fn new(ring: usize, ulysses: usize) -> Self {
        Self { ring, ulysses, ulysses_outer: false }
    }

    /// The same sizes with Ulysses as the outer axis: consecutive ranks are neighbours in the ring.
    pub const fn with_ulysses_outer(self) -> Self {
        Self { ulysses_outer: true, ..self }
    }

    /// Number of ranks P, or `None` if the product overflows.
    pub fn size(self) -> Option<usize> {
        self.ring.checked_mul(self.ulysses)
    }

    /// Coordinates of a rank: its ring rank, and its Ulysses rank.
    pub fn coordinates(self, rank: usize) -> (usize, usize) {
        match self.ulysses_outer {
            false => (rank / self.ulysses, rank % self.ulysses),
            true => (rank % self.ring, rank / self.ring),
        }
    }

    /// The rank with these coordinates.
    pub fn rank(self, ring: usize, ulysses: usize) -> usize {
        match self.ulysses_outer {
            false => ring * self.ulysses + ulysses,
            true => ulysses * self.ring + ring,
        }
    }

    /// The ranks of each ring rank, ordered by Ulysses rank.
    pub fn members(self) -> Vec<Vec<usize>> {
        (0..self.ring).map(|ring| (0..self.ulysses).map(|ulysses| self.rank(ring, ulysses)).collect()).collect()
    }
}

impl From<(usize, usize)> for Grid {
    fn from((ring, ulysses): (usize, usize)) -> Self {
        Self::new(ring, ulysses)
    }
}

impl std::fmt::Display for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ulysses_outer {
            false => write!(f, "ring {} x ulysses {}", self.ring, self.ulysses),
            true => write!(f, "ulysses {} x ring {}", self.ulysses, self.ring),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_ranks_are_inverse_in_both_orders() {
        for grid in [Grid::new(3, 2), Grid::new(3, 2).with_ulysses_outer()] {
            for rank in 0..6 {
                let (ring, ulysses) = grid.coordinates(rank);
                assert_eq!(grid.rank(ring, ulysses), rank);
                assert_eq!(grid.members()[ring][ulysses], rank);
            }
        }
        assert_eq!(Grid::new(3, 2).members(), [[0, 1], [2, 3], [4, 5]]);
        assert_eq!(Grid::new(3, 2).with_ulysses_outer().members(), [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(Grid::new(usize::MAX, 2).size(), None);
    }
}
