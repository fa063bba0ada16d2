//! The model that a run starts from, as its settings name it, with its tokenizer.

use crate::{
    config::{DataSource, TrainConfig},
    default_model,
    error::{Error, Result, model_error},
    initial_parameters::InitialParameters,
    tokenizer::{BYTE_LEVEL_TOKENS, Tokenizer},
};
use ringspan_candle::StoredWeights;
use ringspan_candle::model::stored;
use ringspan_models::{Base, Config, Decoder, ModelSource, NewWeights, folder, folder::Folder, special_tokens};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TOKENIZER: &str = "tokenizer.json";
/// The SentencePiece file that some models have instead of [`TOKENIZER`]; it is not read.
const SENTENCE_PIECE: &str = "tokenizer.model";

/// The model that training starts from: configuration and adapter, without weights.
pub(crate) struct InitialModel {
    pub(crate) config: Config,
    /// `config.json` as it is saved with the model.
    pub(crate) json: Value,
    /// The folder of an adapter whose training is continued.
    adapter: Option<ModelSource>,
}

/// Where a model's first parameters come from. [`InitialModel::begin`] consumes it: weights that were read are moved, not copied.
pub(crate) enum InitialWeights {
    Folder(Arc<Folder>),
    /// Weights read at once: of a GGUF file, or of a model with an adapter merged into it.
    Loaded(StoredWeights),
    /// The built-in model.
    BuiltIn,
    /// New weights for the user's own configuration.
    New,
}

impl InitialModel {
    /// Reads the model that `--model` or `--model-config` name. The weights of a folder, and those of a new model, are read or
    /// drawn later.
    pub(crate) fn new(config: &TrainConfig) -> Result<(Self, InitialWeights)> {
        let (mut json, weights, adapter) = match (&config.model, &config.model_config) {
            (Some(path), _) => read_model(config, path)?,
            (None, Some(path)) => (folder::config_json(path).map_err(model_error)?, InitialWeights::New, None),
            (None, None) => (default_model::config(config.sequence_length), InitialWeights::BuiltIn, None),
        };
        if let Some(scaling) = &config.rope_scaling {
            json = scaling.apply(&json, Some(config.sequence_length)).map_err(model_error)?;
        }
        // Settings of the training alone: they must not enter the `config.json` that is saved.
        let mut training_json = json.clone();
        if let (Some(factor), Some(keys)) = (config.router_aux_loss, training_json.as_object_mut()) {
            keys.insert("output_router_logits".into(), json!(factor > 0.0));
            keys.insert("router_aux_loss_coef".into(), json!(factor));
        }
        if let (Some(share), Some(keys)) = (config.attention_dropout, training_json.as_object_mut()) {
            keys.insert("attention_dropout".into(), json!(share));
        }
        let parsed: Config = serde_json::from_value(training_json).map_err(|error| match &config.model_config {
            Some(path) => Error::Model(format!("{}: {error}", path.display())),
            None => model_error(error),
        })?;
        if config.router_aux_loss.is_some() && parsed.num_experts().is_none() {
            return Err(Error::Settings(
                "--router-aux-loss has no effect: the model has no experts; leave it out".into(),
            ));
        }
        if config.settings.router_aux_loss_over.is_some() && parsed.router_aux_loss().is_none_or(|factor| factor == 0.0)
        {
            return Err(Error::Settings(
                "--router-aux-loss-over has no effect: no loss keeps experts even (output_router_logits in config.json, or \
                 --router-aux-loss); leave it out"
                    .into(),
            ));
        }
        Ok((Self { config: parsed, json, adapter }, weights))
    }

    /// The decoder, with its adapters where they are trained, and the start of its parameters, for `ranks` ranks of this process.
    pub(crate) fn build(
        &self,
        weights: InitialWeights,
        config: &TrainConfig,
        ranks: usize,
    ) -> Result<(Decoder, InitialParameters)> {
        let decoder = Decoder::new(self.config.clone()).map_err(model_error)?;
        let parameters = weights.into_parameters(&decoder, config.seed, ranks)?;
        let Some(lora) = config.lora.clone() else { return Ok((decoder, parameters)) };
        let decoder = decoder.with_lora(lora.clone()).map_err(model_error)?;
        let adapter = self.adapter.as_ref().map(|source| source.adapter(&decoder).map_err(model_error)).transpose()?;
        Ok((decoder, parameters.with_lora(lora, adapter)))
    }

    /// The model's tokenizer; none where the data is already tokenized and the model has no tokenizer.
    pub(crate) fn tokenizer(&mut self, config: &TrainConfig) -> Result<Option<Tokenizer>> {
        let text = matches!(config.source, DataSource::Text(_));
        let found = match (&config.model, &config.model_config) {
            (Some(path), _) => model_tokenizer(path, text)?,
            (None, Some(config_path)) => self.new_model_tokenizer(config, config_path, text)?,
            (None, None) => Some(Tokenizer::byte_level(Path::new("byte-level"))?),
        };
        let Some(tokenizer) = found else { return Ok(None) };
        // Models often have more embedding rows than their tokenizer has tokens. A few published models have fewer, and then the
        // data decides (`Dataset` refuses tokens without a row); the configuration of a new model can be made to fit.
        let (tokens, vocabulary) = (tokenizer.vocabulary_size(), self.config.vocab_size);
        if text && config.model.is_none() && tokens > vocabulary {
            let problem = format!("has {tokens} tokens, but the model's vocabulary is {vocabulary}");
            return Err(Error::Tokenizer { path: tokenizer.path().into(), problem });
        }
        Ok(Some(tokenizer))
    }

