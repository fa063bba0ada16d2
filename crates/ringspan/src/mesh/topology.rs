//! The ranks of a job, read in one or more ways, with groups and coordinates by name.

use super::Mesh;
use crate::error::{Error, Result};

/// Meshes over the same ranks, and names for parts of their axes.
///
/// Attention and experts cut the same ranks differently, so one mesh does not hold all groups. [`Training`](super::Training)
/// and [`Serving`](super::Serving) make topologies; every group comes from [`Mesh::groups`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    meshes: Vec<Mesh>,
    coordinates: Vec<Named>,
    groups: Vec<Named>,
}

/// Axes of one of the meshes under a name of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Named {
    name: &'static str,
    mesh: usize,
    axes: Vec<&'static str>,
}

impl Topology {
    /// Meshes over the same ranks; the first is the one that people think in.
    ///
    /// # Errors
    /// [`Error::MeshSize`] where one needs another number of ranks than the first.
    pub(super) fn new(meshes: Vec<Mesh>) -> Result<Self> {
        let world = meshes.first().map_or(1, Mesh::world);
        for mesh in &meshes {
            mesh.check(world)?;
        }
        Ok(Self { meshes, coordinates: Vec::new(), groups: Vec::new() })
    }

    /// Names a group, and the coordinate that is a rank's place in it.
    pub(super) fn axis(self, name: &'static str, mesh: usize, axes: &[&'static str]) -> Self {
        self.coordinate(name, mesh, axes).group(name, mesh, axes)
    }

    /// Names a coordinate: the place on `axes`, the first of them outermost.
    pub(super) fn coordinate(mut self, name: &'static str, mesh: usize, axes: &[&'static str]) -> Self {
        self.coordinates.push(Named { name, mesh, axes: axes.to_vec() });
        self
    }

    /// Names a group: ranks that differ on `axes` only.
    pub(super) fn group(mut self, name: &'static str, mesh: usize, axes: &[&'static str]) -> Self {
        self.groups.push(Named { name, mesh, axes: axes.to_vec() });
        self
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.meshes.first().map_or(1, Mesh::world)
    }

    /// The ways to read the ranks: first that of attention, then others where there are any.
    pub fn meshes(&self) -> &[Mesh] {
        &self.meshes
    }

    /// Names of all groups.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.groups.iter().map(|named| named.name)
    }

    /// All groups of a name: each rank is in exactly one. Groups are in the order of their first ranks.
    ///
    /// # Errors
    /// [`Error::MeshAxis`] for a name there is not.
    pub fn groups(&self, name: &str) -> Result<Vec<Vec<usize>>> {
        let Some(named) = self.groups.iter().find(|named| named.name == name) else {
            let names: Vec<&str> = self.names().collect();
            let problem = format!("there is no group {name}; there are {}", names.join(", "));
            return Err(Error::MeshAxis { mesh: self.sizes(), problem });
        };
        self.meshes[named.mesh].groups(&named.axes)
    }

    /// The ranks of `rank`'s group, itself included.
    ///
    /// # Errors
    /// [`Error::MeshAxis`] for a name or a rank there is not.
    pub fn members(&self, rank: usize, name: &str) -> Result<Vec<usize>> {
        let (color, _) = self.place(rank, name)?;
        Ok(self.groups(name)?.swap_remove(color))
    }

    /// The number of `rank`'s group among [`groups`](Self::groups), and its place inside: color and key of a split.
    ///
    /// # Errors
    /// [`Error::MeshAxis`] for a name or a rank there is not.
    pub fn place(&self, rank: usize, name: &str) -> Result<(usize, usize)> {
        let groups = self.groups(name)?;
        let inside = |(color, ranks): (usize, &Vec<usize>)| Some((color, ranks.iter().position(|r| *r == rank)?));
        groups.iter().enumerate().find_map(inside).ok_or_else(|| Error::MeshAxis {
            mesh: self.sizes(),
            problem: format!("rank {rank} does not exist; there are {}", self.world()),
        })
    }

    /// A rank's coordinates by name, outermost first. `rank` is below [`world`](Self::world).
    pub fn coordinates(&self, rank: usize) -> Vec<(&'static str, usize)> {
        let place = |named: &Named| {
            let mesh = &self.meshes[named.mesh];
            named.axes.iter().fold(0, |place, axis| place * mesh.size(axis) + mesh.coordinate(rank, axis))
        };
        self.coordinates.iter().map(|named| (named.name, place(named))).collect()
    }

    fn sizes(&self) -> String {
        self.meshes.first().map_or_else(String::new, Mesh::sizes)
    }
}

impl std::fmt::Display for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.meshes.first().map_or(Ok(()), |mesh| mesh.fmt(f))
    }
}

/// `whole` over the product of `by`, where that is whole.
///
/// # Errors
/// [`Error::MeshAxis`] of `mesh` with the numbers and with what `otherwise` would be.
pub(super) fn quotient(
    mesh: &str,
    (what, whole): (&str, usize),
    by: &[(&str, usize)],
    otherwise: &str,
) -> Result<usize> {
    let refuse = |problem: String| Err(Error::MeshAxis { mesh: mesh.to_owned(), problem });
    if let Some((name, _)) = by.iter().find(|(_, size)| *size == 0) {
        return refuse(format!("axis {name} has size 0; the least is 1"));
    }
    let factors: Vec<String> = by.iter().map(|(name, size)| format!("{name} {size}")).collect();
    let factors = factors.join(" x ");
    match by.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size)) {
        Some(product) if whole.is_multiple_of(product) => Ok(whole / product),
        Some(product) => {
            let product = if by.len() > 1 { format!(" = {product}") } else { String::new() };
            refuse(format!("{what}, {whole}, do not divide by {factors}{product}: {otherwise}"))
        }
        None => refuse(format!("{factors} does not fit a machine word")),
    }
}
