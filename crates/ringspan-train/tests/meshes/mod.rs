//! The meshes of the tests: results must be the same on all of them.
#![allow(dead_code)] // Each test file uses its part.

use ringspan_train::Settings;

/// Most ranks of a mesh that is tested.
const RANKS: usize = 8;

/// The sizes of a mesh's axes; those of experts only where they are set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axes {
    pub(crate) copies: usize,
    pub(crate) parts: usize,
    pub(crate) ring: usize,
    pub(crate) ulysses: usize,
    pub(crate) tp: usize,
    pub(crate) ep: Option<usize>,
    pub(crate) moe_dp: Option<usize>,
}

impl Axes {
    pub(crate) fn ranks(&self) -> usize {
        self.copies * self.parts * self.ring * self.ulysses * self.tp
    }

    pub(crate) fn overriding(&self, settings: Settings) -> Settings {
        Settings {
            dp_replicate: Some(self.copies),
            dp_shard: Some(self.parts),
            ring: Some(self.ring),
            ulysses: Some(self.ulysses),
            tp: Some(self.tp),
            ep: self.ep,
            moe_dp: self.moe_dp,
            ..settings
        }
    }
}

/// All meshes of at most `RANKS` ranks.
pub(crate) fn meshes() -> Vec<Axes> {
    let mut meshes = Vec::new();
    let numbers = (1..=RANKS).flat_map(|copies| (1..=RANKS / copies).map(move |parts| (copies, parts)));
    let (ep, moe_dp) = (None, None);
    for (copies, parts) in numbers {
        for ring in 1..=RANKS / (copies * parts) {
            for ulysses in 1..=RANKS / (copies * parts * ring) {
                let most = RANKS / (copies * parts * ring * ulysses);
                meshes.extend((1..=most).map(|tp| Axes { copies, parts, ring, ulysses, tp, ep, moe_dp }));
            }
        }
    }
    // Ulysses takes at most as many ranks as there are query heads on a tensor-parallel rank.
    meshes.retain(|mesh| mesh.ulysses <= 4 / mesh.tp);
    meshes
}

/// The meshes without Ulysses, each with the ways in which its ranks can share six experts.
pub(crate) fn meshes_of_experts() -> Vec<Axes> {
    let mut all = Vec::new();
    for mesh in meshes().into_iter().filter(|mesh| mesh.ulysses == 1) {
        for (ep, moe_dp) in [(None, None), (Some(2), None), (Some(3), Some(1)), (Some(4), None), (Some(1), Some(1))] {
            let of_copy = mesh.ranks() / mesh.copies;
            let moe_tp = match (ep, moe_dp) {
                (None, _) => mesh.tp,
                (Some(ep), Some(moe_dp)) if mesh.ranks() % (ep * moe_dp) == 0 => mesh.ranks() / (ep * moe_dp),
                (Some(ep), None) if mesh.ranks() % (ep * mesh.tp) == 0 => mesh.tp,
                _ => continue,
            };
            if of_copy % (ep.unwrap_or(1) * moe_tp) == 0 {
                all.push(Axes { ep, moe_dp, ..mesh });
            }
        }
    }
    assert!(all.len() > 50, "{} meshes", all.len());
    all
}
