//! The loss on a GPU. Logits and their softmax statistics are f32 also where hidden states and head are bf16; the gradient of
//! the logits is rounded to bf16 for its products with these.
//!
//! The statistics of a row, three numbers, are copied to the CPU, where they are added in f64: once, at the end, or, with
//! tensor parallelism, for each chunk, because the gradient needs the statistics of all ranks.

use super::row::RowStatistics;
use super::vocabulary::Vocabulary;
use super::{CHUNK_ON_GPU as CHUNK, HeadLoss};
use crate::gpu::kernels::{Layer, Options, THREADS, launch};
use crate::gpu::operand::{Operand, on_gpu, tensor, unwritten};
use crate::gpu::product::{Output, product};
use crate::matmul::Accumulate;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor};
use std::ops::Range;

/// The arguments of a kernel launch, laid out as in `gpu/source/loss.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct LossParams {
    logits: u64,
    gradient: u64,
    targets: u64,
    sums: u64,
    width: i64,
    first: i64,
    scale: f32,
    /// The softcap of logits; 0 without one.
    softcap: f32,
}

// SAFETY: the struct consists of plain numbers and is laid out as in C.
unsafe impl DeviceRepr for LossParams {}

/// Bytes of shared memory for a block: two numbers for each warp.
const SHARED_BYTES: usize = 2 * 4 * THREADS / 32;

/// Like [`head_loss`](super::head_loss): hidden `[T, C]` and head `[V, C]` are contiguous, and the tokens at `rows` have the
/// targets `targets`.
pub(super) fn head_loss(
    hidden: &Tensor,
    head: &Tensor,
    rows: &[usize],
    targets: &[u32],
    scale: f32,
    trains_head: bool,
    vocabulary: &Vocabulary,
) -> Result<HeadLoss> {
    if targets.is_empty() {
        let d_head = trains_head.then(|| Tensor::zeros(head.shape(), DType::F32, head.device())).transpose()?;
        return Ok(HeadLoss { nll_sum: 0.0, d_hidden: hidden.zeros_like()?, d_head });
    }
    let Some(indices) = indices(hidden, rows)? else {
        return of_all(hidden, head, targets, scale, trains_head, vocabulary);
    };
    let loss = of_all(&hidden.index_select(&indices, 0)?, head, targets, scale, trains_head, vocabulary)?;
    let d_hidden = hidden.zeros_like()?.index_add(&indices, &loss.d_hidden, 0)?;
    Ok(HeadLoss { d_hidden, ..loss })
}

/// The row indices on the GPU; `None` if they are all rows of hidden.
fn indices(hidden: &Tensor, rows: &[usize]) -> Result<Option<Tensor>> {
    if rows.len() == hidden.dim(0)? {
        return Ok(None);
    }
    let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
    Tensor::new(rows, hidden.device()).map(Some)
}

/// The loss of tokens that all have a target.
fn of_all(
    hidden: &Tensor,
    head: &Tensor,
    targets: &[u32],
    scale: f32,
    trains_head: bool,
    vocabulary: &Vocabulary,
) -> Result<HeadLoss> {
    let device = hidden.device().as_cuda_device()?;
    let mut d_hidden = unwritten(device, hidden.shape(), hidden.dtype())?;
    let mut d_head = trains_head.then(|| unwritten(device, head.shape(), DType::F32)).transpose()?;
    let mut chunks = LogitChunks::new(hidden, head, targets, vocabulary)?;
    let (mut of_chunks, mut totals) = (Vec::new(), Vec::new());
    for rows in chunks.all() {
        let own = chunks.sums(rows.clone())?;
        if vocabulary.shared.is_single_rank() {
            chunks.differentiate(rows.clone(), &own, scale)?;
            of_chunks.push(own);
        } else {
            let of_rows = vocabulary.totals(&read(&own)?)?;
            chunks.differentiate(rows.clone(), &uploaded(&of_rows, hidden)?, scale)?;
            totals.extend(of_rows);
        }
        chunks.multiply(rows, &mut d_hidden, d_head.as_mut())?;
    }
    if vocabulary.shared.is_single_rank() {
        totals = read(&Tensor::cat(&of_chunks, 0)?)?;
    }
    Ok(HeadLoss {
        nll_sum: totals.iter().map(RowStatistics::nll).sum(),
        d_hidden: tensor(d_hidden, hidden.shape()),
        d_head: d_head.map(|d_head| tensor(d_head, head.shape())),
    })
}

