//! The mesh of ranks that a model runs on.

use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::model_parallel_rank::ModelParallelRank;
use ringspan::attention::Group;
use ringspan::comm::process_group::ProcessGroup;
use ringspan::comm::timed::TimedCommunicator;
use ringspan::comm::{Communicator, threads};
use ringspan::schedule::HeadShare;
use ringspan::{World, world};
use ringspan_candle::{Devices, ParallelRank};
use ringspan_models::Decoder;
use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::time::Duration;

/// A mesh of `pp x attn_dp x ring x ulysses x tp` ranks, and the devices and threads or processes that run them.
///
/// The axis tp varies fastest. Experts divide the ranks of a pipeline stage into `moe_dp x ep x moe_tp`, outermost first.
#[derive(Debug, Clone)]
pub struct Mesh {
    /// Ring size R.
    pub ring: usize,
    /// Ulysses size U.
    pub ulysses: usize,
    /// Number of ranks that share the width of layers (tensor parallel).
    pub tp: usize,
    /// Number of ranks over which whole experts are distributed (expert parallel). They are among the ranks that there are anyway.
    pub ep: usize,
    /// Number of pipeline stages, each of which has some of the layers.
    pub pp: usize,
    /// Number of attention replicas (attention data parallel), each of which computes sequences of its own; experts may be shared
    /// over several of them.
    pub attn_dp: usize,
    /// Number of CPU threads of each rank.
    pub threads: usize,
    /// Upper limit on the time that a rank waits for another.
    pub deadline: Duration,
    /// The devices on which ranks compute.
    pub devices: Devices,
    /// Whether ranks are threads of this process, or processes.
    pub processes: ProcessGroup,
}

impl Mesh {
    /// A mesh of one rank with one thread.
    pub const fn single() -> Self {
        Self {
            ring: 1,
            ulysses: 1,
            tp: 1,
            ep: 1,
            pp: 1,
            attn_dp: 1,
            threads: 1,
            deadline: Duration::from_secs(600),
            devices: Devices::CPU,
            processes: ProcessGroup::single(),
        }
    }

