//! The server: routes, their limits, and the life of its socket.

use crate::app::{App, ServeError, ServedModel};
use crate::auth::{self, ApiKeys};
use crate::error::ApiError;
use crate::routes::{adapters, chat, completions, embeddings, messages, models, operation, responses, tokens};
use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use axum::serve::ListenerExt as _;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tower_http::cors::{AllowHeaders, CorsLayer};
use tower_http::timeout::RequestBodyTimeoutLayer;

/// Time between two checks whether the server should stop.
const STOP_INTERVAL: Duration = Duration::from_millis(50);

/// Time that clients have to read the errors of aborted requests.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The address to listen on.
    pub host: String,
    /// The port; 0 takes any that is free.
    pub port: u16,
    /// Largest body of a request, in bytes.
    pub max_body: usize,
    /// The API keys that are accepted; without any, requests need none.
    pub api_keys: Vec<String>,
    /// Origins whose pages may call the server from a browser; `*` for all.
    pub allow_origin: Vec<String>,
    /// Memory for responses of `/v1/responses` that are stored, in bytes: the oldest make room for new ones. 0 stores none.
    pub response_store: usize,
    /// Longest silence of a client that is sending a body.
    pub body_timeout: Duration,
    /// How long a server that stops waits for the requests that run.
    pub drain: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            max_body: 64 << 20,
            api_keys: Vec::new(),
            allow_origin: Vec::new(),
            response_store: 64 << 20,
            body_timeout: Duration::from_secs(60),
            drain: Duration::from_secs(60),
        }
    }
}

/// A server that listens, and answers once it runs.
///
/// ```
/// use ringspan_http::{ServedModel, Server, Settings};
/// use ringspan_models::{Config, Decoder};
/// use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
/// use ringspan_serve::{Mesh, Model};
/// use std::io::{Read, Write};
/// use std::net::TcpStream;
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// // A new model of three tokens, on two ranks.
/// let config: Config = serde_json::from_value(serde_json::json!({
///     "model_type": "llama", "vocab_size": 3, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
///     "num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 1e4, "hidden_act": "silu",
/// }))?;
/// let decoder = Decoder::new(config)?;
/// let weights = decoder.init(1)?;
/// let options = EngineOptions { kv_cache: KvCacheSize::Pages(8), max_model_len: Some(64), ..EngineOptions::default() };
/// let engine = Engine::start(Model::new(decoder, weights)?, Mesh { ring: 2, ..Mesh::single() }, &options)?;
/// let tokenizer = serde_json::json!({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
///     "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}});
/// let model = ServedModel {
///     engine: Arc::new(engine.client()),
///     name: "tiny".into(),
///     tokenizer: tokenizers::Tokenizer::from_bytes(tokenizer.to_string())?,
///     template: None,
///     end_tokens: vec![2],
///     generation_config: serde_json::Map::new(),
/// };
///
/// let server = Server::bind(model, &Settings { port: 0, ..Settings::default() })?;
/// let (address, stop) = (server.address()?, Arc::new(AtomicBool::new(false)));
/// let stopped = stop.clone();
/// let serving = std::thread::spawn(move || server.run(|| stopped.load(Ordering::SeqCst)));
///
/// let body = r#"{"model": "tiny", "prompt": "a b", "max_tokens": 2}"#;
/// let length = body.len();
/// let mut socket = TcpStream::connect(address)?;
/// write!(socket, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")?;
/// write!(socket, "Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}")?;
/// let mut answer = String::new();
/// socket.read_to_string(&mut answer)?;
/// assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"text_completion\""), "{answer}");
///
/// stop.store(true, Ordering::SeqCst);
/// assert!(serving.join().expect("no panic")?);
/// engine.shutdown(true)?;
/// # Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
/// ```
#[derive(Debug)]
pub struct Server {
    runtime: Runtime,
    listener: TcpListener,
    router: Router,
    app: Arc<App>,
    drain: Duration,
}

