//! Sends hidden states between ranks: from pipeline stage to stage, and to rank 0.

use super::cache::PagedCache;
use super::elements::{Elements, of_tensor};
use super::prefill_batch::received;
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::model::Model;
use crate::step::{Step, StepSequence};
use candle_core::{DType, Device, Tensor};
use ringspan::attention::Group;
use ringspan::comm::Communicator;
use ringspan::kernel::Data;
use std::sync::Arc;

/// The hidden states `[rows, C]` that the rank at this position of the pipeline stage before has computed; `None` in the first stage.
pub(super) fn from_previous_stage(
    stages: &dyn Communicator,
    rows: usize,
    model: &Model,
    cache: &PagedCache,
) -> Result<Option<Tensor>> {
    let Some(before) = stages.rank().checked_sub(1) else { return Ok(None) };
    receive(stages, before, (rows, model.decoder().config().hidden_size), cache.computed()).map(Some)
}

/// Sends hidden states to the rank at this position of the next pipeline stage; returns whether there is one.
pub(super) fn to_next_stage(stages: &dyn Communicator, hidden: &Tensor) -> Result<bool> {
    let next = stages.rank() + 1;
    if next == stages.size() {
        return Ok(false);
    }
    send(stages, next, hidden)?;
    Ok(true)
}

/// Brings the outputs of a step, which the first rank of the last pipeline stage has, to the first rank of the first stage. Only the
/// first rank of each stage calls this.
pub(crate) fn to_first_stage(
    stages: &dyn Communicator,
    step: &Step,
    hidden: Option<Tensor>,
    model: &Model,
    cache: &PagedCache,
) -> Result<Option<Tensor>> {
    let (rows, last) = (step.sequences.iter().map(StepSequence::output_rows).sum(), stages.size() - 1);
    if let (Some(hidden), true) = (&hidden, stages.rank() == last) {
        send(stages, 0, hidden)?;
    }
    match stages.rank() == 0 && rows > 0 {
        true => receive(stages, last, (rows, model.decoder().config().hidden_size), cache.computed()).map(Some),
        false => Ok(None),
    }
}

/// Brings the outputs that the first rank of each attention replica has to that of the first replica, in the order of the step's
/// sequences: `[n, C]` of width and type `(C, type)`. In a pipeline, the ranks of the last stage have them. Other ranks get `None`.
pub(super) fn gather_replicas(
    groups: &Groups,
    replicas: &dyn Communicator,
    step: &Step,
    hidden: Option<Tensor>,
    (width, dtype): (usize, DType),
) -> Result<Option<Tensor>> {
    let is_last_stage = groups.stages().is_none_or(|stages| stages.rank() + 1 == stages.size());
    let leads_replica = groups.cp().rank() == 0 && groups.tensor().rank_and_size().0 == 0;
    if !is_last_stage || !leads_replica {
        return Ok(None);
    }
    // Replicas with sequences send a message even without outputs, so that the step ends only after all of them have computed it.
    let has_sequences = |replica: usize| step.sequences.iter().any(|sequence| sequence.replica == replica);
    if replicas.rank() > 0 {
        if has_sequences(replicas.rank()) {
            let none = || Tensor::zeros((0, width), dtype, &Device::Cpu);
            send(replicas, 0, &hidden.map_or_else(none, Ok)?)?;
        }
        return Ok(None);
    }
    let (mut arrived, mut first_row) = (Vec::new(), vec![0; replicas.size()]);
    let mut rows_before = 0;
    for (replica, first_row) in first_row.iter_mut().enumerate() {
        let of_replica = step.sequences.iter().filter(|sequence| sequence.replica == replica);
        let rows: usize = of_replica.map(StepSequence::output_rows).sum();
        (*first_row, rows_before) = (rows_before, rows_before + rows);
        match replica {
            0 => arrived.extend(hidden.clone()),
            _ if has_sequences(replica) => arrived.push(receive(replicas, replica, (rows, width), dtype)?),
            _ => {}
        }
    }
    if rows_before == 0 {
        return Ok(None);
    }
    let mut order: Vec<u32> = Vec::with_capacity(rows_before);
    for sequence in &step.sequences {
        let (next, rows) = (&mut first_row[sequence.replica], sequence.output_rows());
        order.extend((*next..*next + rows).map(|row| row as u32));
        *next += rows;
    }
    Ok(Some(Tensor::cat(&arrived, 0)?.index_select(&Tensor::from_vec(order, rows_before, &Device::Cpu)?, 0)?))
}

