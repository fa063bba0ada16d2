//! A load generator: streams completions from any OpenAI-compatible server with several clients at a time, and measures the time to
//! the first token, the time between tokens, and throughput.

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Longest time in which a server may say nothing.
const SILENCE: Duration = Duration::from_secs(600);

/// A text whose tokens make up prompts, in another order for each.
const SAMPLE: &str = "The quick brown fox jumps over the lazy dog while seven old sailors sing of storms, harbours and home; \
    nobody asks why the moon is blue, how far a river runs, or what the wind has written on the sand.";

/// The requests of a load test.
#[derive(Debug, Clone)]
pub struct Load {
    /// The server, such as `http://127.0.0.1:8000`.
    pub url: String,
    /// Its key.
    pub api_key: Option<String>,
    /// The models or adapters that requests ask for in turn; if there are none, the server's first model.
    pub models: Vec<String>,
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens of each text.
    pub output_tokens: usize,
    /// Number of requests; `None` for four per client.
    pub requests: Option<usize>,
}

/// Median and 99th percentile of a measured time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Percentiles {
    /// Half of the values are at most this long.
    pub median: Duration,
    /// 99 of 100 values are at most this long.
    pub p99: Duration,
}

/// The measured latencies and throughput with a number of clients.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchResult {
    /// Clients that asked at the same time.
    pub clients: usize,
    /// Requests that were answered.
    pub requests: usize,
    /// From a request to its first token.
    pub first_token: Percentiles,
    /// Between two events of a stream; `None` if each had one.
    pub between_tokens: Option<Percentiles>,
    /// Generated tokens of all requests per second.
    pub output_tokens_per_second: f64,
    /// Prompt tokens of all requests per second.
    pub prompt_tokens_per_second: f64,
}

/// Why a load could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The address cannot be understood.
    #[error("{url}: {problem}")]
    Url {
        /// The address.
        url: String,
        /// The problem.
        problem: String,
    },
    /// The server cannot be reached, or has left in the middle of an answer.
    #[error("{0}")]
    Connection(String),
    /// The server has refused a request.
    #[error("the server answers {path} with {status}: {body}")]
    Refused {
        /// The route.
        path: String,
        /// The status of the response.
        status: u16,
        /// Its body.
        body: String,
    },
}

type Result<T> = std::result::Result<T, BenchError>;

impl Load {
    /// Measures the server with each number of clients, one after another; `report` is called with each result.
    ///
    /// # Errors
    /// A server that cannot be reached, or that refuses a request.
    pub fn run(&self, clients: &[usize], mut report: impl FnMut(&BenchResult)) -> Result<()> {
        let failed = |error: std::io::Error| BenchError::Connection(error.to_string());
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(failed)?;
        runtime.block_on(async {
            let server = Arc::new(Target::find(self).await?);
            // The first request for a model may be slow for reasons of its own.
            let models = server.models.len();
            let beyond_all = usize::MAX / 2 / models * models;
            for model in 0..models {
                server.complete(self, beyond_all + model).await?;
            }
            for &clients in clients {
                report(&server.measure(self, clients.max(1)).await?);
            }
            Ok(())
        })
    }
}

/// A server whose model and tokens are known.
struct Target {
    authority: String,
    api_key: Option<String>,
    /// At least one.
    models: Vec<String>,
    /// Ids of some tokens.
    tokens: Vec<u32>,
    /// Makes prompts different from those of earlier runs, which the server may have cached.
    run: u64,
}

/// One stream: when its tokens came.
struct Times {
    first: Duration,
    between: Vec<Duration>,
    tokens: usize,
}

