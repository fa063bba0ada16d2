//! Cross entropy over a vocabulary without ever holding the logits of all tokens at once.

mod chunk;
#[cfg_attr(not(feature = "cuda"), path = "loss/without_gpu.rs")]
pub(crate) mod on_gpu;
mod row;
mod vocabulary;

use crate::gpu;
use crate::matmul::{Accumulate, Matrix, product};
use crate::number::{Number, with_number};
use crate::tensor_parallel::TensorParallel;
use crate::weight::Weight;
use candle_core::{Device, Result, Tensor, bail};
use chunk::{for_each_chunk, span};
use vocabulary::Vocabulary;

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
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::TensorParallel;
/// use ringspan_candle::loss::{IGNORE, head_loss};
///
/// // Two words of equal logits, so each has probability 1/2; the second token has no target.
/// let hidden = Tensor::new(&[[0f32], [9.0]], &Device::Cpu)?;
/// let head = Tensor::new(&[[1f32], [-1.0]], &Device::Cpu)?;
/// let loss = head_loss(&hidden, &head, &[0, IGNORE], 1.0, true, &TensorParallel::default())?;
/// assert!((loss.nll_sum - 2f64.ln()).abs() < 1e-6);
/// assert_eq!(loss.d_hidden.to_vec2::<f32>()?, [[-1.0], [0.0]]);
/// # Ok::<_, candle_core::Error>(())
/// ```
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
    for_each_chunk::<T>(&hidden, &head, (&rows, &targets), softcap, |chunk, logits| {
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
    with_number!(hidden.dtype(), T => for_each_chunk::<T>(&hidden, &head, (&rows, &targets), softcap, |chunk, logits| {
        let totals = vocabulary.totals(&chunk.statistics(logits, &vocabulary))?;
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

fn check(hidden: &Tensor, head: &Weight, targets: &[u32], vocabulary: &Vocabulary) -> Result<(usize, usize)> {
    let ((tokens, width), rows) = (hidden.dims2()?, vocabulary.known.len());
    if head.dims() != [rows, width] || tokens != targets.len() || rows * width == 0 {
        bail!("loss: hidden {:?}, head {:?} and {} targets do not fit", hidden.shape(), head.dims(), targets.len());
    }
    match targets.iter().find(|&&target| target != IGNORE && target as usize >= vocabulary.size) {
        Some(target) => bail!("loss: target {target} is outside the vocabulary of {}", vocabulary.size),
        None => Ok((tokens, width)),
    }
}
