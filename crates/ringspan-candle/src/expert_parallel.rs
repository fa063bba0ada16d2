//! Expert parallelism (Lepikhin et al., 2020, arXiv:2006.16668): tokens are sent to the ranks that hold their experts, and
//! the outputs are sent back.
//!
//! Shape letters: T tokens on this rank, C hidden size, E experts, K experts a token is routed to.

use crate::adapter_rows::AdapterRows;
use crate::collective::{all_gather, all_to_all, all_to_all_unused, reduce_scatter, reduce_scatter_unused};
use crate::device_ops;
use crate::experts::{Expert, Experts, REMOTE_EXPERT, Routing, SavedExperts, mixed_saving};
use crate::gpu;
use crate::number::{Number, with_number};
use crate::slices::{elements, elements_of};
use crate::tape::{self, Reads};
use crate::tensor_parallel::part;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};
use ringspan::comm::{Buffer, Communicator};
use std::ops::Range;
use std::sync::Arc;

/// Experts that are distributed over ranks, each rank holding some of them, whole or sharded in their width.
///
/// All ranks of both groups call [`Experts::mix`] together, each with tokens of its own, or none. A token is sent once to
/// each rank that holds at least one of its experts.
pub struct ExpertParallel {
    experts: usize,
    /// The expert-parallel group, over which whole experts are distributed; each of its ranks holds a contiguous range of
    /// experts.
    ep: Arc<dyn Communicator>,
    /// The ranks that hold the same experts, each a shard of their width.
    width: Arc<dyn Communicator>,
}

impl ExpertParallel {
    /// Distributes `experts` E over the ranks of `ep`, and the width of each expert over the ranks of `width`. The two
    /// communicators must be used for nothing else.
    ///
    /// # Errors
    /// Fewer experts than ranks.
    pub fn new(experts: usize, ep: Arc<dyn Communicator>, width: Arc<dyn Communicator>) -> Result<Self> {
        match ep.size() {
            ranks if ranks > experts => bail!("{ranks} ranks cannot share {experts} experts"),
            _ => Ok(Self { experts, ep, width }),
        }
    }

    /// Like [`Experts::mix_saving`], for the gathered tokens of all ranks that share the width of experts.
    fn exchanged(
        &self,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
        memory: &mut SavedExperts,
    ) -> Result<Tensor> {
        let (ranks, again) = (self.ep.size(), !memory.is_empty());
        if ranks == 1 {
            return mixed_saving(x, routing, expert, memory);
        }
        let (tokens, top) = routing.weights.dims2()?;
        let holds = |rank: usize| part(self.experts, rank, ranks);
        let (mut rows, mut send, mut messages) = (Vec::new(), Vec::new(), Vec::new());
        for rank in 0..ranks {
            let (holds, before, mut of_rank) = (holds(rank), rows.len(), Vec::new());
            for (token, choices) in routing.chosen.chunks_exact(top.max(1)).enumerate() {
                let here = |expert: &u32| if holds.contains(&(*expert as usize)) { *expert } else { REMOTE_EXPERT };
                if choices.iter().any(|expert| here(expert) != REMOTE_EXPERT) {
                    rows.push(token as u32);
                    of_rank.extend(choices.iter().map(here));
                }
            }
            send.push(rows.len() - before);
            messages.push(message(
                &of_rank,
                top,
                routing.adapter_rows.as_ref().map(|all| all.of_rows(&rows[before..])).as_ref(),
            ));
        }
        let arrived = self.ep.all_to_all(messages).map_err(candle_core::Error::wrap)?;
        let (receive, chosen, adapter_rows) = read(&arrived, top, routing.adapter_rows.as_ref())?;
        let own = holds(self.ep.rank());
        if let Some(other) =
            chosen.iter().find(|choice| **choice != REMOTE_EXPERT && !own.contains(&(**choice as usize)))
        {
            bail!("a token came here for expert {other}, which is not of the experts {own:?} that are here");
        }

        let gather_rows = |of: &Tensor| all_to_all(&self.ep, &gather_rows(of, rows.clone())?, &send, &receive);
        let (here, weights) = (gather_rows(x)?, gather_rows(&routing.weights)?);
        let out = mixed_saving(&here, &Routing { chosen, weights, adapter_rows }, expert, memory)?;
        let back = if again { all_to_all_unused } else { all_to_all };
        scatter_add_rows(&back(&self.ep, &out, &receive, &send)?, rows, tokens)
    }
}

impl Experts for ExpertParallel {
    fn mix(
        &self,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        self.mix_saving(&mut SavedExperts::default(), layer, x, routing, expert)
    }

    /// On the second call, tokens are sent to their experts again: stored where the experts are, they would take about as
    /// much memory as the products. The experts' outputs are not sent back again.
    fn mix_saving(
        &self,
        memory: &mut SavedExperts,
        _layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        if self.width.size() == 1 {
            return self.exchanged(x, routing, expert, memory);
        }
        let again = !memory.is_empty();
        let top = routing.weights.dim(1)?;
        let own = message(&routing.chosen, top, routing.adapter_rows.as_ref());
        let arrived = self.width.all_gather(own).map_err(candle_core::Error::wrap)?;
        let (counts, chosen, adapter_rows) = read(&arrived, top, routing.adapter_rows.as_ref())?;
        let routing = Routing { chosen, weights: all_gather(&self.width, &routing.weights)?, adapter_rows };
        let partial = self.exchanged(&all_gather(&self.width, x)?, &routing, expert, memory)?;
        let scatter = if again { reduce_scatter_unused } else { reduce_scatter };
        scatter(&self.width, &partial, counts)
    }