/// Like [`log_probs`](super::log_probs), for the tokens at `rows`, which have the targets `targets`.
pub(super) fn log_probs(
    hidden: &Tensor,
    head: &Tensor,
    rows: &[usize],
    targets: &[u32],
    vocabulary: &Vocabulary,
) -> Result<Vec<f32>> {
    if targets.is_empty() {
        return Ok(Vec::new());
    }
    let hidden = match indices(hidden, rows)? {
        Some(indices) => &hidden.index_select(&indices, 0)?,
        None => hidden,
    };
    let mut chunks = LogitChunks::new(hidden, head, targets, vocabulary)?;
    let of_chunks = chunks.all().map(|rows| chunks.sums(rows)).collect::<Result<Vec<_>>>()?;
    let totals = vocabulary.totals(&read(&Tensor::cat(&of_chunks, 0)?)?)?;
    Ok(totals.iter().map(|total| -total.nll() as f32).collect())
}

/// Copies the statistics of rows `[n, 3]` to the CPU.
fn read(sums: &Tensor) -> Result<Vec<RowStatistics>> {
    let of = |row: &Vec<f32>| RowStatistics { max: row[0], sum: f64::from(row[1]), of_target: f64::from(row[2]) };
    Ok(sums.to_vec2()?.iter().map(of).collect())
}

/// Copies the statistics of rows to the GPU, `[n, 3]`.
fn uploaded(totals: &[RowStatistics], like: &Tensor) -> Result<Tensor> {
    let numbers: Vec<f32> =
        totals.iter().flat_map(|total| [total.max, total.sum as f32, total.of_target as f32]).collect();
    Tensor::from_vec(numbers, (totals.len(), 3), like.device())
}

/// Tokens, and memory for the logits of one chunk of them, which all chunks use in turn.
struct LogitChunks<'a> {
    hidden: &'a Tensor,
    head: &'a Tensor,
    targets: Tensor,
    /// The first token id of this rank's shard of the vocabulary.
    first: usize,
    softcap: f32,
    logits: CudaStorage,
    /// The gradient of the logits in bf16; in f32 it overwrites the logits.
    narrow: Option<CudaStorage>,
}

impl<'a> LogitChunks<'a> {
    /// Needs at least one token.
    fn new(hidden: &'a Tensor, head: &'a Tensor, targets: &[u32], vocabulary: &Vocabulary) -> Result<Self> {
        let shape = Shape::from((targets.len().min(CHUNK), head.dim(0)?));
        Ok(Self {
            hidden,
            head,
            targets: Tensor::new(targets, hidden.device())?,
            first: vocabulary.known.start,
            softcap: vocabulary.softcap.unwrap_or(0.0),
            logits: unwritten(hidden.device().as_cuda_device()?, &shape, DType::F32)?,
            narrow: None,
        })
    }

    /// The range of tokens in each chunk.
    fn all(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let tokens = self.targets.elem_count();
        (0..tokens).step_by(CHUNK).map(move |first| first..tokens.min(first + CHUNK))
    }

    /// The layout of a chunk's logits and of their gradient.
    fn layout(&self, rows: &Range<usize>) -> Result<Layout> {
        Ok(Layout::contiguous((rows.len(), self.head.dim(0)?)))
    }

