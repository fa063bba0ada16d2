//! Cross entropy over a vocabulary without ever holding the logits of all tokens at once.

#[cfg_attr(not(feature = "cuda"), path = "loss/without_gpu.rs")]
pub(crate) mod on_gpu;

use crate::activation::exp;
use crate::gpu;
use crate::matmul::{Accumulate, Matrix, product};
use crate::number::{Number, with_number};
use crate::pool;
use crate::slices::elements_of;
use crate::tensor_parallel::TensorParallel;
use crate::weight::Weight;
use crate::weight_matrix::WeightMatrix;
use candle_core::{Device, Result, Tensor, bail};
use std::ops::Range;

/// The target of a token without a target: padding, and the last token of a document.
pub const IGNORE: u32 = u32::MAX;

/// Tokens whose logits are in memory at once on the CPU.
pub const CHUNK: usize = 512;

/// Tokens whose logits are in memory at once on a GPU: with larger chunks, products read the head and the sum of its gradient
/// less often.
pub const CHUNK_ON_GPU: usize = 2 * CHUNK;

/// The matrix of an output head, and the softcap of its logits.
#[derive(Debug, Clone)]
pub struct OutputHead {
    /// The matrix `[V, C]`, f32, bf16 or, on a CPU, quantized; with tensor parallelism, this rank's rows of it.
    pub weight: Weight,
    /// Logits become `cap * tanh(logit / cap)` if there is a cap.
    pub softcap: Option<f32>,
}

impl From<&Tensor> for OutputHead {
    fn from(weight: &Tensor) -> Self {
        Self { weight: weight.clone().into(), softcap: None }
    }
}

/// The result of [`head_loss`].
#[derive(Debug, Clone)]
pub struct HeadLoss {
    /// The sum of -ln p(target) over the tokens with a target.
    pub nll_sum: f64,
    /// Gradient `[T, C]` of `scale * nll_sum`, in the type of hidden; with tensor parallelism, this rank's summand of the
    /// gradient.
    pub d_hidden: Tensor,
    /// Gradient `[V, C]` of `scale * nll_sum` with respect to the head, f32, if the head is trained.
    pub d_head: Option<Tensor>,
}

/// Negative log-likelihood of `targets` under softmax(hidden head^T), and its gradients times `scale`.
///
/// hidden `[T, C]` and head `[V, C]` are f32 or bf16; each token has one target, or [`IGNORE`]. Three products are computed
/// chunk by chunk. The logits are overwritten with their gradient, so at most `[CHUNK, V]` of them are in memory, on a GPU
/// twice that; in bf16, their rounded gradient is in memory as well.
///
/// With tensor parallelism, each rank has its rows of the vocabulary in `head`, and all have the same tokens: they exchange
/// three numbers for each token, and no logits.
///
/// Tokens without a target cost nothing, and their hidden states may be anything, also NaN.
///
/// # Errors
/// Shapes that do not fit, targets outside the vocabulary, failures of other ranks.
pub fn head_loss(
    hidden: &Tensor,
    head: impl Into<OutputHead>,
    targets: &[u32],
    scale: f32,
    trains_head: bool,
    shared: &TensorParallel,
) -> Result<HeadLoss> {
    let OutputHead { weight: head, softcap } = head.into();
    let vocabulary = Vocabulary::new(&head, softcap, shared)?;
    let (tokens, width) = check(hidden, &head, targets, &vocabulary)?;
    let hidden = hidden.contiguous()?;
    if trains_head {
        // A quantized head cannot be trained, so it returns an error here.
        head.tensor()?;
    }
    let (rows, targets) = with_target(targets);
    if gpu::holds(&hidden) {
        let head = head.tensor()?.contiguous()?;
        return on_gpu::head_loss(&hidden, &head, &rows, &targets, scale, trains_head, &vocabulary);
    }
    let known = vocabulary.known.len();
    let mut nll_sum = 0.0;
    let mut d_head = trains_head.then(|| vec![0.0; known * width]);
    let d_hidden = with_number!(hidden.dtype(), T => {
    let mut d_hidden = vec![T::ZERO; tokens * width];
    let (mut d_gathered, mut rounded) = (Vec::new(), Vec::new());
    of_chunks::<T>(&hidden, &head, (&rows, &targets), softcap, |chunk, logits| {
        nll_sum += chunk.differentiate(logits, &vocabulary, scale)?;
        let gradient = T::rounded_or_same(logits, &mut rounded);
        let gradient = Matrix::new(gradient, chunk.targets.len(), chunk.vocabulary);
        if let Some(rows) = span(chunk.rows) {
            chunk.head.backward(gradient, &mut d_hidden[rows.start * width..rows.end * width]);
        } else {
            d_gathered.resize(chunk.rows.len() * width, T::ZERO);
            chunk.head.backward(gradient, &mut d_gathered);
            for (row, d) in chunk.rows.iter().zip(d_gathered.chunks_exact(width)) {
                d_hidden[row * width..(row + 1) * width].copy_from_slice(d);
            }
        }
        if let Some(d_head) = &mut d_head {
            product(gradient.t(), chunk.hidden, d_head, Accumulate::Add);
        }
        Ok(())
    })?;
    Tensor::from_vec(d_hidden, (tokens, width), &Device::Cpu)?
    });
    Ok(HeadLoss {
        nll_sum,
        d_hidden,
        d_head: d_head.map(|d_head| Tensor::from_vec(d_head, (known, width), &Device::Cpu)).transpose()?,
    })
}