    /// Runs `work` on every rank of a mesh that uses only context parallelism, and returns the results of the ranks of this
    /// process, in rank order.
    ///
    /// # Errors
    /// Tensor, expert or pipeline parallelism, or attention replicas, which only the engine has; a number of processes that is not
    /// the number of ranks; the error of the rank that failed first.
    pub fn run<T: Send>(&self, work: impl Fn(Arc<Group>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let Self { tp, ep, pp, attn_dp, .. } = *self;
        if (tp, ep, pp, attn_dp) != (1, 1, 1, 1) {
            return Err(Error::Mesh(format!(
                "tp {tp}, ep {ep}, pp {pp}, attn_dp {attn_dp}: here ranks share tokens alone, so all must be 1"
            )));
        }
        self.run_with(|comm| self.on_rank(comm, |groups| work(groups.cp().clone())))
    }

    /// Runs `work` on every rank, and measures how long each rank waits for others.
    ///
    /// # Errors
    /// A number of processes that is not the number of ranks; the error of the rank that failed first.
    pub(crate) fn run_timed<T: Send>(
        &self,
        work: impl Fn(&Groups, &TimedCommunicator) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.run_with(|comm| {
            let timed = Arc::new(TimedCommunicator::new(comm));
            self.on_rank(timed.clone(), |groups| work(groups, &timed))
        })
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.stage_size().saturating_mul(self.pp)
    }

    /// Number of ranks of a pipeline stage.
    pub(crate) fn stage_size(&self) -> usize {
        self.attn_dp.saturating_mul(self.cp()).saturating_mul(self.tp)
    }

    /// The sizes of the axes of a pipeline stage.
    fn stage_axes(&self) -> String {
        let Self { attn_dp, ring, ulysses, tp, .. } = *self;
        let replicas = if attn_dp > 1 { format!("attn_dp {attn_dp} x ") } else { String::new() };
        format!("{replicas}ring {ring} x ulysses {ulysses} x tp {tp}")
    }

    /// Number of ranks that share the tokens of a sequence (context parallel).
    pub(crate) fn cp(&self) -> usize {
        self.ring.saturating_mul(self.ulysses)
    }

    /// Number of ranks over which the width of an expert is distributed: as many of the tp ranks as `ep` leaves.
    pub(crate) fn moe_tp(&self) -> usize {
        greatest_common_divisor(self.tp, self.stage_size() / self.ep.max(1))
    }

    /// The part of the model with which a rank computes.
    pub(crate) fn model_rank(&self, rank: usize) -> ModelParallelRank {
        let (tp, ep, moe_tp) = (self.tp.max(1), self.ep.max(1), self.moe_tp().max(1));
        let (stage, rank) = (rank / self.stage_size().max(1), rank % self.stage_size().max(1));
        let shard = ParallelRank { tp: (rank % tp, tp), ep: (rank / moe_tp % ep, ep), moe_tp: (rank % moe_tp, moe_tp) };
        ModelParallelRank { stage: (stage, self.pp), shard }
    }

    /// Checks that the ranks can share a model.
    ///
    /// # Errors
    /// Sizes that do not divide the ranks, the heads, the layers' width or the experts, with the numbers.
    pub(crate) fn check(&self, decoder: &Decoder) -> Result<()> {
        let Self { ring, ulysses, tp, ep, pp, attn_dp, .. } = *self;
        let (refuse, ranks) = (|problem: String| Err(Error::Mesh(problem)), self.stage_size());
        if ranks == 0 || ep == 0 || pp == 0 {
            return refuse(format!(
                "pp {pp} x attn_dp {attn_dp} x ring {ring} x ulysses {ulysses} x tp {tp}, ep {ep}: each must be at least 1"
            ));
        }
        let layers = decoder.config().num_hidden_layers;
        if pp > layers {
            return refuse(format!("pp {pp} leaves stages without one of the {layers} layers"));
        }
        let is_sparse = decoder.experts() > 0;
        if ep > 1 && !is_sparse {
            let model = &decoder.config().model_type;
            return refuse(format!("ep {ep} shares experts, and {model} has none; leave it out"));
        }
        if !ranks.is_multiple_of(ep) {
            return refuse(format!(
                "ep {ep} does not divide the {ranks} ranks of a stage ({}), among which experts are shared",
                self.stage_axes()
            ));
        }
        let moe_tp = if is_sparse { self.moe_tp() } else { 1 };
        decoder.all_parameters().check(tp, ep, moe_tp).map_err(|error| Error::Mesh(error.to_string()))?;
        for rank in 0..tp {
            let heads = decoder.head_counts().of_rank((rank, tp)).map_err(|error| Error::Mesh(error.to_string()))?;
            let (queries, key_values) = (heads.queries.len(), heads.key_values.len());
            if tp > 1 && ulysses > queries {
                let all = decoder.head_counts().queries;
                return refuse(format!(
                    "ulysses {ulysses} distributes heads over {ulysses} ranks, but tp {tp} leaves {queries} of the {all} query heads to some"
                ));
            }
            HeadShare::all(queries, key_values, (ring, ulysses).into())?;
        }
        Ok(())
    }

    fn run_with<T: Send>(&self, work: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let ranks = threads::Options { deadline: self.deadline, ..Default::default() };
        let options = world::Options { threads_per_rank: self.threads, ranks };
        World::start(&self.processes, self.size(), options)?.run(|rank| work(rank.communicator().clone()))
    }

    fn on_rank<T: Send>(&self, world: Arc<dyn Communicator>, work: impl Fn(&Groups) -> Result<T> + Sync) -> Result<T> {
        let kernel = self.devices.of(world.rank()).kernel(self.threads)?;
        let model_rank = self.model_rank(world.rank());
        let groups = Groups::new(world, self.attn_dp, (self.ring, self.ulysses), model_rank, kernel)?;
        work(&groups)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

impl Display for Mesh {
    /// The axes and, if experts are distributed, how.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { ep, pp, .. } = *self;
        write!(f, "pp {pp} x {}", self.stage_axes())?;
        if ep > 1 {
            let moe_tp = self.moe_tp();
            let moe_dp = self.stage_size() / (ep * moe_tp).max(1);
            write!(f, ", experts by moe_dp {moe_dp} x ep {ep} x moe_tp {moe_tp}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringspan::comm::Buffer;
    use ringspan::kernel::Kernel;
    use ringspan::mesh::Serving;
    use std::collections::BTreeMap;

    /// Attention and experts divide the ranks as the topology that `ringspan mesh --serving` shows.
    #[test]
    fn ranks_are_where_the_topology_of_serving_has_them() {
        let all = [
            (1, 1, 1, 1, 1, 1),
            (1, 1, 2, 1, 2, 2),
            (2, 1, 2, 2, 2, 4),
            (1, 1, 3, 1, 4, 6),
            (3, 1, 4, 1, 1, 2),
            (2, 1, 1, 1, 6, 3),
            (1, 2, 1, 1, 1, 2),
            (1, 3, 2, 1, 2, 4),
            (2, 2, 1, 2, 3, 6),
        ];
        for (pp, attn_dp, ring, ulysses, tp, ep) in all {
            let mesh = Mesh { attn_dp, ring, ulysses, tp, ep, pp, ..Mesh::single() };
            let (attn_cp, moe_dp) = (mesh.cp(), mesh.stage_size() / (ep * mesh.moe_tp()));
            let sizes = Serving { tp: mesh.stage_size(), pp, attn_dp, attn_cp, ep, moe_dp, ..Serving::default() };
            let topology = sizes.topology().expect("sizes that divide");
            for rank in 0..mesh.size() {
                let of: BTreeMap<_, _> = topology.coordinates(rank).into_iter().collect();
                let ModelParallelRank { stage, shard: ParallelRank { tp: of_tp, ep: of_ep, moe_tp } } =
                    mesh.model_rank(rank);
                let expected = [of["pp"], of["attn_tp"], of["moe_ep"], of["moe_tp"]];
                assert_eq!([stage.0, of_tp.0, of_ep.0, moe_tp.0], expected, "{mesh}, rank {rank}");
                let cp_rank = rank % mesh.stage_size() / tp;
                assert_eq!(
                    [cp_rank / attn_cp, cp_rank % attn_cp],
                    [of["attn_dp"], of["attn_cp"]],
                    "{mesh}, rank {rank}"
                );
            }
        }
    }

    /// Rank 0 sends a message once to each other stage, whose first rank broadcasts it there.
    #[test]
    fn a_message_crosses_from_stage_to_stage_once() {
        let mesh = Mesh { pp: 3, ring: 2, tp: 2, ..Mesh::single() };
        let numbers = 1000;
        let run = mesh.run_with(|world| {
            let groups = Groups::new(world.clone(), 1, (2, 1), mesh.model_rank(world.rank()), Kernel::new(1))?;
            let before = world.bytes_sent();
            let message = groups.broadcast((world.rank() == 0).then(|| Buffer::F32(vec![1.0; numbers])))?;
            assert_eq!(message.f32()?.len(), numbers);
            Ok(world.bytes_sent() - before)
        });
        // Rank 0 sends to the first rank of each other stage; the first rank of a stage to its three others.
        let copies: Vec<u64> = run.expect("sent").into_iter().map(|bytes| bytes / (4 * numbers as u64)).collect();
        assert_eq!(copies, [2 + 3, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0]);
    }
}