/// Upper limit of threads that compute for requests or wait for the engine; connections are served by others. A thread keeps the memory
/// that it has used, so the hundreds of threads that tokio allows would hold far more memory than is in use at a time.
const MOST_WORKERS: usize = 32;

impl Server {
    /// Listens at the address of the settings.
    ///
    /// # Errors
    /// A port that is taken, settings that are impossible, a model whose own files are wrong.
    pub fn bind(model: ServedModel, settings: &Settings) -> Result<Self, ServeError> {
        let app = App::new(model, settings.response_store)?;
        let router = router(app.clone(), settings)?;
        let listener = listen(settings)?;
        listener.set_nonblocking(true)?;
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.enable_all().max_blocking_threads(MOST_WORKERS).thread_name("http").build()?;
        Ok(Self { runtime, listener, router, app, drain: settings.drain })
    }

    /// Checks that [`bind`](Self::bind) will be able to listen at the address of the settings, before a model is loaded for it.
    ///
    /// # Errors
    /// A host that is unknown, a port that is taken, origins that are none.
    pub fn check_address(settings: &Settings) -> Result<(), ServeError> {
        cors(&settings.allow_origin)?;
        listen(settings).map(drop)
    }

    /// The address that the server listens on.
    ///
    /// # Errors
    /// The operating system's.
    pub fn address(&self) -> Result<SocketAddr, ServeError> {
        Ok(self.listener.local_addr()?)
    }

    /// Answers until `stopped`, which is asked often, says so; then takes no more connections, and ends when the requests that run
    /// have ended. When the time to drain is over, those that still run end with an error. Returns whether all requests were finished.
    ///
    /// # Errors
    /// The operating system's.
    pub fn run(self, stopped: impl Fn() -> bool) -> Result<bool, ServeError> {
        let Self { runtime, listener, router, app, drain } = self;
        let drained = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let (stopping, mut is_stopping) = tokio::sync::watch::channel(false);
            let graceful = async move {
                // A sender that is gone has stopped as well.
                let _ = is_stopping.wait_for(|stopping| *stopping).await;
            };
            // Each event of a stream leaves at once, instead of waiting until the client has acknowledged those before it.
            let listener = listener.tap_io(|connection| {
                // A connection without it works, too.
                let _ = connection.set_nodelay(true);
            });
            let serving = axum::serve(listener, router).with_graceful_shutdown(graceful);
            let end = async {
                while !stopped() {
                    tokio::time::sleep(STOP_INTERVAL).await;
                }
                // Only a server that has ended already does not hear it.
                let _ = stopping.send(true);
                tokio::time::sleep(drain).await;
                app.abort_requests();
            };
            let mut serving = std::pin::pin!(serving.into_future());
            tokio::select! {
                result = &mut serving => return result.map(|()| true),
                () = end => {}
            }
            // Clients that do not read their errors are not waited for.
            tokio::time::timeout(ABORT_GRACE, serving).await.unwrap_or(Ok(())).map(|()| false)
        })?;
        // What still runs is dropped, and with it what it holds.
        runtime.shutdown_background();
        Ok(drained)
    }
}

/// Listens at the address of the settings.
fn listen(settings: &Settings) -> Result<TcpListener, ServeError> {
    let refused = |source| ServeError::Listen { address: format!("{}:{}", settings.host, settings.port), source };
    let addresses = (settings.host.as_str(), settings.port).to_socket_addrs().map_err(refused)?;
    TcpListener::bind(&addresses.collect::<Vec<SocketAddr>>()[..]).map_err(refused)
}