/// ln p(target) of every token; 0 for tokens without a target. The arguments are those of [`head_loss`].
///
/// # Errors
/// As for [`head_loss`].
pub fn log_probs(
    hidden: &Tensor,
    head: impl Into<OutputHead>,
    targets: &[u32],
    shared: &TensorParallel,
) -> Result<Vec<f32>> {
    let OutputHead { weight: head, softcap } = head.into();
    let vocabulary = Vocabulary::new(&head, softcap, shared)?;
    let (tokens, _) = check(hidden, &head, targets, &vocabulary)?;
    let (hidden, (rows, targets)) = (hidden.contiguous()?, with_target(targets));
    let mut out = vec![0.0; tokens];
    if gpu::holds(&hidden) {
        let head = head.tensor()?.contiguous()?;
        let log_probs = on_gpu::log_probs(&hidden, &head, &rows, &targets, &vocabulary)?;
        rows.iter().zip(log_probs).for_each(|(row, log_prob)| out[*row] = log_prob);
        return Ok(out);
    }
    with_number!(hidden.dtype(), T => of_chunks::<T>(&hidden, &head, (&rows, &targets), softcap, |chunk, logits| {
        let totals = vocabulary.totals(&chunk.sums(logits, &vocabulary))?;
        chunk.rows.iter().zip(&totals).for_each(|(row, total)| out[*row] = -total.nll() as f32);
        Ok(())
    })?);
    Ok(out)
}

/// The logits of all tokens, `[T, V]`, f32: hidden `[T, C]`, head `[V, C]`, both f32 or both bf16; on a CPU, the head may be
/// quantized.
///
/// # Errors
/// Shapes that do not fit.
pub fn logits(hidden: &Tensor, head: impl Into<OutputHead>) -> Result<Tensor> {
    let OutputHead { weight, softcap } = head.into();
    let logits = weight.linear_wide(hidden)?;
    match softcap.filter(|_| logits.elem_count() > 0) {
        Some(cap) => (logits / f64::from(cap))?.tanh()? * f64::from(cap),
        None => Ok(logits),
    }
}

/// The row indices of the tokens with a target, and their targets.
fn with_target(targets: &[u32]) -> (Vec<usize>, Vec<u32>) {
    targets.iter().copied().enumerate().filter(|(_, target)| *target != IGNORE).unzip()
}

/// Ascending row indices as a range, if none is missing between the first and the last.
fn span(rows: &[usize]) -> Option<Range<usize>> {
    let (first, last) = (*rows.first()?, *rows.last()?);
    (last - first + 1 == rows.len()).then_some(first..last + 1)
}

