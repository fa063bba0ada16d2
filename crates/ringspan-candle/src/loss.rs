//! Cross entropy over a vocabulary without ever holding the logits of all tokens.

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
/// hidden `[T, C]`, head `[V, C]`, f32; one target a token, [`IGNORE`] for none.
///
/// # Errors
/// Shapes that do not fit, targets outside the vocabulary.
pub fn head_loss(hidden: &Tensor, head: &Tensor, targets: &[u32], scale: f32) -> Result<HeadLoss> {
    let (tokens, width) = check(hidden, head, targets)?;
    let head = head.contiguous()?;
    let transposed = head.t()?;
    let mut nll_sum = 0.0;
    let mut d_hidden = Vec::with_capacity(tokens * width);
    let mut d_head = Tensor::zeros(head.shape(), head.dtype(), &Device::Cpu)?;
    for (hidden, targets) in chunks(hidden, targets)? {
        let (logits, vocabulary) = logits_of(&hidden, &transposed)?;
        let mut gradient = logits;
        for (row, &target) in gradient.chunks_exact_mut(vocabulary).zip(targets) {
            if target == IGNORE {
                row.fill(0.0);
                continue;
            }
            let (max, sum) = exponentials(row);
            let of_target = f64::from(row[target as usize]);
            nll_sum += f64::from(max) + sum.ln() - of_target;
            let factor = (f64::from(scale) / sum) as f32;
            row.iter_mut().for_each(|x| *x = (*x - max).exp() * factor);
            row[target as usize] -= scale;
        }
        let gradient = Tensor::from_vec(gradient, (targets.len(), vocabulary), &Device::Cpu)?;
        values(&gradient.matmul(&head)?, |rows| {
            d_hidden.extend_from_slice(rows);
            Ok(())
        })?;
        d_head = (d_head + gradient.t()?.matmul(&hidden)?)?;
    }
    Ok(HeadLoss { nll_sum, d_hidden: Tensor::from_vec(d_hidden, (tokens, width), &Device::Cpu)?, d_head })
}

/// ln p(target) of every token; 0 where there is no target. Arguments and errors as for [`head_loss`].
///
/// # Errors
/// As for [`head_loss`].
pub fn log_probs(hidden: &Tensor, head: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
    check(hidden, head, targets)?;
    let transposed = head.contiguous()?.t()?;
    let mut out = Vec::with_capacity(targets.len());
    for (hidden, targets) in chunks(hidden, targets)? {
        let (logits, vocabulary) = logits_of(&hidden, &transposed)?;
        for (row, &target) in logits.chunks_exact(vocabulary).zip(targets) {
            out.push(match target {
                IGNORE => 0.0,
                target => {
                    let (max, sum) = exponentials(row);
                    (f64::from(row[target as usize]) - f64::from(max) - sum.ln()) as f32
                }
            });
        }
    }
    Ok(out)
}

/// The logits of all tokens, `[T, V]`: hidden `[T, C]`, head `[V, C]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn logits(hidden: &Tensor, head: &Tensor) -> Result<Tensor> {
    let (tokens, vocabulary) = (hidden.dim(0)?, head.dim(0)?);
    if tokens == 0 {
        return Tensor::zeros((0, vocabulary), hidden.dtype(), hidden.device());
    }
    hidden.contiguous()?.matmul(&head.contiguous()?.t()?)
}

/// Pieces of at most `CHUNK` tokens with their targets.
fn chunks<'a>(hidden: &Tensor, targets: &'a [u32]) -> Result<Vec<(Tensor, &'a [u32])>> {
    let hidden = hidden.contiguous()?;
    let piece = |(n, targets): (usize, &'a [u32])| Ok((hidden.narrow(0, n * CHUNK, targets.len())?, targets));
    targets.chunks(CHUNK).enumerate().map(piece).collect()
}

fn logits_of(hidden: &Tensor, transposed_head: &Tensor) -> Result<(Vec<f32>, usize)> {
    let logits = hidden.matmul(transposed_head)?;
    Ok((logits.flatten_all()?.to_vec1()?, transposed_head.dim(1)?))
}

/// The maximum of a row, and the sum of exponentials relative to it.
fn exponentials(row: &[f32]) -> (f32, f64) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (max, row.iter().map(|x| f64::from((x - max).exp())).sum())
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
