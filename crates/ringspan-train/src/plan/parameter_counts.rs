//! Counts the parameters of the rank that has most of them.

use crate::{error::Result, spec::RunSpec};
use ringspan_candle::{ParallelRank, Unit};
use ringspan_models::Config;
use std::collections::BTreeSet;

/// Numbers of elements on a rank. A partition is the part of a parameter that the rank computes with (its tensor- or
/// expert-parallel shard); a shard is the part of a partition that it keeps (as in FSDP).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ParameterCounts {
    /// The rank's shards of all parameters.
    pub(super) parameters: u64,
    /// The rank's shards of trained parameters: of all units, of the largest layer, of the head, of the embedding.
    pub(super) trained: u64,
    pub(super) layer_shard: u64,
    pub(super) head_shard: u64,
    pub(super) embedding_shard: u64,
    /// The rank's partitions: of the largest layer, of that layer's trained parameters, of the head, of the embedding.
    pub(super) layer: u64,
    pub(super) layer_trained: u64,
    /// The rank's partitions of the largest layer without experts.
    pub(super) dense_layer: u64,
    pub(super) dense_layer_trained: u64,
    pub(super) head: u64,
    pub(super) embedding: u64,
    /// The rank's part of the gathered copies of the same units in the CPU's memory. Ranks that are threads of one process and gather
    /// the same partitions have one copy together; else the part is the whole.
    pub(super) layer_copy: u64,
    pub(super) dense_layer_copy: u64,
    pub(super) head_copy: u64,
    pub(super) embedding_copy: u64,
    /// The gathered copies of matrices that stay as they are stored, in bytes: of the largest layer, of the head, of
    /// the embedding; 0 for those that the rank keeps whole.
    pub(super) stored_layer: u64,
    pub(super) stored_head: u64,
    pub(super) stored_embedding: u64,
    /// Whether layers, and the head, have matrices that stay as they are stored.
    pub(super) stores_layers: bool,
    pub(super) stores_head: bool,
    /// Elements of its shards that it sends in a micro-batch, in all-gathers.
    pub(super) gathered: u64,
    /// Elements of its shards that it sends in a forward pass that ends after the last layer.
    pub(super) gathered_by_layers: u64,
    /// Elements of gradients that it sends in a micro-batch, in reduce-scatters.
    pub(super) cut: u64,
    /// Elements of its gradient shards that it sends in a step, in all-reduces among the ranks that keep the same shards.
    pub(super) summed: u64,
}

impl ParameterCounts {
    pub(super) fn new(spec: &RunSpec, model: &Config) -> Result<Self> {
        let mut seen: BTreeSet<ParallelRank> = BTreeSet::new();
        let mut most = Self::default();
        // Ranks with the same parallel rank hold as much, to within one element per shard.
        for (rank, _) in spec.mesh.parallel_ranks().iter().enumerate().filter(|(_, rank)| seen.insert(**rank)) {
            most = most.max(Self::of(rank, spec, model)?);
        }
        Ok(most)
    }

    /// Whether the rank exchanges gradients with other ranks.
    pub(super) fn shares(&self) -> bool {
        self.cut > 0
    }