    /// The tokenizer of a new model: the one `--tokenizer` names, else the one next to the configuration, else, for text, the
    /// byte-level one.
    fn new_model_tokenizer(
        &mut self,
        config: &TrainConfig,
        config_path: &Path,
        text: bool,
    ) -> Result<Option<Tokenizer>> {
        let default_path =
            if config_path.is_dir() { config_path.join(TOKENIZER) } else { config_path.with_file_name(TOKENIZER) };
        let vocabulary = self.config.vocab_size;
        let tokenizer = match &config.tokenizer {
            Some(tokenizer_path) => named_tokenizer(tokenizer_path)?,
            None if default_path.exists() => {
                let ends = special_tokens::end_tokens(&[], &self.json).map_err(model_error)?;
                let tokenizer = Tokenizer::read(&default_path)?.or_end_tokens(&ends);
                self.set_end_token(&tokenizer);
                return Ok(Some(tokenizer));
            }
            None if !text => return Ok(None),
            // Falling back to bytes would train another model than the one that the folder describes.
            None if default_path.with_file_name(SENTENCE_PIECE).exists() => {
                return Err(missing_tokenizer(default_path));
            }
            None if vocabulary < BYTE_LEVEL_TOKENS => {
                let problem = format!(
                    "is missing, and vocab_size {vocabulary} of {} is too small for the {BYTE_LEVEL_TOKENS} tokens of the byte-level \
                     tokenizer: put a tokenizer there, name one with --tokenizer, or make vocab_size at least {BYTE_LEVEL_TOKENS}",
                    config_path.display()
                );
                return Err(Error::Tokenizer { path: default_path, problem });
            }
            None => Tokenizer::byte_level(Path::new("byte-level"))?,
        };
        // The token ids in the configuration belong to another tokenizer.
        if let Some(keys) = self.json.as_object_mut() {
            keys.retain(|key, _| !["bos_token_id", "eos_token_id", "pad_token_id"].contains(&key.as_str()));
        }
        self.set_end_token(&tokenizer);
        Ok(Some(tokenizer))
    }

    /// Writes the tokenizer's end of text into `config.json` where that names none, so that generation stops there.
    fn set_end_token(&mut self, tokenizer: &Tokenizer) {
        let names_end = self.json.get("eos_token_id").is_some_and(|end| !end.is_null());
        let Some(keys) = self.json.as_object_mut().filter(|_| !names_end) else { return };
        if let Some(end) = tokenizer.end_of_text() {
            keys.insert("eos_token_id".into(), json!(end));
        }
    }
}

impl InitialWeights {
    /// The initial parameters of a decoder, for `ranks` ranks of this process.
    fn into_parameters(self, decoder: &Decoder, seed: u64, ranks: usize) -> Result<InitialParameters> {
        Ok(match self {
            Self::Folder(folder) => InitialParameters::from_folder(folder, seed),
            Self::Loaded(weights) => InitialParameters::from_weights(weights, ranks, seed),
            Self::BuiltIn => {
                InitialParameters::from_weights(stored(default_model::weights(decoder, seed)?), ranks, seed)
            }
            Self::New => {
                InitialParameters::from_new_weights(NewWeights::new(decoder, seed).map_err(model_error)?, seed)
            }
        })
    }
}

/// The tokenizer that `--tokenizer` names.
fn named_tokenizer(tokenizer_path: &Path) -> Result<Tokenizer> {
    let (folder, path) = match tokenizer_path.is_dir() {
        true => (true, tokenizer_path.join(TOKENIZER)),
        false => (false, tokenizer_path.to_owned()),
    };
    if folder && !path.exists() || tokenizer_path.file_name().is_some_and(|name| name == SENTENCE_PIECE) {
        return Err(missing_tokenizer(path.with_file_name(TOKENIZER)));
    }
    Tokenizer::read(&path)
}

fn missing_tokenizer(path: PathBuf) -> Error {
    let problem = special_tokens::without_tokenizer(path.parent().unwrap_or(Path::new(".")));
    Error::Tokenizer { path, problem }
}

/// The tokenizer of an existing model.
fn model_tokenizer(path: &Path, text: bool) -> Result<Option<Tokenizer>> {
    let source = ModelSource::at(path).map_err(model_error)?;
    if let Some(file) = source.tokenizer_file() {
        return Ok(Some(Tokenizer::read(&file)?.or_end_tokens(&source.end_tokens().map_err(model_error)?)));
    }
    match source.tokenizer().map_err(model_error)? {
        None if text => Err(Error::Tokenizer {
            path: path.join(TOKENIZER),
            problem: format!(
                "{}; text needs one: put it into the model's folder, or give --tokens",
                special_tokens::without_tokenizer(path)
            ),
        }),
        None => Ok(None),
        Some(found) => Ok(Some(Tokenizer::new(found, path)?.or_end_tokens(&source.end_tokens().map_err(model_error)?))),
    }
}

/// The model at a path, and the adapter there if its training is continued.
fn read_model(config: &TrainConfig, path: &Path) -> Result<(Value, InitialWeights, Option<ModelSource>)> {
    let source = ModelSource::at(path).map_err(model_error)?;
    let json = source.config_json().map_err(model_error)?;
    let is_adapter = matches!(source, ModelSource::Adapter(..));
    if is_adapter && config.lora.is_none() {
        return Ok((json, InitialWeights::Loaded(stored(source.load().map_err(model_error)?.1)), None));
    }
    let weights = match source.base() {
        Base::Folder(folder) => InitialWeights::Folder(Arc::new(folder::open(folder).map_err(model_error)?)),
        base @ Base::Gguf(_) => InitialWeights::Loaded(base.load_stored().map_err(model_error)?.1),
    };
    Ok((json, weights, Some(source).filter(|_| is_adapter)))
}
