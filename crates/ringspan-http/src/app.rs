//! The state that all routes share: the engine, the tokenizer, the chat template, the model's defaults and names.

use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::grammar::{Constraint, Grammar, Grammars};
use crate::metrics::ServerMetrics;
use crate::response_store::ResponseStore;
use crate::sampling::Sampling;
use crate::tools::ToolFormat;
use crate::vocabulary::Vocabulary;
use ringspan_models::chat_template::ChatTemplate;
use ringspan_models::special_tokens::SpecialTokens;
use ringspan_serve::engine::request::EngineClient;
use serde_json::{Map, Value};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokenizers::Tokenizer;
use tokio::sync::{Semaphore, watch};

/// A model to serve.
pub struct ServedModel {
    /// The engine that computes it.
    pub engine: Arc<dyn EngineClient>,
    /// The name by which clients ask for it.
    pub name: String,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template; without one, routes of conversations are refused.
    pub template: Option<ChatTemplate>,
    /// The tokens that end a text.
    pub end_tokens: Vec<u32>,
    /// Its `generation_config.json`, whose sampling fields are the defaults of requests; empty without one.
    pub generation_config: Map<String, Value>,
}

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The model's own defaults are wrong.
    #[error("generation_config.json: {0}")]
    GenerationConfig(String),
    /// The tokenizer's post-processor fails.
    #[error("the tokenizer: {0}")]
    Tokenizer(String),
    /// The port is taken, or the address is not of this machine.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address that was asked for.
        address: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A setting of the server that is impossible.
    #[error("{0}")]
    Settings(String),
    /// The operating system refuses a thread or a socket.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Most bytes of a salt, which the cache keeps as long as the pages of its requests.
const LONGEST_SALT: usize = 1024;

/// The model, or adapter, that a request asks for.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// The name under which the model was asked for.
    pub(crate) model: String,
    /// The LoRA adapter of that name.
    pub(crate) adapter: Option<String>,
    /// Only requests with the same salt share cached beginnings of their prompts.
    pub(crate) cache_salt: Option<Arc<str>>,
    /// When the request arrived.
    pub(crate) arrived: Instant,
}

impl Target {
    /// Takes `cache_salt` (a field of vLLM).
    ///
    /// # Errors
    /// A salt that is no string, is empty or too long.
    pub(crate) fn with_salt(self, fields: &mut Fields) -> Result<Self> {
        let cache_salt = fields.string("cache_salt")?;
        match cache_salt.as_ref().map(String::len) {
            None | Some(1..=LONGEST_SALT) => Ok(Self { cache_salt: cache_salt.map(Arc::from), ..self }),
            Some(bytes) => {
                let message = format!("must have 1 to {LONGEST_SALT} bytes, and has {bytes}");
                Err(ApiError::field(fields.name("cache_salt"), message))
            }
        }
    }
}

/// The state of the server.
pub(crate) struct App {
    pub(crate) engine: Arc<dyn EngineClient>,
    /// The name of the base model.
    pub(crate) name: String,
    pub(crate) vocabulary: Vocabulary,
    /// The special tokens around a text.
    pub(crate) special: SpecialTokens,
    pub(crate) template: Option<ChatTemplate>,
    /// The form in which the model's template writes calls of tools.
    pub(crate) tool_format: Option<ToolFormat>,
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) defaults: Sampling,
    pub(crate) metrics: ServerMetrics,
    pub(crate) responses: ResponseStore,
    /// When the server started, in seconds since 1970.
    pub(crate) created: u64,
    grammars: OnceLock<std::result::Result<Grammars, String>>,
    /// A permit for each processor, which a request needs to compute.
    processors: Arc<Semaphore>,
    /// Makes ids of responses, which no client can guess.
    ids: RandomState,
    /// Whether the requests that run are aborted, since the server ends.
    aborted: watch::Sender<bool>,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("name", &self.name).finish_non_exhaustive()
    }
}