    /// Computes the logits of a chunk, and returns the statistics of each row `[n, 3]`, f32: the maximum, the sum of
    /// exponentials relative to it, and the target's logit, or 0 if another rank has it.
    fn sums(&mut self, rows: Range<usize>) -> Result<Tensor> {
        let (at, shape) = (self.layout(&rows)?, Shape::from((rows.len(), 3)));
        let (hidden, head) = (self.hidden.narrow(0, rows.start, rows.len())?, self.head.t()?);
        let ((hidden_held, hidden_at), (head_held, head_at)) = (hidden.storage_and_layout(), head.storage_and_layout());
        let output = Output { of: &mut self.logits, first: 0 };
        product((on_gpu(&hidden_held)?, hidden_at), (on_gpu(&head_held)?, head_at), output, Accumulate::Overwrite)?;

        let device = self.logits.device();
        let (mut sums, stream) = (unwritten(device, &shape, DType::F32)?, device.cuda_stream());
        {
            let logits = Operand::read(&self.logits, &at, &stream)?;
            let written = Operand::written(&mut sums, &stream)?;
            let targets = self.targets.narrow(0, rows.start, rows.len())?;
            let (targets_held, targets_at) = targets.storage_and_layout();
            let targets = Operand::read_u32(on_gpu(&targets_held)?, targets_at, &stream)?;
            let params = LossParams {
                logits: logits.at,
                targets: targets.at,
                sums: written.at,
                width: at.dims()[1] as i64,
                first: self.first as i64,
                softcap: self.softcap,
                ..LossParams::default()
            };
            let options = options(&at, self.hidden.dtype(), &[logits.at]);
            // SAFETY: logits of these rows, as many targets, and memory for three numbers for each row are there.
            unsafe { launch(device, &options, "loss_sums", &params, (rows.len(), 1), SHARED_BYTES)? };
        }
        Ok(tensor(sums, &shape))
    }

    /// Turns the logits of a chunk into `scale` times their gradient, given the statistics of their rows `[n, 3]` over the
    /// whole vocabulary.
    fn differentiate(&mut self, rows: Range<usize>, totals: &Tensor, scale: f32) -> Result<()> {
        let (at, device, dtype) = (self.layout(&rows)?, self.logits.device().clone(), self.hidden.dtype());
        if dtype != DType::F32 && self.narrow.is_none() {
            // The first chunk is the longest, so its memory suffices for all.
            self.narrow = Some(unwritten(&device, at.shape(), dtype)?);
        }
        let stream = device.cuda_stream();
        let targets = self.targets.narrow(0, rows.start, rows.len())?;
        let ((targets_held, targets_at), (totals_held, totals_at)) =
            (targets.storage_and_layout(), totals.storage_and_layout());
        let targets = Operand::read_u32(on_gpu(&targets_held)?, targets_at, &stream)?;
        let totals = Operand::read(on_gpu(&totals_held)?, totals_at, &stream)?;
        let logits = Operand::written(&mut self.logits, &stream)?;
        let narrow = self.narrow.as_mut().map(|narrow| Operand::written(narrow, &stream)).transpose()?;
        let params = LossParams {
            logits: logits.at,
            gradient: narrow.as_ref().map_or(logits.at, |narrow| narrow.at),
            targets: targets.at,
            sums: totals.at,
            width: at.dims()[1] as i64,
            first: self.first as i64,
            scale,
            softcap: self.softcap,
        };
        let options = options(&at, dtype, &[logits.at, params.gradient]);
        // SAFETY: logits of these rows, memory for their gradient, as many targets, and three numbers for each row are there.
        unsafe { launch(&device, &options, "loss_gradient", &params, (rows.len(), 1), 0) }
    }

    /// Writes the gradient of a chunk's hidden states, and adds to the gradient of the head, which the first chunk
    /// initializes.
    fn multiply(&self, rows: Range<usize>, d_hidden: &mut CudaStorage, d_head: Option<&mut CudaStorage>) -> Result<()> {
        let (gradient, at, width) =
            (self.narrow.as_ref().unwrap_or(&self.logits), self.layout(&rows)?, self.hidden.dim(1)?);
        let (head_held, head_at) = self.head.storage_and_layout();
        let output = Output { of: d_hidden, first: rows.start * width };
        product((gradient, &at), (on_gpu(&head_held)?, head_at), output, Accumulate::Overwrite)?;
        let Some(d_head) = d_head else { return Ok(()) };
        let hidden = self.hidden.narrow(0, rows.start, rows.len())?;
        let (hidden_held, hidden_at) = hidden.storage_and_layout();
        let into = if rows.start == 0 { Accumulate::Overwrite } else { Accumulate::Add };
        let output = Output { of: d_head, first: 0 };
        product((gradient, &at.transpose(0, 1)?), (on_gpu(&hidden_held)?, hidden_at), output, into)
    }
}

/// Compile options for logits of this layout, f32, and their gradient.
fn options(at: &Layout, gradient: DType, addresses: &[u64]) -> Options {
    Options::new::<LossParams>(Layer::Loss, [DType::F32, gradient], addresses, &[at.dims()[1]])
}