impl Target {
    async fn find(load: &Load) -> Result<Self> {
        let wrong = |problem: &str| BenchError::Url { url: load.url.clone(), problem: problem.to_owned() };
        let uri: Uri = load.url.parse().map_err(|_| wrong("this is no address"))?;
        if uri.scheme_str() != Some("http") {
            return Err(wrong("must begin with http://"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("names no host"))?;
        let authority = match authority.port() {
            Some(_) => authority.to_string(),
            None => format!("{authority}:80"),
        };
        let run = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64);
        let (api_key, models) = (load.api_key.clone(), load.models.clone());
        let mut target = Self { authority, api_key, models, tokens: Vec::new(), run };
        if target.models.is_empty() {
            let models = target.json("GET", "/v1/models", None).await?;
            target.models.push(models["data"][0]["id"].as_str().unwrap_or_default().to_owned());
        }
        let sample = json!({"model": target.models[0], "prompt": SAMPLE});
        let tokens = target.json("POST", "/tokenize", Some(sample)).await?;
        let ids = tokens["tokens"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        target.tokens = ids.map(|id| id as u32).collect();
        if target.tokens.is_empty() {
            return Err(BenchError::Connection(format!("{}: /tokenize returns no tokens", load.url)));
        }
        Ok(target)
    }

    async fn send(&self, method: &str, path: &str, body: Option<Value>) -> Result<Response<Incoming>> {
        let lost = |error: &dyn std::fmt::Display| BenchError::Connection(format!("{}: {error}", self.authority));
        let stream = TcpStream::connect(&self.authority).await.map_err(|e| lost(&e))?;
        // Otherwise small packets wait for others.
        stream.set_nodelay(true).map_err(|e| lost(&e))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| lost(&e))?;
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header("host", &self.authority);
        if let Some(key) = &self.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let body = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let request = request.body(Full::new(body)).map_err(|e| lost(&e))?;
        let response = sender.send_request(request).await.map_err(|e| lost(&e))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.map_err(|e| lost(&e))?.to_bytes();
        let body = String::from_utf8_lossy(&body).into_owned();
        Err(BenchError::Refused { path: path.to_owned(), status, body })
    }

    async fn json(&self, method: &str, path: &str, body: Option<Value>) -> Result<Value> {
        let lost = |problem: String| BenchError::Connection(format!("{}{path}: {problem}", self.authority));
        let response = self.send(method, path, body).await?;
        let bytes = response.into_body().collect().await.map_err(|e| lost(e.to_string()))?.to_bytes();
        serde_json::from_slice(&bytes).map_err(|e| lost(e.to_string()))
    }

    /// Tokens of the sample in an order that differs from request to request.
    fn prompt(&self, length: usize, request: usize) -> Vec<u32> {
        let mut state = self.run ^ (request as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let draw = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            self.tokens[(state >> 33) as usize % self.tokens.len()]
        };
        (0..length).map(draw).collect()
    }

    async fn complete(&self, load: &Load, request: usize) -> Result<Times> {
        let model = &self.models[request % self.models.len()];
        let body = json!({"model": model, "prompt": self.prompt(load.prompt_tokens, request),
            "max_tokens": load.output_tokens, "ignore_eos": true, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true}});
        let lost = |problem: &str| BenchError::Connection(format!("{}: {problem}", self.authority));
        let begun = Instant::now();
        let mut stream = self.send("POST", "/v1/completions", Some(body)).await?.into_body();
        let mut times = Times { first: Duration::ZERO, between: Vec::new(), tokens: 0 };
        let (mut rest, mut last) = (String::new(), None);
        loop {
            let frame =
                tokio::time::timeout(SILENCE, stream.frame()).await.map_err(|_| lost("says nothing any more"))?;
            let Some(frame) = frame else { return Err(lost("a stream ended without [DONE]")) };
            let frame = frame.map_err(|error| lost(&error.to_string()))?;
            let Some(data) = frame.data_ref() else { continue };
            rest.push_str(&String::from_utf8_lossy(data));
            let now = Instant::now();
            while let Some(end) = rest.find("\n\n") {
                let event: String = rest.drain(..end + 2).collect();
                let Some(data) = event.trim().strip_prefix("data:") else { continue };
                if data.trim() == "[DONE]" {
                    return Ok(times);
                }
                let chunk: Value = serde_json::from_str(data).map_err(|error| lost(&error.to_string()))?;
                if let Some(error) = chunk.get("error") {
                    return Err(lost(&error.to_string()));
                }
                if let Some(tokens) = chunk.pointer("/usage/completion_tokens").and_then(Value::as_u64) {
                    times.tokens = tokens as usize;
                }
                if chunk.pointer("/choices/0/text").and_then(Value::as_str).is_none_or(str::is_empty) {
                    continue;
                }
                match last.replace(now) {
                    None => times.first = now - begun,
                    Some(last) => times.between.push(now - last),
                }
            }
        }
    }

    async fn measure(self: &Arc<Self>, load: &Load, clients: usize) -> Result<BenchResult> {
        let requests = load.requests.unwrap_or(4 * clients).max(clients);
        let next = Arc::new(AtomicUsize::new(0));
        let begun = Instant::now();
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..clients {
            let (target, load, next) = (self.clone(), load.clone(), next.clone());
            running.spawn(async move {
                let mut all = Vec::new();
                loop {
                    let request = next.fetch_add(1, Ordering::SeqCst);
                    if request >= requests {
                        return Ok::<_, BenchError>(all);
                    }
                    // Prompts of other numbers of clients must not be in the cache.
                    all.push(target.complete(&load, clients * 1_000_000 + request).await?);
                }
            });
        }
        let mut all = Vec::new();
        while let Some(done) = running.join_next().await {
            all.extend(done.map_err(|error| BenchError::Connection(error.to_string()))??);
        }
        let seconds = begun.elapsed().as_secs_f64().max(1e-9);
        let tokens: usize = all.iter().map(|times| times.tokens).sum();
        let between: Vec<Duration> = all.iter().flat_map(|times| times.between.iter().copied()).collect();
        Ok(BenchResult {
            clients,
            requests: all.len(),
            first_token: Percentiles::of(all.iter().map(|times| times.first).collect()),
            between_tokens: (!between.is_empty()).then(|| Percentiles::of(between)),
            output_tokens_per_second: tokens as f64 / seconds,
            prompt_tokens_per_second: (all.len() * load.prompt_tokens) as f64 / seconds,
        })
    }
}

impl Percentiles {
    /// The percentiles of some times; zero if there are none.
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |share: f64| {
            let last = times.len().saturating_sub(1);
            times.get((share * last as f64).ceil() as usize).copied().unwrap_or_default()
        };
        Self { median: at(0.5), p99: at(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::Percentiles;
    use std::time::Duration;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let millis = Duration::from_millis;
        let percentiles = Percentiles::of((1..=101).rev().map(millis).collect());
        assert_eq!(percentiles, Percentiles { median: millis(51), p99: millis(100) });
        assert_eq!(Percentiles::of(vec![millis(3)]), Percentiles { median: millis(3), p99: millis(3) });
    }
}
