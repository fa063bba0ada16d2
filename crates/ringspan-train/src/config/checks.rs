//! Checks of single settings and of settings that depend on each other.

use crate::{
    error::{Error, Result},
    optimizer::{OptimizerConfig, OptimizerKind},
    settings::{RUN_FILE, Settings},
};
use ringspan_models::{LayerNames, Lora, adapter};
use std::fmt::Display;
use std::path::Path;

/// The adapters that are trained: the one in the model's folder, or new ones; none where the model itself is trained.
pub(super) fn lora(s: &Settings) -> Result<Option<Lora>> {
    let merged = s.merge_adapter == Some(true);
    let refuse = |problem: String| Err(Error::Settings(problem));
    let Some(folder) = s.model.as_deref().filter(|model| adapter::is_adapter_folder(model)) else {
        return match merged {
            true => refuse("--merge-adapter has no effect: --model names no adapter; leave it out".into()),
            false => new_lora(s),
        };
    };
    if !merged {
        return continued_lora(s, folder).map(Some);
    }
    let given = [
        ("lora-rank", s.lora_rank.is_some()),
        ("lora-alpha", s.lora_alpha.is_some()),
        ("lora-targets", s.lora_targets.is_some()),
        ("lora-dropout", s.lora_dropout.is_some()),
        ("lora-merge", s.lora_merge.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => refuse(format!(
            "--{flag} contradicts --merge-adapter, which trains all of a model; for new adapters on the merged model, train \
             this one with --steps 1 --lr 0 --lora-merge, and give the model that is saved then"
        )),
        None => Ok(None),
    }
}

/// The adapter in a folder, whose training goes on with its rank and its target layers.
fn continued_lora(s: &Settings, folder: &Path) -> Result<Lora> {
    let refuse = |problem: String| Err(Error::Settings(problem));
    let path = folder.display();
    let described = adapter::describe(folder).map_err(|error| Error::Model(error.to_string()))?;
    if let Some(why) = described.frozen {
        return refuse(format!("the adapter in {path} cannot be trained on: {why}"));
    }
    let lora = described.lora;
    let refuse_difference = |flag: &str, given: &dyn Display, own: &dyn Display| {
        refuse(format!(
            "--{flag} {given} contradicts the adapter in {path}, which is trained on and has {own}; leave --{flag} out, or train \
             all of its model with --merge-adapter"
        ))
    };
    if let Some(rank) = s.lora_rank.filter(|rank| *rank != lora.rank) {
        return refuse_difference("lora-rank", &rank, &format!("rank {}", lora.rank));
    }
    if let Some(alpha) = s.lora_alpha.filter(|alpha| *alpha != lora.alpha) {
        return refuse_difference("lora-alpha", &alpha, &format!("alpha {}", lora.alpha));
    }
    if let Some(names) = &s.lora_targets {
        let mut given = targets(names);
        given.sort();
        let same = match lora.targets() {
            LayerNames::Ends(own) => {
                let mut own = own.clone();
                own.sort();
                own == given
            }
            LayerNames::AllLinear | LayerNames::AllButRouters => given == ["all-linear"],
            LayerNames::Matching(_) => false,
        };
        if !same {
            return refuse_difference("lora-targets", names, &format!("others: {}", lora.targets()));
        }
    }
    match s.lora_dropout {
        Some(dropout) => lora.with_dropout(dropout).map_err(|error| Error::Settings(error.to_string())),
        None => Ok(lora),
    }
}

/// Splits a list of names at its commas.
fn targets(names: &str) -> Vec<String> {
    names.split(',').map(|name| name.trim().to_owned()).collect()
}

fn new_lora(s: &Settings) -> Result<Option<Lora>> {
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
        return Err(Error::Settings("--lora-rank trains adapters on a model: name one with --model".into()));
    }
    let alpha = s.lora_alpha.unwrap_or(2.0 * rank as f64);
    let lora = match &s.lora_targets {
        Some(names) => Lora::new(rank, alpha, targets(names)),
        None => Lora::of_all_layers(rank, alpha),
    };
    let lora = lora.and_then(|lora| lora.with_dropout(s.lora_dropout.unwrap_or(0.0)));
    lora.map(Some).map_err(|error| Error::Settings(error.to_string()))
}

/// Checks that the model is either given or new, and that a tokenizer is named only for a new one.
pub(super) fn check_model_source(s: &Settings) -> Result<()> {
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

/// The share of the documents that is held out for evaluation.
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
    let evaluation_flags = [
        ("eval-every", s.eval_every.is_some_and(|steps| steps > 0)),
        ("eval-tokens", s.eval_tokens.is_some()),
        ("sample-tokens", s.sample_tokens.is_some_and(|tokens| tokens > 0)),
    ];
    match evaluation_flags.into_iter().find(|(_, given)| *given && share == 0.0 && s.eval_data.is_none()) {
        Some((flag, _)) => Err(Error::Settings(format!(
            "--{flag} has no effect with --held-out 0: nothing is there to look at; leave it out, or give --eval-data"
        ))),
        None => Ok(share),
    }
}

pub(super) fn optimizer(kind: OptimizerKind, s: &Settings, adapters: bool) -> Result<OptimizerConfig> {
    let wrong = |flag: &str, other: &str| {
        Err(Error::Settings(format!("--{flag} has no effect with --optimizer {kind}: it belongs to {other}")))
    };
    match kind {
        OptimizerKind::AdamW => {
            if s.momentum.is_some() {
                return wrong("momentum", "sgd");
            }
            let (beta1, beta2) = (s.beta1.unwrap_or(0.9), s.beta2.unwrap_or(0.95));
            // Adapters start at zero and are small; PEFT's users do not decay them either.
            let decay = if adapters { 0.0 } else { 0.1 };
            let (eps, weight_decay) = (s.eps.unwrap_or(1e-8), s.weight_decay.unwrap_or(decay));
            below_one("beta1", beta1)?;
            below_one("beta2", beta2)?;
            within("eps", eps, 0.0, 1.0)?;
            within("weight-decay", weight_decay, 0.0, f64::MAX)?;
            Ok(OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay })
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
            Ok(OptimizerConfig::Sgd { momentum, weight_decay })
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

/// Refuses an output folder that holds a run or a model: a new run never overwrites another one's work.
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