fn send(line: &dyn Communicator, to: usize, hidden: &Tensor) -> Result<()> {
    let mut numbers = Elements::with_capacity(hidden.dtype(), hidden.elem_count());
    of_tensor(&hidden.contiguous()?, |all| numbers.extend(all))?;
    line.send(to, HIDDEN, Arc::new(numbers.into_message()))?.wait()?;
    Ok(())
}

fn receive(line: &dyn Communicator, from: usize, shape: (usize, usize), dtype: DType) -> Result<Tensor> {
    let message = line.receive(from, HIDDEN)?.wait()?;
    let Some(message) = message else {
        return Err(Error::Step(format!(
            "of {} ranks at this position, rank {from} sent no hidden states",
            line.size()
        )));
    };
    Ok(match received(&message, dtype, shape.0 * shape.1, from)? {
        Data::Bf16(numbers) => Tensor::from_slice(numbers, shape, &Device::Cpu)?,
        Data::F32(numbers) => Tensor::from_slice(numbers, shape, &Device::Cpu)?,
        other => return Err(Error::Step(format!("hidden states of type {:?}", other.dtype()))),
    })
}

/// Brings rows of the ranks' hidden states `[T, C]` to rank 0, in this order.
pub(super) fn gather(group: &Group, outputs: &[(usize, usize)], hidden: &Tensor) -> Result<Option<Tensor>> {
    let (_, width) = hidden.dims2()?;
    let (rank, dtype, hidden) = (group.rank(), hidden.dtype(), hidden.contiguous()?);
    let rows_of = |from: usize| outputs.iter().filter(move |(rank, _)| *rank == from).map(|(_, row)| *row);
    if rank != 0 {
        if rows_of(rank).next().is_some() {
            let mut rows = Elements::with_capacity(dtype, rows_of(rank).count() * width);
            of_tensor(&hidden, |all| rows_of(rank).try_for_each(|row| rows.extend(row_of(all, row, width))))?;
            group.cp().send(0, HIDDEN, Arc::new(rows.into_message()))?.wait()?;
        }
        return Ok(None);
    }
    if outputs.is_empty() {
        return Ok(None);
    }
    let mut arrived = Vec::new();
    for from in 1..group.size() {
        let message = match rows_of(from).next() {
            Some(_) => group.cp().receive(from, HIDDEN)?.wait()?,
            None => None,
        };
        arrived.push(message);
    }
    of_tensor(&hidden, |own| {
        let mut sources = vec![own];
        for (message, from) in arrived.iter().zip(1..) {
            let expected = rows_of(from).count() * width;
            sources.push(
                message.as_ref().map_or(Ok(own.slice(0..0)), |message| received(message, dtype, expected, from))?,
            );
        }
        let (mut rows, mut taken) = (Elements::with_capacity(dtype, outputs.len() * width), vec![0; group.size()]);
        for &(from, row) in outputs {
            // Other ranks have sent only the rows that are needed.
            rows.extend(row_of(sources[from], if from == 0 { row } else { taken[from] }, width))?;
            taken[from] += 1;
        }
        let shape = (outputs.len(), width);
        Ok(Some(match rows {
            Elements::F32(rows) => Tensor::from_vec(rows, shape, hidden.device())?,
            Elements::Bf16(rows) => Tensor::from_vec(rows, shape, hidden.device())?,
            Elements::Q8_0(_) => return Err(Error::Step("hidden states are not in blocks".to_owned())),
        }))
    })
}

fn row_of(all: Data<'_>, row: usize, width: usize) -> Data<'_> {
    all.slice(row * width..(row + 1) * width)
}

/// The tag of messages with hidden states.
const HIDDEN: u64 = 1 << 60;
