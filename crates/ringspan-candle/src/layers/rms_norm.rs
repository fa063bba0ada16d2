//! Root mean square normalisation as a layer.

use super::forward_pass::{ForwardPass, tensor};
use crate::cast::cast;
use crate::norm::rms_norm;
use crate::parameters::{Init, Scope, StoredWeights};
use crate::residual::{residual, residual_norm};
use crate::shard::ShardSpec;
use candle_core::{DType, Result, Tensor};

/// `x / rms(x) * (weight + offset)` over the last dimension (Zhang and Sennrich, 2019).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::layers::{ForwardPass, RmsNorm};
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
/// use ringspan_candle::{Adapters, Context};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let builder = ModelBuilder::new();
/// let norm = RmsNorm::new(&builder.unit(Unit::Head, "norm"), 2, 0.0);
/// let weights = StoredWeights::from([("norm.weight".into(), Tensor::new(&[1f32, 2.0], &Device::Cpu)?.into())]);
/// let y = World::threads(1)?.run(|rank| {
///     let (context, adapters) = (Context::builder(rank).batch(1, 2).build()?, Adapters::none());
///     let x = Tensor::new(&[[3f32, 3.0], [-5.0, 5.0]], &Device::Cpu)?;
///     let y = norm.forward(&x, &ForwardPass::new(&weights, &context, &adapters))?;
///     Ok::<_, Error>(y.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(y[0], [[1.0, 2.0], [-1.0, 2.0]]);
/// # Ok::<_, Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: String,
    eps: f64,
    /// A constant that is added to the weight.
    offset: f64,
}

impl RmsNorm {
    /// Adds the weight `[width]`.
    #[must_use]
    pub fn new(scope: &Scope, width: usize, eps: f64) -> Self {
        Self::with_offset(scope, width, eps, 0.0)
    }

    /// Like [`new`](Self::new), with `offset` added to the weight: Gemma adds 1.
    #[must_use]
    pub fn with_offset(scope: &Scope, width: usize, eps: f64, offset: f64) -> Self {
        let init = Init::Constant((1.0 - offset) as f32);
        Self { weight: scope.parameter("weight", &[width], ShardSpec::Replicated, init), eps, offset }
    }

    /// The name of the weight.
    #[must_use]
    pub fn weight_name(&self) -> &str {
        &self.weight
    }

    /// The norm of x `[.., width]`.
    ///
    /// # Errors
    /// A missing weight, other shapes.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.normed(x, pass.tensor(&self.weight)?)
    }

    /// Like [`forward`](Self::forward), with the weight from these parameters.
    ///
    /// # Errors
    /// A missing weight, other shapes.
    pub fn forward_with(&self, x: &Tensor, weights: &StoredWeights) -> Result<Tensor> {
        self.normed(x, tensor(weights, &self.weight)?)
    }

    /// Returns the sum of x and y, and its norm.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    pub fn add_and_norm(&self, x: &Tensor, y: &Tensor, pass: &ForwardPass) -> Result<(Tensor, Tensor)> {
        if x.dim(0)? == 0 {
            let sum = residual(x, y)?;
            return Ok((sum.clone(), sum));
        }
        residual_norm(x, y, &self.factor(pass.tensor(&self.weight)?)?, self.eps)
    }

    fn normed(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        match x.dim(0)? {
            0 => Ok(x.clone()),
            _ => rms_norm(x, &self.factor(weight)?, self.eps),
        }
    }

    fn factor(&self, weight: &Tensor) -> Result<Tensor> {
        match self.offset {
            0.0 => Ok(weight.clone()),
            offset => cast(weight, DType::F32)? + offset,
        }
    }
}
