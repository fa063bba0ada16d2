//! Everything read and checked before ranks start: model, data, the checkpoint to go on from, the plan.

use crate::{
    checkpoint::{Checkpoint, Checkpoints, Identity, Losses},
    config::{RUN_FILE, Source, TrainConfig},
    data::{
        Batch, Content, Corpus, Encoder, Packer, Position, Sequence, Template, cache, cache::Found, fingerprint, read,
        read_tokens,
    },
    error::{Error, Result},
    feed::Feed,
    given::Given,
    mesh::RunMesh,
    observer::grouped,
    plan::Plan,
    settings::Settings,
    start::Start,
    tokenizer::Tokenizer,
};
use ringspan_candle::kept::Storage;
use ringspan_models::{Config, Decoder, Weights};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// A run that is ready to start. The same on every rank.
pub(crate) struct Setup {
    /// `config.json` as it is saved with the model.
    pub(crate) config_json: Value,
    pub(crate) decoder: Decoder,
    pub(crate) mesh: RunMesh,
    pub(crate) shapes: BTreeMap<String, Vec<usize>>,
    /// The parameters before the first step.
    pub(crate) start: Start,
    pub(crate) tokenizer: Option<Tokenizer>,
    pub(crate) feed: Feed,
    /// Held-out sequences and their length; empty for a file of tokens.
    pub(crate) held_out: Vec<Sequence>,
    /// Steps done before this run.
    pub(crate) first_step: u64,
    /// Tokens seen before this run.
    pub(crate) tokens: u64,
    /// What is remembered of the losses before this run.
    pub(crate) losses: Losses,
    pub(crate) model: Identity,
    pub(crate) data: Identity,
    pub(crate) plan: Plan,
    /// Tokens that are in no file yet.
    pub(crate) unsaved: Option<Unsaved>,
}

/// Tokens to be kept, under their key.
pub(crate) struct Unsaved {
    key: u64,
    corpus: Corpus,
}

impl Unsaved {
    /// Writes them into `folder`; the same tokens, in that file.
    fn save(self, folder: &Path) -> Result<Corpus> {
        cache::save(folder, self.key, &self.corpus)?;
        Ok(match cache::open(folder, self.key)? {
            Found::Tokens(mapped) if mapped.fingerprint == self.corpus.fingerprint => mapped,
            // Somebody else has been there meanwhile.
            _ => self.corpus,
        })
    }
}

impl Setup {
    /// Reads and checks; writes nothing.
    pub(crate) fn new(config: &TrainConfig) -> Result<Self> {
        let (mut given, first) = Given::new(config)?;
        let mut decoder = Decoder::new(given.config.clone()).map_err(model_error)?;
        let start = first.start(&decoder, config.seed, ranks_here(config))?;
        if let Some(lora) = &config.lora {
            decoder = decoder.with_lora(lora.clone()).map_err(model_error)?;
        }
        let start = start.with_lora(config.lora.as_ref());
        if decoder.experts() > 0 && config.activations != Storage::F32 {
            return Err(Error::Settings(format!(
                "--activations {} does not go with experts: what a router sees when a layer is computed again would be rounded, \
                 and tokens near a tie would go to other experts than before",
                config.activations
            )));
        }
        // Before anything is read that takes long.
        let mesh = RunMesh::new(config, &decoder)?;
        let tokenizer = given.tokenizer(config)?;
        let Given { config: model_config, json: config_json } = given;
        let data = open_data(config, tokenizer.as_ref(), model_config.vocab_size)?;
        let mut feed = data.feed.clone();
        let mut setup = Self::of(config_json, decoder, mesh, start, tokenizer, data);
        if config.resume {
            let saved = Checkpoints::new(&config.out, config.keep).newest(&setup.model, &setup.data)?;
            same_configuration(config, &saved, &setup.config_json)?;
            if saved.progress.step >= config.lr.steps {
                return Err(Error::Settings(format!(
                    "the run in {} has done {} of {} steps: to go on, give more with --steps",
                    config.out.display(),
                    saved.progress.step,
                    config.lr.steps
                )));
            }
            if let Feed::Text { packer, .. } = &mut feed {
                *packer = packer.clone().at(saved.progress.position);
            }
            setup.feed = feed;
            setup.first_step = saved.progress.step;
            setup.tokens = saved.progress.tokens;
            setup.losses = saved.progress.losses;
            setup.start = setup.start.with_checkpoint(saved, &setup.decoder)?;
        }
        setup.plan = Plan::new(config, &setup, &model_config)?;
        Ok(setup)
    }

