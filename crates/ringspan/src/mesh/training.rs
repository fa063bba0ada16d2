//! The axes of training, and their groups of ranks.

use super::{Grid, Mesh, Topology, topology::quotient};
use crate::error::Result;

/// Sizes of the axes of training, outermost first: `pp, dp_replicate, dp_shard, cp, tp`, where cp is ring x Ulysses.
///
/// The axis tp varies fastest. A pipeline stage is `dp_replicate x dp_shard x cp x tp` consecutive ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Training {
    /// Number of pipeline stages.
    pub pp: usize,
    /// Number of copies of the model (data-parallel replicas).
    pub dp_replicate: usize,
    /// Number of ranks that share the parameters of a copy, each with its own sequences.
    pub dp_shard: usize,
    /// The ranks that share a sequence (context parallel).
    pub cp: Grid,
    /// Number of ranks that share each layer (tensor parallel).
    pub tp: usize,
    /// The mesh of experts over the ranks of a stage; `None` for a dense model.
    pub experts: Option<Experts>,
}

/// The mesh of experts over the ranks of a pipeline stage: `moe_dp, moe_ep, moe_tp`, outermost first.
///
/// The size of moe_tp follows: ranks of a stage / (ep x moe_dp).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Number of ranks that share the experts of a copy; each holds whole experts.
    pub ep: usize,
    /// Number of copies of the experts.
    pub moe_dp: usize,
}

impl Default for Training {
    fn default() -> Self {
        Self { pp: 1, dp_replicate: 1, dp_shard: 1, cp: Grid::new(1, 1), tp: 1, experts: None }
    }
}