    fn local_width(&self, whole: usize) -> Range<usize> {
        part(whole, self.width.rank(), self.width.size())
    }

    fn local_experts(&self, experts: usize) -> Range<usize> {
        part(experts, self.ep.rank(), self.ep.size())
    }
}

/// The message that describes the routing of tokens: for each token its `top` experts and, if adapters depend on it, the number of its
/// row.
fn message(chosen: &[u32], top: usize, adapter_rows: Option<&AdapterRows>) -> Buffer {
    let numbers = adapter_rows.map(AdapterRows::numbers);
    let of_token = |(token, choices): (usize, &[u32])| {
        let choices = choices.iter().map(|choice| u64::from(*choice)).collect::<Vec<_>>();
        choices.into_iter().chain(numbers.as_ref().map(|numbers| numbers[token]))
    };
    Buffer::U64(chosen.chunks_exact(top.max(1)).enumerate().flat_map(of_token).collect())
}

/// Reads the messages of all ranks: how many tokens each rank sent, their experts in rank order, and what adapters need to know of them,
/// which is of the same kind as this rank's `adapter_rows`.
fn read(
    arrived: &[Arc<Buffer>],
    top: usize,
    adapter_rows: Option<&AdapterRows>,
) -> Result<(Vec<usize>, Vec<u32>, Option<AdapterRows>)> {
    let each = (top + usize::from(adapter_rows.is_some())).max(1);
    let (mut counts, mut chosen, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, buffer) in arrived.iter().enumerate() {
        let Buffer::U64(words) = &**buffer else { bail!("rank {rank} sent something else than its tokens' experts") };
        if words.len() % each != 0 {
            bail!("rank {rank} sent {} words of its tokens' experts, which are {each} a token", words.len());
        }
        counts.push(words.len() / each);
        for token in words.chunks_exact(each) {
            let (choices, number) = token.split_at(top.min(each));
            for choice in choices {
                chosen.push(u32::try_from(*choice).map_err(candle_core::Error::wrap)?);
            }
            numbers.extend(number);
        }
    }
    Ok((counts, chosen, adapter_rows.map(|rows| rows.with_numbers(numbers))))
}

/// Selects rows of x, some of them perhaps more than once: `[T, C]` to `[rows, C]`.
fn gather_rows(x: &Tensor, rows: Vec<u32>) -> Result<Tensor> {
    if gpu::holds(x) {
        return device_ops::gather_rows(x, &rows);
    }
    let of = x.dim(0)?;
    tape::apply(SelectRows { rows: RowIndices { rows, of }, back: false }, [&x.contiguous()?], Reads::Nothing)
}

/// The transpose of [`gather_rows`]: adds each row to the row that it was selected from, `[rows, C]` to `[T, C]`.
fn scatter_add_rows(x: &Tensor, rows: Vec<u32>, of: usize) -> Result<Tensor> {
    if gpu::holds(x) {
        return device_ops::scatter_add_rows(x, &rows, of);
    }
    tape::apply(SelectRows { rows: RowIndices { rows, of }, back: true }, [&x.contiguous()?], Reads::Nothing)
}

/// Indices of selected rows, and the number of rows `of` that they were selected from.
struct RowIndices {
    rows: Vec<u32>,
    of: usize,
}

impl RowIndices {
    fn pick<T: Number>(&self, from: &[T], width: usize) -> Vec<T> {
        let mut out = Vec::with_capacity(self.rows.len() * width);
        self.rows.iter().for_each(|row| out.extend_from_slice(&from[*row as usize * width..][..width]));
        out
    }

    /// Sums are computed in f32 and rounded once.
    fn add<T: Number>(&self, from: &[T], width: usize) -> Vec<T> {
        let mut out = vec![0.0f32; self.of * width];
        for (row, from) in self.rows.iter().zip(from.chunks_exact(width.max(1))) {
            out[*row as usize * width..][..width].iter_mut().zip(from).for_each(|(sum, x)| *sum += x.upcast());
        }
        T::all_rounded(out)
    }
}

/// Selects rows or, with `back`, adds them to where they were selected from; each is the backward pass of the other.
struct SelectRows {
    rows: RowIndices,
    back: bool,
}

impl CustomOp1 for SelectRows {
    fn name(&self) -> &'static str {
        "pick-rows"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = layout.dims()[1];
        let rows = if self.back { self.rows.of } else { self.rows.rows.len() };
        let out = with_number!(storage.dtype(), T => {
            let x = elements::<T>(storage, layout)?;
            T::to_cpu_storage_owned(if self.back { self.rows.add(x, width) } else { self.rows.pick(x, width) })
        });
        Ok((out, Shape::from((rows, width))))
    }

    fn bwd(&self, x: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let width = x.dim(1)?;
        with_number!(gradient.dtype(), T => {
            let dx = elements_of(&gradient.contiguous()?, |d: &[T]| {
                Ok(if self.back { self.rows.pick(d, width) } else { self.rows.add(d, width) })
            })?;
            Tensor::from_vec(dx, x.shape(), x.device()).map(Some)
        })
    }
}