    fn of(rank: usize, spec: &RunSpec, model: &Config) -> Result<Self> {
        let (decoder, placement) = (&spec.decoder, &spec.mesh.placement);
        // Number of ranks that have one gathered copy together, of `ranks` that hold a shard of it each.
        let sharers = |ranks: u64| if spec.mesh.shares_memory { ranks } else { 1 };
        let mut own = Self::default();
        for unit in decoder.units() {
            let times = match unit {
                Unit::Layer(_) => 2,
                Unit::Embedding if model.tie_word_embeddings => 2,
                Unit::Embedding | Unit::Head => 1,
            };
            // Elements in all partitions, in the rank's part of gathered copies, in trained partitions and in trained shards.
            let (mut partitions, mut copies, mut trained_partitions, mut trained_shards) = (0, 0, 0, 0);
            for trained in [true, false] {
                for (replica_group, flat) in placement.flats(decoder, unit, rank, trained)?.iter().enumerate() {
                    let (whole, ranks) = (flat.len() as u64, placement.shard(rank, replica_group).1 as u64);
                    let shard = whole.div_ceil(ranks);
                    partitions += whole;
                    // Partitions that a rank concatenates to one tensor are a copy of its own.
                    let concatenated = flat.partitions().filter(|partition| partition.stacked_at.is_some());
                    let concatenated: u64 = concatenated.map(|partition| partition.len() as u64).sum();
                    copies += concatenated + (whole - concatenated).div_ceil(sharers(ranks));
                    own.parameters += shard;
                    own.gathered += times * shard * (ranks - 1);
                    if unit != Unit::Head {
                        own.gathered_by_layers += shard * (ranks - 1);
                    }
                    if trained {
                        trained_partitions += whole;
                        trained_shards += shard;
                        own.cut += whole - whole / ranks;
                        let members = placement.members(rank, replica_group).len() as u64;
                        let same = spec.mesh.topology.world() as u64 / placement.ranks() as u64 * (members / ranks);
                        // An all-reduce sends each element twice, but for one rank's share.
                        own.summed += 2 * shard * (same - 1) / same;
                    }
                }
            }
            // Matrices that stay as they are stored: four bytes of their shards count as one element.
            let (mut copied, mut stores) = (0, false);
            for (replica_group, flat) in placement.stored_flats(decoder, unit, rank)?.iter().enumerate() {
                let ranks = placement.shard(rank, replica_group).1 as u64;
                let shard = (flat.len() as u64).div_ceil(4 * ranks);
                stores |= !flat.is_empty();
                copied += if ranks > 1 { (flat.len() as u64).div_ceil(sharers(ranks)) } else { 0 };
                own.parameters += shard;
                own.gathered += times * shard * (ranks - 1);
                if unit != Unit::Head {
                    own.gathered_by_layers += shard * (ranks - 1);
                }
            }
            own.trained += trained_shards;
            match unit {
                Unit::Layer(index) => {
                    if !decoder.is_sparse(index) {
                        own.dense_layer = own.dense_layer.max(partitions);
                        own.dense_layer_copy = own.dense_layer_copy.max(copies);
                        own.dense_layer_trained = own.dense_layer_trained.max(trained_partitions);
                    }
                    own.stores_layers |= stores;
                    own.stored_layer = own.stored_layer.max(copied);
                    own.layer = own.layer.max(partitions);
                    own.layer_copy = own.layer_copy.max(copies);
                    own.layer_trained = own.layer_trained.max(trained_partitions);
                    own.layer_shard = own.layer_shard.max(trained_shards);
                }
                Unit::Head => {
                    own.stores_head |= stores;
                    (own.head, own.head_shard, own.stored_head) = (partitions, trained_shards, copied);
                    own.head_copy = copies;
                }
                Unit::Embedding => {
                    own.stores_head |= stores && model.tie_word_embeddings;
                    (own.embedding, own.embedding_shard, own.stored_embedding) = (partitions, trained_shards, copied);
                    own.embedding_copy = copies;
                }
            }
        }
        Ok(own)
    }

    fn max(self, other: Self) -> Self {
        Self {
            parameters: self.parameters.max(other.parameters),
            trained: self.trained.max(other.trained),
            layer_shard: self.layer_shard.max(other.layer_shard),
            head_shard: self.head_shard.max(other.head_shard),
            embedding_shard: self.embedding_shard.max(other.embedding_shard),
            layer: self.layer.max(other.layer),
            layer_trained: self.layer_trained.max(other.layer_trained),
            dense_layer: self.dense_layer.max(other.dense_layer),
            dense_layer_trained: self.dense_layer_trained.max(other.dense_layer_trained),
            layer_copy: self.layer_copy.max(other.layer_copy),
            dense_layer_copy: self.dense_layer_copy.max(other.dense_layer_copy),
            head_copy: self.head_copy.max(other.head_copy),
            embedding_copy: self.embedding_copy.max(other.embedding_copy),
            head: self.head.max(other.head),
            embedding: self.embedding.max(other.embedding),
            stored_layer: self.stored_layer.max(other.stored_layer),
            stored_head: self.stored_head.max(other.stored_head),
            stored_embedding: self.stored_embedding.max(other.stored_embedding),
            stores_layers: self.stores_layers || other.stores_layers,
            stores_head: self.stores_head || other.stores_head,
            gathered: self.gathered.max(other.gathered),
            gathered_by_layers: self.gathered_by_layers.max(other.gathered_by_layers),
            cut: self.cut.max(other.cut),
            summed: self.summed.max(other.summed),
        }
    }
}
