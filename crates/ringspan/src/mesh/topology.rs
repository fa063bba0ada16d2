//! The ranks of a job under one or more meshes, with groups and coordinates by name.

use super::Mesh;
use crate::error::{Error, Result};

/// Meshes over the same ranks, with names for combinations of their axes.
///
/// Attention and experts divide the same ranks differently, so one mesh cannot hold all groups.
/// [`Training`](super::Training) and [`Serving`](super::Serving) make topologies; every group comes from [`Mesh::groups`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    meshes: Vec<Mesh>,
    coordinates: Vec<NamedAxes>,
    groups: Vec<NamedAxes>,
}

/// A name for axes of one of the meshes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NamedAxes {
    name: &'static str,
    mesh: usize,
    axes: Vec<&'static str>,
}

impl Topology {
    /// Makes a topology of meshes over the same ranks; the first is the main one, which is displayed.
    ///
    /// # Errors
    /// [`Error::MeshSize`] if one needs another number of ranks than the first.
    pub(super) fn new(meshes: Vec<Mesh>) -> Result<Self> {
        let world = meshes.first().map_or(1, Mesh::world);
        for mesh in &meshes {
            mesh.check(world)?;
        }
        Ok(Self { meshes, coordinates: Vec::new(), groups: Vec::new() })
    }

    /// Names a group, and also the coordinate that is a rank's index in it.
    pub(super) fn axis(self, name: &'static str, mesh: usize, axes: &[&'static str]) -> Self {
        self.coordinate(name, mesh, axes).group(name, mesh, axes)
    }

    /// Names a coordinate: a rank's index on `axes`, the first of them outermost.
    pub(super) fn coordinate(mut self, name: &'static str, mesh: usize, axes: &[&'static str]) -> Self {
        self.coordinates.push(NamedAxes { name, mesh, axes: axes.to_vec() });
        self
    }

    /// Names a group: the ranks that differ only on `axes`.
    pub(super) fn group(mut self, name: &'static str, mesh: usize, axes: &[&'static str]) -> Self {
        self.groups.push(NamedAxes { name, mesh, axes: axes.to_vec() });
        self
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.meshes.first().map_or(1, Mesh::world)
    }

    /// The meshes over these ranks: first that of attention, then any others.
    pub fn meshes(&self) -> &[Mesh] {
        &self.meshes
    }

    /// Names of all groups.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.groups.iter().map(|named| named.name)
    }

    /// All groups with this name, in the order of their first ranks; each rank is in exactly one.
    ///
    /// # Errors
    /// [`Error::MeshAxis`] if no group has this name.
    pub fn groups(&self, name: &str) -> Result<Vec<Vec<usize>>> {
        let Some(named) = self.groups.iter().find(|named| named.name == name) else {
            let names: Vec<&str> = self.names().collect();
            let problem = format!("there is no group {name}; there are {}", names.join(", "));
            return Err(Error::MeshAxis { mesh: self.sizes(), problem });
        };
        self.meshes[named.mesh].groups(&named.axes)
    }

    /// The ranks of `rank`'s group, including itself.
    ///
    /// # Errors
    /// [`Error::MeshAxis`] if there is no such group or rank.
    pub fn members(&self, rank: usize, name: &str) -> Result<Vec<usize>> {
        let (color, _) = self.color_and_key(rank, name)?;
        Ok(self.groups(name)?.swap_remove(color))
    }

    /// Index of `rank`'s group in [`groups`](Self::groups), and index in the group: color and key for splitting a
    /// communicator.
    ///
    /// # Errors
    /// [`Error::MeshAxis`] if there is no such group or rank.
    pub fn color_and_key(&self, rank: usize, name: &str) -> Result<(usize, usize)> {
        let groups = self.groups(name)?;
        let inside = |(color, ranks): (usize, &Vec<usize>)| Some((color, ranks.iter().position(|r| *r == rank)?));
        groups.iter().enumerate().find_map(inside).ok_or_else(|| Error::MeshAxis {
            mesh: self.sizes(),
            problem: format!("rank {rank} does not exist; there are {}", self.world()),
        })
    }

    /// A rank's coordinates by name, outermost first. `rank` must be below [`world`](Self::world).
    pub fn coordinates(&self, rank: usize) -> Vec<(&'static str, usize)> {
        let coordinate = |named: &NamedAxes| {
            let mesh = &self.meshes[named.mesh];
            named.axes.iter().fold(0, |index, axis| index * mesh.size(axis) + mesh.coordinate(rank, axis))
        };
        self.coordinates.iter().map(|named| (named.name, coordinate(named))).collect()
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

/// Divides `whole` by the product of `by`, without a remainder.
///
/// # Errors
/// [`Error::MeshAxis`] of `mesh` if there is a remainder, with the numbers and its consequence, `otherwise`.
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
