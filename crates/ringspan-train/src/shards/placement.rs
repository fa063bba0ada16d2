//! Which rank of a copy of the model holds which partitions and shards: arithmetic that every rank does for all ranks.

use super::flat_parameter::FlatParameter;
use super::stored_matrices::{Region, StoredFlat, StoredFormats};
use crate::error::{Result, model_error};
use ringspan_candle::quantized::Format;
use ringspan_candle::{ParallelRank, Partition, ReplicaGroup, Unit};
use ringspan_models::Decoder;

/// The ranks of a copy of the model, and how they share its parameters.
///
/// The ranks that have the same partition of a parameter are its *replica group*: each member keeps a shard of the partition, and the
/// gradient of the whole partition is the sum of their gradients. Replica groups are numbered in the same way on every rank.
#[derive(Debug, Clone)]
pub(crate) struct ShardPlacement {
    parallel_ranks: Vec<ParallelRank>,
    /// The replica groups of each rank, by rank, then by number.
    groups: Vec<Vec<ReplicaGroup>>,
    /// Whether members keep a shard each; otherwise each keeps the whole partition.
    is_sharded: bool,
    /// The formats of the matrices that stay as they are stored.
    stored: StoredFormats,
    /// Number of such matrices that are f32 all the same, because ranks would cut them inside their blocks.
    decoded: usize,
}

impl ShardPlacement {
    /// The placement among the ranks of a copy, given by their tensor- and expert-parallel ranks.
    pub(crate) fn new(decoder: &Decoder, parallel_ranks: Vec<ParallelRank>, is_sharded: bool) -> Result<Self> {
        let groups =
            parallel_ranks.iter().map(|rank| decoder.all_parameters().replica_groups(*rank).map_err(model_error));
        let groups = groups.collect::<Result<_>>()?;
        Ok(Self { parallel_ranks, groups, is_sharded, stored: StoredFormats::new(), decoded: 0 })
    }

    /// This placement, with the matrices of `formats` in their stored formats. A matrix that ranks would cut inside its blocks is f32
    /// on all of them.
    pub(crate) fn with_stored(self, decoder: &Decoder, formats: StoredFormats) -> Result<Self> {
        let (all, mut stored) = (formats.len(), formats);
        for rank in &self.parallel_ranks {
            for unit in decoder.units() {
                for partition in decoder.all_parameters().partitions(unit, *rank).map_err(model_error)? {
                    let inside = |format: &Format| {
                        let (block, columns) = (format.block_len(), Region::new(&partition).columns);
                        !columns.start.is_multiple_of(block) || !columns.end.is_multiple_of(block)
                    };
                    if stored.get(&partition.name).is_some_and(inside) {
                        stored.remove(&partition.name);
                    }
                }
            }
        }
        Ok(Self { decoded: all - stored.len(), stored, ..self })
    }

    /// The formats of the matrices that stay as they are stored.
    pub(crate) fn stored(&self) -> &StoredFormats {
        &self.stored
    }

    /// Number of matrices that are f32 because ranks would cut them inside their blocks.
    pub(crate) fn decoded(&self) -> usize {
        self.decoded
    }

    /// Number of ranks in a copy of the model.
    pub(crate) fn ranks(&self) -> usize {
        self.parallel_ranks.len()
    }

    /// Number of replica groups, the same on every rank.
    pub(crate) fn replica_groups(&self) -> usize {
        self.groups.first().map_or(0, Vec::len)
    }

    /// Whether members keep a shard each.
    pub(crate) fn is_sharded(&self) -> bool {
        self.is_sharded
    }

    /// The ranks in a replica group of `rank`, rising.
    pub(crate) fn members(&self, rank: usize, replica_group: usize) -> Vec<usize> {
        let own = self.groups[rank][replica_group];
        (0..self.ranks()).filter(|other| self.groups[*other][replica_group] == own).collect()
    }

    /// The index of the shard that a rank keeps of its partitions in a replica group, and the number of shards.
    pub(crate) fn shard(&self, rank: usize, replica_group: usize) -> (usize, usize) {
        let members = self.members(rank, replica_group);
        match self.is_sharded {
            true => (members.iter().position(|member| *member == rank).unwrap_or(0), members.len()),
            false => (0, 1),
        }
    }

    /// A rank's partitions of a unit, by replica group, as rows of elements: either those of trained parameters, or those of frozen ones
    /// that do not stay as they are stored.
    pub(crate) fn flats(
        &self,
        decoder: &Decoder,
        unit: Unit,
        rank: usize,
        trained: bool,
    ) -> Result<Vec<FlatParameter>> {
        let partitions = decoder.all_parameters().partitions(unit, self.parallel_ranks[rank]).map_err(model_error)?;
        let flat = |replica_group| {
            let own = self.groups[rank][replica_group];
            let of_group = |p: &&Partition| {
                p.replicas == own && decoder.trains(&p.name) == trained && !self.stored.contains_key(&p.name)
            };
            FlatParameter::new(partitions.iter().filter(of_group).cloned().collect(), self.shard(rank, replica_group).1)
        };
        Ok((0..self.replica_groups()).map(flat).collect())
    }