    /// A model that is here, and one batch.
    pub(crate) fn of_batch(config: &TrainConfig, decoder: Decoder, weights: Weights, batch: Batch) -> Result<Self> {
        let mesh = RunMesh::new(config, &decoder)?;
        let start = Start::weights(weights, ranks_here(config), config.seed);
        let identity = Identity { summary: "a batch".into(), fingerprint: 0 };
        let data = Data { feed: Feed::Tokens(batch), held_out: Vec::new(), identity, unsaved: None };
        Ok(Self::of(Value::Null, decoder, mesh, start, None, data))
    }

    /// Writes tokens that are in no file yet, and reads them from there, as later runs do: a text may be larger than what
    /// memory has left beside a model.
    pub(crate) fn keep_tokens(&mut self, config: &TrainConfig) -> Result<()> {
        let Some(unsaved) = self.unsaved.take() else { return Ok(()) };
        let kept = unsaved.save(&config.token_cache)?;
        if let Feed::Text { packer, .. } = &mut self.feed {
            *packer = packer.clone().over(kept.train);
        }
        Ok(())
    }

    /// Without a plan, at the first step.
    fn of(
        config_json: Value,
        decoder: Decoder,
        mesh: RunMesh,
        start: Start,
        tokenizer: Option<Tokenizer>,
        data: Data,
    ) -> Self {
        let shapes = decoder.shapes();
        let model = identity(decoder.config(), &shapes);
        let Data { feed, held_out, identity: data, unsaved } = data;
        Self {
            plan: Plan::default(),
            config_json,
            decoder,
            mesh,
            start,
            tokenizer,
            held_out,
            first_step: 0,
            tokens: 0,
            losses: Losses::default(),
            model,
            data,
            feed,
            shapes,
            unsaved,
        }
    }

    /// The batch whose shape the plan is made for: the first one of the run.
    pub(crate) fn first_batch(&self, accumulation: usize) -> Option<Batch> {
        self.feed.clone().next_step(accumulation).into_iter().max_by_key(Batch::real_tokens)
    }
}

/// Ranks of this process.
fn ranks_here(config: &TrainConfig) -> usize {
    if config.local_ranks.is_some() { 1 } else { config.ranks() }
}

/// What a checkpoint of a model belongs to.
fn identity(model: &Config, shapes: &BTreeMap<String, Vec<usize>>) -> Identity {
    let parameters: usize = shapes.values().map(|shape| shape.iter().product::<usize>()).sum();
    let numbers = |(name, shape): (&String, &Vec<usize>)| -> Vec<u64> {
        name.bytes().map(u64::from).chain(shape.iter().map(|&d| d as u64)).collect()
    };
    Identity {
        summary: format!(
            "{}: {} layers, hidden {}, {} heads over {}, vocabulary {}, {} parameters",
            model.model_type,
            model.num_hidden_layers,
            model.hidden_size,
            model.num_attention_heads,
            model.num_key_value_heads(),
            model.vocab_size,
            grouped(parameters as u64)
        ),
        fingerprint: fingerprint(shapes.iter().flat_map(numbers)),
    }
}

/// Refuses a configuration that computes something else than the checkpoint's: names and shapes may be the same, and its
/// weights would go on as those of another model. Keys that nothing is computed with may change.
fn same_configuration(config: &TrainConfig, saved: &Checkpoint, now: &Value) -> Result<()> {
    let refuse = |problem: String| Err(Error::Checkpoint { path: saved.path.clone(), problem });
    let before = &saved.progress.config;
    if before.is_null() {
        return Ok(());
    }
    let parse = |json: &Value| serde_json::from_value::<Config>(json.clone());
    let old = match parse(before) {
        Ok(old) => old,
        Err(error) => return refuse(format!("damaged: the model's configuration: {error}")),
    };
    // Written and read as the other one was: a number may lose its last bit on the way.
    let now: Value = serde_json::from_str(&now.to_string()).map_err(model_error)?;
    let new = parse(&now).map_err(model_error)?;
    if old == new {
        return Ok(());
    }
    let keys = |json: &Value| json.as_object().into_iter().flat_map(|keys| keys.keys().cloned()).collect::<Vec<_>>();
    let all: BTreeSet<String> = keys(before).into_iter().chain(keys(&now)).collect();
    let matters = |key: &&String| {
        let mut back = now.clone();
        back[*key] = before.get(*key).cloned().unwrap_or_default();
        before.get(*key) != now.get(*key) && parse(&back).ok().as_ref() != Some(&new)
    };
    let words = |json: &Value, key: &str| json.get(key).map_or("absent".into(), Value::to_string);
    let changes: Vec<String> = all
        .iter()
        .filter(matters)
        .map(|key| format!("{key} was {}, now {}", words(before, key), words(&now, key)))
        .collect();
    let file = config.model_config.as_ref().or(config.model.as_ref()).map(|path| path.display().to_string());
    refuse(format!(
        "it belongs to another model: the configuration in {} has changed since it was saved ({}); change it back to go on",
        file.unwrap_or_default(),
        changes.join("; ")
    ))
}

