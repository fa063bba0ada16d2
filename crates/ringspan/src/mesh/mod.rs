//! Meshes: from axis sizes to coordinates and groups of ranks, by arithmetic alone.
//!
//! The last axis varies fastest, so ranks that differ only in the innermost axis have consecutive numbers.
//!
//! A [`Mesh`] has any axes. The axis of context parallelism consists of two, a [`Grid`] of R ring ranks with U Ulysses
//! ranks each. Ranks with consecutive numbers usually have the fastest links, so the inner axis should be the one that
//! sends more at once: Ulysses by default.
//!
//! The axes of a whole job have fixed names and a fixed order: [`Training`] and [`Serving`] hold the sizes, and the
//! [`Topology`] made from them has every group and coordinate by name. Experts divide the same ranks in a second way.
//!
//! ```
//! use ringspan::mesh::Grid;
//!
//! let grid = Grid::new(2, 3);
//! assert_eq!(grid.members(), [[0, 1, 2], [3, 4, 5]]);            // by ring rank
//! assert_eq!(grid.coordinates(4), (1, 1));                             // ring, Ulysses
//! assert_eq!(grid.with_ulysses_outer().members(), [[0, 2, 4], [1, 3, 5]]);
//! ```

mod grid;
mod serving;
mod topology;
mod training;

pub use grid::Grid;
pub use serving::Serving;
pub use topology::Topology;
pub use training::{Experts, Training};

use crate::error::{Error, Result};

/// Named axes, outermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<(String, usize)>,
}