impl App {
    /// `response_store` is the memory for stored responses, in bytes.
    pub(crate) fn new(model: ServedModel, response_store: usize) -> std::result::Result<Arc<Self>, ServeError> {
        let ServedModel { engine, name, tokenizer, template, mut end_tokens, generation_config } = model;
        let defaults = Sampling::defaults(generation_config).map_err(|e| ServeError::GenerationConfig(e.message))?;
        let special = SpecialTokens::of(&tokenizer).map_err(|e| ServeError::Tokenizer(e.to_string()))?;
        let vocabulary = Vocabulary::new(tokenizer, engine.limits().vocabulary);
        let tool_format = template.as_ref().and_then(|template| ToolFormat::of(template.source()));
        let ends = tool_format.map_or(&[][..], ToolFormat::ends);
        end_tokens.extend(ends.iter().filter_map(|end| vocabulary.special_token(end)));
        let metrics = ServerMetrics::new(engine.clone(), &name);
        // No client waits for responses in the background, so they must leave a part of the queue to other requests.
        let most_in_background = (engine.limits().max_waiting / 2).max(1);
        Ok(Arc::new(Self {
            engine,
            name,
            vocabulary,
            special,
            template,
            tool_format,
            end_tokens,
            defaults,
            metrics,
            responses: ResponseStore::new(response_store, most_in_background),
            created: now(),
            grammars: OnceLock::new(),
            processors: Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from))),
            ids: RandomState::new(),
            aborted: watch::Sender::new(false),
        }))
    }

    /// Aborts the requests that run: each ends with an error.
    pub(crate) fn abort_requests(&self) {
        self.aborted.send_replace(true);
    }

    /// Returns once the requests that run are aborted.
    pub(crate) async fn requests_aborted(&self) {
        // The sender lives as long as `self`.
        let _ = self.aborted.subscribe().wait_for(|aborted| *aborted).await;
    }

    /// The names that requests may ask for: the model's, and those of its adapters.
    pub(crate) fn models(&self) -> Vec<String> {
        std::iter::once(self.name.clone()).chain(self.engine.adapters()).collect()
    }

    /// Takes `model` from a body; without it, the base model is meant.
    ///
    /// # Errors
    /// A name that is not served.
    pub(crate) fn target(&self, fields: &mut Fields) -> Result<Target> {
        let model = fields.string("model")?.unwrap_or_else(|| self.name.clone());
        let adapter = (model != self.name).then(|| model.clone());
        if adapter.as_ref().is_some_and(|adapter| !self.engine.adapters().contains(adapter)) {
            return Err(ApiError::unknown_model(&model, &self.models()));
        }
        Ok(Target { model, adapter, cache_salt: None, arrived: Instant::now() })
    }

    /// The tokens of a text, optionally after the special tokens that begin texts.
    pub(crate) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.vocabulary.tokenizer().encode_fast(text, false);
        let encoding =
            encoding.map_err(|error| ApiError::invalid(format!("the tokenizer cannot encode the text: {error}")))?;
        let tokens = encoding.get_ids().to_vec();
        Ok(if special { self.special.begin(tokens) } else { tokens })
    }

    /// The tokens of a prompt. One that is far too long is refused before it is encoded, which would take seconds and gigabytes.
    ///
    /// # Errors
    /// A text that cannot be encoded, or certainly has more tokens than a sequence may have.
    pub(crate) fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let longest = self.engine.limits().max_model_len;
        let fewest = self.vocabulary.fewest_tokens(text);
        if fewest > longest {
            return Err(ApiError {
                code: Some("context_length_exceeded"),
                ..ApiError::invalid(format!(
                    "the prompt has {} bytes, so at least {fewest} tokens, but the longest sequence has {longest} tokens",
                    text.len()
                ))
            });
        }
        self.encode(text, false)
    }

    /// The text of tokens, with or without their special tokens.
    pub(crate) fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String> {
        let size = self.vocabulary.size();
        if let Some(token) = tokens.iter().find(|token| **token as usize >= size) {
            return Err(ApiError::invalid(format!("token {token} is outside the vocabulary of {size}")));
        }
        let text = self.vocabulary.tokenizer().decode(tokens, skip_special);
        text.map_err(|error| ApiError::invalid(format!("the tokenizer cannot decode the tokens: {error}")))
    }

    /// The constraint of a grammar.
    ///
    /// # Errors
    /// A grammar that is damaged or impossible.
    pub(crate) fn constraint(&self, grammar: &Grammar) -> Result<Constraint> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(&self.vocabulary, &self.end_tokens));
        let constraint = grammars.as_ref().map_err(Clone::clone).and_then(|grammars| grammars.constraint(grammar));
        constraint.map_err(|problem| ApiError {
            param: Some(grammar.field.clone()),
            ..ApiError::invalid(format!("the answer's grammar is impossible: {problem}"))
        })
    }

    /// An id with a prefix, such as `chatcmpl-`.
    pub(crate) fn id(&self, prefix: &str) -> String {
        static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        format!("{prefix}{:016x}{:08x}", self.ids.hash_one(count), self.ids.hash_one((count, 1)) as u32)
    }

    /// Computes what takes long, such as the tokens of a long text, on a thread that serves no connections. No more of these
    /// run at a time than there are processors: a thread keeps the memory that it has used, so more threads hold more memory and
    /// are not faster.
    pub(crate) async fn compute<T: Send + 'static>(
        self: &Arc<Self>,
        compute: impl FnOnce(&Arc<Self>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let permit = self.processors.clone().acquire_owned().await;
        let permit = permit.map_err(|_| ApiError::failed("the server is ending"))?;
        // The permit goes with the computation, which goes on when its client has left.
        let compute = move |app: &Arc<Self>| {
            let result = compute(app);
            drop(permit);
            result
        };
        self.wait(compute).await
    }

    /// Waits for what the engine answers only after some steps, on a thread that serves no connections.
    pub(crate) async fn wait<T: Send + 'static>(
        self: &Arc<Self>,
        wait: impl FnOnce(&Arc<Self>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let app = self.clone();
        let done = tokio::task::spawn_blocking(move || wait(&app)).await;
        done.unwrap_or_else(|_| Err(ApiError::failed("the server has failed on this request")))
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
