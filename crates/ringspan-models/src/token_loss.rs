//! The loss of a decoder's next tokens, and its gradients.

use crate::decoder::Decoder;
use crate::error::Error;
use candle_core::{Result, Tensor};
use ringspan_candle::gradients::{EmbeddingOutputGradients, Gradients, Graph, LossGradients, TrainableModel, variable};
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::model::{Layer, ModelParameters, UnitWeights};
use ringspan_candle::{Adapters, Attend, Model, StoredWeights, Unit};

/// Tokens of a rank, and what a decoder should predict after each. With tensor parallelism they are those of the whole group.
#[derive(Debug, Clone, Copy)]
pub struct TokenBatch<'a> {
    /// The tokens `[T]`.
    pub tokens: &'a [u32],
    /// The next token of each, `[T]`, or the [ignored target](ringspan_candle::loss::IGNORE).
    pub targets: &'a [u32],
    /// The factor of the gradients. The loss is the negative log-likelihood, summed over the tokens with a target, without this
    /// factor.
    pub scale: f32,
}

impl Model for Decoder {
    type Batch<'a> = TokenBatch<'a>;
    type Conditions = ();

    fn all_parameters(&self) -> &ModelParameters {
        Self::all_parameters(self)
    }

    fn adapter_sizes(&self) -> &Adapters {
        Self::adapter_sizes(self)
    }

    fn layer_count(&self) -> usize {
        self.config().num_hidden_layers
    }

    fn experts(&self) -> usize {
        Self::experts(self)
    }

    /// # Errors
    /// Tokens outside the vocabulary.
    fn embedded(&self, batch: &TokenBatch, pass: &ForwardPass) -> Result<(Tensor, ())> {
        Ok((self.embed(pass.weights(), batch.tokens, pass.attend()).map_err(candle_core::Error::wrap)?, ()))
    }

    fn conditioned_layer<'a>(&'a self, index: usize, _: &'a TokenBatch, (): &'a ()) -> Box<dyn Layer + 'a> {
        Box::new(self.model().layer(index))
    }
}

impl TrainableModel for Decoder {
    fn trains(&self, name: &str) -> bool {
        Self::trains(self, name)
    }

    /// # Errors
    /// A loss on the load of experts that `attend` does not know of.
    fn check(&self, _: &TokenBatch, attend: &dyn Attend) -> Result<()> {
        if let Some(coefficient) = self.config().router_aux_loss().filter(|_| self.experts() > 0)
            && attend.experts().router_gradients(0).is_empty()
        {
            return Err(candle_core::Error::wrap(Error::Unbalanced { coefficient }));
        }
        Ok(())
    }

    fn head_units(&self) -> Vec<Unit> {
        match self.model().head().is_tied() {
            true => vec![Unit::Head, Unit::Embedding],
            false => vec![Unit::Head],
        }
    }

    fn condition_variables<'a>(&self, (): &'a ()) -> Vec<&'a Tensor> {
        Vec::new()
    }

    fn loss(
        &self,
        batch: &TokenBatch,
        (): &(),
        x: Tensor,
        weights: StoredWeights,
        attend: &dyn Attend,
    ) -> Result<LossGradients> {
        let (head, norm) = (self.model().head(), self.model().norm());
        let of_norm = weights.get_key_value(self.norm_name()).map(|(name, weight)| (name.clone(), weight.clone()));
        let mut graph = Graph::new(of_norm.into_iter().collect(), |name| self.trains(name))?;
        let x = variable(x)?;
        let normed = graph.record(|weights| norm.forward_with(&x, weights))?;
        let trains_head = self.trains(head.weight_name());
        let tensor_parallel = attend.tensor_parallel();
        let loss = head.loss(&normed.output(), batch.targets, batch.scale, trains_head, &weights, tensor_parallel)?;
        drop(weights);
        graph.differentiate(normed, loss.d_hidden)?;
        let d_x = graph.take(&x)?;
        let mut gradients = graph.finish()?;
        gradients.extend(loss.d_head.map(|d_head| (head.weight_name().to_owned(), d_head)));
        Ok(LossGradients { loss: loss.nll_sum, d_x, d_conditions: Vec::new(), gradients })
    }

    fn embedding_gradients(
        &self,
        batch: &TokenBatch,
        _: &dyn UnitWeights,
        EmbeddingOutputGradients { d_x, .. }: EmbeddingOutputGradients,
        attend: &dyn Attend,
    ) -> Result<Gradients> {
        let embedding = self.model().embedding();
        if !self.trains(embedding.weight_name()) {
            return Ok(Gradients::new());
        }
        let gradient = embedding.backward(&d_x, batch.tokens, attend.tensor_parallel())?;
        Ok(Gradients::from([(embedding.weight_name().to_owned(), gradient)]))
    }
}
