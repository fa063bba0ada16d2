//! The tensors that attention reads, and the learned terms of its scores among them.

use crate::cast::cast;
use candle_core::{DType, Result, Tensor, bail};
use ringspan::Score;
use ringspan::kernel::RelativeBias;

/// The inputs of attention, for T tokens on this rank; H query heads share G key-value heads, of width D (queries, keys) and
/// Dv (values).
///
/// [`Context::attention_with`](crate::Context::attention_with) takes queries, keys, values and bias with a batch dim.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::{Mask, Score, World};
/// use ringspan_candle::{AttentionInputs, Context};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// // A sink takes part in the softmax without a value: with score 0 beside one key of score 0, half of the value is left.
/// let out = World::threads(1)?.run(|rank| {
///     let context = Context::builder(rank).batch(1, 1).build()?;
///     let v = Tensor::new(&[[[[6f32, 8.0]]]], &Device::Cpu)?;                                          // [B, T, H, D]
///     let (q, sinks) = (v.zeros_like()?, Tensor::new(&[0f32], &Device::Cpu)?);
///     let inputs = AttentionInputs { sinks: Some(&sinks), ..AttentionInputs::new(&q, &q, &v) };
///     let out = context.attention_with(&inputs, &Mask::full(), Score::new(1.0))?;
///     Ok::<_, Error>(out.flatten_all()?.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(out[0], [3.0, 4.0]);
/// # Ok::<_, Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// Queries `[T, H, D]`.
    pub q: &'a Tensor,
    /// Keys `[T, G, D]`.
    pub k: &'a Tensor,
    /// Values `[T, G, Dv]`.
    pub v: &'a Tensor,
    /// Attention sinks `[H]`: for each head the score of one more key, with value 0, that every query sees; `None` without
    /// sinks.
    pub sinks: Option<&'a Tensor>,
    /// A term that is added to the score of each query of this rank and each key of its batch row, before the mask: f32
    /// `[T, H, Sk]`, or `[T, 1, Sk]` for all heads, where Sk is the length of a row of keys; `None` without one.
    pub bias: Option<&'a Tensor>,
    /// The learned terms of T5's buckets `[H, count]`, which take the place of the table of
    /// [`Buckets`](ringspan::kernel::Buckets) in the score, so that that one may be empty; `None` if it is to be used, as a
    /// constant. T5's checkpoints store the transpose, `[count, H]`.
    pub bucket_table: Option<&'a Tensor>,
}

impl<'a> AttentionInputs<'a> {
    /// Inputs without sinks, bias and bucket table.
    #[must_use]
    pub fn new(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Self {
        Self { q, k, v, sinks: None, bias: None, bucket_table: None }
    }
}

/// Returns `score` with the values of the sinks `[H]` and of the bucket table `[H, count]` of `inputs`, if there are any.
pub(crate) fn with_learned_terms(mut score: Score, inputs: &AttentionInputs) -> Result<Score> {
    let values = |terms: &Tensor| cast(&terms.detach(), DType::F32);
    if let Some(sinks) = inputs.sinks {
        score.sinks = Some(values(sinks)?.to_vec1()?);
    }
    if let Some(table) = inputs.bucket_table {
        let Some(RelativeBias::Buckets(buckets)) = &mut score.relative else {
            bail!("a bucket table {:?} needs a score with relative buckets, which say their number", table.dims());
        };
        let heads = inputs.q.dim(1)?;
        if table.dims() != [heads, buckets.count] {
            bail!(
                "{heads} heads with {} buckets need a bucket table [{heads}, {}], given {:?}",
                buckets.count,
                buckets.count,
                table.dims()
            );
        }
        buckets.table = values(table)?.flatten_all()?.to_vec1()?;
    }
    Ok(score)
}
