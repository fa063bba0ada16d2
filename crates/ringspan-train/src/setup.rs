//! Everything read and checked before ranks start: model, data, the checkpoint to go on from, the plan.

use crate::{
    checkpoint::{Checkpoints, Identity},
    config::{RUN_FILE, Source, TrainConfig},
    data::{
        Batch, Content, Corpus, Encoder, Packer, Position, Sequence, Template, cache, cache::Found, fingerprint, read,
        read_tokens,
    },
    default_model,
    error::{Error, Result},
    feed::Feed,
    mesh::RunMesh,
    observer::grouped,
    plan::Plan,
    start::Start,
    tokenizer::Tokenizer,
};
use ringspan_candle::kept::Storage;
use ringspan_models::{
    Config, Decoder, Origin, Weights,
    folder::{self, Folder},
};
use std::{collections::BTreeMap, path::Path};

/// A run that is ready to start. The same on every rank.
pub(crate) struct Setup {
    /// `config.json` as it is saved with the model.
    pub(crate) config_json: serde_json::Value,
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
        let (model_config, config_json, given) = given_model(config)?;
        let vocabulary = model_config.vocab_size;
        let mut decoder = Decoder::new(model_config.clone()).map_err(model_error)?;
        let start = match given {
            Given::Folder(folder) => Start::folder(folder, config.seed),
            Given::Weights(weights) => Start::weights(weights, ranks_here(config), config.seed),
            Given::Nothing => {
                Start::weights(default_model::weights(&decoder, config.seed)?, ranks_here(config), config.seed)
            }
        };
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
        let tokenizer = tokenizer(config, vocabulary)?;
        let data = open_data(config, tokenizer.as_ref(), vocabulary)?;
        let mut feed = data.feed.clone();
        let mut setup = Self::of(config_json, decoder, mesh, start, tokenizer, data);
        if config.resume {
            let saved = Checkpoints::new(&config.out, config.keep).newest(&setup.model, &setup.data)?;
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
        Ok(Self::of(serde_json::Value::Null, decoder, mesh, start, None, data))
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
        config_json: serde_json::Value,
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

pub(crate) fn model_error(error: impl std::fmt::Display) -> Error {
    Error::Model(error.to_string())
}

/// What `--model` names.
enum Given {
    Folder(Box<Folder>),
    /// Of a GGUF file, or with an adapter merged in.
    Weights(Weights),
    Nothing,
}

fn given_model(config: &TrainConfig) -> Result<(Config, serde_json::Value, Given)> {
    let Some(path) = &config.model else {
        let json = default_model::config(config.sequence_length);
        let parsed: Config = serde_json::from_value(json.clone()).map_err(model_error)?;
        return Ok((parsed, json, Given::Nothing));
    };
    let origin = Origin::at(path).map_err(model_error)?;
    let mut json = origin.config_json().map_err(model_error)?;
    let given = match origin {
        Origin::Folder(path) => Given::Folder(Box::new(folder::open(&path).map_err(model_error)?)),
        _ if config.lora.is_some() => {
            return Err(Error::Settings(format!(
                "--lora-rank trains adapters beside a model's folder, and {} is none: make one of it by training without \
                 adapters, or with --lora-merge where it is an adapter",
                path.display()
            )));
        }
        other => Given::Weights(other.load().map_err(model_error)?.1),
    };
    if let Some(scaling) = &config.rope_scaling {
        json = scaling.apply(&json).map_err(model_error)?;
    }
    let parsed: Config = serde_json::from_value(json.clone()).map_err(model_error)?;
    Ok((parsed, json, given))
}

fn tokenizer(config: &TrainConfig, vocabulary: usize) -> Result<Option<Tokenizer>> {
    let Some(path) = &config.model else {
        return Tokenizer::byte_level(Path::new("byte-level")).map(Some);
    };
    let found = Origin::at(path).and_then(|origin| origin.tokenizer()).map_err(model_error)?;
    let Some(found) = found else {
        return match &config.source {
            Source::Tokens(_) => Ok(None),
            Source::Text(_) => Err(Error::Tokenizer {
                path: path.join("tokenizer.json"),
                problem: "is missing, and text needs one; put it into the model's folder, or give --tokens".into(),
            }),
        };
    };
    let path = path.clone();
    let tokenizer = Tokenizer::new(found, &path);
    // Models often have more rows than their tokenizer has tokens, never fewer.
    if matches!(config.source, Source::Text(_)) && tokenizer.vocabulary() > vocabulary {
        return Err(Error::Tokenizer {
            path,
            problem: format!("has {} tokens, but the model's vocabulary is {vocabulary}", tokenizer.vocabulary()),
        });
    }
    Ok(Some(tokenizer))
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
    let template = match (&config.chat_template, &config.model) {
        (Some(file), _) if !chat => {
            return Err(Error::Settings(format!(
                "--chat-template {} has no effect: {} holds no `messages`; leave it out",
                file.display(),
                path.display()
            )));
        }
        (Some(file), model) => Some(Template::read(file, model.as_deref())?),
        (None, Some(model)) if chat => Template::of_model(model)?,
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
    if let Some(model) = &settings.model {
        settings.model = Some(absolute(model)?);
    }
    if let Some(template) = &settings.chat_template {
        settings.chat_template = Some(absolute(template)?);
    }
    for folder in [&mut settings.token_cache, &mut settings.tensorboard].into_iter().flatten() {
        // It may not be there yet.
        *folder = std::path::absolute(&*folder).map_err(Error::io("read", &*folder))?;
    }
    match &config.source {
        Source::Text(path) => settings.data = Some(absolute(path)?),
        Source::Tokens(path) => settings.tokens = Some(absolute(path)?),
    }
    crate::checkpoint::write_file(&config.out.join(RUN_FILE), settings.to_toml()?.as_bytes())
}
