//! Metrics in Prometheus' text format, under the names that dashboards of vLLM know, and those of ranks.

use axum::http::{Method, StatusCode};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text};
use prometheus_client::metrics::{MetricType, counter::Counter, family::Family, histogram::Histogram};
use prometheus_client::registry::Registry;
use ringspan_serve::engine::Histogram as EngineHistogram;
use ringspan_serve::engine::request::{EngineClient, Limits, Metrics, RankMetrics};
use ringspan_serve::paged::KvDtype;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The content type of [`ServerMetrics::text`].
pub(crate) const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Seconds of the first token, and of whole requests.
const LONG: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Seconds between tokens.
const SHORT: [f64; 16] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];

/// The metrics that the server measures itself; it reads all others from the engine.
pub(crate) struct ServerMetrics {
    registry: Registry,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    success: Family<[(&'static str, &'static str); 1], Counter>,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    longest_text: Histogram,
    texts_of_prompt: Histogram,
    max_tokens: Histogram,
    requests: Family<RequestLabels, Counter>,
}

/// The methods that requests are counted by; all others are one.
const METHODS: [Method; 7] =
    [Method::GET, Method::POST, Method::PUT, Method::DELETE, Method::HEAD, Method::OPTIONS, Method::PATCH];

/// Which HTTP requests are counted together: path, method, and class of the status, such as 2xx.
type RequestLabels = [(&'static str, String); 3];

impl ServerMetrics {
    pub(crate) fn new(engine: Arc<dyn EngineClient>, model: &str) -> Self {
        let labels = [("model_name".into(), model.to_owned().into())];
        let mut registry = Registry::with_labels(labels.into_iter());
        let (first_token, between_tokens, whole) = (Histogram::new(LONG), Histogram::new(SHORT), Histogram::new(LONG));
        let success = Family::default();
        let help = "Seconds from the arrival of a request to its first token";
        registry.register("vllm:time_to_first_token_seconds", help, first_token.clone());
        let help = "Seconds between two tokens of a text";
        registry.register("vllm:inter_token_latency_seconds", help, between_tokens.clone());
        let help = "Seconds from the arrival of a request to the end of its text";
        registry.register("vllm:e2e_request_latency_seconds", help, whole.clone());
        registry.register("vllm:request_success", "Texts that have ended, by the reason", success.clone());
        let longest = engine.limits().max_model_len;
        let mut tokens = |name: &str, help: &str| {
            let histogram = Histogram::new(token_buckets(longest));
            registry.register(name, help, histogram.clone());
            histogram
        };
        let prompt_tokens = tokens("vllm:request_prompt_tokens", "Tokens of a prompt whose text has ended");
        let generation_tokens = tokens("vllm:request_generation_tokens", "Generated tokens of a text that has ended");
        let help = "Generated tokens of the longest text of a prompt";
        let longest_text = tokens("vllm:request_max_num_generation_tokens", help);
        let max_tokens = tokens("vllm:request_params_max_tokens", "Tokens that a text may have");
        let texts_of_prompt = Histogram::new([1.0, 2.0, 5.0, 10.0, 20.0]);
        let help = "Texts of a prompt, all of which have ended";
        registry.register("vllm:request_params_n", help, texts_of_prompt.clone());
        let requests = Family::default();
        registry.register("http_requests", "HTTP requests by path, method and class of the status", requests.clone());
        registry.register_collector(Box::new(EngineMetrics { engine }));
        Self {
            registry,
            first_token,
            between_tokens,
            whole,
            success,
            prompt_tokens,
            generation_tokens,
            longest_text,
            texts_of_prompt,
            max_tokens,
            requests,
        }
    }

    /// Counts an HTTP request by the path of its route; `none` where there is no such route.
    pub(crate) fn request(&self, path: &str, method: &Method, status: StatusCode) {
        let class = format!("{}xx", status.as_u16() / 100);
        // A client may invent methods, and each label is kept for good.
        let method = if METHODS.contains(method) { method.as_str() } else { "other" };
        let labels = [("handler", path.to_owned()), ("method", method.to_owned()), ("status", class)];
        self.requests.get_or_create(&labels).inc();
    }

    /// Records how many tokens a text may have.
    pub(crate) fn max_tokens(&self, tokens: usize) {
        self.max_tokens.observe(tokens as f64);
    }

    /// Records the tokens of a text that has ended.
    pub(crate) fn sizes(&self, prompt: usize, generated: usize) {
        self.prompt_tokens.observe(prompt as f64);
        self.generation_tokens.observe(generated as f64);
    }

    /// Records that all `n` texts of a prompt have ended, the longest with so many tokens.
    pub(crate) fn prompt_ended(&self, n: usize, longest: usize) {
        self.texts_of_prompt.observe(n as f64);
        self.longest_text.observe(longest as f64);
    }

    pub(crate) fn first_token(&self, time: Duration) {
        self.first_token.observe(time.as_secs_f64());
    }

    pub(crate) fn next_token(&self, time: Duration) {
        self.between_tokens.observe(time.as_secs_f64());
    }

    /// Counts a text that has ended: stop, length, abort (the client left) or error.
    pub(crate) fn finished(&self, reason: &'static str, arrived: Instant) {
        self.whole.observe(arrived.elapsed().as_secs_f64());
        self.success.get_or_create(&[("finished_reason", reason)]).inc();
    }

    /// All metrics as text.
    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// vLLM's buckets for numbers of tokens: 1, 2, 5, 10, 20, 50 and so on, up to the longest sequence.
fn token_buckets(longest: usize) -> Vec<f64> {
    let decades = (0..).map(|decade| 10_f64.powi(decade));
    let buckets = decades.flat_map(|decade| [decade, 2.0 * decade, 5.0 * decade]);
    buckets.take_while(|bucket| *bucket <= longest as f64).collect()
}

/// The engine's own counters and gauges, read at each scrape.
struct EngineMetrics {
    engine: Arc<dyn EngineClient>,
}

impl fmt::Debug for EngineMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineMetrics").finish_non_exhaustive()
    }
}

/// One rank's value of a metric.
type OfRank = fn(&RankMetrics) -> f64;

impl Collector for EngineMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let now = self.engine.metrics();
        let limits = self.engine.limits();
        encode_gauges(&now, &limits, &mut encoder)?;
        encode_counters(&now, &mut encoder)?;
        encode_histograms(&now, &mut encoder)?;
        encode_adapters(&now, &limits, &mut encoder)?;
        encode_cache(&limits, &mut encoder)?;
        encode_ranks(&now, &mut encoder)
    }
}