pub(crate) fn model_error(error: impl std::fmt::Display) -> Error {
    Error::Model(error.to_string())
}

/// Data as it is fed, and what it is.
struct Data {
    feed: Feed,
    held_out: Vec<Sequence>,
    identity: Identity,
    unsaved: Option<Unsaved>,
}

fn open_data(config: &TrainConfig, tokenizer: Option<&Tokenizer>, vocabulary: usize) -> Result<Data> {
    match (&config.source, tokenizer) {
        (Source::Tokens(path), _) => {
            let batch = read_tokens(path, vocabulary)?;
            let identity = Identity {
                summary: format!("{} sequences of {} tokens in {}", batch.rows, batch.length, path.display()),
                fingerprint: fingerprint(batch.tokens.iter().map(|&t| u64::from(t)).chain([batch.length as u64])),
            };
            Ok(Data { feed: Feed::Tokens(batch), held_out: Vec::new(), identity, unsaved: None })
        }
        (Source::Text(path), Some(tokenizer)) => open_text(config, path, tokenizer),
        (Source::Text(path), None) => {
            Err(Error::Data { path: path.clone(), problem: "text needs a tokenizer, and there is none".into() })
        }
    }
}

fn open_text(config: &TrainConfig, path: &Path, tokenizer: &Tokenizer) -> Result<Data> {
    let texts = read(path, std::slice::from_ref(&config.out))?;
    let chat = texts.documents.iter().any(|document| matches!(document.content, Content::Chat { .. }));
    let template = match (&config.chat_template, tokenizer.folder()) {
        (Some(file), _) if !chat => {
            return Err(Error::Settings(format!(
                "--chat-template {} has no effect: {} holds no `messages`; leave it out",
                file.display(),
                path.display()
            )));
        }
        (Some(file), folder) => Some(Template::read(file, folder)?),
        (None, Some(folder)) if chat => Template::of_model(folder)?,
        _ => None,
    };
    let encoder = Encoder::new(tokenizer, template.as_ref());
    let key = Corpus::key(&texts, &encoder)?;
    let mut notes: Vec<String> = texts.skipped.words().map(|words| format!("skipped {words}")).into_iter().collect();
    let (corpus, kept) = match cache::open(&config.token_cache, key)? {
        Found::Tokens(corpus) => (corpus, true),
        Found::Nothing => (Corpus::new(&texts, &encoder, path)?, false),
        Found::Damaged(why) => {
            notes.push(format!("{} is made again: {why}", cache::path(&config.token_cache, key).display()));
            (Corpus::new(&texts, &encoder, path)?, false)
        }
    };
    let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
    let identity = Identity {
        summary: format!(
            "{} documents of {}: {} tokens to train on, {} held out{notes}",
            texts.documents.len(),
            path.display(),
            grouped(corpus.train_tokens() as u64),
            grouped(corpus.held_out_tokens() as u64)
        ),
        fingerprint: corpus.fingerprint,
    };
    let length = config.sequence_length;
    let held_out = Packer::once(&corpus.held_out, length, config.eval_tokens);
    let packer = Packer::new(corpus.train.clone(), length, config.seed, Position::default()).with(config.packing);
    let feed = Feed::Text { packer, length, batch_size: config.batch_size };
    Ok(Data { feed, held_out, identity, unsaved: (!kept).then_some(Unsaved { key, corpus }) })
}

/// Puts the settings beside the run's checkpoints, with paths that mean the same from any folder.
pub(crate) fn write_settings(config: &TrainConfig) -> Result<()> {
    std::fs::create_dir_all(&config.out).map_err(Error::io("create", &config.out))?;
    let mut settings = config.settings.clone();
    let absolute = |path: &Path| path.canonicalize().map_err(Error::io("read", path));
    settings.out = None;
    let Settings { model, model_config, tokenizer, chat_template, token_cache, tensorboard, .. } = &mut settings;
    for path in [model, chat_template].into_iter().flatten() {
        *path = absolute(path)?;
    }
    // Links stay: what lies beside a file lies beside the link that names it. Others may not be there yet.
    for path in [model_config, tokenizer, token_cache, tensorboard].into_iter().flatten() {
        *path = std::path::absolute(&*path).map_err(Error::io("read", &*path))?;
    }
    match &config.source {
        Source::Text(path) => settings.data = Some(absolute(path)?),
        Source::Tokens(path) => settings.tokens = Some(absolute(path)?),
    }
    crate::checkpoint::write_file(&config.out.join(RUN_FILE), settings.to_toml()?.as_bytes())
}