/// Tokens with a target whose logits are in memory at once, and the factors of these logits.
struct Chunk<'a, T> {
    rows: &'a [usize],
    targets: &'a [u32],
    vocabulary: usize,
    /// The hidden states of these tokens alone.
    hidden: Matrix<'a, T>,
    head: WeightMatrix<'a>,
}

/// Rows of logits and the targets of these rows.
type Rows<'a> = (&'a mut [f32], &'a [u32]);

impl<T: Number> Chunk<'_, T> {
    /// The logits and targets of the chunk, split for the threads.
    fn parts<'b>(&'b self, logits: &'b mut [f32]) -> Vec<Rows<'b>> {
        let part = pool::part(self.targets.len(), self.vocabulary);
        logits.chunks_mut(part * self.vocabulary).zip(self.targets.chunks(part)).collect()
    }

    /// Turns logits into exponentials relative to their row's maximum, row by row; returns the sums of each row.
    fn sums(&self, logits: &mut [f32], vocabulary: &Vocabulary) -> Vec<Sums> {
        let sums: Vec<Vec<Sums>> = pool::map(self.parts(logits), |(logits, targets)| {
            let of = |row: &mut [f32], target: u32| pool::vectorized(|| row_sums(row, vocabulary.place(target)));
            logits.chunks_exact_mut(self.vocabulary).zip(targets).map(|(row, target)| of(row, *target)).collect()
        });
        sums.concat()
    }

    /// Turns the logits of each token into `scale` times the gradient of its negative log-likelihood; returns the sum of the
    /// negative log-likelihoods.
    fn differentiate(&self, logits: &mut [f32], vocabulary: &Vocabulary, scale: f32) -> Result<f64> {
        if vocabulary.shared.is_single_rank() {
            // Each row is finished while it is in the cache.
            let of_rows = pool::map(self.parts(logits), |(logits, targets)| {
                let rows = logits.chunks_exact_mut(self.vocabulary).zip(targets);
                let one = |row: &mut [f32], target: u32| {
                    let place = vocabulary.place(target);
                    let sums = row_sums(row, place);
                    gradient(row, place, scale, &sums, &sums, vocabulary.softcap);
                    sums.nll()
                };
                rows.map(|(row, target)| pool::vectorized(|| one(row, *target))).sum::<f64>()
            });
            return Ok(of_rows.into_iter().sum());
        }
        let sums = self.sums(logits, vocabulary);
        let totals = vocabulary.totals(&sums)?;
        let part = pool::part(self.targets.len(), self.vocabulary);
        let of_rows = sums.chunks(part).zip(totals.chunks(part));
        pool::map(self.parts(logits).into_iter().zip(of_rows).collect(), |((logits, targets), (sums, totals))| {
            let rows = logits.chunks_exact_mut(self.vocabulary).zip(targets);
            for ((row, target), (sums, totals)) in rows.zip(sums.iter().zip(totals)) {
                let place = vocabulary.place(*target);
                pool::vectorized(|| gradient(row, place, scale, sums, totals, vocabulary.softcap));
            }
        });
        Ok(totals.iter().map(Sums::nll).sum())
    }
}

/// The vocabulary, of which this rank may hold a shard.
struct Vocabulary<'a> {
    whole: usize,
    /// The range of token ids whose logits are computed on this rank.
    known: Range<usize>,
    softcap: Option<f32>,
    shared: &'a TensorParallel,
}

impl<'a> Vocabulary<'a> {
    fn new(head: &Weight, softcap: Option<f32>, shared: &'a TensorParallel) -> Result<Self> {
        let own = head.dims().first().copied().unwrap_or(0);
        if shared.is_single_rank() {
            return Ok(Self { whole: own, known: 0..own, softcap, shared });
        }
        let rows = shared.exchange(&[own as f64])?;
        let whole = rows.concat().iter().map(|rows| *rows as usize).sum();
        match shared.shard_range(whole) {
            known if known.len() == own => Ok(Self { whole, known, softcap, shared }),
            known => {
                bail!("loss: this rank's part of a vocabulary of {whole} is {known:?}, but its head has {own} rows")
            }
        }
    }