/// A path, and what answers its methods.
type Route = (&'static str, MethodRouter<Arc<App>>);

/// The routes that need a key, where there are keys.
fn authenticated_routes() -> Vec<Route> {
    vec![
        ("/v1/models", get(models::list)),
        ("/v1/models/{*model}", get(models::one)),
        ("/v1/chat/completions", post(chat::create)),
        ("/v1/completions", post(completions::create)),
        ("/v1/embeddings", post(embeddings::create)),
        ("/v1/responses", post(responses::create)),
        ("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete)),
        ("/v1/responses/{id}/cancel", post(responses::cancel)),
        ("/v1/responses/{id}/input_items", get(responses::input_items)),
        ("/v1/messages", post(messages::create)),
        ("/v1/messages/count_tokens", post(messages::count_tokens)),
        ("/v1/load_lora_adapter", post(adapters::load)),
        ("/v1/unload_lora_adapter", post(adapters::unload)),
        ("/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/metrics", get(operation::metrics)),
    ]
}

/// The routes that never need a key.
fn public_routes() -> Vec<Route> {
    vec![
        ("/", get(operation::page)),
        ("/health", get(operation::health)),
        ("/version", get(operation::version)),
        ("/openapi.json", get(operation::openapi)),
    ]
}

fn router(app: Arc<App>, settings: &Settings) -> Result<Router, ServeError> {
    let keys = ApiKeys(settings.api_keys.clone().into());
    let of = |routes: Vec<Route>| {
        routes.into_iter().fold(Router::new(), |router, (path, methods)| router.route(path, methods))
    };
    let closed = of(authenticated_routes()).route_layer(middleware::from_fn_with_state(keys, auth::check));
    let router = closed
        .merge(of(public_routes()))
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .layer(DefaultBodyLimit::max(settings.max_body))
        .layer(RequestBodyTimeoutLayer::new(settings.body_timeout))
        .layer(middleware::from_fn(in_shape_of_route))
        .layer(middleware::from_fn_with_state(app.clone(), count_request))
        .with_state(app);
    Ok(match cors(&settings.allow_origin)? {
        Some(cors) => router.layer(cors),
        None => router,
    })
}

/// The layer that lets pages of other origins read answers; none without origins.
fn cors(origins: &[String]) -> Result<Option<CorsLayer>, ServeError> {
    if origins.is_empty() {
        return Ok(None);
    }
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request());
    if origins.iter().any(|origin| origin == "*") {
        return Ok(Some(layer.allow_origin(tower_http::cors::Any)));
    }
    let header = |origin: &String| {
        let wrong = || ServeError::Settings(format!("`{origin}` is no origin; one is like https://example.org:8080"));
        let uri: Uri = origin.parse().map_err(|_| wrong())?;
        match (uri.scheme_str(), uri.authority()) {
            // Browsers send nothing behind the host and its port, so nothing else can ever match.
            (Some(scheme), Some(host)) if *origin == format!("{scheme}://{host}") => {
                HeaderValue::from_str(origin).map_err(|_| wrong())
            }
            _ => Err(wrong()),
        }
    };
    let origins: Vec<HeaderValue> = origins.iter().map(header).collect::<Result<_, _>>()?;
    Ok(Some(layer.allow_origin(origins)))
}

async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        format!("there is no {method} {}; /openapi.json lists what there is", uri.path()),
    )
}

async fn unknown_method(method: Method, uri: Uri) -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not answer {method}", uri.path()))
}

async fn count_request(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let method = request.method().clone();
    let response = next.run(request).await;
    app.metrics.request(path.as_deref().unwrap_or("none"), &method, response.status());
    response
}

/// Writes errors of Anthropic's routes in Anthropic's shape, wherever they come from.
async fn in_shape_of_route(request: Request, next: Next) -> Response {
    let is_anthropic = request.uri().path().starts_with("/v1/messages");
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<ApiError>() {
        Some(error) if is_anthropic => error.into_anthropic_response(),
        _ => response,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_route_is_described_and_every_description_has_a_route() {
        let routed: BTreeSet<String> =
            authenticated_routes().iter().chain(&public_routes()).map(|(path, _)| path.replace("{*", "{")).collect();
        let openapi: serde_json::Value = serde_json::from_str(operation::OPENAPI).unwrap();
        let described: BTreeSet<String> = openapi["paths"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(routed, described);
    }
}
