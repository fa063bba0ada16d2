//! Loss, logits and gradients of one rank's tokens, for every checkpoint policy.

use super::{Answer, relative_l2};
use candle_core::DType;
use ringspan_candle::gradients::{Gradients, loss_and_gradients};
use ringspan_candle::model::{Parameter, UnitWeights, stored};
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::{Attend, CheckpointPolicy, Recompute, StoredWeights, Unit, Weights};
use ringspan_models::{Decoder, Error, TokenBatch};
use std::collections::{BTreeMap, BTreeSet};

/// Computes loss, logits and gradients of this rank's tokens; the loss is divided by all `valid` targets.
pub(super) fn loss_and_gradients_of_rank(
    decoder: &Decoder,
    weights: &Weights,
    tokens: &[u32],
    targets: &[u32],
    valid: usize,
    attend: &dyn Attend,
) -> Result<(Answer, Vec<Unit>), Error> {
    let shared = attend.tensor_parallel();
    let whole = stored(weights.clone());
    let mut x = decoder.embed(&whole, tokens, attend)?;
    for index in 0..decoder.config().num_hidden_layers {
        x = decoder.layer(&whole, index, &x, attend)?;
    }
    let hidden = shared.gather(&decoder.norm(&whole, &x)?, tokens.len())?;
    let logits = decoder.model().head().logits(&hidden, &whole)?.flatten_all()?.to_vec1()?;
    let differentiate = |policy: CheckpointPolicy| {
        let (mut gradients, mut order) = (BTreeMap::new(), Vec::new());
        let batch = TokenBatch { tokens, targets, scale: 1.0 / valid as f32 };
        let mut take = |unit, of_unit: Gradients| {
            order.push(unit);
            let names = decoder.unit_shapes(unit).into_iter().map(|(name, _)| name);
            // Experts on other ranks have no gradient here.
            let names = names.filter(|name| decoder.trains(name) && weights.contains_key(name));
            assert_eq!(of_unit.keys().cloned().collect::<BTreeSet<_>>(), names.collect(), "{unit:?}");
            for (name, gradient) in of_unit {
                assert_eq!((gradient.dtype(), gradient.dims()), (DType::F32, weights[&name].dims()), "{name}");
                gradients.insert(name, gradient.flatten_all()?.to_vec1::<f32>()?);
            }
            Ok(())
        };
        let own = RankWeights(weights);
        let nll = loss_and_gradients(decoder, &own, &batch, policy, attend, &mut take)?;
        Ok::<_, Error>((nll, gradients, order))
    };
    let one = differentiate(CheckpointPolicy::default())?;
    // A load-balancing loss can be used for one pass only.
    if decoder.config().router_aux_loss().is_none() {
        // Parameters are compared all together, since a norm's gradient from a rank's few tokens may nearly cancel out.
        let all = |gradients: &BTreeMap<String, Vec<f32>>| gradients.values().flatten().copied().collect::<Vec<_>>();
        // Gated layers with adapters are computed in tiles, unless they store their products: then gradients are summed in
        // another order.
        let in_tiles = decoder.lora().is_some();
        for recompute in [Recompute::Full, Recompute::Nothing] {
            let (nll, gradients, order) = differentiate(recompute.into())?;
            let is_equal = match in_tiles && recompute == Recompute::Nothing {
                true => relative_l2(&all(&gradients), &all(&one.1)) < 1e-6,
                false => gradients == one.1,
            };
            let differs = |name: &&String| gradients[*name] != one.1[*name];
            let other: Vec<&String> = gradients.keys().filter(differs).collect();
            assert!(
                is_equal && (nll, &order) == (one.0, &one.2),
                "recompute {recompute}: other gradients of {other:?}"
            );
        }
        for recompute in Recompute::ALL {
            let (nll, rounded, _) =
                differentiate(CheckpointPolicy { recompute, storage: Storage::Bf16, offload: None })?;
            assert_eq!(nll, one.0, "recompute {recompute}: the loss knows no rounding");
            let off = relative_l2(&all(&rounded), &all(&one.1));
            // Elements near the bound of a clamped gate gain or lose their gradient by rounding: with a bound out of reach,
            // gradients of gpt-oss are 2e-3 apart.
            let most = if decoder.config().model_type == "gpt_oss" { 5e-2 } else { 1e-2 };
            assert!(off < most, "recompute {recompute}: gradients are off by {off:e} in bf16");
        }
    }
    let (nll, gradients, order) = one;
    Ok((Answer { logits, loss: nll / valid as f64, gradients }, order))
}

/// The weights of a rank, which may lack experts.
struct RankWeights<'a>(&'a Weights);

impl UnitWeights for RankWeights<'_> {
    fn unit(&self, _: Unit, parameters: &[Parameter]) -> candle_core::Result<StoredWeights> {
        let of = |Parameter { name, .. }: &Parameter| Some((name.clone(), self.0.get(name)?.clone().into()));
        Ok(parameters.iter().filter_map(of).collect())
    }
}