impl Mesh {
    /// Makes a mesh of axes and their sizes, outermost first.
    ///
    /// # Errors
    /// Empty or repeated names, sizes of 0, or a product that overflows a machine word.
    pub fn new(axes: &[(&str, usize)]) -> Result<Self> {
        let mesh = Self { axes: axes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect() };
        let refuse = |problem: String| Err(Error::MeshAxis { mesh: mesh.sizes(), problem });
        for (index, (name, size)) in axes.iter().enumerate() {
            if name.is_empty() {
                return refuse(format!("axis {index} has no name"));
            }
            if *size == 0 {
                return refuse(format!("axis {name} has size 0; the least is 1"));
            }
            if axes[..index].iter().any(|(other, _)| other == name) {
                return refuse(format!("axis {name} is given twice"));
            }
        }
        if axes.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size)).is_none() {
            return refuse("the product of the sizes does not fit a machine word".into());
        }
        Ok(mesh)
    }

    /// Checks that the mesh has as many ranks as there are.
    ///
    /// # Errors
    /// [`Error::MeshSize`] if it needs another number.
    pub fn check(&self, ranks: usize) -> Result<()> {
        if self.world() == ranks {
            return Ok(());
        }
        Err(Error::MeshSize { mesh: self.sizes(), needed: self.world(), ranks })
    }

    /// Number of ranks: the product of the sizes.
    pub fn world(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// Names and sizes, outermost first.
    pub fn axes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.axes.iter().map(|(name, size)| (name.as_str(), *size))
    }

    /// Size of an axis; 1 for an axis that the mesh does not have.
    pub fn size(&self, axis: &str) -> usize {
        self.axes().find(|(name, _)| *name == axis).map_or(1, |(_, size)| size)
    }

    /// Coordinates of a rank, outermost axis first.
    pub fn coordinates(&self, rank: usize) -> Vec<usize> {
        let mut rest = rank;
        let mut coordinates = vec![0; self.axes.len()];
        for (coordinate, (_, size)) in coordinates.iter_mut().zip(&self.axes).rev() {
            *coordinate = rest % size;
            rest /= size;
        }
        coordinates
    }

    /// Coordinate of a rank on one axis; 0 for an axis that the mesh does not have.
    pub fn coordinate(&self, rank: usize, axis: &str) -> usize {
        let at = self.axes().position(|(name, _)| name == axis);
        at.map_or(0, |at| self.coordinates(rank)[at])
    }

    /// The rank at the given coordinates, outermost axis first.
    pub fn rank(&self, coordinates: &[usize]) -> usize {
        self.axes.iter().zip(coordinates).fold(0, |rank, ((_, size), coordinate)| rank * size + coordinate)
    }

    /// All ranks, divided into groups that differ only on `axes`; inside a group the first of `axes` is outermost.
    ///
    /// # Errors
    /// An axis the mesh does not have, or one given twice.
    pub fn groups(&self, axes: &[&str]) -> Result<Vec<Vec<usize>>> {
        let mut at = Vec::with_capacity(axes.len());
        for axis in axes {
            match self.axes().position(|(name, _)| name == *axis) {
                Some(index) if !at.contains(&index) => at.push(index),
                found => {
                    let problem = if found.is_some() { "is asked for twice" } else { "does not exist" };
                    return Err(Error::MeshAxis { mesh: self.sizes(), problem: format!("axis {axis} {problem}") });
                }
            }
        }
        let size: usize = at.iter().map(|&index| self.axes[index].1).product();
        let mut groups: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        let mut index_of = std::collections::HashMap::new();
        for rank in 0..self.world() {
            let coordinates = self.coordinates(rank);
            let others: Vec<usize> =
                coordinates.iter().enumerate().filter(|(index, _)| !at.contains(index)).map(|(_, c)| *c).collect();
            let inside =
                at.iter().fold(0, |index_inside, &index| index_inside * self.axes[index].1 + coordinates[index]);
            let group = *index_of.entry(others.clone()).or_insert_with(|| {
                groups.push((others, vec![0; size]));
                groups.len() - 1
            });
            groups[group].1[inside] = rank;
        }
        Ok(groups.into_iter().map(|(_, ranks)| ranks).collect())
    }

    /// The ranks that differ from `rank` only on `axes`, including itself; the first of `axes` is outermost.
    ///
    /// # Errors
    /// A rank or an axis the mesh does not have, or an axis given twice.
    pub fn group(&self, rank: usize, axes: &[&str]) -> Result<Vec<usize>> {
        let color = self.color(rank, axes)?;
        Ok(self.groups(axes)?.swap_remove(color))
    }

    /// Index of `rank` in its [`group`](Self::group), which is the key for splitting a communicator.
    ///
    /// # Errors
    /// A rank or an axis the mesh does not have, or an axis given twice.
    pub fn index_in_group(&self, rank: usize, axes: &[&str]) -> Result<usize> {
        Ok(self.color_and_key(rank, axes)?.1)
    }

    /// Index of `rank`'s group in [`groups`](Self::groups), which is the color for splitting a communicator.
    ///
    /// # Errors
    /// A rank or an axis the mesh does not have, or an axis given twice.
    pub fn color(&self, rank: usize, axes: &[&str]) -> Result<usize> {
        Ok(self.color_and_key(rank, axes)?.0)
    }

    /// Index of `rank`'s group in [`groups`](Self::groups), and index in the group: color and key for splitting a
    /// communicator.
    ///
    /// # Errors
    /// An axis the mesh does not have, or one given twice.
    pub fn color_and_key(&self, rank: usize, axes: &[&str]) -> Result<(usize, usize)> {
        let groups = self.groups(axes)?;
        let find = |(color, ranks): (usize, &Vec<usize>)| Some((color, ranks.iter().position(|r| *r == rank)?));
        groups
            .iter()
            .enumerate()
            .find_map(find)
            .ok_or_else(|| Error::MeshAxis { mesh: self.sizes(), problem: format!("rank {rank} does not exist") })
    }

    /// The axes as text, without their product, which may overflow.
    fn sizes(&self) -> String {
        let sizes: Vec<String> = self.axes().map(|(name, size)| format!("{name} {size}")).collect();
        if sizes.is_empty() { "without axes".into() } else { sizes.join(" x ") }
    }
}