    /// The index of a target's logit in this rank's rows of logits; `None` if another rank has it.
    fn place(&self, target: u32) -> Option<usize> {
        (target as usize).checked_sub(self.known.start).filter(|place| *place < self.known.len())
    }

    /// The statistics of rows over the whole vocabulary, combined from those of the ranks' shards.
    fn totals(&self, own: &[Sums]) -> Result<Vec<Sums>> {
        if self.shared.is_single_rank() {
            return Ok(own.to_vec());
        }
        let numbers: Vec<f64> = own.iter().flat_map(|sums| [f64::from(sums.max), sums.sum, sums.of_target]).collect();
        let mut totals = vec![Sums::NONE; own.len()];
        for of_rank in self.shared.exchange(&numbers)? {
            for (total, numbers) in totals.iter_mut().zip(of_rank.chunks_exact(3)) {
                total.add(&Sums { max: numbers[0] as f32, sum: numbers[1], of_target: numbers[2] });
            }
        }
        Ok(totals)
    }
}

/// The softmax statistics of a row of logits.
#[derive(Debug, Clone, Copy)]
struct Sums {
    max: f32,
    /// The sum of the exponentials relative to the maximum.
    sum: f64,
    /// The target's logit; 0 if this row does not contain it.
    of_target: f64,
}

impl Sums {
    const NONE: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, of_target: 0.0 };

    fn nll(&self) -> f64 {
        f64::from(self.max) + self.sum.ln() - self.of_target
    }

    /// The factor that turns the exponentials of a shard of the vocabulary, with statistics `part`, into `scale` times
    /// probabilities.
    fn factor(&self, part: &Self, scale: f32) -> f32 {
        (f64::from(scale) / self.sum * f64::from(part.max - self.max).exp()) as f32
    }

    /// Combines the statistics with those of another shard of the vocabulary.
    fn add(&mut self, other: &Self) {
        // f32::max would ignore a NaN.
        let max = if other.max > self.max || other.max.is_nan() { other.max } else { self.max };
        let relative = |part: &Self| if part.sum == 0.0 { 0.0 } else { part.sum * f64::from(part.max - max).exp() };
        *self = Self { max, sum: relative(self) + relative(other), of_target: self.of_target + other.of_target };
    }
}

/// Calls `work` with the logits `[.., V]` of each chunk of the tokens with a target, which are given by their row indices and
/// targets. The logits are in one buffer, which `work` may overwrite.
fn of_chunks<T: Number>(
    hidden: &Tensor,
    head: &Weight,
    (rows, targets): (&[usize], &[u32]),
    softcap: Option<f32>,
    mut work: impl FnMut(&Chunk<T>, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let (tokens, width) = hidden.dims2()?;
    elements_of::<T, _>(hidden, |hidden| {
        WeightMatrix::read(head, |head| {
            let (hidden, vocabulary) = (Matrix::new(hidden, tokens, width), head.rows());
            let mut logits = vec![0.0; rows.len().min(CHUNK) * vocabulary];
            let mut gathered = Vec::new();
            for (rows, targets) in rows.chunks(CHUNK).zip(targets.chunks(CHUNK)) {
                let hidden = match span(rows) {
                    Some(rows) => hidden.rows(rows),
                    None => {
                        gathered.clear();
                        let row = |row: &usize| &hidden.data()[row * width..(row + 1) * width];
                        rows.iter().for_each(|index| gathered.extend_from_slice(row(index)));
                        Matrix::new(&gathered, rows.len(), width)
                    }
                };
                let logits = &mut logits[..targets.len() * vocabulary];
                head.forward(hidden, logits);
                if let Some(cap) = softcap {
                    let part = pool::part(logits.len(), 1);
                    pool::map(logits.chunks_mut(part).collect(), |part: &mut [f32]| {
                        pool::vectorized(|| part.iter_mut().for_each(|x| *x = capped(*x, cap)));
                    });
                }
                work(&Chunk { rows, targets, vocabulary, hidden, head }, logits)?;
            }
            Ok(())
        })
    })
}

/// Turns a row of logits into exponentials relative to its maximum, and returns its statistics.
#[inline(always)]
fn row_sums(row: &mut [f32], target: Option<usize>) -> Sums {
    let of_target = target.map_or(0.0, |target| f64::from(row[target]));
    let (max, sum) = exponentials(row);
    Sums { max, sum, of_target }
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
fn capped(x: f32, cap: f32) -> f32 {
    let u = x / cap;
    // 1 - 2 / (e^2u + 1) loses digits where u is small, so there tanh is computed by its series up to u^9.
    let square = u * u;
    let terms = 1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0 - square * (62.0 / 2835.0)));
    let closed = 1.0 - 2.0 / (exp(2.0 * u) + 1.0);
    cap * if square < 0.0625 { u * (1.0 - square * terms) } else { closed }
}

