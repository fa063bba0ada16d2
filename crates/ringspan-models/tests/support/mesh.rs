//! A model computed on the ranks of a mesh, whose results are put together.

use super::one_rank::loss_and_gradients_of_rank;
use super::{Answer, Batch, Shared, balanced};
use candle_core::Tensor;
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, StrategyKind};
use ringspan_candle::experts::Local;
use ringspan_candle::{
    Attend, Context, ExpertParallel, InputDropout, ParallelRank, Partition, TensorParallel, Unit, Weights,
};
use ringspan_models::{Decoder, Error};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// How a model is distributed over ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TestMesh {
    pub(crate) ring: usize,
    pub(crate) ulysses: usize,
    pub(crate) tp: usize,
    pub(crate) ep: usize,
    pub(crate) moe_tp: usize,
    /// Seed of the dropout, if anything is dropped.
    pub(crate) dropout: Option<u64>,
}

impl Default for TestMesh {
    fn default() -> Self {
        Self { ring: 1, ulysses: 1, tp: 1, ep: 1, moe_tp: 1, dropout: None }
    }
}

impl TestMesh {
    fn ranks(&self) -> usize {
        self.ring * self.ulysses * self.tp
    }

    fn parallel_rank(&self, rank: usize) -> ParallelRank {
        let Self { tp, ep, moe_tp, .. } = *self;
        ParallelRank { tp: (rank % tp, tp), ep: (rank / moe_tp % ep, ep), moe_tp: (rank % moe_tp, moe_tp) }
    }
}

/// Computes on `ring x ulysses` ranks and puts their results together: gradients are summed over the ranks.
pub(crate) fn on_mesh(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    kind: LayoutKind,
    (ring, ulysses): (usize, usize),
) -> Answer {
    on_ranks(decoder, weights, batch, kind, TestMesh { ring, ulysses, ..TestMesh::default() })
}

/// Like [`on_mesh`], with tensor and expert parallelism.
pub(crate) fn on_ranks(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    kind: LayoutKind,
    test_mesh: TestMesh,
) -> Answer {
    let TestMesh { ring, ulysses, tp, ep, moe_tp, dropout } = test_mesh;
    let documents = Documents::batch(batch.rows, batch.len);
    let layout = Arc::new(Layout::new(kind, &documents, ring * ulysses).expect("ranks"));
    let answer = Mutex::new(Answer {
        logits: vec![0.0; batch.tokens.len() * decoder.config().vocab_size],
        loss: 0.0,
        gradients: weights
            .iter()
            .filter(|(name, _)| decoder.trains(name))
            .map(|(name, weight)| (name.clone(), vec![0.0; weight.elem_count()]))
            .collect(),
    });
    let orders = threads::run(test_mesh.ranks(), Options::default(), |comm| {
        let rank = comm.rank();
        let run = || -> Result<Vec<Unit>, Error> {
            let split = |color: usize| comm.split(color, rank).map_err(candle_core::Error::wrap);
            let (cp, tensor) = (split(rank % tp)?, TensorParallel::new(split(rank / tp)?));
            // The rank's expert group: among its ranks, moe_tp varies fastest, then ep.
            let (width, whole) = (split(rank / moe_tp)?, split(rank / (ep * moe_tp) * moe_tp + rank % moe_tp)?);
            let group = Group::new(cp, (ring, ulysses), Kernel::new(1)).map_err(candle_core::Error::wrap)?;
            let context = Context::new(Arc::new(group), layout.clone(), StrategyKind::Ring)?;
            let inner: Shared = match ep * moe_tp {
                1 => Arc::new(Local),
                _ => Arc::new(ExpertParallel::new(decoder.experts(), whole, width)?),
            };
            let all = comm.clone();
            let balanced = balanced(decoder, inner.clone(), move |sums| {
                // Counts of this size are exact in f32, and probabilities precise enough for the comparison.
                let mut narrow: Vec<f32> = sums.iter().map(|x| *x as f32).collect();
                all.all_reduce(&mut narrow).map_err(candle_core::Error::wrap)?;
                sums.iter_mut().zip(narrow).for_each(|(sum, x)| *sum = f64::from(x));
                Ok(())
            });
            let experts = balanced.clone().map_or(inner, |balanced| balanced);
            let context = context.with_experts(experts).with_tensor_parallel(tensor);
            let numbers: Vec<usize> = (0..batch.tokens.len()).collect();
            let numbers = layout.shard(rank / tp, &numbers, 1).map_err(candle_core::Error::wrap)?;
            let context = match dropout {
                Some(seed) => context.with_input_dropout(InputDropout::new(seed, numbers)),
                None => context,
            };
            let parallel_rank = test_mesh.parallel_rank(rank);
            let own_weights = partitions_of(decoder, weights, parallel_rank)?;
            let shard = |all: &[u32]| layout.shard(rank / tp, all, 1).map_err(candle_core::Error::wrap);
            let (tokens, targets) = (shard(&batch.tokens)?, shard(&batch.targets())?);
            let (own, order) =
                loss_and_gradients_of_rank(decoder, &own_weights, &tokens, &targets, batch.valid(), &context)?;
            let mut answer = answer.lock().expect("no panics");
            add_logits(decoder, &layout, (rank / tp, &context), &own.logits, &mut answer.logits);
            if rank % tp == 0 {
                // The loss is the same on all ranks of a tensor-parallel group.
                answer.loss += own.loss;
            }
            if rank == 0 {
                answer.loss += balanced.map_or(0.0, |balanced| balanced.loss().expect("a pass is done"));
            }
            add_gradients(decoder, parallel_rank, own.gradients, &mut answer.gradients)?;
            Ok(order)
        };
        run().map_err(|error| ringspan::Error::Layout(error.to_string()))
    })
    .expect("runs");
    assert!(orders.iter().all(|order| *order == orders[0]), "ranks deliver in one order, or their sums would mix");
    answer.into_inner().expect("no panics")
}