    /// A rank's partitions of a unit's matrices that stay as they are stored, by replica group, as rows of bytes.
    pub(crate) fn stored_flats(&self, decoder: &Decoder, unit: Unit, rank: usize) -> Result<Vec<StoredFlat>> {
        let partitions = decoder.all_parameters().partitions(unit, self.parallel_ranks[rank]).map_err(model_error)?;
        let flat = |replica_group| {
            let own = self.groups[rank][replica_group];
            let of_group = partitions.iter().filter(|partition| partition.replicas == own);
            let stored = of_group.filter_map(|partition| Some((partition.clone(), *self.stored.get(&partition.name)?)));
            StoredFlat::new(stored, self.shard(rank, replica_group).1)
        };
        (0..self.replica_groups()).map(flat).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder() -> Decoder {
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "vocab_size": 31, "hidden_size": 12, "intermediate_size": 10,
            "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": true, "decoder_sparse_step": 2,
            "rope_theta": 1e4, "tie_word_embeddings": false, "hidden_act": "silu",
        });
        Decoder::new(serde_json::from_value(config).expect("a config")).expect("supported")
    }

    /// A model whose experts are one tensor per parameter, which ranks cut in either dimension.
    fn stacked() -> Decoder {
        let config = serde_json::json!({
            "model_type": "gpt_oss", "vocab_size": 31, "hidden_size": 12, "intermediate_size": 6,
            "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4,
            "num_local_experts": 4, "num_experts_per_tok": 2,
        });
        Decoder::new(serde_json::from_value(config).expect("a config")).expect("supported")
    }

    /// The model of [`decoder`] with adapters, of which an expert's have a matrix that is whole where the expert's matrices are
    /// cut.
    fn adapted() -> Decoder {
        let targets = ringspan_models::TARGETS.map(str::to_owned).to_vec();
        let lora = ringspan_models::Lora::new(2, 1.0, targets).expect("possible");
        decoder().with_lora(lora).expect("possible")
    }

    /// Every element is kept by exactly one rank of a copy where shards are cut, and by all members of its replica group where not.
    #[test]
    fn the_shards_of_all_ranks_are_the_model() {
        let meshes = [
            (1, 1, 1, 1, true),
            (6, 3, 1, 1, true),
            (8, 4, 2, 2, true),
            (8, 4, 2, 4, true),
            (4, 2, 4, 1, true),
            (4, 2, 2, 1, false),
            (8, 2, 2, 2, false),
        ];
        let of_models = [decoder(), adapted(), stacked()]
            .into_iter()
            .flat_map(|decoder| meshes.map(|mesh| (decoder.clone(), mesh)));
        for (decoder, (ranks, tp, ep, moe_tp, cut)) in of_models {
            let parallel_rank = |rank: usize| ParallelRank {
                tp: (rank % tp, tp),
                ep: (rank / moe_tp % ep, ep),
                moe_tp: (rank % moe_tp, moe_tp),
            };
            let placement =
                ShardPlacement::new(&decoder, (0..ranks).map(parallel_rank).collect(), cut).expect("possible");
            for unit in decoder.units() {
                for (name, shape) in decoder.unit_shapes(unit) {
                    let whole: Vec<f32> = (0..shape.iter().product()).map(|at| at as f32).collect();
                    let in_first = whole.len() / shape[0];
                    let mut kept = vec![0; shape.iter().product()];
                    let trained = decoder.trains(&name);
                    for rank in 0..ranks {
                        for (replica_group, flat) in
                            placement.flats(&decoder, unit, rank, trained).expect("possible").iter().enumerate()
                        {
                            for partition_shard in flat.partition_shards(placement.shard(rank, replica_group).0) {
                                let partition = partition_shard.partition;
                                if partition.name != name {
                                    continue;
                                }
                                let times =
                                    if cut { 1.0 } else { 1.0 / placement.members(rank, replica_group).len() as f64 };
                                let rows = partition_shard.row_range();
                                let picked = partition_shard
                                    .gather_from(rows.start, &whole[rows.start * in_first..rows.end * in_first]);
                                for (at, picked) in partition_shard.in_partition.clone().zip(picked) {
                                    let (row, column) = (at / partition.columns.len(), at % partition.columns.len());
                                    let row = (partition.rows.start + row) * partition.width();
                                    let at = row + partition.columns.start + column;
                                    assert_eq!(picked, whole[at], "{name}");
                                    kept[at] += (times * 840.0).round() as usize;
                                }
                            }
                        }
                    }
                    assert!(kept.iter().all(|times| *times == 840), "{name} on {ranks} ranks, tp {tp}, ep {ep}");
                }
            }
        }
    }
}