/// Turns a row of exponentials into `scale` times the gradient of the negative log-likelihood of the target, which is at
/// index `place` if it is in this row. `sums` are the statistics of the row, `totals` those of the whole vocabulary. With a
/// softcap, the result is the gradient with respect to the logits before the cap.
#[inline(always)]
fn gradient(row: &mut [f32], place: Option<usize>, scale: f32, sums: &Sums, totals: &Sums, softcap: Option<f32>) {
    let factor = totals.factor(sums, scale);
    let Some(cap) = softcap else {
        row.iter_mut().for_each(|x| *x *= factor);
        if let Some(place) = place {
            row[place] -= scale;
        }
        return;
    };
    // The capped logit is recovered from its exponential; where the exponential is 0, so is the gradient.
    let slope = |y: f32| 1.0 - (y / cap) * (y / cap);
    let of_target = place.map(|place| (place, (row[place] * factor - scale) * slope(sums.of_target as f32)));
    for x in row.iter_mut() {
        *x = if *x > 0.0 { *x * factor * slope(sums.max + x.ln()) } else { *x };
    }
    if let Some((place, gradient)) = of_target {
        row[place] = gradient;
    }
}

/// Turns a row into exponentials relative to its maximum; returns the maximum and their sum.
#[inline(always)]
fn exponentials(row: &mut [f32]) -> (f32, f64) {
    /// The maximum and the sum are computed in this many lanes, so that they vectorise; after each `BLOCK` of elements,
    /// f64 takes over the f32 sums.
    const LANES: usize = 16;
    const BLOCK: usize = 32 * LANES;
    let mut most = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for chunk in chunks {
        most.iter_mut().zip(chunk).for_each(|(most, x)| *most = if *x > *most { *x } else { *most });
    }
    let max = most.into_iter().fold(rest, f32::max);
    let mut sum = 0.0f64;
    for block in row.chunks_mut(BLOCK) {
        block.iter_mut().for_each(|x| *x = exp(*x - max));
        let mut sums = [0.0f32; LANES];
        let chunks = block.chunks_exact(LANES);
        sum += chunks.remainder().iter().map(|&x| f64::from(x)).sum::<f64>();
        for chunk in chunks {
            sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x);
        }
        sum += sums.into_iter().map(f64::from).sum::<f64>();
    }
    (max, sum)
}

fn check(hidden: &Tensor, head: &Weight, targets: &[u32], vocabulary: &Vocabulary) -> Result<(usize, usize)> {
    let ((tokens, width), rows) = (hidden.dims2()?, vocabulary.known.len());
    if head.dims() != [rows, width] || tokens != targets.len() || rows * width == 0 {
        bail!("loss: hidden {:?}, head {:?} and {} targets do not fit", hidden.shape(), head.dims(), targets.len());
    }
    match targets.iter().find(|&&target| target != IGNORE && target as usize >= vocabulary.whole) {
        Some(target) => bail!("loss: target {target} is outside the vocabulary of {}", vocabulary.whole),
        None => Ok((tokens, width)),
    }
}