impl std::fmt::Display for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranks = self.world();
        write!(f, "{} = {ranks} rank{}", self.sizes(), if ranks == 1 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mesh() -> Mesh {
        Mesh::new(&[("dp_replicate", 2), ("ring", 3), ("ulysses", 2)]).expect("valid")
    }

    #[test]
    fn the_innermost_axis_holds_neighbours() {
        let mesh = mesh();
        assert_eq!(mesh.world(), 12);
        assert_eq!(mesh.coordinates(7), [1, 0, 1]);
        assert_eq!(mesh.groups(&["ulysses"]).expect("axis")[1], [2, 3]);
        assert_eq!(mesh.groups(&["ring"]).expect("axis")[0], [0, 2, 4]);
        assert_eq!(mesh.groups(&["ring", "ulysses"]).expect("axes")[1], [6, 7, 8, 9, 10, 11]);
        assert_eq!(mesh.groups(&["dp_replicate", "ring"]).expect("axes")[1], [1, 3, 5, 7, 9, 11]);
        assert_eq!(mesh.color_and_key(9, &["ring"]), Ok((3, 1)));
        assert_eq!(mesh.group(9, &["ring"]), Ok(vec![7, 9, 11]));
    }

    #[test]
    fn the_first_axis_asked_for_is_outermost_in_a_group() {
        let mesh = mesh();
        assert_eq!(mesh.group(0, &["ring", "ulysses"]), Ok(vec![0, 1, 2, 3, 4, 5]));
        assert_eq!(mesh.group(0, &["ulysses", "ring"]), Ok(vec![0, 2, 4, 1, 3, 5]));
        assert_eq!(mesh.index_in_group(4, &["ulysses", "ring"]), Ok(2));
    }

    #[test]
    fn a_mesh_is_written_with_its_product() {
        assert_eq!(mesh().to_string(), "dp_replicate 2 x ring 3 x ulysses 2 = 12 ranks");
        assert_eq!(Mesh::new(&[]).map(|mesh| mesh.to_string()), Ok("without axes = 1 rank".to_owned()));
    }

    #[test]
    fn a_rank_outside_the_mesh_has_no_group() {
        let error = mesh().color(12, &["ring"]).err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(error, "mesh dp_replicate 2 x ring 3 x ulysses 2: rank 12 does not exist");
        assert!(mesh().group(0, &["ring", "ring"]).is_err());
    }

    #[test]
    fn bad_axes_are_refused() {
        assert!(Mesh::new(&[("a", 2), ("a", 1)]).is_err());
        assert!(Mesh::new(&[("a", 0)]).is_err());
        assert!(Mesh::new(&[("", 1)]).is_err());
        assert!(Mesh::new(&[("a", usize::MAX), ("b", 2)]).is_err());
        assert!(mesh().groups(&["tp"]).is_err());
        let message = mesh().check(8).err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(message, "mesh dp_replicate 2 x ring 3 x ulysses 2 needs 12 ranks, but there are 8");
    }

    proptest! {
        #[test]
        fn groups_part_the_world(sizes in proptest::collection::vec(1usize..4, 1..5), pick in 0usize..16) {
            let names = ["a", "b", "c", "d"];
            let axes: Vec<(&str, usize)> = names.into_iter().zip(sizes).collect();
            let mesh = Mesh::new(&axes).expect("valid");
            let chosen: Vec<&str> =
                axes.iter().enumerate().filter(|(i, _)| pick >> i & 1 == 1).map(|(_, (name, _))| *name).collect();
            let mut all: Vec<usize> = mesh.groups(&chosen).expect("axes").concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..mesh.world()).collect::<Vec<_>>());
            for rank in 0..mesh.world() {
                prop_assert_eq!(mesh.rank(&mesh.coordinates(rank)), rank);
                let group = mesh.group(rank, &chosen).expect("axes");
                prop_assert_eq!(group[mesh.index_in_group(rank, &chosen).expect("axes")], rank);
                prop_assert_eq!(&group, &mesh.groups(&chosen).expect("axes")[mesh.color(rank, &chosen).expect("axes")]);
                for (name, _) in axes.iter().filter(|(name, _)| !chosen.contains(name)) {
                    let same = |other: &usize| mesh.coordinate(*other, name) == mesh.coordinate(rank, name);
                    prop_assert!(group.iter().all(same));
                }
            }
        }
    }
}