/// The partitions of whole weights that a rank computes with.
fn partitions_of(decoder: &Decoder, weights: &Weights, rank: ParallelRank) -> Result<Weights, Error> {
    let mut own = Weights::new();
    for unit in decoder.units() {
        for partition in decoder.all_parameters().partitions(unit, rank)? {
            let Partition { name, rows, columns, stacked_at, .. } = &partition;
            let matrix = weights[name].reshape(((), partition.width()))?;
            let part = matrix.narrow(0, rows.start, rows.len())?.narrow(1, columns.start, columns.len())?;
            let part = part.contiguous()?.reshape(partition.shape())?;
            let part = match stacked_at.filter(|row| *row > 0) {
                Some(_) => Tensor::cat(&[&own[name], &part], 0)?,
                None => part,
            };
            own.insert(name.clone(), part);
        }
    }
    Ok(own)
}

/// Adds the logits `[T, V of rank]` of a rank to those of all, `[B * S, V]`.
fn add_logits(decoder: &Decoder, layout: &Layout, (rank, of): (usize, &Context), own: &[f32], all: &mut [f32]) {
    let (vocabulary, known) =
        (decoder.config().vocab_size, of.tensor_parallel().shard_range(decoder.config().vocab_size));
    let mut wide = vec![0.0; own.len() / known.len() * vocabulary];
    for (row, own) in wide.chunks_exact_mut(vocabulary).zip(own.chunks_exact(known.len())) {
        row[known.clone()].copy_from_slice(own);
    }
    let mut of_rank = vec![0.0; all.len()];
    layout.unshard(rank, &wide, vocabulary, &mut of_rank).expect("its tokens");
    all.iter_mut().zip(of_rank).for_each(|(sum, x)| *sum += x);
}

/// Adds a rank's gradients to the gradients of the whole parameters.
fn add_gradients(
    decoder: &Decoder,
    rank: ParallelRank,
    mut own: BTreeMap<String, Vec<f32>>,
    sums: &mut BTreeMap<String, Vec<f32>>,
) -> Result<(), Error> {
    let mut taken = BTreeSet::new();
    for unit in decoder.units() {
        for partition in
            decoder.all_parameters().partitions(unit, rank)?.iter().filter(|partition| decoder.trains(&partition.name))
        {
            let (values, width) =
                (own.get(&partition.name).expect("every parameter has a gradient"), partition.columns.len());
            taken.insert(partition.name.clone());
            let sum = sums.get_mut(&partition.name).expect("a known name");
            let values = values.chunks_exact(width).skip(partition.stacked_at.unwrap_or(0));
            for (row, values) in partition.rows.clone().zip(values) {
                let at = row * partition.width() + partition.columns.start;
                sum[at..at + width].iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
        }
    }
    own.retain(|name, _| !taken.contains(name));
    assert!(own.is_empty(), "gradients of nothing: {:?}", own.keys());
    Ok(())
}
