//! The axes of serving, where attention and experts divide the ranks of a pipeline stage in different ways.

use super::{Mesh, Topology, topology::quotient};
use crate::error::Result;

/// Sizes of the axes of serving. There are `tp x pp` ranks; every other axis is a factor of tp.
///
/// Outermost first, attention divides the tp ranks of a stage into `attn_dp, attn_cp, attn_tp`, and experts into `moe_dp,
/// moe_ep, moe_tp`; the sizes attn_tp and moe_tp follow from the others. Names and rules are those of SGLang's parallel
/// state, except that sizes that do not divide are an error, where SGLang rounds down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Serving {
    /// Number of ranks of a pipeline stage.
    pub tp: usize,
    /// Number of pipeline stages.
    pub pp: usize,
    /// Number of attention replicas in a stage, each with its own requests.
    pub attn_dp: usize,
    /// Number of ranks that share a prompt (context parallel).
    pub attn_cp: usize,
    /// Number of ranks that share the experts of a copy; each holds whole experts (expert parallel).
    pub ep: usize,
    /// Number of copies of the experts.
    pub moe_dp: usize,
    /// Number of consecutive ranks that share the KV cache of a sequence in decoding; `None` if each has a whole cache.
    pub dcp: Option<usize>,
}

impl Default for Serving {
    fn default() -> Self {
        Self { tp: 1, pp: 1, attn_dp: 1, attn_cp: 1, ep: 1, moe_dp: 1, dcp: None }
    }
}

impl Serving {
    /// Makes the groups for these sizes: `tp`, `pp`, `attn_dp`, `attn_cp`, `attn_tp`, `moe_dp`, `moe_ep`, `moe_tp`, and
    /// `dcp` if its size is given.
    ///
    /// If attn_cp exceeds moe_dp, the groups `moe_dp` are those of `attn_cp`: the ranks that share a prompt gather its
    /// tokens before the experts. The coordinate `moe_dp` still counts the copies of the experts.
    ///
    /// # Errors
    /// [`Error::MeshAxis`](crate::Error::MeshAxis) for sizes of 0, sizes that do not divide, products that overflow a
    /// machine word, and a dcp group that would include ranks of another attention replica, which have other requests.
    ///
    /// ```
    /// use ringspan::mesh::Serving;
    ///
    /// let topology = Serving { tp: 8, attn_cp: 2, ep: 4, moe_dp: 2, ..Serving::default() }.topology()?;
    /// assert_eq!(topology.groups("attn_cp")?, [[0, 4], [1, 5], [2, 6], [3, 7]]);
    /// assert_eq!(topology.groups("moe_ep")?, [[0, 1, 2, 3], [4, 5, 6, 7]]);
    /// # Ok::<(), ringspan::Error>(())
    /// ```
    pub fn topology(&self) -> Result<Topology> {
        let Self { tp, pp, attn_dp, attn_cp, ep, moe_dp, dcp } = *self;
        let sizes = Mesh::new(&[("tp", tp), ("pp", pp)])?.sizes();
        let stage = ("the ranks of a stage (tp)", tp);
        let attention = [("attn_dp", attn_dp), ("attn_cp", attn_cp)];
        let attn_tp = quotient(&sizes, stage, &attention, "attn_tp would not be whole")?;
        let moe_tp = quotient(&sizes, stage, &[("ep", ep), ("moe_dp", moe_dp)], "moe_tp would not be whole")?;
        let mut meshes = vec![
            Mesh::new(&[("pp", pp), ("attn_dp", attn_dp), ("attn_cp", attn_cp), ("attn_tp", attn_tp)])?,
            Mesh::new(&[("pp", pp), ("moe_dp", moe_dp), ("moe_ep", ep), ("moe_tp", moe_tp)])?,
        ];
        if let Some(dcp) = dcp {
            let replica = ("the ranks of an attention replica (attn_cp x attn_tp)", attn_cp * attn_tp);
            let otherwise = "a dcp group would hold ranks of two replicas";
            let each = quotient(&sizes, replica, &[("dcp", dcp)], otherwise)? * attn_dp;
            meshes.push(Mesh::new(&[("pp", pp), ("dcp_group", each), ("dcp", dcp)])?);
        }
        let mut topology = Topology::new(meshes)?
            .axis("tp", 0, &["attn_dp", "attn_cp", "attn_tp"])
            .axis("pp", 0, &["pp"])
            .axis("attn_dp", 0, &["attn_dp"])
            .axis("attn_cp", 0, &["attn_cp"])
            .axis("attn_tp", 0, &["attn_tp"])
            .coordinate("moe_dp", 1, &["moe_dp"]);
        topology = match attn_cp > moe_dp {
            true => topology.group("moe_dp", 0, &["attn_cp"]),
            false => topology.group("moe_dp", 1, &["moe_dp"]),
        };
        topology = topology.axis("moe_ep", 1, &["moe_ep"]).axis("moe_tp", 1, &["moe_tp"]);
        Ok(if dcp.is_some() { topology.axis("dcp", 2, &["dcp"]) } else { topology })
    }
}

#[cfg(test)]
mod test;