impl Training {
    /// Makes the groups for these sizes.
    ///
    /// Their names are: `pp`, `dp_replicate`, `dp_shard`, `cp` with its parts `ring` and `ulysses`, and `tp` for the axes;
    /// `dp` = dp_replicate x dp_shard for ranks with different sequences; `dp_shard_cp` for ranks that share the parameters
    /// of a copy; `dp_cp` for ranks whose losses are of different tokens. With experts also `moe_dp`, `moe_ep` and
    /// `moe_tp`.
    ///
    /// # Errors
    /// [`Error::MeshAxis`](crate::Error::MeshAxis) for sizes of 0, products that overflow a machine word, and expert axes
    /// whose product does not divide the ranks of a stage.
    ///
    /// ```
    /// use ringspan::mesh::{Grid, Training};
    ///
    /// let topology = Training { dp_shard: 2, cp: Grid::new(2, 1), tp: 2, ..Training::default() }.topology()?;
    /// assert_eq!(topology.groups("cp")?, [[0, 2], [1, 3], [4, 6], [5, 7]]);
    /// assert_eq!(topology.groups("dp_shard_cp")?, [[0, 2, 4, 6], [1, 3, 5, 7]]);
    /// assert_eq!(topology.color_and_key(6, "dp_shard_cp")?, (0, 3)); // which group, and where in it
    /// # Ok::<(), ringspan::Error>(())
    /// ```
    pub fn topology(&self) -> Result<Topology> {
        let Self { pp, dp_replicate, dp_shard, cp, tp, experts } = *self;
        let (ring, ulysses) = (("ring", cp.ring), ("ulysses", cp.ulysses));
        let (outer, inner) = if cp.ulysses_outer { (ulysses, ring) } else { (ring, ulysses) };
        let axes = [("pp", pp), ("dp_replicate", dp_replicate), ("dp_shard", dp_shard), outer, inner, ("tp", tp)];
        let mesh = Mesh::new(&axes)?;
        let stage = mesh.world() / pp;
        let mut meshes = vec![mesh];
        if let Some(Experts { ep, moe_dp }) = experts {
            let parts = [("ep", ep), ("moe_dp", moe_dp)];
            let moe_tp =
                quotient(&meshes[0].sizes(), ("the ranks of a stage", stage), &parts, "moe_tp would not be whole")?;
            meshes.push(Mesh::new(&[("pp", pp), ("moe_dp", moe_dp), ("moe_ep", ep), ("moe_tp", moe_tp)])?);
        }
        let cp = [outer.0, inner.0];
        let mut topology = Topology::new(meshes)?
            .axis("pp", 0, &["pp"])
            .axis("dp_replicate", 0, &["dp_replicate"])
            .axis("dp_shard", 0, &["dp_shard"])
            .axis("cp", 0, &cp)
            .axis("ring", 0, &["ring"])
            .axis("ulysses", 0, &["ulysses"])
            .axis("tp", 0, &["tp"])
            .group("dp", 0, &["dp_replicate", "dp_shard"])
            .group("dp_shard_cp", 0, &["dp_shard", cp[0], cp[1]])
            .group("dp_cp", 0, &["dp_replicate", "dp_shard", cp[0], cp[1]]);
        if experts.is_some() {
            topology =
                topology.axis("moe_dp", 1, &["moe_dp"]).axis("moe_ep", 1, &["moe_ep"]).axis("moe_tp", 1, &["moe_tp"]);
        }
        Ok(topology)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart() {
        let sizes = Training { pp: 2, dp_replicate: 2, dp_shard: 2, cp: Grid::new(2, 2), tp: 2, experts: None };
        let topology = sizes.topology().expect("valid");
        assert_eq!(topology.world(), 64);
        let of = |name| topology.members(0, name).expect("a group");
        assert_eq!(of("tp"), [0, 1]);
        assert_eq!(of("ulysses"), [0, 2]);
        assert_eq!(of("ring"), [0, 4]);
        assert_eq!(of("cp"), [0, 2, 4, 6]);
        assert_eq!(of("dp_shard"), [0, 8]);
        assert_eq!(of("dp_replicate"), [0, 16]);
        assert_eq!(of("dp"), [0, 8, 16, 24]);
        assert_eq!(of("dp_shard_cp"), [0, 2, 4, 6, 8, 10, 12, 14]);
        assert_eq!(of("dp_cp"), (0..32).step_by(2).collect::<Vec<_>>());
        assert_eq!(of("pp"), [0, 32]);
        let at = [("pp", 1), ("dp_replicate", 0), ("dp_shard", 1), ("cp", 3), ("ring", 1), ("ulysses", 1), ("tp", 1)];
        assert_eq!(topology.coordinates(47), at);
    }

    #[test]
    fn experts_read_the_ranks_of_a_stage_again() {
        let experts = Some(Experts { ep: 4, moe_dp: 2 });
        let sizes = Training { pp: 2, dp_shard: 4, cp: Grid::new(2, 1), tp: 2, experts, ..Training::default() };
        let topology = sizes.topology().expect("valid");
        assert_eq!(topology.members(16, "moe_tp"), Ok(vec![16, 17]));
        assert_eq!(topology.members(16, "moe_ep"), Ok(vec![16, 18, 20, 22]));
        assert_eq!(topology.members(16, "moe_dp"), Ok(vec![16, 24]));
        assert_eq!(topology.coordinates(29)[7..], [("moe_dp", 1), ("moe_ep", 2), ("moe_tp", 1)]);
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused_with_the_numbers() {
        let message = |sizes: Training| sizes.topology().err().map(|e| e.to_string()).unwrap_or_default();
        let experts = Some(Experts { ep: 3, moe_dp: 2 });
        assert_eq!(
            message(Training { pp: 2, dp_shard: 4, tp: 2, experts, ..Training::default() }),
            "mesh pp 2 x dp_replicate 1 x dp_shard 4 x ring 1 x ulysses 1 x tp 2: the ranks of a stage, 8, do not \
             divide by ep 3 x moe_dp 2 = 6: moe_tp would not be whole"
        );
        let experts = |ep, moe_dp| Training { experts: Some(Experts { ep, moe_dp }), ..Training::default() };
        assert!(message(experts(0, 1)).contains("axis ep has size 0"));
        assert!(message(experts(usize::MAX, 2)).contains("does not fit a machine word"));
        assert!(message(Training { tp: 0, ..Training::default() }).contains("axis tp has size 0"));
        let topology = Training::default().topology().expect("valid");
        let message = topology.groups("ep").err().map(|e| e.to_string()).unwrap_or_default();
        assert!(message.contains("no group ep") && message.contains("dp_shard_cp"), "{message}");
        assert!(topology.color_and_key(1, "tp").is_err());
    }

    proptest! {
        #[test]
        fn groups_part_the_world_and_agree_with_coordinates(
            pp in 1usize..3, dp_replicate in 1usize..4, dp_shard in 1usize..4, ring in 1usize..4, ulysses in 1usize..3,
            tp in 1usize..4, outer: bool, ep in 1usize..5, moe_dp in 1usize..4,
        ) {
            let mut cp = Grid::new(ring, ulysses);
            if outer { cp = cp.with_ulysses_outer(); }
            let experts = (dp_replicate * dp_shard * ring * ulysses * tp).is_multiple_of(ep * moe_dp);
            let experts = experts.then_some(Experts { ep, moe_dp });
            let sizes = Training { pp, dp_replicate, dp_shard, cp, tp, experts };
            let topology = sizes.topology().expect("valid");
            for name in topology.names() {
                let groups = topology.groups(name).expect("a group");
                let mut all = groups.concat();
                all.sort_unstable();
                prop_assert_eq!(all, (0..topology.world()).collect::<Vec<_>>());
                prop_assert!(name == "pp" || groups.iter().all(|g| g.iter().all(|r| r * pp / topology.world()
                    == g[0] * pp / topology.world())), "{} leaves its stage", name);
            }
            for rank in 0..topology.world() {
                for (name, at) in topology.coordinates(rank) {
                    prop_assert_eq!(topology.color_and_key(rank, name).expect("a group").1, at);
                    prop_assert_eq!(topology.members(rank, name).expect("a group")[at], rank);
                }
            }
        }
    }
}
