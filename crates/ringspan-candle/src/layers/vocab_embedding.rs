//! The embedding of tokens.

use super::forward_pass::parameter;
use crate::cast::cast;
use crate::parameters::{Init, Scope, StoredWeights};
use crate::shard::{ShardSpec, Split};
use crate::tensor_parallel::TensorParallel;
use candle_core::{DType, Result, Tensor};

/// The embedding table `[V, C]` of tokens; with tensor parallelism, each rank has some of its rows.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::TensorParallel;
/// use ringspan_candle::layers::VocabEmbedding;
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
///
/// let builder = ModelBuilder::new();
/// let embedding = VocabEmbedding::new(&builder.unit(Unit::Embedding, "model.embed_tokens"), 3, 2);
/// let table = Tensor::new(&[[0f32, 1.0], [2.0, 3.0], [4.0, 5.0]], &Device::Cpu)?;
/// let weights = StoredWeights::from([(embedding.weight_name().to_owned(), table.into())]);
/// let rows = embedding.forward(&[2, 0], &weights, &TensorParallel::default())?;
/// assert_eq!(rows.to_vec2::<f32>()?, [[4.0, 5.0], [0.0, 1.0]]);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct VocabEmbedding {
    weight: String,
    vocabulary: usize,
    width: usize,
    /// Factor of the rows.
    scale: f64,
}

impl VocabEmbedding {
    /// Adds the table `[vocabulary, width]`.
    #[must_use]
    pub fn new(scope: &Scope, vocabulary: usize, width: usize) -> Self {
        let shard = ShardSpec::Rows(Split::Even("vocab_size"));
        let weight = scope.parameter("weight", &[vocabulary, width], shard, Init::Normal);
        Self { weight, vocabulary, width, scale: 1.0 }
    }

    /// Multiplies rows by `scale`.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// The name of the table.
    #[must_use]
    pub fn weight_name(&self) -> &str {
        &self.weight
    }

    /// The number V of tokens in the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Looks up the rows `[T, C]` of tokens; with tensor parallelism, returns this rank's rows of them.
    ///
    /// # Errors
    /// A missing table, failures of other ranks.
    pub fn forward(&self, tokens: &[u32], weights: &StoredWeights, tp: &TensorParallel) -> Result<Tensor> {
        let table = parameter(weights, &self.weight)?;
        let (device, dtype) = (table.device(), table.computed_in());
        if tokens.is_empty() {
            return Tensor::zeros((0, self.width), dtype, device);
        }
        if tp.is_single_rank() {
            return self.scaled(table.lookup(tokens)?);
        }
        // Each rank has a shard of the vocabulary, and contributes zeros for other tokens.
        let known = tp.shard_range(self.vocabulary);
        let place = |token: u32| (token as usize).checked_sub(known.start).filter(|place| *place < known.len());
        let places: Vec<u32> = tokens.iter().filter_map(|token| Some(place(*token)? as u32)).collect();
        let mut rows = vec![0.0f32; tokens.len() * self.width];
        if !places.is_empty() {
            let own = table.lookup(&places)?.flatten_all()?;
            let own = cast(&own, DType::F32)?.to_vec1::<f32>()?;
            let here = rows.chunks_exact_mut(self.width).zip(tokens).filter(|(_, token)| place(**token).is_some());
            here.zip(own.chunks_exact(self.width)).for_each(|((row, _), own)| row.copy_from_slice(own));
        }
        let rows = cast(&Tensor::from_vec(rows, (tokens.len(), self.width), device)?, dtype)?;
        self.scaled(tp.reduce(&rows)?)
    }

    /// The gradient of this rank's shard of the table, f32, from the gradient of the output of [`forward`](Self::forward).
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn backward(&self, d_rows: &Tensor, tokens: &[u32], tp: &TensorParallel) -> Result<Tensor> {
        let d_rows = tp.gather(&self.scaled(d_rows.clone())?, tokens.len())?;
        let known = tp.shard_range(self.vocabulary);
        let own = |token: u32| (token as usize).checked_sub(known.start).filter(|row| *row < known.len());
        match d_rows.device().is_cpu() {
            true => sums_by_token(&d_rows, tokens, own, [known.len(), self.width]),
            false => sums_on_gpu(&d_rows, tokens, own, [known.len(), self.width]),
        }
    }

    fn scaled(&self, rows: Tensor) -> Result<Tensor> {
        match self.scale {
            1.0 => Ok(rows),
            scale => cast(&(cast(&rows, DType::F32)? * scale)?, rows.dtype()),
        }
    }
}

/// Adds the rows of `d_rows` `[T, C]` to the rows of a table of this shape; `own` returns a token's row in this rank's shard,
/// if it is there.
fn sums_by_token(
    d_rows: &Tensor,
    tokens: &[u32],
    own: impl Fn(u32) -> Option<usize>,
    shape: [usize; 2],
) -> Result<Tensor> {
    let [rows, width] = shape;
    let mut sums = vec![0.0f32; rows * width];
    let values: Vec<f32> = cast(&d_rows.flatten_all()?, DType::F32)?.to_vec1()?;
    for (row, &token) in values.chunks_exact(width.max(1)).zip(tokens) {
        if let Some(at) = own(token) {
            sums[at * width..(at + 1) * width].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }
    Tensor::from_vec(sums, (rows, width), d_rows.device())
}

/// Like [`sums_by_token`], on a GPU, which also adds in f32 and in the order of the tokens.
fn sums_on_gpu(
    d_rows: &Tensor,
    tokens: &[u32],
    own: impl Fn(u32) -> Option<usize>,
    shape: [usize; 2],
) -> Result<Tensor> {
    let known = tokens.iter().enumerate().filter_map(|(row, token)| Some((row as u32, own(*token)? as u32)));
    let (rows, places): (Vec<_>, Vec<_>) = known.unzip();
    let zeros = Tensor::zeros(&shape, DType::F32, d_rows.device())?;
    if rows.is_empty() {
        return Ok(zeros);
    }
    let selected = d_rows.contiguous()?.index_select(&Tensor::new(rows, d_rows.device())?, 0)?;
    zeros.index_add(&Tensor::new(places, d_rows.device())?, &cast(&selected, DType::F32)?, 0)
}