/// Requests, the use of the cache, and the pages of each rank.
fn encode_gauges(now: &Metrics, limits: &Limits, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let gauges = [
        ("vllm:num_requests_running", "Requests in the current steps", now.running as f64),
        ("vllm:num_requests_waiting", "Requests that wait for pages or for a place", now.waiting as f64),
        (
            "vllm:kv_cache_usage_perc",
            "Share of the cache's pages that running requests hold (1 is all), in the attention replica and of the kind of which fewest are left",
            limits.usage(&now.ranks),
        ),
    ];
    for (name, help, value) in gauges {
        encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
    }
    let mut metric = encoder.encode_descriptor("ringspan:kv_pages", "Pages of each rank", None, MetricType::Gauge)?;
    metric.encode_gauge(&(limits.pages_per_rank as f64))?;
    let help = "Pages of each rank for sliding-window layers";
    let mut metric = encoder.encode_descriptor("ringspan:kv_window_pages", help, None, MetricType::Gauge)?;
    metric.encode_gauge(&(limits.window_pages_per_rank as f64))
}

/// Tokens and steps since the engine has started.
fn encode_counters(now: &Metrics, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counters = [
        ("vllm:prompt_tokens", "Prompt tokens that were computed or found in the cache", now.prompt_tokens),
        ("vllm:generation_tokens", "Generated tokens", now.generation_tokens),
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache",
            now.prefix_cache_queries,
        ),
        ("vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache", now.prefix_cache_hits),
        ("vllm:num_preemptions", "Requests that were put back because pages ran out", now.preemptions),
        ("vllm:spec_decode_num_drafts", "Times that the next tokens of a text were guessed", now.spec_decode_drafts),
        ("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed", now.spec_decode_draft_tokens),
        (
            "vllm:spec_decode_num_accepted_tokens",
            "Tokens that were guessed and then drawn",
            now.spec_decode_accepted_tokens,
        ),
        ("ringspan:engine_steps", "Steps of the engine", now.steps),
    ];
    for (name, help, value) in counters {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        metric.encode_counter::<[(&str, &str); 0], _, u64>(&value, None)?;
    }
    Ok(())
}

