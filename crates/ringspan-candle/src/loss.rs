//! Cross entropy over a vocabulary without ever holding the logits of all tokens.

use crate::activation::exp;
use crate::linear::linear;
use crate::matmul::{Into, Matrix, product};
use crate::pool;
use crate::slices::values;
use candle_core::{Device, Result, Tensor, bail};

/// Target of a token that has none: padding, and the last token of a document.
pub const IGNORE: u32 = u32::MAX;

/// Tokens whose logits exist at once.
const CHUNK: usize = 512;

/// What [`head_loss`] returns.
#[derive(Debug, Clone)]
pub struct HeadLoss {
    /// Sum over tokens with a target of -ln p(target).
    pub nll_sum: f64,
    /// Gradient `[T, C]` of `scale * nll_sum`.
    pub d_hidden: Tensor,
    /// Gradient `[V, C]` of `scale * nll_sum`.
    pub d_head: Tensor,
}

/// Negative log-likelihood of `targets` under softmax(hidden head^T), and its gradients times `scale`.
///
/// hidden `[T, C]`, head `[V, C]`, f32; one target a token, [`IGNORE`] for none. Three products, chunk by chunk: the
/// logits turn into their gradient where they are, so `[CHUNK, V]` is the most that exists of them.
///
/// # Errors
/// Shapes that do not fit, targets outside the vocabulary.
pub fn head_loss(hidden: &Tensor, head: &Tensor, targets: &[u32], scale: f32) -> Result<HeadLoss> {
    let (tokens, width) = check(hidden, head, targets)?;
    let (hidden, head) = (hidden.contiguous()?, head.contiguous()?);
    let mut nll_sum = 0.0;
    let (mut d_hidden, mut d_head) = (vec![0.0; tokens * width], vec![0.0; head.elem_count()]);
    of_chunks(&hidden, &head, targets, |chunk, logits| {
        let part = pool::part(chunk.targets.len(), chunk.vocabulary);
        let parts = logits.chunks_mut(part * chunk.vocabulary).zip(chunk.targets.chunks(part)).collect();
        let sums = pool::map(parts, |(logits, targets): (&mut [f32], &[u32])| {
            let rows = logits.chunks_exact_mut(chunk.vocabulary).zip(targets);
            rows.map(|(row, &target)| pool::vectorized(|| differentiate(row, target, scale))).sum::<f64>()
        });
        nll_sum += sums.into_iter().sum::<f64>();
        let gradient = Matrix::new(logits, chunk.targets.len(), chunk.vocabulary);
        let rows = chunk.first * width..(chunk.first + chunk.targets.len()) * width;
        product(gradient, chunk.head, &mut d_hidden[rows], Into::Fresh);
        product(gradient.t(), chunk.hidden, &mut d_head, Into::Sum);
    })?;
    Ok(HeadLoss {
        nll_sum,
        d_hidden: Tensor::from_vec(d_hidden, (tokens, width), &Device::Cpu)?,
        d_head: Tensor::from_vec(d_head, head.shape(), &Device::Cpu)?,
    })
}

/// ln p(target) of every token; 0 where there is no target. Arguments and errors as for [`head_loss`].
///
/// # Errors
/// As for [`head_loss`].
pub fn log_probs(hidden: &Tensor, head: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
    check(hidden, head, targets)?;
    let mut out = Vec::with_capacity(targets.len());
    of_chunks(&hidden.contiguous()?, &head.contiguous()?, targets, |chunk, logits| {
        let rows: Vec<(&mut [f32], u32)> =
            logits.chunks_exact_mut(chunk.vocabulary).zip(chunk.targets.iter().copied()).collect();
        out.extend(pool::map(rows, |(row, target)| match target {
            IGNORE => 0.0,
            target => {
                let of_target = f64::from(row[target as usize]);
                let (max, sum) = pool::vectorized(|| exponentials(row));
                (of_target - f64::from(max) - sum.ln()) as f32
            }
        }));
    })?;
    Ok(out)
}

/// The logits of all tokens, `[T, V]`: hidden `[T, C]`, head `[V, C]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn logits(hidden: &Tensor, head: &Tensor) -> Result<Tensor> {
    linear(hidden, head, None)
}

/// Tokens whose logits exist at once, and what they are made of.
struct Chunk<'a> {
    first: usize,
    targets: &'a [u32],
    vocabulary: usize,
    hidden: Matrix<'a>,
    head: Matrix<'a>,
}

/// Calls `work` with the logits `[.., V]` of each chunk of tokens, in one buffer that it may write over.
fn of_chunks(hidden: &Tensor, head: &Tensor, targets: &[u32], mut work: impl FnMut(&Chunk, &mut [f32])) -> Result<()> {
    let ((tokens, width), vocabulary) = (hidden.dims2()?, head.dim(0)?);
    values(hidden, |hidden| {
        values(head, |head| {
            let (hidden, head) = (Matrix::new(hidden, tokens, width), Matrix::new(head, vocabulary, width));
            let mut logits = vec![0.0; tokens.min(CHUNK) * vocabulary];
            for (number, targets) in targets.chunks(CHUNK).enumerate() {
                let first = number * CHUNK;
                let hidden = hidden.rows(first..first + targets.len());
                let logits = &mut logits[..targets.len() * vocabulary];
                product(hidden, head.t(), logits, Into::Fresh);
                work(&Chunk { first, targets, vocabulary, hidden, head }, logits);
            }
            Ok(())
        })
    })
}

/// Turns the logits of a token into `scale` times the gradient of its negative log-likelihood, which it returns.
#[inline(always)]
fn differentiate(row: &mut [f32], target: u32, scale: f32) -> f64 {
    if target == IGNORE {
        row.fill(0.0);
        return 0.0;
    }
    let of_target = f64::from(row[target as usize]);
    let (max, sum) = exponentials(row);
    let factor = (f64::from(scale) / sum) as f32;
    row.iter_mut().for_each(|x| *x *= factor);
    row[target as usize] -= scale;
    f64::from(max) + sum.ln() - of_target
}

/// Turns a row into exponentials relative to its maximum; returns the maximum, and their sum.
#[inline(always)]
fn exponentials(row: &mut [f32]) -> (f32, f64) {
    /// Lanes of a vector, so that maximum and sum vectorise, and elements summed in f32 before f64 takes over.
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

fn check(hidden: &Tensor, head: &Tensor, targets: &[u32]) -> Result<(usize, usize)> {
    let ((tokens, width), (vocabulary, head_width)) = (hidden.dims2()?, head.dims2()?);
    if width != head_width || tokens != targets.len() || vocabulary == 0 {
        bail!("loss: hidden {:?}, head {:?} and {} targets do not fit", hidden.shape(), head.shape(), targets.len());
    }
    match targets.iter().find(|&&target| target != IGNORE && target as usize >= vocabulary) {
        Some(target) => bail!("loss: target {target} is outside the vocabulary of {vocabulary}"),
        None => Ok((tokens, width)),
    }
}
