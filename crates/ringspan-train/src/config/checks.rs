//! What settings have to be, one by one.

use super::RUN_FILE;
use crate::{
    error::{Error, Result},
    optimizer::{Method, OptimizerKind},
    settings::Settings,
};
use ringspan_models::{Lora, TARGETS, adapter};
use std::path::Path;

pub(super) fn lora(s: &Settings) -> Result<Option<Lora>> {
    let Some(rank) = s.lora_rank else {
        let given = [
            ("lora-alpha", s.lora_alpha.is_some()),
            ("lora-targets", s.lora_targets.is_some()),
            ("lora-dropout", s.lora_dropout.is_some()),
            ("lora-merge", s.lora_merge.is_some()),
        ];
        return match given.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Error::Settings(format!("--{flag} has no effect without --lora-rank"))),
            None => Ok(None),
        };
    };
    if s.model.is_none() {
        return Err(Error::Settings("--lora-rank trains adapters beside a model: name one with --model".into()));
    }
    let targets = match &s.lora_targets {
        Some(names) => names.split(',').map(|name| name.trim().to_owned()).collect(),
        None => TARGETS.map(str::to_owned).to_vec(),
    };
    let lora = Lora::new(rank, s.lora_alpha.unwrap_or(2.0 * rank as f64), targets);
    let lora = lora.and_then(|lora| lora.with_dropout(s.lora_dropout.unwrap_or(0.0)));
    lora.map(Some).map_err(|error| Error::Settings(error.to_string()))
}

/// A model is given or new, and a given one has its tokenizer.
pub(super) fn shape(s: &Settings) -> Result<()> {
    let refuse = |problem: &str| Err(Error::Settings(problem.into()));
    match (&s.model, &s.model_config, &s.tokenizer) {
        (Some(_), Some(_), _) => {
            refuse("--model and --model-config exclude each other: a model with its weights, or the shape of a new one")
        }
        (Some(_), None, Some(_)) => refuse(
            "--tokenizer has no effect with --model, which was made with its own; leave it out, or begin a new model with \
             --model-config",
        ),
        (None, None, Some(_)) => refuse(
            "--tokenizer has no effect without --model-config: the small new model reads bytes; leave it out, or say with \
             --model-config what the model is",
        ),
        _ => Ok(()),
    }
}

/// The share of the documents that is held out.
pub(super) fn held_out(s: &Settings) -> Result<f64> {
    let share = s.held_out.unwrap_or(if s.eval_data.is_some() { 0.0 } else { 0.05 });
    below_one("held-out", share)?;
    if s.eval_data.is_some() && s.held_out.is_some() {
        return Err(Error::Settings(
            "--held-out has no effect with --eval-data: the model is judged by that, and all of --data is learned; leave one \
             out"
                .into(),
        ));
    }
    let looks = [
        ("eval-every", s.eval_every.is_some_and(|steps| steps > 0)),
        ("eval-tokens", s.eval_tokens.is_some()),
        ("sample-tokens", s.sample_tokens.is_some_and(|tokens| tokens > 0)),
    ];
    match looks.into_iter().find(|(_, given)| *given && share == 0.0 && s.eval_data.is_none()) {
        Some((flag, _)) => Err(Error::Settings(format!(
            "--{flag} has no effect with --held-out 0: nothing is there to look at; leave it out, or give --eval-data"
        ))),
        None => Ok(share),
    }
}

pub(super) fn method(kind: OptimizerKind, s: &Settings) -> Result<Method> {
    let wrong = |flag: &str, other: &str| {
        Err(Error::Settings(format!("--{flag} has no effect with --optimizer {kind}: it belongs to {other}")))
    };
    match kind {
        OptimizerKind::AdamW => {
            if s.momentum.is_some() {
                return wrong("momentum", "sgd");
            }
            let (beta1, beta2) = (s.beta1.unwrap_or(0.9), s.beta2.unwrap_or(0.95));
            // Adapters begin at nothing, and are few: peft's users do not pull them back there.
            let decay = if s.lora_rank.is_some() { 0.0 } else { 0.1 };
            let (eps, weight_decay) = (s.eps.unwrap_or(1e-8), s.weight_decay.unwrap_or(decay));
            below_one("beta1", beta1)?;
            below_one("beta2", beta2)?;
            within("eps", eps, 0.0, 1.0)?;
            within("weight-decay", weight_decay, 0.0, f64::MAX)?;
            Ok(Method::AdamW { beta1, beta2, eps, weight_decay })
        }
        OptimizerKind::Sgd => {
            for (flag, given) in [("beta1", s.beta1), ("beta2", s.beta2), ("eps", s.eps)] {
                if given.is_some() {
                    return wrong(flag, "adamw");
                }
            }
            let (momentum, weight_decay) = (s.momentum.unwrap_or(0.0), s.weight_decay.unwrap_or(0.0));
            below_one("momentum", momentum)?;
            within("weight-decay", weight_decay, 0.0, f64::MAX)?;
            Ok(Method::Sgd { momentum, weight_decay })
        }
    }
}

pub(super) fn within(flag: &str, value: f64, low: f64, high: f64) -> Result<()> {
    if value >= low && value <= high {
        return Ok(());
    }
    let range = if high == f64::MAX { format!("at least {low} and finite") } else { format!("from {low} to {high}") };
    Err(Error::Settings(format!("--{flag} is {value}, but must be {range}")))
}

pub(super) fn below_one(flag: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(Error::Settings(format!("--{flag} is {value}, but must be at least 0 and below 1")))
}

/// A new run never writes over another one's work.
pub(super) fn refuse_used_folder(out: &Path) -> Result<()> {
    for name in
        [RUN_FILE, "checkpoints", "model.safetensors", "model.safetensors.index.json", "config.json", adapter::CONFIG]
    {
        if out.join(name).exists() {
            let advice = if out.join("checkpoints").exists() {
                format!("go on with --resume {}, choose another --out, or remove it", out.display())
            } else {
                "choose another --out, or remove it".into()
            };
            return Err(Error::Settings(format!(
                "{} already holds a run or a model ({name}): {advice}",
                out.display()
            )));
        }
    }
    Ok(())
}