/// The metrics that each rank has a value of.
fn encode_ranks(now: &Metrics, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let of_ranks: [(&str, &str, MetricType, OfRank); 6] = [
        ("ringspan:kv_pages_used", "Pages that running requests hold", MetricType::Gauge, |rank| {
            rank.pages_used as f64
        }),
        ("ringspan:kv_pages_cached", "Pages that only the prefix cache holds", MetricType::Gauge, |rank| {
            rank.pages_cached as f64
        }),
        (
            "ringspan:kv_window_pages_used",
            "Pages of sliding-window layers that running requests hold",
            MetricType::Gauge,
            |rank| rank.window_pages_used as f64,
        ),
        (
            "ringspan:kv_window_pages_cached",
            "Pages of sliding-window layers that only the prefix cache holds",
            MetricType::Gauge,
            |rank| rank.window_pages_cached as f64,
        ),
        ("ringspan:transfer_bytes", "Bytes that the rank has sent to others", MetricType::Counter, |rank| {
            rank.transfer_bytes as f64
        }),
        ("ringspan:wait_seconds", "Seconds that the rank has waited for others", MetricType::Counter, |rank| {
            rank.wait_seconds
        }),
    ];
    for (name, help, kind, value) in of_ranks {
        let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
        for (rank, metrics) in now.ranks.iter().enumerate() {
            let labels = [("rank", rank.to_string())];
            let mut of_rank = metric.encode_family(&labels)?;
            match kind {
                MetricType::Counter => of_rank.encode_counter::<[(&str, &str); 0], _, u64>(&value(metrics), None)?,
                _ => of_rank.encode_gauge(&value(metrics))?,
            }
        }
    }
    Ok(())
}

/// The phases of requests, and the sizes of steps.
fn encode_histograms(now: &Metrics, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let of = &now.histograms;
    let histograms: [(&str, &str, &EngineHistogram); 5] = [
        ("vllm:request_queue_time_seconds", "Seconds that a request waits before its prefill", &of.queue_time),
        (
            "vllm:request_prefill_time_seconds",
            "Seconds from the beginning of a request's prefill to its first token",
            &of.prefill_time,
        ),
        ("vllm:request_decode_time_seconds", "Seconds from a request's first token to its end", &of.decode_time),
        (
            "vllm:request_inference_time_seconds",
            "Seconds from the beginning of a request's prefill to its end",
            &of.inference_time,
        ),
        ("vllm:iteration_tokens_total", "Tokens that a step reads of prompts and generates", &of.step_tokens),
    ];
    for (name, help, histogram) in histograms {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let buckets: Vec<(f64, u64)> = histogram.buckets().collect();
        metric.encode_histogram::<[(&str, &str); 0]>(histogram.sum(), histogram.count(), &buckets, None)?;
    }
    Ok(())
}

/// Encodes the adapters of running and of waiting requests as labels. The value is the current time, by which routers find the newest
/// labels.
fn encode_adapters(now: &Metrics, limits: &Limits, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let listed = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(",");
    let labels = [
        // Each request of a step may have another adapter.
        ("max_lora", limits.max_running.to_string()),
        ("running_lora_adapters", listed(&now.running_adapters)),
        ("waiting_lora_adapters", listed(&now.waiting_adapters)),
    ];
    let help = "Adapters of the requests that run and wait, at this time in seconds since 1970";
    let mut metric = encoder.encode_descriptor("vllm:lora_requests_info", help, None, MetricType::Gauge)?;
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    metric.encode_family(&labels)?.encode_gauge(&time)
}

/// The settings of the cache as labels, with vLLM's names for them and its way to write values.
fn encode_cache(limits: &Limits, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let dtype = match limits.kv_dtype {
        None => "auto",
        Some(KvDtype::F32) => "float32",
        Some(KvDtype::Bf16) => "bfloat16",
        Some(KvDtype::Q8_0) => "q8_0",
    };
    let window = limits.window_lookback.filter(|_| !limits.has_full_layers);
    let labels = [
        ("engine", "0".to_owned()),
        ("block_size", limits.page_size.to_string()),
        ("cache_dtype", dtype.to_owned()),
        ("enable_prefix_caching", if limits.prefix_cache { "True" } else { "False" }.to_owned()),
        // This is vLLM's label, although the pages are in the memory of CPUs. Times `block_size`, it is the tokens that the cache holds.
        ("num_gpu_blocks", limits.pages_per_rank.saturating_mul(limits.attn_dp * limits.cp).to_string()),
        ("sliding_window", window.map_or("None".to_owned(), |lookback| (lookback + 1).to_string())),
    ];
    let help = "Settings of the cache of keys and values, as labels";
    let mut metric = encoder.encode_descriptor("vllm:cache_config_info", help, None, MetricType::Gauge)?;
    metric.encode_family(&labels)?.encode_gauge(&1.0)
}
