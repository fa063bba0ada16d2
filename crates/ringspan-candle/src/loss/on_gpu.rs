//! The same on a GPU, of candle's operations. What is known of a row, three numbers, is brought to the CPU, where they are
//! added up in f64 and, if ranks share the vocabulary, over the ranks. Logits and exponentials are f32 also where hidden states
//! and head are bf16; their gradient is rounded for its products with these.

use super::{CHUNK, HeadLoss, IGNORE, Sums, Vocabulary};
use crate::cast::cast;
use crate::linear::linear_wide;
use candle_core::{DType, Result, Tensor};

/// As [`head_loss`](super::head_loss): hidden `[T, C]`, head `[V, C]`.
pub(super) fn head_loss(
    hidden: &Tensor,
    head: &Tensor,
    targets: &[u32],
    scale: f32,
    trains_head: bool,
    vocabulary: &Vocabulary,
) -> Result<HeadLoss> {
    // Without the head's graph, which the gradient would hold, and with it all logits.
    let head = &head.detach();
    let (mut nll_sum, mut d_hidden) = (0.0, Vec::new());
    let mut d_head = match trains_head {
        true => Some(Tensor::zeros(head.shape(), DType::F32, head.device())?),
        false => None,
    };
    for (number, targets) in targets.chunks(CHUNK).enumerate() {
        let rows = hidden.narrow(0, number * CHUNK, targets.len())?;
        let Chunk { exponentials, sums, places } = Chunk::new(&rows, head, targets, vocabulary)?;
        let totals = vocabulary.totals(&sums)?;
        let (mut factors, mut at_targets) = (Vec::new(), Vec::new());
        for ((own, total), target) in sums.iter().zip(&totals).zip(targets) {
            let counts = *target != IGNORE;
            nll_sum += if counts { total.nll() } else { 0.0 };
            factors.push(if counts { total.factor(own, scale) } else { 0.0 });
            at_targets.push(if counts && vocabulary.place(*target).is_some() { -scale } else { 0.0 });
        }
        let column = |values: Vec<f32>| Tensor::from_vec(values, (targets.len(), 1), hidden.device());
        let gradient = exponentials.broadcast_mul(&column(factors)?)?.scatter_add(&places, &column(at_targets)?, 1)?;
        let gradient = cast(&gradient, hidden.dtype())?;
        d_hidden.push(gradient.matmul(head)?);
        d_head = d_head.map(|sum| sum + cast(&gradient.t()?.matmul(&rows)?, DType::F32)?).transpose()?;
    }
    let d_hidden = if d_hidden.is_empty() { hidden.zeros_like()? } else { Tensor::cat(&d_hidden, 0)? };
    Ok(HeadLoss { nll_sum, d_hidden, d_head })
}

/// As [`log_probs`](super::log_probs).
pub(super) fn log_probs(hidden: &Tensor, head: &Tensor, targets: &[u32], vocabulary: &Vocabulary) -> Result<Vec<f32>> {
    let mut out = Vec::with_capacity(targets.len());
    for (number, targets) in targets.chunks(CHUNK).enumerate() {
        let rows = hidden.narrow(0, number * CHUNK, targets.len())?;
        let totals = vocabulary.totals(&Chunk::new(&rows, head, targets, vocabulary)?.sums)?;
        let log_prob = |(total, target): (&Sums, &u32)| if *target == IGNORE { 0.0 } else { -total.nll() as f32 };
        out.extend(totals.iter().zip(targets).map(log_prob));
    }
    Ok(out)
}

/// Tokens whose logits exist at once.
struct Chunk {
    /// Of the logits `[n, V]`, relative to the greatest of each row.
    exponentials: Tensor,
    sums: Vec<Sums>,
    /// Where the targets' logits are `[n, 1]`; 0 where they are not here.
    places: Tensor,
}

impl Chunk {
    fn new(rows: &Tensor, head: &Tensor, targets: &[u32], vocabulary: &Vocabulary) -> Result<Self> {
        let logits = linear_wide(&rows.detach(), &head.detach())?;
        let places: Vec<Option<usize>> = targets.iter().map(|target| vocabulary.place(*target)).collect();
        let indices: Vec<u32> = places.iter().map(|place| place.unwrap_or(0) as u32).collect();
        let indices = Tensor::from_vec(indices, (targets.len(), 1), rows.device())?;
        let max = logits.max_keepdim(1)?;
        let exponentials = logits.broadcast_sub(&max)?.exp()?;
        let numbers = Tensor::cat(&[&max, &exponentials.sum_keepdim(1)?, &logits.gather(&indices, 1)?], 1)?;
        let numbers = numbers.to_vec2::<f32>()?;
        let of = |(row, place): (&Vec<f32>, &Option<usize>)| Sums {
            max: row[0],
            sum: f64::from(row[1]),
            of_target: place.map_or(0.0, |_| f64::from(row[2])),
        };
        Ok(Self { exponentials, sums: numbers.iter().zip(&places).map(of).collect(), places: indices })
    }
}
